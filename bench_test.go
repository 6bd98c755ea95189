package recovery

import (
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// benchRedis starts a redis-server for one benchmark.
func benchRedis(b *testing.B) *redis.Client {
	b.Helper()
	if _, err := exec.LookPath("redis-server"); err != nil {
		b.Skip("redis-server is not installed: `make test` installs it")
	}
	dir, err := os.MkdirTemp("", "recovery")
	if err != nil {
		b.Fatal(err)
	}
	s := &server{dir: dir, socket: filepath.Join(dir, "redis.sock")}
	if err := s.start(); err != nil {
		b.Fatal(err)
	}
	rdb := redis.NewClient(&redis.Options{Network: "unix", Addr: s.socket})
	b.Cleanup(func() { rdb.Close(); s.kill(); os.RemoveAll(dir) })
	return rdb
}

// inParallel runs f b.N times, by so many goroutines.
func inParallel(b *testing.B, goroutines int, f func(n int64)) {
	b.ReportAllocs()
	var next atomic.Int64
	var wg sync.WaitGroup
	b.ResetTimer()
	for range goroutines {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for n := next.Add(1); n <= int64(b.N); n = next.Add(1) {
				f(n)
			}
		}()
	}
	wg.Wait()
}

// BenchmarkTrackDone is what a job costs; BenchmarkPlain is the same writes by plain go-redis, for comparison in the same run.
func BenchmarkTrackDone(b *testing.B) {
	for _, g := range []int{1, 16, 128, 1024} {
		b.Run(fmt.Sprint(g), func(b *testing.B) {
			r, err := New(benchRedis(b), EnqueuerFunc(accept), Config{Logger: slog.New(slog.DiscardHandler)})
			if err != nil {
				b.Fatal(err)
			}
			if err := r.Start(bg); err != nil {
				b.Fatal(err)
			}
			payload := make([]byte, 256)
			inParallel(b, g, func(n int64) {
				l, err := r.Track(bg, Job{ID: "job", Payload: payload})
				if err == nil {
					err = l.Done()
				}
				if err != nil {
					b.Error(err)
				}
			})
			b.StopTimer()
			if err := r.Stop(bg); err != nil {
				b.Fatal(err)
			}
		})
	}
}

func BenchmarkPlain(b *testing.B) {
	for _, g := range []int{1, 16, 128, 1024} {
		b.Run(fmt.Sprint(g), func(b *testing.B) {
			rdb := benchRedis(b)
			payload := make([]byte, 256)
			inParallel(b, g, func(n int64) {
				id := fmt.Sprint(n)
				_, err := rdb.Pipelined(bg, func(p redis.Pipeliner) error {
					p.ZAdd(bg, "index", redis.Z{Score: float64(time.Now().UnixMilli()), Member: id})
					p.HSet(bg, "jobs", id, payload)
					return nil
				})
				if err == nil {
					_, err = rdb.Pipelined(bg, func(p redis.Pipeliner) error {
						p.ZRem(bg, "index", id)
						p.HDel(bg, "jobs", id)
						return nil
					})
				}
				if err != nil {
					b.Error(err)
				}
			})
		})
	}
}
