package recovery

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// What happens to Redis itself.

func TestRedis_restartWithAOF(t *testing.T) {
	t.Parallel()
	s := startServer(t, "--appendonly", "yes", "--appendfsync", "always")
	w := onSocket(t, s.socket)
	a, b := w.join("a", fast()), w.join("b", fast())
	leases := w.track(a, "one", "two", "three")
	dead := w.join("dead", fast())
	w.track(dead, "orphan")
	dead.crash()
	s.kill()
	sleep(bg, 2*time.Second) // longer than beat, suspicion and threshold
	require.NoError(t, s.start())
	w.eventually(func() bool { return len(w.workers()) == 2 }, "the dead one is recovered")
	for range 3 {
		before := a.Stats().Beats
		w.eventually(func() bool { return a.Stats().Beats > before }, "beats go on")
	}
	assert.Equal(t, []string{"orphan"}, append(a.enq.ids(), b.enq.ids()...), "no live worker is declared dead")
	assert.Zero(t, a.Stats().Rejoins+b.Stats().Rejoins)
	for _, l := range leases {
		require.NoError(t, l.Context().Err())
		require.NoError(t, l.Done())
	}
	assert.Empty(t, w.inflight(a.WorkerID()))
}

// SIGSTOP is nastier than death: commands wait in the sockets and are executed all at once, much later.
func TestRedis_frozen(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	w := onSocket(t, s.socket)
	a, b := w.join("a", fast()), w.join("b", fast())
	leases := w.track(a, "one", "two")
	require.NoError(t, s.cmd.Process.Signal(syscall.SIGSTOP))
	ctx, cancel := context.WithTimeout(bg, 100*time.Millisecond)
	defer cancel()
	_, err := a.Track(ctx, Job{ID: "too late"})
	require.ErrorIs(t, err, context.DeadlineExceeded)
	sleep(bg, 2*time.Second)
	assert.Error(t, a.Check())
	require.NoError(t, s.cmd.Process.Signal(syscall.SIGCONT))
	w.eventually(func() bool { return a.Check() == nil && b.Check() == nil }, "beats go on")
	w.eventually(func() bool { return len(w.inflight(a.WorkerID())) == 2 }, "the Track that failed leaves nothing")
	assert.Empty(t, append(a.enq.called(), b.enq.called()...))
	for _, l := range leases {
		require.NoError(t, l.Done())
	}
}

func TestRedis_flushAll(t *testing.T) {
	bothWays(t, func(t *testing.T, w *world) {
		if w.mini == nil {
			w = onSocket(t, startServer(t).socket) // its own: it is flushed
		}
		a, b := w.join("a", fast()), w.join("b", fast())
		leases := w.track(a, "one", "two", "three")
		ctx := leases[0].Context()
		ids, old := []string{leases[0].ID(), leases[1].ID(), leases[2].ID()}, a.WorkerID()
		fence := leases[0].Fence()
		require.NoError(t, w.raw.FlushAll(bg).Err())
		w.eventually(func() bool { return a.WorkerID() != old }, "joined again with the next beat")
		w.eventually(func() bool { return len(w.inflight(a.WorkerID())) == 3 }, "and tracked again")
		assert.ElementsMatch(t, ids, w.inflight(a.WorkerID()), "under the same names")
		require.NoError(t, ctx.Err(), "contexts untouched")
		for _, l := range leases {
			require.NoError(t, l.Confirm(bg))
		}
		assert.Equal(t, fence, leases[0].Fence())
		require.NoError(t, leases[0].Done())
		assert.Len(t, w.inflight(a.WorkerID()), 2)
		a.crash()
		w.eventually(func() bool { return len(b.enq.accepted()) == 2 }, "and can be recovered")
		for _, o := range b.enq.accepted() {
			assert.Contains(t, ids[1:], o.Key)
			assert.Equal(t, "payload of "+o.ID, string(o.Payload))
			assert.InDelta(t, fence, o.TrackedAt.UnixMicro(), 1e6)
		}
	})
}

// A Done that meets the flushed Redis: the work is done, and nobody has the job.
func TestRedis_doneAfterFlush(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.join("a", Config{})
		l := w.track(a, "job", "other")[0]
		w.mini.FlushAll()
		require.NoError(t, l.Done())
		time.Sleep(10 * time.Second)
		assert.Len(t, w.inflight(a.WorkerID()), 1, "only what still runs is tracked again")
	})
}

func TestRedis_trackAfterFlush(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.join("a", Config{})
		old := a.WorkerID()
		w.mini.FlushAll()
		l := w.track(a, "job")[0]
		assert.NotEqual(t, old, a.WorkerID())
		require.NoError(t, l.Confirm(bg))
		assert.Empty(t, w.raw.HKeys(bg, w.keys(old).jobs).Val())
	})
}

// Away for longer than anybody remembers: an absent session proves nothing, so the worst is assumed.
func TestRedis_awayLongerThanRetention(t *testing.T) {
	inBubble(t, func(w *world) {
		cfg := Config{HeartbeatInterval: time.Second, OrphanThreshold: 4 * time.Second, InflightTTL: 12 * time.Second}
		a := w.join("a", cfg)
		ls := w.track(a, "job", "other")
		a.faults.add(&fault{mode: failBefore, times: -1})
		b := w.join("b", cfg)
		time.Sleep(time.Minute)
		require.Len(t, b.enq.accepted(), 2)
		require.Zero(t, w.raw.Exists(bg, w.keys(a.WorkerID()).session).Val(), "even the fence has expired")
		a.faults.clear()
		require.ErrorIs(t, ls[0].Done(), ErrLost)
		time.Sleep(5 * time.Second)
		require.ErrorIs(t, context.Cause(ls[1].Context()), ErrLost)
		require.ErrorIs(t, ls[1].Done(), ErrLost)
		require.NoError(t, w.track(a, "more")[0].Done())
	})
}

func TestRedis_awayAndBack(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.join("a", Config{}), w.join("b", Config{})
		leases := w.track(a, "one", "two")
		for range 3 {
			w.mini.SetError("LOADING Redis is loading the dataset in memory")
			time.Sleep(2 * time.Minute)
			require.Error(t, a.Check())
			w.mini.SetError("")
			time.Sleep(30 * time.Second)
			require.NoError(t, a.Check())
		}
		assert.Empty(t, append(a.enq.called(), b.enq.called()...))
		for _, l := range leases {
			require.NoError(t, l.Done())
		}
		assert.Zero(t, a.Stats().Rejoins+b.Stats().Rejoins)
	})
}

func TestRedis_scriptFlush(t *testing.T) {
	bothWays(t, func(t *testing.T, w *world) {
		a, b := w.join("a", fast()), w.join("b", fast())
		for i := range 5 {
			require.NoError(t, w.raw.ScriptFlush(bg).Err())
			l := w.track(a, fmt.Sprint(i))[0]
			require.NoError(t, w.raw.ScriptFlush(bg).Err())
			require.NoError(t, l.Confirm(bg))
			require.NoError(t, w.raw.ScriptFlush(bg).Err())
			require.NoError(t, l.Done())
			require.NoError(t, w.raw.ScriptFlush(bg).Err())
			require.NoError(t, a.heart.beatOnce(bg))
		}
		w.track(a, "last")
		a.crash()
		w.eventually(func() bool { w.raw.ScriptFlush(bg); return len(b.enq.accepted()) == 1 }, "recovered all the same")
	})
}

// Every script runs twice at its first call, as after a lost reply: nothing changes for anybody.
func TestRedis_everyScriptTwice(t *testing.T) {
	for _, script := range slices.Compact(slices.Sorted(maps.Values(scriptNames))) {
		switch script {
		case "fetch", "deliver", "restore": // TestListQueue_everyScriptTwice
			continue
		}
		t.Run(script, func(t *testing.T) {
			bothWays(t, func(t *testing.T, w *world) {
				twiceAlways := func(m *member) { m.faults.add(&fault{mode: twice, on: script, times: -1}) }
				a, b := w.join("a", fast(), twiceAlways), w.join("b", fast(), twiceAlways)
				b.enq.set(func(_ context.Context, o Orphan) error {
					if o.ID == "refused" {
						return Permanent(errors.New("no"))
					}
					if o.ID == "later" && len(b.enq.called()) < 4 {
						return errors.New("not yet")
					}
					return nil
				})
				l := w.track(a, "done")[0]
				require.NoError(t, l.Confirm(bg))
				require.NoError(t, l.Checkpoint(bg, []byte("half-way")))
				a.enq.set(func(context.Context, Orphan) error { return errors.New("not now") })
				require.ErrorContains(t, l.Release(), "not now")
				a.enq.set(nil)
				require.NoError(t, l.Done())
				for range 2 { // the second one finds a history
					require.Error(t, guard(func() { _ = a.Do(bg, Job{ID: "panics"}, func(context.Context) error { panic("x") }) }))
				}
				require.Equal(t, []string{"panics", "panics"}, a.enq.ids())
				assert.Equal(t, []int{1, 2}, []int{a.enq.accepted()[0].Recovery, a.enq.accepted()[1].Recovery})
				w.track(a, "one", "refused", "later")
				a.crash()
				w.eventually(func() bool { return len(w.workers()) == 1 }, "retired")
				assert.Equal(t, []string{"later", "one"}, b.enq.ids(), "once each")
				inspector := NewInspector(b.rdb, w.ns)
				letters, err := inspector.DeadLetters(bg, 0, 10)
				require.NoError(t, err)
				require.Len(t, letters, 1)
				again := &recorder{}
				require.NoError(t, inspector.Requeue(bg, letters[0].Key, again))
				assert.Equal(t, []string{"refused"}, again.ids())
				l = w.track(b, "left")[0]
				ctx, cancel := context.WithCancel(bg)
				cancel()
				require.ErrorIs(t, b.Stop(ctx), context.Canceled)
				require.ErrorIs(t, l.Done(), ErrLost)
				assert.Equal(t, []string{"later", "left", "one"}, b.enq.ids())
				if w.mini != nil {
					synctest.Wait()
				}
				assert.Empty(t, w.workers())
				assert.Positive(t, a.faults.count(script)+b.faults.count(script), "it was called at all")
			})
		})
	}
}

// Every call to Redis in four fault modes: nothing is lost and nothing is handed back without its holder being told.
func TestRedis_everyCallFails(t *testing.T) {
	// The scripts of giving up and releasing have TestDo_panicIsHandedBackLater and TestRules_releaseFaults.
	calls := []string{"join", "beat", "commit", "checkpoint", "where", "claim", "records", "forget", "lock", "unlock", "sadd", "srem", "sscan", "pttl", "count"}
	modes := map[string]faultMode{"before": failBefore, "reply lost": loseReply, "slow": slow, "hangs": hang}
	for _, call := range calls {
		for name, mode := range modes {
			t.Run(call+" "+name, func(t *testing.T) {
				inBubble(t, func(w *world) {
					bad := func(m *member) {
						m.faults.add(&fault{mode: mode, on: call, times: 2, delay: 3 * time.Second})
					}
					a, b := w.make("a", Config{}, bad), w.make("b", Config{}, bad)
					startUntil(t, a)
					startUntil(t, b)
					var done, told atomic.Int32
					run := func(m *member, id string) {
						for {
							l, err := m.Track(bg, Job{ID: id})
							if err != nil {
								continue // the caller still has the job
							}
							time.Sleep(time.Second)
							_ = l.Confirm(bg)
							_ = l.Checkpoint(bg, []byte("half-way"))
							for err = l.Done(); err != nil && !errors.Is(err, ErrLost); err = l.Done() {
								time.Sleep(time.Second)
							}
							if err == nil {
								done.Add(1)
							} else {
								told.Add(1)
							}
							return
						}
					}
					run(a, "one")
					run(b, "two")
					w.trackUntil(a, "orphan")
					a.crash()
					time.Sleep(3 * time.Minute)
					got := append(jobIDs(a.enq.accepted()), b.enq.ids()...)
					assert.EqualValues(t, 2, done.Load()+told.Load())
					assert.Len(t, got, 1+int(told.Load()), "%v", got)
					assert.Contains(t, got, "orphan")
					assert.Equal(t, []string{b.WorkerID()}, w.workers())
					assert.Positive(t, a.faults.count(call)+b.faults.count(call), "it was called at all")
				})
			})
		}
	}
}

func startUntil(t *testing.T, m *member) {
	t.Helper()
	for range 10 {
		if m.Start(bg) == nil {
			return
		}
	}
	t.Fatal("does not start")
}

func (w *world) trackUntil(m *member, id string) *Lease {
	w.t.Helper()
	for range 10 {
		if l, err := m.Track(bg, Job{ID: id}); err == nil {
			return l
		}
	}
	w.t.Fatal("does not track")
	return nil
}

// A full Redis: Track fails cleanly, everything that frees memory goes on.
func TestRedis_outOfMemory(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	w := onSocket(t, s.socket)
	a, b := w.join("a", fast()), w.join("b", fast())
	leases := w.track(a, "one", "two", "three")
	dead := w.join("dead", fast())
	w.track(dead, "orphan")
	require.NoError(t, w.raw.ConfigSet(bg, "maxmemory", "1").Err())
	_, err := a.Track(bg, Job{ID: "more", Payload: make([]byte, 1000)})
	require.ErrorContains(t, err, "OOM")
	require.NoError(t, leases[0].Done(), "it frees memory")
	dead.crash()
	beats := a.Stats().Beats
	w.eventually(func() bool { return a.Stats().Beats >= beats+10 && a.Check() == nil }, "beats go on")
	_, err = a.Track(bg, Job{ID: "more", Payload: make([]byte, 1000)})
	require.ErrorContains(t, err, "OOM")
	done := make(chan error)
	go func() { _, err := a.Track(bg, Job{ID: "more"}); done <- err }()
	require.NoError(t, leases[2].Done(), "also in one batch with a Track")
	require.ErrorContains(t, <-done, "OOM")
	require.NoError(t, w.raw.ConfigSet(bg, "maxmemory", "0").Err())
	w.eventually(func() bool { return len(a.enq.accepted())+len(b.enq.accepted()) == 1 }, "the orphan is handed back")
	require.NoError(t, leases[1].Done())
	w.eventually(func() bool { return len(w.inflight(a.WorkerID())) == 0 }, "nothing is left of the Track that failed")
	assert.Zero(t, a.Stats().Rejoins)
}

func TestRedis_evictionIsWarnedOf(t *testing.T) {
	t.Parallel()
	s := startServer(t, "--maxmemory-policy", "allkeys-lru")
	w := onSocket(t, s.socket)
	w.join("a", fast())
	w.eventually(func() bool { return strings.Contains(w.logs.String(), "set maxmemory-policy to noeviction") }, "warned")
}
