// Kubernetes is a worker for a Deployment: probes, a drain that fits into the grace period, and jobs that survive when it does not. See
// README.md, and deployment.yaml, whose numbers a test compares with those in here.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"net"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/crashsafe/recovery"
	"github.com/redis/go-redis/v9"
)

// What has to fit into terminationGracePeriodSeconds, after which the kubelet sends SIGKILL:
//
//	preStop + -stop-timeout + overtime + margin
const (
	overtime = 5 * time.Second // what Stop may take beyond its context to give jobs back
	margin   = 5 * time.Second // for the kubelet and the end of the process
)

// podNameEnv is set from metadata.name.
const podNameEnv = "POD_NAME"

// options are the flags.
type options struct {
	redis, queue, listen, name string
	concurrency                int
	stopTimeout, heartbeat     time.Duration
	exporter                   exporter
}

func parse(args []string, getenv func(string) string) (o options, err error) {
	f := flag.NewFlagSet("worker", flag.ContinueOnError)
	f.StringVar(&o.redis, "redis", "127.0.0.1:6379", "`address` of Redis")
	f.StringVar(&o.queue, "queue", "jobs", "`key` of the list that jobs are pushed to")
	f.StringVar(&o.listen, "listen", ":8080", "`address` for the probes")
	f.StringVar(&o.name, "name", getenv(podNameEnv), "`name` of this worker (default: $"+podNameEnv+", or host name and process id)")
	f.IntVar(&o.concurrency, "concurrency", 8, "`number` of jobs at a time")
	f.DurationVar(&o.stopTimeout, "stop-timeout", 45*time.Second, "`time` that running jobs have after SIGTERM")
	f.DurationVar(&o.heartbeat, "heartbeat", 5*time.Second, "`interval`; jobs of a killed worker come back after four of them")
	f.StringVar(&o.exporter.out, "out", "out.txt", "`file` that jobs write to")
	f.DurationVar(&o.exporter.takes, "takes", time.Second, "`time` that a job takes")
	return o, f.Parse(args)
}

func main() {
	o, err := parse(os.Args[1:], os.Getenv)
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err != nil {
		os.Exit(2) // the flag package has said why
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second Ctrl-C does not wait
	if err := run(ctx, o); err != nil {
		log.Fatal(err)
	}
}

// run works until ctx ends, and up to -stop-timeout and overtime longer.
func run(ctx context.Context, o options) error {
	rdb := redis.NewClient(&redis.Options{Addr: o.redis})
	defer rdb.Close()
	queue := recovery.NewListQueue(o.queue)
	h := newHealth(4 * o.heartbeat)
	r, err := recovery.New(rdb, queue, recovery.Config{
		Namespace:         o.queue,
		WorkerName:        o.name,
		HeartbeatInterval: o.heartbeat,
		OrphanThreshold:   h.threshold,
		Events:            recovery.Events{Beat: h.beat},
	})
	if err != nil {
		return err
	}
	l, err := net.Listen("tcp", o.listen)
	if err != nil {
		return fmt.Errorf("listen for probes: %w", err)
	}
	log.Printf("probes at %s", l.Addr())
	probes := &http.Server{Handler: h.handler(r), ReadHeaderTimeout: 5 * time.Second}
	defer probes.Close() // last: they answer while the worker starts and while it drains
	failed := make(chan error, 2)
	go func() { failed <- probes.Serve(l) }()

	if !join(ctx, r) {
		return nil
	}
	go func() {
		err := r.Work(ctx, queue, o.concurrency, func(ctx context.Context, l *recovery.Lease) error {
			return o.exporter.export(ctx, l.Payload())
		})
		if err != nil {
			failed <- err
		}
	}()
	select {
	case <-ctx.Done():
	case err = <-failed:
	}
	limited, cancel := context.WithTimeout(context.Background(), o.stopTimeout)
	defer cancel()
	return errors.Join(err, r.Stop(limited))
}

// join enters the fleet, and does not mind if Redis is late: a process that ends because of it would be restarted later and later, up to
// every five minutes. It reports false if ctx ended first.
func join(ctx context.Context, r *recovery.Recoverer) bool {
	for {
		err := r.Start(ctx)
		if err == nil {
			return true
		}
		log.Print(err)
		select {
		case <-time.After(time.Second):
		case <-ctx.Done():
			return false
		}
	}
}
