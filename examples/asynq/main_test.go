package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/crashsafe/recovery"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
)

const (
	childEnv = "ASYNQ_TEST_CHILD" // makes the test binary a receiver or a worker
	ledger   = "ledger"           // list of payloads, each entered when its job is done
	patience = 30 * time.Second
)

func TestMain(m *testing.M) {
	if env := os.Getenv(childEnv); env != "" {
		runChild(env)
		return
	}
	os.Exit(m.Run())
}

// child is a process of either kind.
type child struct {
	Settings     settings
	DieOnEnqueue bool // when asynq has the task, and recovery does not know it yet
}

// runChild serves until stdin ends: when the test says so, or dies.
func runChild(env string) {
	var c child
	if err := json.Unmarshal([]byte(env), &c); err != nil {
		panic(err)
	}
	slog.SetDefault(slog.New(slog.NewTextHandler(os.Stdout, &slog.HandlerOptions{Level: slog.LevelWarn})))
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
		time.Sleep(10 * time.Second) // Redis may have died with the test
		os.Exit(1)
	}()
	var wrap func(recovery.Enqueuer) recovery.Enqueuer
	if c.DieOnEnqueue {
		wrap = dieOnEnqueue
	}
	rdb := redis.NewClient(&redis.Options{Addr: c.Settings.Redis})
	if err := serve(ctx, c.Settings, testHandler(rdb, c.Settings.Listen != ""), wrap); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
}

// testHandler enters what it has done into the ledger. In a receiver, jobs named slow never end, and those named bad fail.
func testHandler(rdb *redis.Client, receiver bool) handler {
	return func(ctx context.Context, payload []byte) error {
		switch {
		case receiver && bytes.HasPrefix(payload, []byte("slow")):
			<-ctx.Done()
			return context.Cause(ctx)
		case receiver && bytes.HasPrefix(payload, []byte("bad")):
			return fmt.Errorf("%s does not work here", payload)
		}
		return rdb.RPush(ctx, ledger, payload).Err()
	}
}

func dieOnEnqueue(enq recovery.Enqueuer) recovery.Enqueuer {
	return recovery.EnqueuerFunc(func(ctx context.Context, o recovery.Orphan) error {
		if err := enq.Enqueue(ctx, o); err != nil {
			return err
		}
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	})
}

// world is one Redis, and the processes on it.
type world struct {
	t     *testing.T
	redis string
	rdb   *redis.Client
}

func newWorld(t testing.TB) *world {
	t.Helper()
	if _, err := exec.LookPath("redis-server"); err != nil {
		if os.Getenv("CI") != "" {
			t.Fatal(err)
		}
		t.Skip(err)
	}
	dir, err := os.MkdirTemp("", "asynq") // not t.TempDir: a socket's path is short
	require.NoError(t, err)
	w := &world{redis: filepath.Join(dir, "redis.sock")}
	w.t, _ = t.(*testing.T)
	server := exec.Command("redis-server", "--port", "0", "--unixsocket", w.redis, "--dir", dir, "--save", "", "--loglevel", "warning")
	server.Stderr = os.Stderr
	require.NoError(t, server.Start())
	t.Cleanup(func() {
		_ = server.Process.Kill()
		_ = server.Wait()
		_ = os.RemoveAll(dir)
	})
	w.rdb = redis.NewClient(&redis.Options{Addr: w.redis})
	t.Cleanup(func() { w.rdb.Close() })
	require.Eventually(t, func() bool { return w.rdb.Ping(context.Background()).Err() == nil }, patience, 10*time.Millisecond)
	return w
}

// proc is a process.
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

func (p *proc) saying() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.said.String()
}

// start runs the test binary as c. It ends with the test.
func (w *world) start(c child) *proc {
	w.t.Helper()
	c.Settings.Redis, c.Settings.Threshold, c.Settings.Stop = w.redis, time.Second, time.Second
	env, err := json.Marshal(c)
	require.NoError(w.t, err)
	p := &proc{t: w.t, cmd: exec.Command(os.Args[0]), ended: make(chan struct{})}
	p.cmd.Env = append(os.Environ(), childEnv+"="+string(env))
	p.cmd.Stdout, p.cmd.Stderr = p, p
	p.stdin, err = p.cmd.StdinPipe()
	require.NoError(w.t, err)
	require.NoError(w.t, p.cmd.Start())
	go func() {
		_ = p.cmd.Wait()
		close(p.ended)
	}()
	w.t.Cleanup(func() {
		p.kill()
		if w.t.Failed() {
			w.t.Logf("process %d: %v\n%s", p.cmd.Process.Pid, p.cmd.ProcessState, p.saying())
		}
	})
	return p
}

var listening = regexp.MustCompile(`listening on (\S+)`)

// startReceiver answers where it listens, too.
func (w *world) startReceiver() (*proc, string) {
	w.t.Helper()
	p := w.start(child{Settings: settings{Listen: "127.0.0.1:0"}})
	require.Eventually(w.t, func() bool { return listening.MatchString(p.saying()) }, patience, 10*time.Millisecond)
	return p, "http://" + listening.FindStringSubmatch(p.saying())[1]
}

// kill is kill -9. It does nothing to a process that has ended.
func (p *proc) kill() {
	_ = p.cmd.Process.Kill()
	<-p.ended
}

func (p *proc) awaitEnd() string {
	p.t.Helper()
	select {
	case <-p.ended:
	case <-time.After(patience):
		require.Fail(p.t, "process does not end")
	}
	return p.cmd.ProcessState.String()
}

// post sends a webhook and requires that it was accepted.
func (w *world) post(url, payload string) {
	w.t.Helper()
	req, err := http.NewRequestWithContext(w.t.Context(), http.MethodPost, url, strings.NewReader(payload))
	require.NoError(w.t, err)
	req.Header.Set(idHeader, payload)
	answer, err := http.DefaultClient.Do(req)
	require.NoError(w.t, err)
	defer answer.Body.Close()
	require.Equal(w.t, http.StatusAccepted, answer.StatusCode)
}

// done is what the ledger says.
func (w *world) done() []string {
	w.t.Helper()
	all, err := w.rdb.LRange(context.Background(), ledger, 0, -1).Result()
	require.NoError(w.t, err)
	return all
}

// requireDone waits until the ledger has each of these, and requires that it has nothing more.
func (w *world) requireDone(payloads ...string) {
	w.t.Helper()
	require.Eventually(w.t, func() bool { return len(w.done()) >= len(payloads) }, patience, 10*time.Millisecond)
	require.ElementsMatch(w.t, payloads, w.done())
}

// awaitRest waits until nothing is in flight or claimed, and the dead are retired.
func (w *world) awaitRest() {
	w.t.Helper()
	require.Eventually(w.t, func() bool {
		workers, err := recovery.NewInspector(w.rdb, "webhooks").Workers(context.Background())
		for _, i := range workers {
			if i.State != recovery.WorkerRunning || i.Inflight+i.Claimed > 0 {
				return false
			}
		}
		return err == nil
	}, patience, 20*time.Millisecond)
}
