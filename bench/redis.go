package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

var bg = context.Background()

// server is a redis-server of this program's own, on a loopback port.
type server struct {
	addr  string
	dir   string
	cmd   *exec.Cmd
	admin *redis.Client // for INFO and FLUSHALL; its own traffic is small
}

func startServer(args ...string) (*server, error) {
	if _, err := exec.LookPath("redis-server"); err != nil {
		return nil, errors.New("redis-server is not installed: `make bench` installs it")
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	port := l.Addr().(*net.TCPAddr).Port
	if err := l.Close(); err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "recovery-bench")
	if err != nil {
		return nil, err
	}
	s := &server{addr: fmt.Sprintf("127.0.0.1:%d", port), dir: dir}
	s.cmd = exec.Command("redis-server", append([]string{"--port", strconv.Itoa(port), "--bind", "127.0.0.1", "--dir", dir, "--save", "", "--slowlog-log-slower-than", "300", "--slowlog-max-len", "1000",
		"--appendonly", "no", "--loglevel", "warning"}, args...)...)
	s.cmd.Stderr = os.Stderr
	if err := s.cmd.Start(); err != nil {
		return nil, err
	}
	s.admin = redis.NewClient(&redis.Options{Addr: s.addr})
	for range 500 {
		if err = s.admin.Ping(bg).Err(); err == nil {
			return s, nil
		}
		time.Sleep(10 * time.Millisecond)
	}
	s.stop()
	return nil, fmt.Errorf("redis-server does not answer: %w", err)
}

func (s *server) stop() {
	s.admin.Close()
	_ = s.cmd.Process.Kill()
	_ = s.cmd.Wait()
	os.RemoveAll(s.dir)
}

// client is a client with room for many goroutines.
func (s *server) client() *redis.Client { return s.clientAt(s.addr) }

func (s *server) clientAt(addr string) *redis.Client {
	return redis.NewClient(&redis.Options{Addr: addr, PoolSize: 128})
}

// usage is what Redis has used so far.
type usage struct {
	cpu     time.Duration
	in, out int64 // bytes
}

func (s *server) usage() (u usage, err error) {
	text, err := s.admin.Info(bg, "cpu", "stats").Result()
	if err != nil {
		return u, err
	}
	u.cpu = time.Duration((number(text, "used_cpu_user") + number(text, "used_cpu_sys")) * float64(time.Second))
	u.in, u.out = int64(number(text, "total_net_input_bytes")), int64(number(text, "total_net_output_bytes"))
	return u, nil
}

func (s *server) memory() (int64, error) {
	text, err := s.admin.Info(bg, "memory").Result()
	return int64(number(text, "used_memory")), err
}

// calls is how many commands were executed, those of scripts too.
func (s *server) calls() (n int64, err error) {
	text, err := s.admin.Info(bg, "commandstats").Result()
	for line := range strings.Lines(text) {
		_, rest, _ := strings.Cut(line, ":calls=")
		var calls int64
		if _, err := fmt.Sscanf(rest, "%d", &calls); err == nil {
			n += calls
		}
	}
	return n, err
}

func (s *server) version() string {
	text, _ := s.admin.Info(bg, "server").Result()
	return field(text, "redis_version")
}

func field(info, name string) string {
	_, rest, _ := strings.Cut(info, "\n"+name+":")
	value, _, _ := strings.Cut(rest, "\r")
	return value
}

func number(info, name string) float64 {
	v, _ := strconv.ParseFloat(field(info, name), 64)
	return v
}
