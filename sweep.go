package recovery

import (
	"context"
	"errors"
	"maps"
	"sync"
	"time"
)

// sweeper finds dead workers and has their jobs handed back. One worker of the fleet sweeps per SweepInterval: the lock decides
// which. Between two passes its holder looks at those workers whose time comes earlier: a beat that would run out, a suspicion that
// will be confirmed, a claim that falls due. That is what keeps recovery within OrphanThreshold + SweepInterval.
type sweeper struct {
	r    *Recoverer
	lock *gcLock

	// Owned by the loop.
	nextPass time.Time
	watch    map[string]time.Time // worker -> when to look at it, if before the next pass

	mu   sync.Mutex      // guards what follows
	busy map[string]bool // workers that are being recovered, perhaps by a pass that has ended
}

// SweepReport tells what one pass found and did.
type SweepReport struct {
	Skipped    bool // somebody else is sweeping; nothing was done
	Workers    int  // looked at
	Alive      int
	Suspected  int // silent, not yet confirmed
	Fenced     int // declared dead by this pass
	Retired    int // recovered completely
	HandedBack int // orphans accepted by the Enqueuer
	Postponed  int // orphans to be handed back later: refused, or waiting for Backoff
	Buried     int // orphans put into the dead letters
	Took       time.Duration
}

func (s *SweepReport) found() bool {
	return s.Fenced+s.Retired+s.HandedBack+s.Postponed+s.Buried > 0
}

// pass is one sweep under way. Workers are recovered concurrently.
type pass struct {
	*sweeper
	ctx    context.Context
	places chan struct{}  // recoveries at a time
	work   sync.WaitGroup // recoveries of this pass

	mu     sync.Mutex // guards what follows
	report SweepReport
	watch  map[string]time.Time
	errs   []error
	over   bool // its result was asked for
}

// recoverers is how many workers one pass recovers at a time.
const recoverers = 8

func newSweeper(r *Recoverer) *sweeper {
	return &sweeper{r: r, busy: make(map[string]bool), lock: &gcLock{rdb: r.rdb, key: r.keys.gc(), token: newWorkerID(r.cfg.WorkerName), ttl: r.cfg.GCLockTTL}}
}

// run sweeps until ctx ends.
func (s *sweeper) run(ctx context.Context) {
	// Spread the first looks of a fleet that was started all at once.
	for wait := s.r.cfg.SweepInterval / 10; sleep(ctx, shorten(wait)); {
		wait = s.step(ctx)
	}
}

// step makes a pass, or a look at single workers, if this worker is the one to do it. It says when to come again.
func (s *sweeper) step(ctx context.Context) time.Duration {
	_, err := s.sweepOnce(ctx, false)
	s.tellFailed(ctx, err)
	now := time.Now()
	next := s.nextPass
	for _, t := range s.watch {
		if t.Before(next) {
			next = t
		}
	}
	// Never in a tight loop, and a little after the moment: a beat that runs out now is there for another millisecond.
	return max(next.Sub(now), s.r.cfg.SweepInterval/20, time.Millisecond) + 2*time.Millisecond
}

func (s *sweeper) newPass(ctx context.Context) *pass {
	return &pass{sweeper: s, ctx: ctx, watch: make(map[string]time.Time), places: make(chan struct{}, recoverers)}
}

// sweepOnce makes a pass, if one is due and nobody else is at it; else it looks at those that are watched. now makes it a pass.
func (s *sweeper) sweepOnce(ctx context.Context, now bool) (SweepReport, error) {
	began := time.Now()
	p := s.newPass(ctx)
	p.resumeOwn()
	if !now && began.Before(s.nextPass) {
		// A look needs no lock. It must not even touch it: others who find it renewed would put off their passes, and with two who watch there would be
		// none any more.
		p.due(s.watch, began)
		p.wait(false)
		return p.end(began)
	}
	held, err := bounded(ctx, s.r.group, s.r.tm.call, func(ctx context.Context) (hold, error) { return s.lock.acquire(ctx, now) })
	if err != nil || !held.ours {
		wait := s.r.cfg.SweepInterval
		if err == nil {
			p.count(func(s *SweepReport) { s.Skipped = true })
			wait = min(wait, held.left)
		} else {
			p.fail(err)
		}
		// Everybody sees the lock end at the same moment: do not come all at once, but within what OrphanThreshold leaves.
		s.nextPass = began.Add(wait + spread(min(s.r.cfg.SweepInterval/8, s.r.cfg.OrphanThreshold/4)))
		maps.DeleteFunc(s.watch, func(_ string, t time.Time) bool { return !t.After(began) }) // whoever sweeps now sees to them
		return p.result()
	}
	stop := s.renewLock(ctx)
	s.nextPass = began.Add(s.r.cfg.SweepInterval)
	p.everybody()
	s.r.counts.sweeps.Add(1)
	p.wait(now)
	stop()
	limited, cancel := s.r.limit(ctx)
	defer cancel()
	unlock := s.lock.rest
	if now {
		unlock = s.lock.release // a pass on demand must not move the fleet's next one
	}
	if err := unlock(limited); err != nil {
		p.fail(err)
	}
	return p.end(began)
}

// end keeps what is to be watched, and tells.
func (p *pass) end(began time.Time) (SweepReport, error) {
	p.mu.Lock()
	p.sweeper.watch = maps.Clone(p.watch)
	p.report.Took = time.Since(began)
	p.mu.Unlock()
	report, err := p.result()
	p.tell(report)
	return report, err
}

// result is what the pass has found so far. Recoveries that it did not wait for may go on.
func (p *pass) result() (SweepReport, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.over = true
	return p.report, errors.Join(p.errs...)
}

// wait blocks until the pass' recoveries have ended. The loop does not wait for longer than an interval: an Enqueuer that is slow, or
// hangs, for the jobs of one worker must not keep the fleet from looking after the others.
func (p *pass) wait(toTheEnd bool) {
	ended := make(chan struct{})
	p.r.group.spawn(func() { defer close(ended); p.work.Wait() })
	if toTheEnd {
		select {
		case <-ended:
		case <-p.ctx.Done(): // what is under way ends without us
		}
		return
	}
	timer := time.NewTimer(p.r.cfg.SweepInterval)
	defer timer.Stop()
	select {
	case <-ended:
	case <-timer.C:
	}
}

func (s *sweeper) tell(report SweepReport) {
	if report.found() {
		s.r.log.Info("recovery: sweep", "worker", s.r.WorkerID(), "workers", report.Workers, "suspected", report.Suspected,
			"fenced", report.Fenced, "retired", report.Retired, "handed_back", report.HandedBack, "postponed", report.Postponed,
			"buried", report.Buried, "took", report.Took)
	}
	emit(s.r.log, s.r.cfg.Events.Swept, report)
}

// renewLock extends the lock while a long pass goes on. Losing it is harmless: then two sweep.
func (s *sweeper) renewLock(ctx context.Context) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan struct{})
	s.r.group.spawn(func() {
		defer close(ended)
		for sleep(ctx, max(s.lock.ttl/3, minInterval/2)) {
			limited, cancel := s.r.limit(ctx)
			_, _ = s.lock.acquire(limited, false)
			cancel()
		}
	})
	return func() {
		cancel()
		<-ended // a renewal that is still under way would take the lock again after it was given up
	}
}

// everybody looks at the whole registry.
func (p *pass) everybody() {
	if err := p.r.scan(p.ctx, p.lookAt); err != nil {
		p.fail(err)
	}
	p.arrivals()
}

// due looks at the watched workers whose time has come, and goes on watching the others.
func (p *pass) due(watch map[string]time.Time, now time.Time) {
	var ids []string
	for id, t := range watch {
		if t.After(now) {
			p.watch[id] = t
		} else {
			ids = append(ids, id)
		}
	}
	if len(ids) > 0 {
		p.lookAt(ids)
	}
}

// lookAt recovers those of ids that are dead.
func (p *pass) lookAt(ids []string) {
	// This worker is no exception: if its own beats do not arrive it is as dead as any other, and it may be the only one that
	// sweeps.
	var silent []string
	alive := 0
	for _, v := range p.r.look(p.ctx, ids) {
		switch {
		case v.err != nil:
			p.fail(v.err)
		case v.alive:
			alive++
			p.watchFor(v.id, v.left)
		default:
			silent = append(silent, v.id)
		}
	}
	p.count(func(s *SweepReport) { s.Workers += len(ids); s.Alive += alive })
	for _, id := range silent {
		p.recover(id)
	}
}

// recover begins the recovery of a worker, unless an earlier pass is still at it.
func (p *pass) recover(id string) {
	if !p.begin(id) {
		return
	}
	p.work.Add(1)
	p.r.group.spawn(func() {
		defer p.work.Done()
		defer p.ended(id)
		p.places <- struct{}{}
		defer func() { <-p.places }()
		p.recoverWorker(id)
	})
}

func (s *sweeper) begin(id string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.busy[id] {
		return false
	}
	s.busy[id] = true
	return true
}

func (s *sweeper) ended(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.busy, id)
}

// watchFor looks at a worker again after wait, if the next pass would be later than that.
func (p *pass) watchFor(id string, wait time.Duration) {
	if wait < 0 || wait > p.r.cfg.SweepInterval+p.r.cfg.SweepInterval/4 {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.watch[id] = time.Now().Add(wait)
}

func (p *pass) count(f func(*SweepReport)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f(&p.report)
}

// fail keeps an error for the end of the pass. One that comes later is told at once: nobody would ask for it.
func (p *pass) fail(err error) {
	p.mu.Lock()
	over := p.over
	p.errs = append(p.errs, err)
	p.mu.Unlock()
	if over {
		p.tellFailed(p.ctx, err)
	}
}

func (s *sweeper) tellFailed(ctx context.Context, err error) {
	if err != nil && ctx.Err() == nil {
		s.r.log.Error("recovery: sweep failed in part", "worker", s.r.WorkerID(), "err", err)
	}
}
