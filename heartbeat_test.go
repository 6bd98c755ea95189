package recovery

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"context"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestHeartbeat_goesOnWhileDrainingAndAfterStartsCtx(t *testing.T) {
	inBubble(t, func(w *world) {
		m := w.make("a", Config{})
		ctx, cancel := context.WithCancel(bg)
		require.NoError(t, m.Start(ctx))
		cancel()
		l := w.track(m, "job")[0]
		m.Quiet()
		before := m.Stats().Beats
		time.Sleep(10 * time.Minute)
		assert.Greater(t, m.Stats().Beats, before+119)
		require.NoError(t, m.Check())
		infos, err := NewInspector(w.raw, w.ns).Workers(bg)
		require.NoError(t, err)
		assert.Equal(t, WorkerDraining, infos[0].State)
		require.NoError(t, l.Done())
	})
}

func TestHeartbeat_survivesFailures(t *testing.T) {
	for _, failures := range []int{1, 10} {
		t.Run(fmt.Sprint(failures), func(t *testing.T) {
			inBubble(t, func(w *world) {
				m := w.join("a", Config{})
				l := w.track(m, "job")[0]
				m.faults.add(&fault{mode: failBefore, on: "beat", times: failures})
				time.Sleep(5 * time.Minute)
				assert.EqualValues(t, failures, m.Stats().BeatsFailed)
				assert.Greater(t, m.Stats().Beats, uint64(50))
				assert.Equal(t, failures, strings.Count(w.logs.String(), "recovery: heartbeat failed"))
				require.NoError(t, m.Check())
				require.NoError(t, l.Done())
				assert.Zero(t, m.Stats().Rejoins)
			})
		})
	}
}

// A failed beat is tried again soon, not an interval later.
func TestHeartbeat_retriesSoon(t *testing.T) {
	inBubble(t, func(w *world) {
		var beats collected[time.Time]
		m := w.join("a", Config{Events: Events{Beat: func(BeatInfo) { beats.add(time.Now()) }}})
		m.faults.add(&fault{mode: failBefore, on: "beat", times: 1})
		time.Sleep(11 * time.Second)
		synctest.Wait()
		times := beats.all()
		require.GreaterOrEqual(t, len(times), 2)
		assert.LessOrEqual(t, times[1].Sub(times[0]), 1250*time.Millisecond)
	})
}

// A connection that hangs must not hold the heartbeat: the next attempt may get through.
func TestHeartbeat_hangingCall(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.join("a", Config{}), w.join("b", Config{})
		l := w.track(a, "job")[0]
		a.faults.add(&fault{mode: hang, on: "beat", times: 2})
		time.Sleep(5 * time.Minute)
		assert.Zero(t, b.Stats().FencedPeers)
		require.NoError(t, l.Done())
	})
}

func TestHeartbeat_panicInEvents(t *testing.T) {
	inBubble(t, func(w *world) {
		m := w.join("a", Config{Events: Events{
			Started: func(StartedInfo) { panic("started") }, Beat: func(BeatInfo) { panic("beat") },
			Swept: func(SweepReport) { panic("swept") }, Stopped: func(StoppedInfo) { panic("stopped") },
			HandedBack: func(HandedBackInfo) { panic("handed back") }, Suspected: func(SuspectedInfo) { panic("suspected") },
			Lost: func(LostInfo) { panic("lost") }, Fenced: func(FencedInfo) { panic("fenced") }, Rejoined: func(RejoinedInfo) { panic("rejoined") },
		}})
		dead := w.join("dead", Config{})
		w.track(dead, "job")
		w.track(m, "own")
		dead.crash()
		require.NoError(t, m.fenceOwn(bg, m.current.Load()))
		time.Sleep(5 * time.Minute)
		assert.Greater(t, m.Stats().Beats, uint64(50))
		assert.Equal(t, []string{"job", "own"}, m.enq.ids())
		ctx, cancel := context.WithTimeout(bg, time.Second)
		defer cancel()
		require.NoError(t, m.Stop(ctx))
		for _, name := range []string{"started", "beat", "swept", "stopped", "handed back", "suspected", "lost", "fenced", "rejoined"} {
			assert.Contains(t, w.logs.String(), `err="panic: `+name+`"`)
		}
	})
}

// A heartbeat costs the same with 0 and with 10,000 leases.
func TestHeartbeat_costIsFlat(t *testing.T) {
	w := onReal(t)
	cfg := Config{HeartbeatInterval: time.Hour, OrphanThreshold: 4 * time.Hour}
	m := w.join("a", cfg)
	cost := func() (calls int, commands int64) {
		calls, commands = m.faults.total(), w.commands()
		require.NoError(t, m.heart.beatOnce(bg))
		return m.faults.total() - calls, w.commands() - commands
	}
	cost() // loads the script
	calls, commands := cost()
	jobs := make([]Job, 10_000)
	for i := range jobs {
		jobs[i] = Job{ID: fmt.Sprint(i)}
	}
	_, err := m.TrackAll(bg, jobs...)
	require.NoError(t, err)
	cost() // the first sees that nothing is amiss
	calls2, commands2 := cost()
	assert.Equal(t, calls, calls2)
	assert.Equal(t, commands, commands2)
	assert.Equal(t, 5, calls, "the key, the session, the index, the records and the registry, each O(1)")
	assert.EqualValues(t, 5, commands, "and no script")
}

// commands is how many commands the server has executed, those of scripts too.
func (w *world) commands() int64 {
	w.t.Helper()
	text, err := w.raw.Info(bg, "commandstats").Result()
	require.NoError(w.t, err)
	var total int64
	for line := range strings.Lines(text) {
		var n int64
		name, rest, ok := strings.Cut(line, ":calls=")
		if _, err := fmt.Sscanf(rest, "%d", &n); ok && err == nil && !strings.Contains(name, "info") {
			total += n
		}
	}
	return total
}

func TestHeartbeat_healsTheRegistry(t *testing.T) {
	inBubble(t, func(w *world) {
		m := w.join("a", Config{})
		w.raw.Del(bg, m.keys.workers())
		time.Sleep(5 * time.Second)
		synctest.Wait()
		assert.Equal(t, []string{m.WorkerID()}, w.workers())
	})
}

func TestCheck(t *testing.T) {
	inBubble(t, func(w *world) {
		m := w.make("a", Config{})
		assert.ErrorIs(t, m.Check(), ErrNotRunning)
		require.NoError(t, m.Start(bg))
		require.NoError(t, m.Check())
		m.faults.add(&fault{mode: failBefore, times: -1})
		time.Sleep(14 * time.Second)
		require.NoError(t, m.Check(), "nobody can have taken anything yet")
		time.Sleep(11 * time.Second)
		assert.ErrorContains(t, m.Check(), "no good heartbeat")
		assert.ErrorIs(t, m.Check(), errInjected)
		assert.True(t, m.Stats().TrustedUntil.Before(time.Now()))
	})
}

// Audit: what a failover, or a person, did to the records of a live worker is mended.
func TestAudit(t *testing.T) {
	for name, c := range map[string]struct {
		damage func(w *world, m *member, k workerKeys)
		want   RepairedInfo
	}{
		"lease lost": {func(w *world, m *member, k workerKeys) {
			w.raw.ZRem(bg, k.inflight, "2")
			w.raw.HDel(bg, k.jobs, "2")
		}, RepairedInfo{Tracked: 1}},
		"index lost":  {func(w *world, m *member, k workerKeys) { w.raw.Del(bg, k.inflight) }, RepairedInfo{Tracked: 3}},
		"record lost": {func(w *world, m *member, k workerKeys) { w.raw.HDel(bg, k.jobs, "2") }, RepairedInfo{Tracked: 1}},
		"Done undone": {func(w *world, m *member, k workerKeys) {
			w.raw.ZAdd(bg, k.inflight, z("99", 1))
			w.raw.HSet(bg, k.jobs, "99", "x")
		}, RepairedInfo{Removed: 1}},
		"one lost, one undone": {func(w *world, m *member, k workerKeys) { // the count is the same: only the lane tells
			w.raw.ZRem(bg, k.inflight, "2")
			w.raw.ZAdd(bg, k.inflight, z("99", 1))
			w.raw.HSet(bg, k.session, "lane0", 1)
		}, RepairedInfo{Tracked: 1, Removed: 1}},
	} {
		t.Run(name, func(t *testing.T) {
			bothWays(t, func(t *testing.T, w *world) {
				var mended collected[RepairedInfo]
				m := w.join("a", Config{
					HeartbeatInterval: time.Hour, OrphanThreshold: 4 * time.Hour, Events: Events{Repaired: mended.add},
				})
				leases := w.track(m, "one", "two", "three")
				k := w.keys(m.WorkerID())
				for range 3 {
					require.NoError(t, m.heart.beatOnce(bg))
				}
				require.Empty(t, mended.all(), "nothing was wrong")
				index, records := w.raw.ZRangeWithScores(bg, k.inflight, 0, -1).Val(), w.raw.HGetAll(bg, k.jobs).Val()
				c.damage(w, m, k)
				require.NoError(t, m.heart.beatOnce(bg))
				require.NoError(t, m.heart.beatOnce(bg))
				c.want.Worker = m.WorkerID()
				assert.Equal(t, []RepairedInfo{c.want}, mended.all())
				w.settled(m)
				assert.Equal(t, index, w.raw.ZRangeWithScores(bg, k.inflight, 0, -1).Val())
				assert.Equal(t, records, w.raw.HGetAll(bg, k.jobs).Val())
				for range 3 {
					require.NoError(t, m.heart.beatOnce(bg))
				}
				assert.Len(t, mended.all(), 1, "and then all is well")
				for _, l := range leases {
					require.NoError(t, l.Context().Err())
					require.NoError(t, l.Done())
				}
				assert.EqualValues(t, 0, w.raw.Exists(bg, k.inflight, k.jobs).Val())
			})
		})
	}
}

// settled waits until a worker's writes are through.
func (w *world) settled(m *member) {
	w.t.Helper()
	if w.mini != nil {
		synctest.Wait()
	}
	w.eventually(func() bool { return m.current.Load().idle() }, "writes are through")
}

// The audit leaves alone what is under way, however busy the worker is.
func TestAudit_busyWorkerIsNeverRepaired(t *testing.T) {
	t.Parallel()
	w := onReal(t)
	m := w.join("a", Config{HeartbeatInterval: 10 * time.Millisecond, OrphanThreshold: time.Second})
	until := time.Now().Add(2 * time.Second)
	done := make(chan struct{})
	for g := range 32 {
		go func() {
			defer func() { done <- struct{}{} }()
			for i := 0; time.Now().Before(until); i++ {
				l, err := m.Track(bg, Job{ID: fmt.Sprint(g, i)})
				if assert.NoError(t, err) {
					assert.NoError(t, l.Done())
				}
			}
		}()
	}
	for range 32 {
		<-done
	}
	assert.Greater(t, m.Stats().Beats, uint64(50))
	assert.Zero(t, m.Stats().Repaired, "%s", w.logs.String())
}

func TestPlausible(t *testing.T) {
	idle := tally{sent: 10, acked: 10, doneSent: 4, doneAcked: 4}
	for count, want := range map[int64]bool{5: false, 6: true, 7: false} {
		assert.Equal(t, want, plausible(idle, idle, count), count)
	}
	busy := tally{sent: 12, acked: 11, doneSent: 6, doneAcked: 5}
	for count, want := range map[int64]bool{3: false, 4: true, 8: true, 9: false} {
		assert.Equal(t, want, plausible(idle, busy, count), count)
	}
}
