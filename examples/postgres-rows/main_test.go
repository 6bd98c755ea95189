package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/crashsafe/recovery"
	"github.com/crashsafe/recovery/examples/internal/fleet"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestMain(m *testing.M) {
	defer stopPostgres()
	fleet.Main(m, runChild)
}

// child is a worker process, which has it as its argument, and where it shall come to grief: at the n-th time that a point is reached.
type child struct {
	Settings     settings
	DieAt        string
	DieCount     int64
	FreezeAt     string
	FreezeCount  int64
	died, frozen atomic.Int64
}

// runChild works until stdin ends: when the test says so, or dies.
func runChild() {
	var c child
	if err := json.Unmarshal([]byte(os.Args[1]), &c); err != nil {
		panic(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
		time.Sleep(10 * time.Second) // the servers may have died with the test
		os.Exit(1)
	}()
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	if err := serve(ctx, c.Settings, log, c.at); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func (c *child) at(point string) {
	if point == c.FreezeAt && c.frozen.Add(1) == c.FreezeCount {
		resumed := make(chan os.Signal, 1)
		signal.Notify(resumed, syscall.SIGCONT)
		fmt.Fprintln(os.Stderr, "frozen at", point)
		_ = syscall.Kill(os.Getpid(), syscall.SIGSTOP)
		<-resumed // a thread may go on for a moment after it has asked to be stopped
	}
	if point == c.DieAt && c.died.Add(1) == c.DieCount {
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	}
}

// bank is a database and a fleet of one test.
type bank struct {
	t        *testing.T
	db       *pgxpool.Pool
	rdb      *redis.Client
	settings settings
	rows     int
}

var banks atomic.Int64

// newBank has its own database, with that many transfers to do.
func newBank(t *testing.T, rows int) *bank {
	t.Helper()
	pg, server := startPostgres(t), fleet.StartRedis(t)
	name := fmt.Sprint("bank", banks.Add(1))
	ctx := t.Context()
	admin, err := pgx.Connect(ctx, pg.dsn("postgres"))
	require.NoError(t, err)
	defer admin.Close(ctx)
	_, err = admin.Exec(ctx, "CREATE DATABASE "+name)
	require.NoError(t, err)
	b := &bank{t: t, rows: rows, rdb: server.Client, settings: settings{
		Postgres: pg.dsn(name), Redis: server.Addr, Namespace: name,
		Threshold: time.Second, Idle: time.Second, Poll: 50 * time.Millisecond, Stop: 5 * time.Second,
		Block: 5, Work: 100 * time.Millisecond,
	}}
	b.db, err = connect(ctx, b.settings.Postgres, time.Hour)
	require.NoError(t, err)
	t.Cleanup(b.db.Close)
	require.NoError(t, insert(ctx, b.db, rows))
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("transfers by status: %v", b.statuses())
		}
	})
	return b
}

// start runs the test binary as a worker.
func (b *bank) start(c *child) *fleet.Process {
	b.t.Helper()
	c.Settings = b.settings
	text, err := json.Marshal(c)
	require.NoError(b.t, err)
	return fleet.Start(b.t, fleet.Self(b.t, string(text)))
}

// startDoomed runs a worker that comes to grief, and waits until it has.
func (b *bank) startDoomed(c *child) {
	b.t.Helper()
	require.Equal(b.t, "signal: killed", b.start(c).Wait())
}

// startFrozen runs a worker, and waits until it stands still at a point.
func (b *bank) startFrozen(c *child) *fleet.Process {
	b.t.Helper()
	p := b.start(c)
	b.eventually("frozen", func() bool { return p.Says("frozen at "+c.FreezeAt) > 0 })
	return p
}

func (b *bank) eventually(what string, condition func() bool) {
	b.t.Helper()
	fleet.Eventually(b.t, what, condition)
}

// count answers a number.
func (b *bank) count(query string, args ...any) (n int) {
	b.t.Helper()
	require.NoError(b.t, b.db.QueryRow(context.Background(), query, args...).Scan(&n))
	return n
}

func (b *bank) inStatus(status string) int {
	b.t.Helper()
	return b.count("SELECT count(*) FROM transfers WHERE status = $1", status)
}

func (b *bank) statuses() map[string]int {
	all := map[string]int{}
	for _, status := range []string{"pending", "inprog", "done", "failed"} {
		all[status] = b.inStatus(status)
	}
	return all
}

func (b *bank) awaitAllDone() {
	b.t.Helper()
	b.eventually("all rows are done", func() bool { return b.inStatus("done") == b.rows })
}

// judge is the ledger: what had to be done is done, once, by the run whose number the row has.
func (b *bank) judge() {
	b.t.Helper()
	assert.Equal(b.t, map[string]int{"pending": 0, "inprog": 0, "done": b.rows, "failed": 0}, b.statuses())
	assert.Equal(b.t, b.rows, b.count("SELECT count(*) FROM payments"), "one payment for each row")
	assert.Equal(b.t, b.rows, b.count(`SELECT count(*) FROM transfers t JOIN payments p
		ON p.transfer = t.id AND p.fence = t.fence AND p.account = t.account AND p.amount = t.amount`), "by the run that the row names")
	letters, err := recovery.NewInspector(b.rdb, b.settings.Namespace).DeadLetters(context.Background(), 0, 1)
	require.NoError(b.t, err)
	assert.Empty(b.t, letters)
	b.eventually("nothing is in flight, and the dead are retired", func() bool {
		workers, err := recovery.NewInspector(b.rdb, b.settings.Namespace).Workers(context.Background())
		require.NoError(b.t, err)
		for _, w := range workers {
			if w.State != recovery.WorkerRunning || w.Inflight+w.Claimed > 0 {
				return false
			}
		}
		return true
	})
}
