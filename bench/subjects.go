package main

import (
	"context"
	"fmt"
	"log/slog"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/crashsafe/recovery"
	"github.com/redis/go-redis/v9"
)

// plain is the writes that tracking needs at the least, by plain go-redis: ZADD and HSET in one pipeline, then ZREM and HDEL in one.
func plain(beside int) subject {
	return subject{"plain", func(e env) (func(int) error, func() error, error) {
		rdb := e.srv.clientAt(e.addr)
		var next atomic.Int64
		for n := 0; n < beside; n += 1000 {
			_, err := rdb.Pipelined(bg, func(p redis.Pipeliner) error {
				for id := n; id < min(n+1000, beside); id++ {
					p.ZAdd(bg, "index", redis.Z{Score: 1, Member: fmt.Sprint("beside-", id)})
					p.HSet(bg, "jobs", fmt.Sprint("beside-", id), e.payload)
				}
				return nil
			})
			if err != nil {
				return nil, nil, err
			}
		}
		job := func(int) error {
			id := strconv.FormatInt(next.Add(1), 10)
			_, err := rdb.Pipelined(bg, func(p redis.Pipeliner) error {
				p.ZAdd(bg, "index", redis.Z{Score: float64(time.Now().UnixMilli()), Member: id})
				p.HSet(bg, "jobs", id, e.payload)
				return nil
			})
			if err != nil {
				return err
			}
			_, err = rdb.Pipelined(bg, func(p redis.Pipeliner) error {
				p.ZRem(bg, "index", id)
				p.HDel(bg, "jobs", id)
				return nil
			})
			return err
		}
		return job, rdb.Close, nil
	}}
}

var quiet = slog.New(slog.DiscardHandler)

// tracked is Track and Done. inflight jobs are there beside.
func tracked(name string, inflight int, ctx context.Context) subject {
	return subject{name, func(e env) (func(int) error, func() error, error) {
		rdb := e.srv.clientAt(e.addr)
		r, err := recovery.New(rdb, recovery.EnqueuerFunc(func(context.Context, recovery.Orphan) error { return nil }), recovery.Config{Logger: quiet})
		if err == nil {
			err = r.Start(bg)
		}
		if err != nil {
			return nil, nil, err
		}
		others, err := e.fill(r, rdb, nil, inflight, false)
		if err != nil {
			return nil, nil, err
		}
		job := func(int) error {
			l, err := r.Track(ctx, recovery.Job{ID: "job", Payload: e.payload})
			if err != nil {
				return err
			}
			return l.Done()
		}
		end := func() error {
			if err := finish(others); err != nil { // or it would bring them back after the next FLUSHALL
				return err
			}
			if err := r.Stop(bg); err != nil {
				return err
			}
			return rdb.Close()
		}
		return job, end, nil
	}}
}

// finish ends leases, many at a time.
func finish(leases []*recovery.Lease) error {
	var wg sync.WaitGroup
	places := make(chan struct{}, 1000)
	var failed atomic.Pointer[error]
	for _, l := range leases {
		places <- struct{}{}
		wg.Go(func() {
			if err := l.Done(); err != nil {
				failed.Store(&err)
			}
			<-places
		})
	}
	wg.Wait()
	if err := failed.Load(); err != nil {
		return *err
	}
	return nil
}
