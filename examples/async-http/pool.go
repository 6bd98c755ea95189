package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync"
	"time"

	"github.com/crashsafe/recovery"
	"github.com/redis/go-redis/v9"
)

// Answer is what became of a request.
type Answer struct {
	Request Request
	Status  int
	Header  http.Header
	Body    []byte
	Err     error // there is no answer: refused, timed out, too large. The request may have had its effect all the same
	Fence   int64 // grows with every run of the request: a store that keeps it can refuse what comes late
}

// Callback receives an answer. An error gives the request back, to be sent again, unless DoneFirst is set: then it is only logged.
type Callback func(ctx context.Context, a Answer) error

// Config is the setting of a Pool.
type Config struct {
	Recovery recovery.Config
	List     string        // requests wait here, and go back to here
	Places   int           // requests under way at a time, at least 2: one of them waits at the list
	Timeout  time.Duration // of a request that has none of its own
	MaxBody  int64         // of an answer, in bytes
	Callback Callback

	// DoneFirst decides what a crash around the callback does. Off: Confirm, callback, Done. The callback runs at least once, and a crash before
	// Done runs it again after the request was sent again. On: Done, callback. It runs at most once, and a crash before it loses the answer.
	DoneFirst bool

	// At is told where a request is. It may block. Optional.
	At func(point string, l *recovery.Lease, err error)
}

// Points of a request, in their order.
const (
	sending   = "sending"
	answered  = "answered"
	confirmed = "confirmed" // by Confirm
	called    = "called"    // the callback has returned nil
	done      = "done"      // by Done; with DoneFirst it comes before called
	lost      = "lost"      // somebody else has the request
	givenBack = "given back"
)

// Pool sends requests, each of them tracked: a process that dies gives its requests back to the list.
type Pool struct {
	Config
	r       *recovery.Recoverer
	queue   *recovery.ListQueue
	client  *http.Client
	places  chan struct{}
	running sync.WaitGroup // requests and the loop
}

// NewPool does not talk to Redis yet.
func NewPool(rdb redis.UniversalClient, c Config) (*Pool, error) {
	if c.Places < 2 || c.Callback == nil || c.Timeout <= 0 || c.MaxBody <= 0 {
		return nil, fmt.Errorf("pool: Places is %d, at least 2; Timeout is %v and MaxBody %d, more than 0; Callback must be set", c.Places, c.Timeout, c.MaxBody)
	}
	if c.At == nil {
		c.At = func(string, *recovery.Lease, error) {}
	}
	transport := &http.Transport{Proxy: http.ProxyFromEnvironment, MaxIdleConnsPerHost: c.Places, DisableCompression: true}
	p := &Pool{Config: c, places: make(chan struct{}, c.Places),
		queue: recovery.NewListQueue(c.List, recovery.ElementFormat(format{})),
		client: &http.Client{Transport: transport,
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}} // one request, one answer
	var err error
	p.r, err = recovery.New(rdb, p.queue, c.Recovery)
	return p, err
}

// Start joins the fleet and begins to take requests from the list.
func (p *Pool) Start(ctx context.Context) error {
	if err := p.r.Start(ctx); err != nil {
		return err
	}
	p.running.Go(p.take)
	return nil
}

// Send tracks a request and sends it. When it returns nil the request is recorded, and outlives this process; its answer comes to the
// Callback, here or elsewhere. It blocks while all places are taken. recovery.ErrNotRunning: the pool is quiet; push it to the list.
func (p *Pool) Send(ctx context.Context, r Request) error {
	job, err := r.job()
	if err != nil {
		return err
	}
	select {
	case p.places <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	// The lease's context descends from the one given to Track, and the request must not end with whoever asked for it.
	l, err := p.r.Track(context.WithoutCancel(ctx), job)
	if err != nil {
		<-p.places
		return err
	}
	p.running.Go(func() { p.handle(l) })
	return nil
}

// take runs requests from the list until the pool is quiet.
func (p *Pool) take() {
	for {
		p.places <- struct{}{} // before Fetch: what is fetched and waits here could be sent by a peer
		leases, err := p.r.Fetch(context.Background(), p.queue, 1)
		if len(leases) == 1 {
			p.running.Go(func() { p.handle(leases[0]) })
			continue
		}
		<-p.places
		if errors.Is(err, recovery.ErrNotRunning) {
			return
		}
		if !errors.Is(err, recovery.ErrLost) { // Redis is away
			time.Sleep(100 * time.Millisecond)
		}
	}
}

// Quiet makes the pool refuse new requests, from Send and from the list. Those under way go on.
func (p *Pool) Quiet() { p.r.Quiet() }

// Shutdown is Quiet, then waiting for the requests under way until ctx ends. Those that are left then are broken off, and handed back to the
// list. It returns ctx's error if there were any.
func (p *Pool) Shutdown(ctx context.Context) error {
	err := p.r.Stop(ctx)
	// Stop waits for leases. With DoneFirst a callback may run after its lease has ended.
	ended := make(chan struct{})
	go func() { p.running.Wait(); close(ended) }()
	select {
	case <-ended:
		return err
	case <-time.After(time.Second):
		return errors.Join(err, errors.New("pool: a callback has not returned"))
	}
}

// handle runs one request, from a place to its end.
func (p *Pool) handle(l *recovery.Lease) {
	defer func() { <-p.places }()
	r, err := decode(l.Payload())
	if err != nil { // Decode and Send have read it before
		p.At(done, l, errors.Join(err, l.Done()))
		return
	}
	p.At(sending, l, nil)
	a := p.exchange(l.Context(), r)
	a.Fence = l.Fence()
	p.At(answered, l, a.Err)
	if p.DoneFirst {
		p.doneFirst(l, a)
	} else {
		p.callFirst(l, a)
	}
}

// exchange sends and receives.
func (p *Pool) exchange(ctx context.Context, r Request) Answer {
	a := Answer{Request: r}
	timeout := r.Timeout
	if timeout == 0 {
		timeout = p.Timeout
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	out, err := r.http(ctx)
	if err != nil {
		a.Err = err
		return a
	}
	in, err := p.client.Do(out)
	if err != nil {
		a.Err = err
		return a
	}
	defer in.Body.Close()
	a.Status, a.Header = in.StatusCode, in.Header
	a.Body, a.Err = io.ReadAll(io.LimitReader(in.Body, p.MaxBody+1))
	if int64(len(a.Body)) > p.MaxBody {
		a.Body, a.Err = nil, fmt.Errorf("answer to %q has more than %d bytes", r.ID, p.MaxBody)
	}
	return a
}

// callFirst asks Redis whether the request is still ours, and only then calls back. A request that was lost while it was under way has an answer,
// or an error because it was broken off; somebody else has it, and that one's answer counts.
func (p *Pool) callFirst(l *recovery.Lease, a Answer) {
	if err := settle(func() error { return l.Confirm(l.Context()) }); err != nil {
		p.At(lost, l, err)
		return
	}
	p.At(confirmed, l, nil)
	// From here to Done is the window: see README.md.
	if err := p.Callback(l.Context(), a); err != nil {
		p.At(givenBack, l, errors.Join(err, settle(l.Release)))
		return
	}
	p.At(called, l, nil)
	if err := settle(l.Done); err != nil {
		p.At(lost, l, err) // after the callback: it runs elsewhere once more, with a larger fence
		return
	}
	p.At(done, l, nil)
}

// doneFirst ends the lease, and only then calls back.
func (p *Pool) doneFirst(l *recovery.Lease, a Answer) {
	if err := settle(l.Done); err != nil {
		p.At(lost, l, err)
		return
	}
	p.At(done, l, nil)
	// Done has ended the lease's context.
	p.At(called, l, p.Callback(context.WithoutCancel(l.Context()), a))
}

const retryAfter = 50 * time.Millisecond

// settle asks until there is an answer: nil, or ErrLost. Any other error means that Redis did not tell, and not to know is no reason to
// call back; or, of Release, that the request could not be given back and is still ours. It ends when Redis answers, or with the Recoverer, which gives up its leases.
func settle(ask func() error) error {
	for {
		err := ask()
		if err == nil || errors.Is(err, recovery.ErrLost) {
			return err
		}
		time.Sleep(retryAfter)
	}
}
