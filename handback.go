package recovery

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

// Handing back, for leases that were claimed. The order is what makes it safe to die anywhere:
//
//	count    the crash is entered by the lease's id, so that a repetition does not count twice
//	enqueue  while the claim lasts. Dying before or during it leaves the claim, which runs out and is taken by another
//	forget   only after the Enqueuer said yes. Dying before it repeats the Enqueue, with the same Key
//
// Every lease goes its own way: one that can't be read, counted or enqueued does not keep the others.

// handed is what became of one claim's leases.
type handed struct {
	handedBack, postponed, buried int
	forgotten                     int // told before; only their records were left
	err                           error
}

// orphan is a claimed lease on its way back.
type orphan struct {
	Orphan
	lease    *claimedLease
	err      error   // why it can't be read, or was refused
	stored   bool    // its payload lies in the PayloadStore
	element  element // what it was in its list, if it was fetched
	nameless bool    // its ID is made of its contents
	told     bool    // it was handed back, and that was told, before
	sent     bool    // on its way into a list; without an answer it may be there
	grave    string  // why it must go to the dead letters, or ""
	delay    time.Duration
	took     time.Duration
	fate     fate
}

// fate is where an orphan goes.
type fate uint8

const (
	fateEnqueue   fate = iota // to the Enqueuer
	fateBury                  // to the dead letters
	fateLater                 // the claim is set to a later time
	fateForget                // accepted: the record goes
	fateDelivered             // accepted, and the record is gone
	fateNothing               // the claim is left to run out
)

// readClaim reads the leases of a claim, and counts their crashes.
func (r *Recoverer) readClaim(ctx context.Context, c *claim) {
	c.orphans = make([]*orphan, len(c.leases))
	for i := range c.leases {
		c.orphans[i] = r.decode(c, &c.leases[i])
	}
	if ctx.Err() == nil {
		ctx, cancel := context.WithDeadline(ctx, c.until.Add(-r.cfg.EnqueueTimeout)) // there must be time left to offer them
		defer cancel()
		r.countCrashes(ctx, c.now, c.orphans)
	}
}

// handBack brings every lease of a claim to an end, for now.
func (r *Recoverer) handBack(ctx context.Context, c *claim) handed {
	if c.orphans == nil {
		r.readClaim(ctx, c)
	}
	var h handed
	if ctx.Err() != nil { // the sweep has ended: given back to the fleet, at once
		for _, o := range c.orphans {
			o.fate = fateLater
		}
		h.err = r.conclude(ctx, c, c.orphans, &h)
		return h
	}
	var ready []*orphan
	for _, o := range c.orphans {
		if r.decide(o); o.fate == fateEnqueue {
			ready = append(ready, o)
		}
	}
	errs := []error{r.conclude(ctx, c, c.orphans, &h)} // those that need no Enqueuer
	r.offerEach(ctx, c, ready, func(done []*orphan) {
		errs = append(errs, r.conclude(ctx, c, done, &h))
	})
	h.err = errors.Join(errs...)
	return h
}

// decode reads a claimed lease. What can't be read is for the dead letters.
func (r *Recoverer) decode(c *claim, l *claimedLease) *orphan {
	o := &orphan{lease: l}
	o.Key, o.Worker, o.Reason = leaseID(c.worker, l.member), c.worker, l.reason
	if l.start > 0 {
		o.TrackedAt = time.UnixMicro(l.start)
	}
	if l.unread != nil {
		o.fail(fmt.Errorf("read the record: %w", l.unread), r.cfg.SweepInterval)
		return o
	}
	if l.record == nil {
		o.grave, o.err = "record missing", errors.New("the index has the lease, but there is no record of its job")
		return o
	}
	if isElement(l.record) {
		o.Job, o.element, o.nameless, o.err = r.decodeElement(l.record)
		if o.nameless {
			o.ID = contentID(o.element.bytes)
		}
		if o.err != nil {
			o.grave = "element unreadable"
			return o
		}
	} else if o.Job, o.err = decodeRecord(l.record, o.Key, r.cfg.Codec); o.err != nil {
		o.grave = "record unreadable"
		return o
	}
	o.stored = isStored(l.record)
	if o.Checkpoint = o.Job.Checkpoint; l.checkpoint != nil {
		if o.Checkpoint, o.err = openCheckpoint(l.checkpoint, o.Key, r.cfg.Codec); o.err != nil {
			o.grave = "checkpoint unreadable"
		}
	}
	o.Job.Checkpoint = o.Checkpoint // whoever tracks this Job again hands it on
	return o
}

// fail keeps an orphan for later, each time a little later.
func (o *orphan) fail(err error, interval time.Duration) {
	o.lease.attempts++
	o.lease.lastErr = strings.Join(strings.Fields(err.Error()), " ")
	o.fate, o.err, o.delay = fateLater, err, shorten(retryDelay(interval, o.lease.attempts))
}

// decide says where an orphan goes.
func (r *Recoverer) decide(o *orphan) {
	limit := r.limitOf(o)
	switch {
	case r.accepted.has(o.Key):
		o.fate, o.told = fateForget, true // the Enqueuer has it; only the record stayed
	case o.grave != "":
		o.fate = fateBury
	case o.fate == fateLater:
	case limit != NoLimit && o.Recovery > limit && o.Reason != Released:
		o.fate, o.grave = fateBury, fmt.Sprintf("recovered %d times within %v, the limit is %d", o.Recovery-1, r.cfg.RecoveryWindow, limit)
	default:
		o.fate = fateEnqueue
		if o.delay = r.backoff(o); o.delay > 0 {
			o.fate = fateLater
		}
	}
}

// limitOf is how often a job may be recovered, or NoLimit.
func (r *Recoverer) limitOf(o *orphan) int {
	if o.MaxRecoveries != 0 {
		return o.MaxRecoveries
	}
	return r.cfg.MaxRecoveries
}

// backoff asks once, before the first attempt; the answer is kept in Redis, as the time at which the claim falls due.
func (r *Recoverer) backoff(o *orphan) (delay time.Duration) {
	if r.cfg.Backoff == nil || o.lease.waited || o.Reason == Released {
		return 0
	}
	o.lease.waited = true
	if err := guard(func() { delay = r.cfg.Backoff(o.Recovery) }); err != nil {
		logPanic(r.log, "recovery: Config.Backoff panicked", err)
	}
	return min(delay, maxInterval)
}

// retryDelay is how long a job waits after its nth failed hand-back.
func retryDelay(interval time.Duration, n int) time.Duration {
	return doubled(interval, max(interval, 5*time.Minute), n)
}

// offerEach brings orphans to the Enqueuer and calls done, never concurrently, with those that it has answered for.
func (r *Recoverer) offerEach(ctx context.Context, c *claim, ready []*orphan, done func([]*orphan)) {
	switch {
	case len(ready) == 0:
	case r.list != nil:
		r.deliver(ctx, c, ready)
		done(ready)
	default:
		r.enqueueEach(ctx, c, ready, done)
	}
}

// enqueueEach offers orphans to the Enqueuer and calls done, never concurrently, with those that it has answered for. It does not wait
// for the slow ones to conclude the others.
func (r *Recoverer) enqueueEach(ctx context.Context, c *claim, ready []*orphan, done func([]*orphan)) {
	// A call must end before its claim does, or a second sweeper could offer the same orphan meanwhile.
	start, cancel := context.WithDeadline(ctx, c.until.Add(-r.cfg.EnqueueTimeout))
	defer cancel()
	if r.batch != nil {
		r.enqueueBatch(start, ready)
		done(ready)
		return
	}
	answered := make(chan *orphan, len(ready))
	r.group.spawn(func() {
		for _, o := range ready {
			if !r.takeSlot(start) {
				o.fate = fateLater // at once: the next claim finds it due
				answered <- o
				continue
			}
			r.group.spawn(func() {
				defer r.freeSlot()
				r.offer(o)
				answered <- o
			})
		}
	})
	for left := len(ready); left > 0; {
		page := []*orphan{<-answered}
		for more := true; more; {
			select {
			case o := <-answered:
				page = append(page, o)
			default:
				more = false
			}
		}
		done(page)
		left -= len(page)
	}
}

func (r *Recoverer) takeSlot(ctx context.Context) bool {
	if ctx.Err() != nil {
		return false
	}
	select {
	case r.slots <- struct{}{}:
		return true
	case <-ctx.Done():
		return false
	}
}

func (r *Recoverer) freeSlot() { <-r.slots }

func (r *Recoverer) offer(o *orphan) {
	if !r.loadPayload(o) {
		return
	}
	o.lease.waited = true // from here on the Enqueuer's own answers say when
	began := time.Now()
	err := r.enqueue(o.Orphan)
	o.took = time.Since(began)
	r.judge(o, err)
}

func (r *Recoverer) enqueueBatch(start context.Context, ready []*orphan) {
	if !r.takeSlot(start) {
		for _, o := range ready {
			o.fate = fateLater
		}
		return
	}
	defer r.freeSlot()
	var list []Orphan
	ready = slices.DeleteFunc(slices.Clone(ready), func(o *orphan) bool { return !r.loadPayload(o) })
	for _, o := range ready {
		o.lease.waited = true
		list = append(list, o.Orphan)
	}
	if len(list) == 0 {
		return
	}
	began := time.Now()
	errs := r.enqueueAll(list)
	for i, o := range ready {
		o.took = time.Since(began)
		var err error
		if errs != nil {
			err = errs[i]
		}
		r.judge(o, err)
	}
}

const graveRefused = "refused by the Enqueuer for good"

// judge reads the Enqueuer's answer.
func (r *Recoverer) judge(o *orphan, err error) {
	o.err = err
	switch {
	case err == nil:
		o.fate = fateForget
	case isPermanent(err):
		o.fate, o.grave = fateBury, graveRefused
	default:
		o.fail(err, r.cfg.SweepInterval)
	}
}
