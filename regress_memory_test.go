package recovery

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A lease whose re-tracking has an unknown outcome is neither carried over nor told when its incarnation ends.
func TestRegress_P1_retrackUnknownThenFlushedAgain(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.join("a", Config{HeartbeatInterval: time.Minute})
		l := w.track(a, "one")[0]
		ctx := l.Context()
		w.mini.FlushAll()
		a.faults.add(&fault{mode: failBefore, on: "commit"})
		a.heart.kick()
		synctest.Wait()
		w.mini.FlushAll() // Redis restarts empty once more
		time.Sleep(10 * time.Minute)
		require.NoError(t, ctx.Err(), "runs on, not lost")
		assert.Len(t, w.inflight(a.WorkerID()), 1, "a running job must be tracked")
		b := w.join("b", Config{HeartbeatInterval: time.Minute})
		a.crash()
		time.Sleep(time.Hour)
		assert.Equal(t, []string{"one"}, b.enq.ids(), "nothing is lost")
	})
}

// The same lease when the worker is fenced: its context is never cancelled.
func TestRegress_P2_retrackUnknownThenFenced(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.join("a", Config{}), w.join("b", Config{})
		l := w.track(a, "one")[0]
		ctx := l.Context()
		w.mini.FlushAll()
		a.faults.add(&fault{mode: loseReply, on: "commit"})
		a.heart.kick()
		for l.locked() == false {
			time.Sleep(time.Millisecond)
		}
		a.faults.add(&fault{mode: failBefore, times: -1}) // partitioned
		time.Sleep(time.Minute)
		require.Equal(t, []string{"one"}, b.enq.ids())
		a.faults.clear()
		time.Sleep(time.Minute)
		assert.ErrorIs(t, context.Cause(ctx), ErrLost, "the old holder is told")
		assert.ErrorIs(t, l.Done(), ErrLost)
	})
}

func (l *Lease) locked() bool { l.mu.Lock(); defer l.mu.Unlock(); return l.lane != nil }

// ... and at Stop: handed back, the proof deleted, Done answers nil.
func TestRegress_P2_retrackUnknownThenStop(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.join("a", Config{HeartbeatInterval: time.Minute})
		l := w.track(a, "one")[0]
		lctx := l.Context()
		w.mini.FlushAll()
		a.faults.add(&fault{mode: loseReply, on: "commit"})
		require.Error(t, a.heart.beatOnce(bg))
		ctx, cancel := context.WithTimeout(bg, time.Second)
		defer cancel()
		a.faults.add(&fault{mode: failBefore, on: "beat"})
		a.faults.add(&fault{mode: slow, on: "commit", delay: 50 * time.Millisecond})
		a.enq.set(func(context.Context, Orphan) error { time.Sleep(100 * time.Millisecond); return nil })
		_ = a.Stop(ctx)
		require.Equal(t, []string{"one"}, a.enq.ids())
		assert.ErrorIs(t, context.Cause(lctx), ErrLost)
		assert.ErrorIs(t, l.Done(), ErrLost)
	})
}

// A Done that has decided but not yet queued its write while Stop hands the job back and deletes the proof.
func TestRegress_P2_doneBetweenDecisionAndSubmit(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.join("a", Config{})
		l := w.track(a, "one")[0]
		l.mu.Lock() // first half of Done
		l.state, l.fin = leaseFinishing, newOp(opDone, l)
		l.mu.Unlock()
		ctx, cancel := context.WithTimeout(bg, time.Second)
		defer cancel()
		_ = a.Stop(ctx)
		require.Equal(t, []string{"one"}, a.enq.ids(), "handed back")
		l.home.submit(l.fin, true) // second half
		<-l.fin.settled
		assert.ErrorIs(t, l.fin.err, ErrLost)
	})
}

// SelfFence, then Redis comes back empty: the only copies were in this process, and it threw them away.
func TestRegress_P1_selfFenceThenFlush(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.join("a", Config{SelfFence: true}), w.join("b", Config{})
		l := w.track(a, "one")[0]
		for _, m := range w.all {
			m.faults.add(&fault{mode: failBefore, times: -1})
		}
		<-l.Context().Done()
		w.mini.FlushAll()
		for _, m := range w.all {
			m.faults.clear()
		}
		time.Sleep(10 * time.Minute)
		assert.ErrorIs(t, l.Done(), ErrLost)
		assert.Len(t, append(a.enq.accepted(), b.enq.accepted()...), 1, "told ErrLost, so somebody must get it")
	})
}

// Redis (all of it) away for longer than InflightTTL, AOF restart: records expire at load. Issue: "a pause longer than every TTL: ... no job lost".
func TestRegress_P1_awayLongerThanEveryTTL(t *testing.T) {
	inBubble(t, func(w *world) {
		cfg := Config{InflightTTL: time.Minute}
		a, b := w.join("a", cfg), w.join("b", cfg)
		l := w.track(a, "one")[0]
		time.Sleep(10 * time.Second) // a beat has set the TTLs
		w.mini.SetError("LOADING Redis is loading the dataset in memory")
		time.Sleep(2 * time.Minute)
		w.mini.SetError("")
		time.Sleep(10 * time.Minute)
		handed := len(append(a.enq.accepted(), b.enq.accepted()...))
		err := l.Done()
		t.Logf("Done: %v, handed back: %d", err, handed)
		assert.True(t, err == nil && handed == 0 || err != nil && handed == 1, "either still ours or handed back")
	})
}

// A surrendered job waits in the claims (Enqueuer refuses); Redis is flushed under the live worker.
func TestRegress_P1_panickedJobInClaimsThenFlush(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.join("a", Config{})
		var refuse atomic.Bool
		refuse.Store(true)
		a.enq.set(func(context.Context, Orphan) error {
			if refuse.Load() {
				return assert.AnError
			}
			return nil
		})
		require.Error(t, guard(func() { _ = a.Do(bg, Job{ID: "job"}, func(context.Context) error { panic("x") }) }))
		w.mini.FlushAll()
		refuse.Store(false)
		time.Sleep(10 * time.Minute)
		assert.Equal(t, []string{"job"}, a.enq.ids())
	})
}

// A surrender that only this process remembers, and then Stop.
func TestRegress_P1_panicAfterFlushThenStop(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.join("a", Config{})
		var tries atomic.Int32
		a.enq.set(func(context.Context, Orphan) error {
			if tries.Add(1) < 2 {
				return assert.AnError
			}
			return nil
		})
		require.Error(t, guard(func() {
			_ = a.Do(bg, Job{ID: "job", Payload: []byte("p")}, func(context.Context) error { w.mini.FlushAll(); panic("x") })
		}))
		err := a.Stop(bg)
		assert.True(t, len(a.enq.ids()) == 1 || err != nil, "Stop said nil (%v) and the job is gone: %v", err, a.enq.ids())
		assert.Equal(t, []string{"job"}, a.enq.ids())
	})
}

// Flushed, then Stop whose last beat fails half-way: running jobs are in memory only, and are dropped.
func TestRegress_P1_flushThenStop(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.join("a", Config{})
		l := w.track(a, "one")[0]
		ctx, cancel := context.WithTimeout(bg, time.Second)
		defer cancel()
		a.faults.add(&fault{mode: failBefore, on: "where"})
		w.mini.FlushAll()
		err := a.Stop(ctx)
		t.Logf("Stop: %v; Done: %v", err, l.Done())
		assert.Equal(t, []string{"one"}, a.enq.ids())
	})
}

// Only the session was lost between two copies of a Track: the answer "certain that nothing was written" is wrong.
func TestRegress_P2_trackTwiceSessionEvictedBetween(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.join("a", Config{}), w.join("b", Config{})
		old := a.WorkerID()
		require.NoError(t, w.track(a, "warm")[0].Done()) // the script is cached
		a.faults.add(&fault{mode: twice, on: "commit", between: func() { w.raw.Del(bg, w.keys(old).session) }})
		l, err := a.Track(bg, Job{ID: "job"})
		time.Sleep(time.Minute)
		handed := append(a.enq.accepted(), b.enq.accepted()...)
		if err == nil {
			derr := l.Done()
			assert.False(t, derr == nil && len(handed) > 0, "Track nil, Done nil, and handed back %d times", len(handed))
		} else {
			assert.ErrorIs(t, err, ErrLost)
		}
	})
}

// Do panics while Stop runs: surrendered by Stop as Released, so that the crash is not counted.
func TestRegress_panicDuringStop(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.join("a", Config{})
		a.faults.add(&fault{mode: slow, on: "take", delay: 100 * time.Millisecond})
		a.faults.add(&fault{mode: slow, on: "srem", delay: time.Second})
		go func() {
			_ = guard(func() {
				_ = a.Do(bg, Job{ID: "job"}, func(context.Context) error { time.Sleep(time.Second); panic("x") })
			})
		}()
		time.Sleep(500 * time.Millisecond)
		_ = a.Stop(bg)
		time.Sleep(time.Minute)
		require.NotEmpty(t, a.enq.accepted())
		assert.Len(t, a.enq.accepted(), 1, "once")
		assert.Equal(t, Panicked, a.enq.accepted()[0].Reason)
	})
}
