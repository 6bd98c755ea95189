// Worker sends the mails in the Redis list "mails".
package main

import (
	"context"
	"errors"
	"flag"
	"log"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/crashsafe/recovery/examples/redis-list/mail"
	"github.com/redis/go-redis/v9"
)

func main() {
	addr := flag.String("redis", "127.0.0.1:6379", "`address` of Redis")
	concurrency := flag.Int("concurrency", 4, "`number` of mails to send at a time")
	sender := mail.Flags()
	flag.Parse()

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	rdb := redis.NewClient(&redis.Options{Addr: *addr})
	defer rdb.Close()

	var workers sync.WaitGroup
	for range *concurrency {
		workers.Go(func() {
			for ctx.Err() == nil {
				popped, err := rdb.BRPop(ctx, time.Second, "mails").Result()
				if errors.Is(err, redis.Nil) || ctx.Err() != nil && err != nil {
					continue // no mail within the second, or the end
				}
				if err != nil {
					log.Print(err)
					time.Sleep(time.Second)
					continue
				}
				if err := sender.Send(context.Background(), []byte(popped[1])); err != nil {
					log.Print(err)
				}
			}
		})
	}
	workers.Wait()
}
