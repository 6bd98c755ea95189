package fleet

import (
	"context"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/redis/go-redis/v9"
)

// Redis is a redis-server of one test's own.
type Redis struct {
	Addr   string // path of its socket: redis.Options takes it in the place of host:port
	Client *redis.Client
	Server *Process
}

// StartRedis returns when the server answers.
func StartRedis(t testing.TB) *Redis {
	t.Helper()
	program, err := exec.LookPath("redis-server")
	Need(t, err)
	dir, err := os.MkdirTemp("", "redis") // t.TempDir may be too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	r := &Redis{Addr: filepath.Join(dir, "redis.sock")}
	r.Server = Start(t, exec.Command(program, "--port", "0", "--unixsocket", r.Addr, "--dir", dir, "--save", "", "--loglevel", "warning"))
	Eventually(t, "redis-server listens", func() bool { // go-redis would wait longer between its attempts
		conn, err := net.Dial("unix", r.Addr)
		if err == nil {
			_ = conn.Close()
		}
		return err == nil
	})
	r.Client = redis.NewClient(&redis.Options{Addr: r.Addr, MaxRetries: -1}) // a test must not do anything twice
	t.Cleanup(func() { _ = r.Client.Close() })
	if err := r.Client.Ping(context.Background()).Err(); err != nil {
		t.Fatal(err)
	}
	return r
}
