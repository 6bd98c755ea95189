package recovery

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

// State is where a Recoverer is in its life.
type State int32

const (
	StateNew      State = iota // before Start
	StateRunning               // tracks jobs
	StateDraining              // refuses new jobs; running ones go on and are vouched for
	StateStopped               // has left, for good
)

var stateNames = [...]string{"new", "running", "draining", "stopped"}

// String returns the state's name in lower case.
func (s State) String() string {
	if s >= 0 && int(s) < len(stateNames) {
		return stateNames[s]
	}
	return fmt.Sprintf("state(%d)", int32(s))
}

// Recoverer tracks the jobs that this process runs, and recovers those of peers that died. Its methods are safe for
// concurrent use. It is used for one Start and one Stop.
type Recoverer struct {
	// Fixed after New.
	rdb    redis.UniversalClient
	enq    Enqueuer
	batch  BatchEnqueuer // enq, if it is one
	list   *ListQueue    // enq, if it is one
	bounds bool          // the client has timeouts of its own: no call blocks for long
	cfg    Config
	tm     timing
	keys   keyspace
	log    *slog.Logger
	info   sessionInfo
	heart  *heartbeater
	sweep  *sweeper
	group  *group        // every goroutine but calls of the Enqueuer that did not return
	slots  chan struct{} // calls of the Enqueuer under way

	life       context.Context // ends when the heartbeat may stop
	endLife    context.CancelFunc
	hard       context.Context // ends when nothing may go on: the parent of the Enqueuer's contexts
	endHard    context.CancelFunc
	serving    context.Context // ends when no new jobs are taken
	endServing context.CancelFunc
	sweeps     context.Context // ends when sweeping stops
	endSweeps  context.CancelFunc
	stopping   chan struct{} // of capacity 1: held by the Stop call at work
	sweepEnded chan struct{}
	heartEnded chan struct{}

	counts   counters
	current  atomic.Pointer[incarnation]
	accepted acceptedKeys
	known    sync.Map    // lists by key: *ListQueue
	owes     atomic.Bool // leases that this worker gave up wait in its own claims
	apart    sync.Map    // lists that are known to be in another slot than the workers
	waits    *waits

	mu       sync.Mutex // guards what follows
	state    State
	starting bool
	inflight int                      // leases that have not ended
	idle     chan struct{}            // closed when inflight is 0; made by those who wait for it
	giveUps  map[giveUp]chan struct{} // leases that were told lost, and that nobody else is known to have
}

// New returns a Recoverer that keeps its records in rdb and gives orphans to enq. It does not talk to Redis yet and never closes
// rdb. The error names everything that is wrong, under ErrInvalidConfig.
func New(rdb redis.UniversalClient, enq Enqueuer, cfg Config) (*Recoverer, error) {
	cfg = cfg.withDefaults()
	var problems []error
	if err := validateClient(rdb); err != nil {
		problems = append(problems, fmt.Errorf("%w: %w", ErrInvalidConfig, err))
	}
	if isNil(enq) {
		problems = append(problems, fmt.Errorf("%w: enq is nil: an Enqueuer is needed to give jobs back", ErrInvalidConfig))
	}
	if q, ok := enq.(*ListQueue); ok && q != nil {
		if err := q.problem(); err != nil {
			problems = append(problems, fmt.Errorf("%w: enq: %w", ErrInvalidConfig, err))
		}
	}
	if err := errors.Join(append(problems, cfg.validate())...); err != nil {
		return nil, err
	}
	r := &Recoverer{
		rdb: rdb, enq: enq, cfg: cfg, tm: cfg.timing(), log: cfg.Logger,
		keys:       newKeyspace(cfg.Namespace, cfg.HashTag),
		group:      &group{},
		slots:      make(chan struct{}, cfg.EnqueueConcurrency),
		stopping:   make(chan struct{}, 1),
		sweepEnded: make(chan struct{}),
		heartEnded: make(chan struct{}),
	}
	r.bounds = hasTimeouts(rdb)
	r.batch, _ = enq.(BatchEnqueuer)
	if r.list, _ = enq.(*ListQueue); r.list != nil {
		r.list.rdb.CompareAndSwap(nil, &r.rdb)
		r.known.Store(r.list.key, r.list)
	}
	r.waits = newWaits(r)
	r.life, r.endLife = context.WithCancel(context.Background())
	r.hard, r.endHard = context.WithCancel(context.Background())
	r.sweeps, r.endSweeps = context.WithCancel(context.Background())
	r.serving, r.endServing = context.WithCancel(context.Background())
	r.heart = newHeartbeater(r)
	r.sweep = newSweeper(r)
	return r, nil
}

// Start joins the fleet and begins to beat and to sweep. When it returns nil, this worker is registered and its first beat is in Redis;
// when it returns an error, nothing is left behind and Start may be called again. ctx bounds only Start itself: what was started
// goes on until Stop. A second Start, and one after Stop, is an error.
func (r *Recoverer) Start(ctx context.Context) error {
	if err := r.beginStart(); err != nil {
		return err
	}
	began := time.Now()
	inc, err := bounded(ctx, r.group, 2*r.tm.call, r.join)
	if err = r.endStart(inc, began, err); err != nil {
		return fmt.Errorf("recovery: start: %w", err)
	}
	if r.list != nil && !r.together(r.list.key) {
		r.tellApart(r.list.key)
	}
	r.log.Info("recovery: started", "worker", inc.id, "namespace", r.cfg.Namespace, "heartbeat", r.cfg.HeartbeatInterval,
		"orphan_threshold", r.cfg.OrphanThreshold)
	emit(r.log, r.cfg.Events.Started, StartedInfo{Worker: inc.id})
	return nil
}

// endStart sets the loops going, unless joining failed or Stop came in between.
func (r *Recoverer) endStart(inc *incarnation, began time.Time, err error) error {
	r.mu.Lock()
	r.starting = false
	if err == nil && r.state == StateNew {
		r.state = StateRunning
		r.heart.trust(began)
		r.current.Store(inc)
		r.group.spawn(func() { defer close(r.heartEnded); r.heart.run(r.life) })
		r.group.spawn(func() { defer close(r.sweepEnded); r.sweep.run(r.sweeps) })
		r.group.spawn(func() { r.warnOfEviction(r.life) })
		r.mu.Unlock()
		return nil
	}
	state := r.state
	r.mu.Unlock()
	if err == nil {
		r.undoJoin(context.Background(), inc)
		err = fmt.Errorf("%w: state is %v", ErrNotRunning, state)
	}
	return err
}

func (r *Recoverer) beginStart() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.state != StateNew || r.starting {
		return fmt.Errorf("recovery: start: already started: state is %v; it starts once, make another with New", r.state)
	}
	r.starting = true
	if r.info.Started == 0 { // once: a join of an earlier Start may still be under way
		r.info = newSessionInfo(&r.cfg, time.Now())
	}
	return nil
}

// warnOfEviction looks whether Redis may throw records away. It is best effort: many services forbid CONFIG.
func (r *Recoverer) warnOfEviction(ctx context.Context) {
	policy, err := r.rdb.ConfigGet(ctx, "maxmemory-policy").Result()
	if p := policy["maxmemory-policy"]; err == nil && p != "" && p != "noeviction" {
		r.log.Warn("recovery: Redis may evict records of running jobs; set maxmemory-policy to noeviction", "policy", p)
	}
}

// Quiet makes Track and Fetch refuse new jobs. Running ones go on and are still vouched for. It does not block and can't be undone.
func (r *Recoverer) Quiet() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.drainLocked()
}

// drainLocked ends the taking of new jobs. r.mu is held.
func (r *Recoverer) drainLocked() {
	if r.state == StateRunning {
		r.state = StateDraining
		r.endServing()
		r.group.spawn(r.waits.close)
	}
}

// Run is Start, then waiting for ctx, then Stop with Config.StopTimeout. It returns their error. Whoever calls it in a goroutine learns from Events.Started
// when jobs can be taken.
func (r *Recoverer) Run(ctx context.Context) error {
	if err := r.Start(ctx); err != nil {
		return err
	}
	<-ctx.Done()
	stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), r.cfg.StopTimeout)
	defer cancel()
	return r.Stop(stop)
}

// State returns where the Recoverer is in its life.
func (r *Recoverer) State() State {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.state
}

// WorkerID returns the id of the current incarnation, or "" before Start. It changes when this worker was declared dead, or when
// Redis lost its data.
func (r *Recoverer) WorkerID() string {
	if inc := r.current.Load(); inc != nil {
		return inc.id
	}
	return ""
}

// Check returns nil if this worker can vouch for its jobs, and otherwise why it can't. It does not ask Redis. It is made for
// readiness probes; a liveness probe that heeds it restarts the whole fleet when Redis is away for OrphanThreshold.
func (r *Recoverer) Check() error {
	if s := r.State(); s == StateNew || s == StateStopped {
		return fmt.Errorf("%w: state is %v", ErrNotRunning, s)
	}
	return r.heart.health()
}

// Stats returns a snapshot of the counters. It does not block.
func (r *Recoverer) Stats() Stats {
	s := r.counts.snapshot()
	r.mu.Lock()
	s.Inflight = r.inflight
	r.mu.Unlock()
	r.heart.mu.Lock()
	defer r.heart.mu.Unlock()
	if s.LastBeat = r.heart.lastGood; !s.LastBeat.IsZero() {
		s.TrustedUntil = s.LastBeat.Add(r.tm.trust)
	}
	return s
}

// Sweep makes one pass now, unless somebody else is sweeping at this moment: then the report says Skipped. It blocks until the pass has
// ended, or ctx has: then what was claimed is given back to the fleet. The error joins everything that went wrong; it
// does not mean that nothing was done. Sweep works without Start, too.
func (r *Recoverer) Sweep(ctx context.Context) (SweepReport, error) {
	if r.State() == StateStopped {
		return SweepReport{}, fmt.Errorf("%w: state is %v", ErrNotRunning, StateStopped)
	}
	return newSweeper(r).sweepOnce(ctx, true)
}

// group knows every goroutine that it started.
type group struct {
	mu   sync.Mutex
	n    int
	idle chan struct{} // closed when n is 0; made by those who wait for it
}

func (g *group) spawn(f func()) {
	g.mu.Lock()
	g.n++
	g.mu.Unlock()
	go func() {
		defer g.end()
		f()
	}()
}

func (g *group) end() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.n--
	if g.n == 0 && g.idle != nil {
		close(g.idle)
		g.idle = nil
	}
}

// wait blocks until all have ended, or ctx has.
func (g *group) wait(ctx context.Context) error {
	g.mu.Lock()
	if g.n == 0 {
		g.mu.Unlock()
		return nil
	}
	if g.idle == nil {
		g.idle = make(chan struct{})
	}
	n, idle := g.n, g.idle
	g.mu.Unlock()
	select {
	case <-idle:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%d goroutines have not ended: %w", n, ctx.Err())
	}
}

// detach runs code of the caller that might never return; Stop does not wait for it.
func (r *Recoverer) detach(f func()) { go f() }

// bounded runs f, but does not wait for it beyond limit: go-redis does not interrupt a read when its ctx ends. What f answers after
// that is dropped.
func bounded[T any](ctx context.Context, g *group, limit time.Duration, f func(context.Context) (T, error)) (T, error) {
	type result struct {
		value T
		err   error
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	answer := make(chan result, 1)
	g.spawn(func() {
		defer cancel()
		v, err := f(ctx)
		answer <- result{v, err}
	})
	select {
	case a := <-answer:
		return a.value, a.err
	case <-ctx.Done():
	}
	select {
	case a := <-answer: // in the same moment
		return a.value, a.err
	default:
		var none T
		return none, fmt.Errorf("no answer within %v: %w", limit, ctx.Err())
	}
}
