package recoverytest

import (
	"context"
	"slices"
	"sync"

	"github.com/crashsafe/recovery"
)

// Enqueuer remembers what it was given. It accepts everything, unless it was told otherwise. It is safe for concurrent use.
type Enqueuer struct {
	mu       sync.Mutex // guards what follows
	accepted []recovery.Orphan
	calls    int
	err      error
	hang     bool
}

// Enqueue is the Enqueuer's method.
func (e *Enqueuer) Enqueue(ctx context.Context, o recovery.Orphan) error {
	e.mu.Lock()
	e.calls++
	hang, err := e.hang, e.err
	if !hang && err == nil {
		e.accepted = append(e.accepted, o)
	}
	e.mu.Unlock()
	if hang {
		<-ctx.Done()
		return ctx.Err()
	}
	return err
}

// Fail makes every call from now on return err: the job is kept, and offered again later.
func (e *Enqueuer) Fail(err error) { e.behave(err, false) }

// Refuse makes every call from now on return err as a permanent one: the job goes to the dead letters.
func (e *Enqueuer) Refuse(err error) { e.behave(recovery.Permanent(err), false) }

// Hang makes every call from now on last until its context ends.
func (e *Enqueuer) Hang() { e.behave(nil, true) }

// Accept ends Fail, Refuse and Hang.
func (e *Enqueuer) Accept() { e.behave(nil, false) }

func (e *Enqueuer) behave(err error, hang bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.err, e.hang = err, hang
}

// Orphans are those that were accepted, in their order.
func (e *Enqueuer) Orphans() []recovery.Orphan {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Clone(e.accepted)
}

// Calls is how often Enqueue was called.
func (e *Enqueuer) Calls() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.calls
}
