package recovery

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestStop_waitsForJobs(t *testing.T) {
	inBubble(t, func(w *world) {
		m := w.join("a", Config{})
		l := w.track(m, "job")[0]
		stopped := make(chan error)
		began := time.Now()
		go func() { stopped <- m.Stop(bg) }()
		time.Sleep(10 * time.Minute)
		assert.Equal(t, StateDraining, m.State())
		require.NoError(t, m.Check(), "beats meanwhile")
		require.NoError(t, l.Context().Err())
		require.NoError(t, l.Done())
		require.NoError(t, <-stopped)
		assert.Equal(t, 10*time.Minute, time.Since(began), "and not a moment longer")
		assert.Equal(t, StateStopped, m.State())
		id := m.WorkerID()
		assert.Equal(t, []string{w.keys(id).session}, w.allKeys(), "no key but the fenced session")
		assert.Equal(t, "fenced", w.raw.HGet(bg, w.keys(id).session, "state").Val())
		assert.Positive(t, w.raw.PTTL(bg, w.keys(id).session).Val())
	})
}

func TestStop_handsBackTheRest(t *testing.T) {
	bothWays(t, func(t *testing.T, w *world) {
		var stops collected[StoppedInfo]
		cfg := fast()
		cfg.Events.Stopped = stops.add
		m := w.join("a", cfg)
		leases := w.track(m, "one", "two", "three")
		require.NoError(t, leases[2].Done())
		cause := leases[0].Context()
		ctx, cancel := context.WithTimeout(bg, 50*time.Millisecond)
		defer cancel()
		err := m.Stop(ctx)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		assert.ErrorContains(t, err, "2 jobs had not ended")
		assert.Equal(t, []string{"one", "two"}, m.enq.ids(), "at once, by itself")
		for _, o := range m.enq.accepted() {
			assert.Equal(t, Released, o.Reason)
			assert.Equal(t, 1, o.Recovery)
		}
		require.Len(t, stops.all(), 1)
		assert.Equal(t, 2, stops.all()[0].HandedBack)
		assert.ErrorIs(t, context.Cause(cause), ErrLost)
		for _, l := range leases[:2] {
			assert.ErrorIs(t, l.Done(), ErrLost)
		}
		require.NoError(t, leases[2].Done())
		assert.Equal(t, []string{w.keys(m.WorkerID()).session}, w.allKeys(), "no key but the fenced session")
	})
}

func TestStop_refusedJobsAreLeftToThePeers(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.join("a", Config{}), w.join("b", Config{})
		a.enq.set(func(context.Context, Orphan) error { return errors.New("queue is down") })
		l := w.track(a, "job")[0]
		ctx, cancel := context.WithCancel(bg)
		cancel()
		err := a.Stop(ctx)
		require.ErrorContains(t, err, "left to the peers")
		require.ErrorIs(t, l.Done(), ErrLost)
		time.Sleep(12 * time.Second)
		synctest.Wait()
		assert.Equal(t, []string{"job"}, b.enq.ids(), "without a threshold")
		assert.Equal(t, Released, b.enq.accepted()[0].Reason)
		assert.Zero(t, b.Stats().Suspected)
		assert.Equal(t, []string{b.WorkerID()}, w.workers())
	})
}

func TestStop_twiceConcurrentlyAndBeforeStart(t *testing.T) {
	inBubble(t, func(w *world) {
		m := w.join("a", Config{})
		l := w.track(m, "job")[0]
		short, cancel := context.WithTimeout(bg, time.Second)
		defer cancel()
		var wg sync.WaitGroup
		for range 5 {
			wg.Add(1)
			go func() { defer wg.Done(); assert.NoError(t, m.Stop(bg)) }()
		}
		synctest.Wait()
		assert.ErrorIs(t, m.Stop(short), context.DeadlineExceeded, "each by its own ctx")
		require.NoError(t, l.Done())
		wg.Wait()
		require.NoError(t, m.Stop(bg))
		require.ErrorContains(t, m.Start(bg), "already started: state is stopped")

		m = w.make("b", Config{})
		require.NoError(t, m.Stop(bg))
		require.NoError(t, m.Stop(bg))
		assert.Equal(t, StateStopped, m.State())
		require.Error(t, m.Start(bg))
		_, err := m.Sweep(bg)
		require.ErrorIs(t, err, ErrNotRunning)
	})
}

func TestStop_deadRedis(t *testing.T) {
	for name, mode := range map[string]faultMode{"refuses": failBefore, "hangs": hang} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(w *world) {
				a, b := w.join("a", Config{}), w.join("b", Config{})
				l := w.track(a, "job")[0]
				time.Sleep(time.Minute)
				a.faults.add(&fault{mode: mode, times: -1})
				time.Sleep(11 * time.Second)
				ctx, cancel := context.WithTimeout(bg, 3*time.Second)
				defer cancel()
				began := time.Now()
				require.ErrorIs(t, a.Stop(ctx), context.DeadlineExceeded)
				assert.LessOrEqual(t, time.Since(began), 4*time.Second, "returns by ctx")
				assert.Equal(t, StateStopped, a.State())
				assert.ErrorIs(t, l.Done(), ErrLost, "it was told, so the peers must have it")
				time.Sleep(time.Minute)
				assert.Equal(t, []string{"job"}, b.enq.ids())
			})
		})
	}
}

func TestStop_deadRedisWithoutJobs(t *testing.T) {
	inBubble(t, func(w *world) {
		m := w.join("a", Config{})
		m.faults.add(&fault{mode: hang, times: -1})
		ctx, cancel := context.WithTimeout(bg, 3*time.Second)
		defer cancel()
		began := time.Now()
		require.ErrorIs(t, m.Stop(ctx), context.DeadlineExceeded)
		assert.LessOrEqual(t, time.Since(began), 3500*time.Millisecond)
	})
}

func TestStart_deadRedis(t *testing.T) {
	for name, mode := range map[string]faultMode{"refuses": failBefore, "hangs": hang, "reply lost": loseReply} {
		for _, call := range []string{"sadd", "join", ""} {
			t.Run(name+" "+call, func(t *testing.T) {
				inBubble(t, func(w *world) {
					m := w.make("a", Config{})
					m.faults.add(&fault{mode: mode, on: call, times: 1})
					ctx, cancel := context.WithTimeout(bg, time.Second)
					defer cancel()
					require.ErrorContains(t, m.Start(ctx), "recovery: start: ")
					assert.Equal(t, StateNew, m.State())
					assert.Empty(t, m.WorkerID())
					synctest.Wait()
					for _, k := range w.allKeys() { // at most the fence of what never was
						assert.True(t, strings.HasSuffix(k, ":session"), k)
						assert.Equal(t, "fenced", w.raw.HGet(bg, k, "state").Val())
					}
					require.NoError(t, m.Start(bg), "may be called again")
					require.Error(t, m.Start(bg), "but not twice")
					require.NoError(t, w.track(m, "job")[0].Done())
					require.NoError(t, m.Stop(bg))
				})
			})
		}
	}
}

func TestJoin_diesBetweenRegistryAndSession(t *testing.T) {
	t.Parallel()
	for _, kill := range []string{"after sadd", "before join", "after join"} {
		t.Run(kill, func(t *testing.T) {
			w := onReal(t)
			w.fork(orders{Name: "dead", Kill: kill}).died()
			require.Len(t, w.workers(), 1, "the registry comes first")
			peer := w.join("peer", fast())
			w.eventually(func() bool { return len(w.workers()) == 1 && w.workers()[0] == peer.WorkerID() }, "retired")
			assert.Empty(t, peer.enq.called())
		})
	}
}

func TestTrack_diesBetweenRecordAndAnswer(t *testing.T) {
	t.Parallel()
	for kill, want := range map[string]int{"before commit": 0, "after commit": 1} {
		t.Run(kill, func(t *testing.T) {
			w := onReal(t)
			w.fork(orders{Name: "dead", Jobs: []string{"job"}, Kill: kill}).died()
			peer := w.join("peer", fast())
			w.eventually(func() bool { return len(w.workers()) == 1 }, "retired")
			assert.Len(t, peer.enq.accepted(), want, "recorded and handed back, or never recorded")
		})
	}
}

func TestStop_diesAfterFence(t *testing.T)         { stopDies(t, "after leave", 1) }
func TestStop_diesWhileHandingBack(t *testing.T)   { stopDies(t, "before enqueue", 1) }
func TestStop_diesBeforeForget(t *testing.T)       { stopDies(t, "before forget", 2) }
func TestStop_diesBeforeDeregister(t *testing.T)   { stopDies(t, "before srem", 1) }
func TestStop_diesBeforeItsSweepEnds(t *testing.T) { stopDies(t, "before leave", 1) }

// stopDies kills a worker in the middle of Stop. Each job is offered that many times, with one Key.
func stopDies(t *testing.T, kill string, times int) {
	t.Parallel()
	w := onReal(t)
	book := ledger(t)
	p := w.fork(orders{Name: "dead", Jobs: []string{"job"}, Kill: kill, Ledger: book})
	p.say("stop")
	p.died()
	peer := w.join("peer", fast())
	peer.enq.set(ledgerEnqueuer(book))
	w.eventually(func() bool { return len(w.workers()) == 1 }, "retired")
	lines := enqueued(t, book)
	require.Len(t, lines, times, "%q", lines)
	for _, l := range lines {
		assert.Equal(t, strings.Fields(lines[0])[0], strings.Fields(l)[0], "the same Key")
	}
}

func TestDo(t *testing.T) {
	inBubble(t, func(w *world) {
		m := w.join("a", Config{})
		boom := errors.New("boom")
		require.ErrorIs(t, m.Do(bg, Job{ID: "job"}, func(context.Context) error { return boom }), boom)
		require.NoError(t, m.Do(bg, Job{ID: "job"}, func(ctx context.Context) error {
			assert.Len(t, w.inflight(m.WorkerID()), 1)
			return ctx.Err()
		}))
		require.ErrorIs(t, m.Do(bg, Job{}, nil), ErrInvalidJob)
		err := m.Do(bg, Job{ID: "job"}, func(ctx context.Context) error {
			require.NoError(t, m.fenceOwn(bg, m.current.Load()))
			<-ctx.Done()
			return boom
		})
		require.ErrorIs(t, err, boom)
		require.ErrorIs(t, err, ErrLost)
		assert.EqualValues(t, 2, m.Stats().Done)
		synctest.Wait() // it is counted after the holder was told
		assert.EqualValues(t, 1, m.Stats().Lost)
	})
}

func TestDo_panicIsHandedBack(t *testing.T) {
	inBubble(t, func(w *world) {
		m := w.join("a", Config{})
		var panicked any
		func() {
			defer func() { panicked = recover() }()
			_ = m.Do(bg, Job{ID: "job", Payload: []byte("p")}, func(context.Context) error { panic("boom") })
		}()
		assert.Equal(t, "boom", panicked, "the panic goes on")
		require.Len(t, m.enq.accepted(), 1)
		o := m.enq.accepted()[0]
		assert.Equal(t, Panicked, o.Reason)
		assert.Equal(t, 1, o.Recovery)
		assert.Equal(t, "p", string(o.Payload))
		assert.Equal(t, m.WorkerID(), o.Worker)
		assert.Empty(t, w.inflight(m.WorkerID()))
		assert.Zero(t, m.Stats().Inflight)
		time.Sleep(time.Minute)
		assert.Zero(t, m.Stats().Repaired)
		require.NoError(t, m.Stop(bg))
	})
}

// A panic whose job can't be given back at once is not forgotten while the worker lives.
func TestDo_panicIsHandedBackLater(t *testing.T) {
	for name, rule := range map[string]*fault{"Enqueuer": nil, "before": {mode: failBefore, on: "take"}, "reply lost": {mode: loseReply, on: "take"},
		"forget": {mode: failBefore, on: "forget"}} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(w *world) {
				m := w.join("a", Config{})
				if rule != nil {
					again := *rule
					again.times = 3
					m.faults.add(&again)
				} else {
					m.enq.set(func(context.Context, Orphan) error {
						if len(m.enq.called()) < 3 {
							return errors.New("not yet")
						}
						return nil
					})
				}
				require.Error(t, guard(func() { _ = m.Do(bg, Job{ID: "job"}, func(context.Context) error { panic("boom") }) }))
				time.Sleep(3 * time.Minute)
				assert.Equal(t, []string{"job"}, m.enq.ids())
				assert.Equal(t, Panicked, m.enq.accepted()[0].Reason)
				assert.EqualValues(t, 0, w.raw.Exists(bg, w.keys(m.WorkerID()).claims, w.keys(m.WorkerID()).jobs).Val())
				assert.Zero(t, m.Stats().Inflight)
				assert.Zero(t, m.Stats().Repaired)
				require.NoError(t, m.Stop(bg))
			})
		})
	}
}

func TestDo_panicDies(t *testing.T) {
	for _, kill := range []string{"before take", "after take", "before enqueue", "after enqueue", "before forget"} {
		t.Run(kill, func(t *testing.T) {
			t.Parallel()
			w := onReal(t)
			book := ledger(t)
			startChild(t, "worker", "dead", orders{Socket: w.socket(), NS: w.ns, Name: "dead", Jobs: []string{"job"}, Panic: true, Kill: kill, Ledger: book}).died()
			peer := w.join("peer", fast())
			peer.enq.set(ledgerEnqueuer(book))
			w.eventually(func() bool { return len(w.workers()) == 1 }, "retired")
			lines := enqueued(t, book)
			require.NotEmpty(t, lines, "not lost")
			for _, l := range lines {
				assert.Equal(t, strings.Fields(lines[0])[0], strings.Fields(l)[0], "the same Key")
				assert.Equal(t, "1", strings.Fields(l)[3], "counted once")
			}
		})
	}
}

func TestSweeper_diesBetweenBuryAndForget(t *testing.T) {
	for _, kill := range []string{"before bury", "after bury"} {
		t.Run(kill, func(t *testing.T) {
			t.Parallel()
			w := onReal(t)
			dead := w.fork(orders{Name: "dead", Jobs: []string{"job"}})
			k := w.keys(w.workers()[0])
			require.NoError(t, w.raw.HSet(bg, k.jobs, "1", "garbage").Err())
			sweeper := w.fork(orders{Name: "sweeper", Kill: kill, Ledger: ledger(t)})
			dead.signal(syscall.SIGKILL)
			sweeper.died()
			peer := w.join("peer", fast())
			w.eventually(func() bool { return len(w.workers()) == 1 }, "retired")
			assert.EqualValues(t, 1, w.raw.ZCard(bg, peer.keys.deadIndex()).Val(), "once")
			assert.EqualValues(t, 0, w.raw.Exists(bg, k.jobs, k.claims, k.inflight).Val())
		})
	}
}

func TestRun(t *testing.T) {
	inBubble(t, func(w *world) {
		m := w.make("a", Config{StopTimeout: 3 * time.Second})
		ctx, cancel := context.WithCancel(bg)
		ran := make(chan error)
		go func() { ran <- m.Run(ctx) }()
		synctest.Wait()
		w.track(m, "job")
		time.Sleep(time.Minute)
		cancel()
		began := time.Now()
		require.ErrorIs(t, <-ran, context.DeadlineExceeded)
		assert.Equal(t, 3*time.Second, time.Since(began))
		assert.Equal(t, []string{"job"}, m.enq.ids())
	})
}

func TestStartStop_stress(t *testing.T) {
	t.Parallel()
	w := onReal(t)
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for i := range 15 {
				m := &member{faults: &faults{}, enq: &recorder{}}
				m.rdb = w.client(nil)
				cfg := fast()
				cfg.Namespace, cfg.WorkerName, cfg.Logger = w.ns, fmt.Sprint("w", g), w.logger()
				r, err := New(m.rdb, m.enq, cfg)
				if !assert.NoError(t, err) || !assert.NoError(t, r.Start(bg)) {
					return
				}
				l, err := r.Track(bg, Job{ID: fmt.Sprint(g, i)})
				if assert.NoError(t, err) && i%2 == 0 {
					assert.NoError(t, l.Done())
				}
				ctx, cancel := context.WithTimeout(bg, time.Duration(i)*time.Millisecond)
				err = r.Stop(ctx)
				cancel()
				if i%2 != 0 {
					assert.ErrorIs(t, err, context.DeadlineExceeded)
					assert.Len(t, m.enq.accepted(), 1)
				}
				assert.NoError(t, r.Stop(bg))
				m.rdb.Close()
			}
		}()
	}
	wg.Wait()
	peer := w.join("peer", fast())
	w.eventually(func() bool { return len(w.workers()) == 1 }, "nobody is left")
	assert.Empty(t, peer.enq.called())
}
