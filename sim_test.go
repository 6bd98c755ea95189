package recovery

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
)

// A simulation: seeded random schedules of everything that workers, their networks and their callers may do, each in a bubble of its own, and
// a judge that keeps its own books. A seed fixes the steps and the faults. What it can't fix is the order in which Go runs goroutines that
// are ready at the same moment, and the jitter of the library's timers: so a seed that failed is run again and again until it fails.
//
//	go test -run TestSimulation . -sim.n=10000             more schedules
//	go test -run TestSimulation . -sim.n=10000 -sim.from=1 other schedules
//	go test -run TestSimulation . -sim.seed=42             one, with its log, up to 200 times
var (
	simSeed = flag.Int64("sim.seed", 0, "TestSimulation: run this schedule only, up to 200 times")
	simN    = flag.Int64("sim.n", 30, "TestSimulation: number of schedules")
	simFrom = flag.Int64("sim.from", 1, "TestSimulation: the first schedule")
)

func TestSimulation(t *testing.T) {
	if *simSeed != 0 {
		for range 200 {
			simulate(t, *simSeed, true)
			if t.Failed() {
				return
			}
		}
		return
	}
	var total simCounts
	for seed := *simFrom; seed < *simFrom+*simN; seed++ {
		ok := t.Run(fmt.Sprint("seed=", seed), func(t *testing.T) { total.add(simulate(t, seed, false)) })
		if !ok {
			t.Logf("reproduce with: go test -run TestSimulation . -sim.seed=%d", seed)
		}
	}
	t.Logf("%d schedules: %+v", *simN, total)
	require.Positive(t, total.Done, "or nothing was simulated")
	require.Positive(t, total.HandedBack)
}

// simCounts say what happened, so that a simulation in which nothing does is seen.
type simCounts struct {
	Steps, Runs, Done, HandedBack, Lost, Buried, Crashes, Pauses, Faults, Stops, Flushes int
}

func (c *simCounts) add(o simCounts) {
	c.Steps += o.Steps
	c.Runs += o.Runs
	c.Done += o.Done
	c.HandedBack += o.HandedBack
	c.Lost += o.Lost
	c.Buried += o.Buried
	c.Crashes += o.Crashes
	c.Pauses += o.Pauses
	c.Faults += o.Faults
	c.Stops += o.Stops
	c.Flushes += o.Flushes
}

// sim is one schedule.
type sim struct {
	w     *world
	seed  int64
	rnd   *rand.Rand // of the scheduler's goroutine only
	quiet bool
	cfg   Config
	list  *ListQueue // jobs are handed back into it; nil: to an Enqueuer
	flush bool       // Redis is emptied, so that the books must be lenient
	storm bool       // many faults, close to each other, where jobs change hands
	ops   sync.WaitGroup
	crew  []*simWorker

	copies atomic.Int64 // calls that the network still holds up

	mu       sync.Mutex // guards what follows: the books
	counts   simCounts
	trace    []string
	next     int
	runs     []*simRun
	accepted map[string]time.Time // by the Enqueuer: lease -> first time
	byJob    map[string]int       // how often the Enqueuer has accepted a job
	waiting  []Job                // accepted, to be run again
	tokens   map[string]*simToken // elements of the list
	broken   []string
}

// simWorker is a worker process.
type simWorker struct {
	*member
	net  *simNet
	mode atomic.Int32 // how its Enqueuer behaves
	mood atomic.Int32
	gone atomic.Bool // crashed or stopped
}

const (
	enqTakes int32 = iota
	enqRefuses
	enqHangs
	enqLate  // takes it, but after its time
	enqMoody // refuses every other time
)

// simRun is one lease, as its holder knows it.
type simRun struct {
	by    *simWorker
	lease *Lease // nil: it is inside of Do
	key   string
	job   string
	token *simToken

	// Guarded by sim.mu.
	busy     bool  // a call that ends it is under way
	called   bool  // Done was called
	answered bool  // Done, or Release, has answered for good
	err      error // its answer; nil: done
	saved    int   // the last checkpoint that was confirmed
	saving   bool  // one is under way: of two at the same time nobody knows which is the last
	excused  bool  // Redis lost it when nobody but Redis had it
	old      bool  // from before Redis was emptied
}

// simToken is a payload on its way through lists and leases.
type simToken struct {
	certain bool // somebody was told that it is in the list, or tracked
	maybe   bool // a Done of it has no answer
	done    int
}

// simulate runs one schedule.
func simulate(t *testing.T, seed int64, loud bool) (counts simCounts) {
	t.Helper()
	inBubble(t, func(w *world) {
		s := &sim{w: w, seed: seed, rnd: rand.New(rand.NewPCG(uint64(seed), 1)), quiet: !loud,
			accepted: map[string]time.Time{}, byJob: map[string]int{}, tokens: map[string]*simToken{}}
		w.loadScripts()
		s.flush, s.storm = seed%10 == 9, seed%3 == 1
		s.cfg = Config{HeartbeatInterval: time.Second, OrphanThreshold: time.Duration(3+s.rnd.IntN(3)) * time.Second, SweepInterval: time.Duration(1+s.rnd.IntN(3)) * time.Second,
			EnqueueTimeout: 2 * time.Second, MaxRecoveries: 2, InflightTTL: 24 * time.Hour, SelfFence: s.rnd.IntN(5) == 0}
		if s.rnd.IntN(4) == 0 {
			s.cfg.Backoff = func(int) time.Duration { return 1500 * time.Millisecond }
		}
		if s.quiet {
			s.cfg.Logger = slog.New(slog.DiscardHandler)
		}
		if !s.flush && s.rnd.IntN(3) == 0 {
			s.list, s.cfg.MaxRecoveries, s.cfg.Backoff = NewListQueue("jobs"), NoLimit, nil
		}
		for range 3 + s.rnd.IntN(2) {
			s.join()
		}
		s.play()
		s.settle()
		s.judge()
		s.mu.Lock()
		defer s.mu.Unlock()
		counts = s.counts
		if len(s.broken) > 0 {
			w.t.Errorf("seed %d, list %v, flush %v:\n%s\nsteps:\n%s", seed, s.list != nil, s.flush, strings.Join(s.broken, "\n"), strings.Join(s.trace, "\n"))
		}
	})
	return counts
}

func (s *sim) note(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.trace = append(s.trace, fmt.Sprintf("%v ", time.Since(simEpoch))+fmt.Sprintf(format, args...))
}

// simEpoch is when every bubble begins.
var simEpoch = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)

func (s *sim) breach(format string, args ...any) {
	s.note("BROKEN "+format, args...)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.broken = append(s.broken, fmt.Sprintf(format, args...))
}

// join starts a worker, which may fail.
func (s *sim) join() *simWorker {
	x := &simWorker{net: &simNet{w: s.w, copies: &s.copies}}
	opts := []func(*member){func(m *member) { m.rdb.AddHook(x.net) }}
	if s.list != nil {
		opts = append(opts, into(s.list))
	}
	x.member = s.w.make(fmt.Sprint("w", len(s.crew)), s.cfg, opts...)
	x.enq.set(s.enqueuer(x))
	if err := x.Start(bg); err != nil {
		s.breach("start: %v", err)
	}
	s.crew = append(s.crew, x)
	s.note("join %s", x.WorkerID())
	return x
}

// enqueuer books what it takes.
func (s *sim) enqueuer(x *simWorker) func(context.Context, Orphan) error {
	return func(ctx context.Context, o Orphan) error {
		switch mode := x.mode.Load(); mode {
		case enqRefuses:
			return errors.New("refused")
		case enqMoody:
			if x.mood.Add(1)%2 == 1 {
				return errors.New("not this time")
			}
		case enqHangs:
			<-ctx.Done()
			return ctx.Err()
		case enqLate:
			time.Sleep(s.cfg.EnqueueTimeout + 700*time.Millisecond)
		}
		if x.gone.Load() && x.net.isDead() {
			return errors.New("dead")
		}
		if strings.HasSuffix(o.ID, "!") {
			return Permanent(errors.New("never"))
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		s.counts.HandedBack++
		if _, again := s.accepted[o.Key]; !again {
			s.accepted[o.Key] = time.Now()
			if !strings.HasPrefix(o.ID, "do") {
				s.waiting = append(s.waiting, o.Job)
			}
		}
		s.byJob[o.ID]++
		for _, r := range s.runs {
			n, _ := strconv.Atoi(string(o.Checkpoint))
			if r.key == o.Key && n < r.saved {
				s.broken = append(s.broken, fmt.Sprintf("%s: handed back with checkpoint %d, but %d was confirmed", o.Key, n, r.saved))
			}
		}
		return nil
	}
}

// live are the workers that are neither dead nor stopped.
func (s *sim) live() (all []*simWorker) {
	for _, x := range s.crew {
		if !x.gone.Load() {
			all = append(all, x)
		}
	}
	return all
}

func (s *sim) someone() *simWorker {
	all := s.live()
	return all[s.rnd.IntN(len(all))]
}

// held picks a lease that its holder may still end.
func (s *sim) held() *simRun {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []*simRun
	for _, r := range s.runs {
		if r.lease != nil && !r.busy && !r.answered && !r.by.gone.Load() {
			all = append(all, r)
		}
	}
	if len(all) == 0 {
		return nil
	}
	return all[s.rnd.IntN(len(all))]
}

func (s *sim) spawn(f func()) {
	s.ops.Add(1)
	go func() { defer s.ops.Done(); f() }()
}

// play makes the steps.
func (s *sim) play() {
	steps := 15 + s.rnd.IntN(30)
	flushAt := -1
	if s.flush {
		flushAt = 5 + s.rnd.IntN(steps-5)
	}
	for i := range steps {
		s.counts.Steps++
		if i == flushAt {
			s.empty()
		}
		s.step()
		if s.rnd.IntN(5) < 3 {
			time.Sleep(time.Duration(s.rnd.IntN(1500)) * time.Millisecond)
		}
		s.inspect()
	}
}

func (s *sim) step() {
	if s.storm {
		for range s.rnd.IntN(4) {
			s.spoil(s.someone(), simHands[s.rnd.IntN(len(simHands))])
		}
		if s.rnd.IntN(6) == 0 {
			s.someone().mode.Store(enqMoody)
		}
		if r := s.held(); r != nil && s.rnd.IntN(4) == 0 {
			s.release(r)
		}
	}
	switch n := s.rnd.IntN(100); {
	case n < 22:
		s.track(1 + s.rnd.IntN(2))
	case n < 36:
		if r := s.held(); r != nil {
			s.done(r)
		}
	case n < 42:
		if r := s.held(); r != nil {
			s.release(r)
		}
	case n < 47:
		if r := s.held(); r != nil {
			s.checkpoint(r)
		}
	case n < 50:
		if r := s.held(); r != nil {
			s.confirm(r)
		}
	case n < 54:
		s.do()
	case n < 62:
		if s.list != nil {
			s.fetch()
		} else {
			s.track(1)
		}
	case n < 66:
		if len(s.live()) < 5 {
			s.join()
		}
	case n < 70:
		if len(s.live()) > 1 {
			s.crash(s.someone())
		}
	case n < 73:
		if len(s.live()) > 1 {
			s.stop(s.someone())
		}
	case n < 78:
		s.pause(s.someone())
	case n < 80:
		for _, x := range s.live() {
			s.pause(x)
		}
	case n < 94:
		s.spoil(s.someone(), simSteps[s.rnd.IntN(len(simSteps))])
	case n < 97:
		x := s.someone()
		s.note("sweep by %s", x.WorkerID())
		s.spawn(func() { _, _ = x.Sweep(bg) })
	default:
		x, mode := s.someone(), s.rnd.Int32N(5)
		s.note("enqueuer of %s: %d", x.WorkerID(), mode)
		x.mode.Store(mode)
	}
}

// job makes a new job, or takes one that was handed back.
func (s *sim) job(prefix string) Job {
	again := prefix == "" && s.rnd.IntN(2) == 0
	timeout := time.Duration(0)
	if s.rnd.IntN(8) == 0 {
		timeout = time.Duration(1+s.rnd.IntN(5000)) * time.Millisecond
	}
	never := s.list == nil && s.rnd.IntN(12) == 0
	s.mu.Lock()
	defer s.mu.Unlock()
	if again && len(s.waiting) > 0 {
		j := s.waiting[0]
		s.waiting = s.waiting[1:]
		return j
	}
	s.next++
	id := fmt.Sprint(prefix, "job", s.next)
	if never {
		id += "!"
	}
	s.tokens[id] = &simToken{}
	return Job{ID: id, Payload: []byte(id), Timeout: timeout}
}

// book enters a lease that was acknowledged.
func (s *sim) book(x *simWorker, l *Lease) {
	j := l.Job()
	r := &simRun{by: x, lease: l, key: l.ID(), job: j.ID}
	s.note("%s is running %s as %s", x.WorkerID(), j.ID, r.key)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.counts.Runs++
	r.token = s.tokens[string(j.Payload)]
	r.token.certain = true
	s.runs = append(s.runs, r)
}

func (s *sim) track(n int) {
	x := s.someone()
	var jobs []Job
	for range n {
		jobs = append(jobs, s.job(""))
	}
	ctx, cancel := bg, func() {}
	if s.rnd.IntN(3) == 0 {
		ctx, cancel = context.WithTimeout(bg, time.Duration(s.rnd.IntN(2000))*time.Millisecond)
	}
	s.note("track %d on %s", n, x.WorkerID())
	s.spawn(func() {
		defer cancel()
		leases, err := x.TrackAll(ctx, jobs...)
		if err != nil {
			s.note("track %s on %s: %v", jobs[0].ID, x.WorkerID(), err)
		}
		for _, l := range leases {
			s.book(x, l)
		}
	})
}

func (s *sim) fetch() {
	x, n := s.someone(), 1+s.rnd.IntN(3)
	if s.rnd.IntN(3) > 0 {
		s.mu.Lock()
		s.next++
		e := fmt.Sprint("element", s.next)
		s.tokens[e] = &simToken{certain: true}
		s.mu.Unlock()
		s.w.push("jobs", e)
	}
	wait := time.Duration(s.rnd.IntN(3000)) * time.Millisecond
	s.note("fetch %d on %s", n, x.WorkerID())
	s.spawn(func() {
		ctx, cancel := context.WithTimeout(bg, wait)
		defer cancel()
		leases, err := x.Fetch(ctx, s.list, n)
		if err != nil {
			s.note("fetch on %s: %v", x.WorkerID(), err)
		}
		for _, l := range leases {
			s.book(x, l)
		}
	})
}

// end makes a call that ends a lease.
func (s *sim) end(r *simRun, what string, f func() error) {
	s.mu.Lock()
	r.busy = true
	r.called = r.called || what == "done"
	s.mu.Unlock()
	s.note("%s %s", what, r.key)
	s.spawn(func() {
		err := f()
		s.note("%s %s: %v", what, r.key, err)
		s.mu.Lock()
		defer s.mu.Unlock()
		r.busy = false
		switch {
		case errors.Is(err, ErrLost):
			s.counts.Lost++
			r.answered, r.err = true, ErrLost
		case err != nil:
		case what == "done":
			s.counts.Done++
			r.answered = true
			r.token.done++
		default: // released
			r.answered, r.err = true, ErrLost
		}
	})
}

func (s *sim) done(r *simRun) { s.end(r, "done", r.lease.Done) }

func (s *sim) release(r *simRun) {
	if !r.called {
		s.end(r, "release", r.lease.Release)
	}
}

func (s *sim) checkpoint(r *simRun) {
	s.mu.Lock()
	s.next++
	n, saving := s.next, r.saving
	r.saving = true
	s.mu.Unlock()
	if saving {
		return
	}
	s.note("checkpoint %d of %s", n, r.key)
	s.spawn(func() {
		err := r.lease.Checkpoint(bg, []byte(strconv.Itoa(n)))
		s.note("checkpoint %d of %s: %v", n, r.key, err)
		s.mu.Lock()
		defer s.mu.Unlock()
		r.saving = false
		if err == nil {
			r.saved = max(r.saved, n)
		}
	})
}

func (s *sim) confirm(r *simRun) {
	s.spawn(func() {
		began := time.Now()
		err := r.lease.Confirm(bg)
		s.mu.Lock()
		defer s.mu.Unlock()
		if at, taken := s.accepted[r.key]; err == nil && taken && at.Before(began) && !r.old {
			s.broken = append(s.broken, r.key+": confirmed after it was handed back")
		}
	})
}

// do runs a job that panics, or does not.
func (s *sim) do() {
	x, job, panics := s.someone(), s.job("do"), s.rnd.IntN(3) > 0
	takes := time.Duration(s.rnd.IntN(1500)) * time.Millisecond
	r := &simRun{by: x, job: job.ID}
	s.note("do %s on %s, panics %v", job.ID, x.WorkerID(), panics)
	s.spawn(func() {
		var err error
		began := false
		perr := guard(func() {
			err = x.Do(bg, job, func(context.Context) error {
				began = true
				s.mu.Lock()
				r.token = s.tokens[job.ID]
				r.token.certain = true
				r.called = !panics
				s.counts.Runs++
				s.runs = append(s.runs, r)
				s.mu.Unlock()
				time.Sleep(takes)
				if panics {
					panic("on purpose")
				}
				return nil
			})
		})
		s.note("do %s: %v %v", job.ID, err, perr)
		s.mu.Lock()
		defer s.mu.Unlock()
		switch {
		case !began:
		case perr != nil, errors.Is(err, ErrLost):
			r.answered, r.err = true, ErrLost
		case err == nil:
			s.counts.Done++
			r.answered = true
			r.token.done++
		}
	})
}

func (s *sim) crash(x *simWorker) {
	s.note("crash %s", x.WorkerID())
	s.counts.Crashes++
	x.gone.Store(true)
	x.net.die()
	x.member.crash()
}

func (s *sim) stop(x *simWorker) {
	patience := time.Duration(s.rnd.IntN(3)) * 2 * time.Second
	s.note("stop %s within %v", x.WorkerID(), patience)
	s.counts.Stops++
	x.gone.Store(true)
	s.spawn(func() {
		ctx, cancel := context.WithTimeout(bg, patience)
		defer cancel()
		err := x.Stop(ctx)
		s.note("stop %s: %v", x.WorkerID(), err)
		x.net.die() // the process ends
		x.member.crash()
	})
}

func (s *sim) pause(x *simWorker) {
	d := time.Duration(s.rnd.Int64N(int64(3 * s.cfg.OrphanThreshold)))
	hangs, late := s.rnd.IntN(2) == 0, s.rnd.IntN(2) == 0
	s.counts.Pauses++
	s.note("pause %s for %v, hangs %v, late %v", x.WorkerID(), d, hangs, late)
	x.net.pause(d, hangs, late)
}

// simSteps are the names of what can go wrong, as nameOf gives them.
var simSteps = []string{"commit", "commit", "beat", "join", "claim", "claim", "forget", "forget", "postpone", "take", "take", "untake", "where", "checkpoint",
	"fetch", "fetch", "deliver", "deliver", "restore", "records", "forget", "lock", "unlock", "leave", "sadd", "srem", "zadd", "bury", "count", ""}

// simHands are those at which jobs change hands.
var simHands = []string{"take", "untake", "forget", "postpone", "claim", "where", "commit", "deliver", "fetch", "leave", "checkpoint", "bury"}

func (s *sim) spoil(x *simWorker, step string) {
	rule := &simRule{on: step, mode: simMode(s.rnd.IntN(int(simModes))), times: 1 + s.rnd.IntN(2),
		delay: time.Duration(s.rnd.Int64N(int64(2 * s.cfg.OrphanThreshold)))}
	s.counts.Faults++
	s.note("spoil %q of %s: %v %v, %d times", rule.on, x.WorkerID(), rule.mode, rule.delay, rule.times)
	x.net.add(rule)
}

// empty is FLUSHALL, at a moment at which every worker that lives is in touch. What only Redis had is gone, and the books say so.
func (s *sim) empty() {
	for _, x := range s.live() {
		x.net.heal()
	}
	s.settleOps()
	time.Sleep(2 * s.cfg.HeartbeatInterval)
	s.note("FLUSHALL")
	s.counts.Flushes++
	s.mu.Lock()
	for _, r := range s.runs {
		r.old = true
		r.excused = r.excused || r.by.gone.Load() || r.answered || r.lease == nil || !r.lease.isHeld()
	}
	s.mu.Unlock()
	s.w.mini.FlushAll()
	time.Sleep(3 * s.cfg.HeartbeatInterval)
}

func (s *sim) settleOps() {
	s.ops.Wait()
	for s.copies.Load() > 0 { // each is held up for some seconds at most
		time.Sleep(time.Second)
	}
	synctest.Wait()
}

var simKey = regexp.MustCompile(`\{(.+)\}:(inflight|claims|jobs)$`)

// simContent tells whether a key holds jobs of a worker, and of which. Dead letters are nobody's.
func simContent(key string) (id, name string, ok bool) {
	found := simKey.FindStringSubmatch(key)
	if found == nil || found[1] == "dead" {
		return "", "", false
	}
	return found[1], found[2], true
}

// inspect checks what must be true at any moment.
func (s *sim) inspect() {
	synctest.Wait()
	m := s.w.mini
	registered, _ := m.Members(newKeyspace(s.w.ns, "").workers())
	for _, key := range m.Keys() {
		id, name, ok := simContent(key)
		if !ok {
			continue
		}
		k := s.w.keys(id)
		if !slices.Contains(registered, id) {
			s.breach("%s is not registered and has %s", id, name)
		}
		if name != "jobs" {
			continue
		}
		index, _ := m.ZMembers(k.inflight)
		claims, _ := m.ZMembers(k.claims)
		handed, _ := m.Members(k.handed)
		fields, _ := m.HKeys(k.jobs)
		for _, f := range fields {
			if !strings.Contains(f, ".") && !slices.Contains(index, f) && !slices.Contains(claims, f) {
				s.breach("%s: the record of %s belongs to nobody", id, f)
			}
		}
		for _, l := range index {
			if slices.Contains(claims, l) || slices.Contains(handed, l) {
				s.breach("%s: lease %s is in the index, and claimed or handed back", id, l)
			}
		}
		for _, l := range claims {
			if slices.Contains(handed, l) {
				s.breach("%s: lease %s is claimed and handed back", id, l)
			}
		}
	}
}

// settle lets the dust settle: no more faults, somebody lives, the holders end their jobs, everybody stops.
func (s *sim) settle() {
	for _, x := range s.crew {
		x.net.heal()
		x.mode.Store(enqTakes)
	}
	s.settleOps()
	if len(s.live()) == 0 {
		s.join()
	}
	s.quieten("after the schedule")
	for range 3 { // a Done that Redis did not confirm is asked for again
		for _, r := range slices.Clone(s.runs) {
			if r.lease != nil && !r.answered && !r.by.gone.Load() {
				s.done(r)
			}
		}
		s.settleOps()
	}
	s.quieten("after the last Done")
	last := s.live()
	for _, x := range last {
		ctx, cancel := context.WithTimeout(bg, time.Minute)
		if err := x.Stop(ctx); err != nil {
			s.breach("stop of %s, with nothing left: %v", x.WorkerID(), err)
		}
		cancel()
	}
	s.settleOps()
	s.inspect()
	for _, key := range s.w.mini.Keys() {
		if _, _, content := simContent(key); content || key == newKeyspace(s.w.ns, "").workers() {
			s.breach("%s is left", key)
		}
	}
}

// quieten waits until Redis has nothing but what live workers run.
func (s *sim) quieten(when string) {
	why := ""
	for range 100 {
		time.Sleep(3 * time.Second)
		synctest.Wait()
		if why = s.unrest(); why == "" {
			s.inspect()
			return
		}
	}
	s.breach("no rest %s: %s", when, why)
}

func (s *sim) unrest() string {
	m := s.w.mini
	var ids []string
	for _, x := range s.live() {
		ids = append(ids, x.WorkerID())
		x.mu.Lock()
		owed := len(x.giveUps)
		x.mu.Unlock()
		if owed > 0 {
			return fmt.Sprintf("%s owes %d jobs", x.WorkerID(), owed)
		}
	}
	registered, _ := m.Members(newKeyspace(s.w.ns, "").workers())
	for _, id := range registered {
		if !slices.Contains(ids, id) {
			return id + " is not retired"
		}
		if claims, _ := m.ZMembers(s.w.keys(id).claims); len(claims) > 0 {
			return id + " has claims"
		}
	}
	return ""
}

// judge reads the books.
func (s *sim) judge() {
	letters, err := NewInspector(s.w.raw, s.w.ns).DeadLetters(bg, 0, 1000)
	require.NoError(s.w.t, err)
	buried, buriedJobs := map[string]bool{}, map[string]bool{}
	for _, l := range letters {
		buried[l.Key], buriedJobs[l.ID] = true, true
		if !strings.HasPrefix(l.Cause, "recovered") && !strings.HasPrefix(l.Cause, "refused") && !s.flush {
			s.breach("dead letter of %s: %s", l.Key, l.Cause)
		}
	}
	s.mu.Lock()
	s.counts.Buried = len(letters)
	runs, times := s.runs, map[string]int{}
	for _, r := range runs {
		times[r.job]++
	}
	s.mu.Unlock()
	for _, r := range runs {
		done := r.answered && r.err == nil
		maybe := r.called && !r.answered
		if maybe {
			r.token.maybe = true
		}
		if s.list != nil {
			continue
		}
		_, taken := s.accepted[r.key]
		dead := buried[r.key]
		if r.lease == nil {
			taken, dead = s.byJob[r.job] > 0, buriedJobs[r.job]
		}
		switch {
		case done && (taken || dead) && !r.old:
			s.breach("silent double: %s %s is done, and handed back (%v) or buried (%v)", r.key, r.job, taken, dead)
		case taken && dead && !r.old && times[r.job] == 1:
			// Of a job that ran again meanwhile, and crashed again, a repeated hand-back may be one too many.
			s.breach("%s %s is handed back and buried", r.key, r.job)
		case !done && !maybe && !taken && !dead && !r.excused:
			s.breach("lost: %s %s, answer of Done %v", r.key, r.job, r.err)
		}
	}
	if s.list == nil {
		return
	}
	at := map[string]int{}
	for _, key := range []string{"jobs", newKeyspace(s.w.ns, "").arrived("jobs")} {
		for _, e := range s.w.queued(key) {
			at[e]++
		}
	}
	for name, k := range s.tokens {
		switch n := k.done + at[name]; {
		case n > 1:
			s.breach("double: %s is done %d times and in the list %d times", name, k.done, at[name])
		case n == 0 && k.certain && !k.maybe:
			s.breach("lost: %s is neither done nor in the list", name)
		}
	}
}

// simNet is what lies between one worker and Redis.
type simNet struct {
	w      *world
	copies *atomic.Int64

	mu    sync.Mutex
	dead  bool
	until time.Time // of a pause
	hangs bool      // in a pause calls hang; else they fail
	late  bool      // and what hung is executed when it is over, though its caller has left
	rules []*simRule
}

type simMode int

const (
	simBefore  simMode = iota // it never reaches Redis
	simLost                   // executed, but the answer is lost
	simTwice                  // executed twice; the second answer counts
	simLate                   // executed; a copy of it arrives later
	simDelayed                // its caller is told that it failed; it is executed later
	simSlow                   // it takes a while
	simModes
)

func (m simMode) String() string {
	return [...]string{"before", "lost", "twice", "late copy", "delayed", "slow"}[m]
}

type simRule struct {
	on    string
	mode  simMode
	times int
	delay time.Duration
}

func (n *simNet) add(r *simRule) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.rules = append(n.rules, r)
}

func (n *simNet) pause(d time.Duration, hangs, late bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.until, n.hangs, n.late = time.Now().Add(d), hangs, late
}

func (n *simNet) heal() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.until, n.rules = time.Time{}, nil
}

func (n *simNet) die() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.dead = true
}

func (n *simNet) isDead() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.dead
}

// fate is what happens to a call now.
func (n *simNet) fate(names []string) (dead bool, pause time.Duration, hangs, late bool, rule *simRule) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.dead {
		return true, 0, false, false, nil
	}
	if left := time.Until(n.until); left > 0 {
		return false, left, n.hangs, n.late, nil
	}
	for _, r := range n.rules {
		if r.times > 0 && (r.on == "" || slices.Contains(names, r.on)) {
			r.times--
			return false, 0, false, false, r
		}
	}
	return false, 0, false, false, nil
}

func (n *simNet) strike(ctx context.Context, cmds []redis.Cmder, next func() error) error {
	names := make([]string, len(cmds))
	for i, c := range cmds {
		names[i] = nameOf(c)
	}
	dead, pause, hangs, late, rule := n.fate(names)
	switch {
	case dead:
		return errInjected
	case pause > 0 && !hangs:
		return errInjected
	case pause > 0:
		timer := time.NewTimer(pause)
		defer timer.Stop()
		select {
		case <-timer.C:
			return next()
		case <-ctx.Done():
			if late {
				n.later(pause, copyOf(cmds))
			}
			return ctx.Err()
		}
	case rule == nil:
		return next()
	}
	switch rule.mode {
	case simLost:
		_ = next()
		return errInjected
	case simTwice:
		_ = next()
		return next()
	case simLate:
		args := copyOf(cmds)
		err := next()
		n.later(rule.delay, args)
		return err
	case simDelayed:
		n.later(rule.delay, copyOf(cmds))
		return errInjected
	case simSlow:
		if !sleep(ctx, rule.delay) {
			return ctx.Err()
		}
		return next()
	}
	return errInjected
}

// copyOf keeps what a call says: its buffers are used again for the next one.
func copyOf(cmds []redis.Cmder) [][]any {
	all := make([][]any, len(cmds))
	for i, c := range cmds {
		all[i] = slices.Clone(c.Args())
		for j, a := range all[i] {
			if b, ok := a.([]byte); ok {
				all[i][j] = slices.Clone(b)
			}
		}
	}
	return all
}

// later executes a copy, as a network does that held it up. It needs no worker that lives.
func (n *simNet) later(d time.Duration, calls [][]any) {
	n.copies.Add(1)
	go func() {
		defer n.copies.Add(-1)
		time.Sleep(d)
		_, _ = n.w.raw.Pipelined(bg, func(p redis.Pipeliner) error {
			for _, args := range calls {
				p.Do(bg, args...)
			}
			return nil
		})
	}()
}

func (n *simNet) DialHook(next redis.DialHook) redis.DialHook { return next }

func (n *simNet) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		err := n.strike(ctx, []redis.Cmder{cmd}, func() error { return next(ctx, cmd) })
		if err != nil && cmd.Err() == nil || errors.Is(err, errInjected) {
			cmd.SetErr(err)
		}
		return err
	}
}

func (n *simNet) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		err := n.strike(ctx, cmds, func() error { return next(ctx, cmds) })
		if errors.Is(err, errInjected) || ctx.Err() != nil && err != nil {
			for _, c := range cmds {
				c.SetErr(err)
			}
		}
		return err
	}
}
