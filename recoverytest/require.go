package recoverytest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/crashsafe/recovery"
	"github.com/redis/go-redis/v9"
)

// picture is where every job is.
type picture struct {
	tracked, claimed, handedBack, dead []string // job IDs
	waiting                            []string // of each claim, when it is offered again and why not yet
	live                               int      // workers
	problems                           []string
}

func (p *picture) String() string {
	show := func(ids []string) string {
		if len(ids) == 0 {
			return "none"
		}
		return strings.Join(ids, ", ")
	}
	s := fmt.Sprintf("tracked: %s\nhanded back: %s\ndead letters: %s\nclaimed, on their way: %s", show(p.tracked), show(p.handedBack), show(p.dead), show(p.claimed))
	for _, w := range p.waiting {
		s += "\n  " + w
	}
	if p.live == 0 {
		s += "\nno worker is live: nobody hands anything back"
	}
	for _, problem := range p.problems {
		s += "\n" + problem
	}
	return s
}

// look asks Redis and the Enqueuer.
func (e *Env) look() *picture {
	e.t.Helper()
	rdb := e.client(e.newLink())
	defer rdb.Close()
	i := recovery.NewInspector(rdb, e.cfg.Namespace, recovery.InspectHashTag(e.cfg.HashTag), recovery.InspectCodec(e.cfg.Codec))
	ctx := context.Background()
	p := &picture{}
	workers, err := i.Workers(ctx)
	p.note(err)
	for _, w := range workers {
		if w.State == "running" || w.State == "draining" {
			p.live++
		}
		if w.Claimed > 0 {
			e.claims(p, i, w.ID)
		}
		leases, err := i.Inflight(ctx, w.ID)
		p.note(err)
		for _, l := range leases {
			p.tracked = append(p.tracked, l.Job.ID)
			p.note(l.Err)
		}
	}
	for offset := 0; ; offset += 100 {
		letters, err := i.DeadLetters(ctx, offset, 100)
		p.note(err)
		for _, l := range letters {
			p.dead = append(p.dead, l.ID)
		}
		if len(letters) == 0 {
			break
		}
	}
	for _, o := range e.orphans() {
		p.handedBack = append(p.handedBack, o.ID)
	}
	return p
}

// claims looks at what a worker has in its claims.
func (e *Env) claims(p *picture, i *recovery.Inspector, worker string) {
	claims, err := i.Claimed(context.Background(), worker)
	p.note(err)
	for _, c := range claims {
		p.claimed = append(p.claimed, c.Job.ID)
		text := fmt.Sprintf("job %q is due in %v, %v, %d hand-backs failed", c.Job.ID, time.Until(c.Due).Round(time.Millisecond), c.Reason, c.Attempts)
		if c.LastError != "" {
			text += ": " + c.LastError
		}
		p.waiting = append(p.waiting, text)
	}
}

// nextOffer is when the first of what is claimed is due, or zero.
func (e *Env) nextOffer() (first time.Time) {
	rdb := e.client(e.newLink())
	defer rdb.Close()
	i := recovery.NewInspector(rdb, e.cfg.Namespace, recovery.InspectHashTag(e.cfg.HashTag))
	workers, _ := i.Workers(context.Background())
	for _, w := range workers {
		claims, _ := i.Claimed(context.Background(), w.ID)
		if len(claims) > 0 && (first.IsZero() || claims[0].Due.Before(first)) {
			first = claims[0].Due
		}
	}
	return first
}

// base is what keys of a worker begin with.
func (e *Env) base(worker string) string {
	namespace := e.cfg.Namespace
	if namespace == "" {
		namespace = "default"
	}
	if e.cfg.HashTag != "" {
		return "recovery:1:" + namespace + ":{" + e.cfg.HashTag + "}:" + worker + ":"
	}
	return "recovery:1:" + namespace + ":{" + worker + "}:"
}

func (p *picture) note(err error) {
	if err != nil {
		p.problems = append(p.problems, err.Error())
	}
}

// patience is how long RequireHandedBack waits: what the configuration allows, and as much again for a slow machine.
func (e *Env) patience() time.Duration {
	beat := cmp.Or(e.cfg.HeartbeatInterval, 5*time.Second)
	return 2 * (cmp.Or(e.cfg.OrphanThreshold, 4*beat) + cmp.Or(e.cfg.SweepInterval, beat))
}

// RequireHandedBack waits until each of these jobs was accepted by the Enqueuer, for as long as the configuration allows, twice; a job that is put off, by
// Backoff or because it was refused, is waited for until it is due, up to three times. The test fails if one was not, or more often than it is named here, and shows where everything is.
func (e *Env) RequireHandedBack(ids ...string) {
	e.t.Helper()
	want := count(ids)
	began, later := time.Now(), 0
	deadline := began.Add(e.patience())
	for {
		got := map[string]int{}
		for _, o := range e.orphans() {
			got[o.ID]++
		}
		missing := ""
		for id, n := range want {
			if got[id] > n {
				e.t.Fatalf("recoverytest: job %q was handed back %d times, not %d\n%v", id, got[id], n, e.look())
			}
			if got[id] < n {
				missing = id
			}
		}
		if missing == "" {
			return
		}
		if time.Now().After(deadline) {
			if next := e.nextOffer(); next.After(time.Now()) && later < 3 { // not for ever: it may be refused each time
				later++
				time.Sleep(time.Until(next))
				deadline = next.Add(e.patience())
				continue
			}
			e.t.Fatalf("recoverytest: job %q was not handed back within %v\n%v", missing, time.Since(began).Round(time.Second), e.look())
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// RequireTracked fails the test unless exactly these jobs are in flight, whoever runs them.
func (e *Env) RequireTracked(ids ...string) {
	e.t.Helper()
	p := e.look()
	slices.Sort(ids)
	slices.Sort(p.tracked)
	if !slices.Equal(ids, p.tracked) {
		e.t.Fatalf("recoverytest: these jobs should be in flight: %s\n%v", strings.Join(ids, ", "), p)
	}
}

// RequireNothingLost fails the test if one of these jobs, which were tracked and are not done, is nowhere: neither in flight nor claimed nor handed back nor in
// the dead letters.
func (e *Env) RequireNothingLost(ids ...string) {
	e.t.Helper()
	p := e.look()
	missing := 0
	var lost []string
	for _, id := range ids {
		if !slices.Contains(p.tracked, id) && !slices.Contains(p.claimed, id) && !slices.Contains(p.handedBack, id) && !slices.Contains(p.dead, id) {
			missing++
			lost = append(lost, id)
		}
	}
	if missing > 0 {
		e.t.Fatalf("recoverytest: lost: %s\n%v", strings.Join(lost, ", "), p)
	}
}

// RequireConsistent fails the test unless index, records and registry agree: every lease has a record, every record a lease or a claim, and nobody who is not
// registered holds anything. Call it when nothing is under way.
func (e *Env) RequireConsistent() {
	e.t.Helper()
	rdb := e.client(e.newLink())
	defer rdb.Close()
	ctx := context.Background()
	namespace := e.cfg.Namespace
	if namespace == "" {
		namespace = "default"
	}
	prefix := "recovery:1:" + namespace + ":"
	registry, err := rdb.SMembers(ctx, e.key(prefix, "workers")).Result()
	if err != nil && !errors.Is(err, redis.Nil) {
		e.t.Fatalf("recoverytest: read the registry: %v", err)
	}
	var problems []string
	for _, key := range e.Redis.Keys() {
		for _, name := range []string{":inflight", ":jobs", ":claims"} {
			id, ok := strings.CutSuffix(key, name)
			if !ok || !strings.HasPrefix(id, prefix) || id == prefix+"{dead}" || id == e.key(prefix, "dead") {
				continue
			}
			if w := workerOf(id, prefix, e.cfg.HashTag); !slices.Contains(registry, w) {
				problems = append(problems, fmt.Sprintf("worker %q is not registered, but there is %s", w, key))
			}
		}
	}
	for _, w := range registry {
		base := e.base(w)
		leases := append(rdb.ZRange(ctx, base+"inflight", 0, -1).Val(), rdb.ZRange(ctx, base+"claims", 0, -1).Val()...)
		fields := rdb.HKeys(ctx, base+"jobs").Val()
		for _, l := range leases {
			if !slices.Contains(fields, l) {
				problems = append(problems, fmt.Sprintf("lease %s of worker %q has no record", l, w))
			}
		}
		for _, f := range fields {
			member := strings.TrimSuffix(strings.TrimSuffix(strings.TrimSuffix(f, ".cp"), ".cpn"), ".claim")
			if !slices.Contains(leases, member) {
				problems = append(problems, fmt.Sprintf("field %s of worker %q belongs to no lease", f, w))
			}
		}
	}
	if len(problems) > 0 {
		e.t.Fatalf("recoverytest: Redis is not consistent:\n%s\n%v", strings.Join(problems, "\n"), e.look())
	}
}

func (e *Env) key(prefix, name string) string {
	if e.cfg.HashTag != "" {
		return prefix + "{" + e.cfg.HashTag + "}:" + name
	}
	return prefix + name
}

func workerOf(id, prefix, tag string) string {
	id = strings.TrimPrefix(id, prefix)
	if tag != "" {
		return strings.TrimPrefix(id, "{"+tag+"}:")
	}
	return strings.Trim(id, "{}")
}

func count(ids []string) map[string]int {
	n := map[string]int{}
	for _, id := range ids {
		n[id]++
	}
	return n
}
