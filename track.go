package recovery

import (
	"context"
	"errors"
	"fmt"
)

// Track records that this worker runs job. When it returns nil error, the job ends in exactly one of: Done, the
// Enqueuer, the dead letters. It blocks for a round trip, at most until ctx ends; the lease's Context descends from ctx, so do not give
// it one that ends before the job does, such as that of an HTTP request which is answered meanwhile.
//
// On an error the caller still has the job, and nothing is left that would run it twice, except with ErrLost: then the job was
// recorded and is being handed back, and the caller must drop it. If Redis' answer was lost, the record is removed as soon as
// Redis can be reached; if the process dies before that, the job is handed back although Track had failed.
func (r *Recoverer) Track(ctx context.Context, job Job) (*Lease, error) {
	leases, err := r.track(ctx, job)
	if err != nil {
		return nil, err
	}
	return leases[0], nil
}

// TrackAll is Track for several jobs, all or none: in one write, and with the same Fence.
func (r *Recoverer) TrackAll(ctx context.Context, jobs ...Job) ([]*Lease, error) {
	if len(jobs) == 0 {
		return nil, nil
	}
	return r.track(ctx, jobs...)
}

func (r *Recoverer) track(ctx context.Context, jobs ...Job) ([]*Lease, error) {
	for i := range jobs {
		if err := jobs[i].validate(r.cfg.MaxPayload); err != nil {
			return nil, err
		}
	}
	if err := r.begin(len(jobs)); err != nil {
		return nil, err
	}
	leases, err := r.trackLive(ctx, jobs)
	if err != nil {
		r.ended(len(jobs))
		if len(jobs) == 1 {
			return nil, fmt.Errorf("track job %q: %w", jobs[0].ID, err)
		}
		return nil, fmt.Errorf("track %d jobs: %w", len(jobs), err)
	}
	r.counts.tracked.Add(uint64(len(leases)))
	for _, l := range leases {
		l.arm()
	}
	return leases, nil
}

// trackLive tracks under the current incarnation, and once more under the next if that one turns out to be over.
func (r *Recoverer) trackLive(ctx context.Context, jobs []Job) ([]*Lease, error) {
	for attempt := 1; ; attempt++ {
		inc := r.current.Load()
		leases, err := r.trackIn(ctx, inc, jobs)
		if !isNotLive(err) || attempt > 1 {
			return leases, err
		}
		if err := r.awaitRejoin(ctx, inc, err); err != nil {
			return nil, err
		}
	}
}

func (r *Recoverer) trackIn(ctx context.Context, inc *incarnation, jobs []Job) ([]*Lease, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if inc.closed() {
		return nil, &notLiveError{}
	}
	if inc.overloaded() {
		return nil, errors.New("Redis has not answered for too long: too many writes have an unknown outcome")
	}
	leases, err := r.prepare(ctx, inc, jobs)
	if err != nil {
		return nil, err
	}
	var o *op
	if len(leases) == 1 {
		o = leases[0].ops[0].only(opTrack, leases[0])
	} else {
		o = newOp(opTrack, leases...)
	}
	inc.submit(o, ctx.Done() == nil)
	if o.settled != nil {
		if err := o.wait(ctx); err != nil {
			return nil, err
		}
	}
	if isNotLive(o.err) {
		r.discard(leases) // certainly not recorded. In any other case a record may need its payload
	}
	if o.err != nil {
		return nil, o.err
	}
	return leases, nil
}

// prepare makes the leases of jobs, each with its name and its record, and stores their large payloads.
func (r *Recoverer) prepare(ctx context.Context, inc *incarnation, jobs []Job) ([]*Lease, error) {
	var leases []*Lease
	for i := range jobs {
		l := &Lease{r: r, job: jobs[i], parent: ctx, stored: r.stores(&jobs[i])}
		inc.admit(l)
		if leases == nil {
			leases = l.ops[0].one[:0] // room for one, where it lies anyway
		}
		leases = append(leases, l)
		if err := r.encode(ctx, l); err != nil {
			inc.drop(members(leases)...)
			r.discard(leases)
			return nil, fmt.Errorf("job %q: %w", l.jobID(), err)
		}
	}
	return leases, nil
}

// encode makes the lease's record.
func (r *Recoverer) encode(ctx context.Context, l *Lease) (err error) {
	id := ""
	if r.cfg.Codec != nil || l.stored {
		id = l.ID() // made only where it is needed
	}
	if l.record, err = encodeRecord(&l.job, id, r.cfg.Codec, l.stored); err == nil && l.stored {
		err = r.putPayload(ctx, &l.job, id)
	}
	l.args[1] = l.record
	return err
}

// discard removes the stored payloads of leases that never were.
func (r *Recoverer) discard(leases []*Lease) {
	for _, l := range leases {
		if l.stored {
			r.deletePayload(r.hard, l.ID())
		}
	}
}

// begin enters n leases, if there is room. It is what Stop waits for, so it comes before anything else.
func (r *Recoverer) begin(n int) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.state != StateRunning {
		return fmt.Errorf("%w: state is %v", ErrNotRunning, r.state)
	}
	if r.cfg.MaxInflight > 0 && r.inflight+n > r.cfg.MaxInflight {
		return fmt.Errorf("%w: %d jobs in flight, Config.MaxInflight is %d", ErrAtCapacity, r.inflight, r.cfg.MaxInflight)
	}
	r.inflight += n
	return nil
}

// ended takes n leases out again.
func (r *Recoverer) ended(n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.inflight -= n
	if r.inflight == 0 && r.idle != nil {
		close(r.idle)
		r.idle = nil
	}
}

// noteLost tells that a holder has lost its job, and why.
func (r *Recoverer) noteLost(l *Lease, why string) {
	r.counts.lost.Add(1)
	r.owes.Store(true) // perhaps it is in this worker's own claims, by a late copy of its own write: then nobody else looks after it
	r.log.Warn("recovery: job lost", "worker", r.WorkerID(), "job", l.jobID(), "lease", l.ID(), "queue", l.job.Queue, "reason", why)
	emit(r.log, r.cfg.Events.Lost, LostInfo{Worker: r.WorkerID(), Lease: l.ID(), Job: l.jobID(), Queue: l.job.Queue, Reason: why})
}

// Do tracks job, runs fn with the lease's context, and ends the lease. It returns fn's error; joined with ErrLost if the job was
// lost meanwhile, or with Done's error. If fn panics the job is handed back, with Reason Panicked, and the panic goes on.
func (r *Recoverer) Do(ctx context.Context, job Job, fn func(context.Context) error) error {
	if fn == nil && job.validate(r.cfg.MaxPayload) == nil {
		return fmt.Errorf("do job %q: %w: fn is nil", job.ID, ErrInvalidConfig)
	}
	l, err := r.Track(ctx, job)
	if err != nil {
		return err
	}
	returned := false
	defer func() {
		// Not by recover: the panic keeps its own stack. Goexit comes here, too.
		if !returned {
			r.surrender(l, Panicked)
		}
	}()
	err = fn(l.Context())
	returned = true
	return errors.Join(err, l.Done())
}
