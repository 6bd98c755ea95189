//go:build unix

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/crashsafe/recovery"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
)

// childEnv makes the test binary the program.
const childEnv = "ASYNC_HTTP_TEST_CHILD"

func TestMain(m *testing.M) {
	if os.Getenv(childEnv) != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

const (
	threshold = time.Second
	patience  = 40 * time.Second
)

// startRedis runs a redis-server for one test, and answers its address.
func startRedis(t *testing.T) string {
	t.Helper()
	path, err := exec.LookPath("redis-server")
	if err != nil {
		if os.Getenv("CI") != "" {
			t.Fatal("redis-server is not installed, and CI is set: `make test` installs it")
		}
		t.Skip("redis-server is not installed: `make test` installs it")
	}
	dir, err := os.MkdirTemp("", "async-http") // t.TempDir may be too long for a socket
	require.NoError(t, err)
	socket := filepath.Join(dir, "redis.sock")
	cmd := exec.Command(path, "--port", "0", "--unixsocket", socket, "--dir", dir, "--save", "", "--loglevel", "warning")
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait(); _ = os.RemoveAll(dir) })
	rdb := redis.NewClient(&redis.Options{Network: "unix", Addr: socket, MaxRetries: -1})
	defer rdb.Close()
	eventually(t, "redis-server answers", func() bool { return rdb.Ping(context.Background()).Err() == nil })
	return "unix://" + socket
}

// eventually waits for a condition.
func eventually(t *testing.T, what string, cond func() bool) {
	t.Helper()
	require.Eventually(t, cond, patience, 10*time.Millisecond, what)
}

// fleet is the processes of one test, and everything that they said.
type fleet struct {
	t     *testing.T
	setup setup
	rdb   *redis.Client
	rows  *results
	insp  *recovery.Inspector

	mu   sync.Mutex // guards said
	said []saying
}

type saying struct {
	report
	worker string
}

// proc is one worker process.
type proc struct {
	f     *fleet
	name  string
	cmd   *exec.Cmd
	stdin io.WriteCloser
	ended chan struct{} // closed when everything that it wrote is in said
}

func newFleet(t *testing.T) *fleet {
	t.Helper()
	addr := startRedis(t)
	options, err := server(addr)
	require.NoError(t, err)
	rdb := redis.NewClient(options)
	t.Cleanup(func() { rdb.Close() })
	s := setup{redis: addr, namespace: "test"}
	f := &fleet{t: t, setup: s, rdb: rdb, rows: &results{rdb: rdb, prefix: s.prefix()}, insp: recovery.NewInspector(rdb, s.namespace)}
	t.Cleanup(func() {
		if t.Failed() {
			for _, s := range f.reports() {
				t.Logf("%+v", s)
			}
			workers, err := f.insp.Workers(context.Background())
			t.Logf("%+v %v", workers, err)
		}
	})
	return f
}

// hire starts a worker, and waits until it has joined.
func (f *fleet) hire(name string, flags ...string) *proc {
	f.t.Helper()
	self, err := os.Executable()
	require.NoError(f.t, err)
	args := append([]string{"worker", "-redis", f.setup.redis, "-namespace", f.setup.namespace, "-name", name, "-threshold", threshold.String()}, flags...)
	p := &proc{f: f, name: name, cmd: exec.Command(self, args...), ended: make(chan struct{})}
	p.cmd.Env = append(os.Environ(), childEnv+"=1")
	stdout, err := p.cmd.StdoutPipe()
	require.NoError(f.t, err)
	p.stdin, err = p.cmd.StdinPipe()
	require.NoError(f.t, err)
	var stderr strings.Builder
	p.cmd.Stderr = &stderr
	require.NoError(f.t, p.cmd.Start())
	go func() {
		defer close(p.ended)
		for lines := bufio.NewScanner(stdout); lines.Scan(); {
			var r report
			if json.Unmarshal(lines.Bytes(), &r) == nil { // the last one may be cut off
				f.mu.Lock()
				f.said = append(f.said, saying{r, name})
				f.mu.Unlock()
			}
		}
		_ = p.cmd.Wait()
		if strings.Contains(stderr.String(), "DATA RACE") {
			f.t.Errorf("worker %s: %s", name, stderr.String())
		}
	}()
	f.t.Cleanup(p.kill)
	f.at(name, "", ready)
	return p
}

// kill is kill -9.
func (p *proc) kill() {
	_ = p.cmd.Process.Kill()
	<-p.ended
}

// leave asks the worker to go, and waits until it has.
func (p *proc) leave() {
	p.f.t.Helper()
	_ = p.stdin.Close()
	p.wait()
}

func (p *proc) wait() {
	p.f.t.Helper()
	select {
	case <-p.ended:
	case <-time.After(patience):
		p.f.t.Fatalf("worker %s does not leave", p.name)
	}
	require.Zero(p.f.t, p.cmd.ProcessState.ExitCode(), "worker %s", p.name)
}

// send gives the worker requests of its own, which it tracks, unlike those in the list.
func (p *proc) send(rs ...Request) {
	p.f.t.Helper()
	for _, r := range rs {
		text, err := json.Marshal(r)
		require.NoError(p.f.t, err)
		p.say(string(text))
	}
}

func (p *proc) say(line string) {
	p.f.t.Helper()
	_, err := fmt.Fprintln(p.stdin, line)
	require.NoError(p.f.t, err)
}

// submit puts requests into the list.
func (f *fleet) submit(rs ...Request) {
	f.t.Helper()
	for _, r := range rs {
		require.NoError(f.t, submit(context.Background(), f.rdb, f.setup.list(), r))
	}
}

// reports returns what was said until now.
func (f *fleet) reports() []saying {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.said[:len(f.said):len(f.said)]
}

// count counts what was said; "" is any.
func (f *fleet) count(worker, id, point string) (n int) {
	for _, s := range f.reports() {
		if s.Point == point && (worker == "" || s.worker == worker) && (id == "" || s.ID == id) {
			n++
		}
	}
	return n
}

// at waits until a request has reached a point in a worker.
func (f *fleet) at(worker, id, point string) {
	f.t.Helper()
	eventually(f.t, fmt.Sprintf("%s of %q in %q", point, id, worker), func() bool { return f.count(worker, id, point) > 0 })
}

// results reads all rows.
func (f *fleet) results() map[string]result {
	f.t.Helper()
	rows, err := f.rdb.HGetAll(context.Background(), f.rows.rows()).Result()
	require.NoError(f.t, err)
	all := map[string]result{}
	for id, text := range rows {
		var r result
		require.NoError(f.t, json.Unmarshal([]byte(text), &r))
		all[id] = r
	}
	return all
}

// calls reads every call of the Callback, by request.
func (f *fleet) calls() map[string][]result {
	f.t.Helper()
	lines, err := f.rdb.LRange(context.Background(), f.rows.calls(), 0, -1).Result()
	require.NoError(f.t, err)
	all := map[string][]result{}
	for _, text := range lines {
		var r result
		require.NoError(f.t, json.Unmarshal([]byte(text), &r))
		all[r.ID] = append(all[r.ID], r)
	}
	return all
}
