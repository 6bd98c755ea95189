package recovery

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// Stop leaves the fleet. It blocks until that is done, or a little longer than ctx. In this order:
//
//  1. Track and Fetch refuse new jobs
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
	}
	r.drainLocked()
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
		r.keepGiveUp(giveUp{lease: l, reason: Released}) // first: what is lost is handed back, by whatever way
		l.lose("stopping")
	}
	returned, leaveErr := bounded(ctx, r.group, endless, func(ctx context.Context) (int, error) {
		if err := r.fenceOwn(ctx, inc); err != nil {
			return 0, err
		}
		n, err := r.returnRest(ctx, inc)
		r.waits.putBack(ctx, r.waits.lists())
		more, giveUpErr := r.settleGiveUps(ctx) // before the proof goes
		if err = errors.Join(err, giveUpErr); err == nil {
			err = r.retireOwn(ctx, inc)
		}
		return n + more, errors.Join(err, r.sweep.lock.release(ctx))
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

// returnRest hands back what this worker leaves behind. nil: nothing is left in Redis.
func (r *Recoverer) returnRest(ctx context.Context, inc *incarnation) (returned int, err error) {
	for ctx.Err() == nil {
		c, err := r.claim(ctx, inc.id, false)
		if err != nil {
			return returned, err
		}
		switch c.verdict {
		case verdictDead:
			for i := range c.leases {
				r.leftBecause(inc, &c.leases[i])
			}
			h := r.handBack(ctx, c)
			if returned += h.handedBack; h.err != nil {
				return returned, h.err
			}
		case verdictEmpty:
			return returned, nil
		default:
			return returned, errors.New("jobs that the Enqueuer refused, or whose Backoff is not over, are left to the peers")
		}
	}
	return returned, fmt.Errorf("jobs are left to the peers: %w", ctx.Err())
}

// leftBecause corrects the reason of a lease that this worker leaves behind: it did not crash.
func (r *Recoverer) leftBecause(inc *incarnation, l *claimedLease) {
	if l.reason != Crashed {
		return
	}
	l.reason = Released
	r.mu.Lock()
	defer r.mu.Unlock()
	for g := range r.giveUps {
		if g.lease.home == inc && g.lease.member == l.member {
			l.reason = g.reason
		}
	}
}

// retireOwn ends an empty incarnation. The proof of what was handed back goes too, if nobody is left who could ask for it.
func (r *Recoverer) retireOwn(ctx context.Context, inc *incarnation) error {
	if inc.quiet() {
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
