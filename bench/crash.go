package main

import (
	"bufio"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/adjust/rmq/v5"
	"github.com/crashsafe/recovery"
	"github.com/hibiken/asynq"
)

// From kill -9 to the job being there again, with every system's defaults. The victims are processes of their own: this program, run again.

const childEnv = "RECOVERY_BENCH_CHILD" // what to be
const addrEnv = "RECOVERY_BENCH_ADDR"

// beChild is a victim. It takes one job, says so, and does not finish it.
func beChild(kind, addr string) error {
	srv := &server{addr: addr}
	e := env{srv: srv, addr: addr, payload: []byte("job")}
	ready := func(id string) { fmt.Println("ready " + id) }
	switch kind {
	case "recovery":
		r, err := recovery.New(srv.client(), recovery.EnqueuerFunc(func(context.Context, recovery.Orphan) error { return nil }), recovery.Config{Logger: quiet})
		if err == nil {
			err = r.Start(bg)
		}
		if err == nil {
			_, err = r.Track(bg, recovery.Job{ID: r.WorkerID()})
		}
		if err != nil {
			return err
		}
		ready(r.WorkerID())
	case "asynq":
		s := asynq.NewServer(asynq.RedisClientOpt{Addr: addr}, asynq.Config{Concurrency: 1, LogLevel: asynq.FatalLevel})
		if err := s.Start(asynq.HandlerFunc(func(context.Context, *asynq.Task) error { ready(""); select {} })); err != nil {
			return err
		}
	case "rmq":
		_, q, err := openRmq(addr, e)
		if err == nil {
			err = q.StartConsuming(1, time.Millisecond)
		}
		if err == nil {
			_, err = q.AddConsumerFunc("victim", func(rmq.Delivery) { ready(""); select {} })
		}
		if err != nil {
			return err
		}
	}
	select {}
}

// victim starts a child and waits until it has its job.
func victim(kind, addr string) (id string, kill func() time.Time, err error) {
	self, err := os.Executable()
	if err != nil {
		return "", nil, err
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), childEnv+"="+kind, addrEnv+"="+addr)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return "", nil, err
	}
	kill = func() time.Time {
		at := time.Now()
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		return at
	}
	for lines := bufio.NewScanner(out); lines.Scan(); {
		if id, ok := strings.CutPrefix(lines.Text(), "ready "); ok {
			return id, kill, nil
		}
	}
	kill()
	return "", nil, fmt.Errorf("victim %s ended before it had a job", kind)
}

// crashRecovery kills n workers, each at a random moment between two beats, and answers how long each job took to come back.
func crashRecovery(n int) ([]time.Duration, error) {
	srv, err := startServer()
	if err != nil {
		return nil, err
	}
	defer srv.stop()
	type arrival struct {
		worker string
		at     time.Time
	}
	back := make(chan arrival, n)
	r, err := recovery.New(srv.client(), recovery.EnqueuerFunc(func(_ context.Context, o recovery.Orphan) error {
		back <- arrival{o.Worker, time.Now()}
		return nil
	}), recovery.Config{Logger: quiet})
	if err == nil {
		err = r.Start(bg)
	}
	if err != nil {
		return nil, err
	}
	var killing sync.WaitGroup
	var mu sync.Mutex
	deaths := map[string]time.Time{}
	for range n {
		id, kill, err := victim("recovery", srv.addr)
		if err != nil {
			return nil, err
		}
		killing.Go(func() {
			time.Sleep(time.Duration(rand.Int64N(int64(10 * time.Second)))) // two beats
			at := kill()
			mu.Lock()
			defer mu.Unlock()
			deaths[id] = at
		})
	}
	killing.Wait()
	var times []time.Duration
	for range n {
		select {
		case a := <-back:
			times = append(times, a.at.Sub(deaths[a.worker]))
		case <-time.After(time.Minute):
			return nil, fmt.Errorf("only %d of %d jobs came back", len(times), n)
		}
	}
	slices.Sort(times)
	return times, r.Stop(bg)
}

// crashAsynq kills one asynq server and waits until another one runs the task.
func crashAsynq() (time.Duration, error) {
	srv, err := startServer()
	if err != nil {
		return 0, err
	}
	defer srv.stop()
	c := asynq.NewClient(asynq.RedisClientOpt{Addr: srv.addr})
	defer c.Close()
	if _, err := c.Enqueue(asynq.NewTask("job", nil)); err != nil {
		return 0, err
	}
	_, kill, err := victim("asynq", srv.addr)
	if err != nil {
		return 0, err
	}
	back := make(chan struct{}, 1)
	s := asynq.NewServer(asynq.RedisClientOpt{Addr: srv.addr}, asynq.Config{Concurrency: 1, LogLevel: asynq.FatalLevel})
	if err := s.Start(asynq.HandlerFunc(func(context.Context, *asynq.Task) error { back <- struct{}{}; return nil })); err != nil {
		return 0, err
	}
	defer s.Shutdown()
	at := kill()
	select {
	case <-back:
		return time.Since(at), nil
	case <-time.After(4 * time.Minute):
		return 0, fmt.Errorf("asynq: not back within 4 minutes")
	}
}

// crashRmq kills one rmq consumer and calls the Cleaner every second, more often than most do, until the delivery is ready again.
func crashRmq() (time.Duration, error) {
	srv, err := startServer()
	if err != nil {
		return 0, err
	}
	defer srv.stop()
	e := env{srv: srv, addr: srv.addr}
	conn, q, err := openRmq(srv.addr, e)
	if err == nil {
		err = q.PublishBytes([]byte("job"))
	}
	if err != nil {
		return 0, err
	}
	_, kill, err := victim("rmq", srv.addr)
	if err != nil {
		return 0, err
	}
	at := kill()
	cleaner := rmq.NewCleaner(conn)
	for time.Since(at) < 4*time.Minute {
		n, err := cleaner.Clean()
		if err == nil && n > 0 {
			return time.Since(at), nil
		}
		time.Sleep(time.Second)
	}
	return 0, fmt.Errorf("rmq: not back within 4 minutes")
}
