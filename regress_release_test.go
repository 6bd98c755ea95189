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

func refuseOnce(w *world, m *member, f func()) {
	var n atomic.Int32
	m.enq.set(func(context.Context, Orphan) error {
		if n.Add(1) == 1 {
			f()
			return assert.AnError
		}
		return nil
	})
}

// flush while Release's Enqueuer is at work, and it refuses
func TestRegress_releaseRefusedAfterFlush(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.join("a", Config{}), w.join("b", Config{})
		refuseOnce(w, a, func() { w.mini.FlushAll() })
		l := w.track(a, "job")[0]
		require.Error(t, l.Release())
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		done := l.Done()
		if done != nil {
			assert.Len(t, append(a.enq.ids(), b.enq.ids()...), 1, "told lost, so handed back")
		}
	})
}

// Enqueuer times out in Release, flush meanwhile
func TestRegress_releaseTimeoutAfterFlush(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.join("a", Config{EnqueueTimeout: time.Second}), w.join("b", Config{})
		var n atomic.Int32
		a.enq.set(func(ctx context.Context, _ Orphan) error {
			if n.Add(1) == 1 {
				w.mini.FlushAll()
				time.Sleep(3 * time.Second)
				return assert.AnError
			}
			return nil
		})
		l := w.track(a, "job")[0]
		require.ErrorIs(t, l.Release(), ErrLost)
		time.Sleep(10 * time.Minute)
		require.ErrorIs(t, l.Done(), ErrLost)
		assert.Len(t, append(a.enq.ids(), b.enq.ids()...), 1)
	})
}

// flush after the claim was put off
func TestRegress_releaseTimeoutThenFlush(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.join("a", Config{EnqueueTimeout: time.Second}), w.join("b", Config{})
		var n atomic.Int32
		a.enq.set(func(ctx context.Context, _ Orphan) error {
			if n.Add(1) == 1 {
				time.Sleep(3 * time.Second)
				return assert.AnError
			}
			return nil
		})
		l := w.track(a, "job")[0]
		require.ErrorIs(t, l.Release(), ErrLost)
		w.mini.FlushAll()
		time.Sleep(10 * time.Minute)
		require.ErrorIs(t, l.Done(), ErrLost)
		assert.Len(t, append(a.enq.ids(), b.enq.ids()...), 1)
	})
}

// untake done, reply late; Redis flushed and the worker joined again meanwhile
func TestRegress_untakeLateThenFlush(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.join("a", Config{HeartbeatInterval: 300 * time.Millisecond}), w.join("b", Config{})
		refuseOnce(w, a, func() {})
		l := w.track(a, "job")[0]
		a.rdb.AddHook(afterUntake{a, func() { w.mini.FlushAll(); time.Sleep(1800 * time.Millisecond) }})
		require.Error(t, l.Release())
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		a.crash()
		time.Sleep(10 * time.Minute)
		assert.Len(t, append(a.enq.ids(), b.enq.ids()...), 1, "the worker died with the job unfinished")
	})
}

// Stop closes the incarnation while Release is at work; then Release takes the lease back
func TestRegress_stopWhileReleaseTakesBack(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.join("a", Config{})
		b := w.join("b", Config{})
		refuseOnce(w, a, func() { time.Sleep(2 * time.Second) })
		l := w.track(a, "job")[0]
		lctx := l.Context()
		rel := make(chan error, 1)
		go func() { rel <- l.Release() }()
		time.Sleep(100 * time.Millisecond)
		a.faults.add(&fault{mode: slow, on: "leave", delay: 3 * time.Second})
		ctx, cancel := context.WithTimeout(bg, time.Second)
		defer cancel()
		require.Error(t, a.Stop(ctx))
		require.ErrorIs(t, <-rel, ErrLost)
		time.Sleep(10 * time.Minute)
		ids := append(a.enq.ids(), b.enq.ids()...)
		require.Len(t, ids, 1)
		assert.ErrorIs(t, context.Cause(lctx), ErrLost, "handed back, so told")
		assert.ErrorIs(t, l.Done(), ErrLost)
	})
}

// Backoff after a refused Release
func TestRegress_backoffAfterRefusedRelease(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.join("a", Config{Backoff: func(int) time.Duration { return time.Hour }})
		refuseOnce(w, a, func() {})
		l, err := a.Track(bg, Job{ID: "job", Timeout: time.Minute})
		require.NoError(t, err)
		require.Error(t, l.Release())
		time.Sleep(30 * time.Minute)
		assert.Empty(t, a.enq.ids(), "Backoff says an hour")
	})
}

func TestRegress_backoffAfterFailedCount(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.join("a", Config{})
		b := w.join("b", Config{Backoff: func(int) time.Duration { return time.Hour }})
		w.track(a, "job")
		b.faults.add(&fault{mode: failBefore, on: "count"})
		a.crash()
		time.Sleep(30 * time.Minute)
		assert.Empty(t, b.enq.ids(), "Backoff says an hour")
	})
}

// letter written, forget failed, a person requeues it
func TestRegress_requeueBeforeForget(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.join("a", Config{})
		b := w.join("b", Config{})
		l := w.track(a, "job")[0]
		b.enq.set(func(context.Context, Orphan) error { return Permanent(assert.AnError) })
		b.faults.add(&fault{mode: failBefore, on: "forget"})
		a.crash()
		for i := 0; i < 600 && w.raw.ZCard(bg, b.keys.deadIndex()).Val() == 0; i++ {
			time.Sleep(time.Second)
		}
		i := NewInspector(w.raw, w.ns)
		rec := &recorder{}
		require.NoError(t, i.Requeue(bg, l.ID(), rec))
		time.Sleep(10 * time.Minute)
		assert.Len(t, rec.ids(), 1)
		assert.Zero(t, w.raw.ZCard(bg, b.keys.deadIndex()).Val(), "requeued, and a dead letter again")
	})
}
