package main

import (
	"io"
	"net"
	"time"
)

// proxy stands before Redis and adds half a round trip each way, without holding back what follows.
type proxy struct {
	l     net.Listener
	to    string
	delay time.Duration
}

func startProxy(to string, roundTrip time.Duration) (*proxy, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	p := &proxy{l: l, to: to, delay: roundTrip / 2}
	go p.accept()
	return p, nil
}

func (p *proxy) addr() string { return p.l.Addr().String() }
func (p *proxy) stop()        { p.l.Close() }

func (p *proxy) accept() {
	for {
		in, err := p.l.Accept()
		if err != nil {
			return
		}
		out, err := net.Dial("tcp", p.to)
		if err != nil {
			in.Close()
			continue
		}
		go p.pump(in, out)
		go p.pump(out, in)
	}
}

// chunk is some bytes and when they are due.
type chunk struct {
	bytes []byte
	due   time.Time
}

func (p *proxy) pump(from, to net.Conn) {
	defer from.Close()
	defer to.Close()
	queue := make(chan chunk, 4096)
	go func() {
		defer close(queue)
		for {
			b := make([]byte, 64<<10)
			n, err := from.Read(b)
			if n > 0 {
				queue <- chunk{b[:n], time.Now().Add(p.delay)}
			}
			if err != nil {
				return
			}
		}
	}()
	for c := range queue {
		time.Sleep(time.Until(c.due))
		if _, err := to.Write(c.bytes); err != nil {
			go func() { // let the reader end
				for range queue {
				}
			}()
			_, _ = io.Copy(io.Discard, from)
			return
		}
	}
}
