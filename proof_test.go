package recovery

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Each of these protects one line that no other test would miss.

// slowHeart makes a worker that is told nothing by its heartbeat: only Redis' own answers count.
func slowHeart() Config { return Config{HeartbeatInterval: time.Hour, OrphanThreshold: 4 * time.Hour} }

func TestProof_doneOfAClaimedLease(t *testing.T) {
	bothWays(t, func(t *testing.T, w *world) {
		a := w.join("a", slowHeart())
		ls := w.track(a, "claimed", "handed back", "neither")
		inc := a.current.Load()
		require.NoError(t, a.fenceOwn(bg, inc))
		require.NoError(t, ls[2].Done(), "fenced, but not claimed: the work is done")
		c, err := a.claim(bg, inc.id, false)
		require.NoError(t, err)
		require.Len(t, c.leases, 2)
		require.NoError(t, forgetScript.Run(bg, w.raw, []string{inc.keys.jobs, inc.keys.claims, inc.keys.handed}, 100000, "2").Err())
		assert.ErrorIs(t, ls[0].Done(), ErrLost, "in the claims")
		assert.ErrorIs(t, ls[1].Done(), ErrLost, "in handed")
	})
}

// A suspicion that a beat has refuted must not count when the worker is silent again.
func TestProof_beatClearsSuspicion(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.join("a", Config{}), w.join("b", Config{})
		w.track(a, "job")
		for range 3 { // silent long enough to be suspected, then one beat, and again
			a.faults.add(&fault{mode: failBefore, times: -1})
			time.Sleep(17 * time.Second)
			a.faults.clear()
			time.Sleep(1500 * time.Millisecond)
		}
		assert.GreaterOrEqual(t, b.Stats().Suspected, uint64(2))
		assert.Zero(t, b.Stats().FencedPeers)
	})
}

// Records of a live worker, and of a dead one whose jobs nobody takes, outlive InflightTTL.
func TestProof_recordsDoNotExpireWhileCaredFor(t *testing.T) {
	inBubble(t, func(w *world) {
		cfg := Config{HeartbeatInterval: time.Second, OrphanThreshold: 4 * time.Second, InflightTTL: 12 * time.Second}
		a, b := w.join("a", cfg), w.join("b", cfg)
		l := w.track(a, "live")[0]
		dead := w.join("dead", cfg)
		w.track(dead, "refused")
		b.enq.set(func(context.Context, Orphan) error { return assert.AnError })
		a.enq.set(func(context.Context, Orphan) error { return assert.AnError })
		dead.crash()
		time.Sleep(3 * time.Minute)
		require.NoError(t, l.Confirm(bg))
		assert.Zero(t, a.Stats().Repaired, "kept, not mended")
		a.enq.set(nil)
		b.enq.set(nil)
		time.Sleep(6 * time.Minute)
		assert.Equal(t, []string{"refused"}, append(a.enq.ids(), b.enq.ids()...))
		require.NoError(t, l.Done())
	})
}

func TestProof_lockIsReleasedByItsOwnerOnly(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.make("a", Config{})
		mine, other := newSweeper(a.Recoverer).lock, newSweeper(a.Recoverer).lock
		held, err := mine.acquire(bg, false)
		require.NoError(t, err)
		require.True(t, held.ours)
		require.NoError(t, other.release(bg))
		require.NoError(t, other.rest(bg))
		held, err = other.acquire(bg, true)
		require.NoError(t, err)
		assert.False(t, held.ours, "still mine, and sweeping")
		require.NoError(t, mine.rest(bg))
		held, err = other.acquire(bg, false)
		require.NoError(t, err)
		assert.False(t, held.ours, "resting, it paces the fleet")
		held, err = other.acquire(bg, true)
		require.NoError(t, err)
		assert.True(t, held.ours, "but a sweep on demand may take it")
	})
}

// In a frozen clock only the session's own memory makes fences grow.
func TestProof_fenceGrowsWithinOneMicrosecond(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.join("a", Config{})
		var last int64
		for range 50 {
			l := w.track(a, "job")[0]
			assert.Greater(t, l.Fence(), last)
			last = l.Fence()
			require.NoError(t, l.Done())
		}
	})
}

// The answer to Track arrives when the incarnation has just been closed: nobody would cancel that lease any more.
func TestProof_trackAnsweredAfterTheEnd(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.join("a", slowHeart())
		a.faults.add(&fault{mode: slow, on: "commit", delay: time.Second})
		answer := make(chan error)
		go func() { _, err := a.Track(bg, Job{ID: "job"}); answer <- err }()
		synctest.Wait()
		a.current.Load().close(ErrLost)
		require.ErrorIs(t, <-answer, ErrLost)
	})
}

// What is logged names things; it never shows them.
func TestProof_neverAPayloadInTheLog(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.join("a", Config{}), w.join("b", Config{})
		_, err := a.Track(bg, Job{ID: "job", Payload: []byte("private bytes"), Headers: map[string]string{"k": "private header"}, Checkpoint: []byte("private cp")})
		require.NoError(t, err)
		b.enq.set(func(context.Context, Orphan) error {
			if len(b.enq.called()) < 3 {
				return assert.AnError
			}
			return Permanent(assert.AnError)
		})
		a.crash()
		time.Sleep(5 * time.Minute)
		require.EqualValues(t, 1, b.Stats().Buried)
		assert.NotContains(t, w.logs.String(), "private")
		for _, key := range []string{"worker=", "job=", "lease=", "queue=", "reason=", "recovery=", "age=", "err="} {
			assert.True(t, strings.Contains(w.logs.String(), key), key)
		}
	})
}
