package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	mathrand "math/rand/v2"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
)

// patience is how long nothing may happen before the show is broken off. What takes longest is a recovery: 1.2s.
const patience = 10 * time.Second

// show is one run. All of it belongs to the goroutine that called run.
type show struct {
	options
	setup
	rdb    *redis.Client
	fleet  *fleet
	ledger *ledger
	screen *screen
	ids    map[string]*proc // by the library's worker id
	begun  int              // jobs, repetitions counted
	kills  int
}

func run(ctx context.Context, o options) error {
	s := &show{
		options: o,
		setup:   setup{Redis: o.redis, Run: strings.ToLower(rand.Text()[:10])},
		fleet:   &fleet{events: make(chan event, 100)},
		ledger:  newLedger(o.jobs),
		screen:  newScreen(os.Stdout, o.workers+2),
		ids:     make(map[string]*proc),
	}
	kind := "Redis"
	if o.redis == "" {
		m, err := miniredis.Run()
		if err != nil {
			return fmt.Errorf("start the embedded Redis: %w", err)
		}
		defer m.Close()
		m.ClockTTL(true) // or its keys would never expire: it is made for tests, which have no time
		s.Redis, kind = m.Addr(), "an embedded Redis"
	}
	redisOptions, err := server(s.Redis)
	if err != nil {
		return err
	}
	s.rdb = redis.NewClient(redisOptions)
	defer s.rdb.Close()
	if err := s.rdb.LPush(ctx, s.queue(), s.ledger.jobs).Err(); err != nil {
		return fmt.Errorf("put jobs into Redis at %s: %w", redisOptions.Addr, err)
	}
	s.screen.say(plain, "queue", "%d jobs are in %s at %s", o.jobs, kind, redisOptions.Addr)
	return s.close(ctx, s.play(ctx))
}

// Ends that allow no verdict: what a dead worker ran waits in Redis, and nobody was there, or had the time, to recover it.
var (
	errInterrupted = errors.New("interrupted")
	errNoWorker    = errors.New("no worker is left")
)

// play runs until every job is done, or says why that won't happen.
func (s *show) play(ctx context.Context) error {
	for i := range s.workers {
		w := s.setup
		w.Name = fmt.Sprintf("w%d", i+1)
		if err := s.fleet.start(w); err != nil {
			return err
		}
	}
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for last, n := time.Now(), 1; !s.ledger.complete(); {
		switch {
		case s.fleet.alive() == 0:
			return errNoWorker
		case time.Since(last) > patience:
			return fmt.Errorf("nothing has happened for %v", patience)
		}
		select {
		case e := <-s.fleet.events:
			s.see(ctx, e)
			last = time.Now()
		case <-tick.C:
			s.maybeKill()
			s.draw(n)
			n++
		case <-ctx.Done():
			return errInterrupted
		}
	}
	if s.kills < s.kill {
		s.screen.say(plain, "", "only %d of %d workers were killed: the jobs were done too soon", s.kills, s.kill)
	}
	return nil
}

// see enters what a worker said.
func (s *show) see(ctx context.Context, e event) {
	switch {
	case e.ended:
		s.seeEnd(ctx, e)
	case e.says != "":
		s.screen.say(red, e.name, "%s", e.says)
	default:
		s.seeReport(e.proc, e.report)
	}
}

func (s *show) seeReport(p *proc, r report) {
	switch r.What {
	case joined:
		s.seeJoined(p, r)
	case suspected:
		s.screen.say(faint, p.name, "misses the heartbeat of %s", s.nameOf(r.Worker))
	case started:
		s.begun++
		s.ledger.starts[r.Job]++
		p.running, p.lastStart = append(p.running, r.Job), time.Now()
		if s.ledger.starts[r.Job] > 1 {
			s.screen.say(plain, p.name, "runs %s again", r.Job)
		}
	case finished:
		s.ledger.finishes[r.Job]++
		p.running = without(p.running, r.Job)
		if s.ledger.starts[r.Job] > 1 {
			s.screen.say(green, p.name, "finished %s", r.Job)
		}
	case lost:
		p.running = without(p.running, r.Job)
		s.screen.say(plain, p.name, "is told that %s is no longer its own", r.Job)
	case handedBack:
		s.seeHandedBack(p, r)
	}
}

func (s *show) seeJoined(p *proc, r report) {
	s.ids[r.Worker] = p
	if p.joined {
		s.screen.say(plain, p.name, "had been silent for too long; joined again")
		return
	}
	p.joined = true
	s.screen.say(plain, p.name, "joined as process %d", p.cmd.Process.Pid)
}

func (s *show) seeHandedBack(p *proc, r report) {
	s.ledger.recovered[r.Job] = true
	after := ""
	if from := s.ids[r.Worker]; from != nil && from.gone {
		from.orphans = without(from.orphans, r.Job)
		after = fmt.Sprintf(", %.1fs after its death", time.Since(from.goneAt).Seconds())
	}
	s.screen.say(green, p.name, "recovered %s of %s (%s)%s", r.Job, s.nameOf(r.Worker), r.Reason, after)
}

// seeEnd is about a worker that has ended, by our kill or anybody else's.
func (s *show) seeEnd(ctx context.Context, e event) {
	p := e.proc
	p.gone, p.orphans, p.running = true, p.running, nil
	if p.goneAt.IsZero() {
		p.goneAt = time.Now()
	}
	if e.err != nil {
		s.screen.say(red, p.name, "is dead (%v); it was running %s", e.err, list(p.orphans))
	}
	if err := s.putBack(ctx, p); err != nil {
		s.screen.say(red, p.name, "%v", err)
	}
}

// maybeKill kills the next worker, if it is time for that: one in the middle of a job that can't end before the signal arrives.
func (s *show) maybeKill() {
	due := (s.kills + 1) * s.jobs / (2 * (s.kill + 1)) // spread over the first half of the jobs
	if s.kills == s.kill || s.begun < due || s.fleet.standing() == 1 {
		return
	}
	for _, i := range mathrand.Perm(len(s.fleet.procs)) {
		p := s.fleet.procs[i]
		age := time.Since(p.lastStart)
		if p.gone || p.killed || age < shortestJob/4 || age > shortestJob*3/4 {
			continue
		}
		s.kills++
		s.screen.say(red, p.name, "kill -9 %d", p.cmd.Process.Pid)
		if err := p.kill(); err != nil {
			s.screen.say(red, p.name, "%v", err)
		}
		return
	}
}

// putBack returns what a dead worker had taken and not yet tracked: see worker.next.
func (s *show) putBack(ctx context.Context, p *proc) error {
	w := s.setup
	w.Name = p.name
	for {
		job, err := s.rdb.LMove(ctx, w.taken(), w.queue(), "LEFT", "RIGHT").Result()
		if errors.Is(err, redis.Nil) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("put back what it had taken: %w", err)
		}
		s.screen.say(plain, p.name, "had taken %s, but not tracked it: put back", job)
	}
}

// close ends the workers, counts, and leaves nothing behind. why is the reason if not all is done.
func (s *show) close(ctx context.Context, why error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 20*time.Second)
	defer cancel()
	s.fleet.leave()
	s.awaitEnd(ctx)
	s.screen.draw(nil)
	queued, err := s.rdb.LRange(ctx, s.queue(), 0, -1).Result()
	err = errors.Join(err, s.clean(ctx))
	if err != nil {
		return errors.Join(why, err)
	}
	if errors.Is(why, errInterrupted) || errors.Is(why, errNoWorker) {
		return fmt.Errorf("%w: jobs in %d, done %d", why, len(s.ledger.jobs), s.ledger.done())
	}
	return s.judge(s.ledger.close(queued), why)
}

// awaitEnd listens until all workers have ended, and helps the slow ones.
func (s *show) awaitEnd(ctx context.Context) {
	slow := time.NewTimer(6 * time.Second)
	defer slow.Stop()
	for s.fleet.alive() > 0 {
		select {
		case e := <-s.fleet.events:
			s.see(ctx, e)
		case <-slow.C:
			for _, p := range s.fleet.procs {
				_ = p.kill()
			}
		}
	}
}

// clean removes every key of this run. The library's keys would expire by themselves, in a week.
func (s *show) clean(ctx context.Context) error {
	for _, pattern := range []string{s.prefix() + "*", "recovery:*:" + s.namespace() + ":*"} {
		keys := s.rdb.Scan(ctx, 0, pattern, 1000).Iterator()
		for keys.Next(ctx) {
			if err := s.rdb.Del(ctx, keys.Val()).Err(); err != nil {
				return fmt.Errorf("clean up: %w", err)
			}
		}
		if err := keys.Err(); err != nil {
			return fmt.Errorf("clean up: %w", err)
		}
	}
	return nil
}

// judge prints the result.
func (s *show) judge(t tally, why error) error {
	verdict := green
	if len(t.lost) > 0 || t.queued > 0 {
		verdict = red
	}
	fmt.Fprintf(s.screen.out, "\n%s\n", s.screen.paint(verdict, t.String()))
	switch {
	case len(t.lost) > 0:
		return fmt.Errorf("lost: %s", list(t.lost))
	case t.queued > 0:
		return fmt.Errorf("not all jobs were done: %w", why)
	}
	return nil
}

// draw shows who runs what: in place on a terminal, otherwise as a line a second.
func (s *show) draw(tick int) {
	if !s.screen.live {
		if tick%10 == 0 {
			s.screen.say(plain, "now", "%s", strings.Join(append(s.rows(" "), s.summary()), " | "))
		}
		return
	}
	s.screen.draw(slices.Concat([]string{""}, s.rows("  "), []string{s.summary()}))
}

// rows has one entry a worker.
func (s *show) rows(gap string) []string {
	var rows []string
	for _, p := range s.fleet.procs {
		state := strings.Join(p.running, " ")
		switch {
		case p.gone && len(p.orphans) > 0:
			state = s.screen.paint(red, "dead, and with it "+strings.Join(p.orphans, " "))
		case p.gone:
			state = s.screen.paint(faint, "dead")
		case state == "":
			state = s.screen.paint(faint, "idle")
		}
		rows = append(rows, p.name+gap+state)
	}
	return rows
}

func (s *show) summary() string {
	return fmt.Sprintf("done %d of %d, recovered %d", s.ledger.done(), s.jobs, len(s.ledger.recovered))
}

// nameOf turns the library's worker id into ours.
func (s *show) nameOf(id string) string {
	if p := s.ids[id]; p != nil {
		return p.name
	}
	return id
}

func list(jobs []string) string {
	if len(jobs) == 0 {
		return "nothing"
	}
	return strings.Join(jobs, ", ")
}

func without(jobs []string, job string) []string {
	return slices.DeleteFunc(jobs, func(j string) bool { return j == job })
}
