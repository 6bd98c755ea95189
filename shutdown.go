package recovery

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// Stop leaves the fleet. It blocks until that is done, or a little longer than ctx. In this order:
//
//  1. Track refuses new jobs
//  2. sweeping stops; calls of the Enqueuer that are under way may end
//  3. running jobs are waited for until ctx ends; the heart beats on
//  4. the heartbeat ends, after a last beat that mends what Redis may have lost
//  5. leases that are left are lost: their contexts are cancelled with ErrLost
//  6. the session is fenced, so that peers need no threshold
//  7. what is left in Redis is handed back by this worker, with Reason Released, as long as time allows; by the peers otherwise
//  8. with nothing left, the registry entry goes, and the sweep lock if it is ours
//
// It returns nil if all jobs had ended and everything was cleaned up; ctx's error if jobs were left; other errors if Redis could not be
// reached: then peers recover what is left after OrphanThreshold. Stop before Start makes Start impossible. Concurrent and repeated calls
// are safe: each waits for the end, by its own ctx.
func (r *Recoverer) Stop(ctx context.Context) error {
	if r.beginStop() {
		return nil
	}
	select {
	case r.stopping <- struct{}{}: // also if ctx has ended: what is left is handed back
	default:
		select {
		case r.stopping <- struct{}{}:
		case <-ctx.Done():
			return fmt.Errorf("recovery: stop: another Stop is under way: %w", ctx.Err())
		}
	}
	defer func() { <-r.stopping }()
	if r.State() == StateStopped {
		return r.joinAll(ctx)
	}
	r.endSweeps()
	waitErr := r.waitIdle(ctx)
	returned, err := r.leave(ctx, waitErr != nil)
	err = errors.Join(waitErr, err)
	r.mu.Lock()
	r.state = StateStopped
	r.mu.Unlock()
	r.log.Info("recovery: stopped", "worker", r.WorkerID(), "handed_back", returned, "err", err)
	emit(r.log, r.cfg.Events.Stopped, StoppedInfo{Worker: r.WorkerID(), HandedBack: returned, Err: err})
	err = errors.Join(err, r.joinAll(ctx))
	if err != nil {
		return fmt.Errorf("recovery: stop: %w", err)
	}
	return nil
}

// beginStop drains a running Recoverer. It reports true if there was nothing to stop.
func (r *Recoverer) beginStop() (done bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch r.state {
	case StateNew:
		r.state = StateStopped
		r.endSweeps()
		r.endLife()
		r.endHard()
		return true
	case StateRunning:
		r.state = StateDraining
	}
	return false
}

// waitIdle blocks until no lease is left, or ctx ends.
func (r *Recoverer) waitIdle(ctx context.Context) error {
	r.mu.Lock()
	if r.inflight == 0 {
		r.mu.Unlock()
		return nil
	}
	if r.idle == nil {
		r.idle = make(chan struct{})
	}
	idle := r.idle
	r.mu.Unlock()
	select {
	case <-idle:
		return nil
	case <-ctx.Done():
		r.mu.Lock()
		defer r.mu.Unlock()
		return fmt.Errorf("%d jobs had not ended: %w", r.inflight, ctx.Err())
	}
}

// grace is what Stop takes beyond its ctx to give back jobs that had not ended.
const grace = 5 * time.Second

// leave is Stop from step 4 on. It answers how many jobs it handed back.
func (r *Recoverer) leave(ctx context.Context, overtime bool) (int, error) {
	if overtime {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(context.WithoutCancel(ctx), r.overtime())
		defer cancel()
	}
	defer r.endHard()
	r.endLife()
	err := errors.Join(waitFor(ctx, r.heartEnded, "heartbeat"), waitFor(ctx, r.sweepEnded, "sweep"))
	if err == nil {
		err = r.heart.beatOnce(ctx)
	}
	inc := r.current.Load()
	inc.kick()
	for _, l := range inc.close(ErrLost) {
		l.lose()
	}
	returned, leaveErr := bounded(ctx, r.group, endless, func(ctx context.Context) (int, error) {
		if err := r.fenceOwn(ctx, inc); err != nil {
			return 0, err
		}
		n, err := r.returnRest(ctx, inc)
		return n, errors.Join(err, r.sweep.lock.release(ctx))
	})
	if leaveErr == nil {
		return returned, nil // whatever went wrong before, this worker has left
	}
	return returned, errors.Join(err, leaveErr)
}

const endless = 100 * 365 * 24 * time.Hour

// overtime is short if Redis can't be reached anyway.
func (r *Recoverer) overtime() time.Duration {
	r.heart.mu.Lock()
	defer r.heart.mu.Unlock()
	if r.heart.lastErr != nil {
		return min(grace, r.cfg.HeartbeatInterval, 500*time.Millisecond)
	}
	return grace
}

func waitFor(ctx context.Context, ended <-chan struct{}, what string) error {
	select {
	case <-ended:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%s has not ended: %w", what, ctx.Err())
	}
}

// returnRest hands back what this worker leaves behind, and takes itself out of the registry when nothing is left.
func (r *Recoverer) returnRest(ctx context.Context, inc *incarnation) (returned int, err error) {
	for ctx.Err() == nil {
		c, err := r.claim(ctx, inc.id, false)
		if err != nil {
			return returned, err
		}
		switch c.verdict {
		case verdictDead:
			for i := range c.leases {
				r.leftBecause(&c.leases[i])
			}
			h := r.handBack(ctx, c)
			if returned += h.handedBack; h.err != nil {
				return returned, h.err
			}
		case verdictEmpty:
			return returned, r.retireOwn(ctx, inc)
		default:
			return returned, errors.New("jobs that the Enqueuer refused are left to the peers")
		}
	}
	return returned, fmt.Errorf("jobs are left to the peers: %w", ctx.Err())
}

// leftBecause corrects the reason of a lease that this worker leaves behind: it did not crash.
func (r *Recoverer) leftBecause(l *claimedLease) {
	if l.reason != Crashed {
		return
	}
	l.reason = Released
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, g := range r.giveUps {
		if g.lease.member == l.member {
			l.reason = g.reason
		}
	}
}

// retireOwn ends an empty incarnation. The proof of what was handed back goes too, if nobody is left who could ask for it.
func (r *Recoverer) retireOwn(ctx context.Context, inc *incarnation) error {
	if inc.idle() {
		if err := r.rdb.Del(ctx, inc.keys.handed).Err(); err != nil {
			return fmt.Errorf("retire worker %q: %w", inc.id, err)
		}
	}
	return r.deregister(ctx, inc.id)
}

// joinAll waits for every goroutine. When ctx has ended, it looks once more after a moment.
func (r *Recoverer) joinAll(ctx context.Context) error {
	if ctx.Err() != nil {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(context.WithoutCancel(ctx), 100*time.Millisecond)
		defer cancel()
	}
	return r.group.wait(ctx)
}

// giveUp is a lease that its own worker wants to hand back.
type giveUp struct {
	lease  *Lease
	reason Reason
}

// surrender hands back a job that this worker, which lives, will not finish. Its holder is told at once. If Redis or the Enqueuer can't do
// it now, the next sweeps of this worker go on with it; if the process dies, the peers'.
func (r *Recoverer) surrender(l *Lease, reason Reason) {
	if l.give() {
		l.home.count(func(t *tally) { t.doneSent++ })
		r.handOver(r.hard, giveUp{l, reason})
	}
}

// handOver moves the lease into the claims and hands it back from there.
func (r *Recoverer) handOver(ctx context.Context, g giveUp) {
	home, member := g.lease.home, g.lease.member
	c := &claim{worker: home.id, keys: home.keys, until: time.Now().Add(r.tm.claimTTL), now: time.Now().UnixMilli()}
	start, err := bounded(ctx, r.group, r.tm.call, func(ctx context.Context) (int64, error) {
		return r.take(ctx, home, member, g.reason)
	})
	if err == nil && start == 0 {
		start, err = r.missing(ctx, g.lease)
	}
	if err != nil {
		r.log.Error("recovery: could not give up a job, will try again", "worker", home.id, "job", g.lease.job.ID, "lease", g.lease.id, "err", err)
		r.keepGiveUp(g)
		return
	}
	if start == 0 {
		home.count(func(t *tally) { t.doneAcked++ })
		g.lease.given() // a sweeper has it already
		return
	}
	c.leases = []claimedLease{{member: member, start: start, reason: g.reason, record: g.lease.record}}
	h := r.handBack(ctx, c)
	switch {
	case h.handedBack+h.buried > 0:
		if h.err != nil {
			r.owes.Store(true) // the Enqueuer has it, but its record is still there
		}
	case r.inMemoryOnly(ctx, g.lease):
		r.keepGiveUp(g)
		return
	default:
		r.owes.Store(true) // it waits in the claims
	}
	home.count(func(t *tally) { t.doneAcked++ })
	g.lease.given()
}

func (r *Recoverer) keepGiveUp(g giveUp) {
	r.mu.Lock()
	r.giveUps = append(r.giveUps, g)
	r.mu.Unlock()
	r.owes.Store(true)
}

// missing answers for a lease that is not in the index. If a sweeper has it, 0. If Redis lost it, its start: then this process has the
// only copy, and hands it back from memory.
func (r *Recoverer) missing(ctx context.Context, l *Lease) (int64, error) {
	_, places, err := r.where(ctx, l.home, []string{l.member})
	if err != nil || places[0] != placeUnknown {
		return 0, err
	}
	return l.Fence(), nil
}

// inMemoryOnly reports whether Redis does not know the lease, or can't tell.
func (r *Recoverer) inMemoryOnly(ctx context.Context, l *Lease) bool {
	start, err := r.missing(ctx, l)
	return start != 0 || err != nil
}

// take moves one lease from the index into the claims. It answers the lease's start, or 0 if it is not there any more.
func (r *Recoverer) take(ctx context.Context, home *incarnation, member string, reason Reason) (int64, error) {
	keys := []string{home.keys.inflight, home.keys.jobs, home.keys.claims}
	a := readReplies(takeScript.Run(ctx, r.rdb, keys, ms(r.tm.claimTTL), reason.String(), member))
	if len(a.values) == 1 && a.values[0] == nil {
		return 0, nil
	}
	return a.int(), a.err
}

// retryGiveUps goes on with surrenders that Redis did not confirm.
func (r *Recoverer) retryGiveUps(ctx context.Context) {
	r.mu.Lock()
	pending := r.giveUps
	r.giveUps = nil
	r.mu.Unlock()
	for _, g := range pending {
		r.handOver(ctx, g)
	}
}
