package recovery

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"
	"sync/atomic"
	"time"
)

// Job is a piece of work as its worker knows it. Payload, ID and headers are opaque: any byte is allowed.
type Job struct {
	ID            string            // the caller's name for the job; not empty, at most 1 KiB. The same in every run: crashes are counted by it
	Queue         string            // optional, for routing and for people
	Payload       []byte            // opaque; handed back byte for byte
	Headers       map[string]string // optional; for trace context and the like; at most 64 KiB
	Timeout       time.Duration     // optional; overrides Config.JobTimeout; NoTimeout switches it off
	MaxRecoveries int               // optional; overrides Config.MaxRecoveries
	Checkpoint    []byte            // optional; where an earlier run got to: handed on until this run replaces it
}

// leaseState is what a holder may still do:
//
//	tracking -> active -> finishing -> finished, or lost
//	                   -> giving    -> lost
//	                   -> releasing -> lost, or active again
//	                   -> lost
//
// lost is final, and is set before the context is cancelled: a holder that was told to stop half-way must never remove the
// record with its Done, or the job would be neither done nor handed back.
type leaseState uint8

const (
	leaseTracking  leaseState = iota // Track is under way; nobody holds the lease yet
	leaseActive                      // the holder runs the job
	leaseFinishing                   // Done was called; Redis has not answered
	leaseGiving                      // it is being handed back by its own worker; the holder was told
	leaseReleasing                   // the holder is handing it back
	leaseFinished                    // removed from Redis; Done is nil
	leaseLost                        // somebody else's; Done is ErrLost
)

// Lease is the proof that a job is being run by this worker. Its methods are safe for concurrent use.
//
// A lease ends with Done or Release. One that is forgotten holds its job in flight for as long as the process lives.
type Lease struct {
	// Fixed after Track.
	r          *Recoverer
	job        Job
	born       string // the incarnation that tracked it first
	name       string // its name there
	record     []byte // as Redis has it, to track it again
	stored     bool   // the payload lies in the PayloadStore
	unreadable error  // why a fetched element is no job, or nil
	parent     context.Context
	contents   atomic.Pointer[string] // the ID of a fetched element without one, once it was asked for

	mu     sync.Mutex // guards what follows; may be taken inside incarnation.mu, never the other way round
	state  leaseState
	home   *incarnation
	member string // the lease's name inside of home
	args   [2]any // member and record, as the client wants them: made once
	start  int64  // us, Redis' clock
	fetch  uint64 // number of the Fetch of home that took it from its list, or 0
	ops    [2]op  // of the first Track and of the first Done
	fin    *op    // Done's write, while finishing
	again  *op    // the write that tracks it again, until Redis has answered it
	lane   *lane  // that owes again, once its outcome is unknown
	ctx    context.Context
	cancel context.CancelCauseFunc
	err    error // what Done answers, once finished or lost

	released   chan struct{} // closed when releasing has ended
	cause      string        // what the handler panicked with, for the dead letter that it may become
	refused    bool          // Release was called, and refused
	taken      bool          // moved into the claims by this worker
	homeless   bool          // Redis lost it while it was being given up
	handed     bool          // its worker has tried to hand it back
	saving     chan struct{} // of capacity 1: held by the Checkpoint at work
	timeout    *time.Timer
	checkpoint []byte // the last one, as Redis has it
	saved      uint64 // number of checkpoints
}

// Payload is Job().Payload. It spares a fetched job that has no ID of its own the making of one, which is a hash of the payload.
func (l *Lease) Payload() []byte { return l.job.Payload }

// Job returns the job as it was tracked. Do not change its payload.
func (l *Lease) Job() Job {
	j := l.job
	j.ID = l.jobID()
	j.Headers = maps.Clone(j.Headers)
	return j
}

// jobID is the job's name. A fetched element without one is named by its contents, when somebody asks.
func (l *Lease) jobID() string {
	if l.job.ID != "" || !isElement(l.record) {
		return l.job.ID
	}
	id := l.contents.Load()
	if id == nil {
		e, err := parseElement(l.record)
		if err != nil {
			return ""
		}
		made := contentID(e.bytes)
		id = &made
		l.contents.Store(id)
	}
	return *id
}

// ID returns the name of this run of the job. No other run, of this or any job, has the same. It is the Key of the Orphan
// if this run has to be recovered.
func (l *Lease) ID() string { return leaseID(l.born, l.name) }

// call gives the lease its name inside of home.
func (l *Lease) call(member string) {
	l.member = member
	l.args[0] = member
}

// Fence returns a number that grows with every run of the same job: a fencing token. Store it with the results, and refuse writes
// that carry a smaller one. It is the moment of Track in microseconds by Redis' clock. It is as good
// as that clock: a clock that is set back, or the clocks of different Cluster nodes, can make a later run's number smaller.
func (l *Lease) Fence() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.start
}

// Context returns a context that descends from the one given to Track. It is cancelled when the job is lost, and then
// context.Cause is ErrLost; after Done it is cancelled too.
func (l *Lease) Context() context.Context {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ctx == nil {
		// Made on demand: most callers of Track never ask, and a cancellable context costs more than the rest of a lease.
		l.ctx, l.cancel = context.WithCancelCause(l.parent)
		if l.state == leaseFinished || l.state == leaseLost || l.state == leaseGiving {
			l.cancel(l.err)
		}
	}
	return l.ctx
}

// Confirm asks Redis whether the job is still this worker's. It returns nil only if it is, ErrLost if it is not, and another error if
// Redis can't tell. Call it right before what can't be undone. It blocks for a round trip, at most until ctx ends.
//
// A nil answer is true for at least the time that is left of OrphanThreshold since the worker's last beat.
func (l *Lease) Confirm(ctx context.Context) error {
	l.lockSettled()
	at, state := spot{l.home, l.member, l.fetch}, l.state
	l.mu.Unlock()
	switch state {
	case leaseLost, leaseGiving:
		return ErrLost
	case leaseFinished, leaseFinishing:
		return fmt.Errorf("confirm job %q: already done", l.jobID())
	}
	session, places, err := l.r.where(ctx, at.home, at)
	switch {
	case err != nil:
		return fmt.Errorf("confirm job %q: %w", l.jobID(), err)
	case session == sessionLive && places[0] == placeTracked:
		return nil
	case session == sessionAbsent, places[0] == placeUnknown, places[0] == placeNoRecord, places[0] == placeNoIndex:
		// Redis lost it. The next beat tracks it again; until then it could not be recovered, but nobody has it either.
		l.r.heart.kick()
		return fmt.Errorf("confirm job %q: not in Redis; it will be tracked again", l.jobID())
	}
	return ErrLost // told by Redis; the heartbeat will cancel the context
}

// Done ends the lease: the job is finished, well or badly, and will not be recovered. It returns ErrLost if the job is somebody
// else's by now, or will be because its context was cancelled with ErrLost: then do not acknowledge it to its source.
//
// Done takes no ctx because it must succeed during shutdown. It blocks for a round trip. Any other error means that
// Redis did not confirm it in time: Done is kept and repeated with every heartbeat, and calling it again waits again. It is
// idempotent: a second call returns what the first one did.
func (l *Lease) Done() error {
	fin, home, err := l.beginDone(true, nil)
	if fin == nil {
		return err
	}
	if !home.await(fin) {
		return fmt.Errorf("done with job %q: no answer from Redis for %v at the least; it goes on", l.jobID(), 3*l.r.tm.call)
	}
	if fin.err != nil && !errors.Is(fin.err, ErrLost) {
		return fmt.Errorf("done with job %q: not confirmed by Redis, will be repeated: %w", l.jobID(), fin.err)
	}
	return fin.err
}

// beginDone has Done's write sent, by the caller itself if inline, and answers it; or nil, and what Done returns, if there is nothing to
// write any more. then, if there is one, is told of the answer; but not if somebody else has called Done and is told: then the write is nil, too.
func (l *Lease) beginDone(inline bool, then func(error)) (*op, *incarnation, error) {
	l.lockSettled()
	fresh := l.state == leaseActive
	if fresh {
		l.state = leaseFinishing
		l.fin = l.ops[1].only(opDone, l)
		l.fin.then = then
	}
	state, fin, home, lane, err := l.state, l.fin, l.home, l.lane, l.err
	l.mu.Unlock()
	switch {
	case state == leaseGiving:
		return nil, nil, ErrLost
	case state != leaseFinishing:
		return nil, nil, err
	case fresh && lane != nil:
		home.submitAfter(lane, fin)
	case fresh:
		home.submit(fin, inline)
	default:
		home.kick()
	}
	if !fresh && then != nil {
		return nil, nil, nil // whoever called Done is told
	}
	return fin, home, nil
}

// lockSettled locks l.mu when no Release is under way, and no write that tracks the lease again is under way for the first time. Removing the lease before that
// write would let it bring the lease back. A write of unknown outcome is not waited for: l.lane says who owes it.
func (l *Lease) lockSettled() {
	l.mu.Lock()
	for {
		var wait <-chan struct{}
		switch {
		case l.state == leaseReleasing:
			wait = l.released
		case l.state == leaseActive && l.again != nil && l.lane == nil:
			wait = l.again.settled
		default:
			return
		}
		l.mu.Unlock()
		<-wait
		l.mu.Lock()
	}
}

// activate is called when Redis has answered Track, with home.mu held.
func (l *Lease) activate(start int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.state = leaseActive
	l.start = start
}

// finish ends the lease with Redis' answer to Done.
func (l *Lease) finish(err error) {
	if l.end(err, leaseFinishing) {
		if err == nil {
			l.r.counts.done.Add(1)
			if l.stored {
				l.r.group.spawn(func() { l.r.deletePayload(l.r.hard, l.ID()) })
			}
		} else {
			l.r.noteLost(l, "a peer has it")
		}
	}
}

// lose tells the holder that the job is somebody else's. It reports whether that was news.
// A holder that called Done already is told by Done.
func (l *Lease) lose(why string) bool {
	if !l.end(ErrLost, leaseActive) {
		return false
	}
	l.r.noteLost(l, why)
	return true
}

// giveLocked tells the holder that its own worker hands the job back, if the lease is in state from. It unlocks l.mu. The caller ends the lease once it
// answers for it: Stop may wait for that, and then looks at what is kept. loud: there is a holder
// who loses something.
func (l *Lease) giveLocked(from leaseState, reason Reason, loud bool) bool {
	if l.state != from {
		l.mu.Unlock()
		return false
	}
	l.state, l.err = leaseGiving, ErrLost
	cancel := l.cancel
	l.disarm()
	l.mu.Unlock()
	if cancel != nil {
		cancel(ErrLost)
	}
	if loud {
		l.r.noteLost(l, reason.String())
	}
	return true
}

// given is give's end: somebody else has the job. It answers the incarnation that held the lease until now, or nil.
func (l *Lease) given() *incarnation {
	l.mu.Lock()
	was, home, member := l.state, l.home, l.member
	l.state = leaseLost
	l.mu.Unlock()
	if was != leaseGiving {
		return nil
	}
	home.drop(member)
	return home
}

// end moves the lease to its last state, if it is in one of from.
func (l *Lease) end(err error, from ...leaseState) bool {
	l.mu.Lock()
	ok := false
	for _, s := range from {
		ok = ok || l.state == s
	}
	if !ok {
		l.mu.Unlock()
		return false
	}
	l.state, l.err, l.again, l.lane = leaseFinished, err, nil, nil
	if err != nil {
		l.state = leaseLost
	}
	home, member, cancel := l.home, l.member, l.cancel
	l.disarm()
	l.mu.Unlock()
	if cancel != nil {
		cancel(err)
	}
	home.drop(member)
	l.r.ended(1)
	return true
}

// isHeld reports whether the holder runs the job.
func (l *Lease) isHeld() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.state == leaseActive
}

// wantsOut reports that the holder wanted to release the job, could not, and still has it.
func (l *Lease) wantsOut() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.refused && l.state == leaseActive
}

// isSettled reports whether the holder runs the job and no write is under way for it.
func (l *Lease) isSettled() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.state == leaseActive && l.again == nil
}

// wants reports whether o, which tracks the lease again, is still to be written.
func (l *Lease) wants(o *op) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.state == leaseActive && l.again == o || l.state == leaseFinishing && l.again == o
}

// extraFields are what lies beside the record and must go with it.
func (l *Lease) extraFields() []any {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.saved == 0 {
		return nil
	}
	return []any{l.member + checkpointField, l.member + numberField}
}

// checkpointFields are the fields, with their values, to track a checkpoint again.
func (l *Lease) checkpointFields() []any {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.checkpoint == nil {
		return nil
	}
	return []any{l.member + checkpointField, l.checkpoint, l.member + numberField, l.saved}
}

// place is where Redis has the lease, and whether this worker moved it into the claims.
func (l *Lease) place() (at spot, taken bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return spot{l.home, l.member, l.fetch}, l.taken
}

func (l *Lease) setTaken(taken, homeless bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.taken, l.homeless = taken, homeless
}
