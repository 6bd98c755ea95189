package recoverytest

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"sync"
)

type linkState int

const (
	linkUp     linkState = iota
	linkFrozen           // nothing passes, nothing breaks
	linkParted           // connections break; may be mended
	linkCut              // for good
)

// link is one worker's way to Redis. Faults happen to its connections, not to its calls: so every client and every command is hit, and
// the client does what it does when a real network fails.
type link struct {
	env *Env

	mu      sync.Mutex // guards what follows
	state   linkState
	changed chan struct{} // closed, and replaced, when state changes
	losing  int           // replies to lose
	conns   map[*conn]bool
}

var errDown = errors.New("recoverytest: the worker is cut off")

func (l *link) set(s linkState) {
	l.mu.Lock()
	if l.state == linkCut {
		l.mu.Unlock()
		return
	}
	l.state = s
	close(l.changed)
	l.changed = make(chan struct{})
	var broken []*conn
	if s == linkParted || s == linkCut {
		for c := range l.conns {
			broken = append(broken, c)
		}
	}
	l.mu.Unlock()
	for _, c := range broken {
		_ = c.Close()
	}
}

func (l *link) lose(n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.losing += n
}

// losesNow takes one of the replies to be lost.
func (l *link) losesNow() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.losing == 0 {
		return false
	}
	l.losing--
	return true
}

// pass waits while the worker is frozen, and refuses a dead one.
func (l *link) pass(ctx context.Context) error {
	for {
		l.mu.Lock()
		state, changed := l.state, l.changed
		l.mu.Unlock()
		switch state {
		case linkCut:
			return errDown
		case linkFrozen:
		default:
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// dial always succeeds; when the link is down, with a connection that is broken already. A dial that failed would make go-redis try again in the
// background, for ever, and print to stderr.
func (l *link) dial(ctx context.Context) (net.Conn, error) {
	if err := l.pass(ctx); err != nil && !errors.Is(err, errDown) {
		return nil, err
	}
	l.mu.Lock()
	down := l.state != linkUp
	l.mu.Unlock()
	if down {
		broken, other := net.Pipe()
		_, _ = broken.Close(), other.Close()
		return broken, nil
	}
	inner, err := l.env.memory()
	if err != nil {
		return nil, err
	}
	c := &conn{Conn: inner, link: l, closed: make(chan struct{})}
	l.mu.Lock()
	l.conns[c] = true
	down = l.state == linkParted || l.state == linkCut
	l.mu.Unlock()
	if down { // meanwhile: whoever cut the link has not seen this connection
		_ = c.Close()
	}
	return c, nil
}

// conn is a connection of a link.
type conn struct {
	net.Conn
	link *link

	once   sync.Once
	closed chan struct{}

	mu   sync.Mutex // guards what follows
	mute bool       // the reply to what was written last is lost
}

func (c *conn) Write(p []byte) (int, error) {
	if err := c.wait(); err != nil {
		return 0, err
	}
	if !isHandshake(p) && c.link.losesNow() {
		c.mu.Lock()
		c.mute = true
		c.mu.Unlock()
	}
	n, err := c.Conn.Write(p)
	if err != nil {
		err = c.broken(err)
	}
	return n, err
}

func (c *conn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if err != nil {
		return n, c.broken(err)
	}
	if err := c.wait(); err != nil { // it arrived while the process was frozen: it is read after the thaw
		return 0, err
	}
	c.mu.Lock()
	mute := c.mute
	c.mu.Unlock()
	if mute { // executed, and the answer is here: that is when the connection breaks
		_ = c.Close()
		return 0, io.EOF
	}
	return n, nil
}

// isHandshake reports that a client is only introducing itself.
func isHandshake(p []byte) bool {
	head := bytes.ToLower(p[:min(len(p), 40)])
	return bytes.Contains(head, []byte("hello")) || bytes.Contains(head, []byte("client"))
}

// broken makes the error what a client sees when its peer is gone.
func (c *conn) broken(err error) error {
	select {
	case <-c.closed:
		return io.EOF
	default:
		return err
	}
}

// wait blocks while the link is frozen.
func (c *conn) wait() error {
	for {
		c.link.mu.Lock()
		state, changed := c.link.state, c.link.changed
		c.link.mu.Unlock()
		switch state {
		case linkUp:
			return nil
		case linkFrozen:
		default:
			return io.EOF
		}
		select {
		case <-changed:
		case <-c.closed:
			return io.EOF
		}
	}
}

func (c *conn) Close() error {
	err := error(nil)
	c.once.Do(func() {
		close(c.closed)
		c.link.mu.Lock()
		delete(c.link.conns, c)
		c.link.mu.Unlock()
		err = c.Conn.Close()
	})
	return err
}
