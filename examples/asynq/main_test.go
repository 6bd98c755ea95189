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
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/crashsafe/recovery"
	"github.com/crashsafe/recovery/examples/internal/fleet"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
)

const ledger = "ledger" // list of payloads, each entered when its job is done

func TestMain(m *testing.M) { fleet.Main(m, runChild) }

// child is a process of either kind, and its argument.
type child struct {
	Settings     settings
	DieOnEnqueue bool // when asynq has the task, and recovery does not know it yet
}

// runChild serves until stdin ends: when the test says so, or dies.
func runChild() {
	var c child
	if err := json.Unmarshal([]byte(os.Args[1]), &c); err != nil {
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
	t     testing.TB
	redis string
	rdb   *redis.Client
}

func newWorld(t testing.TB) *world {
	t.Helper()
	server := fleet.StartRedis(t)
	return &world{t: t, redis: server.Addr, rdb: server.Client}
}

// start runs the test binary as c.
func (w *world) start(c child) *fleet.Process {
	w.t.Helper()
	c.Settings.Redis, c.Settings.Threshold, c.Settings.Stop = w.redis, time.Second, time.Second
	text, err := json.Marshal(c)
	require.NoError(w.t, err)
	return fleet.Start(w.t, fleet.Self(w.t, string(text)))
}

var listening = regexp.MustCompile(`listening on (\S+)`)

// startReceiver answers where it listens, too.
func (w *world) startReceiver() (*fleet.Process, string) {
	w.t.Helper()
	p := w.start(child{Settings: settings{Listen: "127.0.0.1:0"}})
	fleet.Eventually(w.t, "the receiver listens", func() bool { return listening.MatchString(p.Text()) })
	return p, "http://" + listening.FindStringSubmatch(p.Text())[1]
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
	fleet.Eventually(w.t, fmt.Sprintf("%d jobs are done", len(payloads)), func() bool { return len(w.done()) >= len(payloads) })
	require.ElementsMatch(w.t, payloads, w.done())
}

// awaitRest waits until nothing is in flight or claimed, and the dead are retired.
func (w *world) awaitRest() {
	w.t.Helper()
	fleet.Eventually(w.t, "nothing is left to do", func() bool {
		workers, err := recovery.NewInspector(w.rdb, "webhooks").Workers(context.Background())
		for _, i := range workers {
			if i.State != recovery.WorkerRunning || i.Inflight+i.Claimed > 0 {
				return false
			}
		}
		return err == nil
	})
}
