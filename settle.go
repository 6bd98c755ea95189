package recovery

import (
	"context"
	"errors"
	"slices"
)

// What becomes of a batch once Redis has answered, or has not.

// settle hands Redis' answer to every op.
func (c *committer) settle(ctx context.Context, l *lane, b *batch, answer written) {
	refused := c.refusal(ctx, b, answer.start)
	missing, next := c.outcomes(ctx, b, answer.missing), 0
	pos := 0
	for _, o := range b.ops {
		switch o.kind {
		case opTrack:
			c.settleTrack(ctx, l, o, refused, answer.start)
			continue
		case opRetrack:
			o.release()
			o.settle(refused)
			continue
		}
		var end error // nil: it was there
		if next < len(missing) && missing[next].pos == pos {
			end = missing[next].err
			next++
		}
		pos++
		if o.kind == opDone {
			c.settleDone(l, o, end)
		} else {
			c.inc.count(o.debt.paid)
			o.settle(nil)
		}
	}
}

// refusal reads the answer to Track. A session that is not live took nothing, except when an earlier copy of the batch ran while it still
// was: those leases are with the peers now, and must not be tracked a second time. Where the session itself is gone, the leases tell.
func (c *committer) refusal(ctx context.Context, b *batch, start int64) error {
	if b.tracks == 0 || start > 0 {
		return nil
	}
	if start == trackedBefore {
		return ErrLost
	}
	var leases []*Lease
	for _, o := range b.ops {
		if o.kind == opTrack || o.kind == opRetrack {
			leases = append(leases, o.leases...)
		}
	}
	return c.traces(ctx, leases, &notLiveError{absent: start == sessionAbsent})
}

// traces looks whether Redis knows anything of leases that were tracked under a session that has ended: then they are the peers'. Else it answers none.
func (c *committer) traces(ctx context.Context, leases []*Lease, none error) error {
	_, places, err := c.r.where(ctx, c.inc, spots(leases)...)
	if err != nil {
		return &unprovenError{err}
	}
	if slices.ContainsFunc(places, func(p int64) bool { return p == placeTracked || p == placeClaimed || p == placeHanded }) {
		return ErrLost
	}
	return none
}

// trackedBefore is track.lua's answer that a copy of the batch was executed, and that the session has ended since.
const trackedBefore = -2

// missed is the outcome of one Done whose lease was not there.
type missed struct {
	pos int
	err error // nil: an earlier copy removed it
}

// outcomes asks what became of done leases that were not there: they are lost only if there is proof.
func (c *committer) outcomes(ctx context.Context, b *batch, positions []int) []missed {
	if len(positions) == 0 {
		return nil
	}
	var done []*op
	for _, o := range b.ops {
		if o.kind == opDone || o.kind == opRemove {
			done = append(done, o)
		}
	}
	var asked []spot
	for _, p := range positions {
		if p < len(done) && done[p].kind == opDone {
			at, _ := done[p].leases[0].place()
			asked = append(asked, at)
		}
	}
	_, places, err := c.r.where(ctx, c.inc, asked...) // all in one question
	all := make([]missed, 0, len(positions))
	for _, p := range positions {
		m := missed{pos: p}
		if p < len(done) && done[p].kind == opDone {
			if err != nil {
				m.err = &unprovenError{err}
			} else {
				m.err = c.proof(places[0])
				places = places[1:]
			}
		}
		all = append(all, m)
	}
	return all
}

// proof says what it means that a lease was not there when its Done came.
func (c *committer) proof(place int64) error {
	switch {
	case place == placeClaimed, place == placeHanded:
		return ErrLost
	case place == placeNoIndex: // its claim was damaged: a sweep that finds the record hands it back
		return ErrLost
	case c.inc.away.Load() || c.r.heart.forgotten(): // so long that even the proof has expired: assume the worst
		return ErrLost
	}
	return nil // an earlier copy removed it; or Redis lost its data, and nobody has it
}

// unprovenError means that Redis did not say what became of a lease.
type unprovenError struct{ error }

func (e *unprovenError) Unwrap() error { return e.error }

func isUnproven(err error) bool {
	if err == nil {
		return false // most often; and it costs nothing
	}
	var unproven *unprovenError
	return errors.As(err, &unproven)
}

func (c *committer) settleTrack(ctx context.Context, l *lane, o *op, err error, start int64) {
	wanted := o.decide()
	if wanted && err == nil {
		if err = c.inc.confirm(o.leases, start); isNotLive(err) {
			// Recorded, and the incarnation has ended since because its session was lost. If only that key was lost, the record is there, and a peer will
			// hand it back.
			err = c.traces(ctx, o.leases, err)
		}
	}
	if isUnproven(err) {
		c.owe(l, o.leases, debtPhantom)
	}
	if !wanted || err != nil {
		c.inc.drop(members(o.leases)...)
	}
	if wanted {
		o.answer(err)
	} else if err == nil {
		// The caller gave up while the write was under way: nobody runs what it recorded.
		c.inc.count(func(t *tally) { t.acked += int64(len(o.leases)) })
		c.owe(l, o.leases, debtKnown)
	}
}

func (c *committer) settleDone(l *lane, o *op, err error) {
	if isUnproven(err) {
		c.repeatDone(l, o)
		o.settle(err)
		return
	}
	c.inc.count(func(t *tally) { t.doneAcked++ })
	o.leases[0].finish(err)
	o.settle(err)
}

// owe makes the lane remove records that nobody runs: at once if they are known to be there, else with the next beat.
func (c *committer) owe(l *lane, leases []*Lease, why debt) {
	c.qmu.Lock()
	defer c.qmu.Unlock()
	for _, lease := range leases {
		c.keep(l, newRemoval(lease.member, why))
	}
	l.retry = l.retry || why == debtKnown
}

// unknown keeps a batch that may or may not have been executed. Its callers are told, and so are those who wait for what the lane owed
// before: nobody waits for longer than one attempt takes. The lane owes them the rest.
func (c *committer) unknown(l *lane, b *batch, err error) {
	c.qmu.Lock()
	owed := l.unsettled
	c.owed.Add(-int64(len(owed)))
	l.unsettled, l.retry = nil, false
	l.dirty = l.dirty || b.numbered
	c.qmu.Unlock()
	for _, o := range append(slices.Clone(b.ops), owed...) {
		switch o.kind {
		case opTrack:
			c.inc.drop(members(o.leases)...)
			c.owe(l, o.leases, debtPhantom)
		case opRetrack:
			c.repeatRetrack(l, o)
		case opDone:
			c.repeatDone(l, o)
		case opRemove:
			c.qmu.Lock()
			c.keep(l, o)
			c.qmu.Unlock()
			continue
		}
		o.settle(err)
	}
}

// repeatDone puts a copy of Done's write into the lane's debts, for the next call of Done to wait for.
func (c *committer) repeatDone(l *lane, o *op) {
	lease := o.leases[0]
	again := newOp(opDone, lease)
	again.counted = o.counted
	c.qmu.Lock()
	defer c.qmu.Unlock()
	lease.mu.Lock()
	lease.fin = again
	lease.mu.Unlock()
	c.keep(l, again)
}

// repeatRetrack keeps the leases held: were one removed by another lane now, a late copy of this write could bring it back.
func (c *committer) repeatRetrack(l *lane, o *op) {
	again := newOp(opRetrack, o.leases...)
	c.qmu.Lock() // in one step: a Done that sees the lane must come behind it
	defer c.qmu.Unlock()
	for _, lease := range o.leases {
		lease.mu.Lock()
		if lease.again == o {
			lease.again, lease.lane = again, l
		}
		lease.mu.Unlock()
	}
	c.keep(l, again)
}

// submitAfter sends o by the lane that owes its lease a write of unknown outcome, and so after that write.
func (c *committer) submitAfter(l *lane, o *op) {
	c.qmu.Lock()
	c.keep(l, o)
	c.qmu.Unlock()
	c.kick()
}
