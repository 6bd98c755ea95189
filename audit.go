package recovery

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"
)

// The audit compares what this worker runs with what Redis says that it runs. Every beat brings three figures, at no cost; only
// if they can't be right are the leases themselves looked at.
//
//	lanes    a lane's last number went backwards: a failover lost writes that we had been told of
//	fetch    its number went backwards: the same, and the jobs of that Fetch are in their lists again
//	leases   the size of the index is outside of what the tally allows, twice in a row
//	records  fewer records than leases
//
// What is under way at that moment is left alone: a lease that is being tracked or finished is neither missing nor a stray.
func (h *heartbeater) audit(ctx context.Context, inc *incarnation, answer pulse, acked acks, before, after tally) error {
	if plausible(before, after, answer.leases) && answer.records >= answer.leases {
		h.odd = 0
	} else {
		h.odd++
		h.exact = true
	}
	for i, last := range answer.lanes {
		if uint64(last) < acked.lanes[i] {
			h.auditDue = true
			inc.soil(i)
		}
	}
	if inc.undone(answer.fetch, acked.fetch) {
		h.auditDue = true
	}
	if h.odd < 2 && !h.auditDue {
		return nil
	}
	return h.auditOnce(ctx, inc)
}

// auditOnce makes Redis and this worker agree, both ways.
func (h *heartbeater) auditOnce(ctx context.Context, inc *incarnation) error {
	h.auditDue = true // until it has succeeded
	leases := inc.active()
	if err := h.r.voidFetches(ctx, inc); err != nil {
		return fmt.Errorf("audit of worker %q: %w", inc.id, err)
	}
	places, err := h.places(ctx, inc, leases)
	if err != nil {
		return fmt.Errorf("audit of worker %q: %w", inc.id, err)
	}
	info := RepairedInfo{Worker: inc.id}
	var missing []*Lease
	for i, l := range leases {
		switch places[i] {
		case placeClaimed, placeHanded:
			if l.lose("Redis has it as somebody else's") {
				info.Lost++
			}
		case placeQueued:
			if l.lose("a failover undid its Fetch") {
				info.Lost++
			}
		case placeUnknown, placeNoRecord, placeNoIndex:
			missing = append(missing, l)
		}
	}
	if info.Tracked, err = h.trackAgain(ctx, inc, missing); err != nil {
		return fmt.Errorf("audit of worker %q: track again: %w", inc.id, err)
	}
	if info.Removed, err = h.removeStrays(ctx, inc); err != nil {
		return fmt.Errorf("audit of worker %q: remove strays: %w", inc.id, err)
	}
	h.odd, h.auditDue = 0, false
	if mended := info.Tracked + info.Removed + info.Lost; mended > 0 {
		h.r.counts.repaired.Add(uint64(mended))
		h.r.log.Warn("recovery: repaired by audit", "worker", inc.id, "tracked", info.Tracked, "removed", info.Removed, "lost", info.Lost)
		emit(h.r.log, h.r.cfg.Events.Repaired, info)
	}
	return nil
}

const auditPage = 500

// places asks where leases are, page by page.
func (h *heartbeater) places(ctx context.Context, inc *incarnation, leases []*Lease) ([]int64, error) {
	all := make([]int64, 0, len(leases))
	for page := range slices.Chunk(leases, auditPage) {
		_, places, err := h.r.where(ctx, inc, spots(page)...)
		if err != nil {
			return nil, err
		}
		all = append(all, places...)
		h.beatMeanwhile(ctx, inc)
	}
	return all, nil
}

// spot is where a lease should be in Redis.
type spot struct {
	home   *incarnation
	member string
	fetch  uint64 // number of the Fetch that took it from its list, or 0
}

func spots(leases []*Lease) []spot {
	all := make([]spot, len(leases))
	for i, l := range leases {
		all[i], _ = l.place()
	}
	return all
}

// where asks Redis for the session's state and the place of each lease.
func (r *Recoverer) where(ctx context.Context, inc *incarnation, leases ...spot) (session int64, places []int64, err error) {
	keys := []string{inc.keys.session, inc.keys.inflight, inc.keys.jobs, inc.keys.claims, inc.keys.handed}
	args := make([]any, len(leases))
	for i, l := range leases {
		args[i] = l.member
	}
	answer, err := bounded(ctx, r.group, r.tm.call, func(ctx context.Context) ([]int64, error) {
		return ints(ctx, r.rdb, whereScript, keys, args...)
	})
	if err == nil && len(answer) != 2+len(leases) {
		err = fmt.Errorf("script answered %d values, not %d", len(answer), 2+len(leases))
	}
	if err != nil {
		return 0, nil, fmt.Errorf("ask for %d leases of worker %q: %w", len(leases), inc.id, err)
	}
	session, fetched, places := answer[0], answer[1], answer[2:]
	for i, l := range leases {
		if places[i] == placeUnknown && (fetched >= 0 && l.fetch > uint64(fetched) || inc.wasUndone(l.fetch)) {
			places[i] = placeQueued
		}
	}
	return session, places, nil
}

// trackAgain writes leases that Redis lost. Done comes after it, lease by lease, so that it can't bring back what is finished.
func (h *heartbeater) trackAgain(ctx context.Context, inc *incarnation, leases []*Lease) (int, error) {
	tracked := 0
	for page := range slices.Chunk(leases, batchOps/2) {
		o := newOp(opRetrack)
		for _, l := range page {
			if l.hold(o) {
				o.leases = append(o.leases, l)
				o.bytes += len(l.record)
			}
		}
		if len(o.leases) == 0 {
			continue
		}
		inc.submit(o, false)
		// Not for longer than a beat may take: a lane that hangs must not stop the heart. The write goes on without us.
		overdue := time.NewTimer(h.r.cfg.HeartbeatInterval)
		select {
		case <-o.settled:
			overdue.Stop()
		case <-overdue.C:
			return tracked, errors.New("not answered in time")
		}
		if o.err != nil {
			return tracked, o.err
		}
		tracked += len(o.leases)
		h.beatMeanwhile(ctx, inc)
	}
	return tracked, nil
}

// beatMeanwhile sends a bare beat if one is due: an audit of many leases must not cost the worker its life.
func (h *heartbeater) beatMeanwhile(ctx context.Context, inc *incarnation) {
	began := time.Now()
	if began.Before(h.trustedUntil().Add(h.r.cfg.HeartbeatInterval - h.r.tm.trust)) {
		return
	}
	if answer, err := h.send(ctx, inc); err == nil && answer.state == sessionLive {
		h.trust(began)
	}
}

// hold marks a running lease as being tracked again by o.
func (l *Lease) hold(o *op) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.state != leaseActive || l.again != nil {
		return false
	}
	l.again = o
	return true
}

// removeStrays removes index entries that this worker does not run: a Track whose reply was lost, or a Done that a failover undid.
func (h *heartbeater) removeStrays(ctx context.Context, inc *incarnation) (int, error) {
	removed := 0
	for cursor := uint64(0); ; {
		limited, cancel := h.r.limit(ctx)
		page, next, err := h.r.rdb.ZScan(limited, inc.keys.inflight, cursor, "", auditPage).Result()
		cancel()
		if err != nil {
			return removed, err
		}
		for i := 0; i < len(page); i += 2 { // member, score, member, score, ...
			if !inc.isReserved(page[i]) && !inc.knows(page[i]) { // in this order: it becomes known before it is no longer reserved
				inc.submit(newRemoval(page[i], debtStray), false)
				removed++
			}
		}
		h.beatMeanwhile(ctx, inc)
		if cursor = next; cursor == 0 {
			return removed, nil
		}
	}
}
