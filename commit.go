package recovery

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

// Group commit. Concurrent Track and Done calls share a round trip: a call puts its op into the queue, and if no batch is under
// way a lane takes the whole queue at once. While it is out, the next batch gathers. Nobody waits for a timer and there is no permanent
// goroutine: a caller that finds a lane free and has nothing else to heed (Done, and Track with a ctx that can't end) writes the batch
// itself; for others a goroutine does, so that they can leave when their ctx ends, and it ends when the queue is empty. The timers in here
// only end waits that a stuck connection would make long.
//
// A lane numbers the batches that track, and has one of them under way at a time; the session keeps the last number of each lane. So a copy of a
// batch (go-redis repeats a command whose reply was lost, and the first one may still arrive, much later) is known as such,
// and can't bring back a record that was removed since. What has an unknown outcome is settled by the same lane: once a
// later number was accepted, the earlier batch can't happen any more.
const (
	laneCount  = 16
	batchOps   = 256
	batchBytes = 1 << 20

	// convoyAfter is the round trip from which on callers do not wait for the batch under way and use another lane. On loopback one lane
	// makes the largest batches; over a network callers would wait for up to two round trips. It is compared with the shortest round trip of
	// late: a busy machine is not a long way.
	convoyAfter = 600 * time.Microsecond

	// crowd is how many waiting ops make a batch of their own worth while, also on loopback: this process prepares it while Redis executes
	// the other one.
	crowd     = 64
	nearLanes = 3 // and no more than these at a time

	// stuckAfter is how long a batch may be out before callers stop waiting for it in any case.
	stuckAfter = 20 * time.Millisecond

	// maxUnsettled is how many writes of unknown outcome are kept before Track refuses new jobs.
	maxUnsettled = 10_000
)

// lane is a numbered sequence of batches.
type lane struct {
	field string
	// Owned by whoever made the lane busy.
	number uint64 // of the last batch sent
	batch  batch
	out    writing
	ctx    context.Context // of the writes
	cancel context.CancelFunc
	until  time.Time // when ctx ends

	acked atomic.Uint64 // of the last batch answered
	// Guarded by committer.qmu.
	busy      bool
	sentAt    time.Time // of the batch under way, or zero
	stuck     bool      // it is out for long
	unsettled []*op     // writes whose outcome is not known: to be repeated here, and nowhere else
	dirty     bool      // the last batch's outcome is not known
	retry     bool      // repeat now
	starved   bool      // there was no room for the queue beside what the lane owes
}

// committer sends the ops of one incarnation.
type committer struct {
	r    *Recoverer
	inc  *incarnation
	cmds commands
	rtt  atomic.Int64 // ns, the shortest of late
	owed atomic.Int64 // writes of unknown outcome, of all lanes

	qmu      sync.Mutex // guards what follows
	queue    []*op
	lanes    [laneCount]*lane
	ticking  chan struct{} // see tick
	watching bool          // see watch
}

func newCommitter(r *Recoverer, inc *incarnation) *committer {
	c := &committer{r: r, inc: inc, cmds: newCommands(inc.keys)}
	for i := range c.lanes {
		c.lanes[i] = &lane{field: "lane" + strconv.Itoa(i)}
	}
	return c
}

// submit queues an op, and has it written. inline: the caller has nothing else to heed, and may write it itself. Afterwards o.settled is
// what to wait for; nil, if it is settled already.
func (c *committer) submit(o *op, inline bool) {
	inline = inline && c.r.bounds
	if inline && c.far() {
		runtime.Gosched() // others who were answered by the same batch are about to call, and a round trip is worth waiting for them
	}
	c.qmu.Lock()
	l := c.freeLane()
	c.queue = append(c.queue, o)
	var b *batch
	if inline && l != nil {
		b = c.gather(l) // at once, before another lane can take o
	}
	led := b != nil && b.ops[len(b.ops)-1] == o
	if o.settled == nil && !led {
		o.settled = make(chan struct{})
	}
	if l == nil {
		c.watch()
	}
	c.qmu.Unlock()
	switch {
	case b != nil:
		c.lead(l, b)
	case l != nil:
		c.r.group.spawn(func() { c.run(l) })
	}
}

// lead writes one batch in its caller's time. If more has gathered meanwhile, a goroutine goes on: nobody works for the others for long.
func (c *committer) lead(l *lane, b *batch) {
	c.send(l, b)
	c.qmu.Lock()
	more := l.retry || len(c.queue) > 0
	if !more {
		l.free()
	}
	c.qmu.Unlock()
	if more {
		c.r.group.spawn(func() { c.run(l) })
	}
}

// free is for whoever made the lane busy. c.qmu is held.
func (l *lane) free() { l.busy, l.stuck, l.sentAt = false, false, time.Time{} }

// watch sees to it that nobody waits for long behind a lane that is stuck. One timer does for all who wait; it delays nobody. c.qmu is held.
func (c *committer) watch() {
	if c.watching {
		return
	}
	c.watching = true
	time.AfterFunc(stuckAfter, func() {
		c.qmu.Lock()
		defer c.qmu.Unlock()
		c.watching = false
		if len(c.queue) == 0 {
			return
		}
		for _, l := range c.lanes {
			l.stuck = !l.sentAt.IsZero() && time.Since(l.sentAt) >= stuckAfter
		}
		if l := c.freeLane(); l != nil {
			c.r.group.spawn(func() { c.run(l) })
		}
		c.watch()
	})
}

// tick returns a channel that is closed within the time of one call. Everybody who waits shares it: a timer for each would cost more than
// what it guards.
func (c *committer) tick() <-chan struct{} {
	c.qmu.Lock()
	defer c.qmu.Unlock()
	if c.ticking == nil {
		ch := make(chan struct{})
		c.ticking = ch
		time.AfterFunc(c.r.tm.call, func() {
			c.qmu.Lock()
			defer c.qmu.Unlock()
			c.ticking = nil
			close(ch)
		})
	}
	return c.ticking
}

// await blocks until o is settled, but not for longer than four calls may take. It reports whether it is.
func (c *committer) await(o *op) bool {
	select {
	case <-o.settled:
		return true
	default:
	}
	for range 4 { // the first may be about to tick
		select {
		case <-o.settled:
			return true
		case <-c.tick():
		}
	}
	return false
}

// far reports that Redis is a network away.
func (c *committer) far() bool { return time.Duration(c.rtt.Load()) >= convoyAfter }

// kick repeats now what has an unknown outcome. Every beat calls it.
func (c *committer) kick() {
	for _, l := range c.lanes {
		c.qmu.Lock()
		l.retry = len(l.unsettled) > 0 || l.dirty
		start := l.retry && !l.busy
		l.busy = l.busy || start
		c.qmu.Unlock()
		if start {
			c.r.group.spawn(func() { c.run(l) })
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
func (c *committer) overloaded() bool { return c.owed.Load() >= maxUnsettled }

// keep makes o one of the writes that the lane owes. c.qmu is held.
func (c *committer) keep(l *lane, o *op) {
	l.unsettled = append(l.unsettled, o)
	c.owed.Add(1)
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

// freeLane makes a lane busy if one should take the queue now. The first is free to start; a further one only if Redis is far, if there is a
// crowd, or if those under way are stuck. c.qmu is held.
func (c *committer) freeLane() *lane {
	var free *lane
	near, out := !c.far(), 0 // batches under way that are not stuck
	for _, l := range c.lanes {
		switch {
		case !l.busy:
			if free == nil {
				free = l
			}
		case near && !l.stuck:
			if out++; len(c.queue) < crowd || out >= nearLanes {
				return nil
			}
		}
	}
	if free != nil {
		free.busy = true
	}
	return free
}

// run sends batches until there is nothing left to send.
func (c *committer) run(l *lane) {
	for many := c.far(); ; {
		if many {
			// The last batch had several callers, and those that it just answered are about to call again.
			runtime.Gosched()
		}
		batch := c.take(l)
		if batch == nil {
			return
		}
		many = len(batch.ops) > 1
		c.send(l, batch)
	}
}

// take gathers the next batch, or returns nil and frees the lane.
func (c *committer) take(l *lane) *batch {
	c.qmu.Lock()
	defer c.qmu.Unlock()
	return c.gather(l)
}

// gather is take with c.qmu held.
func (c *committer) gather(l *lane) *batch {
	b := &l.batch
	clear(b.ops)
	*b = batch{ops: b.ops[:0]}
	owed := 0
	if !l.starved && (l.retry || len(c.queue) > 0) {
		// First what this lane owes. A new number makes sure that the old copies are past. But half of the batch is for those who wait: as long as Redis
		// can't be reached this is all that they would wait for.
		for owed < len(l.unsettled) && owed < batchOps/2 && b.add(l.unsettled[owed]) {
			owed++
		}
		l.unsettled = slices.Clone(l.unsettled[owed:])
		c.owed.Add(-int64(owed))
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
	l.starved = owed > 0 && len(b.ops) == owed && len(c.queue) > 0 // the next batch is theirs
	if len(b.ops) == 0 && !flush {
		l.free()
		return nil
	}
	l.sentAt, l.stuck = time.Now(), false
	b.numbered = b.tracks > 0 || l.dirty
	return b
}

// send makes one attempt and answers every op of the batch.
func (c *committer) send(l *lane, b *batch) {
	if b.numbered {
		l.number++
	}
	number := l.number
	if !b.numbered {
		number = 0
	}
	began := time.Now()
	ctx := l.context(began, c.r.tm.call)
	w := b.layOut(l, c.inc)
	answer, err := c.r.write(ctx, c.inc, l.field, number, b.scored, w)
	if err == nil {
		c.answered(l, b, time.Since(began))
		c.settle(ctx, l, b, answer)
		return
	}
	if rest, dones := b.split(); (isOOM(err) || errors.Is(err, errTooFewReplicas)) && b.numbered && len(dones.ops) > 0 {
		// Done frees memory, and waits for no replica. It must not fail because a Track was in the same batch.
		c.unknown(l, rest, err)
		c.send(l, dones)
		return
	}
	c.unknown(l, b, err)
}

// context is for one write: it lasts for limit, or a quarter longer. It is made anew only now and then, because making one costs as much as
// the rest of a batch.
func (l *lane) context(now time.Time, limit time.Duration) context.Context {
	if l.ctx == nil || l.until.Sub(now) < limit {
		if l.cancel != nil {
			l.cancel()
		}
		l.ctx, l.cancel = context.WithTimeout(context.Background(), limit+limit/4)
		l.until = now.Add(limit + limit/4)
	}
	return l.ctx
}

func (c *committer) answered(l *lane, b *batch, took time.Duration) {
	c.qmu.Lock()
	defer c.qmu.Unlock()
	if b.numbered {
		l.acked.Store(l.number)
		l.dirty = false
	}
	rtt := time.Duration(c.rtt.Load())
	if took < rtt || rtt == 0 {
		rtt = took
	} else {
		rtt += (took - rtt) / 256
	}
	c.rtt.Store(int64(rtt))
}
