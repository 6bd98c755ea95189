package redislist

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

// Real processes: a redis-server, and the two programs.

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

// startRedis runs a redis-server of the test's own, and returns a client of it.
func startRedis(t *testing.T) *redis.Client {
	t.Helper()
	needCommand(t, "redis-server")
	for range 5 { // somebody else may be quicker to take the port that was free
		addr := freeAddr(t)
		_, port, err := net.SplitHostPort(addr)
		require.NoError(t, err)
		cmd := exec.Command("redis-server", "--port", port, "--bind", "127.0.0.1", "--dir", t.TempDir(), "--save", "", "--loglevel", "warning")
		require.NoError(t, cmd.Start())
		t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
		rdb := redis.NewClient(&redis.Options{Addr: addr, MaxRetries: -1})
		t.Cleanup(func() { _ = rdb.Close() })
		if answers(rdb, cmd.Process.Pid) {
			return rdb
		}
	}
	t.Fatal("redis-server does not answer")
	return nil
}

// answers waits until the process pid, and no other, answers rdb.
func answers(rdb *redis.Client, pid int) bool {
	for end := time.Now().Add(5 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if info, err := rdb.Info(bg, "server").Result(); err == nil {
			return strings.Contains(info, fmt.Sprintf("process_id:%d\r\n", pid))
		}
	}
	return false
}

func freeAddr(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	return l.Addr().String()
}

// binDir is where both programs are compiled to.
var binDir string

func TestMain(m *testing.M) {
	var err error
	if binDir, err = os.MkdirTemp("", "redis-list"); err != nil {
		panic(err)
	}
	code := m.Run()
	_ = os.RemoveAll(binDir)
	os.Exit(code)
}

// compile compiles both programs, once for all tests.
var compile = sync.OnceValues(func() (string, error) {
	out, err := exec.Command("go", "build", "-o", binDir+"/", "./before", "./after").CombinedOutput()
	return string(out), err
})

// build returns the program in directory dir.
func build(t *testing.T, dir string) string {
	t.Helper()
	out, err := compile()
	require.NoError(t, err, out)
	return filepath.Join(binDir, dir)
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

// sending counts the mails that the worker has begun to send.
func (p *process) sending() int { return strings.Count(p.text(), " sending ") }

// kill is kill -9.
func (p *process) kill() {
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
}

// terminate asks the worker to end, and waits until it has.
func (p *process) terminate() {
	p.t.Helper()
	require.NoError(p.t, p.cmd.Process.Signal(syscall.SIGTERM))
	require.NoError(p.t, p.cmd.Wait())
}

// eventually waits for a condition.
func eventually(t *testing.T, condition func() bool, what string) {
	t.Helper()
	require.Eventually(t, condition, 30*time.Second, 10*time.Millisecond, what)
}
