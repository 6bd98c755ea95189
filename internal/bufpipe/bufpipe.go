// Package bufpipe makes an in-memory connection behave like a socket: a write returns before the other side has read it.
//
// net.Pipe has no buffer. A server that answers the first command of a pipeline while the client is still writing the last
// one then waits for ever, and so does the client. With a socket the kernel's buffers hide that.
package bufpipe

import (
	"net"
	"sync"
)

// conn buffers writes without limit.
type conn struct {
	net.Conn

	mu      sync.Mutex
	pending []byte
	more    *sync.Cond
	err     error
	closed  bool
}

// New returns c with buffered writes. Closing it closes c; what was not yet read by the other side is lost.
func New(c net.Conn) net.Conn {
	b := &conn{Conn: c}
	b.more = sync.NewCond(&b.mu)
	go b.pump()
	return b
}

// Write never blocks.
func (c *conn) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return 0, net.ErrClosed
	}
	if c.err != nil {
		return 0, c.err
	}
	c.pending = append(c.pending, p...)
	c.more.Signal()
	return len(p), nil
}

// Close ends the pump, too.
func (c *conn) Close() error {
	c.mu.Lock()
	c.closed = true
	c.more.Signal()
	c.mu.Unlock()
	return c.Conn.Close()
}

func (c *conn) pump() {
	for {
		c.mu.Lock()
		for len(c.pending) == 0 && !c.closed {
			c.more.Wait()
		}
		p := c.pending
		c.pending = nil
		closed := c.closed
		c.mu.Unlock()
		if closed {
			return
		}
		if _, err := c.Conn.Write(p); err != nil {
			c.mu.Lock()
			c.err = err
			c.mu.Unlock()
			return
		}
	}
}
