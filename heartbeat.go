package recovery

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// heartbeater vouches for this worker's jobs. It owns W:beat, and the answers to its beats decide what the worker may believe:
//
//	live     nobody has taken anything; trusted for OrphanThreshold from the *start* of that beat
//	fenced   declared dead: what Redis has of this incarnation is with the peers. Leases are cancelled; go on as a new one
//	absent   Redis lost its data: nobody has taken anything. Go on as a new one and track the running jobs again
//	error    nothing is known. Try again soon
//
// A beat costs the same whatever the number of leases. Only the loop starts a new incarnation, so there is never more than
// one at a time.
type heartbeater struct {
	r    *Recoverer
	wake chan struct{} // of capacity 1: beat now

	entering atomic.Bool // the registry, apart from a beat

	// Owned by the loop.
	odd         int  // beats in a row whose count did not fit
	auditDue    bool // audit with the next good beat
	failed      int  // beats in a row
	old         []*incarnation
	exact       bool      // the next beat shall count leases and records at one moment, which the script does
	nextRenewal time.Time // of the records' TTLs

	mu       sync.Mutex // guards what follows
	lastGood time.Time  // start of the last good beat; carries the monotonic clock
	lastErr  error      // of the last beat, nil if it was good
}

func newHeartbeater(r *Recoverer) *heartbeater {
	return &heartbeater{r: r, wake: make(chan struct{}, 1)}
}

// kick asks for a beat now.
func (h *heartbeater) kick() {
	select {
	case h.wake <- struct{}{}:
	default:
	}
}

// run beats until ctx ends.
func (h *heartbeater) run(ctx context.Context) {
	wait := shorten(h.r.cfg.HeartbeatInterval)
	for {
		timer := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-h.wake:
			timer.Stop()
		case <-timer.C:
		}
		wait = h.step(ctx)
	}
}

// step makes one beat, reports it, and says when the next one is due.
func (h *heartbeater) step(ctx context.Context) time.Duration {
	inc, began := h.r.current.Load(), time.Now()
	if h.r.cfg.SelfFence && !began.Before(h.trustedUntil()) {
		// Before the beat, which might hang: this is the last moment at which no peer can have taken anything.
		h.abandon(inc, "no good beat within OrphanThreshold, and SelfFence is set")
	}
	err := h.beatOnce(ctx)
	took := time.Since(began)
	h.note(inc, err, took)
	emit(h.r.log, h.r.cfg.Events.Beat, BeatInfo{Worker: inc.id, Duration: took, Err: err})
	if err == nil {
		return shorten(h.r.cfg.HeartbeatInterval)
	}
	// Not an interval later: the threshold leaves room for few more.
	retry := shorten(h.r.cfg.HeartbeatInterval / 4)
	if left := time.Until(h.trustedUntil()); h.r.cfg.SelfFence && !inc.abandoned.Load() {
		retry = max(0, min(retry, left))
	}
	return retry
}

func (h *heartbeater) note(inc *incarnation, err error, took time.Duration) {
	h.mu.Lock()
	h.lastErr = err
	h.mu.Unlock()
	if err == nil {
		h.r.counts.beats.Add(1)
		if h.failed > 0 {
			h.r.log.Info("recovery: heartbeat is back", "worker", inc.id, "failed", h.failed)
		}
		h.failed = 0
		if took > h.r.cfg.HeartbeatInterval/2 {
			h.r.log.Warn("recovery: slow heartbeat", "worker", inc.id, "took", took)
		}
		return
	}
	h.r.counts.beatsFailed.Add(1)
	h.failed++
	if h.r.life.Err() == nil {
		h.r.log.Warn("recovery: heartbeat failed", "worker", inc.id, "failed", h.failed, "err", err)
	}
}

// beatOnce makes one beat and does what its answer demands.
func (h *heartbeater) beatOnce(ctx context.Context) error {
	inc := h.r.current.Load()
	if inc.abandoned.Load() {
		// Never beat for leases that were cancelled: nobody runs them, and the beat would keep the peers away for ever.
		_, err := bounded(ctx, h.r.group, h.limit(), func(ctx context.Context) (any, error) { return nil, h.r.fenceOwn(ctx, inc) })
		if err != nil && !isWrongType(err) { // a session that can't be read is fenced by the next sweep
			return err
		}
		return h.rejoin(ctx, inc, nil)
	}
	before, acked, began := inc.count(nil), inc.acked(), time.Now()
	answer, err := h.send(ctx, inc)
	if isWrongType(err) {
		h.abandon(inc, "a key of this worker has a wrong type")
	}
	if err != nil {
		return fmt.Errorf("beat of worker %q: %w", inc.id, err)
	}
	switch answer.state {
	case sessionLive:
		h.trust(began)
		inc.kick()
		h.kickOld()
		h.r.settleFetchSoon(inc)
		return h.audit(ctx, inc, answer, acked, before, inc.count(nil))
	case sessionFenced:
		return h.fenced(ctx, inc)
	default:
		return h.absent(ctx, inc)
	}
}

// limit is how long a beat may take. The loop must not wait for a connection that hangs, because the next one may work; and
// with SelfFence it must not miss the moment.
func (h *heartbeater) limit() time.Duration {
	limit := max(h.r.cfg.HeartbeatInterval, minInterval)
	if left := time.Until(h.trustedUntil()); h.r.cfg.SelfFence && left > 0 {
		limit = min(limit, left)
	}
	return limit
}

// trust notes a good beat. What we believe is counted from before the call: Redis counts from when it saw it.
func (h *heartbeater) trust(began time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.lastGood = began
}

// kickOld repeats what is unsettled in former incarnations: a Done that Redis did not confirm before the rejoin.
func (h *heartbeater) kickOld() {
	h.old = slices.DeleteFunc(h.old, func(inc *incarnation) bool { return inc.idle() })
	for _, inc := range h.old {
		inc.kick()
	}
}

// trustedUntil is when peers may begin to take this worker's jobs.
func (h *heartbeater) trustedUntil() time.Time {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.lastGood.Add(h.r.tm.trust)
}

// forgotten reports that Redis may have dropped even the memory of this worker's end, so that an absent session proves nothing.
func (h *heartbeater) forgotten() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return time.Since(h.lastGood) >= h.r.tm.tombstone
}

// health is Check's part: why this worker can't vouch for its jobs.
func (h *heartbeater) health() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if silent := time.Since(h.lastGood); silent >= h.r.tm.trust {
		err := fmt.Errorf("recovery: no good heartbeat for %v, OrphanThreshold is %v: peers may have taken the jobs",
			silent.Round(time.Millisecond), h.r.cfg.OrphanThreshold)
		if h.lastErr != nil { // else the next one is late, or under way
			err = fmt.Errorf("%w: %w", err, h.lastErr)
		}
		return err
	}
	return nil
}

// fenced is the answer that this incarnation was declared dead.
func (h *heartbeater) fenced(ctx context.Context, inc *incarnation) error {
	return h.part(ctx, inc, inc.close(ErrLost), "declared dead by a peer")
}

// absent is the answer that Redis knows nothing of this incarnation's session. Most often it has lost everything, but perhaps only that
// key, and then a peer that meets the rest would take it for dead: so it is made dead first, and then counted what is left.
func (h *heartbeater) absent(ctx context.Context, inc *incarnation) error {
	if h.forgotten() {
		inc.away.Store(true)
		h.abandon(inc, "out of touch for longer than InflightTTL")
		return h.rejoin(ctx, inc, nil)
	}
	leases := inc.close(&notLiveError{absent: true})
	_, err := bounded(ctx, h.r.group, h.limit(), func(ctx context.Context) (any, error) { return nil, h.r.fenceOwn(ctx, inc) })
	if err != nil {
		return err
	}
	return h.part(ctx, inc, leases, "Redis lost the session")
}

// part divides the leases of a fenced incarnation. What Redis has of them belongs to the peers. A lease that Redis does not know at
// all (a flush or a failover lost it) would be handed back by nobody, so it is kept.
func (h *heartbeater) part(ctx context.Context, inc *incarnation, leases []*Lease, why string) error {
	places, err := h.places(ctx, inc, leases)
	if err != nil {
		return fmt.Errorf("worker %q is fenced: %w", inc.id, err)
	}
	// Looked at after the question: what Redis does not know any more may have been handed back long ago.
	if h.forgotten() {
		inc.away.Store(true)
	}
	var keep []*Lease
	lost := 0
	for i, l := range leases {
		if (places[i] == placeUnknown || places[i] == placeNoRecord) && !inc.away.Load() {
			keep = append(keep, l)
			continue
		}
		h.r.keepGiveUp(giveUp{lease: l, reason: Crashed})
		if l.lose(why) {
			lost++
		}
	}
	h.tellFenced(inc, why, lost)
	if err := h.dropOldEntries(ctx, inc, leases, places, keep); err != nil {
		return err
	}
	return h.rejoin(ctx, inc, keep)
}

// dropOldEntries takes leases that go on in the next incarnation out of the old index, where one without a record would be buried.
func (h *heartbeater) dropOldEntries(ctx context.Context, inc *incarnation, leases []*Lease, places []int64, keep []*Lease) error {
	var members []any
	for i, l := range leases {
		if places[i] == placeNoRecord && slices.Contains(keep, l) {
			members = append(members, l.member)
		}
	}
	if len(members) == 0 {
		return nil
	}
	ctx, cancel := h.r.limit(ctx)
	defer cancel()
	if err := h.r.rdb.ZRem(ctx, inc.keys.inflight, members...).Err(); err != nil {
		return fmt.Errorf("worker %q is fenced: %w", inc.id, err)
	}
	return nil
}

// abandon gives up an incarnation of which this worker can't be sure any more. All its leases are lost, now and for good: the
// next beats fence it, so that the peers hand its jobs back.
func (h *heartbeater) abandon(inc *incarnation, why string) {
	if inc.abandoned.Swap(true) {
		return
	}
	lost := 0
	for _, l := range inc.close(ErrLost) {
		h.r.keepGiveUp(giveUp{lease: l, reason: Crashed})
		if l.lose(why) {
			lost++
		}
	}
	h.tellFenced(inc, why, lost)
}

func (h *heartbeater) tellFenced(inc *incarnation, why string, lost int) {
	h.r.log.Warn("recovery: worker fenced, its leases are lost", "worker", inc.id, "reason", why, "lost", lost)
	emit(h.r.log, h.r.cfg.Events.Fenced, FencedInfo{Worker: inc.id, Reason: why, Lost: lost})
}

// rejoin goes on as a new incarnation, which takes over the leases in keep. If it fails, the next beat finds the old one as it
// was and comes here again.
func (h *heartbeater) rejoin(ctx context.Context, old *incarnation, keep []*Lease) error {
	began := time.Now()
	inc, err := bounded(ctx, h.r.group, h.r.tm.call, h.r.join)
	if err != nil {
		return fmt.Errorf("rejoin after worker %q: %w", old.id, err)
	}
	carried := 0
	for _, l := range keep {
		member := l.member
		if inc.adopt(l) {
			old.drop(member)
			carried++
		}
	}
	h.trust(began)
	h.nextRenewal = time.Time{}
	h.old = append(h.old, old)
	h.odd, h.auditDue = 0, carried > 0
	h.r.current.Store(inc)
	close(old.replaced)
	h.r.counts.rejoins.Add(1)
	h.r.log.Warn("recovery: rejoined", "worker", inc.id, "old", old.id, "carried", carried)
	emit(h.r.log, h.r.cfg.Events.Rejoined, RejoinedInfo{Worker: inc.id, Old: old.id, Carried: carried})
	h.r.sweep.recoverSoon(old.id) // a beat of ours may have entered it again after a peer had retired it
	if carried == 0 {
		return nil
	}
	return h.auditOnce(ctx, inc)
}
