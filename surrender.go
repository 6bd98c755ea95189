package recovery

import (
	"context"
	"time"
)

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
	home := g.lease.home
	start, err := r.takeOut(ctx, g)
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
	h := r.handBack(ctx, r.ownClaim(g, start))
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

// takeOut moves the lease from the index into the claims. It answers the lease's start, or 0 if somebody else has it.
func (r *Recoverer) takeOut(ctx context.Context, g giveUp) (int64, error) {
	start, err := bounded(ctx, r.group, r.tm.call, func(ctx context.Context) (int64, error) {
		return r.take(ctx, g.lease.home, g.lease.member, g.reason)
	})
	if err == nil && start == 0 {
		return r.missing(ctx, g.lease)
	}
	return start, err
}

// ownClaim is the claim of a lease that this worker has just taken out.
func (r *Recoverer) ownClaim(g giveUp, start int64) *claim {
	now := time.Now()
	l := g.lease
	l.mu.Lock()
	defer l.mu.Unlock()
	return &claim{
		worker: l.home.id, keys: l.home.keys, until: now.Add(r.tm.claimTTL), now: now.UnixMilli(),
		leases: []claimedLease{{member: l.member, start: start, reason: g.reason, record: l.record, checkpoint: l.checkpoint}},
	}
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
