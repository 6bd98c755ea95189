package recovery

import (
	"context"
	"sync/atomic"
)

type opKind uint8

const (
	opTrack   opKind = iota // new leases, all or none
	opRetrack               // leases that Redis lost
	opDone                  // a lease whose holder has finished
	opRemove                // a record that nobody here runs
)

// op is one caller's part of a batch. Whoever first moves state away from opWaiting decides: the caller that gives up, or
// the lane that has the answer.
type op struct {
	kind    opKind
	debt    debt // opRemove
	counted bool // in tally.doneSent
	state   atomic.Int32
	bytes   int
	leases  []*Lease      // opTrack, opRetrack, opDone
	one     [1]*Lease     // what leases is made of, for one
	member  string        // opRemove
	settled chan struct{} // nil for a Track that its caller writes itself
	err     error         // valid once settled is closed
	then    func(error)   // told of the answer, if set; must not block
}

const (
	opWaiting int32 = iota
	opSettled
	opAbandoned
)

// debt is why a record has to be removed.
type debt uint8

const (
	debtStray   debt = iota // an audit found it
	debtPhantom             // its Track was sent, and never known to be executed
	debtKnown               // its Track was executed, but its caller had given up
)

func newOp(kind opKind, leases ...*Lease) *op {
	o := &op{kind: kind, leases: leases, settled: make(chan struct{})}
	if kind == opTrack || kind == opRetrack {
		for _, l := range leases {
			o.bytes += len(l.record)
		}
	}
	return o
}

// only makes o the op of one lease. It lies in the lease, to save an allocation. Its channel is made when somebody has to wait.
func (o *op) only(kind opKind, l *Lease) *op {
	o.kind, o.one[0] = kind, l
	o.leases = o.one[:]
	if kind == opTrack {
		o.bytes = len(l.record)
	} else {
		o.settled = make(chan struct{}) // Done may be called twice
	}
	return o
}

func newRemoval(member string, why debt) *op {
	return &op{kind: opRemove, member: member, debt: why, settled: make(chan struct{})}
}

// decide is the lane's: there is an answer. It reports false if the caller had given up.
func (o *op) decide() bool { return o.state.CompareAndSwap(opWaiting, opSettled) }

// abandon is the caller's: it wants no answer any more. It reports false if there is one, or will be in a moment.
func (o *op) abandon() bool { return o.state.CompareAndSwap(opWaiting, opAbandoned) }

// answer wakes the caller. decide comes first.
func (o *op) answer(err error) {
	o.err = err
	if o.settled != nil {
		close(o.settled)
	}
	if o.then != nil {
		o.then(err)
	}
}

// wait blocks until there is an answer. It reports an error if ctx ended before that, and then o is abandoned.
func (o *op) wait(ctx context.Context) error {
	if ctx.Done() != nil {
		select {
		case <-o.settled:
		case <-ctx.Done():
			if o.abandon() {
				return ctx.Err()
			}
		}
	}
	<-o.settled
	return nil
}

// settle is for ops that nobody can abandon.
func (o *op) settle(err error) {
	if o.decide() {
		o.answer(err)
	}
}

// batch is what one write carries.
type batch struct {
	ops           []*op
	tracks, bytes int
	scored        bool // its leases come with their starts: they are tracked again
	numbered      bool // what only removes needs no number
}

// add takes o into the batch, if it fits: by size, and because leases tracked anew and tracked again are written differently.
func (b *batch) add(o *op) bool {
	if len(b.ops) > 0 && (len(b.ops) >= batchOps || b.tracks+len(o.leases) > batchOps || b.bytes+o.bytes > batchBytes) {
		return false
	}
	if o.kind == opTrack || o.kind == opRetrack {
		again := o.kind == opRetrack
		if b.tracks > 0 && b.scored != again {
			return false
		}
		b.scored = again
		b.tracks += len(o.leases)
	}
	b.ops = append(b.ops, o)
	b.bytes += o.bytes
	return true
}

func members(leases []*Lease) []string {
	names := make([]string, len(leases))
	for i, l := range leases {
		names[i] = l.member
	}
	return names
}

// writing is a batch as Redis gets it: arguments of HSET, of track.lua and of done.lua. A lane uses the same memory for one after the
// other.
type writing struct {
	records, track, done, extra []any
	dones                       int
}

// layOut writes the batch down, and counts what is on its way.
func (b *batch) layOut(l *lane, inc *incarnation) *writing {
	w := &l.out
	w.records, w.track = w.records[:0], w.track[:0]
	w.done, w.extra, w.dones = w.done[:0], w.extra[:0], 0
	var sent, doneSent int64
	for _, o := range b.ops {
		switch o.kind {
		case opTrack, opRetrack:
			for _, lease := range o.leases {
				if o.kind == opRetrack && !lease.wants(o) {
					continue // lost, or with a later incarnation
				}
				w.track = append(w.track, lease.args[0])
				w.records = append(w.records, lease.args[0], lease.args[1])
				if b.scored {
					w.track = append(w.track, lease.start)
					w.records = append(w.records, lease.checkpointFields()...)
				} else {
					sent++
				}
			}
			continue
		case opDone:
			w.done = append(w.done, o.leases[0].args[0])
			w.extra = append(w.extra, o.leases[0].extraFields()...)
		case opRemove:
			w.done = append(w.done, o.member)
			w.extra = append(w.extra, o.member+checkpointField, o.member+numberField)
		}
		w.dones++
		if !o.counted && (o.kind == opDone || o.debt == debtKnown) {
			o.counted = true
			doneSent++
		}
	}
	w.done = append(w.done, w.extra...)
	inc.onTheWay(sent, doneSent)
	return w
}

// split parts the batch's Done from the rest, except of leases that are to be tracked again first.
func (b *batch) split() (rest, dones *batch) {
	rest, dones = &batch{numbered: b.numbered}, &batch{}
	for _, o := range b.ops {
		if o.kind == opDone && !o.leases[0].isOwedTrack() {
			dones.ops = append(dones.ops, o)
		} else {
			rest.ops = append(rest.ops, o)
		}
	}
	return rest, dones
}

// isOwedTrack reports whether a write that tracks the lease again is not yet answered.
func (l *Lease) isOwedTrack() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.again != nil
}

// paid counts a removal that Redis has confirmed.
func (d debt) paid(t *tally) {
	switch d {
	case debtPhantom:
		t.acked++
		t.doneSent++
		t.doneAcked++
	case debtKnown:
		t.doneAcked++
	}
}

// release frees leases that have been tracked again.
func (o *op) release() {
	for _, lease := range o.leases {
		lease.mu.Lock()
		if lease.again == o {
			lease.again, lease.lane = nil, nil
		}
		lease.mu.Unlock()
	}
}
