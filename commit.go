package recovery

import (
	"context"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

// Group commit. Concurrent Track and Done calls share a round trip: a call puts its op into the queue, and if no batch is under
// way a lane takes the whole queue at once. While it is out, the next batch gathers. There is no timer and no permanent
// goroutine: a lone caller is sent at once, by a goroutine that ends when the queue is empty.
//
// A lane numbers the batches that track, and has one of them under way at a time; the session keeps the last number of each lane. So a copy of a
// batch (go-redis repeats a command whose reply was lost, and the first one may still arrive, much later) is known as such,
// and can't bring back a record that was removed since. What has an unknown outcome is settled by the same lane: once a
// later number was accepted, the earlier batch can't happen any more.
const (
	laneCount  = 4
	batchOps   = 256
	batchBytes = 1 << 20

	// convoyAfter is how long a batch may be out before callers stop waiting for it and use another lane. On loopback one lane
	// makes the largest batches; over a network callers would wait for up to two round trips.
	convoyAfter = 400 * time.Microsecond

	// maxUnsettled is how many writes of unknown outcome a lane keeps before Track refuses new jobs.
	maxUnsettled = 10_000
)

// lane is a numbered sequence of batches.
type lane struct {
	field  string
	number uint64        // of the last batch sent; owned by whoever made the lane busy
	acked  atomic.Uint64 // of the last batch answered
	// Guarded by committer.qmu.
	busy      bool
	sentAt    time.Time // of the batch under way, or zero
	unsettled []*op     // writes whose outcome is not known: to be repeated here, and nowhere else
	dirty     bool      // the last batch's outcome is not known
	retry     bool      // repeat now
}

// committer sends the ops of one incarnation.
type committer struct {
	// Fixed.
	inc        *incarnation
	write      func(ctx context.Context, inc *incarnation, records []any, args []any) (*replies, error)
	spawn      func(func())
	timeout    time.Duration
	absentDone func() error // what Done answers when Redis lost the session

	qmu   sync.Mutex // guards what follows
	queue []*op
	lanes [laneCount]*lane
	rtt   time.Duration // moving average
}

func newCommitter(write func(context.Context, *incarnation, []any, []any) (*replies, error), spawn func(func()),
	timeout time.Duration, absentDone func() error) *committer {
	c := &committer{write: write, spawn: spawn, timeout: timeout, absentDone: absentDone}
	for i := range c.lanes {
		c.lanes[i] = &lane{field: "lane" + strconv.Itoa(i)}
	}
	return c
}

// submit queues an op. Its answer comes through op.settled.
func (c *committer) submit(o *op) {
	c.qmu.Lock()
	c.queue = append(c.queue, o)
	l := c.freeLane()
	c.qmu.Unlock()
	if l != nil {
		c.spawn(func() { c.run(l) })
	}
}

// kick repeats now what has an unknown outcome. Every beat calls it.
func (c *committer) kick() {
	for _, l := range c.lanes {
		c.qmu.Lock()
		l.retry = len(l.unsettled) > 0 || l.dirty
		start := l.retry && !l.busy
		l.busy = l.busy || start
		c.qmu.Unlock()
		if start {
			c.spawn(func() { c.run(l) })
		}
	}
}

// soil marks a lane whose number Redis has forgotten: the next kick sends a batch, if need be an empty one, to set it again.
func (c *committer) soil(i int) {
	c.qmu.Lock()
	defer c.qmu.Unlock()
	c.lanes[i].dirty = true
}

// acks are the last numbers that Redis has confirmed.
type acks struct {
	lanes [laneCount]uint64
	fetch uint64
}

func (i *incarnation) acked() (a acks) {
	for n, l := range i.lanes {
		a.lanes[n] = l.acked.Load()
	}
	a.fetch = i.fetches.acked.Load()
	return a
}

// overloaded reports that too much has an unknown outcome to take on more.
func (c *committer) overloaded() bool {
	c.qmu.Lock()
	defer c.qmu.Unlock()
	n := 0
	for _, l := range c.lanes {
		n += len(l.unsettled)
	}
	return n >= maxUnsettled
}

// idle reports that nothing is queued, under way or unsettled.
func (c *committer) idle() bool {
	c.qmu.Lock()
	defer c.qmu.Unlock()
	for _, l := range c.lanes {
		if l.busy || l.dirty || len(l.unsettled) > 0 {
			return false
		}
	}
	return len(c.queue) == 0
}

// freeLane makes a lane busy if one should take the queue now. The first is free to start; a further one only if those
// under way are slow. c.qmu is held.
func (c *committer) freeLane() *lane {
	var free *lane
	slow := true
	for _, l := range c.lanes {
		if !l.busy {
			if free == nil {
				free = l
			}
			continue
		}
		if slow && c.rtt < convoyAfter && (l.sentAt.IsZero() || time.Since(l.sentAt) < convoyAfter) {
			slow = false
		}
	}
	if free == nil || !slow {
		return nil
	}
	free.busy = true
	return free
}

// run sends batches until there is nothing left to send.
func (c *committer) run(l *lane) {
	for full := false; ; {
		if full {
			// The last batch was full: there are many callers, and those that it just answered are about to call again.
			runtime.Gosched()
		}
		batch := c.take(l)
		if batch == nil {
			return
		}
		full = len(batch.ops) >= batchOps
		c.send(l, batch)
	}
}

// take gathers the next batch, or returns nil and frees the lane.
func (c *committer) take(l *lane) *batch {
	c.qmu.Lock()
	defer c.qmu.Unlock()
	b := &batch{}
	if l.retry || len(c.queue) > 0 {
		// First what this lane owes. A new number makes sure that the old copies are past.
		n := 0
		for n < len(l.unsettled) && b.add(l.unsettled[n]) {
			n++
		}
		l.unsettled = slices.Clone(l.unsettled[n:])
	}
	flush := l.retry && l.dirty
	l.retry = l.retry && len(l.unsettled) > 0
	for len(c.queue) > 0 {
		o := c.queue[0]
		abandoned := o.state.Load() == opAbandoned
		if !abandoned && !b.add(o) {
			break
		}
		if abandoned {
			c.inc.drop(members(o.leases)...) // given up before it was sent: it never happened
		}
		c.queue[0] = nil
		c.queue = c.queue[1:]
	}
	if len(b.ops) == 0 && !flush {
		l.busy, l.sentAt = false, time.Time{}
		return nil
	}
	l.sentAt = time.Now()
	b.numbered = b.tracks > 0 || l.dirty
	return b
}

// send makes one attempt and answers every op of the batch.
func (c *committer) send(l *lane, b *batch) {
	if b.numbered {
		l.number++
	}
	records, args := b.layOut(l, c.inc)
	ctx, cancel := context.WithTimeout(context.Background(), c.timeout)
	defer cancel()
	began := time.Now()
	answer, err := c.write(ctx, c.inc, records, args)
	if err == nil {
		state, fresh, start := int(answer.int()), answer.int() == 1, answer.int()
		var lost map[int]bool
		for answer.more() {
			if lost == nil {
				lost = make(map[int]bool)
			}
			lost[int(answer.int())] = true
		}
		if err = answer.err; err == nil {
			c.answered(l, b, time.Since(began))
			c.settle(l, b, state, fresh, start, lost)
			return
		}
	}
	if rest, dones := b.split(); isOOM(err) && b.numbered && len(dones.ops) > 0 {
		// Done frees memory. It must not fail because a Track was in the same batch.
		c.unknown(l, rest, err)
		c.send(l, dones)
		return
	}
	c.unknown(l, b, err)
}

func (c *committer) answered(l *lane, b *batch, took time.Duration) {
	c.qmu.Lock()
	defer c.qmu.Unlock()
	if b.numbered {
		l.acked.Store(l.number)
		l.dirty = false
	}
	c.rtt += (took - c.rtt) / 8
}

// settle hands Redis' answer to every op.
func (c *committer) settle(l *lane, b *batch, state int, fresh bool, start int64, lost map[int]bool) {
	pos := 0
	for _, o := range b.ops {
		switch o.kind {
		case opTrack:
			c.settleTrack(l, o, state, fresh, start)
		case opRetrack:
			o.release()
			o.settle(trackError(state, fresh))
		case opDone:
			pos++
			c.settleDone(o, state, lost[pos])
		case opRemove:
			pos++
			c.inc.count(o.debt.paid)
			o.settle(nil)
		}
	}
}

// trackError reads the answer to Track. A session that is not live took nothing, except when an earlier copy of the batch ran
// while it still was: those leases are with the peers now, and must not be tracked a second time.
func trackError(state int, fresh bool) error {
	switch {
	case state == sessionLive:
		return nil
	case !fresh:
		return ErrLost
	}
	return &notLiveError{absent: state == sessionAbsent}
}

func (c *committer) settleTrack(l *lane, o *op, state int, fresh bool, start int64) {
	err := trackError(state, fresh)
	wanted := o.decide()
	if wanted && err == nil {
		err = c.inc.confirm(o.leases, start)
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

func (c *committer) settleDone(o *op, state int, lost bool) {
	c.inc.count(func(t *tally) { t.doneAcked++ })
	var err error
	switch {
	case lost:
		err = ErrLost
	case state == sessionAbsent:
		err = c.absentDone()
	}
	o.leases[0].finish(err)
	o.settle(err)
}

// owe makes the lane remove records that nobody runs: at once if they are known to be there, else with the next beat.
func (c *committer) owe(l *lane, leases []*Lease, why debt) {
	c.qmu.Lock()
	defer c.qmu.Unlock()
	for _, lease := range leases {
		l.unsettled = append(l.unsettled, newRemoval(lease.member, why))
	}
	l.retry = l.retry || why == debtKnown
}

// unknown keeps a batch that may or may not have been executed. Its callers are told, and so are those who wait for what the lane owed
// before: nobody waits for longer than one attempt takes. The lane owes them the rest.
func (c *committer) unknown(l *lane, b *batch, err error) {
	c.qmu.Lock()
	owed := l.unsettled
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
			l.unsettled = append(l.unsettled, o)
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
	l.unsettled = append(l.unsettled, again)
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
	l.unsettled = append(l.unsettled, again)
}

// submitAfter sends o by the lane that owes its lease a write of unknown outcome, and so after that write.
func (c *committer) submitAfter(l *lane, o *op) {
	c.qmu.Lock()
	l.unsettled = append(l.unsettled, o)
	c.qmu.Unlock()
	c.kick()
}
