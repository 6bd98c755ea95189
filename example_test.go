package recovery_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/crashsafe/recovery"
	"github.com/redis/go-redis/v9"
)

// Two workers; one of them is cut off in the middle of a job. README.md shows the same program.
func Example() {
	server := miniredis.NewMiniRedis() // instead of your Redis
	server.ClockTTL(true)
	check(server.Start())
	defer server.Close()

	queue := make(chan recovery.Orphan, 1) // instead of your queue
	enqueue := func(_ context.Context, o recovery.Orphan) error { queue <- o; return nil }

	ctx, cancel := context.WithCancel(context.Background())
	start := func(name string) (*redis.Client, *recovery.Recoverer) {
		rdb := redis.NewClient(&redis.Options{Addr: server.Addr()})
		r, err := recovery.New(rdb, recovery.EnqueuerFunc(enqueue), recovery.Config{
			WorkerName:        name,
			HeartbeatInterval: 100 * time.Millisecond, // default: 5s
			OrphanThreshold:   400 * time.Millisecond, // default: 20s
			Logger:            slog.New(slog.DiscardHandler),
		})
		check(err)
		check(r.Start(ctx))
		return rdb, r
	}
	doomedRedis, doomed := start("doomed")
	_, survivor := start("survivor")
	defer survivor.Stop(context.Background())
	defer doomed.Stop(ctx) // it can't reach Redis any more: do not wait
	defer cancel()

	_, err := doomed.Track(ctx, recovery.Job{ID: "mail-1", Payload: []byte("to: ann")})
	check(err)
	doomedRedis.Close() // as good as kill -9: from now on Redis hears nothing of this worker

	orphan := <-queue // a moment later, from the survivor
	fmt.Printf("%s: %s, recovery %d\n", orphan.ID, orphan.Reason, orphan.Recovery)
	check(survivor.Do(ctx, orphan.Job, func(context.Context) error {
		fmt.Printf("sending %q\n", orphan.Payload)
		return nil
	}))
	// Output:
	// mail-1: crashed, recovery 1
	// sending "to: ann"
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}

// The lease ends when the func returns, whatever it returned: an error is the caller's to handle.
func ExampleRecoverer_Do() {
	rdb, quit := exampleRedis()
	defer quit()
	r, err := recovery.New(rdb, drop, quiet)
	check(err)
	ctx := context.Background()
	check(r.Start(ctx))
	defer r.Stop(ctx)

	err = r.Do(ctx, recovery.Job{ID: "mail-1", Queue: "mail"}, func(ctx context.Context) error {
		return errors.New("mailbox is full")
	})
	switch {
	case errors.Is(err, recovery.ErrLost):
		fmt.Println("somebody else has the job: do not acknowledge it")
	case err != nil:
		fmt.Println("failed, and no longer tracked:", err)
	default:
		fmt.Println("done: acknowledge it")
	}
	// Output: failed, and no longer tracked: mailbox is full
}

// A panic in the func hands the job back before it goes on.
func ExampleRecoverer_Do_panic() {
	rdb, quit := exampleRedis()
	defer quit()
	r, err := recovery.New(rdb, recovery.EnqueuerFunc(func(_ context.Context, o recovery.Orphan) error {
		fmt.Println("handed back:", o.ID, o.Reason)
		return nil
	}), quiet)
	check(err)
	ctx := context.Background()
	check(r.Start(ctx))
	defer r.Stop(ctx)

	defer func() { fmt.Println("panic:", recover()) }()
	_ = r.Do(ctx, recovery.Job{ID: "mail-1"}, func(context.Context) error { panic("no template") })
	// Output:
	// handed back: mail-1 panicked
	// panic: no template
}

// Track and Done by hand, where a job does not fit into one func.
func ExampleRecoverer_Track() {
	rdb, quit := exampleRedis()
	defer quit()
	r, err := recovery.New(rdb, drop, quiet)
	check(err)
	ctx := context.Background()
	check(r.Start(ctx))
	defer r.Stop(ctx)

	lease, err := r.Track(ctx, recovery.Job{ID: "invoice-7", Queue: "billing", Payload: []byte(`{"amount": 12}`)})
	check(err) // not recorded: leave the job where it came from
	fmt.Println("in flight:", r.Stats().Inflight)

	work, fence := lease.Context(), lease.Fence()
	fmt.Println("cancelled:", work.Err() != nil, "fence:", fence > 0)

	check(lease.Confirm(ctx)) // right before what can't be undone
	if err := lease.Done(); errors.Is(err, recovery.ErrLost) {
		fmt.Println("lost: the job runs elsewhere")
	}
	fmt.Println("in flight:", r.Stats().Inflight)
	// Output:
	// in flight: 1
	// cancelled: false fence: true
	// in flight: 0
}

// Jobs that have not ended when Stop's context ends are cancelled and handed back at once, by the worker itself.
func ExampleRecoverer_Stop() {
	rdb, quit := exampleRedis()
	defer quit()
	r, err := recovery.New(rdb, recovery.EnqueuerFunc(func(_ context.Context, o recovery.Orphan) error {
		fmt.Println("handed back:", o.ID, o.Reason)
		return nil
	}), quiet)
	check(err)
	check(r.Start(context.Background()))
	lease, err := r.Track(context.Background(), recovery.Job{ID: "endless"})
	check(err)

	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	err = r.Stop(ctx)
	fmt.Println("in time:", !errors.Is(err, context.DeadlineExceeded))
	fmt.Println("cause:", context.Cause(lease.Context()))
	fmt.Println("done:", lease.Done())
	// Output:
	// handed back: endless released
	// in time: false
	// cause: recovery: job lost to another worker
	// done: recovery: job lost to another worker
}

// Run is for a main func: with signal.NotifyContext, a SIGTERM ends ctx.
func ExampleRecoverer_Run() {
	rdb, quit := exampleRedis()
	defer quit()
	started := make(chan struct{})
	cfg := quiet
	cfg.StopTimeout = 10 * time.Second // Kubernetes grants 30s
	cfg.Events.Started = func(recovery.StartedInfo) { close(started) }
	r, err := recovery.New(rdb, drop, cfg)
	check(err)

	ctx, sigterm := context.WithCancel(context.Background())
	defer sigterm()
	ended := make(chan error)
	go func() { ended <- r.Run(ctx) }()
	<-started
	fmt.Println(r.State())
	sigterm()
	fmt.Println(<-ended, r.State())
	// Output:
	// running
	// <nil> stopped
}

// An Enqueuer that knows that a job will never be accepted says so; the job goes to the dead letters.
func ExamplePermanent() {
	rdb, quit := exampleRedis()
	defer quit()
	cfg := quiet
	cfg.Events.Buried = func(b recovery.BuriedInfo) {
		fmt.Printf("dead letter %s: %s: %v\n", b.Orphan.ID, b.Reason, b.Err)
	}
	r, err := recovery.New(rdb, recovery.EnqueuerFunc(func(_ context.Context, o recovery.Orphan) error {
		return recovery.Permanent(fmt.Errorf("there is no queue %q", o.Queue))
	}), cfg)
	check(err)
	check(r.Start(context.Background()))
	_, err = r.Track(context.Background(), recovery.Job{ID: "mail-1", Queue: "gone"})
	check(err)

	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	_ = r.Stop(ctx)
	// Output: dead letter mail-1: refused by the Enqueuer for good: there is no queue "gone"
}

// What a dashboard or a person asks for.
func ExampleInspector() {
	rdb, quit := exampleRedis()
	defer quit()
	cfg := quiet
	cfg.WorkerName, cfg.MaxInflight = "mailer-1", 8
	r, err := recovery.New(rdb, drop, cfg)
	check(err)
	ctx := context.Background()
	check(r.Start(ctx))
	defer r.Stop(ctx)
	lease, err := r.Track(ctx, recovery.Job{ID: "mail-1", Queue: "mail", Payload: []byte("to: ann")})
	check(err)
	defer lease.Done()

	inspector := recovery.NewInspector(rdb, "default")
	workers, err := inspector.Workers(ctx)
	check(err)
	for _, w := range workers {
		fmt.Printf("%s is %s, %d of %d\n", w.Name, w.State, w.Inflight, w.Capacity)
		jobs, err := inspector.Inflight(ctx, w.ID)
		check(err)
		for _, j := range jobs {
			fmt.Printf("  %s of queue %s, %d bytes\n", j.Job.ID, j.Job.Queue, j.Size)
		}
	}
	// Output:
	// mailer-1 is running, 1 of 8
	//   mail-1 of queue mail, 7 bytes
}

// quiet is a Config that logs nothing.
var quiet = recovery.Config{Logger: slog.New(slog.DiscardHandler)}

// drop is an Enqueuer for examples in which nobody dies.
var drop = recovery.EnqueuerFunc(func(context.Context, recovery.Orphan) error { return nil })

// exampleRedis is a Redis on a loopback port, and a client of it.
func exampleRedis() (rdb *redis.Client, quit func()) {
	server := miniredis.NewMiniRedis()
	server.ClockTTL(true)
	check(server.Start())
	rdb = redis.NewClient(&redis.Options{Addr: server.Addr()})
	return rdb, func() { rdb.Close(); server.Close() }
}
