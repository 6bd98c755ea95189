package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/crashsafe/recovery"
	"github.com/redis/go-redis/v9"
)

// message is a saga in the queue, which is a list in Redis.
type message struct {
	Order    Order
	Round    int             // from 1; a person who sends it back begins the next one
	Recovery int             // crashes so far, in this round
	State    json.RawMessage `json:",omitempty"` // the last checkpoint
}

// format is how messages lie in the list. The library gives a fetched job back as it found it, unless there is a checkpoint: then it calls
// Encode, and what Encode does not write is lost. As every run begins with a checkpoint, it always does.
type format struct{}

// Decode reads a message. The payload is all of it, so that a dead letter shows all of it.
func (format) Decode(element []byte) (recovery.Job, error) {
	var m message
	if err := json.Unmarshal(element, &m); err != nil {
		return recovery.Job{}, err
	}
	if m.Order.ID == "" || m.Round < 1 {
		return recovery.Job{}, fmt.Errorf("order ID is %q, must not be empty; Round is %d, at least 1", m.Order.ID, m.Round)
	}
	return recovery.Job{ID: m.jobID(), Payload: element, Checkpoint: m.State}, nil
}

// Encode writes the message as the next run needs it. A saga that is stuck does not go back to the queue: Permanent makes it a dead letter.
func (format) Encode(o recovery.Orphan) ([]byte, error) {
	m, s, err := read(o.Job)
	if err != nil {
		return nil, recovery.Permanent(err)
	}
	if s.Phase == stuck {
		return nil, recovery.Permanent(errors.New(s.Stuck))
	}
	m.Recovery = o.Recovery
	return json.Marshal(m)
}

// jobID is a name for each round: the library counts crashes by it, and a new round has all its recoveries.
func (m message) jobID() string { return fmt.Sprintf("%s/%d", m.Order.ID, m.Round) }

// read returns what a job says, with its last checkpoint in the place of the one that it came with.
func read(job recovery.Job) (m message, s State, err error) {
	if err = json.Unmarshal(job.Payload, &m); err != nil {
		return m, s, fmt.Errorf("payload of job %q: %w", job.ID, err)
	}
	if job.Checkpoint != nil {
		m.State = job.Checkpoint
	}
	if m.State == nil {
		return m, State{Phase: forward}, nil
	}
	if err = json.Unmarshal(m.State, &s); err != nil {
		return m, s, fmt.Errorf("checkpoint of job %q: %w", job.ID, err)
	}
	return m, s, nil
}

// submit puts a new saga into the queue.
func submit(ctx context.Context, rdb redis.Cmdable, list string, o Order) error {
	text, err := json.Marshal(message{Order: o, Round: 1})
	if err != nil {
		return err
	}
	return rdb.LPush(ctx, list, text).Err()
}

// requeuer sends a dead letter back to the queue, for Inspector.Requeue.
//
// It is not the ListQueue itself, because that would push the element as it was fetched, and the run would begin at an old checkpoint.
type requeuer struct {
	rdb          redis.UniversalClient
	list, prefix string
}

// pushOnce pushes unless this letter was pushed before: Requeue repeats the call if it was interrupted, and a saga must not be in the
// queue twice.
var pushOnce = redis.NewScript(`
if redis.call("SET", KEYS[1], "1", "NX", "EX", ARGV[2]) then
  redis.call("LPUSH", KEYS[2], ARGV[1])
end
return 1`)

const rememberRequeue = 7 * 24 * 3600 // s

func (q requeuer) Enqueue(ctx context.Context, o recovery.Orphan) error {
	m, s, err := read(o.Job)
	if err != nil {
		return err
	}
	if s.Phase == stuck {
		s.Phase, s.Stuck = undoing, ""
	}
	m.Round, m.Recovery = m.Round+1, 0
	if m.State, err = json.Marshal(s); err != nil {
		return err
	}
	text, err := json.Marshal(m)
	if err != nil {
		return err
	}
	return pushOnce.Run(ctx, q.rdb, []string{q.prefix + "requeued:" + o.Key, q.list}, text, rememberRequeue).Err()
}
