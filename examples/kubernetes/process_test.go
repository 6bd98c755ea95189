package main

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
)

// Real processes: a redis-server, and the worker.

var bg = context.Background()

// needCommand finds a program that the tests run. Only CI insists on it.
func needCommand(t *testing.T, name string) {
	t.Helper()
	if _, err := exec.LookPath(name); err != nil {
		if os.Getenv("CI") != "" {
			t.Fatalf("%s is not installed, and CI is set", name)
		}
		t.Skipf("%s is not installed", name)
	}
}

// server is a redis-server of the test's own.
type server struct {
	t    *testing.T
	rdb  *redis.Client
	addr string
	cmd  *exec.Cmd
}

func startRedis(t *testing.T) *server {
	t.Helper()
	for range 5 { // somebody else may be quicker to take the port that was free
		if s := newServer(t); s.start() {
			return s
		}
	}
	t.Fatal("redis-server does not answer")
	return nil
}

// newServer knows its address, and does not run yet.
func newServer(t *testing.T) *server {
	t.Helper()
	needCommand(t, "redis-server")
	addr := freeAddr(t)
	s := &server{t: t, addr: addr, rdb: redis.NewClient(&redis.Options{Addr: addr, MaxRetries: -1})}
	t.Cleanup(func() { _ = s.rdb.Close() })
	return s
}

// start reports whether the server answers, and no other one at its address.
func (s *server) start() bool {
	s.t.Helper()
	_, port, err := net.SplitHostPort(s.addr)
	require.NoError(s.t, err)
	s.cmd = exec.Command("redis-server", "--port", port, "--bind", "127.0.0.1", "--dir", s.t.TempDir(), "--save", "", "--loglevel", "warning")
	require.NoError(s.t, s.cmd.Start())
	s.t.Cleanup(func() { _ = s.cmd.Process.Kill(); _ = s.cmd.Wait() })
	for end := time.Now().Add(5 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if info, err := s.rdb.Info(bg, "server").Result(); err == nil {
			return strings.Contains(info, fmt.Sprintf("process_id:%d\r\n", s.cmd.Process.Pid))
		}
	}
	return false
}

func (s *server) signal(sig syscall.Signal) {
	s.t.Helper()
	require.NoError(s.t, s.cmd.Process.Signal(sig))
}

func freeAddr(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	return l.Addr().String()
}

// binDir is where the program is compiled to.
var binDir string

func TestMain(m *testing.M) {
	var err error
	if binDir, err = os.MkdirTemp("", "kubernetes"); err != nil {
		panic(err)
	}
	code := m.Run()
	_ = os.RemoveAll(binDir)
	os.Exit(code)
}

// compile compiles the program, once for all tests.
var compile = sync.OnceValues(func() (string, error) {
	out, err := exec.Command("go", "build", "-o", binDir+"/", ".").CombinedOutput()
	return string(out), err
})

// build returns the program.
func build(t *testing.T) string {
	t.Helper()
	out, err := compile()
	require.NoError(t, err, out)
	return filepath.Join(binDir, "kubernetes")
}

// process is a worker.
type process struct {
	t   *testing.T
	cmd *exec.Cmd

	mu  sync.Mutex
	log bytes.Buffer
}

func start(t *testing.T, bin string, args ...string) *process {
	t.Helper()
	p := &process{t: t, cmd: exec.Command(bin, args...)}
	p.cmd.Stderr = p
	require.NoError(t, p.cmd.Start())
	t.Cleanup(func() {
		p.kill()
		if t.Failed() {
			t.Logf("worker %d:\n%s", p.pid(), p.text())
		}
	})
	return p
}

func (p *process) pid() int { return p.cmd.Process.Pid }

func (p *process) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.log.Write(b)
}

func (p *process) text() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.log.String()
}

// busy counts the jobs that the worker has begun.
func (p *process) busy() int { return strings.Count(p.text(), " exporting ") }

// kill is kill -9.
func (p *process) kill() {
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
}

// ended waits for the end, and returns the exit code.
func (p *process) ended() int {
	_ = p.cmd.Wait()
	return p.cmd.ProcessState.ExitCode()
}

func (p *process) signal(sig syscall.Signal) {
	p.t.Helper()
	require.NoError(p.t, p.cmd.Process.Signal(sig))
}

// eventually waits for a condition.
func eventually(t *testing.T, condition func() bool, what string) {
	t.Helper()
	require.Eventually(t, condition, 30*time.Second, 10*time.Millisecond, what)
}
