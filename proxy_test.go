package recovery

import (
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// proxy is a TCP proxy in front of a Redis, on loopback, for one worker. It does what networks do: it loses answers after the call was
// executed, delays, holds traffic up and delivers it later, and cuts the worker off.
type proxy struct {
	addr   string
	target string
	listen net.Listener
	pumps  sync.WaitGroup

	mu    sync.Mutex // guards what follows
	mode  proxyMode
	delay time.Duration
	freed chan struct{} // closed when the mode changes
	conns map[net.Conn]bool
	ended bool
	lost  int // answers that were dropped
}

type proxyMode int

const (
	proxyPasses proxyMode = iota
	proxyDrops            // calls go through; instead of an answer the connection breaks
	proxyDelays           // both ways
	proxyHolds            // nothing moves until the mode changes, and then everything
	proxyCuts             // connections break, and no new one is answered
)

func startProxy(t *testing.T, target string) *proxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	p := &proxy{addr: l.Addr().String(), target: target, listen: l, conns: map[net.Conn]bool{}, freed: make(chan struct{})}
	p.pumps.Add(1)
	go p.accept()
	t.Cleanup(p.end)
	return p
}

func (p *proxy) accept() {
	defer p.pumps.Done()
	for {
		in, err := p.listen.Accept()
		if err != nil {
			return
		}
		if mode, _, _ := p.now(); mode == proxyCuts {
			in.Close()
			continue
		}
		out, err := net.Dial("tcp", p.target)
		if err != nil {
			in.Close()
			continue
		}
		if !p.enter(in, out) {
			return
		}
		p.pumps.Add(2)
		go p.pump(in, out, false)
		go p.pump(out, in, true)
	}
}

func (p *proxy) enter(conns ...net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range conns {
		if p.ended {
			c.Close()
		} else {
			p.conns[c] = true
		}
	}
	return !p.ended
}

func (p *proxy) leave(conns ...net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range conns {
		c.Close()
		delete(p.conns, c)
	}
}

func (p *proxy) now() (proxyMode, time.Duration, chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.mode, p.delay, p.freed
}

// pump moves bytes one way.
func (p *proxy) pump(from, to net.Conn, answers bool) {
	defer p.pumps.Done()
	defer p.leave(from, to)
	buf := make([]byte, 32<<10)
	for {
		n, err := from.Read(buf)
		if n > 0 && !p.forward(to, buf[:n], answers) {
			return
		}
		if err != nil {
			return
		}
	}
}

func (p *proxy) forward(to net.Conn, b []byte, answers bool) bool {
	for {
		mode, delay, freed := p.now()
		switch mode {
		case proxyHolds:
			<-freed // what the caller sent is on its way, whether or not the caller still waits
			continue
		case proxyDelays:
			timer := time.NewTimer(delay)
			select {
			case <-timer.C:
			case <-freed:
				timer.Stop()
			}
		case proxyDrops:
			if answers {
				p.mu.Lock()
				p.lost++
				p.mu.Unlock()
				return false
			}
		case proxyCuts:
			return false
		}
		_, err := to.Write(b)
		return err == nil
	}
}

// set changes what the proxy does, from now on.
func (p *proxy) set(mode proxyMode, delay time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mode, p.delay = mode, delay
	close(p.freed)
	p.freed = make(chan struct{})
	if mode == proxyCuts {
		for c := range p.conns {
			c.Close()
		}
	}
}

func (p *proxy) dropped() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.lost
}

func (p *proxy) end() {
	p.listen.Close()
	p.mu.Lock()
	p.ended = true
	p.mu.Unlock()
	p.set(proxyCuts, 0)
	p.pumps.Wait()
}
