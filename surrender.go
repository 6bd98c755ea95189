package recovery

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"
)

// giveUp is a lease that its holder was told is lost, and that this process still answers for: it has the record in memory, and keeps
// it until somebody else has the job. Redis may lose everything at any moment; what was told ErrLost must come back all the same.
type giveUp struct {
	lease  *Lease
	reason Reason
}

// surrender hands back a job that this worker, which lives, will not finish. Its holder is told at once. If Redis or the Enqueuer can't do
// it now, the next sweeps of this worker go on with it; if the process dies, the peers'.
func (r *Recoverer) surrender(l *Lease, reason Reason) {
	g, ok := r.giveUp(l, reason, true)
	if !ok {
		return
	}
	if _, err := r.handOver(r.hard, g); err != nil && !errors.Is(err, errInClaims) {
		r.log.Error("recovery: could not give up a job, will try again", "worker", l.home.id, "job", l.jobID(), "lease", l.ID(), "err", err)
	}
}

// giveUp takes a lease from its holder, who is told, if there is one; it reports false if the lease has ended already. The lease stays in its
// incarnation's list until it is out of the index: an audit must not take its record for a stray.
func (r *Recoverer) giveUp(l *Lease, reason Reason, held bool) (giveUp, bool) {
	l.lockSettled()
	if !l.giveLocked(leaseActive, reason, held) {
		return giveUp{}, false
	}
	l.home.count(func(t *tally) { t.doneSent++ })
	g := giveUp{lease: l, reason: reason}
	r.keepGiveUp(g)
	r.ended(1)
	return g, true
}

func (r *Recoverer) keepGiveUp(g giveUp) {
	r.mu.Lock()
	if r.giveUps == nil {
		r.giveUps = make(map[giveUp]chan struct{})
	}
	if r.giveUps[g] == nil {
		r.giveUps[g] = make(chan struct{}, 1)
	}
	r.mu.Unlock()
	r.owes.Store(true)
}

// turn is what whoever hands g over holds, one at a time; nil if it is settled.
func (r *Recoverer) turn(g giveUp) chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.giveUps[g]
}

// settled forgets a giveUp: somebody else has the job.
func (r *Recoverer) settled(g giveUp) {
	r.mu.Lock()
	delete(r.giveUps, g)
	r.mu.Unlock()
	if home := g.lease.given(); home != nil {
		home.count(func(t *tally) { t.doneAcked++ })
	}
}

// settleGiveUps tries each giveUp once, some at a time. It answers how many jobs it handed back, and an error if any is left.
func (r *Recoverer) settleGiveUps(ctx context.Context) (returned int, err error) {
	r.mu.Lock()
	pending := make([]giveUp, 0, len(r.giveUps))
	for g := range r.giveUps {
		pending = append(pending, g)
	}
	r.mu.Unlock()
	var wg sync.WaitGroup
	var mu sync.Mutex
	places := make(chan struct{}, recoverers)
	for _, g := range pending {
		wg.Add(1)
		places <- struct{}{}
		r.group.spawn(func() {
			defer wg.Done()
			defer func() { <-places }()
			n, e := r.handOver(ctx, g)
			mu.Lock()
			defer mu.Unlock()
			if returned += n; e != nil {
				err = fmt.Errorf("job %q is not yet handed back: %w", g.lease.jobID(), e)
			}
		})
	}
	wg.Wait()
	return returned, err
}

var errInClaims = errors.New("it waits for its next attempt")

// handOver brings the lease to somebody else: out of the index into the claims, and from there to the Enqueuer. A nil error: somebody has
// it; 1 if the Enqueuer took it now.
func (r *Recoverer) handOver(ctx context.Context, g giveUp) (int, error) {
	turn := r.turn(g)
	if turn == nil {
		return 0, nil // settled already
	}
	select {
	case turn <- struct{}{}:
		defer func() { <-turn }()
	case <-ctx.Done():
		return 0, ctx.Err()
	}
	if r.turn(g) == nil {
		return 0, nil // settled while we waited
	}
	taken, err := r.takeOut(ctx, g)
	if err != nil {
		return 0, err
	}
	if taken.start == 0 {
		r.settled(g)
		return 0, nil
	}
	h := r.handBack(ctx, r.ownClaim(g, taken))
	if h.handedBack+h.buried+h.forgotten == 0 {
		return 0, errors.Join(errInClaims, h.err)
	}
	if h.err != nil {
		r.owes.Store(true) // the Enqueuer has it, but its record is still there
	}
	r.settled(g)
	return h.handedBack, nil
}

// taking is what take.lua answered of one lease.
type taking struct {
	now   int64  // ms, Redis' clock
	mark  string // see claim
	start int64  // us; 0: somebody else has it
}

// takeOut moves the lease from the index into the claims.
func (r *Recoverer) takeOut(ctx context.Context, g giveUp) (taking, error) {
	at, taken := g.lease.place()
	home := at.home
	if !taken { // once: from then on it waits in the claims, for as long as they say
		t, err := bounded(ctx, r.group, r.tm.call, func(ctx context.Context) (taking, error) {
			return r.take(ctx, home, at.member, g.reason)
		})
		if err != nil || t.start > 0 {
			g.lease.setTaken(t.start > 0, false)
			return t, err
		}
	}
	_, places, err := r.where(ctx, home, at)
	switch {
	case err != nil:
		return taking{}, err
	case places[0] == placeUnknown, places[0] == placeNoIndex && !home.closed():
		g.lease.setTaken(taken, true)
		return taking{now: time.Now().UnixMilli(), start: g.lease.Fence()}, nil // Redis lost it: this process has the only copy
	case places[0] == placeTracked, places[0] == placeNoRecord:
		g.lease.setTaken(false, false)
		return taking{}, errors.New("it was tracked again meanwhile")
	case places[0] == placeClaimed && home == r.current.Load() && !home.closed():
		return taking{}, errInClaims // our own claims, which our sweeps look after
	}
	return taking{}, nil // with a sweeper, or handed back
}

// ownClaim is the claim of a lease that this worker has taken out. Backoff is asked when it was taken from Redis just now, and never for
// one that only this process knows: there is no claim that could keep the time.
func (r *Recoverer) ownClaim(g giveUp, t taking) *claim {
	l := g.lease
	l.mu.Lock()
	defer l.mu.Unlock()
	lease := claimedLease{member: l.member, start: t.start, reason: g.reason, waited: l.handed, homeless: l.homeless,
		lastErr: strings.Join(strings.Fields(l.cause), " "), record: l.record, checkpoint: l.checkpoint}
	l.handed = true
	return &claim{worker: l.home.id, keys: l.home.keys, until: time.Now().Add(r.tm.claimTTL), mark: t.mark, now: t.now, leases: []claimedLease{lease}}
}

// take moves one lease from the index into the claims.
func (r *Recoverer) take(ctx context.Context, home *incarnation, member string, reason Reason) (taking, error) {
	keys := []string{home.keys.inflight, home.keys.jobs, home.keys.claims}
	a := readReplies(takeScript.Run(ctx, r.rdb, keys, ms(r.tm.claimTTL), reason.String(), member))
	t := taking{now: a.int(), mark: a.string()}
	if len(a.values) == 1 && a.values[0] == nil {
		return t, nil
	}
	t.start = a.int()
	return t, a.err
}

// resumeOwn goes on with leases that this worker itself gave up and could not hand back yet. While it lives, no peer does. It does not
// keep the sweep: an Enqueuer that hangs for them must not keep the jobs of others.
func (p *pass) resumeOwn() {
	inc := p.r.current.Load()
	if inc == nil || !p.r.owes.Load() || !p.begin(ownWork) {
		return
	}
	p.r.group.spawn(func() {
		defer p.ended(ownWork)
		// Cleared before the look: a lease that is given up during it sets the flag again.
		p.r.owes.Store(false)
		_, err := p.r.settleGiveUps(p.ctx)
		if empty := p.ownClaims(inc); err != nil || !empty {
			p.r.owes.Store(true)
		}
	})
}

const ownWork = "" // in sweeper.busy; no worker has that id

// ownClaims hands back what is due in this worker's own claims. It reports whether nothing is left there.
func (p *pass) ownClaims(inc *incarnation) (empty bool) {
	for p.ctx.Err() == nil {
		c, err := p.r.claim(p.ctx, inc.id, true)
		if err != nil {
			p.r.log.Error("recovery: could not look after own claims", "worker", inc.id, "err", err)
			return false
		}
		if c.verdict == verdictDead && p.handBack(c) {
			continue
		}
		return c.verdict != verdictDead && (c.verdict != verdictIdle || c.wait < 0)
	}
	return false
}
