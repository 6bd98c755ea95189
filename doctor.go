package recovery

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/redis/go-redis/v9"
)

// DoctorReport is what Doctor found.
type DoctorReport struct {
	Workers int      // incarnations of which there is any key
	Hidden  []string // held jobs, or could, and were not in the registry: now they are, and the next sweep looks after them
	Damaged []string // keys of the wrong type that a sweep has put aside
}

// Doctor looks for workers that nobody would look at: the registry lost their entry, and they are not alive to enter themselves again.
// Only a failover, or a person, can do that. It walks over all keys of the namespace, by SCAN, on every master: not for a cron job on
// a busy Redis, but for the day after. It repairs what it finds, and may run while the fleet does.
func (i *Inspector) Doctor(ctx context.Context) (DoctorReport, error) {
	if err := i.problem(); err != nil {
		return DoctorReport{}, err
	}
	found, err := i.walk(ctx)
	report := DoctorReport{Workers: len(found.workers), Damaged: found.damaged}
	if err != nil {
		return report, fmt.Errorf("recovery: doctor: %w", err)
	}
	var errs []error
	for _, id := range found.workers {
		hidden, err := i.repair(ctx, id)
		if err != nil {
			errs = append(errs, fmt.Errorf("recovery: doctor: worker %q: %w", id, err))
		}
		if hidden {
			report.Hidden = append(report.Hidden, id)
		}
	}
	return report, errors.Join(errs...)
}

// repair enters a worker that has something left, or is live, into the registry. It reports whether that was needed.
func (i *Inspector) repair(ctx context.Context, id string) (bool, error) {
	k := i.keys.worker(id)
	state, err := i.rdb.HGet(ctx, k.session, "state").Result()
	if err != nil && !errors.Is(err, redis.Nil) && !isWrongType(err) {
		return false, err
	}
	left, err := i.rdb.Exists(ctx, k.inflight, k.jobs, k.claims).Result()
	if err != nil || left == 0 && state != "live" {
		return false, err // a fenced session alone only waits for its end
	}
	added, err := i.rdb.SAdd(ctx, i.keys.workers(), id).Result()
	return added == 1, err
}

// finds is what a walk over the keys collects.
type finds struct {
	mu      sync.Mutex
	workers []string
	damaged []string
}

// walk finds every incarnation of which there is a key.
func (i *Inspector) walk(ctx context.Context) (*finds, error) {
	f := &finds{}
	node := func(ctx context.Context, c redis.Cmdable) error {
		iter := c.Scan(ctx, 0, globEscape(i.keys.prefix)+"*", scanPage).Iterator()
		for iter.Next(ctx) {
			f.note(i.keys, iter.Val())
		}
		return iter.Err()
	}
	var err error
	if cluster, ok := i.rdb.(*redis.ClusterClient); ok {
		err = cluster.ForEachMaster(ctx, func(ctx context.Context, c *redis.Client) error { return node(ctx, c) })
	} else {
		err = node(ctx, i.rdb)
	}
	slices.Sort(f.workers)
	f.workers = slices.Compact(f.workers)
	slices.Sort(f.damaged)
	return f, err
}

func (f *finds) note(k keyspace, key string) {
	id, name, ok := k.parseWorker(key)
	if !ok {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	switch name {
	case "session", "inflight", "jobs", "claims":
		f.workers = append(f.workers, id)
	case "damaged":
		f.damaged = append(f.damaged, key)
	}
}

// globEscape makes a pattern that matches s alone.
func globEscape(s string) string {
	return strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`, `]`, `\]`).Replace(s)
}
