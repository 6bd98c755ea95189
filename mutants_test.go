package recovery

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Each of these fails for a change of one line that no other test noticed.

// orphaned gives a world in which n jobs of a dead worker wait for b, who sweeps only when asked.
func (w *world) orphaned(b *member, n int) (dead *incarnation) {
	w.t.Helper()
	a := w.join("dead", slowHeart())
	for i := range n {
		w.track(a, fmt.Sprint(i))
	}
	dead = a.current.Load()
	a.crash()
	require.NoError(w.t, b.fenceOwn(bg, dead))
	return dead
}

// A worker that lives for years and gives jobs back must not pile up proof of it.
func TestProof_handedExpires(t *testing.T) {
	bothWays(t, func(t *testing.T, w *world) {
		a := w.join("a", slowHeart())
		k := w.keys(a.WorkerID())
		require.NoError(t, w.track(a, "job")[0].Release())
		assert.Equal(t, []string{"1"}, w.raw.SMembers(bg, k.handed).Val())
		assert.Positive(t, w.raw.PTTL(bg, k.handed).Val())
		require.NoError(t, w.raw.Persist(bg, k.handed).Err())
		require.NoError(t, forgetScript.Run(bg, w.raw, []string{k.jobs, k.claims, k.handed}, 100000, "2").Err())
		assert.Positive(t, w.raw.PTTL(bg, k.handed).Val(), "nor by the script")
	})
}

// The proof is there when the claim is not: both change in one step.
func TestProof_forgetIsOneStep(t *testing.T) {
	inBubble(t, func(w *world) {
		b := w.make("b", slowHeart())
		w.orphaned(b, 1)
		_, err := b.Sweep(bg)
		require.NoError(t, err)
		assert.Equal(t, []string{"0"}, b.enq.ids())
		assert.Equal(t, 1, b.faults.count("multi"))
	})
}

// A checkpoint goes with its job.
func TestProof_forgottenWithItsCheckpoint(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.join("a", Config{})
		l := w.track(a, "job")[0]
		require.NoError(t, l.Checkpoint(bg, []byte("half")))
		require.NoError(t, l.Release())
		assert.Empty(t, w.raw.HGetAll(bg, w.keys(a.WorkerID()).jobs).Val())
	})
}

// What the Enqueuer has taken is written down, also if the sweep is ended in that moment.
func TestProof_acceptedWhileTheSweepEnds(t *testing.T) {
	inBubble(t, func(w *world) {
		b := w.make("b", slowHeart())
		dead := w.orphaned(b, 1)
		ctx, cancel := context.WithCancel(bg)
		defer cancel()
		b.enq.set(func(context.Context, Orphan) error { cancel(); return nil })
		_, _ = b.Sweep(ctx)
		synctest.Wait()
		assert.Equal(t, []string{"0"}, b.enq.ids())
		assert.Zero(t, w.raw.Exists(bg, dead.keys.claims, dead.keys.jobs).Val())
	})
}

// What was refused is offered again, although the record of another one that was taken with it could not be dropped.
func TestProof_refusedBesideOneThatStays(t *testing.T) {
	inBubble(t, func(w *world) {
		b := w.join("b", Config{}, func(m *member) { m.enq.batch = true })
		var refused atomic.Bool
		b.enq.set(func(_ context.Context, o Orphan) error {
			if o.ID == "1" && !refused.Swap(true) {
				return assert.AnError
			}
			return nil
		})
		b.faults.add(&fault{mode: failBefore, on: "forget"})
		w.orphaned(b, 2)
		time.Sleep(10 * time.Minute)
		assert.Equal(t, []string{"0", "1"}, b.enq.ids(), "both, and each once")
		b.accepted.mu.Lock()
		defer b.accepted.mu.Unlock()
		assert.Empty(t, b.accepted.keys, "nothing stayed, so nothing is remembered")
	})
}

// A sweep that could not bury says so.
func TestProof_buryFails(t *testing.T) {
	inBubble(t, func(w *world) {
		b := w.make("b", slowHeart())
		w.orphaned(b, 1)
		w.loadScripts()
		b.enq.set(func(context.Context, Orphan) error { return Permanent(assert.AnError) })
		b.faults.add(&fault{mode: failBefore, on: "bury"})
		report, err := b.Sweep(bg)
		assert.ErrorIs(t, err, errInjected)
		assert.Zero(t, report.Buried)
	})
}

// A first crash is one command, and is forgotten with the window.
func TestProof_firstCrash(t *testing.T) {
	bothWays(t, func(t *testing.T, w *world) {
		m := w.join("a", Config{RecoveryWindow: time.Hour})
		w.counted(m, "job", "a/1", Released, 0)
		w.counted(m, "job", "a/2", Crashed, 0)
		assert.Equal(t, 2, m.faults.count("count"), "one each")
		assert.InDelta(t, time.Hour, w.raw.PTTL(bg, m.keys.crashes("job")).Val(), float64(time.Minute))
	})
}

// A copy of take answers as the first one did, as long as nobody else has the lease; then never again.
func TestProof_copyOfTake(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.join("a", slowHeart()), w.make("b", slowHeart())
		l, inc := w.track(a, "job")[0], a.current.Load()
		take := func(why Reason) int64 {
			taken, err := a.take(bg, inc, l.member, why)
			require.NoError(t, err)
			return taken.start
		}
		require.Equal(t, l.Fence(), take(Released))
		time.Sleep(time.Second)
		assert.Equal(t, l.Fence(), take(Released), "a copy")
		assert.Zero(t, take(TimedOut), "no copy of this call")
		time.Sleep(a.tm.claimTTL)
		require.NoError(t, a.fenceOwn(bg, inc))
		c, err := b.claim(bg, inc.id, false)
		require.NoError(t, err)
		require.Len(t, c.leases, 1)
		time.Sleep(time.Second)
		assert.Zero(t, take(Released), "it is b's")
		assert.EqualValues(t, c.until.UnixMilli(), w.raw.ZScore(bg, inc.keys.claims, l.member).Val(), "for as long as before")
	})
}

// A lease is taken back from the claims, once or twice, but not when somebody has handed it back, and not behind a fence.
func TestProof_untake(t *testing.T) {
	bothWays(t, func(t *testing.T, w *world) {
		a := w.join("a", slowHeart())
		ls, inc := w.track(a, "back", "handed", "fenced"), a.current.Load()
		untake := func(l *Lease) bool {
			back, err := a.untake(l, l.Fence())
			require.NoError(t, err)
			return back
		}
		for _, l := range ls {
			_, err := a.take(bg, inc, l.member, Released)
			require.NoError(t, err)
		}
		assert.True(t, untake(ls[0]))
		assert.True(t, untake(ls[0]), "a copy")
		assert.False(t, w.raw.HExists(bg, inc.keys.jobs, ls[0].member+".claim").Val())
		require.NoError(t, a.forget(bg, inc.keys, []any{ls[1].member}, (&claimedLease{member: ls[1].member}).fields()))
		assert.False(t, untake(ls[1]))
		w.fence(inc.id)
		assert.False(t, untake(ls[2]))
		assert.Equal(t, []string{ls[0].member}, w.inflight(inc.id))
	})
}

// A worker that finds itself declared dead sees to its old jobs at once, and waits for no pass.
func TestProof_recoversItselfSoon(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.join("a", Config{SweepInterval: time.Hour})
		w.track(a, "job")
		w.fence(a.WorkerID())
		time.Sleep(10 * time.Second)
		assert.Equal(t, []string{"job"}, a.enq.ids())
	})
}

// A claim ahead that fails is told, and what it did not take is claimed again.
func TestProof_claimAheadFails(t *testing.T) {
	inBubble(t, func(w *world) {
		b := w.make("b", slowHeart())
		w.orphaned(b, claimLeases+50)
		w.loadScripts()
		b.faults.add(&fault{mode: failBefore, on: "claim", after: 1})
		report, err := b.Sweep(bg)
		assert.ErrorIs(t, err, errInjected)
		assert.Equal(t, claimLeases+50, report.HandedBack)
	})
}

// What was claimed ahead is offered by the same pass, whatever became of the page before it.
func TestProof_claimedAheadIsOffered(t *testing.T) {
	inBubble(t, func(w *world) {
		b := w.make("b", slowHeart(), func(m *member) { m.enq.batch = true })
		w.orphaned(b, 2*claimLeases)
		b.enq.set(func(context.Context, Orphan) error { return assert.AnError })
		report, err := b.Sweep(bg)
		require.NoError(t, err)
		assert.Equal(t, 2*claimLeases, report.Postponed)
		assert.Len(t, b.enq.called(), 2*claimLeases)
	})
}

// What is refused, and falls due again while others are offered, is for the next pass.
func TestProof_passEndsWithoutProgress(t *testing.T) {
	inBubble(t, func(w *world) {
		cfg := slowHeart()
		cfg.SweepInterval, cfg.EnqueueConcurrency = 100*time.Millisecond, 1
		b := w.make("b", cfg)
		w.orphaned(b, 5)
		b.enq.set(func(context.Context, Orphan) error { time.Sleep(time.Second); return assert.AnError })
		report, err := b.Sweep(bg)
		require.NoError(t, err)
		assert.Equal(t, 5, report.Postponed, "each once")
	})
}

// Figures that can't be right are taken again, at one moment, before anything is made of them.
func TestProof_oddBeatIsFollowedByAnExactOne(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.join("a", slowHeart())
		l, inc := w.track(a, "job")[0], a.current.Load()
		require.NoError(t, a.heart.beatOnce(bg))
		require.NoError(t, w.raw.ZRem(bg, inc.keys.inflight, l.member).Err())
		require.NoError(t, a.heart.beatOnce(bg))
		p, err := a.heart.send(bg, inc)
		require.NoError(t, err)
		assert.False(t, p.light)
		p, err = a.heart.send(bg, inc)
		require.NoError(t, err)
		assert.True(t, p.light, "once is enough")
	})
}

// The records of a new incarnation have a TTL from its first beat on.
func TestProof_rejoinedRecordsExpire(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.join("a", Config{})
		time.Sleep(6 * time.Second)
		w.fence(a.WorkerID())
		time.Sleep(6 * time.Second)
		require.EqualValues(t, 1, a.Stats().Rejoins)
		w.track(a, "job")
		time.Sleep(6 * time.Second)
		k := w.keys(a.WorkerID())
		assert.Positive(t, w.raw.PTTL(bg, k.jobs).Val())
		assert.Positive(t, w.raw.PTTL(bg, k.inflight).Val())
	})
}

// A queue for which nobody waits any more is looked at for InflightTTL, and then forgotten.
func TestProof_queueIsForgotten(t *testing.T) {
	inBubble(t, func(w *world) {
		q := NewListQueue("jobs")
		cfg := Config{InflightTTL: 10 * time.Minute}
		a, b := w.join("a", cfg, into(q)), w.join("b", cfg)
		ctx, cancel := context.WithTimeout(bg, time.Second)
		defer cancel()
		_, _ = a.Fetch(ctx, q, 1)
		require.NoError(t, a.Stop(bg))
		time.Sleep(9 * time.Minute)
		assert.Len(t, w.raw.ZRange(bg, b.keys.queues(), 0, -1).Val(), 1)
		time.Sleep(2 * time.Minute)
		assert.Empty(t, w.raw.ZRange(bg, b.keys.queues(), 0, -1).Val())
	})
}

// A job that was lost before its handler began leaves its place to another.
func TestProof_workGoesOnAfterALostJob(t *testing.T) {
	inBubble(t, func(w *world) {
		q := NewListQueue("jobs")
		m := w.join("a", Config{}, into(q))
		var long atomic.Bool
		ctx, cancel := context.WithCancel(bg)
		ended := working(m, ctx, q, 1, func(context.Context, *Lease) error {
			if long.Load() {
				time.Sleep(time.Minute)
			}
			time.Sleep(time.Millisecond)
			return nil
		})
		w.push("jobs", "warm", "up")
		time.Sleep(time.Second)
		long.Store(true)
		w.push("jobs", "runs", "waits")
		time.Sleep(time.Second)
		require.Len(t, w.inflight(m.WorkerID()), 2)
		w.fence(m.WorkerID())
		time.Sleep(10 * time.Minute)
		for _, next := range []string{"taken by a Fetch that was under way", "taken by the next"} {
			w.push("jobs", next)
			time.Sleep(5 * time.Minute)
			assert.Empty(t, w.queued("jobs"))
		}
		assert.Zero(t, m.Stats().Inflight)
		cancel()
		assert.NoError(t, <-ended)
	})
}

// A handler that could not release its job, or whose own Done is not confirmed, leaves its place to another.
func TestProof_workGoesOnAfterTrouble(t *testing.T) {
	for name, end := range map[string]func(m *member, l *Lease) error{
		"Release is refused": func(m *member, l *Lease) error {
			m.faults.add(&fault{mode: failBefore, on: "count"})
			return l.Release()
		},
		"Done is not confirmed": func(m *member, l *Lease) error {
			m.faults.add(&fault{mode: failBefore, on: "commit"})
			return l.Done()
		},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(w *world) {
				q := NewListQueue("jobs")
				m := w.join("a", Config{}, into(q))
				w.loadScripts()
				var runs atomic.Int64
				ctx, cancel := context.WithCancel(bg)
				ended := working(m, ctx, q, 1, func(_ context.Context, l *Lease) error {
					time.Sleep(time.Second) // too slow for any to be fetched ahead
					if runs.Add(1) == 1 {
						assert.Error(t, end(m, l))
					}
					return nil
				})
				w.push("jobs", "a", "b")
				time.Sleep(time.Minute)
				assert.GreaterOrEqual(t, runs.Load(), int64(2))
				assert.Empty(t, w.queued("jobs"))
				cancel()
				assert.NoError(t, <-ended)
			})
		})
	}
}

// Many small records are read by a few commands.
func TestProof_recordsAreReadByPages(t *testing.T) {
	inBubble(t, func(w *world) {
		b := w.make("b", slowHeart())
		dead := w.orphaned(b, claimLeases)
		c, err := b.claim(bg, dead.id, false)
		require.NoError(t, err)
		require.Len(t, c.leases, claimLeases)
		assert.LessOrEqual(t, b.faults.count("records"), 5, "1, 4, 16, 64 and the rest")
	})
}

// What a lane owes is counted, and paid.
func TestProof_owed(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.join("a", slowHeart())
		w.loadScripts()
		inc := a.current.Load()
		jobs := make([]Job, 200)
		for i := range jobs {
			jobs[i].ID = fmt.Sprint(i)
		}
		a.faults.add(&fault{mode: failBefore, on: "commit", times: 3})
		for n := range 2 {
			_, err := a.TrackAll(bg, jobs...)
			require.Error(t, err)
			assert.EqualValues(t, 200*(n+1), inc.owed.Load())
		}
		inc.kick() // a batch, of fewer than it owes, that fails
		synctest.Wait()
		assert.EqualValues(t, 400, inc.owed.Load())
		inc.owed.Add(maxUnsettled)
		_, err := a.Track(bg, Job{ID: "one more"})
		assert.Error(t, err, "too much is unknown")
		inc.owed.Add(-maxUnsettled)
		inc.kick()
		synctest.Wait()
		assert.True(t, inc.idle())
		assert.Zero(t, inc.owed.Load())
	})
}

// A copy of a fetch answers what is still tracked, and nothing else.
func TestProof_copyOfFetch(t *testing.T) {
	bothWays(t, func(t *testing.T, w *world) {
		q := NewListQueue(w.ns + "jobs")
		a := w.join("a", slowHeart(), into(q))
		inc := a.current.Load()
		w.push(q.key, "tracked", "claimed")
		c := inc.next(bg, []*ListQueue{q}, 2)
		first, err := a.ask(bg, inc, c, 2)
		require.NoError(t, err)
		require.Len(t, first, 2)
		_, err = a.take(bg, inc, first[1].member, Released)
		require.NoError(t, err)
		again, err := a.ask(bg, inc, c, 2)
		require.NoError(t, err)
		require.Len(t, again, 1)
		assert.Equal(t, first[0].member, again[0].member)
		assert.Equal(t, first[0].Fence(), again[0].Fence())
	})
}

// A dead letter's Job can be tracked as it is, and goes on from its checkpoint.
func TestProof_letterHandsOnItsCheckpoint(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.join("a", Config{})
		a.enq.set(func(context.Context, Orphan) error { return Permanent(errors.New("never")) })
		l := w.track(a, "job")[0]
		require.NoError(t, l.Checkpoint(bg, []byte("half")))
		require.Error(t, l.Release())
		in, to := NewInspector(w.raw, w.ns), &recorder{}
		require.NoError(t, in.Requeue(bg, l.ID(), to))
		require.Len(t, to.accepted(), 1)
		assert.Equal(t, "half", string(to.accepted()[0].Checkpoint))
		assert.Equal(t, "half", string(to.accepted()[0].Job.Checkpoint))
	})
}

// A sweeper that could not read its records until its claim ran out gives nothing back that a peer has by then.
func TestProof_lateUnclaim(t *testing.T) {
	inBubble(t, func(w *world) {
		cfg := slowHeart()
		cfg.EnqueueTimeout = time.Second // a claim: 3 s
		a, b := w.make("a", cfg), w.make("b", cfg)
		dead := w.orphaned(b, 5)
		a.faults.add(&fault{mode: hang, on: "records", times: -1}) // four attempts, of a quarter of the claim's time each
		a.faults.add(&fault{mode: slow, on: "postpone", delay: 500 * time.Millisecond})
		ended := make(chan error, 1)
		go func() { _, err := a.claim(bg, dead.id, false); ended <- err }()
		time.Sleep(3010 * time.Millisecond)
		c, err := b.claim(bg, dead.id, false)
		require.NoError(t, err)
		require.Len(t, c.leases, 5, "a's claim has run out: they are b's now, for 3 s")
		require.Error(t, <-ended)
		require.Positive(t, a.faults.count("postpone"))
		c, err = b.claim(bg, dead.id, false)
		require.NoError(t, err)
		assert.Equal(t, verdictIdle, c.verdict, "b's claim lasts")
	})
}

// A beat without TTL is nobody's: it does not keep the peers from a dead worker's jobs.
func TestProof_beatWithoutTTL(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.join("a", Config{}), w.join("b", Config{})
		w.track(a, "job")
		a.crash()
		require.NoError(t, w.raw.Persist(bg, w.keys(a.WorkerID()).beat).Err())
		time.Sleep(time.Minute)
		assert.Equal(t, []string{"job"}, b.enq.ids())
	})
}

// A worker that could not be looked at is neither alive nor dead, and the sweep says so.
func TestProof_lookFails(t *testing.T) {
	inBubble(t, func(w *world) {
		b := w.make("b", slowHeart())
		w.orphaned(b, 1)
		b.faults.add(&fault{mode: failBefore, on: "pttl"})
		report, err := b.Sweep(bg)
		assert.ErrorIs(t, err, errInjected)
		assert.Equal(t, SweepReport{Workers: 1, Took: report.Took}, report)
		assert.Zero(t, b.faults.count("claim"))
	})
}

// A call of the Enqueuer begins only if it ends before its claim does: two sweepers do not offer the same job at a time.
func TestProof_lateCallsAreNotBegun(t *testing.T) {
	inBubble(t, func(w *world) {
		cfg := slowHeart()
		cfg.EnqueueTimeout, cfg.EnqueueConcurrency = time.Second, 1 // a claim: 3 s
		b, c := w.make("b", cfg), w.make("c", cfg)
		for _, m := range []*member{b, c} {
			m.enq.set(func(context.Context, Orphan) error { time.Sleep(900 * time.Millisecond); return nil })
		}
		dead := w.orphaned(b, 10)
		ended := make(chan error, 1)
		go func() { _, err := b.Sweep(bg); ended <- err }()
		time.Sleep(3100 * time.Millisecond)
		c.sweep.newPass(bg).recoverWorker(dead.id) // not by Sweep: b has the lock
		require.NoError(t, <-ended)
		assert.Len(t, append(b.enq.called(), c.enq.called()...), 10)
	})
}

// Reading takes as long as the claim lasts, and no longer; what could not be read is anybody's at once.
func TestProof_readingAClaim(t *testing.T) {
	read := func(t *testing.T, n int, f *fault, check func(w *world, a, b *member, dead string)) {
		inBubble(t, func(w *world) {
			cfg := slowHeart()
			cfg.EnqueueTimeout = time.Second // a claim: 3 s
			a, b := w.make("a", cfg), w.make("b", cfg)
			dead := w.orphaned(b, n)
			a.faults.add(f)
			check(w, a, b, dead.id)
		})
	}
	t.Run("so slow that the claim runs out", func(t *testing.T) {
		read(t, claimLeases, &fault{mode: slow, on: "records", delay: 700 * time.Millisecond, times: -1}, func(_ *world, a, _ *member, dead string) {
			_, err := a.claim(bg, dead, false)
			assert.ErrorContains(t, err, "has run out")
		})
	})
	t.Run("fails", func(t *testing.T) {
		read(t, 5, &fault{mode: failBefore, on: "records", times: -1}, func(_ *world, a, b *member, dead string) {
			_, err := a.claim(bg, dead, false)
			require.Error(t, err)
			c, err := b.claim(bg, dead, false)
			require.NoError(t, err)
			assert.Len(t, c.leases, 5)
		})
	})
	t.Run("ended", func(t *testing.T) {
		read(t, 5, &fault{mode: hang, on: "records", times: -1}, func(_ *world, a, b *member, dead string) {
			ctx, cancel := context.WithTimeout(bg, 100*time.Millisecond)
			defer cancel()
			_, err := a.claim(ctx, dead, false)
			require.Error(t, err)
			c, err := b.claim(bg, dead, false)
			require.NoError(t, err)
			assert.Len(t, c.leases, 5)
		})
	})
	t.Run("hangs once", func(t *testing.T) {
		read(t, 10, &fault{mode: hang, on: "records"}, func(_ *world, a, _ *member, dead string) {
			c, err := a.claim(bg, dead, false)
			require.NoError(t, err)
			require.Len(t, c.leases, 10)
			assert.Error(t, c.leases[0].unread)
			for _, l := range c.leases[1:] {
				assert.NoError(t, l.unread)
			}
		})
	})
	t.Run("a page fails", func(t *testing.T) {
		inBubble(t, func(w *world) {
			b := w.make("b", slowHeart())
			dead := w.orphaned(b, 10)
			b.faults.add(&fault{mode: failBefore, on: "records", after: 1})
			c, err := b.claim(bg, dead.id, false)
			require.NoError(t, err)
			require.Len(t, c.leases, 10)
			for _, l := range c.leases {
				assert.NoError(t, l.unread, "asked for one by one")
			}
		})
	})
}

// A beat brings the number of the last Fetch, with the script and without.
func TestProof_beatsBringTheFetch(t *testing.T) {
	inBubble(t, func(w *world) {
		q := NewListQueue("jobs")
		a := w.join("a", slowHeart(), into(q))
		w.push("jobs", "x")
		_, err := a.Fetch(bg, q, 1)
		require.NoError(t, err)
		p, ok, err := a.heart.lightBeat(bg, a.current.Load(), false)
		require.NoError(t, err)
		require.True(t, ok)
		assert.EqualValues(t, 1, p.fetch)
		p, err = a.heart.fullBeat(bg, a.current.Load())
		require.NoError(t, err)
		assert.EqualValues(t, 1, p.fetch)
	})
}

// A Done that was not confirmed before Redis lost its data ends all the same: nobody has to call it again.
func TestProof_doneOfAnOldIncarnation(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.join("a", Config{})
		l := w.track(a, "job")[0]
		a.faults.add(&fault{mode: failBefore, on: "commit"})
		require.Error(t, l.Done())
		w.mini.FlushAll()
		time.Sleep(30 * time.Second)
		assert.EqualValues(t, 1, a.Stats().Rejoins)
		assert.EqualValues(t, 1, a.Stats().Done)
		assert.Zero(t, a.Stats().Inflight)
	})
}

// Done that is called again does not wait for the next beat.
func TestProof_doneAgain(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.join("a", slowHeart())
		l := w.track(a, "job")[0]
		a.faults.add(&fault{mode: failBefore, on: "commit"})
		require.Error(t, l.Done())
		began := time.Now()
		assert.NoError(t, l.Done())
		assert.Zero(t, time.Since(began))
	})
}

// Several arrivals go back in the order in which they came, all at once.
func TestProof_arrivalsKeepTheirOrder(t *testing.T) {
	inBubble(t, func(w *world) {
		q := NewListQueue("jobs")
		w.loadScripts()
		for _, name := range []string{"a", "b", "c"} {
			m := w.join(name, slowHeart(), into(q))
			go m.Fetch(bg, q, 1)
			synctest.Wait()
			m.faults.add(&fault{mode: failBefore, times: -1}) // nothing that it does reaches Redis, except what it waits for
		}
		d := w.join("d", slowHeart(), into(q))
		w.push("jobs", "1", "2", "3")
		synctest.Wait()
		require.Empty(t, w.queued("jobs"), "they woke a, b and c")
		leases, err := d.Fetch(bg, q, 3)
		require.NoError(t, err)
		assert.Equal(t, []string{"1", "2", "3"}, payloads(leases))
	})
}

// Fences of fetched jobs grow, also in a frozen clock.
func TestProof_fetchedFencesGrow(t *testing.T) {
	inBubble(t, func(w *world) {
		q := NewListQueue("jobs")
		a := w.join("a", slowHeart(), into(q))
		w.push("jobs", "x", "y")
		x, err := a.Fetch(bg, q, 1)
		require.NoError(t, err)
		y, err := a.Fetch(bg, q, 1)
		require.NoError(t, err)
		assert.Greater(t, y[0].Fence(), x[0].Fence())
		assert.Greater(t, w.track(a, "z")[0].Fence(), y[0].Fence())
	})
}

// An index of the wrong type costs no element: nothing is taken that can't be recorded.
func TestProof_fetchWithADamagedIndex(t *testing.T) {
	bothWays(t, func(t *testing.T, w *world) {
		q := NewListQueue(w.ns + "jobs")
		a := w.join("a", slowHeart(), into(q))
		w.push(q.key, "x")
		require.NoError(t, w.raw.Set(bg, w.keys(a.WorkerID()).inflight, "damaged", 0).Err())
		_, err := a.Fetch(bg, q, 1)
		require.Error(t, err)
		assert.Equal(t, []string{"x"}, w.queued(q.key))
	})
}

// Waiting for Backoff is no failure.
func TestProof_backoffIsNoFailure(t *testing.T) {
	inBubble(t, func(w *world) {
		cfg := slowHeart()
		cfg.Backoff = func(int) time.Duration { return time.Hour }
		b := w.make("b", cfg)
		w.orphaned(b, 1)
		report, err := b.Sweep(bg)
		require.NoError(t, err)
		assert.Equal(t, 1, report.Postponed)
		assert.Zero(t, b.Stats().HandBackFailed)
	})
}

// However a Release ends, the worker knows how many leases Redis has.
func TestProof_tallyAfterRelease(t *testing.T) {
	for name, answer := range map[string]error{"accepted": nil, "refused": errors.New("not today"), "buried": Permanent(errors.New("never")), "lost": nil} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(w *world) {
				a := w.join("a", slowHeart())
				inc := a.current.Load()
				a.enq.set(func(context.Context, Orphan) error { return answer })
				l := w.track(a, "job", "other")[0]
				if name == "lost" {
					_, err := a.take(bg, inc, l.member, TimedOut)
					require.NoError(t, err)
					require.NoError(t, a.forget(bg, inc.keys, []any{l.member}, (&claimedLease{member: l.member}).fields()))
				}
				_ = l.Release()
				n, tl := int64(len(w.inflight(inc.id))), inc.count(nil)
				assert.Equal(t, n, tl.acked-tl.doneSent, "at least: %+v", tl)
				assert.Equal(t, n, tl.sent-tl.doneAcked, "at most: %+v", tl)
			})
		})
	}
}

// Work that was told to end before it began has nothing to complain of.
func TestProof_workEndedBeforeItBegan(t *testing.T) {
	inBubble(t, func(w *world) {
		q := NewListQueue("jobs")
		m := w.make("a", Config{}, into(q))
		ctx, cancel := context.WithCancel(bg)
		cancel()
		assert.NoError(t, m.Work(ctx, q, 1, func(context.Context, *Lease) error { return nil }))
	})
}

// A letter goes into the list that it is given to: one that no Recoverer has seen, or that is consumed from its other end.
func TestProof_requeueIntoAnyList(t *testing.T) {
	inBubble(t, func(w *world) {
		q := NewListQueue("jobs", ElementFormat(stubborn{}))
		a := w.join("a", Config{}, into(q))
		tracked := w.track(a, "tracked")[0]
		require.Error(t, tracked.Release())
		in := NewInspector(w.raw, w.ns)
		require.NoError(t, in.Requeue(bg, tracked.ID(), NewListQueue("fresh")))
		assert.Equal(t, []string{"payload of tracked"}, w.queued("fresh"))

		w.push("jobs", "x")
		fetched, err := a.Fetch(bg, q, 1)
		require.NoError(t, err)
		require.NoError(t, fetched[0].Checkpoint(bg, []byte("half"))) // so that its format is asked, which refuses
		require.Error(t, fetched[0].Release())
		require.NoError(t, w.raw.RPush(bg, "lefts", "waits").Err())
		require.NoError(t, in.Requeue(bg, fetched[0].ID(), NewListQueue("lefts", ConsumeLeft())))
		assert.Equal(t, []string{"x", "waits"}, w.raw.LRange(bg, "lefts", 0, -1).Val(), "next in line")
	})
}

// Those who look on are told how old a job was.
func TestProof_ageOfAJob(t *testing.T) {
	inBubble(t, func(w *world) {
		var ages collected[time.Duration]
		a := w.join("a", Config{Events: Events{HandedBack: func(i HandedBackInfo) { ages.add(i.Age) }}})
		l := w.track(a, "job")[0]
		time.Sleep(time.Minute)
		require.NoError(t, l.Release())
		require.Len(t, ages.all(), 1)
		assert.InDelta(t, time.Minute, ages.all()[0], float64(time.Second))
	})
}

// elsewhere answers every write that waits for replicas that its slot has moved.
type elsewhere struct{ replicas }

type movedError struct{}

func (movedError) Error() string { return "MOVED 1 127.0.0.1:1" }
func (movedError) RedisError()   {}

func (h *elsewhere) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		if cmds[len(cmds)-1].Name() != "wait" || h.n.Add(1) > 100 {
			return next(ctx, cmds)
		}
		for _, c := range cmds {
			c.SetErr(movedError{})
		}
		return movedError{}
	}
}

// Redirections are followed a few times, not for ever.
func TestProof_endlessRedirection(t *testing.T) {
	inBubble(t, func(w *world) {
		cfg, h := slowHeart(), &elsewhere{}
		cfg.WaitReplicas = 1
		a := w.join("a", cfg, func(m *member) { m.rdb.AddHook(h) })
		_, err := a.Track(bg, Job{ID: "job"})
		assert.ErrorContains(t, err, "MOVED")
		assert.EqualValues(t, 6, h.n.Load())
	})
}

// On a Cluster, where the registry is another node's, each beat enters it all the same.
func TestProof_clusterRegistryIsRenewed(t *testing.T) {
	t.Parallel()
	c, rdb := startChaosCluster(t).fleet(t, "", 0)
	r := newOn(t, rdb, &recorder{}, Config{Namespace: c.ns, HeartbeatInterval: 100 * time.Millisecond, OrphanThreshold: 5 * time.Second})
	workers := newKeyspace(c.ns, "").workers()
	for range 2 { // the first must not be the last
		require.NoError(t, rdb.SRem(bg, workers, r.WorkerID()).Err())
		require.Eventually(t, func() bool { return rdb.SIsMember(bg, workers, r.WorkerID()).Val() }, 20*time.Second, 10*time.Millisecond)
	}
}

// Giving a job back is no crash: it is not buried for those that it had before.
func TestProof_releaseBeyondTheLimit(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.join("a", Config{MaxRecoveries: 1})
		for i := range 3 {
			a.countCrashes(bg, time.Now().UnixMilli(), []*orphan{{Orphan: Orphan{Job: Job{ID: "job"}, Key: fmt.Sprint("x/", i)}, lease: &claimedLease{}}})
		}
		l := w.track(a, "job")[0]
		_, err := a.take(bg, a.current.Load(), l.member, Released) // as Stop does, and dies: a sweep goes on
		require.NoError(t, err)
		time.Sleep(a.tm.claimTTL)
		a.sweep.newPass(bg).ownClaims(a.current.Load())
		assert.Equal(t, []string{"job"}, a.enq.ids())
		assert.Zero(t, a.Stats().Buried)
	})
}

// What can't be read is not given to anybody.
func TestProof_requeueOfAnUnreadableLetter(t *testing.T) {
	inBubble(t, func(w *world) {
		b := w.make("b", slowHeart())
		dead := w.orphaned(b, 1)
		require.NoError(t, w.raw.HSet(bg, dead.keys.jobs, "1", "garbage").Err())
		_, err := b.Sweep(bg)
		require.NoError(t, err)
		require.EqualValues(t, 1, b.Stats().Buried)
		to := &recorder{}
		assert.Error(t, NewInspector(w.raw, w.ns).Requeue(bg, leaseID(dead.id, "1"), to))
		assert.Empty(t, to.called())
	})
}

// The pages in which records are read become smaller when these are large.
func TestProof_pagesOfLargeRecords(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.join("a", slowHeart()), w.make("b", slowHeart())
		for i := range 40 {
			_, err := a.Track(bg, Job{ID: fmt.Sprint(i), Payload: make([]byte, 100<<10)})
			require.NoError(t, err)
		}
		require.NoError(t, b.fenceOwn(bg, a.current.Load()))
		c, err := b.claim(bg, a.WorkerID(), false)
		require.NoError(t, err)
		assert.LessOrEqual(t, len(c.leases), 11, "a MiB, and not much more")
	})
}
