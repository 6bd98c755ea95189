package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/crashsafe/recovery"
	"github.com/redis/go-redis/v9"
)

// setup is what the commands share.
type setup struct {
	redis       string
	namespace   string
	name        string
	concurrency int
	threshold   time.Duration
	limit       int
	pace        time.Duration
	halt        string
}

func (s setup) prefix() string { return "saga:" + s.namespace + ":" }
func (s setup) list() string   { return s.prefix() + "queue" }

// report is a line on a worker's stdout: where a saga is.
type report struct {
	Point  string
	Run    Run
	Next   int
	Reason string `json:",omitempty"`
}

// Points that are not of a run's own.
const (
	ready   = "ready"   // the worker has joined
	halted  = "halted"  // the run waits here, by -halt
	dropped = "dropped" // the run has no say any more
)

// worker is one process.
type worker struct {
	setup
	store *store
	steps []Step
	halts map[string]string // saga -> point
	going chan struct{}     // closed when halted runs may go on

	mu  sync.Mutex // guards out
	out *json.Encoder
}

// runWorker runs sagas until SIGTERM or the end of stdin.
func runWorker(s setup, rdb *redis.Client) error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	w := &worker{setup: s, store: &store{rdb: rdb, prefix: s.prefix(), worker: s.name}, halts: map[string]string{},
		going: make(chan struct{}), out: json.NewEncoder(os.Stdout)}
	w.steps = orderSteps(w.store)
	for _, h := range strings.Split(s.halt, ",") {
		saga, point, _ := strings.Cut(h, "=")
		w.halts[saga] = point
	}
	go w.listen(stop)

	queue := recovery.NewListQueue(s.list(), recovery.ElementFormat(format{}))
	r, err := recovery.New(rdb, queue, recovery.Config{
		Namespace:         s.namespace,
		WorkerName:        s.name,
		HeartbeatInterval: s.threshold / 5,
		OrphanThreshold:   s.threshold,
		EnqueueTimeout:    s.threshold, // a job whose sweeper is killed, too, waits for twice that: 21s by default
		MaxRecoveries:     s.limit,
		Logger:            slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError})),
	})
	if err != nil {
		return err
	}
	if err := r.Start(ctx); err != nil {
		return err
	}
	w.tell(report{Point: ready})
	stopped := make(chan error, 1)
	context.AfterFunc(ctx, func() {
		limited, cancel := context.WithTimeout(context.Background(), 2*s.threshold)
		defer cancel()
		err := r.Stop(limited)
		if errors.Is(err, context.DeadlineExceeded) {
			err = nil // what was left is back in the queue
		}
		stopped <- err
	})
	return errors.Join(r.Work(ctx, queue, s.concurrency, w.handle), <-stopped)
}

// handle runs one saga. Work calls Done when it returns, whatever it returns: a saga that has not come to its end must be released first.
func (w *worker) handle(ctx context.Context, l *recovery.Lease) error {
	m, state, err := read(l.Job())
	if err != nil {
		return err // Decode has read it before
	}
	run := &saga{steps: w.steps, order: m.Order, lease: l, state: state, tries: 3, pause: w.threshold / 10,
		run: Run{Saga: m.Order.ID, Recovery: m.Recovery, Fence: l.Fence()}}
	run.at = func(point string) { w.at(ctx, run, point) }
	if err = run.play(ctx); err == nil {
		return nil
	}
	if !errors.Is(err, errStuck) {
		w.tell(report{Point: dropped, Run: run.run, Next: run.state.Next, Reason: err.Error()})
		wait(ctx, w.threshold) // over at once if the saga is lost. If it is ours and stale all the same, Redis' clock went back: not in a hurry
	}
	// Stuck: Encode refuses to put it back, and it becomes a dead letter. Else it is somebody else's already, or goes back to the queue.
	// If Release fails, Work hands it back.
	_ = l.Release()
	return nil
}

// at reports where a run is, and stops it there if -halt says so, until a line on stdin or until the saga is lost.
func (w *worker) at(ctx context.Context, s *saga, point string) {
	r := report{Point: point, Run: s.run, Next: s.state.Next}
	w.tell(r)
	if w.halts[s.run.Saga] == point {
		r.Point, r.Reason = halted, point
		w.tell(r)
		select {
		case <-w.going:
		case <-ctx.Done():
		}
	}
	wait(ctx, w.pace)
}

// tell writes one line. What was written survives a kill -9 of the writer, in the pipe.
func (w *worker) tell(r report) {
	w.mu.Lock()
	defer w.mu.Unlock()
	_ = w.out.Encode(r)
}

// listen lets halted runs go on at the first line on stdin, and ends the worker at its end, so that it does not outlive whoever started it.
func (w *worker) listen(stop func()) {
	lines := bufio.NewScanner(os.Stdin)
	if lines.Scan() {
		close(w.going)
		for lines.Scan() {
		}
	}
	stop()
}
