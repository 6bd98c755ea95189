package recovery

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/redis/go-redis/v9"
)

// Inspector looks at a fleet from outside of its workers. It is safe for concurrent use.
type Inspector struct {
	rdb       redis.UniversalClient
	namespace string
	keys      keyspace
	codec     Codec
	store     PayloadStore
}

// InspectorOption tells an Inspector what the workers' Config says.
type InspectorOption func(*Inspector)

// InspectHashTag is for a fleet with Config.HashTag.
func InspectHashTag(tag string) InspectorOption { return func(i *Inspector) { i.keys.tag = tag } }

// InspectCodec is for a fleet with Config.Codec; without it sealed records show ID and queue only.
func InspectCodec(c Codec) InspectorOption { return func(i *Inspector) { i.codec = c } }

// NewInspector returns an Inspector of the fleet with that namespace. It never closes rdb.
func NewInspector(rdb redis.UniversalClient, namespace string, opts ...InspectorOption) *Inspector {
	namespace = cmp.Or(namespace, "default")
	i := &Inspector{rdb: rdb, namespace: namespace, keys: newKeyspace(namespace, "")}
	for _, o := range opts {
		o(i)
	}
	return i
}

// problem is what New would have said: a fleet with such settings can't exist, and looking for it would find that all is well.
func (i *Inspector) problem() error {
	var p problems
	if err := validateClient(i.rdb); err != nil {
		p = append(p, err)
	}
	p.name("namespace", i.namespace, true)
	p.name("InspectHashTag", i.keys.tag, false)
	if len(p) > 0 {
		return fmt.Errorf("%w: %w", ErrInvalidConfig, errors.Join(p...))
	}
	return nil
}

// WorkerState is what an Inspector sees of a worker.
type WorkerState string

const (
	WorkerRunning  WorkerState = "running"
	WorkerDraining WorkerState = "draining"
	WorkerSilent   WorkerState = "silent"  // its beat is missing; no sweep has noticed yet
	WorkerSuspect  WorkerState = "suspect" // its beat is missing; it will be declared dead if that goes on
	WorkerFenced   WorkerState = "fenced"  // declared dead, or stopped; what it has left is being handed back
	WorkerAbsent   WorkerState = "absent"  // registered, but without a session: the next sweep retires it
)

// WorkerInfo is one incarnation in the registry.
type WorkerInfo struct {
	ID       string
	Name     string
	State    WorkerState
	Host     string
	PID      int
	Started  time.Time // of the process' Start, on its own clock
	LastBeat time.Time // this machine's clock, from the beat's age; zero if the beat is missing
	Inflight int       // leases that it holds
	Claimed  int       // leases on their way to the Enqueuer
	Capacity int       // Config.MaxInflight; 0: no limit
}

// Workers returns every registered worker, by ID. It costs six small reads a worker. Workers that can't be read are left out, and the
// error says why; those that can are returned all the same.
func (i *Inspector) Workers(ctx context.Context) ([]WorkerInfo, error) {
	if err := i.problem(); err != nil {
		return nil, err
	}
	ids, err := i.rdb.SMembers(ctx, i.keys.workers()).Result()
	if err != nil {
		return nil, fmt.Errorf("recovery: read registry: %w", err)
	}
	slices.Sort(ids)
	var infos []WorkerInfo
	var errs []error
	for page := range slices.Chunk(ids, scanPage) {
		reads := make([]*workerRead, len(page))
		now := time.Now()
		_, _ = i.rdb.Pipelined(ctx, func(p redis.Pipeliner) error {
			for n, id := range page {
				reads[n] = i.readWorker(ctx, p, id)
			}
			return nil
		}) // each command has its own error
		for _, r := range reads {
			info, err := r.info(now)
			if err != nil {
				errs = append(errs, fmt.Errorf("recovery: read worker %q: %w", r.id, err))
				continue
			}
			infos = append(infos, info)
		}
	}
	return infos, errors.Join(errs...)
}

// workerRead is the commands that read one worker.
type workerRead struct {
	id               string
	session          *redis.SliceCmd
	beat             *redis.StringCmd
	left             *redis.DurationCmd
	suspect          *redis.IntCmd
	inflight, claims *redis.IntCmd
}

func (i *Inspector) readWorker(ctx context.Context, p redis.Pipeliner, id string) *workerRead {
	k := i.keys.worker(id)
	return &workerRead{
		id:       id,
		session:  p.HMGet(ctx, k.session, "state", "info"),
		beat:     p.Get(ctx, k.beat),
		left:     p.PTTL(ctx, k.beat),
		suspect:  p.Exists(ctx, k.suspect),
		inflight: p.ZCard(ctx, k.inflight),
		claims:   p.ZCard(ctx, k.claims),
	}
}

func (r *workerRead) info(now time.Time) (WorkerInfo, error) {
	var ttl time.Duration
	w := WorkerInfo{ID: r.id, Inflight: int(r.inflight.Val()), Claimed: int(r.claims.Val())}
	beat, err := r.beat.Result()
	if errors.Is(err, redis.Nil) {
		err = nil
	}
	if err = errors.Join(err, r.session.Err(), r.left.Err(), r.suspect.Err(), r.inflight.Err(), r.claims.Err()); err != nil {
		return w, err
	}
	state, _ := r.session.Val()[0].(string)
	if text, ok := r.session.Val()[1].(string); ok {
		var s sessionInfo
		if err := json.Unmarshal([]byte(text), &s); err != nil {
			return w, fmt.Errorf("session info: %w", err)
		}
		w.Name, w.Host, w.PID, w.Capacity, w.Started = s.Name, s.Host, s.PID, s.Capacity, time.UnixMilli(s.Started)
		ttl = time.Duration(s.BeatTTL) * time.Millisecond
	}
	if left := r.left.Val(); left >= 0 {
		w.LastBeat = now.Add(left - ttl)
	}
	w.State = workerState(state, beat, r.suspect.Val() > 0)
	return w, nil
}

func workerState(session, phase string, suspect bool) WorkerState {
	switch {
	case session == "":
		return WorkerAbsent
	case session != "live":
		return WorkerFenced
	case phase != "":
		return WorkerState(phase)
	case suspect:
		return WorkerSuspect
	}
	return WorkerSilent
}

// InflightInfo is one lease of a worker.
type InflightInfo struct {
	Lease   string
	Job     Job // without its payload
	Size    int // of the payload, in bytes
	Started time.Time
	Err     error // why the record can't be read, or nil
}

// Inflight returns the leases that a worker holds, oldest first. It reads their records, payloads too, page by page.
func (i *Inspector) Inflight(ctx context.Context, worker string) ([]InflightInfo, error) {
	if err := i.problem(); err != nil {
		return nil, err
	}
	k := i.keys.worker(worker)
	leases, err := i.rdb.ZRangeWithScores(ctx, k.inflight, 0, -1).Result()
	if err != nil {
		return nil, fmt.Errorf("recovery: read leases of worker %q: %w", worker, err)
	}
	infos := make([]InflightInfo, 0, len(leases))
	for page := range slices.Chunk(leases, claimLeases) {
		fields := make([]string, len(page))
		for n, z := range page {
			fields[n], _ = z.Member.(string)
		}
		records, err := i.rdb.HMGet(ctx, k.jobs, fields...).Result()
		if err != nil {
			return infos, fmt.Errorf("recovery: read records of worker %q: %w", worker, err)
		}
		for n, z := range page {
			infos = append(infos, i.describe(leaseID(worker, fields[n]), z.Score, records[n]))
		}
	}
	return infos, nil
}

func (i *Inspector) describe(lease string, start float64, record any) InflightInfo {
	info := InflightInfo{Lease: lease, Started: time.UnixMicro(int64(start))}
	raw, ok := record.(string)
	if !ok {
		info.Err = errors.New("there is no record")
		return info
	}
	info.Job, info.Err = decodeRecord([]byte(raw), lease, i.codec)
	info.Size, info.Job.Payload = len(info.Job.Payload), nil
	return info
}

// ClaimInfo is a lease on its way to the Enqueuer.
type ClaimInfo struct {
	InflightInfo
	Reason    Reason
	Due       time.Time // Redis' clock; when whoever comes by offers it again
	Attempts  int       // hand-backs that failed
	LastError string    // of the Enqueuer
}

// Claimed returns the leases of a worker that are on their way to the Enqueuer, the next one first.
func (i *Inspector) Claimed(ctx context.Context, worker string) ([]ClaimInfo, error) {
	if err := i.problem(); err != nil {
		return nil, err
	}
	k := i.keys.worker(worker)
	claims, err := i.rdb.ZRangeWithScores(ctx, k.claims, 0, -1).Result()
	if err != nil {
		return nil, fmt.Errorf("recovery: read claims of worker %q: %w", worker, err)
	}
	infos := make([]ClaimInfo, 0, len(claims))
	for page := range slices.Chunk(claims, claimLeases) {
		fields := make([]string, 0, 2*len(page))
		for _, z := range page {
			member, _ := z.Member.(string)
			fields = append(fields, member, member+".claim")
		}
		values, err := i.rdb.HMGet(ctx, k.jobs, fields...).Result()
		if err != nil {
			return infos, fmt.Errorf("recovery: read records of worker %q: %w", worker, err)
		}
		for n, z := range page {
			var l claimedLease
			note, _ := values[2*n+1].(string)
			l.parse(note)
			infos = append(infos, ClaimInfo{InflightInfo: i.describe(leaseID(worker, fields[2*n]), float64(l.start), values[2*n]),
				Reason: l.reason, Due: time.UnixMilli(int64(z.Score)), Attempts: l.attempts, LastError: l.lastErr})
		}
	}
	return infos, nil
}
