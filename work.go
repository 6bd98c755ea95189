package recovery

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

// Work takes jobs from src and runs handler for each, up to concurrency at a time, until ctx ends or the Recoverer drains (Quiet, Stop). Then
// it takes no more, puts back what it had fetched and not begun, waits for the handlers that run, and returns nil. It returns an error
// at once if an argument is wrong or the Recoverer is not running; later errors it logs, and goes on. Call Stop beside it, or before the
// process ends: Work returns when the last handler does, and what Stop took from a handler is not yet handed back then.
//
// handler's ctx is the lease's: it is cancelled when the job is lost, and when Stop gives up waiting, but not when ctx ends. After handler has
// returned, the lease is Done, whatever it returned: an error is logged, and whether the job shall be tried again is handler's to
// say, by l.Release or by a queue of its own. A handler that called Done or Release itself is left in peace. If it panics, the job is handed
// back with Reason Panicked, counted, and Work goes on.
//
// If handlers are fast, Work fetches ahead what they do within 20 ms, at most eight jobs for each, and begins the next job before Redis has
// confirmed the last one's Done; a handler that wants to know calls l.Done itself. If they are slow, it fetches none ahead: those would wait
// here while a peer is idle.
func (r *Recoverer) Work(ctx context.Context, src Source, concurrency int, handler func(ctx context.Context, l *Lease) error) error {
	lists, err := r.lists(src)
	if err == nil && concurrency < 1 {
		err = fmt.Errorf("%w: concurrency is %d, at least 1", ErrInvalidConfig, concurrency)
	}
	if err == nil && handler == nil {
		err = fmt.Errorf("%w: handler is nil", ErrInvalidConfig)
	}
	if s := r.State(); err == nil && s != StateRunning {
		if ctx.Err() != nil { // told to end before it began
			return nil
		}
		err = fmt.Errorf("%w: state is %v", ErrNotRunning, s)
	}
	if err != nil {
		return fmt.Errorf("work: %w", err)
	}
	p := &pool{r: r, lists: lists, places: concurrency, handler: handler,
		fetched: make(chan *Lease, concurrency+mostAhead(concurrency)), freed: make(chan struct{}, 1)}
	for range concurrency {
		p.handlers.Add(1)
		r.detach(func() { defer p.handlers.Done(); p.handle() })
	}
	p.feed(ctx)
	p.end()
	return nil
}

// pool is one call of Work.
type pool struct {
	r       *Recoverer
	lists   []*ListQueue
	places  int
	handler func(context.Context, *Lease) error

	fetched  chan *Lease
	freed    chan struct{} // of capacity 1: a job has ended
	held     atomic.Int64  // fetched, and its end is not confirmed
	took     atomic.Int64  // ns, moving average of the handler's time; 0 before the first
	handlers sync.WaitGroup
}

// aheadFor is how long jobs that are fetched ahead wait here, by the average of late; and mostAhead how many there are at most: enough that the next
// page comes before they are used up, and that pages are large.
const aheadFor = 20 * time.Millisecond

func mostAhead(places int) int { return min(8*places, 2*fetchMost) }

// ahead is how many jobs to fetch ahead: as many as the handlers do within aheadFor.
func (p *pool) ahead() int {
	took := time.Duration(p.took.Load())
	if took == 0 { // none has ended yet
		return 0
	}
	return int(min(int64(p.places)*int64(aheadFor/took), int64(mostAhead(p.places))))
}

// feed fetches until ctx ends or the Recoverer drains.
func (p *pool) feed(ctx context.Context) {
	failed := 0
	for {
		want := p.room()
		if want == 0 {
			select {
			case <-p.freed:
				continue
			case <-ctx.Done():
			case <-p.r.serving.Done():
			}
			return
		}
		leases, err := p.r.fetch(ctx, p.lists, want)
		if ctx.Err() != nil && err != nil || errors.Is(err, ErrNotRunning) {
			return
		}
		if err == nil {
			failed = 0
			p.held.Add(int64(len(leases)))
			for _, l := range leases {
				p.fetched <- l
			}
			continue
		}
		failed++
		if !p.pause(ctx, failed, err) {
			return
		}
	}
}

// room is how many jobs to fetch now.
func (p *pool) room() int {
	ahead := p.ahead()
	if len(p.fetched) > ahead/2 {
		return 0 // later, and then many at a time
	}
	return max(0, p.places+ahead-int(p.held.Load()))
}

// pause waits before the next attempt after an error. It reports false if there is to be none.
func (p *pool) pause(ctx context.Context, failed int, err error) bool {
	var freed <-chan struct{}
	switch {
	case errors.Is(err, ErrLost): // declared dead; by now there is a new incarnation
	case errors.Is(err, ErrAtCapacity): // ours may be the next to end, or another's
		freed, failed = p.freed, 1
	default:
		p.r.log.Warn("recovery: could not fetch, will try again", "worker", p.r.WorkerID(), "queues", queueNames(p.lists), "failed", failed, "err", err)
	}
	timer := time.NewTimer(shorten(doubled(50*time.Millisecond, p.r.cfg.HeartbeatInterval, failed)))
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-freed:
		return true
	case <-ctx.Done():
	case <-p.r.serving.Done():
	}
	return false
}

// end puts back what nobody has begun, and waits for the rest.
func (p *pool) end() {
	var unbegun []*Lease
	for more := true; more; {
		select {
		case l := <-p.fetched:
			unbegun = append(unbegun, l)
		default:
			more = false
		}
	}
	close(p.fetched)
	if len(unbegun) > 0 {
		p.r.unfetch(p.r.hard, unbegun)
		p.r.waits.putBackSoon(p.lists) // a move that is just being ended may have taken one of them
	}
	p.held.Add(-int64(len(unbegun)))
	p.handlers.Wait()
	p.settled()
}

// settled waits for Redis' answers to the last Dones, but not for longer than Done itself would.
func (p *pool) settled() {
	timer := time.NewTimer(3 * p.r.tm.call)
	defer timer.Stop()
	for p.held.Load() > 0 {
		select {
		case <-p.freed:
		case <-timer.C:
			return
		}
	}
}

// handle runs one job after the other.
func (p *pool) handle() {
	for l := range p.fetched {
		p.wake() // there is room in fetched
		p.one(l)
	}
}

// measure keeps the average of the handler's time.
func (p *pool) measure(took time.Duration) {
	average := p.took.Load()
	if average == 0 {
		average = int64(took)
	}
	p.took.Store(max(1, average+(int64(took)-average)/8)) // a lost update is no harm
}

// ended makes room for another job.
func (p *pool) ended() {
	p.held.Add(-1)
	p.wake()
}

// wake tells feed that there may be room.
func (p *pool) wake() {
	if p.room() == 0 {
		return
	}
	select { // one is enough: whoever waits looks again
	case p.freed <- struct{}{}:
	default:
	}
}

// one runs the handler for one job, and ends the lease.
func (p *pool) one(l *Lease) {
	began := time.Now()
	if !l.isHeld() { // lost while it waited
		p.ended()
		return
	}
	l.arm() // its time begins now, not when it was fetched
	err, returned := error(nil), false
	defer func() {
		if !returned { // the handler ended its goroutine. A new one takes its place
			p.r.surrender(l, Panicked)
			p.handlers.Add(1)
			p.r.detach(func() { defer p.handlers.Done(); p.handle() })
			p.ended()
		}
	}()
	perr := guard(func() { err = p.handler(l.Context(), l) })
	returned = true
	p.measure(time.Since(began))
	if perr != nil {
		logPanic(p.r.log, "recovery: a handler panicked, its job is handed back", perr,
			"worker", p.r.WorkerID(), "job", l.jobID(), "lease", l.ID(), "queue", l.job.Queue)
		l.mu.Lock()
		l.cause = perr.Error()
		l.mu.Unlock()
		p.r.surrender(l, Panicked)
		p.ended()
		return
	}
	switch {
	case err == nil:
	case !l.isHeld():
		p.r.log.Warn("recovery: a handler failed, and its job is not its own any more",
			"worker", p.r.WorkerID(), "job", l.jobID(), "lease", l.ID(), "queue", l.job.Queue, "err", err)
	default:
		p.r.log.Error("recovery: a handler failed, its job is done", "worker", p.r.WorkerID(), "job", l.jobID(), "lease", l.ID(), "queue", l.job.Queue, "err", err)
	}
	if l.wantsOut() { // it was refused: nobody else would try again
		p.r.surrender(l, Released)
		p.ended()
		return
	}
	// The next job does not wait for Redis' answer to this one's Done. Until then this one counts as fetched: so there are never more of them than Work
	// fetches ahead.
	if !p.r.bounds { // a client without timeouts may never answer, but Done does
		p.confirmed(l, l.Done())
		return
	}
	if fin, _, _ := l.beginDone(false, func(err error) { p.confirmed(l, err) }); fin == nil {
		p.ended() // the handler had called Done or Release
	}
}

// confirmed is told Redis' answer to a Done.
func (p *pool) confirmed(l *Lease, err error) {
	if err != nil && !errors.Is(err, ErrLost) { // a loss was told when it happened
		p.r.log.Warn("recovery: a job's end is not confirmed yet", "worker", p.r.WorkerID(), "job", l.jobID(), "lease", l.ID(), "err", err)
	}
	p.ended()
}
