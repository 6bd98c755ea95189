package recovery

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Interleavings that were wrong once.

// An Enqueuer that hangs for one worker's jobs must not keep the sweeps from another's.
func TestSweeper_hangingJobsDoNotKeepOthers(t *testing.T) {
	inBubble(t, func(w *world) {
		bad, good := w.join("bad", Config{}), w.join("good", Config{})
		peer := w.join("peer", Config{EnqueueTimeout: time.Second})
		good.enq.set(func(ctx context.Context, _ Orphan) error { <-ctx.Done(); return ctx.Err() })
		peer.enq.set(func(ctx context.Context, o Orphan) error {
			if o.ID == "good" {
				return nil
			}
			<-ctx.Done()
			return ctx.Err()
		})
		for i := range 300 {
			w.track(bad, fmt.Sprint("hangs", i))
		}
		w.track(good, "good")
		bad.crash()
		time.Sleep(time.Minute)
		require.Positive(t, peer.Stats().HandBackFailed+good.Stats().HandBackFailed)
		good.crash()
		time.Sleep(40 * time.Second)
		synctest.Wait()
		assert.Equal(t, []string{"good"}, peer.enq.ids())
	})
}

// Only the session is gone, by eviction or by hand; index and records are there. A peer that meets them would take the worker for dead.
func TestHeartbeat_onlyTheSessionIsLost(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.join("a", Config{}), w.join("b", Config{})
		leases := w.track(a, "one", "two")
		ctx := leases[0].Context()
		w.raw.Del(bg, w.keys(a.WorkerID()).session)
		time.Sleep(time.Minute)
		back := append(a.enq.accepted(), b.enq.accepted()...)
		assert.Len(t, back, 2)
		assert.ErrorIs(t, context.Cause(ctx), ErrLost)
		for _, l := range leases {
			assert.ErrorIs(t, l.Done(), ErrLost, "handed back, so told")
		}
	})
}

// After a flush only this process knows the job: a panic before the next beat must not take it for somebody else's.
func TestDo_panicAfterFlush(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.join("a", Config{})
		var tries atomic.Int32
		a.enq.set(func(context.Context, Orphan) error {
			if tries.Add(1) < 3 {
				return assert.AnError
			}
			return nil
		})
		require.Error(t, guard(func() {
			_ = a.Do(bg, Job{ID: "job", Payload: []byte("p")}, func(context.Context) error { w.mini.FlushAll(); panic("x") })
		}))
		time.Sleep(3 * time.Minute)
		require.Equal(t, []string{"job"}, a.enq.ids())
		assert.Equal(t, "p", string(a.enq.accepted()[0].Payload))
		assert.Equal(t, Panicked, a.enq.accepted()[0].Reason)
		require.NoError(t, a.Stop(bg))
	})
}

func TestStop_withASurrenderThatRedisRefused(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.join("a", Config{})
		a.faults.add(&fault{mode: failBefore, on: "take"})
		require.Error(t, guard(func() { _ = a.Do(bg, Job{ID: "job"}, func(context.Context) error { panic("x") }) }))
		require.NoError(t, a.Stop(bg))
		require.Equal(t, []string{"job"}, a.enq.ids())
		assert.Equal(t, Panicked, a.enq.accepted()[0].Reason)
	})
}

// A write that tracks a lease again, and whose outcome is unknown, must come before that lease's Done, or its late copy brings the lease back.
func TestDone_afterUnknownRetrack(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.join("a", Config{HeartbeatInterval: time.Minute})
		l := w.track(a, "one")[0]
		w.mini.FlushAll()
		a.faults.add(&fault{mode: loseReply, on: "commit"})
		require.Error(t, a.heart.beatOnce(bg), "joined again, but the re-tracking is uncertain")
		require.NotNil(t, l.lane)
		require.NoError(t, l.Done())
		inc := a.current.Load()
		assert.Empty(t, w.inflight(inc.id))
		_, err := a.write(bg, inc, "lane0", 1, true, &writing{records: []any{l.ID(), l.record}, track: []any{l.ID(), 5}})
		require.NoError(t, err) // its late copy is known as one
		assert.Empty(t, w.inflight(inc.id))
		assert.Empty(t, w.raw.HKeys(bg, inc.keys.jobs).Val())
	})
}

func TestSelfFence_whileTheBeatHangs(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.join("a", Config{HeartbeatInterval: time.Second, OrphanThreshold: 19150 * time.Millisecond, SelfFence: true})
		ctx := w.track(a, "job")[0].Context()
		time.Sleep(10 * time.Second)
		a.faults.add(&fault{mode: hang, times: -1})
		last := a.Stats().LastBeat
		<-ctx.Done()
		assert.LessOrEqual(t, time.Since(last), 19150*time.Millisecond)
	})
}

// A sweep may fall between the two steps of join: then another id is taken.
func TestStart_fencedBetweenItsSteps(t *testing.T) {
	inBubble(t, func(w *world) {
		peer := w.join("peer", Config{})
		m := w.make("a", Config{})
		m.faults.add(&fault{mode: slow, on: "join", delay: 9 * time.Second})
		require.NoError(t, m.Start(bg))
		time.Sleep(time.Minute)
		assert.ElementsMatch(t, []string{peer.WorkerID(), m.WorkerID()}, w.workers())
		require.NoError(t, w.track(m, "job")[0].Done())
	})
}

func TestTrack_whileTheWorkerCanNotRejoin(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.join("a", Config{})
		require.NoError(t, a.fenceOwn(bg, a.current.Load()))
		a.faults.add(&fault{mode: failBefore, on: "join", times: -1})
		began := time.Now()
		_, err := a.Track(bg, Job{ID: "job"})
		require.ErrorContains(t, err, "could not rejoin")
		assert.LessOrEqual(t, time.Since(began), 11*time.Second)
	})
}

// A full Redis: what a sweep hands back makes room, so it must go on.
func TestRedis_outOfMemorySweep(t *testing.T) {
	t.Parallel()
	w := onSocket(t, startServer(t).socket)
	a, b, dead := w.join("a", fast()), w.join("b", fast()), w.join("dead", fast())
	w.track(dead, "orphan")
	require.NoError(t, w.raw.ConfigSet(bg, "maxmemory", "1").Err())
	dead.crash()
	w.eventually(func() bool { return len(a.enq.accepted())+len(b.enq.accepted()) == 1 }, "handed back")
	w.eventually(func() bool { return len(w.workers()) == 2 }, "and retired")
	assert.Zero(t, a.Stats().HandBackFailed+b.Stats().HandBackFailed)
}
