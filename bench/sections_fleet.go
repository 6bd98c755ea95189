package main

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/crashsafe/recovery"
)

// What a fleet costs at rest, and when one of it dies.

func (s *session) beat() error {
	one, set, err := s.beats(1)
	if err != nil {
		return err
	}
	many, _, err := s.beats(100_000)
	if err != nil {
		return err
	}
	s.atMost("a heartbeat with 100,000 in flight", float64(many)/float64(one), 1.3, " x one with 1 in flight")
	s.atMost("… against one SET PX", float64(many)/float64(set), 3, " x")
	s.tables = append(s.tables, table{title: "Heartbeat, Redis' own time for its commands", head: []string{"", "µs"}, body: [][]string{
		{"1 in flight", us(one)}, {"100,000 in flight", us(many)}, {"SET PX, sent as often", us(set)}},
		note: "By INFO commandstats, at a pace of one in 10 ms: caches are cold then, as they are in life."})
	return nil
}

func (s *session) pass() error {
	var all []pass
	for range max(3, s.repeats/2) {
		p, err := s.livePass(10_000)
		if err != nil {
			return err
		}
		all = append(all, p)
	}
	wall, cpu := median(all, func(p pass) time.Duration { return p.wall }), median(all, func(p pass) time.Duration { return p.redis })
	s.atMost("a pass over 10,000 live workers", float64(wall)/1e6, 40, " ms")
	s.tables = append(s.tables, table{title: "One pass over 10,000 live workers", head: []string{"wall ms", "Redis CPU ms"}, body: [][]string{
		{fmt.Sprintf("%.1f", float64(wall)/1e6), fmt.Sprintf("%.1f", float64(cpu)/1e6)}}})
	return nil
}

// fleet counts what a fleet at rest sends.
func (s *session) fleet() error {
	t := table{title: "A fleet at rest", head: []string{"workers", "commands/s", "a worker", "Redis CPU"},
		note: "Defaults, no jobs; commands of scripts are counted, too. One pass per SweepInterval, by one of them, however many there are."}
	sizes, watch := []int{1, 10, 100, 1000}, 10*time.Second
	if s.quick {
		sizes, watch = []int{1, 100}, 5*time.Second
	}
	var perWorker []float64
	for _, n := range sizes {
		if err := s.srv.admin.FlushAll(bg).Err(); err != nil {
			return err
		}
		rdb := s.srv.client()
		var fleet []*recovery.Recoverer
		for range n {
			r, err := recovery.New(rdb, recovery.EnqueuerFunc(func(context.Context, recovery.Orphan) error { return nil }), recovery.Config{Logger: quiet})
			if err == nil {
				err = r.Start(bg)
			}
			if err != nil {
				return err
			}
			fleet = append(fleet, r)
		}
		time.Sleep(6 * time.Second) // every first beat and look
		before, err := snap(s.srv)
		if err != nil {
			return err
		}
		calls, err := s.srv.calls()
		if err != nil {
			return err
		}
		time.Sleep(watch)
		after, err := snap(s.srv)
		if err != nil {
			return err
		}
		more, err := s.srv.calls()
		if err != nil {
			return err
		}
		spent := after.minus(before)
		rate := float64(more-calls) / spent.wall.Seconds()
		perWorker = append(perWorker, rate/float64(n))
		t.body = append(t.body, []string{fmt.Sprint(n), fmt.Sprintf("%.0f", rate), fmt.Sprintf("%.2f", rate/float64(n)), fmt.Sprintf("%.2f %%", 100*spent.redis.Seconds()/spent.wall.Seconds())})
		var wg sync.WaitGroup
		for _, r := range fleet {
			wg.Go(func() { _ = r.Stop(bg) })
		}
		wg.Wait()
		rdb.Close()
	}
	s.atMost(fmt.Sprintf("commands of a worker, among %d and alone", sizes[len(sizes)-1]), perWorker[len(perWorker)-1]/perWorker[0], 1, " x")
	s.tables = append(s.tables, t)
	return nil
}

func (s *session) orphan() error {
	const n = 10_000
	kinds := []struct {
		name string
		run  func(watched bool) (recovered, error)
		want float64
	}{
		{"BatchEnqueuer (one RPUSH for a page)", func(watched bool) (recovered, error) { return s.orphans(n, false, false, watched) }, 120_000},
		{"ListQueue, tracked", func(watched bool) (recovered, error) { return s.orphans(n, true, false, watched) }, 0},
		{"ListQueue, fetched", func(watched bool) (recovered, error) { return s.orphans(n, true, true, watched) }, 300_000},
		{"the least: claim, RPUSH, forget", func(bool) (recovered, error) { return s.bareHandBack(n, false) }, 0},
		{"the least: one script", func(bool) (recovered, error) { return s.bareHandBack(n, true) }, 0},
	}
	t := table{title: "Handing back 10,000 jobs of one dead worker",
		head: []string{"", "orphans/s", "client CPU µs", "Redis CPU µs", "wire B", "longest command of Redis, ms", "longest stall of another client, ms"},
		note: "By one Sweep, crashes counted. The longest command is by SLOWLOG; the stall, in runs of their own, the longest PING of another client in this process, " +
			"which also waits for a core. *The least* moves the same records with nothing that makes it safe (limit_orphans.go)."}
	all, stalls := make([][]recovered, len(kinds)), make([][]recovered, len(kinds))
	for range max(3, s.repeats) {
		for i, k := range kinds {
			res, err := k.run(false)
			if err != nil {
				return err
			}
			watched, err := k.run(true)
			if err != nil {
				return err
			}
			all[i], stalls[i] = append(all[i], res), append(stalls[i], watched)
		}
	}
	millis := func(d time.Duration) string {
		if d == 0 {
			return "-"
		}
		return fmt.Sprintf("%.1f", float64(d)/1e6)
	}
	for i, k := range kinds {
		rate, stall := median(all[i], func(r recovered) float64 { return r.rate }), median(stalls[i], func(r recovered) time.Duration { return r.stall })
		command := median(all[i], func(r recovered) time.Duration { return r.command })
		t.body = append(t.body, []string{k.name, fmt.Sprintf("%.0f", rate), us(median(all[i], func(r recovered) time.Duration { return r.client })),
			us(median(all[i], func(r recovered) time.Duration { return r.redis })),
			fmt.Sprintf("%.0f", median(all[i], func(r recovered) float64 { return r.wire })), millis(command), millis(stall)})
		if k.want > 0 {
			s.atLeast("orphans, 10,000 of one worker, "+k.name, rate, k.want, "/s")
			s.atMost("… longest command of Redis", float64(command)/1e6, 5, " ms")
			s.atMost("… longest stall of another client", float64(stall)/1e6, 5, " ms")
		}
	}
	s.tables = append(s.tables, t)
	return nil
}

func (s *session) mem() error {
	m, err := s.memory(100_000)
	if err != nil {
		return err
	}
	s.atMost("memory of a job in flight, beyond its payload", m, 340, " B")
	return nil
}
