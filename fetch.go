package recovery

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"sync/atomic"
	"time"
)

// Fetch takes up to max jobs from src and tracks them, in one step: there is no moment at which a job is in neither its list nor the records.
// It returns at least one, and blocks as long as there is none, on one connection for each list and without polling. It returns early with
// ctx's error; with ErrNotRunning when the Recoverer drains or stops; with ErrLost when this worker is declared dead while it waits, and
// then nothing was taken and it may be called again; and with ErrAtCapacity when Config.MaxInflight jobs are in flight. Other errors: Redis
// could not be asked, or a key holds something else than a list.
//
// ctx bounds the waiting only: the leases' contexts keep its values, but not its end. An element that can't be decoded goes to the dead
// letters. On a Redis Cluster the lists must have Config.HashTag as their tag.
func (r *Recoverer) Fetch(ctx context.Context, src Source, max int) ([]*Lease, error) {
	lists, err := r.lists(src)
	if err == nil && max < 1 {
		err = fmt.Errorf("%w: max is %d, at least 1", ErrInvalidConfig, max)
	}
	var leases []*Lease
	if err == nil {
		leases, err = r.fetch(ctx, lists, max)
	}
	if err != nil {
		return nil, fmt.Errorf("fetch: %w", err)
	}
	for _, l := range leases {
		l.arm()
	}
	return leases, nil
}

// lists checks a Source and makes its queues known.
func (r *Recoverer) lists(src Source) ([]*ListQueue, error) {
	if isNil(src) || len(src.lists()) == 0 {
		return nil, fmt.Errorf("%w: src has no queue", ErrInvalidConfig)
	}
	lists := src.lists()
	for _, q := range lists {
		if err := q.problem(); err != nil {
			return nil, fmt.Errorf("%w: %w", ErrInvalidConfig, err)
		}
		if !r.together(q.key) {
			tag := cmp.Or(r.cfg.HashTag, "tag")
			return nil, fmt.Errorf("%w: list %q is not in the workers' slot, HashTag is %q: give it a hash tag, as in %q, and set Config.HashTag to %q",
				ErrInvalidConfig, q.key, r.cfg.HashTag, "{"+tag+"}:"+q.key, tag)
		}
		if known, ok := r.known.LoadOrStore(q.key, q); ok && !known.(*ListQueue).like(q) {
			return nil, fmt.Errorf("%w: list %q is in use with another format, or from its other end", ErrInvalidConfig, q.key)
		}
		q.rdb.CompareAndSwap(nil, &r.rdb)
	}
	return lists, nil
}

// knownList is the queue with that key, if this worker hands back to it or fetches from it.
func (r *Recoverer) knownList(key string) *ListQueue {
	if q, ok := r.known.Load(key); ok {
		return q.(*ListQueue)
	}
	return nil
}

func (r *Recoverer) fetch(ctx context.Context, lists []*ListQueue, most int) ([]*Lease, error) {
	parent := context.WithoutCancel(ctx)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(r.serving, cancel)()
	for woken := false; ; woken = true {
		leases, err := r.fetchLive(ctx, parent, lists, most)
		if err != nil {
			if woken {
				r.waits.putBackSoon(lists) // it woke us for nothing, and nobody else knows
			}
			if r.serving.Err() != nil { // which is why
				err = fmt.Errorf("%w: state is %v", ErrNotRunning, r.State())
			}
			return nil, err
		}
		if leases = r.readable(leases); len(leases) > 0 {
			r.counts.tracked.Add(uint64(len(leases)))
			return leases, nil
		}
		if err := r.waits.wait(ctx, r.current.Load(), lists); err != nil {
			return nil, err
		}
	}
}

// reserve enters up to n leases, as begin does, and answers how many there was room for.
func (r *Recoverer) reserve(n int) (int, error) {
	r.mu.Lock()
	room := n
	if limit := r.cfg.MaxInflight; limit > 0 {
		room = max(1, limit-r.inflight) // at least one, to be refused
	}
	r.mu.Unlock()
	n = min(n, room, fetchMost)
	return n, r.begin(n)
}

// fetchMost is how many jobs one script takes, so that it does not hold Redis up for long.
const fetchMost = 256

// fetchLive fetches under the current incarnation, and once more under the next if that one turns out to be over.
func (r *Recoverer) fetchLive(ctx, parent context.Context, lists []*ListQueue, most int) ([]*Lease, error) {
	if s := r.State(); s != StateRunning {
		return nil, fmt.Errorf("%w: state is %v", ErrNotRunning, s)
	}
	for attempt := 1; ; attempt++ {
		inc := r.current.Load()
		leases, err := r.fetchIn(ctx, parent, inc, lists, most)
		if !isNotLive(err) {
			return leases, err
		}
		if attempt > 1 {
			return nil, fmt.Errorf("%w: this worker was declared dead again before it could take anything: call Fetch again", ErrLost)
		}
		if err := r.awaitRejoin(ctx, inc, err); err != nil {
			return nil, err
		}
	}
}

// fetches are the calls of fetch.lua that one incarnation makes: numbered, and one at a time. A call whose outcome is not known is asked for
// again before the next one, by its number; after that no late copy of it can take anything.
type fetches struct {
	turn   chan struct{}             // of capacity 1: held by the call under way
	number uint64                    // of the last call; owned by whoever holds turn
	owed   atomic.Pointer[fetchCall] // under way, or its outcome is not known; written by whoever holds turn
	acked  atomic.Uint64             // number of the last call that was answered
	rolled atomic.Bool               // Redis has forgotten calls that it had answered, and may get a late copy of one
	gaps   [][2]uint64               // the numbers of such calls, (from, to]; guarded by incarnation.mu
}

// fetchCall is one call of fetch.lua.
type fetchCall struct {
	number, base uint64
	most         int
	lists        []*ListQueue
	ctx          context.Context // the leases' parent
}

// names are for people.
func (c *fetchCall) names() string { return queueNames(c.lists) }

// undone reports that Redis has forgotten calls that it had answered: a failover lost them.
func (i *incarnation) undone(last int64, acked uint64) bool {
	if gap := [2]uint64{uint64(last), acked}; gap[0] < gap[1] {
		i.mu.Lock()
		defer i.mu.Unlock()
		if !slices.Contains(i.fetches.gaps, gap) {
			i.fetches.gaps = append(i.fetches.gaps, gap)
		}
		i.fetches.rolled.Store(true)
	}
	return i.fetches.rolled.Load()
}

// wasUndone reports whether a call is one of those.
func (i *incarnation) wasUndone(number uint64) bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	return slices.ContainsFunc(i.fetches.gaps, func(g [2]uint64) bool { return number > g[0] && number <= g[1] })
}

// next is a new call. It is owed until it is answered.
func (i *incarnation) next(ctx context.Context, lists []*ListQueue, most int) *fetchCall {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.fetches.number++
	c := &fetchCall{number: i.fetches.number, base: i.lastID, most: most, lists: lists, ctx: ctx}
	i.lastID += uint64(most)
	i.tally.sent += int64(most)
	i.fetches.owed.Store(c)
	return c
}

func (r *Recoverer) fetchIn(ctx, parent context.Context, inc *incarnation, lists []*ListQueue, most int) (leases []*Lease, err error) {
	if inc.closed() {
		return nil, &notLiveError{}
	}
	err = r.onTurn(ctx, inc, func(ctx context.Context, inc *incarnation) error {
		if err := r.settleFetch(ctx, inc); err != nil {
			return err
		}
		n, err := r.reserve(most) // on our turn, so that room for one call is not refused because of another
		if err != nil {
			return err
		}
		leases, err = r.ask(ctx, inc, inc.next(parent, lists, n), n)
		r.ended(n - len(leases))
		return err
	})
	if inc.fetches.owed.Load() != nil {
		r.heart.kick() // nobody may come again to ask for it
	}
	return leases, err
}

// settleFetch learns what became of a call that was not answered. What it took goes back to the lists. The caller holds the turn.
func (r *Recoverer) settleFetch(ctx context.Context, inc *incarnation) error {
	c := inc.fetches.owed.Load()
	if c == nil {
		return nil
	}
	leases, err := r.ask(ctx, inc, c, 0)
	if err != nil {
		return fmt.Errorf("settle an earlier fetch: %w", err)
	}
	if len(leases) > 0 {
		r.group.spawn(func() { r.unfetch(context.WithoutCancel(ctx), leases) })
	}
	return nil
}

// settleFetchSoon is for the heartbeat, which waits for nobody.
func (r *Recoverer) settleFetchSoon(inc *incarnation) {
	c := inc.fetches.owed.Load()
	if c == nil {
		return
	}
	r.group.spawn(func() {
		ctx, cancel := r.limit(r.hard)
		defer cancel()
		if err := r.onTurn(ctx, inc, r.settleFetch); err != nil {
			r.log.Warn("recovery: could not learn what a fetch took, will try again", "worker", inc.id, "queues", c.names(), "err", err)
		}
	})
}

// onTurn calls f when no other call is under way.
func (r *Recoverer) onTurn(ctx context.Context, inc *incarnation, f func(context.Context, *incarnation) error) error {
	select {
	case inc.fetches.turn <- struct{}{}:
		defer func() { <-inc.fetches.turn }()
	case <-ctx.Done():
		return ctx.Err()
	case <-inc.ended:
		return &notLiveError{}
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	return f(ctx, inc)
}

// voidFetches makes sure that no late copy of a call can be executed, when Redis has forgotten that it was. Only then is it certain that the jobs
// of such a call are in their lists.
func (r *Recoverer) voidFetches(ctx context.Context, inc *incarnation) error {
	if !inc.fetches.rolled.Load() {
		return nil
	}
	ctx, cancel := r.limit(ctx)
	defer cancel()
	return r.onTurn(ctx, inc, func(ctx context.Context, inc *incarnation) error {
		if err := r.settleFetch(ctx, inc); err != nil {
			return err
		}
		if _, err := r.ask(ctx, inc, inc.next(ctx, nil, 0), 0); err != nil {
			return err
		}
		inc.fetches.rolled.Store(false)
		return nil
	})
}

// ask runs fetch.lua. The leases that it answers are this worker's.
func (r *Recoverer) ask(ctx context.Context, inc *incarnation, c *fetchCall, most int) ([]*Lease, error) {
	keys := []string{inc.keys.session, inc.keys.inflight, inc.keys.jobs}
	args := []any{c.number, c.base, most, batchBytes}
	for _, q := range c.lists {
		keys = append(keys, r.keys.arrived(q.key), q.key)
		args = append(args, q.side, elementHeader(q.key, q.side))
	}
	a, err := bounded(ctx, r.group, r.tm.call, func(ctx context.Context) (*replies, error) {
		cmd, err := r.runReplicated(ctx, fetchScript, keys, args...)
		if err != nil {
			return nil, err
		}
		return answerOf(cmd)
	})
	if err != nil && len(c.lists) > 0 {
		err = fmt.Errorf("take from %s: %w", c.names(), err)
	}
	if err != nil {
		return nil, err
	}
	state, start, last := a.int(), a.int(), a.int()
	var leases []*Lease
	for n := c.base + 1; a.more(); n++ {
		record := a.bytes()
		if record == nil { // taken by this call, and gone since
			continue
		}
		l := &Lease{r: r, parent: c.ctx, born: inc.id, name: strconv.FormatUint(n, 10), record: record, start: start, fetch: c.number}
		l.call(l.name)
		l.args[1] = l.record
		l.job, _, _, l.unreadable = r.decodeElement(l.record) // before anybody else can see the lease
		leases = append(leases, l)
	}
	if a.err != nil {
		return nil, a.err
	}
	defer inc.fetches.owed.Store(nil) // after they are entered: an audit must not see them in between
	if state != sessionLive {
		return nil, &notLiveError{absent: state == sessionAbsent}
	}
	if inc.undone(last, inc.fetches.acked.Load()) {
		r.heart.kick() // the audit tells who has lost what
	}
	inc.fetches.acked.Store(max(c.number, inc.fetches.acked.Load()))
	if most == 0 { // nobody has made room for them
		r.mu.Lock()
		r.inflight += len(leases)
		r.mu.Unlock()
	}
	if err := inc.receive(leases, c.most); err != nil {
		if most == 0 {
			r.ended(len(leases))
		}
		return nil, err // they are with the peers
	}
	return leases, nil
}

// receive enters leases that fetch.lua has recorded, of up to most that it might have.
func (i *incarnation) receive(leases []*Lease, most int) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.tally.sent -= int64(most - len(leases))
	i.tally.acked += int64(len(leases))
	if i.over != nil {
		return i.over
	}
	for _, l := range leases {
		l.home, l.state = i, leaseActive
		i.leases[l.member] = l
	}
	return nil
}

// isReserved reports whether member may be a lease of a call whose outcome is not known. It is nobody's stray.
func (i *incarnation) isReserved(member string) bool {
	c := i.fetches.owed.Load()
	if c == nil {
		return false
	}
	n, err := strconv.ParseUint(member, 10, 64)
	return err == nil && n > c.base && n <= c.base+uint64(c.most)
}

// readable reads what was fetched, and puts what can't be read into the dead letters.
func (r *Recoverer) readable(leases []*Lease) []*Lease {
	return slices.DeleteFunc(leases, func(l *Lease) bool {
		if l.unreadable == nil {
			return false
		}
		r.log.Error("recovery: fetched what is no job", "worker", r.WorkerID(), "lease", l.ID(), "queue", l.job.Queue, "err", l.unreadable)
		if g, ok := r.giveUp(l, Released, false); ok {
			r.group.spawn(func() {
				if _, err := r.handOver(r.hard, g); err != nil {
					r.log.Error("recovery: could not bury what is no job, will try again", "worker", l.home.id, "lease", l.ID(), "err", err)
				}
			})
		}
		return true
	})
}

// awaitRejoin blocks until the incarnation that err speaks of is replaced.
func (r *Recoverer) awaitRejoin(ctx context.Context, inc *incarnation, err error) error {
	r.heart.kick()
	overdue := time.NewTimer(r.tm.call)
	defer overdue.Stop()
	select {
	case <-inc.replaced:
		return nil
	case <-overdue.C:
		return fmt.Errorf("the worker could not rejoin within %v: %w", r.tm.call, err)
	case <-ctx.Done():
		return fmt.Errorf("%w while the worker rejoins: %w", ctx.Err(), err)
	case <-r.life.Done():
		return ErrNotRunning
	}
}
