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
const childEnv = "SAGA_TEST_CHILD"

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
	dir, err := os.MkdirTemp("", "saga") // t.TempDir may be too long for a socket
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
	desk  desk
	store *store
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
	f := &fleet{t: t, desk: desk{setup: s, rdb: rdb, out: io.Discard}, store: &store{rdb: rdb, prefix: s.prefix()},
		insp: recovery.NewInspector(rdb, s.namespace)}
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
	args := append([]string{"worker", "-redis", f.desk.redis, "-namespace", f.desk.namespace, "-name", name, "-threshold", threshold.String()}, flags...)
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
	eventually(f.t, name+" joins", func() bool { return f.count(name, ready) == 1 })
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
	select {
	case <-p.ended:
	case <-time.After(patience):
		p.f.t.Fatalf("worker %s does not leave", p.name)
	}
	require.Zero(p.f.t, p.cmd.ProcessState.ExitCode(), "worker %s", p.name)
}

// reports returns what was said until now.
func (f *fleet) reports() []saying {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.said[:len(f.said):len(f.said)]
}

// count counts the sagas of which a worker said one of points; "" is any worker.
func (f *fleet) count(worker string, points ...string) int {
	sagas := map[string]bool{}
	for _, s := range f.reports() {
		for _, p := range points {
			if s.Point == p && (worker == "" || s.worker == worker) {
				sagas[s.Run.Saga] = true
			}
		}
	}
	return len(sagas)
}

// at waits until a saga has reached a point in a worker.
func (f *fleet) at(worker, saga, point string) (found report) {
	f.t.Helper()
	eventually(f.t, fmt.Sprintf("%s of %s in %s", point, saga, worker), func() bool {
		for _, s := range f.reports() {
			if s.worker == worker && s.Run.Saga == saga && s.Point == point {
				found = s.report
				return true
			}
		}
		return false
	})
	return found
}

// do runs a command of the program.
func (f *fleet) do(line string) string {
	f.t.Helper()
	var out strings.Builder
	d := f.desk
	d.out = &out
	words := strings.Fields(line)
	require.NoError(f.t, d.do(context.Background(), words[0], words[1:]), line)
	return out.String()
}

func (f *fleet) submit(orders ...Order) {
	f.t.Helper()
	for _, o := range orders {
		require.NoError(f.t, submit(context.Background(), f.desk.rdb, f.desk.list(), o))
	}
}

func (f *fleet) letters() []recovery.DeadLetter {
	f.t.Helper()
	letters, err := f.insp.DeadLetters(context.Background(), 0, 1000)
	require.NoError(f.t, err)
	return letters
}

// letter waits for the only dead letter.
func (f *fleet) letter() recovery.DeadLetter {
	f.t.Helper()
	eventually(f.t, "a dead letter", func() bool { return len(f.letters()) > 0 })
	require.Len(f.t, f.letters(), 1)
	return f.letters()[0]
}
