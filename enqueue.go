package recovery

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// Enqueuer gives an orphaned job back to whatever jobs come from. Enqueue returns nil only when the job is safe there: the
// record is dropped right after. Any other answer keeps it, to be offered again, later and later; Permanent(err) sends it to the dead
// letters.
//
// Enqueue is called concurrently, by any worker of the fleet. If a sweeper dies after Enqueue returned and before the record was
// dropped, the call is repeated with the same Key: an Enqueuer that must not act twice remembers Keys. It must not dedupe by job ID:
// the message that the job came from may still be unacknowledged, and the job would be swallowed.
type Enqueuer interface {
	Enqueue(ctx context.Context, o Orphan) error
}

// EnqueuerFunc makes a func an Enqueuer.
type EnqueuerFunc func(ctx context.Context, o Orphan) error

// Enqueue calls f.
func (f EnqueuerFunc) Enqueue(ctx context.Context, o Orphan) error { return f(ctx, o) }

// BatchEnqueuer is an Enqueuer that takes many orphans in one call, such as one UPDATE of rows, guarded by the lease that
// holds them (examples/postgres-rows). EnqueueAll returns nil if all were accepted, or exactly one error for each orphan, nil where it was.
// One call has Config.EnqueueTimeout.
type BatchEnqueuer interface {
	Enqueuer
	EnqueueAll(ctx context.Context, os []Orphan) []error
}

// Orphan is a job whose worker lost it.
type Orphan struct {
	Job
	Key        string    // idempotency key, the lease's ID: the same again if this recovery has to be repeated
	Recovery   int       // 1 for the first time this job is recovered, within Config.RecoveryWindow
	Reason     Reason    // why it is handed back
	Worker     string    // who held it
	TrackedAt  time.Time // Redis' clock; zero if only the record was found
	Checkpoint []byte    // the last one, or nil
}

// Reason says why a job is handed back.
type Reason uint8

const (
	Crashed  Reason = iota // its worker died, or was silent for OrphanThreshold
	TimedOut               // it ran for longer than its timeout
	Panicked               // its func panicked in Do
	Released               // its worker gave it back, by Release or because it stopped
)

var reasonNames = [...]string{Crashed: "crashed", TimedOut: "timed-out", Panicked: "panicked", Released: "released"}

// String returns the reason as it is logged.
func (r Reason) String() string {
	if int(r) < len(reasonNames) {
		return reasonNames[r]
	}
	return fmt.Sprintf("reason(%d)", uint8(r))
}

func parseReason(s string) Reason {
	for r, name := range reasonNames {
		if s == name {
			return Reason(r)
		}
	}
	return Crashed
}

// enqueue calls the Enqueuer for one orphan, with a timeout and a panic guard.
func (r *Recoverer) enqueue(o Orphan) error {
	errs := r.callEnqueuer(func(ctx context.Context) []error { return []error{r.enq.Enqueue(ctx, o)} })
	return errs[0]
}

// enqueueAll calls the BatchEnqueuer, and answers one error for each orphan.
func (r *Recoverer) enqueueAll(os []Orphan) []error {
	errs := r.callEnqueuer(func(ctx context.Context) []error { return r.batch.EnqueueAll(ctx, os) })
	if errs == nil || len(errs) == len(os) {
		return errs
	}
	err := fmt.Errorf("EnqueueAll answered %d errors for %d orphans", len(errs), len(os))
	if len(errs) == 1 && errs[0] != nil {
		err = errs[0] // of the call itself: a panic, a timeout
	}
	all := make([]error, len(os))
	for i := range all {
		all[i] = err
	}
	return all
}

var errEnqueueTimeout = errors.New("Enqueuer did not return in time")

// callEnqueuer runs the caller's code in a goroutine of its own: one that hangs, panics or ends it must not stop the loop that
// needs the answer. A call that does not return is not waited for.
func (r *Recoverer) callEnqueuer(f func(context.Context) []error) []error {
	ctx, cancel := context.WithTimeout(r.hard, r.cfg.EnqueueTimeout)
	defer cancel()
	answer := make(chan []error, 1)
	r.detach(func() {
		errs := []error{errors.New("the Enqueuer ended its goroutine")}
		defer func() { answer <- errs }()
		if err := guard(func() { errs = f(ctx) }); err != nil {
			logPanic(r.log, "recovery: the Enqueuer panicked", err)
			errs = []error{err}
		}
	})
	select {
	case errs := <-answer:
		return errs
	case <-ctx.Done():
	}
	// It may have ended in the same moment. A nil that came in time counts.
	select {
	case errs := <-answer:
		return errs
	default:
		return []error{fmt.Errorf("%w (%v): %w", errEnqueueTimeout, r.cfg.EnqueueTimeout, ctx.Err())}
	}
}
