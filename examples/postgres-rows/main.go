// Postgres-rows is a worker whose jobs are rows of a PostgreSQL table. It marks blocks of rows as in progress, and the library puts
// back those that a dead worker had marked.
//
//	postgres-rows -postgres "dbname=bank" -redis 127.0.0.1:6379 -add 1000
package main

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/crashsafe/recovery"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
)

// settings are what the flags say.
type settings struct {
	Postgres, Redis, Namespace string
	Threshold                  time.Duration // OrphanThreshold
	Idle                       time.Duration // the longest silence of a transaction
	Poll, Stop                 time.Duration
	Block                      int
	Work                       time.Duration // how long a payment takes, at most
}

func main() {
	var s settings
	flag.StringVar(&s.Postgres, "postgres", "", "connection string; what it lacks comes from PGHOST, PGDATABASE and so on")
	flag.StringVar(&s.Redis, "redis", "127.0.0.1:6379", "address, or path of a socket")
	flag.StringVar(&s.Namespace, "namespace", "transfers", "of the fleet")
	flag.DurationVar(&s.Threshold, "threshold", 20*time.Second, "silence after which a worker is dead")
	flag.DurationVar(&s.Idle, "idle", 10*time.Second, "silence after which PostgreSQL ends a worker's transaction")
	flag.DurationVar(&s.Poll, "poll", time.Second, "wait between looks at a table without work")
	flag.DurationVar(&s.Stop, "stop", 25*time.Second, "time that running jobs have after SIGTERM")
	flag.IntVar(&s.Block, "block", 20, "rows to take at a time")
	flag.DurationVar(&s.Work, "work", time.Second, "a payment takes up to this long")
	add := flag.Int("add", 0, "create the tables, insert that many rows, and exit")
	flag.Parse()

	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer cancel()
	var err error
	if *add > 0 {
		err = fill(ctx, s, *add)
	} else {
		err = serve(ctx, s, slog.Default(), func(string) {})
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// serve is a worker's life: it takes rows until ctx ends, gives those that run some time, and leaves.
func serve(ctx context.Context, s settings, log *slog.Logger, at func(string)) error {
	db, err := connect(ctx, s.Postgres, s.Idle)
	if err != nil {
		return err
	}
	defer db.Close()
	rdb := redis.NewClient(&redis.Options{Addr: s.Redis})
	defer rdb.Close()
	rec, err := recovery.New(rdb, handBack{db, at}, recovery.Config{
		Namespace:         s.Namespace,
		HeartbeatInterval: s.Threshold / 4,
		OrphanThreshold:   s.Threshold,
		EnqueueTimeout:    s.Threshold,      // it may have to wait for s.Idle
		MaxRecoveries:     recovery.NoLimit, // otherwise: see README, "Dead letters"
		Logger:            log,
	})
	if err != nil {
		return err
	}
	if err := rec.Start(ctx); err != nil {
		return err
	}
	w := &worker{db: db, rec: rec, block: s.Block, poll: s.Poll, log: log, at: at, pay: func(ctx context.Context, t transfer) error {
		return pay(ctx, t, s.Work)
	}}
	left := make(chan struct{})
	go func() {
		defer close(left)
		w.work(ctx)
	}()
	<-ctx.Done()
	limited, cancel := context.WithTimeout(context.Background(), s.Stop)
	defer cancel()
	err = rec.Stop(limited) // cancels what runs for too long, and puts it back
	<-left
	return err
}

// pay is the work: something slow, somewhere else, that may be done twice. What must not be done twice is in finish.
func pay(ctx context.Context, t transfer, longest time.Duration) error {
	if t.Amount <= 0 {
		return fmt.Errorf("amount %d is not positive", t.Amount)
	}
	select {
	case <-time.After(rand.N(longest)):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func fill(ctx context.Context, s settings, n int) error {
	db, err := connect(ctx, s.Postgres, s.Idle)
	if err != nil {
		return err
	}
	defer db.Close()
	return insert(ctx, db, n)
}

func insert(ctx context.Context, db *pgxpool.Pool, n int) error {
	if _, err := db.Exec(ctx, schema); err != nil {
		return err
	}
	_, err := db.Exec(ctx, `INSERT INTO transfers (account, amount) SELECT 'account-' || i % 7, i FROM generate_series(1, $1) i`, n)
	return err
}
