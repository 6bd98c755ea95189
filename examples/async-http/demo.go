package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
)

const demoPatience = 20 * time.Second

// demo sends a request to a server that does not answer yet. The first worker is killed while it waits; the second one sends it again, is asked to leave
// while it waits, too, and gives it back; the third has an answer.
func demo(ctx context.Context, out io.Writer) error {
	ctx, cancel := context.WithTimeout(ctx, demoPatience)
	defer cancel()
	var answers atomic.Bool
	addr, stop, err := serve(&answers)
	if err != nil {
		return err
	}
	defer stop()
	inside := miniredis.NewMiniRedis()
	inside.ClockTTL(true)
	if err := inside.Start(); err != nil {
		return err
	}
	defer inside.Close()
	rdb := redis.NewClient(&redis.Options{Addr: inside.Addr()})
	defer rdb.Close()
	s := setup{redis: inside.Addr(), namespace: "demo"}
	r := Request{ID: "hook-1", Method: "POST", URL: "http://" + addr + "/hook", Header: http.Header{"Idempotency-Key": {"hook-1"}}, Body: []byte("paid")}
	if err := submit(ctx, rdb, s.list(), r); err != nil {
		return err
	}
	for _, worker := range []struct {
		name, until, say string
		signal           os.Signal
	}{
		{"one", sending, "kill -9 of worker one, in the middle of the request", syscall.SIGKILL},
		{"two", sending, "SIGTERM to worker two, in the middle of the request", syscall.SIGTERM},
		{"three", done, "SIGTERM to worker three, which has nothing to do", syscall.SIGTERM},
	} {
		answers.Store(worker.until == done)
		if err := s.visit(ctx, out, worker.name, worker.until, worker.say, worker.signal); err != nil {
			return err
		}
	}
	return show(ctx, &results{rdb: rdb, prefix: s.prefix()}, out)
}

// visit runs this program again, as a worker, sends it a signal when it has come to a point, and shows what it says until it ends.
func (s setup) visit(ctx context.Context, out io.Writer, name, until, say string, signal os.Signal) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, self, "worker", "-redis", s.redis, "-namespace", s.namespace, "-name", name, "-threshold", "1s", "-grace", "300ms")
	cmd.Stderr = os.Stderr
	if _, err := cmd.StdinPipe(); err != nil { // closed when this process ends
		return err
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	for lines := bufio.NewScanner(stdout); lines.Scan(); {
		var r report
		if json.Unmarshal(lines.Bytes(), &r) != nil {
			continue // cut off by the kill
		}
		fmt.Fprintf(out, "%s: %s %s %s\n", name, r.Point, r.ID, r.Err)
		if r.Point == until {
			fmt.Fprintln(out, say)
			if err := cmd.Process.Signal(signal); err != nil {
				return err
			}
		}
	}
	if err := cmd.Wait(); err != nil && signal != syscall.SIGKILL {
		return fmt.Errorf("worker %s: %w", name, err)
	}
	return ctx.Err()
}

// serve is a server that hangs while answers is false.
func serve(answers *atomic.Bool) (addr string, stop func(), err error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", nil, err
	}
	s := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		if !answers.Load() {
			<-r.Context().Done()
			return
		}
		_, _ = io.WriteString(w, "thank you")
	})}
	go func() { _ = s.Serve(listener) }()
	return listener.Addr().String(), func() { _ = s.Close() }, nil
}
