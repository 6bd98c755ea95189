package recovery

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/redis/go-redis/v9"
)

// Dead letters: jobs that can't or must not be handed back. They wait for a person, with everything that is known of them. A letter is
// written before its lease is forgotten, and its name is the lease's: dying in between writes it again, to the same place.

// letter is a dead letter as it is kept; the record and the checkpoint lie beside it, untouched.
type letter struct {
	Job       string  `json:"job,omitempty"`
	Queue     string  `json:"queue,omitempty"`
	Worker    string  `json:"worker"`
	Grave     string  `json:"grave"`
	Reason    string  `json:"reason"`
	Recovery  int     `json:"recovery"`
	TrackedUS int64   `json:"tracked_us,omitempty"`
	Err       string  `json:"err,omitempty"`
	Crashes   []crash `json:"crashes,omitempty"`
}

// crash is one entry of a job's history.
type crash struct {
	Lease string `json:"lease"`
	MS    int64  `json:"ms"`
}

// bury writes a dead letter. If that fails the claim is left to run out, and the next sweeper tries again.
func (r *Recoverer) bury(ctx context.Context, o *orphan) error {
	text := letter{Job: o.ID, Queue: o.Queue, Worker: o.Worker, Grave: o.grave, Reason: o.Reason.String(), Recovery: o.Recovery,
		TrackedUS: o.lease.start, Err: o.lease.lastErr, Crashes: r.history(ctx, o)}
	if o.err != nil {
		text.Err = o.err.Error()
	}
	body, err := json.Marshal(text)
	var cmd *redis.Cmd
	if err == nil {
		cmd, err = r.runReplicated(ctx, buryScript, []string{r.keys.deadIndex(), r.keys.deadJobs()}, o.Key, body,
			flagOf(o.lease.record), o.lease.record, flagOf(o.lease.checkpoint), o.lease.checkpoint, r.cfg.MaxDead)
	}
	if err != nil {
		o.fate = fateNothing
		return fmt.Errorf("bury job %q: %w", o.ID, err)
	}
	r.tellDropped(ctx, cmd)
	return nil
}

// tellDropped announces letters that had to make room. Their payloads outside of Redis go with them.
func (r *Recoverer) tellDropped(ctx context.Context, cmd *redis.Cmd) {
	a := readReplies(cmd)
	for a.int(); a.more(); {
		info := DroppedInfo{Key: a.string()}
		var l letter
		_ = json.Unmarshal(a.bytes(), &l)
		info.Job, info.Queue, info.Reason = l.Job, l.Queue, l.Grave
		r.counts.dropped.Add(1)
		r.log.Error("recovery: dead letter dropped, there are more than Config.MaxDead", "worker", l.Worker, "job", l.Job, "lease", info.Key, "queue", l.Queue)
		emit(r.log, r.cfg.Events.Dropped, info)
		r.deletePayload(ctx, info.Key)
	}
}

func flagOf(b []byte) int {
	if b == nil {
		return 0
	}
	return 1
}

// workerOf is the part of a lease's ID that names its worker.
func workerOf(lease string) string {
	worker, _, _ := strings.Cut(lease, "/")
	return worker
}
