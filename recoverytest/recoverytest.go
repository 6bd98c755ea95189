// Package recoverytest is for the tests of programs that use package recovery: a Redis in memory, workers that can be crashed, frozen and cut off,
// an Enqueuer that remembers, and questions about what became of a job.
//
// Inside of testing/synctest an hour passes in milliseconds, and a crash test takes no time at all:
//
//	func TestMailSurvivesACrash(t *testing.T) {
//		synctest.Test(t, func(t *testing.T) {
//			env := recoverytest.New(t)
//			doomed, _ := env.Start("doomed"), env.Start("peer")
//			_, err := doomed.Track(context.Background(), recovery.Job{ID: "mail-1", Payload: []byte("to: ann")})
//			if err != nil {
//				t.Fatal(err)
//			}
//			doomed.Crash()
//			env.RequireHandedBack("mail-1")
//		})
//	}
//
// It works outside of a bubble, too; then time is real, so set short intervals with [WithConfig]. Inside of one, do not use t.Context of the outer
// test, and let everything that you started end before the bubble does.
package recoverytest

import (
	"context"
	"io"
	"log/slog"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/crashsafe/recovery"
	"github.com/crashsafe/recovery/internal/bufpipe"
	"github.com/redis/go-redis/v9"
)

// Env is one Redis and the fleet on it. Its methods are safe for concurrent use.
type Env struct {
	Redis    *miniredis.Miniredis // the server, for what this package has no word for
	Enqueuer *Enqueuer            // of every worker that Start makes, unless WithEnqueuer says otherwise

	t   testing.TB
	cfg recovery.Config
	enq recovery.Enqueuer

	mu         sync.Mutex // guards what follows
	links      []*link
	workers    []*Worker
	handedBack []recovery.Orphan // by any worker, to whatever Enqueuer
}

// Option is an option of New.
type Option func(*Env)

// WithConfig is what Start gives to recovery.New, except for the WorkerName. A Logger that is nil discards.
func WithConfig(cfg recovery.Config) Option { return func(e *Env) { e.cfg = cfg } }

// WithEnqueuer is what orphans go to instead of Env.Enqueuer.
func WithEnqueuer(enq recovery.Enqueuer) Option { return func(e *Env) { e.enq = enq } }

// New starts a Redis in memory. Everything ends with the test.
func New(t testing.TB, opts ...Option) *Env {
	t.Helper()
	e := &Env{t: t, Redis: miniredis.NewMiniRedis(), Enqueuer: &Enqueuer{}}
	e.enq = e.Enqueuer
	for _, o := range opts {
		o(e)
	}
	e.Redis.ClockTTL(true) // keys expire by the clock of the test, which synctest may fake
	t.Cleanup(e.close)
	return e
}

// close ends the workers as a crash would, and the server.
func (e *Env) close() {
	e.mu.Lock()
	workers, links := e.workers, e.links
	e.mu.Unlock()
	for _, w := range workers {
		w.link.set(linkCut)
		ended, cancel := context.WithCancel(context.Background())
		cancel()
		_ = w.Recoverer.Stop(ended)
		_ = w.rdb.Close()
	}
	for _, l := range links {
		l.set(linkCut)
	}
	e.Redis.Close()
}

// Client returns a client of the Redis that is never cut off, for the code under test and for looking. It is closed with the test.
func (e *Env) Client() *redis.Client {
	rdb := e.client(e.newLink())
	e.t.Cleanup(func() { _ = rdb.Close() })
	return rdb
}

func (e *Env) newLink() *link {
	l := &link{env: e, changed: make(chan struct{}), conns: make(map[*conn]bool)}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.links = append(e.links, l)
	return l
}

// client is set up for synctest: a numeric address, which nobody looks up, and connections inside of the process.
func (e *Env) client(l *link) *redis.Client {
	return redis.NewClient(&redis.Options{
		Addr:   "127.0.0.1:6379", // never dialled: Dialer decides
		Dialer: func(ctx context.Context, _, _ string) (net.Conn, error) { return l.dial(ctx) },
		// Enough, also on one core: whoever waits for a connection uses a timer that go-redis keeps for all clients, and synctest refuses one that was
		// made in another bubble.
		PoolSize: 1000,
	})
}

// Worker is a Recoverer, and what can happen to its process.
type Worker struct {
	*recovery.Recoverer
	rdb  *redis.Client
	link *link
}

// Start makes a worker with that name and starts it. The test fails if that is not possible.
func (e *Env) Start(name string) *Worker {
	e.t.Helper()
	cfg := e.cfg
	cfg.WorkerName = name
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.NewTextHandler(io.Discard, nil))
	}
	told := cfg.Events.HandedBack
	cfg.Events.HandedBack = func(i recovery.HandedBackInfo) {
		e.mu.Lock()
		e.handedBack = append(e.handedBack, i.Orphan)
		e.mu.Unlock()
		if told != nil {
			told(i)
		}
	}
	w := &Worker{link: e.newLink()}
	w.rdb = e.client(w.link)
	r, err := recovery.New(w.rdb, guarded(e.enq, w.link), cfg)
	if err == nil {
		err = r.Start(context.Background())
	}
	if err != nil {
		e.t.Fatalf("recoverytest: start worker %q: %v", name, err)
	}
	w.Recoverer = r
	e.mu.Lock()
	defer e.mu.Unlock()
	e.workers = append(e.workers, w)
	return w
}

// Crash is kill -9: its connections break, and from now on it does nothing that Redis or the Enqueuer could see. Goroutines of the test that hold
// leases of it go on, as no test can stop them; their calls fail.
func (w *Worker) Crash() { w.link.set(linkCut) }

// Freeze is SIGSTOP, or a machine that swaps: what it sends does not arrive and what is sent to it is not read, until Thaw. Longer than
// OrphanThreshold, and it is declared dead; thawed, it is a zombie, and is told so.
func (w *Worker) Freeze() { w.link.set(linkFrozen) }

// Thaw is SIGCONT.
func (w *Worker) Thaw() { w.link.set(linkUp) }

// Partition cuts the worker off from Redis: connections break, and new ones are refused, until Heal. Unlike after Crash its Enqueuer can still be called.
func (w *Worker) Partition() { w.link.set(linkParted) }

// Heal ends a Partition.
func (w *Worker) Heal() { w.link.set(linkUp) }

// LoseReply lets Redis execute the next n things that the worker sends, each on whatever connection it comes, and breaks the connection instead of
// answering. The client repeats what it sent, or tells its caller, as it does in life.
func (w *Worker) LoseReply(n int) { w.link.lose(n) }

// Advance lets time pass: fake time inside of synctest, real time outside.
func (e *Env) Advance(d time.Duration) { time.Sleep(d) }

// gate keeps a crashed or frozen worker from its Enqueuer.
type gate struct {
	enq  recovery.Enqueuer
	link *link
}

func (g *gate) Enqueue(ctx context.Context, o recovery.Orphan) error {
	if err := g.link.pass(ctx); err != nil {
		return err
	}
	return g.enq.Enqueue(ctx, o)
}

// batchGate is gate for a BatchEnqueuer.
type batchGate struct {
	gate
	batch recovery.BatchEnqueuer
}

func (g *batchGate) EnqueueAll(ctx context.Context, os []recovery.Orphan) []error {
	if err := g.link.pass(ctx); err != nil {
		errs := make([]error, len(os))
		for i := range errs {
			errs[i] = err
		}
		return errs
	}
	return g.batch.EnqueueAll(ctx, os)
}

// orphans are the jobs that were handed back: what Env.Enqueuer has accepted, or, with another Enqueuer, what the workers have told.
func (e *Env) orphans() []recovery.Orphan {
	if e.enq == recovery.Enqueuer(e.Enqueuer) {
		return e.Enqueuer.Orphans()
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Clone(e.handedBack)
}

// guarded puts enq behind the worker's gate. A ListQueue goes through the worker's own connections, and needs none.
func guarded(enq recovery.Enqueuer, l *link) recovery.Enqueuer {
	switch enq := enq.(type) {
	case *recovery.ListQueue:
		return enq
	case recovery.BatchEnqueuer:
		return &batchGate{gate{enq, l}, enq}
	}
	return &gate{enq, l}
}

// memory is a connection inside of the process that behaves like a socket.
func (e *Env) memory() (net.Conn, error) {
	c, err := e.Redis.Dial()
	if err != nil {
		return nil, err
	}
	return bufpipe.New(c), nil
}
