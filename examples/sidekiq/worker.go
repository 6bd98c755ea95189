package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/crashsafe/recovery"
)

// performer is what perform is in a Ruby job. It should end early when ctx does: then the job is somebody else's.
type performer func(ctx context.Context, args []json.RawMessage) error

// worker runs jobs.
type worker struct {
	sets    sets
	classes map[string]performer
}

// run is the handler. A job ends here in one of: performed; in the sorted set retry, or dead; back in its queue.
func (w worker) run(ctx context.Context, l *recovery.Lease) error {
	j, err := parseJob(l.Payload())
	if err != nil {
		return err // recovery.Sidekiq lets nothing through that is not a job
	}
	failure := w.perform(ctx, j)
	if failure == nil || ctx.Err() != nil { // the latter: it was lost, and runs elsewhere
		return failure
	}
	// Not if it is somebody else's by now, who may succeed.
	err = l.Confirm(ctx)
	if err == nil {
		err = w.sets.put(ctx, judge(j, l.Job().Queue, failure, time.Now(), rand.IntN))
	}
	if err != nil {
		pause(ctx)                                    // it would be back here at once
		return errors.Join(failure, err, l.Release()) // it is in no set: back to the queue, or it would be gone
	}
	return failure // Work logs it, and the job is done
}

// pause waits for a second, or until ctx ends.
func pause(ctx context.Context) {
	select {
	case <-time.After(time.Second):
	case <-ctx.Done():
	}
}

// perform calls the performer. A panic is a failure like others: Sidekiq makes no difference between exceptions, either.
func (w worker) perform(ctx context.Context, j job) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = panicked{p}
		}
	}()
	class := j.text("class")
	f, ok := w.classes[class]
	if !ok {
		return unknownClass(class)
	}
	var args []json.RawMessage
	if err := json.Unmarshal(j["args"], &args); err != nil {
		return fmt.Errorf("args of %s: %w", class, err)
	}
	return f(ctx, args)
}

// The names of these types are what Sidekiq's pages show as the class of the error.
type (
	unknownClass string
	panicked     struct{ value any }
)

func (c unknownClass) Error() string {
	return fmt.Sprintf("this worker has nothing for class %q", string(c))
}
func (p panicked) Error() string { return fmt.Sprint("panic: ", p.value) }
