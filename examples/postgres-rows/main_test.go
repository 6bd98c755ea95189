package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/crashsafe/recovery"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const childEnv = "POSTGRES_ROWS_TEST_WORKER" // makes the test binary a worker

func TestMain(m *testing.M) {
	if env := os.Getenv(childEnv); env != "" {
		runChild(env)
		return
	}
	code := m.Run()
	stopServers()
	os.Exit(code)
}

// child is a worker process, and where it shall come to grief: at the n-th time that a point is reached.
type child struct {
	Settings     settings
	DieAt        string
	DieCount     int64
	FreezeAt     string
	FreezeCount  int64
	died, frozen atomic.Int64
}

// runChild works until stdin ends: when the test says so, or dies.
func runChild(env string) {
	var c child
	if err := json.Unmarshal([]byte(env), &c); err != nil {
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
	servers := startServers(t)
	name := fmt.Sprint("bank", banks.Add(1))
	ctx := t.Context()
	admin, err := pgx.Connect(ctx, servers.postgres("postgres"))
	require.NoError(t, err)
	defer admin.Close(ctx)
	_, err = admin.Exec(ctx, "CREATE DATABASE "+name)
	require.NoError(t, err)
	b := &bank{t: t, rows: rows, rdb: redis.NewClient(&redis.Options{Addr: servers.redis}), settings: settings{
		Postgres: servers.postgres(name), Redis: servers.redis, Namespace: name,
		Threshold: time.Second, Idle: time.Second, Poll: 50 * time.Millisecond, Stop: 5 * time.Second,
		Block: 5, Work: 100 * time.Millisecond,
	}}
	t.Cleanup(func() { b.rdb.Close() })
	b.db, err = connect(ctx, b.settings.Postgres, time.Hour)
	require.NoError(t, err)
	t.Cleanup(b.db.Close)
	require.NoError(t, insert(ctx, b.db, rows))
	return b
}

// proc is a worker process.
type proc struct {
	t     *testing.T
	cmd   *exec.Cmd
	stdin io.Closer
	ended chan struct{}

	mu   sync.Mutex
	said bytes.Buffer
}

func (p *proc) Write(text []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.said.Write(text)
}

func (p *proc) says(text string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return strings.Contains(p.said.String(), text)
}

// start runs the test binary as a worker. It ends with the test.
func (b *bank) start(c *child) *proc {
	b.t.Helper()
	c.Settings = b.settings
	env, err := json.Marshal(c)
	require.NoError(b.t, err)
	p := &proc{t: b.t, cmd: exec.Command(os.Args[0]), ended: make(chan struct{})}
	p.cmd.Env = append(os.Environ(), childEnv+"="+string(env))
	p.cmd.Stderr, p.cmd.Stdout = p, p
	p.stdin, err = p.cmd.StdinPipe()
	require.NoError(b.t, err)
	require.NoError(b.t, p.cmd.Start())
	go func() {
		_ = p.cmd.Wait()
		close(p.ended)
	}()
	b.t.Cleanup(func() {
		p.kill()
		if b.t.Failed() {
			b.t.Logf("worker %d: %v\n%s", p.cmd.Process.Pid, p.cmd.ProcessState, &p.said)
		}
	})
	return p
}

// kill is kill -9. It does nothing to a worker that has ended.
func (p *proc) kill() {
	_ = p.cmd.Process.Kill()
	<-p.ended
}

// awaitDeath waits for a worker that kills itself.
func (p *proc) awaitDeath() {
	p.t.Helper()
	select {
	case <-p.ended:
		require.Equal(p.t, "signal: killed", p.cmd.ProcessState.String())
	case <-time.After(patience):
		require.Fail(p.t, "worker does not come to the point at which it dies")
	}
}

// leave asks a worker to go, and waits until it has.
func (p *proc) leave() {
	p.t.Helper()
	p.stdin.Close()
	select {
	case <-p.ended:
		assert.Zero(p.t, p.cmd.ProcessState.ExitCode(), "a worker that is asked to leave ends well")
	case <-time.After(patience):
		require.Fail(p.t, "worker does not leave")
	}
}

const patience = 30 * time.Second

func (b *bank) eventually(what string, condition func() bool) {
	b.t.Helper()
	deadline := time.Now().Add(patience)
	for !condition() {
		if time.Now().After(deadline) {
			b.t.Logf("transfers by status: %v", b.statuses())
			require.Fail(b.t, "not in time: "+what)
		}
		time.Sleep(10 * time.Millisecond)
	}
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
