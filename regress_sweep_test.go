package recovery

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Looks at watched workers take the resting lock from its holder and renew it. With two of them the lock never ends, everybody who finds it
// taken puts off his next pass, and there are no more passes: a worker that nobody has on watch is never looked at.
func TestRegress_looksStarvePasses(t *testing.T) {
	inBubble(t, func(w *world) {
		cfg := Config{HeartbeatInterval: time.Second, OrphanThreshold: 4 * time.Second, SweepInterval: 3 * time.Second}
		a, b := w.join("a", cfg), w.join("b", cfg)
		time.Sleep(10 * time.Second)
		for i := range 40 {
			_, err := a.Sweep(bg) // on demand: it takes the resting lock, and gives it up. Whoever comes next makes a pass, and watches, too
			require.NoError(w.t, err)
			time.Sleep(time.Minute + time.Duration(i)*77*time.Millisecond)
			before := a.Stats().Sweeps + b.Stats().Sweeps
			time.Sleep(time.Minute)
			passes := a.Stats().Sweeps + b.Stats().Sweeps - before
			require.GreaterOrEqual(w.t, passes, uint64(10), "passes in a minute; one each SweepInterval would be 20")
		}
		dead := w.join("dead", cfg)
		w.track(dead, "job")
		dead.crash()
		time.Sleep(cfg.OrphanThreshold + 2*cfg.SweepInterval)
		require.Len(w.t, append(a.enq.ids(), b.enq.ids()...), 1, "handed back within OrphanThreshold + SweepInterval")
	})
}

// A copy of take arrives after the Enqueuer refused and untake gave the lease back: it moves the running lease into the worker's own claims. The
// holder is told ErrLost by the audit, or by Done, but nobody hands the job back for as long as the worker lives.
func TestRegress_lateTakeAfterUntake(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.join("a", Config{}), w.join("b", Config{})
		l := w.track(a, "job")[0]
		a.enq.set(func(context.Context, Orphan) error { return assert.AnError })
		require.ErrorIs(w.t, l.Release(), assert.AnError)
		require.NoError(w.t, l.Confirm(bg), "refused: it is the holder's again")
		a.enq.set(nil)
		k := w.keys(a.WorkerID())
		require.NoError(w.t, takeScript.Run(bg, w.raw, []string{k.inflight, k.jobs, k.claims}, ms(a.tm.claimTTL), Released.String(), l.member).Err())
		time.Sleep(time.Hour)
		if err := l.Done(); err != nil {
			require.ErrorIs(w.t, err, ErrLost)
			time.Sleep(time.Hour)
			assert.Equal(w.t, []string{"job"}, append(a.enq.ids(), b.enq.ids()...), "who was told ErrLost must find it handed back")
		}
	})
}

// afterCommit calls a func when a batch was executed, before its caller has the answer.
type afterCommit struct{ f func() }

func (a afterCommit) DialHook(next redis.DialHook) redis.DialHook          { return next }
func (a afterCommit) ProcessHook(next redis.ProcessHook) redis.ProcessHook { return next }
func (a afterCommit) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		err := next(ctx, cmds)
		for _, c := range cmds {
			if nameOf(c) == "commit" {
				a.f()
			}
		}
		return err
	}
}

// Only the session is lost, and the heartbeat notices it, between a Track and its answer: the record is there and will be handed back, so it must not
// be recorded a second time. Found by the model.
func TestRegress_sessionLostBeforeTheAnswer(t *testing.T) {
	inBubble(t, func(w *world) {
		w.loadScripts()
		a, b := w.join("a", Config{}), w.join("b", Config{})
		inc := a.current.Load()
		var once atomic.Bool
		a.rdb.AddHook(afterCommit{func() {
			if !once.Swap(true) {
				w.raw.Del(bg, inc.keys.session)
				inc.close(&notLiveError{absent: true})
			}
		}})
		_, err := a.Track(bg, Job{ID: "job"})
		require.ErrorIs(t, err, ErrLost)
		time.Sleep(time.Minute)
		assert.Equal(t, []string{"job"}, append(a.enq.ids(), b.enq.ids()...), "once")
	})
}

// Away for longer than everything is remembered: what Redis does not know may have been handed back long ago. It must not be kept, nor be done. Found by the model.
func TestRegress_awayForTooLong(t *testing.T) {
	inBubble(t, func(w *world) {
		cfg := Config{InflightTTL: time.Minute}
		a, b := w.join("a", cfg), w.join("b", cfg)
		ls := w.track(a, "kept", "done")
		old := a.WorkerID()
		a.faults.add(&fault{mode: failBefore, times: -1})
		done := make(chan error, 1)
		go func() { done <- ls[1].Done() }() // can't reach Redis; it is repeated later
		time.Sleep(10 * time.Minute)
		require.Len(t, b.enq.ids(), 2)
		<-done
		// A sweep has met the id again, say by the registry, and has fenced it anew: that is all that Redis knows.
		require.Empty(t, w.raw.HGetAll(bg, w.keys(old).session).Val())
		w.fence(old)
		a.faults.clear()
		time.Sleep(time.Minute)
		assert.ErrorIs(t, context.Cause(ls[0].Context()), ErrLost, "not kept")
		assert.ErrorIs(t, ls[1].Done(), ErrLost, "not done")
	})
}

// A zombie that comes back while a peer hands its job back must leave it to the peer.
func TestRegress_zombieDuringHandBack(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.join("a", Config{}), w.join("b", Config{})
		w.track(a, "job")
		slowly := func(context.Context, Orphan) error { time.Sleep(8 * time.Second); return nil } // EnqueueTimeout is 10 s
		a.enq.set(slowly)
		b.enq.set(slowly)
		a.faults.add(&fault{mode: failBefore, times: -1})
		for len(b.enq.called()) == 0 {
			time.Sleep(10 * time.Millisecond)
		}
		a.faults.clear()
		time.Sleep(time.Minute)
		assert.Len(t, append(a.enq.called(), b.enq.called()...), 1, "nobody died, nobody refused: one call")
	})
}

// An error of a hand-back that outlasts its pass was logged nowhere; and one Enqueue was announced as many hand-backs.
func TestRegress_errorsAfterThePass(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.join("a", Config{}), w.join("b", Config{})
		w.loadScripts()
		w.track(a, "job")
		b.enq.set(func(context.Context, Orphan) error { time.Sleep(8 * time.Second); return nil })
		b.faults.add(&fault{mode: failBefore, on: "forget", times: -1})
		a.crash()
		time.Sleep(35 * time.Second)
		require.Equal(t, 1, b.faults.count("forget"))
		assert.Contains(t, w.logs.String(), "sweep failed in part")
		time.Sleep(5 * time.Minute)
		assert.EqualValues(t, len(b.enq.called()), b.Stats().HandedBack)
	})
}

// Between a claim and the reading of its records another sweeper hands them back, because Redis' clock was set and made the claim run out. The
// first one has nothing to do, and nothing to bury.
func TestRegress_claimTakenBeforeItsRecordsAreRead(t *testing.T) {
	bothWays(t, func(t *testing.T, w *world) {
		a, b := w.join("a", slowHeart()), w.join("b", slowHeart())
		w.track(a, "taken", "mine")
		inc := a.current.Load()
		require.NoError(t, a.fenceOwn(bg, inc))
		b.faults.add(&fault{mode: slow, on: "records", delay: 500 * time.Millisecond})
		ended := make(chan error)
		go func() {
			_, err := b.Sweep(bg)
			ended <- err
		}()
		w.eventually(func() bool { return w.raw.ZCard(bg, inc.keys.claims).Val() == 2 }, "claimed")
		require.NoError(t, b.forget(bg, inc.keys, []any{"1"}, (&claimedLease{member: "1"}).fields()))
		require.NoError(t, <-ended)
		assert.Equal(t, []string{"mine"}, b.enq.ids())
		assert.Zero(t, b.Stats().Buried)
	})
}

// A record that can't be read now is tried again with the next sweep, not when its claim has run out, and does not keep the others. If none can
// be read, all are given back at once.
func TestRegress_recordsUnreadableNow(t *testing.T) {
	inBubble(t, func(w *world) {
		cfg := Config{EnqueueTimeout: time.Minute} // a claim lasts two of them
		a, b := w.join("a", slowHeart()), w.join("b", cfg)
		w.track(a, "one", "two")
		b.faults.add(&fault{mode: failBefore, on: "records"})
		require.NoError(t, a.fenceOwn(bg, a.current.Load()))
		_, err := b.Sweep(bg)
		require.NoError(t, err)
		assert.Equal(t, []string{"two"}, b.enq.ids())
		assert.EqualValues(t, 1, b.Stats().HandBackFailed)
		time.Sleep(30 * time.Second)
		assert.Equal(t, []string{"one", "two"}, b.enq.ids())

		c := w.join("c", slowHeart())
		w.track(c, "three", "four")
		b.faults.add(&fault{mode: failBefore, on: "records", times: 4})
		require.NoError(t, c.fenceOwn(bg, c.current.Load()))
		_, err = b.Sweep(bg)
		if err != nil {
			require.ErrorContains(t, err, "read claimed leases")
		}
		time.Sleep(30 * time.Second)
		assert.Equal(t, []string{"four", "one", "three", "two"}, b.enq.ids())
	})
}
