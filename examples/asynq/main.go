// Asynq is a receiver of webhooks that runs them itself, and hands those that it can't finish to asynq: when it dies, by its peers;
// when a webhook fails, at once.
//
//	asynq -listen 127.0.0.1:8080     # a receiver
//	asynq                            # a worker of asynq, for what receivers could not finish
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/crashsafe/recovery"
	"github.com/hibiken/asynq"
	"github.com/redis/go-redis/v9"
)

// settings are what the flags say, and what tests set.
type settings struct {
	Redis     string
	Listen    string        // of a receiver; empty for a worker of asynq
	Threshold time.Duration // OrphanThreshold
	Stop      time.Duration
}

func main() {
	var s settings
	flag.StringVar(&s.Redis, "redis", "127.0.0.1:6379", "address")
	flag.StringVar(&s.Listen, "listen", "", "receive webhooks at this address; without it, be a worker of asynq")
	flag.DurationVar(&s.Threshold, "threshold", 20*time.Second, "silence after which a process is dead")
	flag.DurationVar(&s.Stop, "stop", 20*time.Second, "time that running jobs have after SIGTERM")
	flag.Parse()
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer cancel()
	if err := serve(ctx, s, handle, nil); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// handle is the job. It may run twice, as all jobs may.
func handle(ctx context.Context, payload []byte) error {
	slog.Info("webhook", "payload", string(payload))
	select {
	case <-time.After(10 * time.Second):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// serve is the life of a process of either kind. Both are of the same fleet: somebody must be left to notice that the receivers are dead.
// wrap, if not nil, puts something around the Enqueuer.
func serve(ctx context.Context, s settings, h handler, wrap func(recovery.Enqueuer) recovery.Enqueuer) error {
	rdb := redis.NewClient(&redis.Options{Addr: s.Redis})
	defer rdb.Close()
	var enq recovery.Enqueuer = enqueuer{asynq.NewClientFromRedisClient(rdb), keep}
	if wrap != nil {
		enq = wrap(enq)
	}
	rec, err := recovery.New(rdb, enq, recovery.Config{
		Namespace:         "webhooks",
		HeartbeatInterval: s.Threshold / 4,
		OrphanThreshold:   s.Threshold,
		EnqueueTimeout:    s.Threshold / 2,
		InflightTTL:       keep,
	})
	if err != nil {
		return err
	}
	if err := rec.Start(ctx); err != nil {
		return err
	}
	if s.Listen != "" {
		err = receive(ctx, s, &receiver{rec: rec, handle: h, log: slog.Default()})
	} else {
		err = work(ctx, rdb, s, h)
	}
	limited, cancel := context.WithTimeout(context.Background(), s.Stop)
	defer cancel()
	return errors.Join(err, rec.Stop(limited)) // what still runs after that goes to asynq
}

// receive serves webhooks until ctx ends.
func receive(ctx context.Context, s settings, rc *receiver) error {
	listener, err := net.Listen("tcp", s.Listen)
	if err != nil {
		return err
	}
	fmt.Println("listening on", listener.Addr())
	server := &http.Server{Handler: rc, ReadHeaderTimeout: 5 * time.Second}
	context.AfterFunc(ctx, func() {
		limited, cancel := context.WithTimeout(context.Background(), s.Stop)
		defer cancel()
		_ = server.Shutdown(limited)
	})
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// work runs asynq's tasks until ctx ends. From here on they are asynq's: its retries, its leases.
func work(ctx context.Context, rdb *redis.Client, s settings, h handler) error {
	server := asynq.NewServerFromRedisClient(rdb, asynq.Config{
		Queues:          map[string]int{queue: 1},
		ShutdownTimeout: s.Stop,
		LogLevel:        asynq.WarnLevel,
	})
	mux := asynq.NewServeMux()
	mux.HandleFunc(taskType, func(ctx context.Context, t *asynq.Task) error { return h(ctx, t.Payload()) })
	if err := server.Start(mux); err != nil {
		return err
	}
	<-ctx.Done()
	server.Shutdown()
	return nil
}
