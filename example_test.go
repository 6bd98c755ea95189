package recovery_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
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

// Start-up: everything that is wrong with the settings is named at once, and Start returns when the first heartbeat is in Redis. Take the first job
// after it.
func ExampleRecoverer_Start() {
	rdb, quit := exampleRedis()
	defer quit()
	_, err := recovery.New(rdb, drop, recovery.Config{OrphanThreshold: time.Second, MaxRecoveries: -7})
	fmt.Println(err)

	r, err := recovery.New(rdb, drop, quiet)
	check(err)
	_, err = r.Track(context.Background(), recovery.Job{ID: "too-early"})
	fmt.Println(errors.Is(err, recovery.ErrNotRunning))
	check(r.Start(context.Background()))
	fmt.Println(r.State(), r.Check())
	check(r.Stop(context.Background()))
	fmt.Println(r.State(), r.Check())
	// Output:
	// recovery: invalid config: OrphanThreshold is 1s, at least 3 x HeartbeatInterval (5s): a live worker that loses two beats must not be declared dead
	// MaxRecoveries is -7, from -1 to 2147483647
	// true
	// running <nil>
	// stopped recovery: not running: state is stopped
}

// rows stands for a table: what is being run is marked, and by which lease.
type rows map[string]string

func (t rows) Enqueue(ctx context.Context, o recovery.Orphan) error {
	return errors.Join(t.EnqueueAll(ctx, []recovery.Orphan{o})...)
}

// EnqueueAll is one guarded UPDATE in life: only what the dead worker's lease still holds is put back. The same call again changes nothing.
func (t rows) EnqueueAll(_ context.Context, os []recovery.Orphan) []error {
	for _, o := range os {
		if t[o.ID] == o.Key {
			t[o.ID] = "pending"
		}
	}
	return nil
}

// Rows of a table that a worker took as one block, and that go back in one call. examples/postgres-rows is the real thing.
func ExampleBatchEnqueuer() {
	rdb, quit := exampleRedis()
	defer quit()
	table := rows{"1": "pending", "2": "pending", "3": "pending"}
	r, err := recovery.New(rdb, table, quiet)
	check(err)
	ctx := context.Background()
	check(r.Start(ctx))

	leases, err := r.TrackAll(ctx, recovery.Job{ID: "1"}, recovery.Job{ID: "2"}) // all or none
	check(err)
	for _, l := range leases {
		table[l.Job().ID] = l.ID()
	}
	check(leases[0].Done())
	table["1"] = "done"

	stop, cancel := context.WithCancel(ctx)
	cancel()
	_ = r.Stop(stop) // without time: what has not ended goes back at once
	fmt.Println(table)
	// Output: map[1:done 2:pending 3:pending]
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

// A job that notes how far it got is resumed there: the checkpoint comes back with the orphan, and in its Job.
func ExampleLease_Checkpoint() {
	server := miniredis.NewMiniRedis()
	server.ClockTTL(true)
	check(server.Start())
	defer server.Close()
	queue := make(chan recovery.Job, 1)
	enqueue := func(_ context.Context, o recovery.Orphan) error { queue <- o.Job; return nil } // with its Checkpoint
	cfg := quiet
	cfg.HeartbeatInterval, cfg.OrphanThreshold = 100*time.Millisecond, 600*time.Millisecond
	ctx, cancel := context.WithCancel(context.Background())
	start := func() (*redis.Client, *recovery.Recoverer) {
		rdb := redis.NewClient(&redis.Options{Addr: server.Addr()})
		r, err := recovery.New(rdb, recovery.EnqueuerFunc(enqueue), cfg)
		check(err)
		check(r.Start(ctx))
		return rdb, r
	}
	doomedRedis, doomed := start()
	_, survivor := start()
	defer survivor.Stop(context.Background())
	defer doomed.Stop(ctx)
	defer cancel()

	send := func(r *recovery.Recoverer, job recovery.Job, until int) *recovery.Lease {
		lease, err := r.Track(ctx, job)
		check(err)
		page := 1
		if job.Checkpoint != nil { // of an earlier run
			page, err = strconv.Atoi(string(job.Checkpoint))
			check(err)
		}
		for ; page <= until; page++ {
			fmt.Println("page", page)
			check(lease.Checkpoint(ctx, []byte(strconv.Itoa(page+1))))
		}
		return lease
	}
	send(doomed, recovery.Job{ID: "newsletter"}, 2)
	doomedRedis.Close() // as good as kill -9
	check(send(survivor, <-queue, 4).Done())
	// Output:
	// page 1
	// page 2
	// page 3
	// page 4
}

// Release gives a job back before its end, through the Enqueuer. It does not count as a crash.
func ExampleLease_Release() {
	rdb, quit := exampleRedis()
	defer quit()
	down := true
	r, err := recovery.New(rdb, recovery.EnqueuerFunc(func(_ context.Context, o recovery.Orphan) error {
		if down {
			return errors.New("queue is down")
		}
		fmt.Printf("handed back: %s %s, at %s\n", o.ID, o.Reason, o.Checkpoint)
		return nil
	}), quiet)
	check(err)
	ctx := context.Background()
	check(r.Start(ctx))
	defer r.Stop(ctx)

	lease, err := r.Track(ctx, recovery.Job{ID: "video-1"})
	check(err)
	check(lease.Checkpoint(ctx, []byte("frame 700")))
	fmt.Println(lease.Release(), "- still ours:", lease.Confirm(ctx) == nil)
	down = false
	fmt.Println(lease.Release(), "- done:", lease.Done())
	// Output:
	// release job "video-1": queue is down - still ours: true
	// handed back: video-1 released, at frame 700
	// <nil> - done: recovery: job lost to another worker
}

// Dead letters wait for a person, who finds out why, and gives the job back or discards it.
func ExampleInspector_Requeue() {
	rdb, quit := exampleRedis()
	defer quit()
	r, err := recovery.New(rdb, drop, quiet)
	check(err)
	ctx := context.Background()
	check(r.Start(ctx))
	defer r.Stop(ctx)
	for range 2 { // the first time it is handed back, the second time it is buried
		func() {
			defer func() { _ = recover() }()
			job := recovery.Job{ID: "mail-1", Payload: []byte("to: ann"), MaxRecoveries: 1}
			_ = r.Do(ctx, job, func(context.Context) error { panic("no template") })
		}()
	}

	inspector := recovery.NewInspector(rdb, "default")
	letters, err := inspector.DeadLetters(ctx, 0, 100) // oldest first
	check(err)
	for _, d := range letters {
		fmt.Printf("%s %s: %s\n", d.ID, d.Reason, d.Cause)
		fmt.Println("crashes:", len(d.Crashes))
		check(inspector.Requeue(ctx, d.Key, recovery.EnqueuerFunc(func(_ context.Context, o recovery.Orphan) error {
			fmt.Printf("back to the queue: %s %q\n", o.ID, o.Payload)
			return nil
		})))
		_, err := inspector.DeadLetter(ctx, d.Key)
		fmt.Println("gone:", errors.Is(err, recovery.ErrNoLetter))
	}
	// Output:
	// mail-1 panicked: recovered 1 times within 72h0m0s, the limit is 1
	// crashes: 2
	// back to the queue: mail-1 "to: ann"
	// gone: true
}

// Sealed, Redis shows a job's ID and queue, and nothing else of it. Each key has 32 random bytes, from your secret store.
func ExampleAESGCM() {
	rdb, quit := exampleRedis()
	defer quit()
	current, former := bytes.Repeat([]byte{1}, 32), bytes.Repeat([]byte{2}, 32)
	cfg := quiet
	cfg.Codec = recovery.AESGCM(current, former) // the first one seals, all of them open
	r, err := recovery.New(rdb, drop, cfg)
	check(err)
	ctx := context.Background()
	check(r.Start(ctx))
	defer r.Stop(ctx)
	lease, err := r.Track(ctx, recovery.Job{ID: "mail-1", Queue: "mail", Headers: map[string]string{"tenant": "blue"}})
	check(err)
	defer lease.Done()

	show := func(options ...recovery.InspectorOption) {
		jobs, err := recovery.NewInspector(rdb, "default", options...).Inflight(ctx, r.WorkerID())
		check(err)
		fmt.Printf("%s of %s, tenant %q: %v\n", jobs[0].Job.ID, jobs[0].Job.Queue, jobs[0].Job.Headers["tenant"], jobs[0].Err)
	}
	show()
	show(recovery.InspectCodec(cfg.Codec))
	// Output:
	// mail-1 of mail, tenant "": record is sealed and there is no Codec
	// mail-1 of mail, tenant "blue": <nil>
}

// Large payloads lie in a directory that all workers share, until the job is done or handed back.
func ExampleNewDirStore() {
	rdb, quit := exampleRedis()
	defer quit()
	mount, err := os.MkdirTemp("", "payloads") // instead of a shared volume
	check(err)
	defer os.RemoveAll(mount)
	store, err := recovery.NewDirStore(filepath.Join(mount, "recovery"))
	check(err)

	cfg := quiet
	cfg.PayloadStore = store
	cfg.MaxPayload = 64 << 20 // it limits stored payloads, too
	r, err := recovery.New(rdb, recovery.EnqueuerFunc(func(_ context.Context, o recovery.Orphan) error {
		fmt.Println("handed back:", o.ID, len(o.Payload))
		return nil
	}), cfg)
	check(err)
	ctx := context.Background()
	check(r.Start(ctx))
	defer r.Stop(ctx)
	lease, err := r.Track(ctx, recovery.Job{ID: "video-1", Payload: make([]byte, 5_000_000)})
	check(err)
	record, err := rdb.HGet(ctx, "recovery:1:default:{"+r.WorkerID()+"}:jobs", "1").Bytes()
	check(err)
	fmt.Println("less than 100 bytes are in Redis:", len(record) < 100)
	check(lease.Release())
	// Output:
	// less than 100 bytes are in Redis: true
	// handed back: video-1 5000000
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

// A complete worker on a Redis list.
func ExampleRecoverer_Work() {
	server := miniredis.NewMiniRedis()
	server.ClockTTL(true)
	check(server.Start())
	defer server.Close()
	rdb := redis.NewClient(&redis.Options{Addr: server.Addr()})
	check(rdb.LPush(context.Background(), "jobs", "to: ann", "to: bob").Err()) // any producer

	ctx, stop := context.WithCancel(context.Background()) // signal.NotifyContext, in a service
	queue := recovery.NewListQueue("jobs")
	r, err := recovery.New(rdb, queue, recovery.Config{Namespace: "mail", Logger: slog.New(slog.DiscardHandler)})
	check(err)
	check(r.Start(ctx))
	err = r.Work(ctx, queue, 1, func(_ context.Context, l *recovery.Lease) error {
		fmt.Printf("%s\n", l.Payload())
		if string(l.Payload()) == "to: bob" {
			stop()
		}
		return nil
	})
	fmt.Println(err, r.Stop(context.Background()), rdb.LLen(context.Background(), "jobs").Val())
	// Output:
	// to: ann
	// to: bob
	// <nil> <nil> 0
}

// Taking jobs without Work, from two lists: what is urgent goes first.
func ExampleRecoverer_Fetch() {
	server := miniredis.NewMiniRedis()
	server.ClockTTL(true)
	check(server.Start())
	defer server.Close()
	rdb := redis.NewClient(&redis.Options{Addr: server.Addr()})
	ctx := context.Background()
	check(rdb.LPush(ctx, "normal", "tidy up").Err())
	check(rdb.LPush(ctx, "urgent", "fire").Err())

	urgent, normal := recovery.NewListQueue("urgent"), recovery.NewListQueue("normal")
	r, err := recovery.New(rdb, normal, recovery.Config{Namespace: "mail", Logger: slog.New(slog.DiscardHandler)})
	check(err)
	check(r.Start(ctx))
	leases, err := r.Fetch(ctx, recovery.InOrder(urgent, normal), 10)
	check(err)
	for _, l := range leases {
		fmt.Printf("%s: %s\n", l.Job().Queue, l.Payload())
		check(l.Done())
	}
	check(r.Stop(ctx))
	// Output:
	// urgent: fire
	// normal: tidy up
}
