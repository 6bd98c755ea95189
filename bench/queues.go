package main

import (
	"context"
	"fmt"
	"io"
	"log"
	"sync/atomic"
	"time"

	"github.com/adjust/rmq/v5"
	"github.com/crashsafe/recovery"
	redisv8 "github.com/go-redis/redis/v8"
	"github.com/gocraft/work"
	"github.com/gomodule/redigo/redis"
	"github.com/hibiken/asynq"
	"github.com/vmihailenco/taskq/v3"
	"github.com/vmihailenco/taskq/v3/redisq"
)

// drainer is a job system, or this library, that works off a full queue: it takes, keeps what it has taken from being lost, runs a handler
// that does nothing, and finishes. Each is configured as its documentation would have it for speed.
type drainer struct {
	name  string
	fill  func(e env, n int) error
	drain func(e env, concurrency int, handled func()) (stop func(), err error)
}

// drains fills a queue with n jobs and measures how they are worked off.
func (e env) drains(d drainer, n, concurrency int) (f figures, err error) {
	if err := e.srv.admin.FlushAll(bg).Err(); err != nil {
		return f, err
	}
	if err := d.fill(e, n); err != nil {
		return f, fmt.Errorf("%s: %w", d.name, err)
	}
	var count atomic.Int64
	ended := make(chan struct{})
	before, err := snap(e.srv)
	if err != nil {
		return f, err
	}
	stop, err := d.drain(e, concurrency, func() {
		if count.Add(1) == int64(n) {
			close(ended)
		}
	})
	if err != nil {
		return f, fmt.Errorf("%s: %w", d.name, err)
	}
	select {
	case <-ended:
	case <-time.After(2 * time.Minute):
		return f, fmt.Errorf("%s: only %d of %d jobs within two minutes", d.name, count.Load(), n)
	}
	after, err := snap(e.srv)
	stop()
	return after.minus(before).per(n), err
}

var drainers = []drainer{
	{"recovery", fillRecovery, drainRecovery},
	{"asynq", fillAsynq, drainAsynq},
	{"rmq", fillRmq, drainRmq},
	{"taskq", fillTaskq, drainTaskq},
	{"gocraft/work", fillGocraft, drainGocraft},
	{"the least", fillRecovery, drainLeast},
}

func fillRecovery(e env, n int) error {
	rdb := e.srv.client()
	defer rdb.Close()
	for done := 0; done < n; done += 1000 {
		values := make([]any, min(1000, n-done))
		for i := range values {
			values[i] = e.payload
		}
		if err := rdb.LPush(bg, "jobs", values...).Err(); err != nil {
			return err
		}
	}
	return nil
}

func drainRecovery(e env, concurrency int, handled func()) (func(), error) {
	rdb := e.srv.clientAt(e.addr)
	q := recovery.NewListQueue("jobs")
	r, err := recovery.New(rdb, q, recovery.Config{Logger: quiet})
	if err == nil {
		err = r.Start(bg)
	}
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(bg)
	ended := make(chan error, 1)
	go func() {
		ended <- r.Work(ctx, q, concurrency, func(_ context.Context, l *recovery.Lease) error { _ = l.Payload(); handled(); return nil })
	}()
	return func() {
		cancel()
		<-ended
		_ = r.Stop(bg)
		rdb.Close()
	}, nil
}

func fillAsynq(e env, n int) error {
	c := asynq.NewClient(asynq.RedisClientOpt{Addr: e.srv.addr})
	defer c.Close()
	for range n {
		if _, err := c.Enqueue(asynq.NewTask("job", e.payload)); err != nil {
			return err
		}
	}
	return nil
}

func drainAsynq(e env, concurrency int, handled func()) (func(), error) {
	s := asynq.NewServer(asynq.RedisClientOpt{Addr: e.addr, PoolSize: 128}, asynq.Config{Concurrency: concurrency, LogLevel: asynq.FatalLevel})
	err := s.Start(asynq.HandlerFunc(func(context.Context, *asynq.Task) error { handled(); return nil }))
	return s.Shutdown, err
}

func openRmq(addr string, e env) (rmq.Connection, rmq.Queue, error) {
	errs := make(chan error, 100)
	go func() {
		for range errs { // pushed into a channel that nobody reads it would block
		}
	}()
	c, err := rmq.OpenConnectionWithRedisClient("bench", e.srv.clientAt(addr), errs)
	if err != nil {
		return nil, nil, err
	}
	q, err := c.OpenQueue("jobs")
	return c, q, err
}

func fillRmq(e env, n int) error {
	_, q, err := openRmq(e.srv.addr, e)
	for done := 0; err == nil && done < n; done += 1000 {
		page := make([][]byte, min(1000, n-done))
		for i := range page {
			page[i] = e.payload
		}
		err = q.PublishBytes(page...)
	}
	return err
}

func drainRmq(e env, concurrency int, handled func()) (func(), error) {
	c, q, err := openRmq(e.addr, e)
	if err == nil {
		err = q.StartConsuming(1000, time.Millisecond)
	}
	for range concurrency {
		if err == nil {
			_, err = q.AddConsumerFunc("worker", func(d rmq.Delivery) {
				handled()
				_ = d.Ack()
			})
		}
	}
	return func() { <-c.StopAllConsuming() }, err
}

var taskqNumber atomic.Int64

// taskqTask is registered once: taskq keeps tasks in a global map.
var taskqHandled atomic.Pointer[func()]

var taskqTask = taskq.RegisterTask(&taskq.TaskOptions{Name: "job", Handler: func([]byte) error {
	if f := taskqHandled.Load(); f != nil {
		(*f)()
	}
	return nil
}})

func openTaskq(e env, addr string, concurrency int) taskq.Queue {
	taskq.SetLogger(log.New(io.Discard, "", 0))
	return redisq.NewFactory().RegisterQueue(&taskq.QueueOptions{
		Name: fmt.Sprint("jobs", taskqNumber.Load()), Redis: redisv8.NewClient(&redisv8.Options{Addr: addr, PoolSize: 128}),
		MinNumWorker: int32(concurrency), MaxNumWorker: int32(concurrency), ReservationSize: 1000, BufferSize: 2000,
	})
}

func fillTaskq(e env, n int) error {
	taskqNumber.Add(1)
	q := openTaskq(e, e.srv.addr, 1)
	for i := range n {
		m := taskqTask.WithArgs(bg, e.payload)
		m.Name = "" // no deduplication
		_ = i
		if err := q.Add(m); err != nil {
			return err
		}
	}
	return nil
}

func drainTaskq(e env, concurrency int, handled func()) (func(), error) {
	taskqHandled.Store(&handled)
	q := openTaskq(e, e.addr, concurrency)
	c := q.Consumer()
	if err := c.Start(bg); err != nil {
		return nil, err
	}
	return func() { _ = c.Stop() }, nil
}

func gocraftPool(addr string) *redis.Pool {
	return &redis.Pool{MaxActive: 256, MaxIdle: 256, Wait: true, Dial: func() (redis.Conn, error) { return redis.Dial("tcp", addr) }}
}

func fillGocraft(e env, n int) error {
	enq := work.NewEnqueuer("bench", gocraftPool(e.srv.addr))
	for range n {
		if _, err := enq.Enqueue("job", work.Q{"payload": string(e.payload)}); err != nil {
			return err
		}
	}
	return nil
}

func drainGocraft(e env, concurrency int, handled func()) (func(), error) {
	p := work.NewWorkerPool(struct{}{}, uint(concurrency), "bench", gocraftPool(e.addr))
	p.Job("job", func(*work.Job) error { handled(); return nil })
	p.Start()
	return p.Stop, nil
}
