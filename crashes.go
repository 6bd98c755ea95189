package recovery

import (
	"context"
	"fmt"
	"strconv"
	"sync"

	"github.com/redis/go-redis/v9"
)

// countCrashes enters each crash in the history of its job and learns how many there are in the window. Released is no crash.
func (r *Recoverer) countCrashes(ctx context.Context, now int64, orphans []*orphan) {
	ctx, cancel := r.limit(ctx)
	defer cancel()
	sizes, adds := make([]*redis.IntCmd, len(orphans)), make([]*redis.IntCmd, len(orphans))
	since := "(" + strconv.FormatInt(now-ms(r.cfg.RecoveryWindow), 10)
	_, _ = r.rdb.Pipelined(ctx, func(p redis.Pipeliner) error {
		for i, o := range orphans {
			if o.grave != "" {
				continue
			}
			key := r.keys.crashes(o.ID)
			if o.Reason != Released {
				adds[i] = p.ZAddNX(ctx, key, redis.Z{Score: float64(now), Member: o.crash()})
				p.PExpire(ctx, key, r.cfg.RecoveryWindow)
			}
			sizes[i] = p.ZCount(ctx, key, since, "+inf")
		}
		return nil
	}) // each command has its own error
	for i, o := range orphans {
		if sizes[i] == nil {
			continue
		}
		n, err := sizes[i].Result()
		if adds[i] != nil && adds[i].Err() != nil {
			err = adds[i].Err()
		}
		if isOOM(err) { // handing back makes room: it must not fail for a few bytes
			n, err = countScript.Run(ctx, r.rdb, []string{r.keys.crashes(o.ID)}, o.crash(), now, ms(r.cfg.RecoveryWindow)).Int64()
		}
		if err != nil && !isWrongType(err) {
			// Not counted, not handed back: the next attempt counts it.
			o.fail(fmt.Errorf("count recoveries: %w", err), r.cfg.SweepInterval)
			continue
		}
		o.Recovery = max(1, int(n))
	}
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
