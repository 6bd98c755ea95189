package recovery

import (
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
	leases  []*Lease // opTrack, opRetrack, opDone
	member  string   // opRemove
	debt    debt     // opRemove
	bytes   int
	counted bool // in tally.doneSent
	state   atomic.Int32
	settled chan struct{}
	err     error // valid once settled is closed
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
	close(o.settled)
}

// settle is for ops that nobody can abandon.
func (o *op) settle(err error) {
	if o.decide() {
		o.answer(err)
	}
}

// batch is what one script call carries.
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

// layOut returns the batch as HSET and commit.lua expect it, and counts what is on its way.
func (b *batch) layOut(l *lane, inc *incarnation) (records, args []any) {
	var number uint64
	if b.numbered {
		number = l.number
	}
	var track, done, extra []any
	var sent, doneSent int64
	tracks, dones, scored := 0, 0, 0
	if b.scored {
		scored = 1
	}
	for _, o := range b.ops {
		switch o.kind {
		case opTrack, opRetrack:
			for _, lease := range o.leases {
				if o.kind == opRetrack && !lease.wants(o) {
					continue // lost, or with a later incarnation
				}
				tracks++
				track = append(track, lease.member)
				if b.scored {
					track = append(track, lease.start)
				} else {
					sent++
				}
				records = append(records, lease.member, lease.record)
				if b.scored {
					records = append(records, lease.checkpointFields()...)
				}
			}
			continue
		case opDone:
			done = append(done, o.leases[0].member)
			extra = append(extra, o.leases[0].extraFields()...)
		case opRemove:
			done = append(done, o.member)
			extra = append(extra, o.member+checkpointField, o.member+numberField)
		}
		dones++
		if !o.counted && (o.kind == opDone || o.debt == debtKnown) {
			o.counted = true
			doneSent++
		}
	}
	inc.count(func(t *tally) { t.sent += sent; t.doneSent += doneSent })
	args = make([]any, 0, 5+len(track)+len(done)+len(extra))
	args = append(args, l.field, number, tracks, scored, dones)
	return records, append(append(append(args, track...), done...), extra...)
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
