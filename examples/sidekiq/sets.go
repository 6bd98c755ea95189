package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"math/rand/v2"
	"strconv"
	"time"

	"github.com/crashsafe/recovery"
	"github.com/redis/go-redis/v9"
)

// sets are Sidekiq's sorted sets: retry and schedule, whose scores are when a job is due, and dead, which waits for a person.
type sets struct{ rdb *redis.Client }

// Sidekiq's limits of the set dead.
const (
	deadFor  = 180 * 24 * time.Hour
	deadMost = 10_000
)

// put puts a job where the verdict says.
func (s sets) put(ctx context.Context, v verdict) error {
	if v.set == "" {
		return nil
	}
	text, err := v.job.encode()
	if err == nil && v.set == "dead" {
		err = s.bury(ctx, text, v.at)
	} else if err == nil {
		err = s.rdb.ZAdd(ctx, v.set, redis.Z{Score: seconds(v.at), Member: text}).Err()
	}
	if err != nil {
		return fmt.Errorf("put job %q into %s: %w", v.job.text("jid"), v.set, err)
	}
	return nil
}

// bury adds to the set dead, and trims it.
func (s sets) bury(ctx context.Context, text []byte, at time.Time) error {
	_, err := s.rdb.TxPipelined(ctx, func(p redis.Pipeliner) error {
		p.ZAdd(ctx, "dead", redis.Z{Score: seconds(at), Member: text})
		p.ZRemRangeByScore(ctx, "dead", "-inf", strconv.FormatFloat(seconds(time.Now().Add(-deadFor)), 'f', 6, 64))
		p.ZRemRangeByRank(ctx, "dead", 0, -deadMost)
		return nil
	})
	return err
}

// poll does what has to be done now and then, until ctx ends. Any number of workers may do it, and Sidekiq beside them.
func (s sets) poll(ctx context.Context, interval time.Duration) {
	for {
		err := errors.Join(s.enqueueDue(ctx, "retry"), s.enqueueDue(ctx, "schedule"), s.showDeadLetters(ctx))
		if err != nil && ctx.Err() == nil {
			log.Print(err)
		}
		select {
		case <-time.After(interval/2 + rand.N(interval)):
		case <-ctx.Done():
			return
		}
	}
}

// moveScript takes a job out of a set and pushes it to its queue. Sidekiq's own poller does that in two steps, and a job whose poller is
// killed between them is gone. Whoever removes it pushes it, so no two do.
var moveScript = redis.NewScript(`
local set, queues, queue = KEYS[1], KEYS[2], KEYS[3]
local job, name, element = ARGV[1], ARGV[2], ARGV[3]
if redis.call("ZREM", set, job) == 0 then
	return 0
end
redis.call("SADD", queues, name)
return redis.call("LPUSH", queue, element)
`)

// enqueueDue moves all jobs that are due from a set to their queues.
func (s sets) enqueueDue(ctx context.Context, set string) error {
	for {
		now := time.Now()
		due, err := s.rdb.ZRangeArgs(ctx, redis.ZRangeArgs{Key: set, Start: "-inf", Stop: seconds(now), ByScore: true, Count: 100}).Result()
		if err != nil {
			return fmt.Errorf("look for jobs in %s: %w", set, err)
		}
		for _, text := range due {
			if err := s.enqueue(ctx, set, text, now); err != nil {
				return fmt.Errorf("enqueue a job of %s: %w", set, err)
			}
		}
		if len(due) == 0 {
			return nil
		}
	}
}

func (s sets) enqueue(ctx context.Context, set, text string, now time.Time) error {
	j, err := parseJob([]byte(text))
	queue := j.text("queue")
	if err != nil || queue == "" { // nobody can run it, and it must not be in the way of the others
		_, err := s.rdb.TxPipelined(ctx, func(p redis.Pipeliner) error {
			p.ZAdd(ctx, "dead", redis.Z{Score: seconds(now), Member: text})
			p.ZRem(ctx, set, text)
			return nil
		})
		return err
	}
	j.stamp("enqueued_at", now)
	element, err := j.encode()
	if err != nil {
		return err
	}
	return moveScript.Run(ctx, s.rdb, []string{set, "queues", "queue:" + queue}, text, queue, element).Err()
}

// showDeadLetters moves what the library has given up to the set dead, where Sidekiq's pages show it: jobs that killed their workers too
// often, and what is no job.
func (s sets) showDeadLetters(ctx context.Context) error {
	inspector := recovery.NewInspector(s.rdb, namespace)
	var errs []error
	for {
		letters, err := inspector.DeadLetters(ctx, len(errs), 100) // those that can't be moved stay, and are skipped
		if err != nil || len(letters) == 0 {
			return errors.Join(append(errs, err)...)
		}
		for _, d := range letters {
			err := inspector.Requeue(ctx, d.Key, recovery.EnqueuerFunc(func(ctx context.Context, _ recovery.Orphan) error {
				return s.bury(ctx, obituary(d), d.Buried)
			}))
			if err != nil && !errors.Is(err, recovery.ErrNoLetter) { // a peer was quicker
				errs = append(errs, err)
			}
		}
	}
}

// obituary is the job with the reason for its death. It is the same bytes each time, so that it may be buried again.
func obituary(d recovery.DeadLetter) []byte {
	j, err := parseJob(d.Payload)
	if err != nil {
		return d.Payload
	}
	j.set("error_class", "recovery.DeadLetter")
	j.set("error_message", fmt.Sprintf("%s; last worker: %s", d.Cause, d.Worker))
	if !j.has("failed_at") {
		j.stamp("failed_at", d.Buried)
	}
	text, err := j.encode()
	if err != nil {
		return d.Payload
	}
	return text
}
