package main

import (
	"context"
	"errors"
	"fmt"
	"time"
	"unicode/utf8"

	"github.com/crashsafe/recovery"
	"github.com/hibiken/asynq"
)

const (
	taskType = "webhook"

	// keep is how long Redis keeps what nobody cares for, on both sides: recovery's records (Config.InflightTTL), and asynq's
	// finished tasks (Retention). A hand-back is repeated as long as its record is there, and refused as long as its task is.
	keep = 7 * 24 * time.Hour
)

// enqueuer hands jobs to asynq, as tasks of the queue that the job names.
//
// A repeated call has the same Key, and a task with that ID is refused by asynq: it is there already. But asynq forgets a task as soon
// as it is done, and with it the ID; the repetition would be accepted and the task run again. Retention keeps it, and its ID.
type enqueuer struct {
	client    *asynq.Client
	retention time.Duration // whole seconds: asynq cuts off the rest
}

// Enqueue implements recovery.Enqueuer.
func (e enqueuer) Enqueue(ctx context.Context, o recovery.Orphan) error {
	for name, value := range o.Headers {
		if !utf8.ValidString(name) || !utf8.ValidString(value) {
			return recovery.Permanent(fmt.Errorf("header %q: %q: asynq takes UTF-8 only", name, value))
		}
	}
	task := asynq.NewTaskWithHeaders(taskType, o.Payload, o.Headers)
	_, err := e.client.EnqueueContext(ctx, task, asynq.Queue(o.Queue), asynq.TaskID(o.Key), asynq.Retention(e.retention))
	if errors.Is(err, asynq.ErrTaskIDConflict) {
		return nil // an earlier call got through. Nobody else uses these IDs
	}
	return err
}
