package recovery

import (
	"context"
	"errors"
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

// BenchmarkFetchDone takes jobs from a full list, some at a time, and finishes them.
func BenchmarkFetchDone(b *testing.B) {
	for _, most := range []int{1, 16, 256} {
		b.Run(fmt.Sprint(most), func(b *testing.B) {
			rdb := benchRedis(b)
			q := NewListQueue("jobs")
			r, err := New(rdb, q, Config{Logger: slog.New(slog.DiscardHandler)})
			if err == nil {
				err = r.Start(bg)
			}
			if err != nil {
				b.Fatal(err)
			}
			for n := 0; n < b.N; n += 1000 {
				values := make([]any, min(1000, b.N-n))
				for i := range values {
					values[i] = make([]byte, 256)
				}
				if err := rdb.LPush(bg, "jobs", values...).Err(); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportAllocs()
			b.ResetTimer()
			for done := 0; done < b.N; {
				leases, err := r.Fetch(bg, q, min(most, b.N-done))
				if err != nil {
					b.Fatal(err)
				}
				var wg sync.WaitGroup
				for _, l := range leases {
					wg.Go(func() {
						if err := l.Done(); err != nil {
							b.Error(err)
						}
					})
				}
				wg.Wait()
				done += len(leases)
			}
			b.StopTimer()
			if err := r.Stop(bg); err != nil {
				b.Fatal(err)
			}
		})
	}
}

// BenchmarkSweep looks at a fleet that lives.
func BenchmarkSweep(b *testing.B) {
	for _, workers := range []int{10, 1000} {
		b.Run(fmt.Sprint(workers), func(b *testing.B) {
			rdb := benchRedis(b)
			r, err := New(rdb, EnqueuerFunc(accept), Config{Logger: slog.New(slog.DiscardHandler)})
			if err != nil {
				b.Fatal(err)
			}
			for n := range workers {
				k := r.keys.worker(fmt.Sprint("worker-", n))
				_, err := rdb.Pipelined(bg, func(p redis.Pipeliner) error {
					p.SAdd(bg, r.keys.workers(), fmt.Sprint("worker-", n))
					p.HSet(bg, k.session, "state", "live")
					p.Set(bg, k.beat, "running", time.Hour)
					return nil
				})
				if err != nil {
					b.Fatal(err)
				}
			}
			b.ReportAllocs()
			for b.Loop() {
				if report, err := r.Sweep(bg); err != nil || report.Alive != workers {
					b.Fatal(report, err)
				}
			}
		})
	}
}

// BenchmarkRecover hands back the jobs of a dead worker: an operation is one job.
func BenchmarkRecover(b *testing.B) {
	for _, kind := range []string{"Enqueuer", "BatchEnqueuer", "ListQueue"} {
		b.Run(kind, func(b *testing.B) {
			enq := map[string]Enqueuer{"Enqueuer": EnqueuerFunc(accept), "BatchEnqueuer": batchAccept{}, "ListQueue": NewListQueue("jobs")}[kind]
			cfg := Config{Logger: slog.New(slog.DiscardHandler), HeartbeatInterval: time.Hour, SweepInterval: 24 * time.Hour}
			rdb := benchRedis(b)
			dead, err := New(rdb, enq, cfg)
			if err == nil {
				err = dead.Start(bg)
			}
			if err != nil {
				b.Fatal(err)
			}
			for n := 0; n < b.N; n += 1000 {
				jobs := make([]Job, min(1000, b.N-n))
				for i := range jobs {
					jobs[i] = Job{ID: fmt.Sprint(n + i), Payload: make([]byte, 256)}
				}
				if _, err := dead.TrackAll(bg, jobs...); err != nil {
					b.Fatal(err)
				}
			}
			k := dead.keys.worker(dead.WorkerID())
			if err := errors.Join(rdb.HSet(bg, k.session, "state", "fenced").Err(), rdb.Del(bg, k.beat).Err()); err != nil {
				b.Fatal(err)
			}
			sweeper, err := New(rdb, enq, cfg)
			if err != nil {
				b.Fatal(err)
			}
			b.ReportAllocs()
			b.ResetTimer()
			if report, err := sweeper.Sweep(bg); err != nil || report.HandedBack != b.N {
				b.Fatal(report, err)
			}
		})
	}
}

// batchAccept takes everything.
type batchAccept struct{}

func (batchAccept) Enqueue(context.Context, Orphan) error        { return nil }
func (batchAccept) EnqueueAll(context.Context, []Orphan) []error { return nil }

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
