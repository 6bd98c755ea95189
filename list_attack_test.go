package recovery

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// F: a failover undoes a Fetch, and the busy worker fetches again before its next beat: the number in the session is high again, so that
// nobody notices. The undone job is tracked again although it is in its list.
func TestList_failoverThenFetch(t *testing.T) {
	inBubble(t, func(w *world) {
		q := NewListQueue("jobs")
		m := w.join("a", Config{}, into(q))
		w.push("jobs", "a", "b")
		kept, err := m.Fetch(bg, q, 1)
		require.NoError(t, err)
		lost, err := m.Fetch(bg, q, 1)
		require.NoError(t, err)
		k := w.keys(m.WorkerID()) // as the replica has it: the first Fetch, not the second
		require.NoError(t, w.raw.HSet(bg, k.session, "fetch", 1, "fetched", 1).Err())
		require.NoError(t, w.raw.ZRem(bg, k.inflight, lost[0].member).Err())
		require.NoError(t, w.raw.HDel(bg, k.jobs, lost[0].member).Err())
		w.push("jobs", "c")
		next, err := m.Fetch(bg, q, 1) // the worker is busy
		require.NoError(t, err)
		require.NoError(t, w.raw.RPush(bg, "jobs", "b").Err()) // (b is in its list again)
		time.Sleep(30 * time.Second)
		assert.ErrorIs(t, context.Cause(lost[0].Context()), ErrLost, "the holder of b is told")
		assert.ElementsMatch(t, []string{kept[0].member, next[0].member}, w.inflight(m.WorkerID()), "and b is not tracked again")
	})
}

// M: W:jobs has a wrong type (damage that the library handles everywhere else): fetch.lua pops, then HSET ends the script. The element is gone.
func TestList_wrongTypeLosesElement(t *testing.T) {
	bothWays(t, func(t *testing.T, w *world) {
		q := NewListQueue("jobs:" + w.ns)
		cfg := Config{}
		m := w.join("a", cfg, into(q))
		w.push(q.key, "one", "two")
		require.NoError(t, w.raw.Set(bg, w.keys(m.WorkerID()).jobs, "no hash", 0).Err())
		_, err := m.Fetch(bg, q, 2)
		t.Log(err)
		assert.Equal(t, []string{"one", "two"}, w.queued(q.key), "nothing is lost")
	})
}

func TestList_wrongTypeInflight(t *testing.T) {
	inBubble(t, func(w *world) {
		q := NewListQueue("jobs")
		m := w.join("a", Config{}, into(q))
		w.push(q.key, "one", "two")
		require.NoError(t, w.raw.Set(bg, w.keys(m.WorkerID()).inflight, "no zset", 0).Err())
		_, err := m.Fetch(bg, q, 2)
		t.Log(err)
		time.Sleep(3 * time.Minute)
		assert.ElementsMatch(t, []string{"one", "two"}, w.queued(q.key), "nothing is lost")
	})
}

// Z: with HashTag and the list of the README, the arrivals' key reads as a worker's: Doctor registers it, a sweep puts it aside as damaged.
func TestList_doctorTakesArrivals(t *testing.T) {
	inBubble(t, func(w *world) {
		q := NewListQueue("{mail}:jobs")
		m := w.join("a", Config{HashTag: "mail"}, into(q))
		require.NoError(t, w.raw.LPush(bg, m.keys.arrived(q.key), "job").Err()) // one is on its way to a waiting Fetch
		report, err := NewInspector(w.raw, w.ns, InspectHashTag("mail")).Doctor(bg)
		require.NoError(t, err)
		assert.Empty(t, report.Hidden)
		time.Sleep(time.Minute)
		leases, err := m.Fetch(within(t, time.Second), q, 1)
		assert.NoError(t, err)
		assert.Equal(t, []string{"job"}, payloads(leases))
		t.Log(w.raw.Keys(bg, "*").Val())
	})
}

func within(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(bg, d)
	context.AfterFunc(ctx, cancel)
	return ctx
}

// Woken, but by then at capacity: Fetch returns, the arrival stays where no idle peer can see it.
func TestList_wokenAtCapacity(t *testing.T) {
	inBubble(t, func(w *world) {
		q := NewListQueue("jobs")
		a, b := w.join("a", Config{MaxInflight: 1}, into(q)), w.join("b", Config{}, into(q))
		ended := make(chan error, 1)
		go func() { _, err := a.Fetch(bg, q, 1); ended <- err }()
		synctest.Wait()
		got := make(chan []*Lease, 1)
		held := w.track(a, "held")
		for woken := false; !woken; {
			go func() { l, _ := b.Fetch(bg, q, 1); got <- l }()
			time.Sleep(10100 * time.Millisecond)
			for sweeps := a.Stats().Sweeps + b.Stats().Sweeps; a.Stats().Sweeps+b.Stats().Sweeps == sweeps; {
				time.Sleep(10 * time.Millisecond) // not right before a sweep
			}
			began := time.Now()
			w.push("jobs", "x")
			synctest.Wait()
			select {
			case err := <-ended: // it was a that was woken
				woken = true
				assert.ErrorIs(t, err, ErrAtCapacity)
			default: // b; miniredis wakes anybody
			}
			doneWith(t, <-got)
			assert.Less(t, time.Since(began), 500*time.Millisecond, "b is idle and waits for it")
		}
		doneWith(t, held)
	})
}

// The same, and then the worker stops: the job is in a list that nobody but this library knows.
func TestList_stopStrandsArrival(t *testing.T) {
	inBubble(t, func(w *world) {
		q := NewListQueue("jobs")
		a := w.join("a", Config{MaxInflight: 1}, into(q))
		ended := make(chan error, 1)
		go func() { _, err := a.Fetch(bg, q, 1); ended <- err }()
		synctest.Wait()
		held := w.track(a, "held")
		w.push("jobs", "x")
		assert.ErrorIs(t, <-ended, ErrAtCapacity)
		doneWith(t, held)
		require.NoError(t, a.Stop(bg))
		time.Sleep(time.Hour)
		assert.Equal(t, []string{"x"}, w.queued("jobs"), "a clean Stop leaves the job where any consumer finds it")
	})
}

// Woken, and Redis does not answer the Fetch that follows.
func TestList_wokenButFetchFails(t *testing.T) {
	inBubble(t, func(w *world) {
		w.loadScripts()
		q := NewListQueue("jobs")
		a, b := w.join("a", Config{}, into(q)), w.join("b", Config{}, into(q))
		ended := make(chan error, 1)
		go func() { _, err := a.Fetch(bg, q, 1); ended <- err }()
		synctest.Wait()
		got := make(chan []*Lease, 1)
		go func() { l, _ := b.Fetch(bg, q, 1); got <- l }()
		synctest.Wait()
		a.faults.add(&fault{mode: failBefore, on: "fetch"})
		began := time.Now()
		w.push("jobs", "x")
		doneWith(t, <-got) // whichever of them was woken first
		assert.Less(t, time.Since(began), 500*time.Millisecond, "b is idle and waits for it")
		a.Quiet()
		assert.Error(t, <-ended)
	})
}

// An arrival that nobody was there for, and Stop ends before it is put back. Nobody is told.
func TestList_stopDuringPutBack(t *testing.T) {
	inBubble(t, func(w *world) {
		q := NewListQueue("jobs")
		a := w.join("a", Config{}, into(q))
		_, err := a.Fetch(within(t, time.Second), q, 1)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		a.faults.add(&fault{mode: slow, on: "lmove", delay: 100 * time.Millisecond, times: -1})
		w.push("jobs", "x") // the move is still under way
		synctest.Wait()
		stopped := a.Stop(bg)
		time.Sleep(time.Hour)
		if stopped == nil {
			assert.Equal(t, []string{"x"}, w.queued("jobs"))
		}
	})
}

// A zombie puts back what it had not begun, while a sweeper with an Enqueuer of its own has claimed it.
func TestList_unfetchOfAClaimedLease(t *testing.T) {
	inBubble(t, func(w *world) {
		q := NewListQueue("jobs")
		zombie := w.join("zombie", Config{})
		other := w.join("other", Config{})
		w.push("jobs", "x")
		leases, err := zombie.Fetch(bg, q, 1)
		require.NoError(t, err)
		other.enq.set(func(context.Context, Orphan) error { time.Sleep(time.Second); return nil })
		zombie.endSweeps()                                                 // or it would recover itself
		zombie.faults.add(&fault{mode: failBefore, on: "beat", times: -1}) // it is silent for a while
		for len(other.enq.called()) == 0 {
			time.Sleep(100 * time.Millisecond)
		}
		zombie.unfetch(bg, leases) // Work ends
		time.Sleep(2 * time.Second)
		assert.Equal(t, 1, len(other.enq.accepted())+len(w.queued("jobs")), "Enqueuer has %d, list has %d", len(other.enq.accepted()), len(w.queued("jobs")))
	})
}

// The same, and the sweeper is about to bury it: ListQueue only.
func TestList_unfetchOfAJobBeingBuried(t *testing.T) {
	inBubble(t, func(w *world) {
		w.loadScripts()
		q := NewListQueue("jobs", ElementFormat(limited{}))
		zombie := w.join("zombie", Config{}, into(q))
		w.push("jobs", "7|x")
		first := w.join("first", Config{}, into(q))
		_, err := first.Fetch(bg, q, 1)
		require.NoError(t, err)
		first.crash()
		time.Sleep(30 * time.Second) // its one recovery
		leases, err := zombie.Fetch(bg, q, 1)
		require.NoError(t, err)
		other := w.join("other", Config{}, into(q))
		other.faults.add(&fault{mode: slow, on: "forget", delay: time.Second, times: -1})
		zombie.faults.add(&fault{mode: failBefore, on: "beat", times: -1})
		zombie.endSweeps()
		for other.faults.count("bury") == 0 {
			time.Sleep(100 * time.Millisecond)
		}
		zombie.unfetch(bg, leases)
		time.Sleep(5 * time.Second)
		letters, err := NewInspector(w.raw, w.ns).DeadLetters(bg, 0, 10)
		require.NoError(t, err)
		assert.Equal(t, 1, len(letters)+len(w.queued("jobs")), "%d letters, %d queued", len(letters), len(w.queued("jobs")))
	})
}

type limited struct{ enveloped }

// PutBack and settleGiveUps of the same worker, whose Enqueuer is its own.
func TestList_unfetchRacesOwnSweep(t *testing.T) {
	inBubble(t, func(w *world) {
		w.loadScripts()
		q := NewListQueue("jobs")
		m := w.join("a", Config{})
		w.push("jobs", "x")
		leases, err := m.Fetch(bg, q, 1)
		require.NoError(t, err)
		m.enq.set(func(context.Context, Orphan) error { time.Sleep(5 * time.Second); return nil })
		m.faults.add(&fault{mode: slow, on: "deliver", delay: 3 * time.Second})
		m.unfetch(bg, leases)
		time.Sleep(time.Minute)
		assert.Equal(t, 1, len(m.enq.accepted())+len(w.queued("jobs")), "Enqueuer has %d, list has %d", len(m.enq.accepted()), len(w.queued("jobs")))
	})
}

// MaxInflight = concurrency, fast handlers: Work sleeps instead of working.
func TestList_workAtCapacityCrawls(t *testing.T) {
	inBubble(t, func(w *world) {
		q := NewListQueue("jobs")
		m := w.join("a", Config{MaxInflight: 4}, into(q))
		for i := range 400 {
			w.push("jobs", fmt.Sprint(i))
		}
		var done atomic.Int64
		ctx, cancel := context.WithCancel(bg)
		began := time.Now()
		ended := working(m, ctx, q, 4, func(context.Context, *Lease) error {
			time.Sleep(time.Millisecond)
			done.Add(1)
			return nil
		})
		for done.Load() < 400 {
			time.Sleep(time.Millisecond)
		}
		assert.Less(t, time.Since(began), time.Second, "400 jobs of 1 ms, 4 at a time, are 100 ms of work")
		cancel()
		<-ended
	})
}

func TestList_workAtCapacitySlowHandlers(t *testing.T) {
	inBubble(t, func(w *world) {
		q := NewListQueue("jobs")
		m := w.join("a", Config{MaxInflight: 4}, into(q))
		for i := range 40 {
			w.push("jobs", fmt.Sprint(i))
		}
		var done atomic.Int64
		ctx, cancel := context.WithCancel(bg)
		began := time.Now()
		ended := working(m, ctx, q, 8, func(context.Context, *Lease) error {
			time.Sleep(7 * time.Second)
			done.Add(1)
			return nil
		})
		for done.Load() < 40 {
			time.Sleep(time.Millisecond)
		}
		assert.Less(t, time.Since(began), 75*time.Second, "40 jobs of 7 s, 4 at a time, are 70 s of work")
		cancel()
		<-ended
	})
}

// Work begins a job that it knows to be lost.
func TestList_workBeginsLostJob(t *testing.T) {
	inBubble(t, func(w *world) {
		q := NewListQueue("jobs")
		m := w.join("a", Config{}, into(q))
		var begunLost atomic.Int64
		var quick atomic.Bool
		quick.Store(true)
		ctx, cancel := context.WithCancel(bg)
		ended := working(m, ctx, q, 1, func(ctx context.Context, l *Lease) error {
			if ctx.Err() != nil {
				begunLost.Add(1)
			}
			if quick.Load() {
				time.Sleep(time.Millisecond)
			} else {
				time.Sleep(time.Minute)
			}
			return nil
		})
		w.push("jobs", "w1", "w2", "w3")
		time.Sleep(time.Second)
		quick.Store(false)
		w.push("jobs", "a", "b")
		time.Sleep(time.Second)
		require.Len(t, w.inflight(m.WorkerID()), 2, "one runs, one was fetched ahead")
		w.fence(m.WorkerID())
		time.Sleep(5 * time.Minute)
		cancel()
		<-ended
		assert.Zero(t, begunLost.Load(), "a handler was called with a context that had ended half a minute before")
	})
}

// mutating is a format that decodes in place.
type mutating struct{ payloadFormat }

func (mutating) Decode(e []byte) (Job, error) {
	copy(e, bytes.ToUpper(e))
	return Job{Payload: e}, nil
}

// A format that works in place must not change what is handed back.
func TestList_mutatingFormat(t *testing.T) {
	inBubble(t, func(w *world) {
		q := NewListQueue("jobs", ElementFormat(mutating{}))
		m := w.join("a", Config{}, into(q))
		w.push("jobs", "a")
		leases, err := m.Fetch(bg, q, 1)
		require.NoError(t, err)
		m.faults.add(&fault{mode: failBefore, on: "take", times: 1})
		m.surrender(leases[0], TimedOut)
		require.NoError(t, w.raw.FlushAll(bg).Err())
		time.Sleep(time.Minute)
		assert.Equal(t, []string{"a"}, w.queued("jobs"))
	})
}

// The format of the queue that Fetch was given is ignored if another one with that key came first.
func TestList_formatIgnored(t *testing.T) {
	inBubble(t, func(w *world) {
		m := w.join("a", Config{}, into(NewListQueue("jobs")))
		w.push("jobs", "7|hello")
		leases, err := m.Fetch(bg, NewListQueue("jobs", ElementFormat(enveloped{})), 1)
		if err == nil {
			assert.Equal(t, "7", leases[0].Job().ID)
		}
	})
}

// The option of the fetched queue is ignored on hand-back: that of the Enqueuer counts.
func TestList_recoveredLastOfAnotherQueue(t *testing.T) {
	inBubble(t, func(w *world) {
		q, low := NewListQueue("jobs"), NewListQueue("low", RecoveredLast())
		doomed, other := w.join("doomed", Config{}, into(q)), w.join("other", Config{}, into(q))
		w.push("low", "old")
		_, err := doomed.Fetch(bg, low, 1)
		require.NoError(t, err)
		_, _ = other.Fetch(within(t, time.Millisecond), low, 1) // it knows the queue
		w.push("low", "waiting")
		doomed.crash()
		time.Sleep(30 * time.Second)
		assert.Equal(t, []string{"waiting", "old"}, w.queued("low"))
	})
}

// More lists than connections.
func TestList_manyLists(t *testing.T) {
	inBubble(t, func(w *world) {
		var qs []*ListQueue
		for i := range 80 {
			qs = append(qs, NewListQueue(fmt.Sprint("jobs", i)))
		}
		m := w.join("a", Config{}, into(qs[0]))
		_, err := m.Fetch(within(t, time.Minute), InOrder(qs...), 1)
		assert.ErrorIs(t, err, context.DeadlineExceeded)
		t.Log(err)
	})
}

// Redis hangs; many Fetch calls; Quiet. They end one after the other.
func TestList_quietWhileRedisHangs(t *testing.T) {
	inBubble(t, func(w *world) {
		w.loadScripts()
		q := NewListQueue("jobs")
		m := w.join("a", Config{}, into(q))
		m.faults.add(&fault{mode: hang, on: "fetch", times: -1})
		var wg sync.WaitGroup
		for range 10 {
			wg.Go(func() { _, _ = m.Fetch(bg, q, 1) })
		}
		time.Sleep(time.Second)
		began := time.Now()
		m.Quiet()
		wg.Wait()
		assert.Less(t, time.Since(began), 15*time.Second)
	})
}

// Ctx ends while an earlier Fetch is being settled.
func TestList_ctxEndsDuringSettle(t *testing.T) {
	inBubble(t, func(w *world) {
		w.loadScripts()
		q := NewListQueue("jobs")
		m := w.join("a", Config{}, into(q))
		w.push("jobs", "a", "b")
		m.faults.add(&fault{mode: loseReply, on: "fetch"})
		m.faults.add(&fault{mode: hang, on: "deliver"})
		m.faults.add(&fault{mode: failBefore, on: "beat"})
		_, err := m.Fetch(bg, q, 1)
		require.Error(t, err)
		began := time.Now()
		_, err = m.Fetch(within(t, time.Second), q, 1)
		t.Log(err, time.Since(began))
		assert.Less(t, time.Since(began), 1100*time.Millisecond, "ends at once when ctx does")
	})
}

// A full Redis, and a job among the arrivals.
func TestList_oomArrival(t *testing.T) {
	w := onSocket(t, startServer(t).socket)
	q := NewListQueue("jobs")
	a := w.join("a", fast(), into(q))
	require.NoError(t, w.raw.LPush(bg, a.keys.arrived("jobs"), "x").Err())
	require.NoError(t, w.raw.ConfigSet(bg, "maxmemory", "1").Err())
	leases, err := a.Fetch(within(t, 2*time.Second), q, 1)
	require.NoError(t, err)
	assert.Equal(t, []string{"x"}, payloads(leases))
	doneWith(t, leases)
}

// Nothing is in flight, and yet there is no room.
func TestList_spuriousCapacity(t *testing.T) {
	inBubble(t, func(w *world) {
		w.loadScripts()
		q := NewListQueue("jobs")
		m := w.join("a", Config{MaxInflight: 10}, into(q))
		m.faults.add(&fault{mode: slow, on: "fetch", delay: 10 * time.Millisecond, times: -1})
		errs := make(chan error, 2)
		for range 2 {
			go func() { _, err := m.Fetch(within(t, time.Second), q, 10); errs <- err }()
		}
		for range 2 {
			assert.NotErrorIs(t, <-errs, ErrAtCapacity, "nothing is in flight")
		}
	})
}

// A handler wants its job to be tried again, as documented, and Release is refused: Work declares the job done.
func TestList_workDropsRefusedRelease(t *testing.T) {
	inBubble(t, func(w *world) {
		q := NewListQueue("jobs")
		m := w.join("a", Config{}, into(q))
		var runs atomic.Int64
		ctx, cancel := context.WithCancel(bg)
		ended := working(m, ctx, q, 1, func(ctx context.Context, l *Lease) error {
			if runs.Add(1) > 1 {
				return nil
			}
			m.faults.add(&fault{mode: failBefore, on: "count"})
			err := errors.Join(errors.New("bad luck"), l.Release())
			t.Log(err)
			return err
		})
		w.push("jobs", "x")
		time.Sleep(time.Minute)
		cancel()
		<-ended
		assert.Equal(t, int64(2), runs.Load()+int64(len(w.queued("jobs"))), "it runs again, or is in its list")
	})
}

// slowDecode takes its time.
type slowDecode struct{ payloadFormat }

func (slowDecode) Decode(e []byte) (Job, error) {
	time.Sleep(20 * time.Second)
	return Job{ID: "id", Payload: e}, nil
}

// The job is read before the lease can be seen by the heartbeat; the race detector is the judge.
func TestList_raceOnJob(t *testing.T) {
	inBubble(t, func(w *world) {
		q := NewListQueue("jobs", ElementFormat(slowDecode{}))
		var told atomic.Value
		m := w.join("a", Config{Events: Events{Lost: func(i LostInfo) { told.Store(i.Job + "@" + i.Queue) }}}, into(q))
		w.push("jobs", "x")
		go func() {
			time.Sleep(time.Second)
			w.raw.HSet(bg, w.keys(m.WorkerID()).session, "state", "fenced")
		}()
		_, _ = m.Fetch(within(t, 30*time.Second), q, 1)
		assert.NotEqual(t, "@", told.Load(), "an event without a name")
	})
}

// Stress: long waiters, callers that give up, several lists, two processes; no sweep comes to help.
func TestList_stressWaits(t *testing.T) {
	w := onReal(t)
	cfg := Config{HeartbeatInterval: time.Second, OrphanThreshold: 10 * time.Second, SweepInterval: time.Hour, MaxRecoveries: NoLimit}
	var lists []*ListQueue
	for i := range 3 {
		lists = append(lists, NewListQueue(fmt.Sprint("l", i, ":", w.ns)))
	}
	a, b := w.join("a", cfg, into(lists[0])), w.join("b", cfg, into(lists[0]))
	ctx, cancel := context.WithCancel(bg)
	got := make(chan string, 100)
	var wg sync.WaitGroup
	for n, m := range []*member{a, b} {
		for i := range 3 {
			wg.Go(func() {
				for {
					leases, err := m.Fetch(ctx, InOrder(lists[i], lists[(i+1)%3]), 1+n)
					if ctx.Err() != nil {
						return
					}
					if !assert.NoError(t, err) {
						return
					}
					for _, l := range leases {
						got <- string(l.Job().Payload)
						assert.NoError(t, l.Done())
					}
				}
			})
		}
		wg.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				short, end := context.WithTimeout(ctx, time.Duration(i%7)*300*time.Microsecond)
				leases, err := m.Fetch(short, InOrder(lists[i%3], lists[(i+2)%3]), 2)
				end()
				if err != nil && !errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
					t.Error(err)
					return
				}
				for _, l := range leases {
					got <- string(l.Job().Payload)
					assert.NoError(t, l.Done())
				}
			}
		})
	}
	var worst time.Duration
	seen := map[string]int{}
	for i := range 3000 {
		began := time.Now()
		n := 1 + i%3
		for k := range n {
			w.push(lists[(i+k)%3].key, fmt.Sprint(i, "-", k))
		}
		for range n {
			select {
			case e := <-got:
				seen[e]++
				require.Equal(t, 1, seen[e], e)
			case <-time.After(8 * time.Second):
				for _, l := range lists {
					t.Log(l.key, w.queued(l.key), w.queued(a.keys.arrived(l.key)))
				}
				cancel()
				t.Fatalf("round %d: nobody takes it", i)
			}
		}
		worst = max(worst, time.Since(began))
	}
	t.Log("worst", worst)
	cancel()
	wg.Wait()
	assert.NoError(t, a.Stop(bg))
	assert.NoError(t, b.Stop(bg))
	for _, l := range lists {
		assert.Empty(t, w.queued(l.key))
		assert.Empty(t, w.queued(a.keys.arrived(l.key)))
	}
}

// x: more than a page of unbegun jobs goes back in the wrong order.
func TestList_unfetchOrder(t *testing.T) {
	inBubble(t, func(w *world) {
		q := NewListQueue("jobs")
		m := w.join("a", Config{}, into(q))
		var want []string
		for i := range 150 {
			want = append(want, fmt.Sprint(i))
		}
		w.push("jobs", want...)
		leases, err := m.Fetch(bg, q, 150)
		require.NoError(t, err)
		require.Len(t, leases, 150)
		m.unfetch(bg, leases)
		assert.True(t, slices.Equal(want, w.queued("jobs")), "first in line: %v", w.queued("jobs")[:3])
	})
}

// Doctor, and one dead letter: the sweeper writes letters for ever.
func TestList_doctorMakesSweepsLoop(t *testing.T) {
	w := onReal(t)
	w.loadScripts()
	q := NewListQueue("jobs:"+w.ns, ElementFormat(panicky{}))
	m := w.join("a", fast(), into(q))
	w.push(q.key, "bad")
	_, err := m.Fetch(within(t, 300*time.Millisecond), q, 1)
	require.Error(t, err)
	require.Equal(t, 1, m.faults.count("bury"))
	_, err = NewInspector(w.raw, w.ns).Doctor(bg)
	require.NoError(t, err)
	seen := m.Stats().Sweeps
	w.eventually(func() bool { return m.Stats().Sweeps >= seen+20 }, "twenty more passes")
	assert.Equal(t, 1, m.faults.count("bury"), "letters written")
	letters, err := NewInspector(w.raw, w.ns).DeadLetters(bg, 0, 100)
	require.NoError(t, err)
	assert.Len(t, letters, 1)
	m.endSweeps()
}

// Work, jobs fetched ahead, and a Stop without time.
func TestList_workStopWithoutTime(t *testing.T) {
	inBubble(t, func(w *world) {
		q := NewListQueue("jobs")
		m := w.join("a", Config{}, into(q))
		var quick atomic.Bool
		quick.Store(true)
		ended := working(m, bg, q, 2, func(ctx context.Context, l *Lease) error {
			if quick.Load() {
				time.Sleep(time.Millisecond)
				return nil
			}
			<-ctx.Done()
			return ctx.Err()
		})
		w.push("jobs", "w1", "w2", "w3")
		time.Sleep(time.Second)
		quick.Store(false)
		w.push("jobs", "a", "b", "c", "d", "e")
		time.Sleep(time.Second)
		ctx, cancel := context.WithCancel(bg)
		cancel()
		t.Log(m.Stop(ctx))
		assert.NoError(t, <-ended)
		time.Sleep(time.Minute)
		assert.ElementsMatch(t, []string{"a", "b", "c", "d", "e"}, w.queued("jobs"))
		assert.Zero(t, m.Stats().Inflight)
	})
}

// q: JSON's names are matched without case.
func TestList_sidekiqCase(t *testing.T) {
	f := sidekiqFormat{name: "mail"}
	job, err := f.Decode([]byte(`{"class":"A","args":[],"jid":"mine","JID":"other"}`))
	require.NoError(t, err)
	assert.Equal(t, "mine", job.ID)
	got, err := f.Encode(Orphan{Job: Job{ID: "x", Payload: []byte(`{"class":"A","args":[],"jid":null,"Queue":1,"Created_at":1}`)}})
	require.NoError(t, err)
	assert.Contains(t, string(got), `"queue":"mail"`)
	assert.Contains(t, string(got), `"created_at"`)
	_, err = f.Decode([]byte(`{"class":null,"jid":"x"}`))
	assert.Error(t, err, "class is null")
}

// A format with a place for checkpoints carries them along; what made none goes back as it was.
func TestList_checkpointOfFetched(t *testing.T) {
	inBubble(t, func(w *world) {
		q := NewListQueue("jobs", ElementFormat(resumable{}))
		doomed := w.join("doomed", Config{}, into(q))
		other := w.join("other", Config{}, into(q))
		w.push("jobs", "one", "two")
		leases, err := doomed.Fetch(bg, q, 2)
		require.NoError(t, err)
		require.NoError(t, leases[1].Checkpoint(bg, []byte("half")))
		doomed.crash()
		time.Sleep(30 * time.Second)
		assert.ElementsMatch(t, []string{"one", "two@half"}, w.queued("jobs"))
		leases, err = other.Fetch(bg, q, 2)
		require.NoError(t, err)
		for _, l := range leases {
			want := map[string]string{"one": "", "two": "half"}[string(l.Job().Payload)]
			assert.Equal(t, want, string(l.Job().Checkpoint))
		}
		doneWith(t, leases)
	})
}

// resumable is a format with a place for a checkpoint.
type resumable struct{}

func (resumable) Decode(e []byte) (Job, error) {
	payload, checkpoint, ok := strings.Cut(string(e), "@")
	job := Job{Payload: []byte(payload)}
	if ok {
		job.Checkpoint = []byte(checkpoint)
	}
	return job, nil
}

func (resumable) Encode(o Orphan) ([]byte, error) {
	return []byte(string(o.Payload) + "@" + string(o.Checkpoint)), nil
}

// The moving average of Work begins at 0: the first slow job counts as a fast one.
func TestList_workAheadAfterSlowJob(t *testing.T) {
	inBubble(t, func(w *world) {
		q := NewListQueue("jobs")
		m := w.join("a", Config{}, into(q))
		w.push("jobs", "a", "b", "c", "d")
		ctx, cancel := context.WithCancel(bg)
		ended := working(m, ctx, q, 1, func(context.Context, *Lease) error { time.Sleep(150 * time.Millisecond); return nil })
		time.Sleep(200 * time.Millisecond)
		assert.Equal(t, []string{"c", "d"}, w.queued("jobs"), "handlers take 150 ms, aheadBelow is 20 ms")
		cancel()
		<-ended
	})
}

// On a cluster, the Enqueuer's list is elsewhere (Start says so), but the one that is fetched from has the tag: one mixed batch, and Fetch is
// refused from then on, for a list that is where it should be.
func TestList_clusterMixedBatch(t *testing.T) {
	addrs := startCluster(t)
	mk := func(name string) *Recoverer {
		rdb := redis.NewClusterClient(&redis.ClusterOptions{Addrs: addrs})
		t.Cleanup(func() { rdb.Close() })
		cfg := fast()
		cfg.HashTag, cfg.Namespace, cfg.WorkerName = "mail", "mixed", name
		return newOn(t, rdb, NewListQueue("plain"), cfg)
	}
	q := NewListQueue("{mail}:jobs")
	doomed, other := mk("doomed"), mk("other")
	require.NoError(t, other.rdb.LPush(bg, q.key, "one", "two").Err())
	_, err := doomed.Fetch(bg, q, 1)
	require.NoError(t, err, "the list has the tag")
	_, err = doomed.Track(bg, Job{ID: "t", Payload: []byte("tracked")})
	require.NoError(t, err)
	doomed.endSweeps()
	doomed.endLife()
	require.Eventually(t, func() bool { return other.rdb.LLen(bg, "plain").Val() == 1 }, 20*time.Second, 10*time.Millisecond)
	leases, err := other.Fetch(bg, q, 5)
	require.NoError(t, err)
	for _, l := range leases {
		require.NoError(t, l.Done())
	}
}

// In the fallback a push of unknown outcome is taken for a refusal: Release gives the job back to its holder although it is in the list.
func TestList_releaseApartReplyLost(t *testing.T) {
	inBubble(t, func(w *world) {
		q := NewListQueue("jobs")
		m := w.join("a", Config{}, into(q))
		m.apart.Store("jobs", true) // as on a cluster without HashTag
		l := w.track(m, "x")[0]
		m.faults.add(&fault{mode: loseReply, on: "rpush"})
		err := l.Release()
		require.Error(t, err)
		if len(w.queued("jobs")) > 0 {
			assert.ErrorIs(t, err, ErrLost, "the job is in the list: its holder must not go on with it")
			assert.ErrorIs(t, l.Done(), ErrLost)
		}
	})
}

// Two Fetch calls with one ctx each wait for a list; the one that is woken has just been cancelled. (Passes: put back, and the other gets it.)
func TestList_cancelAndWakeAtOnce(t *testing.T) {
	for i := range 30 {
		inBubble(t, func(w *world) {
			q := NewListQueue("jobs")
			a := w.join("a", Config{SweepInterval: time.Hour}, into(q))
			ctx, cancel := context.WithCancel(bg)
			ended := make(chan []*Lease, 1)
			go func() { l, _ := a.Fetch(ctx, q, 1); ended <- l }()
			time.Sleep(10 * time.Second)
			go w.raw.LPush(bg, "jobs", fmt.Sprint(i))
			cancel()
			leases := <-ended
			require.NoError(t, errors.Join(func() (errs []error) {
				for _, l := range leases {
					errs = append(errs, l.Done())
				}
				return errs
			}()...))
			time.Sleep(time.Second)
			require.Equal(t, 1, len(leases)+len(w.queued("jobs")), "arrived: %v", w.queued(a.keys.arrived("jobs")))
		})
	}
}

// The same with Quiet.
func TestList_quietAndWakeAtOnce(t *testing.T) {
	for i := range 30 {
		inBubble(t, func(w *world) {
			q := NewListQueue("jobs")
			a := w.join("a", Config{SweepInterval: time.Hour}, into(q))
			ended := make(chan []*Lease, 1)
			go func() { l, _ := a.Fetch(bg, q, 1); ended <- l }()
			time.Sleep(10 * time.Second)
			go w.raw.LPush(bg, "jobs", fmt.Sprint(i))
			if i%2 == 0 {
				runtime.Gosched()
			}
			a.Quiet()
			leases := <-ended
			for _, l := range leases {
				require.NoError(t, l.Done())
			}
			require.NoError(t, a.Stop(bg))
			time.Sleep(time.Second)
			require.Equal(t, 1, len(leases)+len(w.queued("jobs")), "round %d, arrived: %v", i, w.queued(a.keys.arrived("jobs")))
		})
	}
}

// Woken, then cancelled while another Fetch has the turn: the arrival is put back by nobody but a sweep.
func TestList_cancelledBeforeItsTurn(t *testing.T) {
	inBubble(t, func(w *world) {
		w.loadScripts()
		q, slowOne := NewListQueue("jobs"), NewListQueue("other")
		a := w.join("a", Config{SweepInterval: time.Hour}, into(q))
		ctx, cancel := context.WithCancel(bg)
		ended := make(chan error, 2)
		go func() { _, err := a.Fetch(ctx, q, 1); ended <- err }()
		time.Sleep(time.Second)
		a.faults.add(&fault{mode: hang, on: "fetch"})
		go func() { _, _ = a.Fetch(within(t, 20*time.Second), slowOne, 1) }()
		time.Sleep(time.Second)
		w.push("jobs", "x")
		time.Sleep(time.Second)
		cancel()
		require.ErrorIs(t, <-ended, context.Canceled)
		time.Sleep(2 * time.Minute)
		assert.Equal(t, []string{"x"}, w.queued("jobs"), "arrived: %v", w.queued(a.keys.arrived("jobs")))
	})
}
