// Worker sends the mails in the Redis list "mails".
package main

import (
	"context"
	"flag"
	"log"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/crashsafe/recovery"
	"github.com/crashsafe/recovery/examples/redis-list/mail"
	"github.com/redis/go-redis/v9"
)

func main() {
	addr := flag.String("redis", "127.0.0.1:6379", "`address` of Redis")
	concurrency := flag.Int("concurrency", 4, "`number` of mails to send at a time")
	heartbeat := flag.Duration("heartbeat", 5*time.Second, "`interval`; mails of a killed worker come back after four of them")
	sender := mail.Flags()
	flag.Parse()

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	rdb := redis.NewClient(&redis.Options{Addr: *addr})
	defer rdb.Close()

	queue := recovery.NewListQueue("mails")
	r, err := recovery.New(rdb, queue, recovery.Config{Namespace: "mails", HeartbeatInterval: *heartbeat})
	if err == nil {
		err = r.Start(ctx)
	}
	if err != nil {
		log.Fatal(err)
	}
	go func() {
		err := r.Work(ctx, queue, *concurrency, func(ctx context.Context, l *recovery.Lease) error {
			return sender.Send(ctx, l.Payload())
		})
		if err != nil {
			log.Print(err)
			stop()
		}
	}()
	<-ctx.Done()
	limited, cancel := context.WithTimeout(context.Background(), 25*time.Second)
	defer cancel()
	if err := r.Stop(limited); err != nil {
		log.Print(err)
	}
}
