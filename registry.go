package recovery

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

// The registry is the set of incarnations that may hold jobs: a sweep looks at these and at nothing else. Its invariant: an
// incarnation that is not in it holds no job. So it is entered before its session opens, every beat enters it again, and it is
// taken out only when its session is fenced and its records are empty.

// sessionInfo is what people see of a worker. It is written once, by join.
type sessionInfo struct {
	Name     string `json:"name"`
	Host     string `json:"host"`
	PID      int    `json:"pid"`
	Started  int64  `json:"started"`  // ms, of the process' Start, on its own clock
	Capacity int    `json:"capacity"` // Config.MaxInflight; 0: no limit
	BeatTTL  int64  `json:"beat_ttl"` // ms
}

// newWorkerID is name-random: 80 random bits, so that no id is ever used twice.
func newWorkerID(name string) string { return name + "-" + strings.ToLower(rand.Text()[:16]) }

// errFencedEarly means that a sweep fell between the two steps of join.
var errFencedEarly = errors.New("a peer fenced the session before it opened")

// join opens a new incarnation.
func (r *Recoverer) join(ctx context.Context) (inc *incarnation, err error) {
	for range 5 {
		if inc, err = r.joinOnce(ctx); !errors.Is(err, errFencedEarly) {
			break
		}
	}
	return inc, err
}

// joinOnce tries with one id. On an error nothing usable is left: an entry without a session is fenced and retired by the next sweep.
func (r *Recoverer) joinOnce(ctx context.Context) (*incarnation, error) {
	id := newWorkerID(r.cfg.WorkerName)
	inc := newIncarnation(r, id)
	info, err := json.Marshal(r.info)
	if err != nil {
		return nil, fmt.Errorf("join as %q: %w", id, err)
	}
	// Registry first: were the session first, a death in between would leave a worker that may hold jobs and that nobody looks at.
	if err := r.rdb.SAdd(ctx, r.keys.workers(), id).Err(); err != nil {
		r.undoJoin(ctx, inc)
		return nil, fmt.Errorf("register worker %q: %w", id, err)
	}
	joined, err := joinScript.Run(ctx, r.rdb, []string{inc.keys.session, inc.keys.beat}, string(info), ms(r.tm.beatTTL), ms(r.tm.retention)).Int()
	switch {
	case err != nil:
		err = fmt.Errorf("join as %q: %w", id, err)
	case joined != 1:
		err = fmt.Errorf("join as %q: %w", id, errFencedEarly)
	case ctx.Err() != nil: // too late: whoever asked for it has given up
		err = fmt.Errorf("join as %q: %w", id, ctx.Err())
	default:
		return inc, nil
	}
	r.undoJoin(ctx, inc)
	return nil, err
}

// undoJoin takes back a join of unknown outcome, as far as Redis can be reached. The fence comes first, as ever.
func (r *Recoverer) undoJoin(ctx context.Context, inc *incarnation) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), min(r.tm.call, time.Second))
	defer cancel()
	if r.fenceOwn(ctx, inc) == nil {
		r.deregister(ctx, inc.id)
	}
}

// fenceOwn fences a session of this worker.
func (r *Recoverer) fenceOwn(ctx context.Context, inc *incarnation) error {
	keys := []string{inc.keys.session, inc.keys.beat, inc.keys.suspect}
	if err := leaveScript.Run(ctx, r.rdb, keys, ms(r.tm.tombstone)).Err(); err != nil {
		return fmt.Errorf("fence worker %q: %w", inc.id, err)
	}
	return nil
}

// deregister is for incarnations that are fenced and empty. It may be repeated; if it fails, the next sweep does it.
func (r *Recoverer) deregister(ctx context.Context, id string) error {
	ctx, cancel := r.limit(ctx)
	defer cancel()
	if err := r.rdb.SRem(ctx, r.keys.workers(), id).Err(); err != nil {
		return fmt.Errorf("deregister worker %q: %w", id, err)
	}
	return nil
}

// healRegistry puts a registry of the wrong type out of the way: while it is there, nobody is recovered. Every worker enters itself again
// with its next beat.
func (r *Recoverer) healRegistry(ctx context.Context, inc *incarnation, err error) {
	if !isWrongType(err) {
		return
	}
	key := r.keys.workers()
	err = r.rdb.Rename(ctx, key, r.keys.aside()).Err()
	if redis.HasErrorPrefix(err, "CROSSSLOT") {
		err = r.rdb.Del(ctx, key).Err() // on a cluster there is no way to keep it
	}
	if err == nil {
		err = r.rdb.SAdd(ctx, key, inc.id).Err()
	}
	r.log.Error("recovery: the registry had the wrong type and was put aside", "worker", inc.id, "key", key, "err", err)
}

// limit bounds one call to Redis, for clients that heed their ctx; the others have their own timeouts.
func (r *Recoverer) limit(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, r.tm.call)
}

// scan calls f with one page of the registry after the other.
func (r *Recoverer) scan(ctx context.Context, f func(ids []string)) error {
	for cursor := uint64(0); ; {
		limited, cancel := r.limit(ctx)
		ids, next, err := r.rdb.SScan(limited, r.keys.workers(), cursor, "", scanPage).Result()
		cancel()
		if err != nil {
			return fmt.Errorf("scan registry: %w", err)
		}
		if len(ids) > 0 {
			f(ids)
		}
		if cursor = next; cursor == 0 {
			return nil
		}
	}
}

const scanPage = 1000

// vital is what a look at a worker shows. It is a hint; the claim script decides.
type vital struct {
	id    string
	alive bool
	left  time.Duration // of the beat
	err   error
}

// look reads the vitals of many workers in one pipeline. A beat with a TTL is enough: what fences a session removes its beat, and none is set
// for a session that does not live.
func (r *Recoverer) look(ctx context.Context, ids []string) []vital {
	ctx, cancel := r.limit(ctx)
	defer cancel()
	beats := make([]*redis.DurationCmd, len(ids))
	_, _ = r.rdb.Pipelined(ctx, func(p redis.Pipeliner) error {
		for i, id := range ids {
			beats[i] = p.PTTL(ctx, r.keys.beat(id))
		}
		return nil
	}) // each command has its own error: a node that is away must not hide the workers of the others
	vitals := make([]vital, len(ids))
	for i, id := range ids {
		left, err := beats[i].Result()
		if err != nil {
			err = fmt.Errorf("look at worker %q: %w", id, err)
		}
		vitals[i] = vital{id: id, alive: left >= 0, left: left, err: err}
	}
	return vitals
}

func newSessionInfo(cfg *Config, started time.Time) sessionInfo {
	host, _ := os.Hostname()
	return sessionInfo{
		Name: cfg.WorkerName, Host: host, PID: os.Getpid(), Started: started.UnixMilli(),
		Capacity: cfg.MaxInflight, BeatTTL: ms(cfg.timing().beatTTL),
	}
}
