package recovery

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

// Waiting for a job without polling. A script can't block, and what a blocking pop answers would be in nobody's records. So a worker that
// finds its lists empty has Redis move the next element (BLMOVE) into the list's arrivals, which are part of the queue: whoever fetches next, this
// worker or another, finds it there and puts it first in line before anything else is taken. The move only wakes somebody; what it answers
// does not matter. If the worker is dead by then (a connection may outlive its process), the next sweep puts the element back.
//
// There is at most one BLMOVE for each list, whatever the number of Fetch calls, on connections of our own: closing them is the only way to end it.
type waits struct {
	r *Recoverer

	mu     sync.Mutex // guards what follows
	moves  map[string]*move
	waited []*ListQueue          // what this worker has waited for, and has in the registry of queues
	client redis.UniversalClient // made for the first wait
	own    bool                  // client is ours to close
	closed bool
}

// move is a BLMOVE under way, and who waits for it.
type move struct {
	queue   *ListQueue
	waiting []*waiting
}

// waiting is one Fetch that waits, for one or more lists.
type waiting struct {
	woken chan error // of capacity 1; nil: look again
}

// moveTimeout bounds one BLMOVE. It is what a connection that outlives its worker can do at most; longer costs fewer commands while idle.
func (r *Recoverer) moveTimeout() time.Duration { return max(r.cfg.OrphanThreshold, 10*time.Second) }

func newWaits(r *Recoverer) *waits { return &waits{r: r, moves: make(map[string]*move)} }

// wait blocks until there may be something in one of the lists. It returns early as Fetch does.
func (w *waits) wait(ctx context.Context, inc *incarnation, lists []*ListQueue) error {
	me := &waiting{woken: make(chan error, 1)}
	if err := w.enter(ctx, me, lists); err != nil {
		return err
	}
	var err error
	select {
	case err = <-me.woken:
		w.leave(me)
		if err != nil && w.r.serving.Err() != nil { // which is why
			err = fmt.Errorf("%w: state is %v", ErrNotRunning, w.r.State())
		}
		return err
	case <-ctx.Done():
		err = ctx.Err()
	case <-w.r.serving.Done():
		err = fmt.Errorf("%w: state is %v", ErrNotRunning, w.r.State())
	case <-inc.ended:
		err = fmt.Errorf("%w: this worker was declared dead while it waited, and took nothing: call Fetch again", ErrLost)
	}
	w.leave(me)
	select {
	case <-me.woken: // in the same moment, and nobody else knows
		w.putBackSoon(lists)
	default:
	}
	return err
}

// enter makes sure that a move is under way for each list.
func (w *waits) enter(ctx context.Context, me *waiting, lists []*ListQueue) error {
	if err := w.register(ctx, lists); err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return fmt.Errorf("%w: state is %v", ErrNotRunning, w.r.State())
	}
	if w.client == nil {
		w.client, w.own = dedicated(w.r.rdb)
		w.r.group.spawn(func() { <-w.r.life.Done(); w.close() }) // not by AfterFunc: whoever waits for the group waits for what close begins
	}
	for _, q := range lists {
		m := w.moves[q.key]
		if m == nil {
			m = &move{queue: q}
			w.moves[q.key] = m
			w.start(m)
		}
		m.waiting = append(m.waiting, me)
	}
	return nil
}

// start sets a move going. Stop waits for those that close can end.
func (w *waits) start(m *move) {
	if w.own {
		w.r.group.spawn(func() { w.run(m) })
	} else {
		w.r.detach(func() { w.run(m) })
	}
}

// leave takes a Fetch out of all lines.
func (w *waits) leave(me *waiting) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, m := range w.moves {
		m.waiting = slices.DeleteFunc(m.waiting, func(o *waiting) bool { return o == me })
	}
}

// run moves elements of one list as long as anybody waits.
func (w *waits) run(m *move) {
	q := m.queue
	for {
		err := w.client.BLMove(w.r.hard, q.key, w.r.keys.arrived(q.key), q.side, left, w.r.moveTimeout()).Err()
		arrived := err == nil
		if errors.Is(err, redis.Nil) {
			err = nil // nothing came
		}
		if err != nil {
			err = fmt.Errorf("wait for list %q: %w", q.key, err)
		}
		goOn, unseen := w.tell(m, arrived, err)
		if unseen {
			w.putBackSoon([]*ListQueue{q})
		}
		if !goOn {
			return
		}
	}
}

// tell wakes one of those who wait, or all if there was an error. It reports whether the move is to go on, and whether something arrived that
// nobody was there for.
func (w *waits) tell(m *move, arrived bool, err error) (goOn, unseen bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	unseen = arrived
	for len(m.waiting) > 0 && (err != nil || unseen) {
		select {
		case m.waiting[0].woken <- err:
			unseen = false
		default: // another list has woken it
		}
		m.waiting = m.waiting[1:]
	}
	if goOn = len(m.waiting) > 0 && err == nil && !w.closed; !goOn {
		delete(w.moves, m.queue.key)
	}
	return goOn, unseen
}

// close ends every move under way.
func (w *waits) close() {
	w.mu.Lock()
	if w.closed || w.client == nil {
		w.closed = true
		w.mu.Unlock()
		return
	}
	client, own := w.client, w.own
	lists := make([]*ListQueue, 0, len(w.moves))
	for _, m := range w.moves {
		lists = append(lists, m.queue)
	}
	w.closed = true
	w.mu.Unlock()
	if own {
		client.Close()
	}
	w.putBackSoon(lists) // one may have been made whose answer nobody has read
}

// putBackSoon is for arrivals that this worker will not take.
func (w *waits) putBackSoon(lists []*ListQueue) {
	w.r.group.spawn(func() {
		ctx, cancel := w.r.limit(context.Background()) // also while Stop ends: nobody else may come to do it
		defer cancel()
		w.putBack(ctx, lists)
		// Redis may notice a moment later that a connection was closed, and until then move one more element for it.
		if w.r.State() != StateRunning && sleep(ctx, 50*time.Millisecond) {
			w.putBack(ctx, lists)
		}
	})
}

func (w *waits) putBack(ctx context.Context, lists []*ListQueue) {
	for _, q := range lists {
		if err := putArrivalsBack(ctx, w.r.rdb, w.r.keys.arrived(q.key), q.key, q.side); err != nil {
			w.r.log.Warn("recovery: could not put an arrival back, the next sweep or fetch will", "worker", w.r.WorkerID(), "queue", q.key, "err", err)
		}
	}
}

// putArrivalsBack makes what has arrived first in line again, in its order.
func putArrivalsBack(ctx context.Context, rdb redis.Scripter, arrived, queue, side string) error {
	if err := restoreScript.Run(ctx, rdb, []string{arrived, queue}, side).Err(); err != nil {
		return fmt.Errorf("put arrivals of %q back: %w", queue, err)
	}
	return nil
}

// The registry of queues tells a sweep whose arrivals to look at. A member is the consumers' end, a colon, and the list's key. Its score is 0
// when somebody waits for the list, as every beat says again, and becomes Redis' time when a sweep comes by.

func queueEntry(q *ListQueue) string { return q.side + ":" + q.key }

// register enters lists, as every beat does from then on.
func (w *waits) register(ctx context.Context, lists []*ListQueue) error {
	r := w.r
	var fresh []*ListQueue
	known := w.lists()
	for _, q := range lists {
		if !slices.ContainsFunc(known, func(k *ListQueue) bool { return k.key == q.key }) {
			fresh = append(fresh, q)
		}
	}
	if len(fresh) == 0 {
		return nil
	}
	_, err := bounded(ctx, r.group, r.tm.call, func(ctx context.Context) (int64, error) {
		return r.rdb.ZAdd(ctx, r.keys.queues(), queueEntries(fresh)...).Result()
	})
	if err != nil {
		return fmt.Errorf("register queues %s: %w", queueNames(fresh), err)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.waited = append(w.waited, fresh...) // twice, if two come at once: no harm
	return nil
}

// lists are those that this worker has waited for.
func (w *waits) lists() []*ListQueue {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.waited)
}

// queueEntries are what says that somebody waits for lists.
func queueEntries(lists []*ListQueue) []redis.Z {
	all := make([]redis.Z, len(lists))
	for i, q := range lists {
		all[i] = redis.Z{Score: 0, Member: queueEntry(q)}
	}
	return all
}

// queueNames are for people.
func queueNames(lists []*ListQueue) string {
	names := make([]string, len(lists))
	for i, q := range lists {
		names[i] = q.key
	}
	return strings.Join(names, ", ")
}

// arrivals puts back what woke a worker that did not take it, and forgets queues for which nobody has waited for long. It is part of every
// pass.
func (p *pass) arrivals() {
	r := p.r
	ctx, cancel := r.limit(p.ctx)
	defer cancel()
	queues, err := r.rdb.ZRangeWithScores(ctx, r.keys.queues(), 0, -1).Result()
	if err != nil {
		p.fail(fmt.Errorf("read the registry of queues: %w", err))
		return
	}
	if len(queues) == 0 {
		return
	}
	var clock *redis.TimeCmd
	lengths := make([]*redis.IntCmd, len(queues))
	_, _ = r.rdb.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		clock = pipe.Time(ctx)
		for i, z := range queues {
			_, key, _ := strings.Cut(z.Member.(string), ":")
			lengths[i] = pipe.LLen(ctx, r.keys.arrived(key))
		}
		return nil
	}) // each command has its own error
	now, err := clock.Result()
	if err != nil {
		p.fail(fmt.Errorf("look at arrivals: %w", err))
		return
	}
	var seen []redis.Z
	for i, z := range queues {
		side, key, _ := strings.Cut(z.Member.(string), ":")
		n, err := lengths[i].Result()
		switch {
		case err != nil:
			err = fmt.Errorf("look at arrivals of %q: %w", key, err)
		case n > 0:
			err = putArrivalsBack(ctx, r.rdb, r.keys.arrived(key), key, side)
		case z.Score == 0:
			seen = append(seen, redis.Z{Score: float64(now.UnixMilli()), Member: z.Member})
		case z.Score < float64(now.Add(-r.tm.tombstone).UnixMilli()):
			err = r.rdb.ZRem(ctx, r.keys.queues(), z.Member).Err()
		}
		if err != nil {
			p.fail(err)
		}
	}
	if len(seen) > 0 {
		if err := r.rdb.ZAddXX(ctx, r.keys.queues(), seen...).Err(); err != nil {
			p.fail(fmt.Errorf("renew the registry of queues: %w", err))
		}
	}
}
