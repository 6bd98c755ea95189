package recovery

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"os"
	"strings"
	"time"
	"unicode"
)

// Special values of Config and Job fields.
const (
	NoTimeout = time.Duration(-1) // Job.Timeout: this job may run for ever, whatever Config.JobTimeout says
	NoExpiry  = time.Duration(-1) // Config.InflightTTL: records never expire
	NoLimit   = -1                // Config.MaxRecoveries and Job.MaxRecoveries: recover without end
)

const (
	minInterval = 10 * time.Millisecond // below it a round trip to Redis is no longer small
	maxInterval = 10 * 365 * 24 * time.Hour
	maxName     = 200
	maxJobID    = 1 << 10
	maxHeaders  = 64 << 10
)

// Config is the setting of a Recoverer. Zero fields take their default; New refuses what can't work and names
// every problem at once.
type Config struct {
	// Namespace separates fleets that share a Redis: workers see, and recover, only what has their namespace.
	// No spaces, braces or control characters. Default: "default".
	Namespace string

	// WorkerName is what people see of this process. It need not be unique: an incarnation's id is this name
	// plus random text. Default: hostname:pid.
	WorkerName string

	// HeartbeatInterval is how often the worker says that it lives. A beat costs Redis five small commands, whatever
	// the number of jobs. Too low costs commands; too high forces a high OrphanThreshold. Default: 5s.
	HeartbeatInterval time.Duration

	// OrphanThreshold is how long a worker must be silent before its jobs are taken. Too low takes jobs from workers
	// that were only slow (they are told, and the jobs run twice); too high recovers late. At least
	// 3 x HeartbeatInterval, so that two lost beats do no harm. Default: 20s, or 4 x HeartbeatInterval
	// where only that was set.
	OrphanThreshold time.Duration

	// SweepInterval is how often the fleet, as a whole, looks for dead workers.
	// From last beat to Enqueue: at most OrphanThreshold + SweepInterval. Default: HeartbeatInterval.
	SweepInterval time.Duration

	// GCLockTTL is how long the sweep lock stays after a pass began; it is renewed while a pass goes on. It paces the
	// fleet, so longer than SweepInterval means fewer passes. Correctness never rests on it. Default: SweepInterval.
	GCLockTTL time.Duration

	// JobTimeout is how long a job may run before its own worker gives it up and hands it back. Default: 0, no limit.
	JobTimeout time.Duration

	// MaxRecoveries is how often a job may be recovered within RecoveryWindow before it goes to the dead letters: a job
	// that kills its worker must not kill the fleet, one after the other. NoLimit switches it off. Default: 3.
	MaxRecoveries int

	// RecoveryWindow is how long a crash counts against its job. Default: 72h.
	RecoveryWindow time.Duration

	// Backoff says how long to wait before recovery number n (from 1) of a job. Default: nil, at once.
	// See Exponential.
	Backoff func(recovery int) time.Duration

	// InflightTTL is how long records outlive the last sign of life of anyone who cares for them, and how long a worker
	// that was recovered is remembered. If the whole fleet is down for longer, the records are gone. At least
	// 3 x OrphanThreshold; NoExpiry keeps records for ever. Default: 7 days.
	InflightTTL time.Duration

	// StopTimeout is how long Run waits for running jobs when it stops. Keep it below the time that your
	// supervisor grants (Kubernetes: terminationGracePeriodSeconds, 30s) by 5 seconds. Default: 25s.
	StopTimeout time.Duration

	// MaxInflight limits the jobs in flight; beyond it Track and Fetch return ErrAtCapacity. Default: 0, no limit.
	MaxInflight int

	// MaxPayload limits a job's payload, in bytes. Redis keeps payloads in memory. Default: 1 MiB.
	MaxPayload int

	// PayloadStore keeps payloads of PayloadThreshold bytes and more outside of Redis, under the lease's ID, until the job is Done or the
	// Enqueuer has taken it. All workers need the same one. Default: nil, everything is in Redis.
	PayloadStore PayloadStore

	// PayloadThreshold is from which size on PayloadStore is used. Default: 64 KiB.
	PayloadThreshold int

	// MaxDead limits the dead letters of the namespace; beyond it the oldest are dropped, and each is announced. Default: 10,000.
	MaxDead int

	// EnqueueTimeout bounds one call of the Enqueuer. A job whose sweeper dies between claim and forget waits for twice that and a second
	// before another sweeper offers it again. Default: 10s.
	EnqueueTimeout time.Duration

	// EnqueueConcurrency is how many calls of the Enqueuer a sweep makes at a time. Default: 16.
	EnqueueConcurrency int

	// SelfFence cancels this worker's leases as soon as it can't be sure any more that they are its own, which is
	// OrphanThreshold after the start of its last good beat, and strictly before a peer can take them. Off, they go on
	// until the worker is told: when Redis itself is away nobody can take anything, and an outage should not kill
	// an hour of work. Switch it on where running twice is worse than running late. Default: false.
	SelfFence bool

	// WaitReplicas makes Track, Fetch, and every claim of a sweep, wait until that many replicas have the write. Default: 0.
	WaitReplicas int

	// HashTag puts every key into one slot of a Redis Cluster, under this tag, so that a queue with the same tag can be
	// served atomically. Default: "", a slot for each worker.
	HashTag string

	// Codec seals records before they go to Redis. Default: nil, records as they are.
	Codec Codec

	// Logger receives what an operator should know. Default: slog.Default().
	Logger *slog.Logger

	// Events are optional hooks for metrics and alerts.
	Events Events
}

// Codec transforms the private part of a record (payload, headers) on its way to and from Redis. Both methods must be safe for
// concurrent use. context is bound to the record: Open must fail if it differs from what Seal was given.
type Codec interface {
	Seal(plain, context []byte) ([]byte, error)
	Open(sealed, context []byte) ([]byte, error)
}

// Exponential returns a Backoff that doubles from base up to max, less up to a fifth at random, so that the jobs of
// a dead worker do not come back all at once. The first recovery is immediate.
func Exponential(base, max time.Duration) func(recovery int) time.Duration {
	return func(recovery int) time.Duration {
		if recovery <= 1 {
			return 0
		}
		return shorten(doubled(base, max, recovery-1))
	}
}

// doubled is base x 2^(n-1), at most max.
func doubled(base, max time.Duration, n int) time.Duration {
	for d := base; ; d *= 2 {
		if n--; n <= 0 || d >= max {
			return min(d, max)
		}
	}
}

// shorten takes up to a fifth off d. Jitter only ever shortens: no bound that we promise is exceeded because of it.
func shorten(d time.Duration) time.Duration {
	if d <= 0 {
		return 0
	}
	return d - time.Duration(rand.Int64N(int64(d)/5+1))
}

// spread is a random part of d.
func spread(d time.Duration) time.Duration { return time.Duration(rand.Int64N(int64(d) + 1)) }

// withDefaults fills in zero fields.
func (c Config) withDefaults() Config {
	def := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	if c.Namespace == "" {
		c.Namespace = "default"
	}
	if c.WorkerName == "" {
		c.WorkerName = defaultWorkerName()
	}
	if c.OrphanThreshold == 0 && c.HeartbeatInterval > 0 && c.HeartbeatInterval < math.MaxInt64/4 {
		c.OrphanThreshold = 4 * c.HeartbeatInterval
	}
	def(&c.HeartbeatInterval, 5*time.Second)
	def(&c.OrphanThreshold, 20*time.Second)
	def(&c.SweepInterval, c.HeartbeatInterval)
	def(&c.GCLockTTL, c.SweepInterval)
	def(&c.RecoveryWindow, 72*time.Hour)
	def(&c.InflightTTL, defaultInflightTTL)
	def(&c.StopTimeout, 25*time.Second)
	def(&c.EnqueueTimeout, 10*time.Second)
	if c.MaxRecoveries == 0 {
		c.MaxRecoveries = 3
	}
	if c.MaxPayload == 0 {
		c.MaxPayload = 1 << 20
	}
	if c.PayloadThreshold == 0 {
		c.PayloadThreshold = 64 << 10
	}
	if c.MaxDead == 0 {
		c.MaxDead = 10_000
	}
	if c.EnqueueConcurrency == 0 {
		c.EnqueueConcurrency = 16
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return c
}

const defaultInflightTTL = 7 * 24 * time.Hour

// defaultWorkerName is hostname:pid, with what a key can't carry replaced.
func defaultWorkerName() string {
	host, err := os.Hostname()
	if err != nil || host == "" {
		host = "unknown"
	}
	host = strings.Map(func(r rune) rune {
		if badInName(r) {
			return '-'
		}
		return r
	}, host)
	return fmt.Sprintf("%.180s:%d", host, os.Getpid())
}

// badInName reports characters that would break a key, a hash tag, a lease id or a log line.
func badInName(r rune) bool {
	return r == '{' || r == '}' || r == '/' || r == unicode.ReplacementChar || unicode.IsSpace(r) || !unicode.IsPrint(r)
}

// problems collects what is wrong with a Config.
type problems []error

func (p *problems) addf(format string, args ...any) { *p = append(*p, fmt.Errorf(format, args...)) }

func (p *problems) name(field, value string, required bool) {
	if value == "" && !required {
		return
	}
	if len(value) > maxName {
		p.addf("%s has %d bytes, at most %d", field, len(value), maxName)
	}
	for _, r := range value {
		if badInName(r) {
			p.addf("%s %q contains %q: spaces, control characters, '/', '{' and '}' can't be part of a key; braces are added by themselves", field, value, r)
			return
		}
	}
}

func (p *problems) duration(field string, value time.Duration, note string) {
	if value < minInterval {
		p.addf("%s is %v, at least %v%s", field, value, minInterval, note)
	}
	if value > maxInterval {
		p.addf("%s is %v, at most %v", field, value, maxInterval)
	}
}

// validate reports every problem at once. It expects defaults to be filled in.
func (c Config) validate() error {
	var p problems
	p.name("Namespace", c.Namespace, true)
	p.name("WorkerName", c.WorkerName, true)
	p.name("HashTag", c.HashTag, false)
	p.duration("HeartbeatInterval", c.HeartbeatInterval, "")
	p.duration("OrphanThreshold", c.OrphanThreshold, "")
	p.duration("SweepInterval", c.SweepInterval, "")
	p.duration("GCLockTTL", c.GCLockTTL, "")
	p.duration("EnqueueTimeout", c.EnqueueTimeout, "")
	p.duration("StopTimeout", c.StopTimeout, "")
	p.duration("RecoveryWindow", c.RecoveryWindow, "")
	if c.JobTimeout != 0 {
		p.duration("JobTimeout", c.JobTimeout, " (0 for none)")
	}
	if c.HeartbeatInterval > c.OrphanThreshold/3 {
		p.addf("OrphanThreshold is %v, at least 3 x HeartbeatInterval (%v): a live worker that loses two beats must not be declared dead",
			c.OrphanThreshold, c.HeartbeatInterval)
	}
	if c.InflightTTL != NoExpiry && c.InflightTTL/3 < c.OrphanThreshold {
		p.addf("InflightTTL is %v, at least 3 x OrphanThreshold (%v), or NoExpiry: records must outlive the time it takes to recover them",
			c.InflightTTL, c.OrphanThreshold)
	}
	if c.InflightTTL > maxInterval {
		p.addf("InflightTTL is %v, at most %v, or NoExpiry", c.InflightTTL, maxInterval)
	}
	for _, f := range []struct {
		name              string
		value, low, total int
	}{
		{"MaxRecoveries", c.MaxRecoveries, NoLimit, math.MaxInt32},
		{"MaxInflight", c.MaxInflight, 0, math.MaxInt32},
		{"MaxPayload", c.MaxPayload, 1, 512 << 20},
		{"PayloadThreshold", c.PayloadThreshold, 1, 512 << 20},
		{"MaxDead", c.MaxDead, 1, math.MaxInt32},
		{"EnqueueConcurrency", c.EnqueueConcurrency, 1, 1 << 16},
		{"WaitReplicas", c.WaitReplicas, 0, 1 << 10},
	} {
		if f.value < f.low || f.value > f.total {
			p.addf("%s is %d, from %d to %d", f.name, f.value, f.low, f.total)
		}
	}
	if v, ok := c.Codec.(interface{ validate() error }); ok {
		if err := v.validate(); err != nil {
			p = append(p, err)
		}
	}
	if len(p) == 0 {
		return nil
	}
	return fmt.Errorf("%w: %w", ErrInvalidConfig, errors.Join(p...))
}

// timing is everything that is derived from Config. The values only work together:
//
//	beatTTL + confirm            = OrphanThreshold    a worker is silent this long before it is fenced
//	trust (from a beat's start) ~= OrphanThreshold    ... so until then nobody can have taken its jobs
//	confirm + a look             < suspectTTL         a suspicion outlives the look that confirms it
//	EnqueueTimeout               < claimTTL           a claim outlives the call that it covers
type timing struct {
	beatTTL    time.Duration
	confirm    time.Duration
	trust      time.Duration
	suspectTTL time.Duration
	claimTTL   time.Duration
	retention  time.Duration // of records; 0 for ever
	tombstone  time.Duration // of a fenced session and the proof of what was handed back
	call       time.Duration // one write to Redis, with the client's retries
	renewal    time.Duration // between two beats that renew the records' TTLs
}

func (c Config) timing() timing {
	t := timing{
		beatTTL:    c.OrphanThreshold / 2,
		confirm:    c.OrphanThreshold - c.OrphanThreshold/2,
		suspectTTL: 2*c.OrphanThreshold + 4*max(c.SweepInterval, c.GCLockTTL),
		claimTTL:   2*c.EnqueueTimeout + time.Second,
		retention:  c.InflightTTL,
		tombstone:  c.InflightTTL,
		call:       max(c.OrphanThreshold/2, 500*time.Millisecond),
	}
	t.renewal = min(10*c.HeartbeatInterval, max(c.InflightTTL/10, 0))
	// Redis counts in whole milliseconds, and may see one pass that had hardly begun.
	t.trust = time.Duration(ms(t.beatTTL)+ms(t.confirm)-1) * time.Millisecond
	if c.InflightTTL == NoExpiry {
		// Records stay for ever; the memory of workers that hold none would only pile up.
		t.renewal = 10 * c.HeartbeatInterval
		t.retention, t.tombstone = 0, max(defaultInflightTTL, 3*c.OrphanThreshold)
	}
	return t
}

// ms is for Redis, which knows no smaller unit here. Never 0: a TTL of 0 is an error or a deletion.
func ms(d time.Duration) int64 {
	if d <= 0 {
		return 0
	}
	return max(1, d.Milliseconds())
}

// sleep waits for d or until ctx ends, and reports whether it slept to the end.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
