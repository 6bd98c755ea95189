package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/signal"
	"sync"
	"time"

	"github.com/crashsafe/recovery"
	"github.com/redis/go-redis/v9"
)

const (
	slots       = 3 // jobs that a worker runs at a time
	shortestJob = 500 * time.Millisecond
	longestJob  = 1200 * time.Millisecond
)

// worker is one process. This file is what a program of yours might look like; the others are the show around it.
type worker struct {
	setup
	rdb *redis.Client
	rec *recovery.Recoverer

	mu  sync.Mutex // guards out
	out *json.Encoder
}

// runWorker takes jobs until stdin ends, then finishes those it has and leaves.
func runWorker(s setup) error {
	signal.Ignore(os.Interrupt) // Ctrl-C reaches the whole process group; the parent decides
	ctx := untilStdinEnds()
	options, err := server(s.Redis)
	if err != nil {
		return err
	}
	rdb := redis.NewClient(options)
	defer rdb.Close()

	w := &worker{setup: s, rdb: rdb, out: json.NewEncoder(os.Stdout)}
	w.rec, err = recovery.New(rdb, recovery.EnqueuerFunc(w.enqueue), recovery.Config{
		Namespace:         s.namespace(),
		WorkerName:        s.Name,
		HeartbeatInterval: 200 * time.Millisecond, // for an impatient audience; the defaults are 5s, 20s and 5s
		OrphanThreshold:   time.Second,
		SweepInterval:     200 * time.Millisecond,
		MaxRecoveries:     recovery.NoLimit, // the workers are killed on purpose here: that says nothing about the jobs
		Logger:            slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError})),
		Events: recovery.Events{
			Started:    func(i recovery.StartedInfo) { w.tell(report{What: joined, Worker: i.Worker}) },
			Rejoined:   func(i recovery.RejoinedInfo) { w.tell(report{What: joined, Worker: i.Worker}) },
			Suspected:  func(i recovery.SuspectedInfo) { w.tell(report{What: suspected, Worker: i.Worker}) },
			HandedBack: w.handedBack,
		},
	})
	if err != nil {
		return err
	}
	if err := w.rec.Start(ctx); err != nil {
		return err
	}
	var running sync.WaitGroup
	for range slots {
		running.Go(func() {
			for ctx.Err() == nil {
				w.must(w.next(ctx))
			}
		})
	}
	running.Wait()
	stop, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	return w.rec.Stop(stop)
}

// next takes one job and runs it.
//
// With a plain BRPOP there would be a gap: a worker that is killed between the pop and Track takes the job with it. So the
// job moves, in one step, into a list of this worker alone, and leaves it when Track has it; the parent puts back
// what a dead worker left there. Killed right between Track and LRem, the job comes back on both ways and runs twice:
// at least once is the promise.
func (w *worker) next(ctx context.Context) error {
	id, err := w.rdb.BLMove(ctx, w.queue(), w.taken(), "RIGHT", "LEFT", time.Second).Result()
	if errors.Is(err, redis.Nil) || ctx.Err() != nil {
		return nil // nothing to do, or time to leave: then what was taken stays in the list, too
	}
	if err != nil {
		return fmt.Errorf("take a job: %w", err)
	}
	// Not under ctx: a job that has begun may end when the worker is asked to leave.
	lease, err := w.rec.Track(context.Background(), recovery.Job{ID: id, Queue: w.queue(), Payload: []byte(id)})
	if err != nil {
		return err
	}
	if err := w.rdb.LRem(context.Background(), w.taken(), 1, id).Err(); err != nil {
		return fmt.Errorf("tracked %s, but it is still in the list: %w", id, err)
	}
	w.tell(report{What: started, Job: id})
	if work(lease.Context()) {
		w.tell(report{What: finished, Job: id}) // the work's result, so it comes before Done
	}
	if err := lease.Done(); errors.Is(err, recovery.ErrLost) {
		w.tell(report{What: lost, Job: id}) // not an error: a peer has the job now
	} else if err != nil {
		return err
	}
	return nil
}

// work is the job. It reports whether it came to its end: a job that was lost to a peer is broken off.
func work(ctx context.Context) bool {
	select {
	case <-time.After(shortestJob + rand.N(longestJob-shortestJob)):
		return true
	case <-ctx.Done():
		return false
	}
}

// enqueue is how the library gives a dead worker's job back: here to the end of the list where jobs are taken.
func (w *worker) enqueue(ctx context.Context, o recovery.Orphan) error {
	return w.rdb.RPush(ctx, o.Queue, o.Payload).Err()
}

func (w *worker) handedBack(i recovery.HandedBackInfo) {
	w.tell(report{What: handedBack, Job: i.Orphan.ID, Worker: i.Orphan.Worker, Reason: i.Orphan.Reason.String()})
}

// tell writes one line to the parent. What was written survives a kill -9 of the writer, in the pipe.
func (w *worker) tell(r report) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.must(w.out.Encode(r))
}

// must dies of an error without any cleaning up: surviving that is what the library is for.
func (w *worker) must(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// untilStdinEnds returns a context that is cancelled when the parent closes our stdin, or dies, by whatever signal.
func untilStdinEnds() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
		time.Sleep(5 * time.Second) // Redis may have died with the parent: do not wait for it for ever
		os.Exit(1)
	}()
	return ctx
}
