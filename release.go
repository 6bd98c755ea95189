package recovery

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"
)

// Checkpoint keeps data as how far this run got: if the job has to be recovered, the Orphan carries the last one. nil goes back to
// Job.Checkpoint, where this run began. It returns ErrLost if the job is somebody else's, and then what they have is unchanged (only a job
// that this very worker is giving up may take it along); ErrPayloadTooLarge beyond Config.MaxPayload; and another error if Redis did not
// answer: then this checkpoint or the one before it is kept. It blocks for a round trip, at most until ctx ends. Calls for one lease are
// made one after the other.
//
// The next run of the job begins with no checkpoint of its own: put the Orphan's into Job.Checkpoint, and it is handed on until that run
// replaces it.
func (l *Lease) Checkpoint(ctx context.Context, data []byte) error {
	if most := l.r.cfg.MaxPayload; len(data) > most {
		return fmt.Errorf("%w: checkpoint of job %q has %d bytes, Config.MaxPayload is %d", ErrPayloadTooLarge, l.jobID(), len(data), most)
	}
	raw, err := l.seal(data)
	if err != nil {
		return fmt.Errorf("checkpoint of job %q: %w", l.jobID(), err)
	}
	saving := l.savingTurn()
	select {
	case saving <- struct{}{}:
		defer func() { <-saving }()
	case <-ctx.Done():
		return fmt.Errorf("checkpoint of job %q: %w", l.jobID(), ctx.Err())
	}
	l.lockSettled()
	state, home, member, number := l.state, l.home, l.member, l.saved+1
	if state == leaseActive {
		// Before the write: should Redis lose the lease, this is what it is tracked again with.
		l.checkpoint, l.saved = raw, number
	}
	l.mu.Unlock()
	switch state {
	case leaseActive:
	case leaseFinished, leaseFinishing:
		return fmt.Errorf("checkpoint of job %q: already done", l.jobID())
	default:
		return ErrLost
	}
	kept, err := l.r.save(ctx, home, member, number, raw)
	switch {
	case err != nil:
		return fmt.Errorf("checkpoint of job %q: %w", l.jobID(), err)
	case kept == 0:
		return ErrLost
	case kept < 0:
		l.r.heart.kick()
		return fmt.Errorf("checkpoint of job %q: not in Redis; it will be tracked again, with this checkpoint", l.jobID())
	}
	return nil
}

func (l *Lease) savingTurn() chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.saving == nil {
		l.saving = make(chan struct{}, 1)
	}
	return l.saving
}

func (l *Lease) seal(data []byte) ([]byte, error) {
	if data == nil || l.r.cfg.Codec == nil {
		return slices.Clone(data), nil
	}
	return seal(data, checkpointContext(l.ID()), l.r.cfg.Codec)
}

// save runs checkpoint.lua.
func (r *Recoverer) save(ctx context.Context, home *incarnation, member string, number uint64, raw []byte) (int, error) {
	k := home.keys
	remove := 1 - flagOf(raw)
	return bounded(ctx, r.group, r.tm.call, func(ctx context.Context) (int, error) {
		keys := []string{k.session, k.inflight, k.jobs, k.claims, k.handed}
		cmd, err := r.runReplicated(ctx, checkpointScript, keys, member, number, raw, remove)
		if err != nil {
			return 0, err
		}
		return cmd.Int()
	})
}

// Release gives the job back at once, through the Enqueuer, with Reason Released; it does not count as a crash. nil: the job is the Enqueuer's,
// and the lease is lost. If the Enqueuer refuses, its error is returned and the lease is as before: go on with the job, or try again. ErrLost:
// the job was, or is going to be, handed back by somebody else; or, with the Enqueuer's error, it was refused for good (Permanent) and is a dead
// letter now. It blocks for some round trips and the Enqueuer.
func (l *Lease) Release() error {
	l.lockSettled()
	if l.state != leaseActive {
		defer l.mu.Unlock()
		if l.state == leaseFinished || l.state == leaseFinishing {
			return fmt.Errorf("release job %q: already done", l.jobID())
		}
		return ErrLost
	}
	l.state, l.released = leaseReleasing, make(chan struct{})
	l.mu.Unlock()
	outcome, err := l.r.release(l)
	if outcome == releaseRefused && !l.home.reactivate(l) {
		// The incarnation ended meanwhile, and whoever ended it could not see this lease.
		outcome, err = releasePending, errors.Join(err, ErrLost)
	}
	if outcome == releaseRefused {
		l.mu.Lock()
		l.refused = true
		l.mu.Unlock()
	}
	switch outcome {
	case releasePending:
		l.r.keepGiveUp(giveUp{lease: l, reason: Released})
		l.mu.Lock()
		if l.giveLocked(leaseReleasing, Released, true) {
			l.r.ended(1)
		}
	case releaseGone:
		l.end(ErrLost, leaseReleasing)
		l.r.noteLost(l, Released.String())
	}
	close(l.released)
	if err != nil {
		return fmt.Errorf("release job %q: %w", l.jobID(), err)
	}
	return nil
}

// releaseOutcome is who has the job after Release.
type releaseOutcome uint8

const (
	releaseGone    releaseOutcome = iota // the Enqueuer, or a sweeper
	releaseRefused                       // the holder, as before
	releasePending                       // this process, until it is handed back
)

// release does Release's work.
func (r *Recoverer) release(l *Lease) (releaseOutcome, error) {
	l.home.count(func(t *tally) { t.doneSent++ })
	g := giveUp{lease: l, reason: Released}
	taken, err := r.takeOut(r.hard, g)
	if err != nil {
		// Unknown: perhaps in the claims. It is handed back in any case, so it must not be run on.
		return releasePending, errors.Join(err, ErrLost)
	}
	if taken.start == 0 {
		l.home.count(func(t *tally) { t.doneAcked++ })
		return releaseGone, ErrLost
	}
	c := r.ownClaim(g, taken)
	o := r.decode(c, &c.leases[0])
	r.countCrashes(r.hard, c.now, []*orphan{o})
	if o.fate == fateEnqueue && o.grave == "" {
		if r.list != nil {
			r.deliver(r.hard, c, []*orphan{o})
		} else {
			r.offer(o)
		}
	}
	switch {
	case o.fate == fateForget, o.fate == fateDelivered:
		l.home.count(func(t *tally) { t.doneAcked++ })
		if err := r.conclude(r.hard, c, []*orphan{o}, &handed{}); err != nil {
			r.owes.Store(true) // the Enqueuer has it, but its record is still there
		}
		return releaseGone, nil
	case o.fate == fateBury && o.grave == graveRefused: // it will never take it back
		if err := r.conclude(r.hard, c, []*orphan{o}, &handed{}); err != nil {
			return releasePending, errors.Join(o.err, err, ErrLost)
		}
		l.home.count(func(t *tally) { t.doneAcked++ })
		return releaseGone, errors.Join(o.err, ErrLost)
	case errors.Is(o.err, errEnqueueTimeout), o.sent && !isAnswer(o.err):
		// It may have taken the job and still be about to say so: the holder must not go on with it. The claim offers it again, with
		// the same Key.
		err := r.conclude(r.hard, c, []*orphan{o}, &handed{})
		return releasePending, errors.Join(o.err, err, ErrLost)
	}
	if back, err := r.untake(l, taken.start); err != nil || !back {
		return releasePending, errors.Join(o.err, err, ErrLost)
	}
	l.home.count(func(t *tally) { t.doneSent-- })
	return releaseRefused, o.err
}

// untake moves a lease back from the claims.
func (r *Recoverer) untake(l *Lease, start int64) (bool, error) {
	k := l.home.keys
	n, err := bounded(r.hard, r.group, r.tm.call, func(ctx context.Context) (int, error) {
		return untakeScript.Run(ctx, r.rdb, []string{k.session, k.inflight, k.jobs, k.claims}, l.member, start).Int()
	})
	return n == 1, err
}

// arm starts the job's timeout. A hung goroutine must not hold a job for ever.
func (l *Lease) arm() {
	d := l.job.Timeout
	if d == 0 {
		d = l.r.cfg.JobTimeout
	}
	if d <= 0 {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.state == leaseActive {
		l.timeout = time.AfterFunc(d, func() {
			l.r.log.Warn("recovery: job timed out", "worker", l.r.WorkerID(), "job", l.jobID(), "lease", l.ID(), "queue", l.job.Queue, "timeout", d)
			l.r.group.spawn(func() { l.r.surrender(l, TimedOut) })
		})
	}
}

// disarm stops the timeout. l.mu is held.
func (l *Lease) disarm() {
	if l.timeout != nil {
		l.timeout.Stop()
	}
}
