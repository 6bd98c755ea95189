package recovery

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync"

	"github.com/redis/go-redis/v9"
)

// countCrashes enters each crash in the history of its job and learns how many there are in the window. Released is no crash. Nearly always
// it is the first one of its job, and a single command.
func (r *Recoverer) countCrashes(ctx context.Context, now int64, orphans []*orphan) {
	ctx, cancel := r.limit(ctx)
	defer cancel()
	first := make([]redis.Cmder, len(orphans)) // whether there is no history yet
	_, _ = r.rdb.Pipelined(ctx, func(p redis.Pipeliner) error {
		for i, o := range orphans {
			switch key := r.keys.crashes(o.ID); {
			case o.grave != "" || o.fate == fateLater: // can't be read
			case o.Reason == Released:
				first[i] = p.Exists(ctx, key)
			default:
				first[i] = p.SetNX(ctx, key, crash{Lease: o.crash(), MS: now}.line(), r.cfg.RecoveryWindow)
			}
		}
		return nil
	}) // each command has its own error
	counts := make([]*redis.Cmd, len(orphans))
	_, _ = r.rdb.Pipelined(ctx, func(p redis.Pipeliner) error {
		for i, o := range orphans {
			if hasHistory(first[i]) {
				counts[i] = r.recount(ctx, p, o, now)
			}
		}
		return nil
	})
	for i, o := range orphans {
		if first[i] == nil {
			continue
		}
		n, err := int64(0), first[i].Err()
		if counts[i] != nil {
			n, err = counts[i].Int64()
		}
		if isOOM(err) { // handing back makes room: it must not fail for a few bytes
			n, err = r.recount(ctx, r.rdb, o, now).Int64()
		}
		if err != nil && !isWrongType(err) {
			// Not counted, not handed back: the next attempt counts it.
			o.fail(fmt.Errorf("count recoveries: %w", err), r.cfg.SweepInterval)
			continue
		}
		o.Recovery = max(1, int(n))
	}
}

// hasHistory reads the answer to SET NX, or EXISTS.
func hasHistory(answer redis.Cmder) bool {
	switch a := answer.(type) {
	case *redis.BoolCmd:
		return a.Err() == nil && !a.Val()
	case *redis.IntCmd:
		return a.Val() > 0
	}
	return false
}

// recount counts by the script. It is sent as text: a pipeline can't be told that a node does not know it.
func (r *Recoverer) recount(ctx context.Context, rdb redis.Scripter, o *orphan, now int64) *redis.Cmd {
	lease := ""
	if o.Reason != Released {
		lease = o.crash()
	}
	return countScript.Eval(ctx, rdb, []string{r.keys.crashes(o.ID)}, lease, now, ms(r.cfg.RecoveryWindow), max(maxHistory, r.limitOf(o)+1))
}

// maxHistory is how many crashes of one job are kept, if its limit is not larger.
const maxHistory = 1000

// line is how a crash is written down; see count.lua.
func (c crash) line() string { return strconv.FormatInt(c.MS, 10) + " " + c.Lease }

// history reads the crashes of a job. It is for people: if it can't be read, the letter goes without.
func (r *Recoverer) history(ctx context.Context, o *orphan) (crashes []crash) {
	if o.ID == "" {
		return nil
	}
	text, _ := r.rdb.Get(ctx, r.keys.crashes(o.ID)).Result()
	for line := range strings.Lines(text) {
		at, lease, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
		if ms, err := strconv.ParseInt(at, 10, 64); err == nil {
			crashes = append(crashes, crash{Lease: lease, MS: ms})
		}
	}
	return crashes[max(0, len(crashes)-100):]
}

// crash is the name under which an orphan's crash is counted: its lease. Jobs without a name of their own share their count with all of the
// same contents, and many of those may be in flight when one worker dies: that is one crash.
func (o *orphan) crash() string {
	if o.nameless && o.Reason == Crashed {
		return o.Worker
	}
	return o.Key
}

// acceptedKeys are orphans that the Enqueuer took, but whose records could not be dropped. When their claims run out, this worker, at
// least, does not offer them again.
type acceptedKeys struct {
	mu   sync.Mutex
	keys map[string]bool
}

const maxAccepted = 100_000 // beyond it duplicates are the lesser evil

func (a *acceptedKeys) has(key string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.keys[key]
}

// note remembers the orphans whose records stay, or forgets them.
func (a *acceptedKeys) note(orphans []*orphan, stay bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, o := range orphans {
		if !stay {
			delete(a.keys, o.Key)
		} else if o.fate == fateForget && len(a.keys) < maxAccepted {
			if a.keys == nil {
				a.keys = make(map[string]bool)
			}
			a.keys[o.Key] = true
		}
	}
}
