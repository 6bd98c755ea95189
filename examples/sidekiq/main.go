// Sidekiq is a worker in Go on the queues of Sidekiq: Ruby programs push jobs as they always did, and what this worker was running
// when it was killed is run by another one. A job that fails goes where Sidekiq puts it, to be tried again. See README.md.
package main

import (
	"context"
	"errors"
	"flag"
	"log"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/crashsafe/recovery"
	"github.com/redis/go-redis/v9"
)

// options are the flags.
type options struct {
	redis, queues string
	concurrency   int
	poll          time.Duration
	heartbeat     time.Duration
	recoveries    int
	mailer        mailer
}

func parse(args []string) (o options, err error) {
	f := flag.NewFlagSet("sidekiq", flag.ContinueOnError)
	f.StringVar(&o.redis, "redis", "127.0.0.1:6379", "`address` of Sidekiq's Redis")
	f.StringVar(&o.queues, "queues", "critical,default,low", "`names` of queues, the most urgent first")
	f.IntVar(&o.concurrency, "concurrency", 10, "`number` of jobs at a time")
	f.DurationVar(&o.poll, "poll", 5*time.Second, "`interval` at which retry and schedule are looked at; 0: never, Sidekiq does it")
	f.DurationVar(&o.heartbeat, "heartbeat", 5*time.Second, "`interval`; jobs of a killed worker come back after four of them")
	f.IntVar(&o.recoveries, "recoveries", 3, "`number` of killed workers that a job may survive before it is dead")
	f.StringVar(&o.mailer.outbox, "outbox", "outbox.txt", "`file` that mails are sent to")
	f.DurationVar(&o.mailer.takes, "takes", time.Second, "`time` that it takes to send one")
	return o, f.Parse(args)
}

func main() {
	o, err := parse(os.Args[1:])
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err != nil {
		os.Exit(2) // the flag package has said why
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, o); err != nil {
		log.Fatal(err)
	}
}

const namespace = "sidekiq-go"

// run works until ctx ends, and a little longer.
func run(ctx context.Context, o options) error {
	rdb := redis.NewClient(&redis.Options{Addr: o.redis})
	defer rdb.Close()
	var queues []*recovery.ListQueue
	for name := range strings.SplitSeq(o.queues, ",") {
		queues = append(queues, recovery.NewListQueue("queue:"+name, recovery.Sidekiq()))
	}
	r, err := recovery.New(rdb, queues[0], recovery.Config{ // whichever: what was fetched goes back to its own queue
		Namespace:         namespace,
		HeartbeatInterval: o.heartbeat,
		MaxRecoveries:     o.recoveries,
	})
	if err != nil {
		return err
	}
	if err := r.Start(ctx); err != nil {
		return err
	}
	w := worker{sets: sets{rdb}, classes: map[string]performer{
		"MailJob": o.mailer.perform, // and yours
	}}
	failed := make(chan error, 1)
	go func() {
		if err := r.Work(ctx, recovery.InOrder(queues...), o.concurrency, w.run); err != nil {
			failed <- err
		}
	}()
	if o.poll > 0 {
		go w.sets.poll(ctx, o.poll)
	}
	select {
	case <-ctx.Done():
	case err = <-failed: // it could not begin
	}
	limited, cancel := context.WithTimeout(context.Background(), 25*time.Second) // as Sidekiq's -t
	defer cancel()
	return errors.Join(err, r.Stop(limited))
}
