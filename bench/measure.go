package main

import (
	"cmp"
	"fmt"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// figures are what one run of a subject cost, per job.
type figures struct {
	rate               float64 // jobs a second
	p50, p99           time.Duration
	clientCPU, redis   time.Duration
	allocs, allocBytes float64
	wire               float64 // bytes, both ways
}

// subject is something to be measured: setup makes it ready on an empty Redis, job does one job, end cleans up.
type subject struct {
	name  string
	setup func(env) (job func(worker int) error, end func() error, err error)
}

// env is where a subject runs.
type env struct {
	srv     *server
	addr    string // of Redis, or of a proxy before it
	payload []byte
}

// run lets so many goroutines do jobs for a while.
func (e env) run(s subject, goroutines int, d time.Duration) (f figures, err error) {
	if err := e.srv.admin.FlushAll(bg).Err(); err != nil {
		return f, err
	}
	job, end, err := s.setup(e)
	if err != nil {
		return f, fmt.Errorf("%s: %w", s.name, err)
	}
	// Warm up: connections, scripts, pools.
	if _, err = drive(goroutines, d/5, job); err != nil {
		return f, fmt.Errorf("%s: %w", s.name, err)
	}
	runtime.GC()
	before, err := snap(e.srv)
	if err != nil {
		return f, err
	}
	took, err := drive(goroutines, d, job)
	if err != nil {
		return f, fmt.Errorf("%s: %w", s.name, err)
	}
	after, err := snap(e.srv)
	if err != nil {
		return f, err
	}
	if err := end(); err != nil {
		return f, fmt.Errorf("%s: %w", s.name, err)
	}
	f = after.minus(before).per(len(took))
	slices.Sort(took)
	f.p50, f.p99 = took[len(took)/2], took[len(took)*99/100]
	return f, nil
}

// drive runs job in many goroutines until the time is over, and answers how long each took.
func drive(goroutines int, d time.Duration, job func(int) error) ([]time.Duration, error) {
	var over atomic.Bool
	time.AfterFunc(d, func() { over.Store(true) })
	var wg sync.WaitGroup
	times := make([][]time.Duration, goroutines)
	errs := make([]error, goroutines)
	for n := range goroutines {
		wg.Go(func() {
			for !over.Load() {
				began := time.Now()
				if errs[n] = job(n); errs[n] != nil {
					over.Store(true)
					return
				}
				times[n] = append(times[n], time.Since(began))
			}
		})
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			return nil, err
		}
	}
	all := slices.Concat(times...)
	if len(all) == 0 {
		return nil, fmt.Errorf("no job within %v", d)
	}
	return all, nil
}

// snapshot is what this process and Redis have used so far.
type snapshot struct {
	at     time.Time
	cpu    time.Duration
	mem    runtime.MemStats
	server usage
}

func snap(srv *server) (s snapshot, err error) {
	if s.server, err = srv.usage(); err != nil {
		return s, err
	}
	var r syscall.Rusage
	if err = syscall.Getrusage(syscall.RUSAGE_SELF, &r); err != nil {
		return s, err
	}
	runtime.ReadMemStats(&s.mem)
	s.cpu = time.Duration(r.Utime.Nano() + r.Stime.Nano())
	s.at = time.Now()
	return s, nil
}

// spent is the difference of two snapshots.
type spent struct {
	wall, cpu, redis time.Duration
	allocs, bytes    uint64
	wire             int64
}

func (s snapshot) minus(o snapshot) spent {
	return spent{
		wall: s.at.Sub(o.at), cpu: s.cpu - o.cpu, redis: s.server.cpu - o.server.cpu,
		allocs: s.mem.Mallocs - o.mem.Mallocs, bytes: s.mem.TotalAlloc - o.mem.TotalAlloc,
		wire: s.server.in + s.server.out - o.server.in - o.server.out,
	}
}

func (s spent) per(jobs int) figures {
	n := float64(jobs)
	return figures{
		rate:      n / s.wall.Seconds(),
		clientCPU: time.Duration(float64(s.cpu) / n), redis: time.Duration(float64(s.redis) / n),
		allocs: float64(s.allocs) / n, allocBytes: float64(s.bytes) / n, wire: float64(s.wire) / n,
	}
}

// compare runs the subjects in turn, again and again, and answers the median of each figure: a machine that is slow for a while is slow
// for all of them.
func (e env) compare(subjects []subject, goroutines, repeats int, d time.Duration) (map[string]figures, error) {
	all := map[string][]figures{}
	for n := range repeats {
		for i := range subjects {
			s := subjects[(i+n)%len(subjects)]
			f, err := e.run(s, goroutines, d)
			if err != nil {
				return nil, err
			}
			all[s.name] = append(all[s.name], f)
		}
		fmt.Fprint(os.Stderr, ".")
	}
	fmt.Fprintln(os.Stderr)
	medians := map[string]figures{}
	for name, fs := range all {
		medians[name] = figures{
			rate: median(fs, func(f figures) float64 { return f.rate }),
			p50:  median(fs, func(f figures) time.Duration { return f.p50 }), p99: median(fs, func(f figures) time.Duration { return f.p99 }),
			clientCPU: median(fs, func(f figures) time.Duration { return f.clientCPU }),
			redis:     median(fs, func(f figures) time.Duration { return f.redis }),
			allocs:    median(fs, func(f figures) float64 { return f.allocs }), allocBytes: median(fs, func(f figures) float64 { return f.allocBytes }),
			wire: median(fs, func(f figures) float64 { return f.wire }),
		}
	}
	return medians, nil
}

func median[T any, N cmp.Ordered](all []T, of func(T) N) N {
	values := make([]N, len(all))
	for i, v := range all {
		values[i] = of(v)
	}
	slices.Sort(values)
	return values[len(values)/2]
}
