package main

import (
	"context"
	"fmt"
	"sync"
	"time"
)

// session is one run of this program, and what it has found.
type session struct {
	env
	quick   bool
	repeats int
	span    time.Duration // of one measurement
	began   time.Time

	rows   []row // against the targets
	tables []table
	bars   []bar // for the chart
}

// row is one target.
type row struct {
	what, target, measured string
	met                    bool
}

// table is the detail behind some rows.
type table struct {
	title, note string
	head        []string
	body        [][]string
}

// bar is one bar of the chart: how many times as fast as what.
type bar struct {
	label string
	ratio float64
}

type section struct {
	name string
	run  func(*session) error
}

var sections = []section{
	{"track", (*session).track}, {"payloads", (*session).payloads}, {"beside", (*session).beside}, {"network", (*session).network},
	{"drain", (*session).drain}, {"beat", (*session).beat}, {"pass", (*session).pass}, {"fleet", (*session).fleet},
	{"orphans", (*session).orphan}, {"memory", (*session).mem}, {"limit", (*session).limit}, {"crash", (*session).crash},
}

func sectionNames() (names []string) {
	for _, s := range sections {
		names = append(names, s.name)
	}
	return names
}

// met notes a target of the form "at least" or "at most".
func (s *session) atLeast(what string, got, want float64, unit string) {
	s.rows = append(s.rows, row{what, fmt.Sprintf("≥ %.4g%s", want, unit), fmt.Sprintf("%.3g%s", got, unit), got >= want})
}

func (s *session) atMost(what string, got, want float64, unit string) {
	s.rows = append(s.rows, row{what, fmt.Sprintf("≤ %.4g%s", want, unit), fmt.Sprintf("%.3g%s", got, unit), got <= want})
}

func (f figures) cells(name string, base figures) []string {
	return []string{name, fmt.Sprintf("%.0f", f.rate), fmt.Sprintf("%.2f", f.rate/base.rate), us(f.p50), us(f.p99), us(f.clientCPU), us(f.redis),
		fmt.Sprintf("%.2f", float64(f.redis)/float64(base.redis)), fmt.Sprintf("%.0f", f.allocs), fmt.Sprintf("%.0f", f.wire)}
}

var figuresHead = []string{"", "jobs/s", "x plain", "p50 µs", "p99 µs", "client CPU µs", "Redis CPU µs", "x plain", "allocs", "wire B"}

func us(d time.Duration) string { return fmt.Sprintf("%.1f", float64(d.Nanoseconds())/1000) }

// track is Track and Done by 1 to 1024 goroutines, beside 1,000 jobs in flight.
func (s *session) track() error {
	t := table{title: "Track and Done", head: figuresHead,
		note: "256 B payloads, 1,000 jobs in flight beside. *recovery* is called with a context that can't end, *recovery, ctx* with one that can: then a lone caller " +
			"needs a goroutine, because go-redis does not heed the end of a context while it reads. *plain* is ZADD+HSET, then ZREM+HDEL, in two pipelines by go-redis. *The least* is a group commit with nothing " +
			"that makes it safe or usable, and without a client library (limit_group.go): what the machine leaves room for."}
	ctx, cancel := context.WithCancel(bg)
	defer cancel()
	targets := map[int]float64{1: 0.75, 16: 2.2, 128: 5.5, 1024: 6.5}
	for _, g := range []int{1, 16, 128, 1024} {
		m, err := s.compare([]subject{plain(1000), tracked("recovery", 1000, bg), tracked("recovery, ctx", 1000, ctx), leastGroup(1000)}, g, s.repeats, s.span)
		if err != nil {
			return err
		}
		for _, name := range []string{"plain", "recovery", "recovery, ctx", "the least"} {
			t.body = append(t.body, m[name].cells(fmt.Sprintf("%s, %d", name, g), m["plain"]))
		}
		r, p := m["recovery"], m["plain"]
		s.atLeast(fmt.Sprintf("Track+Done, %d goroutines", g), r.rate/p.rate, targets[g], " x plain")
		s.bars = append(s.bars, bar{fmt.Sprintf("Track+Done, %d goroutines, against plain go-redis", g), r.rate / p.rate})
		if g == 128 {
			s.atMost("… Redis CPU a job, 128 goroutines", float64(r.redis)/float64(p.redis), 0.25, " x plain")
			s.atMost("… p99, 128 goroutines", float64(r.p99)/float64(p.p50), 1, " x plain's p50")
			s.atMost("… allocations a job, 128 goroutines", r.allocs, 14, "")
		}
	}
	s.tables = append(s.tables, t)
	return nil
}

func (s *session) payloads() error {
	e := s.env
	e.payload = make([]byte, 4096)
	m, err := e.compare([]subject{plain(1000), tracked("recovery", 1000, bg), leastGroup(1000)}, 128, s.repeats, s.span)
	if err != nil {
		return err
	}
	s.atLeast("4 KiB payloads, 128 goroutines", m["recovery"].rate/m["plain"].rate, 3.8, " x plain")
	s.tables = append(s.tables, table{title: "4 KiB payloads, 128 goroutines", head: figuresHead, body: [][]string{
		m["plain"].cells("plain", m["plain"]), m["recovery"].cells("recovery", m["plain"]), m["the least"].cells("the least", m["plain"])}})
	return nil
}

// beside is whether it matters how much is in flight.
func (s *session) beside() error {
	named := func(name string, s subject) subject { return subject{name, s.setup} }
	m, err := s.compare([]subject{named("plain, 1,000", plain(1000)), tracked("recovery, 1,000", 1000, bg),
		named("plain, 100,000", plain(100_000)), tracked("recovery, 100,000", 100_000, bg)}, 128, max(3, s.repeats/2), s.span)
	if err != nil {
		return err
	}
	few, many := m["recovery, 1,000"].rate/m["plain, 1,000"].rate, m["recovery, 100,000"].rate/m["plain, 100,000"].rate
	s.atLeast("128 goroutines beside 100,000 in flight", many/few, 0.85, " of the ratio beside 1,000")
	t := table{title: "Jobs in flight beside, 128 goroutines", head: figuresHead, note: "Larger sets cost any client of Redis something; ratios are to *plain* beside as many."}
	for _, n := range []string{"1,000", "100,000"} {
		base := m["plain, "+n]
		t.body = append(t.body, base.cells("plain, "+n, base), m["recovery, "+n].cells("recovery, "+n, base))
	}
	s.tables = append(s.tables, t)
	return nil
}

// network is the same with a round trip of a millisecond.
func (s *session) network() error {
	p, err := startProxy(s.srv.addr, time.Millisecond)
	if err != nil {
		return err
	}
	defer p.stop()
	e := s.env
	e.addr = p.addr()
	rtt, err := e.roundTrip()
	if err != nil {
		return err
	}
	t := table{title: "With a round trip of 1 ms", head: figuresHead, note: fmt.Sprintf("A proxy before Redis adds it; PING takes %s µs there.", us(rtt))}
	for _, g := range []int{4, 16} {
		m, err := e.compare([]subject{plain(0), tracked("recovery", 0, bg)}, g, s.repeats, 2*s.span)
		if err != nil {
			return err
		}
		s.atLeast(fmt.Sprintf("%d goroutines, 1 ms round trip", g), m["recovery"].rate/m["plain"].rate, 0.9, " x plain")
		s.atMost(fmt.Sprintf("… p50 of Track and of Done, %d goroutines", g), float64(m["recovery"].p50)/2/float64(rtt), 1.3, " round trips")
		for _, name := range []string{"plain", "recovery"} {
			t.body = append(t.body, m[name].cells(fmt.Sprintf("%s, %d", name, g), m["plain"]))
		}
	}
	s.tables = append(s.tables, t)
	return nil
}

func (e env) roundTrip() (time.Duration, error) {
	rdb := e.srv.clientAt(e.addr)
	defer rdb.Close()
	var times []time.Duration
	for range 200 {
		began := time.Now()
		if err := rdb.Ping(bg).Err(); err != nil {
			return 0, err
		}
		times = append(times, time.Since(began))
	}
	return median(times, func(d time.Duration) time.Duration { return d }), nil
}

// drain is a full queue, worked off.
func (s *session) drain() error {
	n, repeats := 20_000, max(3, s.repeats/2)
	all := map[string][]figures{}
	for range repeats {
		for _, d := range drainers {
			f, err := s.drains(d, n, 64)
			if err != nil {
				return err
			}
			all[d.name] = append(all[d.name], f)
		}
	}
	t := table{title: "Taking, tracking and finishing from a full queue", head: []string{"", "jobs/s", "recovery is x", "client CPU µs", "Redis CPU µs", "recovery uses x", "allocs", "wire B"},
		note: fmt.Sprintf("%d jobs of 256 B, 64 workers in one process, a handler that does nothing. recovery: Work on a list. The others with their own clients, prefetching where they can. "+
			"*The least* moves the same elements with nothing that makes it usable, and without a client library (limit_queue.go).", n)}
	med := func(name string) figures {
		return figures{
			rate:      median(all[name], func(f figures) float64 { return f.rate }),
			clientCPU: median(all[name], func(f figures) time.Duration { return f.clientCPU }),
			redis:     median(all[name], func(f figures) time.Duration { return f.redis }),
			allocs:    median(all[name], func(f figures) float64 { return f.allocs }), wire: median(all[name], func(f figures) float64 { return f.wire }),
		}
	}
	ours := med("recovery")
	for _, d := range drainers {
		f := med(d.name)
		t.body = append(t.body, []string{d.name, fmt.Sprintf("%.0f", f.rate), fmt.Sprintf("%.1f", ours.rate/f.rate), us(f.clientCPU), us(f.redis),
			fmt.Sprintf("%.2f", float64(ours.redis)/float64(f.redis)), fmt.Sprintf("%.0f", f.allocs), fmt.Sprintf("%.0f", f.wire)})
		if d.name != "recovery" && d.name != "the least" {
			s.bars = append(s.bars, bar{"a full queue, against " + d.name, ours.rate / f.rate})
		}
	}
	s.atLeast("a full queue, against asynq", ours.rate/med("asynq").rate, 13, " x")
	s.atMost("… Redis CPU a job, against asynq", float64(ours.redis)/float64(med("asynq").redis), 0.12, " x")
	s.atLeast("a full queue, against rmq", ours.rate/med("rmq").rate, 4, " x")
	s.atLeast("a full queue, against taskq", ours.rate/med("taskq").rate, 4, " x")
	s.tables = append(s.tables, t)
	return nil
}

func (s *session) limit() error {
	plain, protocol, err := s.limits(s.repeats, 2000)
	if err != nil {
		return err
	}
	s.tables = append(s.tables, table{title: "What a lone caller can reach", head: []string{"", "µs a job", "x plain"}, body: [][]string{
		{"plain commands", us(plain), "1.00"}, {"the least protocol", us(protocol), fmt.Sprintf("%.2f", float64(plain)/float64(protocol))}},
		note: "No client library: prepared bytes over one connection (limit.go). The script must check that the session lives and that this is no late copy, and read the clock."})
	return nil
}

func (s *session) crash() error {
	n := 8
	var ours []time.Duration
	var asynqTime, rmqTime time.Duration
	var wg sync.WaitGroup
	errs := make([]error, 3)
	wg.Go(func() { ours, errs[0] = crashRecovery(n) })
	if !s.quick {
		wg.Go(func() { asynqTime, errs[1] = crashAsynq() })
		wg.Go(func() { rmqTime, errs[2] = crashRmq() })
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	s.atMost(fmt.Sprintf("kill -9 to Enqueue, defaults, longest of %d", n), ours[len(ours)-1].Seconds(), 25, " s")
	s.atMost("… median", ours[len(ours)/2].Seconds(), 21, " s")
	t := table{title: "From kill -9 to the job being there again, with defaults", head: []string{"", "s"}, body: [][]string{
		{fmt.Sprintf("recovery, median of %d", n), fmt.Sprintf("%.1f", ours[len(ours)/2].Seconds())}, {"recovery, longest", fmt.Sprintf("%.1f", ours[len(ours)-1].Seconds())}}}
	if !s.quick {
		t.body = append(t.body, []string{"asynq, once", fmt.Sprintf("%.1f", asynqTime.Seconds())}, []string{"rmq, once, with a Cleaner every second", fmt.Sprintf("%.1f", rmqTime.Seconds())})
	}
	s.tables = append(s.tables, t)
	return nil
}
