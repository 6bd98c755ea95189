package recovery

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// The heart stands still while an audit tracks again page by page; a live worker is declared dead.
func TestRegress_P1_auditStopsTheHeart(t *testing.T) {
	inBubble(t, func(w *world) {
		cfg := Config{HeartbeatInterval: time.Second, OrphanThreshold: 3 * time.Second}
		a, b := w.join("a", cfg), w.join("b", cfg)
		var jobs []Job
		for i := range 5000 {
			jobs = append(jobs, Job{ID: fmt.Sprint(i)})
		}
		leases, err := a.TrackAll(bg, jobs...)
		require.NoError(t, err)
		ctx := leases[0].Context()
		w.mini.FlushAll()
		a.faults.add(&fault{mode: slow, on: "commit", times: -1, delay: 100 * time.Millisecond}) // 40 pages
		time.Sleep(time.Minute)
		synctest.Wait()
		assert.NoError(t, ctx.Err(), "the worker lived and reached Redis all the time")
		assert.Zero(t, len(b.enq.accepted()))
		assert.LessOrEqual(t, a.Stats().Rejoins, uint64(1))
	})
}

// A second Done waits for as long as Redis is away, not for a round trip.
func TestRegress_doneHangsWhileRedisIsAway(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.join("a", Config{})
		var jobs []Job
		for i := range 2000 {
			jobs = append(jobs, Job{ID: fmt.Sprint(i)})
		}
		leases, err := a.TrackAll(bg, jobs...)
		require.NoError(t, err)
		a.faults.add(&fault{mode: hang, times: -1})
		var out atomic.Int64
		for _, l := range leases {
			go func() {
				_ = l.Done()
				_ = l.Done() // "calling it again waits again"
				out.Add(1)
			}()
		}
		time.Sleep(30 * time.Minute)
		synctest.Wait()
		assert.EqualValues(t, len(leases), out.Load(), "calls of Done that have returned after half an hour")
		a.faults.clear()
		time.Sleep(time.Minute)
	})
}

// This worker's own give-ups hang in the Enqueuer and hold up its sweeps.
func TestRegress_P3_ownGiveUpsHoldTheSweep(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.join("a", Config{})
		a.enq.set(func(ctx context.Context, o Orphan) error {
			if o.ID == "good" {
				return nil
			}
			<-ctx.Done()
			return ctx.Err()
		})
		a.faults.add(&fault{mode: failBefore, on: "take", times: 20}) // a hiccup of Redis
		for i := range 20 {
			_ = guard(func() { _ = a.Do(bg, Job{ID: fmt.Sprint("own", i)}, func(context.Context) error { panic("x") }) })
		}
		b := w.join("b", Config{})
		w.track(b, "good")
		b.crash()
		last := b.Stats().LastBeat
		for len(a.enq.ids()) == 0 && time.Since(last) < 10*time.Minute {
			time.Sleep(100 * time.Millisecond)
		}
		t.Logf("took %v", time.Since(last))
		assert.LessOrEqual(t, time.Since(last), 25*time.Second+10*time.Second, "OrphanThreshold + SweepInterval, and even an EnqueueTimeout more")
	})
}

// Another sweeper's lock, then the spread on top of it: beyond OrphanThreshold + SweepInterval. TestDeath_withinTheBound allows itself that eighth.
func TestRegress_P3_boundWithASweepOnDemand(t *testing.T) {
	var worst time.Duration
	cfg := Config{HeartbeatInterval: time.Second, OrphanThreshold: 10 * time.Second, SweepInterval: 80 * time.Second}
	for range 10 {
		inBubble(t, func(w *world) {
			a := w.join("a", cfg)
			time.Sleep(time.Minute)
			b := w.join("b", cfg)
			w.track(b, "job")
			b.crash()
			last := b.Stats().LastBeat
			time.Sleep(time.Until(last.Add(5*time.Second - 2*time.Millisecond))) // its beat is about to run out
			_, err := a.Sweep(bg)
			require.NoError(t, err)
			for len(a.enq.ids()) == 0 {
				time.Sleep(10 * time.Millisecond)
			}
			worst = max(worst, time.Since(last))
		})
	}
	assert.LessOrEqual(t, worst, cfg.OrphanThreshold+cfg.SweepInterval+100*time.Millisecond)
}

// The registry is the one key whose wrong type is not handled: no dead worker is found any more, nobody can start.
func TestRegress_P5_registryOfWrongType(t *testing.T) {
	t.Parallel()
	w := onReal(t)
	dead, peer := w.join("dead", fast()), w.join("peer", fast())
	w.track(dead, "job")
	w.raw.Del(bg, peer.keys.workers())
	w.raw.Set(bg, peer.keys.workers(), "x", 0)
	// The first beat puts it aside; each worker is found again once its own beat has entered it.
	w.eventually(func() bool { return w.raw.SIsMember(bg, peer.keys.workers(), dead.WorkerID()).Val() }, "beats heal it")
	dead.crash()
	assert.Eventually(t, func() bool { return len(peer.enq.ids()) == 1 }, 3*time.Second, 10*time.Millisecond)
}

// "It blocks until the pass has ended, or ctx has."
func TestRegress_sweepIgnoresItsCtx(t *testing.T) {
	inBubble(t, func(w *world) {
		dead, out := w.join("dead", Config{}), w.make("out", Config{EnqueueTimeout: time.Minute})
		out.enq.set(func(ctx context.Context, _ Orphan) error { <-ctx.Done(); return ctx.Err() })
		w.track(dead, "job")
		require.NoError(t, dead.fenceOwn(bg, dead.current.Load()))
		dead.crash()
		ctx, cancel := context.WithTimeout(bg, time.Second)
		defer cancel()
		began := time.Now()
		_, _ = out.Sweep(ctx)
		assert.LessOrEqual(t, time.Since(began), 2*time.Second)
	})
}

type sealPanics struct{}

func (sealPanics) Seal(_, _ []byte) ([]byte, error) { panic("kms client is nil") }
func (sealPanics) Open(b, _ []byte) ([]byte, error) { return b, nil }

func TestRegress_sealPanicsLeaksInflight(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.join("a", Config{Codec: sealPanics{}, MaxInflight: 1})
		_, err := a.Track(bg, Job{ID: "x"})
		require.ErrorContains(t, err, "seal: panic")
		assert.Zero(t, a.Stats().Inflight)
	})
}

// A call that ignores its ctx (go-redis does not interrupt a read): Done never returns.
type deaf struct {
	gate chan struct{}
	once string // only the first call of this name; else all
	met  atomic.Bool
}

func (d *deaf) DialHook(n redis.DialHook) redis.DialHook { return n }
func (d *deaf) ProcessHook(n redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, c redis.Cmder) error {
		if d.once == "" || d.once == nameOf(c) && !d.met.Swap(true) {
			<-d.gate
		}
		return n(ctx, c)
	}
}
func (d *deaf) ProcessPipelineHook(n redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, c []redis.Cmder) error {
		if d.once == "" {
			<-d.gate
		}
		return n(ctx, c)
	}
}

func TestRegress_doneIsNotBounded(t *testing.T) {
	inBubble(t, func(w *world) {
		gate := make(chan struct{})
		a := w.join("a", Config{})
		a.bounds = false // as with a client that has no timeouts
		l := w.track(a, "job")[0]
		a.rdb.AddHook(&deaf{gate: gate})
		returned := make(chan error, 1)
		go func() { returned <- l.Done() }()
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		assert.Len(t, returned, 1, "not confirmed in time, will be repeated")
		close(gate)
	})
}

// While Redis can't be reached nobody waits for longer than one attempt takes, however much a lane owes, and nothing is sent in a tight loop.
func TestRegress_debtsLeaveRoomForOthers(t *testing.T) {
	jobs := make([]Job, 200)
	for i := range jobs {
		jobs[i].ID = fmt.Sprint(i)
	}
	for name, f := range map[string]fault{"fails": {mode: failBefore}, "hangs": {mode: hang}} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(w *world) {
				m := w.join("a", slowHeart())
				w.loadScripts()
				l := w.track(m, "held")[0]
				f.on, f.times = "commit", -1
				m.faults.add(&f)
				for range 4 {
					_, err := m.TrackAll(bg, jobs...)
					require.Error(t, err)
				}
				before, began := m.faults.count("commit"), time.Now()
				_, err := m.Track(bg, Job{ID: "job"})
				require.Error(t, err)
				require.Error(t, l.Done())
				assert.LessOrEqual(t, m.faults.count("commit")-before, 10)
				assert.LessOrEqual(t, time.Since(began), 5*m.tm.call)
				m.faults.clear()
				require.NoError(t, l.Done())
				m.current.Load().kick()
				time.Sleep(time.Minute)
				assert.True(t, m.current.Load().idle())
				assert.Empty(t, w.inflight(m.WorkerID()))
			})
		})
	}
	t.Run("tracked again", func(t *testing.T) {
		inBubble(t, func(w *world) {
			m := w.join("a", Config{})
			w.loadScripts()
			w.track(m, "held")
			w.mini.FlushAll()
			w.loadScripts()
			m.faults.add(&fault{mode: failBefore, on: "commit", times: -1})
			time.Sleep(time.Minute)
			before, began := m.faults.count("commit"), time.Now()
			_, err := m.Track(bg, Job{ID: "job"})
			require.Error(t, err)
			assert.LessOrEqual(t, m.faults.count("commit")-before, 10)
			assert.LessOrEqual(t, time.Since(began), 2*m.tm.call)
			m.faults.clear()
			time.Sleep(time.Minute)
			assert.Len(t, w.inflight(m.WorkerID()), 1)
		})
	})
}
