package recovery

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
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

// replicas answers WAIT.
type replicas struct{ n atomic.Int64 }

func (h *replicas) DialHook(next redis.DialHook) redis.DialHook          { return next }
func (h *replicas) ProcessHook(next redis.ProcessHook) redis.ProcessHook { return next }
func (h *replicas) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		var waits []*redis.Cmd
		for _, c := range cmds {
			if strings.ToLower(c.Name()) == "wait" {
				w := c.(*redis.Cmd)
				w.Args()[1] = 0 // do not really wait
				waits = append(waits, w)
			}
		}
		err := next(ctx, cmds)
		for _, w := range waits {
			w.SetVal(h.n.Load())
		}
		return err
	}
}

// WaitReplicas: a Track that failed for too few replicas makes the lane dirty; from then on Done (which never waited for replicas) fails too.
func TestWrite_doneWithTooFewReplicas(t *testing.T) {
	w := onReal(t)
	cfg := fast()
	cfg.WaitReplicas = 1
	h := &replicas{}
	h.n.Store(1)
	a := w.join("a", cfg, func(m *member) { m.rdb.AddHook(h) })
	ls := w.track(a, "one", "two")
	h.n.Store(0)
	assert.NoError(t, ls[0].Done(), "Done does not wait for replicas")
	_, err := a.Track(bg, Job{ID: "three"})
	require.ErrorIs(t, err, errTooFewReplicas)
	assert.NoError(t, ls[1].Done(), "Done does not wait for replicas")
	w.eventually(a.current.Load().idle, "the debt is paid")
	assert.NoError(t, ls[1].Done(), "nor later")
}

// A copy of a claim (lost reply) answers the leases of the claim before it, if both fell into one millisecond: the prefetch makes that likely.
func TestWrite_copyOfAPrefetchedClaim(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.join("a", Config{})
		b := w.make("b", Config{})
		for i := range 500 {
			w.track(a, fmt.Sprint(i))
		}
		inc := a.current.Load()
		a.crash()
		require.NoError(t, b.fenceOwn(bg, inc))
		w.loadScripts()
		n := atomic.Int64{}
		b.enq.set(func(context.Context, Orphan) error {
			time.Sleep(100 * time.Millisecond)
			return nil
		})
		b.faults.add(&fault{mode: twice, on: "claim", times: -1, between: func() { n.Add(1) }})
		_, err := b.Sweep(bg)
		require.NoError(t, err)
		seen := map[string]int{}
		for _, o := range b.enq.called() {
			seen[o.ID]++
		}
		twiceSeen := 0
		for _, c := range seen {
			if c > 1 {
				twiceSeen++
			}
		}
		assert.Zero(t, twiceSeen, "offered twice at the same time")
	})
}

// A removed checkpoint leaves its number behind: for ever, in a live worker.
func TestWrite_removedCheckpointLeaks(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.join("a", Config{})
		for i := range 10 {
			l := w.track(a, fmt.Sprint(i))[0]
			require.NoError(t, l.Checkpoint(bg, []byte("x")))
			require.NoError(t, l.Checkpoint(bg, nil))
			require.NoError(t, l.Release())
		}
		time.Sleep(10 * time.Minute)
		assert.Empty(t, w.raw.HGetAll(bg, w.keys(a.WorkerID()).jobs).Val())
	})
}

// Stop says that jobs are left, because of numbers of removed checkpoints.
func TestWrite_stopWithRemovedCheckpoints(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.join("a", Config{})
		for i := range 600 {
			l := w.track(a, fmt.Sprint(i))[0]
			require.NoError(t, l.Checkpoint(bg, []byte("x")))
			require.NoError(t, l.Checkpoint(bg, nil))
		}
		ctx, cancel := context.WithCancel(bg)
		cancel()
		id := a.WorkerID()
		err := a.Stop(ctx)
		assert.Len(t, a.enq.accepted(), 600)
		assert.NotContains(t, fmt.Sprint(err), "left to the peers")
		assert.NotContains(t, w.workers(), id)
	})
}

// Small records first: the next page is 246 large ones.
func TestWrite_claimOfHugeRecords(t *testing.T) {
	w := onReal(t)
	a := w.join("a", slowHeart())
	for i := range 4 {
		w.track(a, fmt.Sprint(i))
	}
	big := make([]byte, 1<<20)
	for i := range 60 {
		_, err := a.Track(bg, Job{ID: fmt.Sprint("big", i), Payload: big})
		require.NoError(t, err)
	}
	inc := a.current.Load()
	require.NoError(t, a.fenceOwn(bg, inc))
	c, err := a.claim(bg, inc.id, false)
	require.NoError(t, err)
	n := 0
	for _, l := range c.leases {
		n += len(l.record)
	}
	assert.LessOrEqual(t, n, 9<<20, "bytes in one answer: no more than a page beyond the limit")
}

// A lease whose claims key is gone: Done said nil, and the sweep hands the job back.
func TestWrite_doneOfAClaimedLeaseWithoutClaims(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.join("a", slowHeart())
		b := w.make("b", slowHeart())
		l := w.track(a, "job")[0]
		inc := a.current.Load()
		require.NoError(t, a.fenceOwn(bg, inc))
		_, err := b.claim(bg, inc.id, false)
		require.NoError(t, err)
		require.NoError(t, w.raw.Del(bg, inc.keys.claims).Err()) // evicted, or damaged and put aside
		done := l.Done()
		_, err = b.Sweep(bg)
		require.NoError(t, err)
		if len(b.enq.accepted()) > 0 {
			assert.ErrorIs(t, done, ErrLost, "handed back")
		}
	})
}

// Many zombies' Done at a time: each asks on its own, one after the other.
func TestWrite_manyLostDones(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.join("a", slowHeart())
		a.tm.call = 10 * time.Second
		b := w.make("b", slowHeart())
		var ls []*Lease
		for i := range 250 {
			ls = append(ls, w.track(a, fmt.Sprint(i))...)
		}
		inc := a.current.Load()
		require.NoError(t, a.fenceOwn(bg, inc))
		_, err := b.claim(bg, inc.id, false)
		require.NoError(t, err)
		w.loadScripts()
		a.faults.add(&fault{mode: slow, on: "where", delay: 50 * time.Millisecond, times: -1})
		a.faults.add(&fault{mode: slow, on: "commit", delay: 10 * time.Millisecond, times: 1})
		began := time.Now()
		var wg sync.WaitGroup
		var other, worst atomic.Int64
		for _, l := range ls {
			wg.Add(1)
			go func() {
				defer wg.Done()
				if err := l.Done(); !errors.Is(err, ErrLost) {
					other.Add(1)
				}
				worst.Store(max(worst.Load(), int64(time.Since(began))))
			}()
		}
		wg.Wait()
		assert.Zero(t, other.Load(), "not told ErrLost")
		assert.Less(t, time.Duration(worst.Load()), 2*time.Second)
	})
}

// A beat without TTL lets a sweeper note a suspicion; a light beat replaces the key and leaves the suspicion.
func TestWrite_staleSuspicion(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.join("a", Config{}), w.join("b", Config{})
		w.track(a, "job")
		time.Sleep(12 * time.Second)
		k := w.keys(a.WorkerID())
		require.NoError(t, w.raw.Persist(bg, k.beat).Err())
		c, err := b.claim(bg, a.WorkerID(), false)
		require.NoError(t, err)
		require.Equal(t, verdictSuspect, c.verdict)
		time.Sleep(6 * time.Second) // at least one beat
		assert.Zero(t, w.raw.Exists(bg, k.suspect).Val(), "refuted by a beat")
		time.Sleep(6 * time.Second)
		last := time.Now()
		a.faults.add(&fault{mode: failBefore, times: -1})
		for b.Stats().FencedPeers == 0 && time.Since(last) < time.Minute {
			time.Sleep(100 * time.Millisecond)
		}
		assert.GreaterOrEqual(t, time.Since(last), 15*time.Second, "fenced after OrphanThreshold, 20 s after the last beat")
	})
}

// A handler stays idle while the others run long jobs and the list is full.
func TestWrite_idleHandler(t *testing.T) {
	for try := range 30 {
		stuck := false
		inBubble(t, func(w *world) {
			q := NewListQueue("jobs")
			m := w.join("a", Config{}, into(q))
			var running atomic.Int64
			var n atomic.Int64
			const places = 8
			ctx, cancel := context.WithCancel(bg)
			for i := range 400 {
				w.push("jobs", fmt.Sprint(i))
			}
			ended := working(m, ctx, q, places, func(ctx context.Context, l *Lease) error {
				running.Add(1)
				defer running.Add(-1)
				switch k := n.Add(1); {
				case k < int64(100+try):
					time.Sleep(time.Millisecond)
				case k < int64(160+2*try):
					time.Sleep(30 * time.Millisecond)
				default:
					select {
					case <-time.After(time.Hour):
					case <-ctx.Done():
					}
				}
				return nil
			})
			time.Sleep(10 * time.Minute)
			if r := running.Load(); r < places {
				stuck = true
				t.Logf("try %d: %d of %d handlers run, %d wait here", try, r, places, m.Stats().Inflight)
			}
			cancel()
			stop, c2 := context.WithCancel(bg)
			c2()
			_ = m.Stop(stop)
			<-ended
		})
		if stuck {
			t.Error("a handler is idle, and the list is full")
			return
		}
	}
}

// A slow Enqueuer: the page that was claimed ahead is not offered at all, and the pass ends.
func TestWrite_prefetchedClaimRunsOut(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.join("a", slowHeart())
		b := w.make("b", Config{})
		for i := range 600 {
			w.track(a, fmt.Sprint(i))
		}
		inc := a.current.Load()
		a.crash()
		require.NoError(t, b.fenceOwn(bg, inc))
		b.enq.set(func(context.Context, Orphan) error { time.Sleep(time.Second); return nil })
		rep, err := b.Sweep(bg)
		require.NoError(t, err)
		assert.Equal(t, 600, rep.HandedBack, "%+v", rep)
	})
}

// Two handlers end while one job waits here: neither wakes the feeder, one of them takes the job, and the other stays idle until something ends.
func TestWrite_lostWakeUp(t *testing.T) {
	p := &pool{places: 3, fetched: make(chan *Lease, 15), freed: make(chan struct{}, 1)}
	p.took.Store(int64(time.Minute)) // slow by now; the job in fetched was taken ahead when they were fast
	p.fetched <- &Lease{}
	p.held.Store(4)
	require.Zero(t, p.room(), "the feeder waits for freed")
	p.ended()
	p.ended()
	<-p.fetched // one of the two takes it, and runs for an hour
	p.wake()    // as handle does
	require.Equal(t, 1, p.room(), "there is an idle handler")
	assert.Len(t, p.freed, 1, "and the feeder is told")
}

// Random faults, then peace: everything must settle, nothing may be left, nothing be repaired.
func TestWrite_fuzz(t *testing.T) {
	for seed := range 40 {
		inBubble(t, func(w *world) {
			rnd := rand.New(rand.NewPCG(uint64(seed), 1))
			a := w.join("a", Config{})
			w.loadScripts()
			if seed%2 == 1 {
				w.raw.ScriptFlush(bg)
			}
			var wg sync.WaitGroup
			stop := make(chan struct{})
			wg.Add(1)
			go func() {
				defer wg.Done()
				for {
					select {
					case <-stop:
						return
					case <-time.After(time.Duration(rnd.IntN(int(20 * time.Millisecond)))):
					}
					modes := []faultMode{failBefore, loseReply, twice, slow, hang, slow, slow}
					on := []string{"commit", "commit", "commit", "where"}
					a.faults.add(&fault{mode: modes[rnd.IntN(len(modes))], on: on[rnd.IntN(len(on))], delay: time.Duration(rnd.IntN(int(300 * time.Millisecond)))})
				}
			}()
			var failed, unconfirmed atomic.Int64
			for g := range 12 {
				r := rand.New(rand.NewPCG(uint64(seed), uint64(g+7)))
				wg.Add(1)
				go func() {
					defer wg.Done()
					for i := range 60 {
						ctx, cancel := bg, context.CancelFunc(func() {})
						if r.IntN(2) == 0 {
							ctx, cancel = context.WithTimeout(bg, time.Duration(r.IntN(int(100*time.Millisecond))))
						}
						began := time.Now()
						n := 1
						if r.IntN(10) == 0 {
							n = 1 + r.IntN(8)
						}
						var jobs []Job
						for j := range n {
							jobs = append(jobs, Job{ID: fmt.Sprint(g, "/", i, "/", j), Payload: make([]byte, r.IntN(100))})
						}
						ls, err := a.TrackAll(ctx, jobs...)
						if d, ok := ctx.Deadline(); ok && time.Now().After(d.Add(time.Millisecond)) {
							t.Errorf("Track returned %v after its ctx, began %v ago", time.Since(d), time.Since(began))
						}
						cancel()
						if err != nil {
							failed.Add(1)
							continue
						}
						time.Sleep(time.Duration(r.IntN(int(50 * time.Millisecond))))
						for _, l := range ls {
							if r.IntN(20) == 0 {
								go l.Done()
							}
							if err := l.Done(); err != nil {
								unconfirmed.Add(1)
								if errors.Is(err, ErrLost) {
									t.Errorf("lost: %v", err)
								}
							}
						}
					}
				}()
			}
			time.Sleep(8 * time.Second)
			close(stop)
			a.faults.clear()
			wg.Wait()
			time.Sleep(time.Minute)
			synctest.Wait()
			inc := a.current.Load()
			assert.True(t, inc.idle(), "seed %d: idle", seed)
			assert.Empty(t, w.inflight(inc.id), "seed %d", seed)
			assert.Empty(t, w.raw.HGetAll(bg, w.keys(inc.id).jobs).Val(), "seed %d", seed)
			assert.Zero(t, a.Stats().Inflight, "seed %d", seed)
			assert.Zero(t, a.Stats().Rejoins, "seed %d", seed)
			tl := inc.count(nil)
			assert.Equal(t, tl.sent-tl.doneAcked, int64(0), "seed %d: %+v", seed, tl)
			assert.Equal(t, tl.acked-tl.doneSent, int64(0), "seed %d: %+v", seed, tl)
			if seed%20 == 0 {
				t.Logf("seed %d: failed %d, unconfirmed %d, repaired %d, tally %+v", seed, failed.Load(), unconfirmed.Load(), a.Stats().Repaired, tl)
			}
			if !t.Failed() {
			}
		})
		if t.Failed() {
			return
		}
	}
}
