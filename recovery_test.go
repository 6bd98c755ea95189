package recovery

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestDeath_killedProcess(t *testing.T) {
	t.Parallel()
	w := onReal(t)
	book := ledger(t)
	dead := w.fork(orders{Name: "dead", Jobs: []string{"one", "two", "three"}})
	w.fork(orders{Name: "peer", Jobs: []string{"own"}, Ledger: book})
	w.fork(orders{Name: "peer2", Ledger: book})
	dead.signal(syscall.SIGKILL)
	dead.died()
	w.eventually(func() bool { return len(enqueued(t, book)) >= 3 }, "the peers hand the jobs back")
	w.eventually(func() bool { return len(w.workers()) == 2 }, "and retire the dead one")
	lines := enqueued(t, book)
	slices.Sort(lines)
	require.Len(t, lines, 3, "once each: %q", lines)
	for i, l := range lines {
		f := strings.Fields(l)
		assert.Equal(t, []string{"one", "two", "three"}[i], f[1])
		assert.Equal(t, []string{"crashed", "1"}, f[2:])
	}
}

// From the last beat to Enqueue: at most OrphanThreshold + SweepInterval, whoever dies, whenever.
func TestDeath_withinTheBound(t *testing.T) {
	for _, cfg := range []Config{{}, fast(), {HeartbeatInterval: time.Second, OrphanThreshold: 3 * time.Second, SweepInterval: 10 * time.Second},
		{HeartbeatInterval: time.Second, OrphanThreshold: 30 * time.Second}} {
		t.Run(fmt.Sprint(cfg.HeartbeatInterval, cfg.OrphanThreshold), func(t *testing.T) {
			inBubble(t, func(w *world) {
				full := cfg.withDefaults()
				bound := full.OrphanThreshold + full.SweepInterval
				w.join("last", cfg)
				for round := range 10 {
					m := w.join(fmt.Sprint("w", round), cfg)
					time.Sleep(time.Duration(round) * full.HeartbeatInterval * 37 / 100)
					w.track(m, fmt.Sprint("job", round))
					m.crash()
					last := m.Stats().LastBeat
					time.Sleep(bound - time.Since(last) + 100*time.Millisecond)
					synctest.Wait()
					var got []string
					for _, peer := range w.all {
						got = append(got, peer.enq.ids()...)
					}
					require.Len(t, got, round+1, "round %d: %v after its last beat", round, time.Since(last))
				}
			})
		})
	}
}

func TestDeath_aliveIsNeverTouched(t *testing.T) {
	inBubble(t, func(w *world) {
		slowly := Config{HeartbeatInterval: time.Minute}
		a, b := w.join("a", slowly), w.join("b", slowly)
		l := w.track(a, "long")[0]
		ctx := l.Context()
		time.Sleep(10 * time.Hour)
		require.NoError(t, ctx.Err())
		require.NoError(t, l.Confirm(bg))
		require.NoError(t, l.Done())
		assert.Empty(t, append(a.enq.called(), b.enq.called()...))
		assert.Zero(t, b.Stats().Suspected+a.Stats().Suspected)
		assert.Zero(t, a.Stats().Repaired)
	})
}

func TestDeath_lateBeatSaves(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.join("a", Config{}), w.join("b", Config{})
		l := w.track(a, "job")[0]
		a.faults.add(&fault{mode: failBefore, times: -1})
		time.Sleep(18 * time.Second)
		require.EqualValues(t, 1, b.Stats().Suspected, "suspected, not yet dead")
		a.faults.clear()
		time.Sleep(5 * time.Minute)
		assert.Empty(t, b.enq.called())
		assert.Zero(t, b.Stats().FencedPeers)
		require.NoError(t, l.Done())
	})
}

func TestDeath_manySweepersOnceEach(t *testing.T) {
	t.Parallel()
	w := onReal(t)
	cfg := fast()
	cfg.EnqueueTimeout = 5 * time.Second
	dead := w.join("dead", cfg)
	for i := range 300 {
		w.track(dead, fmt.Sprint(i))
	}
	var peers []*member
	for i := range 4 {
		peers = append(peers, w.join(fmt.Sprint("peer", i), cfg))
	}
	dead.crash()
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for _, p := range peers {
		wg.Add(1)
		go func() { // sweeps past the lock, all at the same time
			defer wg.Done()
			for {
				select {
				case <-stop:
					return
				default:
					_, err := newSweeper(p.Recoverer).sweepOnce(bg, true)
					assert.NoError(t, err)
					w.raw.Del(bg, p.keys.gc())
				}
			}
		}()
	}
	total := func() (n int) {
		for _, p := range peers {
			n += len(p.enq.called())
		}
		return n
	}
	w.eventually(func() bool { return len(w.workers()) == len(peers) }, "the dead one is retired")
	close(stop)
	wg.Wait()
	assert.Equal(t, 300, total(), "once each")
}

func TestSweeper_lockLostInPass(t *testing.T) {
	inBubble(t, func(w *world) {
		dead, a, b := w.join("dead", Config{}), w.join("a", Config{}), w.join("b", Config{})
		for i := range 250 {
			w.track(dead, fmt.Sprint(i))
		}
		slowly := func(ctx context.Context, _ Orphan) error {
			w.raw.Del(bg, a.keys.gc()) // the lock is gone, and taken by the other, while we hand back
			time.Sleep(500 * time.Millisecond)
			return nil
		}
		a.enq.set(slowly)
		b.enq.set(slowly)
		dead.crash()
		time.Sleep(3 * time.Minute)
		got := append(a.enq.called(), b.enq.called()...)
		assert.Len(t, got, 250)
		keys := map[string]bool{}
		for _, o := range got {
			assert.False(t, keys[o.Key], o.Key)
			keys[o.Key] = true
		}
	})
}

// The sweeper is a process that kills itself at the named point; the next one goes on.
func TestSweeper_dies(t *testing.T) {
	for name, c := range map[string]struct {
		kill  string
		again bool // the Enqueue is repeated
	}{
		"AfterClaim":       {"after claim", false},
		"BeforeEnqueue":    {"before enqueue", false},
		"AfterEnqueue":     {"after enqueue", true},
		"BeforeForget":     {"before forget", true},
		"AfterForget":      {"after forget", false},
		"BeforeRetire":     {"before srem", false},
		"BeforeClaim":      {"before claim", false},
		"AfterCount":       {"after count", false},
		"AfterLock":        {"after lock", false},
		"BetweenLockAndIt": {"before sscan", false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			sweeperDies(t, c.kill, c.again)
		})
	}
}

func sweeperDies(t *testing.T, kill string, again bool) {
	w := onReal(t)
	book := ledger(t)
	worker := w.fork(orders{Name: "worker", Jobs: []string{"one"}})
	sweeper := w.fork(orders{Name: "sweeper", Kill: kill, Ledger: book})
	worker.signal(syscall.SIGKILL)
	worker.died()
	sweeper.died()
	cfg := fast()
	cfg.Events.Buried = func(i BuriedInfo) { t.Errorf("buried: %+v", i) }
	peer := w.join("peer", cfg)
	peer.enq.set(ledgerEnqueuer(book))
	w.eventually(func() bool { return slices.Equal(w.workers(), []string{peer.WorkerID()}) }, "both dead ones are retired")
	keys := map[string]int{}
	for _, line := range enqueued(t, book) {
		f := strings.Fields(line)
		keys[f[0]]++
		assert.Equal(t, "1", f[3], "the crash is counted once: %s", line)
	}
	require.Len(t, keys, 1, "nothing is lost: %q", enqueued(t, book))
	repeated := 0
	for _, n := range keys {
		repeated += n - 1
	}
	if again {
		assert.Positive(t, repeated, "the Enqueue is repeated, with the same Key")
	} else {
		assert.Zero(t, repeated)
	}
}

func TestSweeper_diesAfterClaim(t *testing.T)   { t.Parallel(); sweeperDies(t, "after claim", false) }
func TestSweeper_diesAfterEnqueue(t *testing.T) { t.Parallel(); sweeperDies(t, "after enqueue", true) }
func TestSweeper_diesBeforeRetire(t *testing.T) { t.Parallel(); sweeperDies(t, "before srem", false) }

func TestSweeper_enqueueFails(t *testing.T) {
	inBubble(t, func(w *world) {
		var failures collected[HandBackFailedInfo]
		dead := w.join("dead", Config{})
		peer := w.join("peer", Config{Events: Events{HandBackFailed: failures.add}})
		var once atomic.Bool
		peer.enq.set(func(ctx context.Context, o Orphan) error {
			switch o.ID {
			case "once":
				if !once.Swap(true) {
					return errors.New("not today")
				}
			case "always":
				return errors.New("never")
			case "hangs":
				select {} // beyond its ctx
			case "panics":
				panic("no")
			}
			return nil
		})
		w.track(dead, "once", "always", "panics", "good", "fine")
		dead.crash()
		time.Sleep(time.Hour)
		assert.Equal(t, []string{"fine", "good", "once"}, peer.enq.ids())
		assert.Len(t, w.workers(), 2, "the dead one is not retired while it has jobs")
		var retries []time.Duration
		for _, f := range failures.all() {
			if f.Orphan.ID == "always" {
				retries = append(retries, f.Retry)
				assert.Equal(t, len(retries), f.Attempt)
				assert.Equal(t, 1, f.Orphan.Recovery, "counted once")
			}
		}
		require.Greater(t, len(retries), 8)
		for i := range retries[1:] {
			assert.GreaterOrEqual(t, retries[i+1], min(retries[i], 4*time.Minute), "the delay grows, but for jitter at its end")
		}
		assert.GreaterOrEqual(t, retries[len(retries)-1], 4*time.Minute)
		assert.LessOrEqual(t, slices.Max(retries), 5*time.Minute)
		assert.Less(t, len(retries), 30)

		peer.enq.set(nil)
		time.Sleep(6 * time.Minute)
		assert.Equal(t, []string{"always", "fine", "good", "once", "panics"}, peer.enq.ids())
		assert.Len(t, w.workers(), 1)
	})
}

func TestSweeper_enqueueHangs(t *testing.T) {
	inBubble(t, func(w *world) {
		dead, peer := w.join("dead", Config{}), w.join("peer", Config{EnqueueTimeout: time.Second})
		release := make(chan struct{})
		defer close(release)
		peer.enq.set(func(ctx context.Context, o Orphan) error {
			if o.ID == "hangs" {
				<-release // whatever ctx says
			}
			return nil
		})
		w.track(dead, "hangs")
		for i := range 100 {
			w.track(dead, fmt.Sprint(i))
		}
		dead.crash()
		time.Sleep(30 * time.Second)
		assert.Len(t, peer.enq.accepted(), 100, "the others are handed back")
		assert.Contains(t, w.logs.String(), "Enqueuer did not return in time (1s)")
		assert.Positive(t, peer.Stats().HandBackFailed)
	})
}

func TestSweeper_batchEnqueuer(t *testing.T) {
	inBubble(t, func(w *world) {
		dead := w.join("dead", Config{})
		peer := w.join("peer", Config{}, func(m *member) { m.enq.batch = true })
		var bad atomic.Bool
		bad.Store(true)
		peer.enq.set(func(_ context.Context, o Orphan) error {
			if o.ID == "7" && bad.Load() {
				return errors.New("not this one")
			}
			return nil
		})
		for i := range 250 {
			w.track(dead, fmt.Sprint(i))
		}
		dead.crash()
		time.Sleep(30 * time.Second)
		assert.Len(t, peer.enq.accepted(), 249)
		bad.Store(false)
		time.Sleep(time.Minute)
		assert.Len(t, peer.enq.accepted(), 250)
	})
}

// answers is a BatchEnqueuer that answers what it likes.
type answers struct {
	recorder
	f atomic.Pointer[func(n int) []error]
}

func (a *answers) EnqueueAll(_ context.Context, os []Orphan) []error { return (*a.f.Load())(len(os)) }

func TestSweeper_batchEnqueuerThatMisbehaves(t *testing.T) {
	for name, f := range map[string]func(n int) []error{
		"too many": func(n int) []error { return make([]error, n+1) },
		"none":     func(int) []error { return []error{} },
		"panics":   func(int) []error { panic("no") },
		"hangs":    func(int) []error { time.Sleep(time.Minute); return nil },
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(w *world) {
				dead, peer := w.join("dead", Config{}), w.make("peer", Config{})
				enq := &answers{}
				enq.f.Store(&f)
				peer.Recoverer.enq, peer.batch = enq, enq
				require.NoError(t, peer.Start(bg))
				w.track(dead, "one", "two", "three")
				dead.crash()
				time.Sleep(time.Minute)
				assert.Zero(t, peer.Stats().HandedBack, "nobody said yes")
				assert.Positive(t, peer.Stats().HandBackFailed)
				all := func(int) []error { return nil }
				enq.f.Store(&all)
				time.Sleep(10 * time.Minute)
				assert.EqualValues(t, 3, peer.Stats().HandedBack)
			})
		})
	}
}

func TestSweep_onDemand(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.join("a", Config{}), w.join("b", Config{})
		time.Sleep(12 * time.Second)
		report, err := b.Sweep(bg)
		require.NoError(t, err)
		assert.False(t, report.Skipped, "the lock's holder only rests")
		assert.Equal(t, 2, report.Workers)
		assert.Equal(t, 2, report.Alive)
		w.raw.Set(bg, a.keys.gc(), "+somebody", time.Minute)
		report, err = b.Sweep(bg)
		require.NoError(t, err)
		assert.True(t, report.Skipped, "somebody sweeps")
		outside := w.make("outside", Config{})
		w.raw.Del(bg, a.keys.gc())
		report, err = outside.Sweep(bg)
		require.NoError(t, err)
		assert.Equal(t, 2, report.Workers, "without Start, too")
	})
}

// One pass per SweepInterval for the whole fleet.
func TestSweep_paceOfTheFleet(t *testing.T) {
	inBubble(t, func(w *world) {
		for i := range 20 {
			w.join(fmt.Sprint(i), Config{})
		}
		time.Sleep(200 * time.Second)
		var sweeps uint64
		for _, m := range w.all {
			sweeps += m.Stats().Sweeps
		}
		assert.LessOrEqual(t, sweeps, uint64(41))
		assert.GreaterOrEqual(t, sweeps, uint64(33))
	})
}

func TestZombie_stoppedAndContinued(t *testing.T) {
	t.Parallel()
	w := onReal(t)
	zombie := w.fork(orders{Name: "zombie", Jobs: []string{"one", "two"}})
	old := w.workers()
	peer := w.join("peer", fast())
	zombie.signal(syscall.SIGSTOP)
	w.eventually(func() bool { return len(peer.enq.accepted()) == 2 }, "recovered")
	w.eventually(func() bool { return len(w.workers()) == 1 }, "and retired")
	zombie.signal(syscall.SIGCONT)
	zombie.say("report")
	for range 2 {
		assert.Equal(t, fmt.Sprintf("%v %v", ErrLost, ErrLost), zombie.expect("lease "), "cause and Done")
	}
	again := zombie.expect("again ")
	require.True(t, strings.HasPrefix(again, "<nil> zombie-"), again)
	assert.NotContains(t, old, strings.Fields(again)[1], "under a new id")
	assert.Contains(t, w.workers(), strings.Fields(again)[1])
	assert.Len(t, peer.enq.called(), 2)
}

// The holder that was told must not remove the record with its Done: the job would be neither done nor handed back.
func TestZombie_doneAfterToldLostKeepsTheRecord(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.join("a", Config{})
		l := w.track(a, "job")[0]
		ctx := l.Context()
		// Fenced, and nobody has claimed the lease yet.
		require.NoError(t, a.fenceOwn(bg, a.current.Load()))
		a.heart.kick()
		<-ctx.Done()
		require.ErrorIs(t, context.Cause(ctx), ErrLost)
		require.ErrorIs(t, l.Done(), ErrLost)
		require.ErrorIs(t, l.Confirm(bg), ErrLost)
		b := w.join("b", Config{})
		time.Sleep(10 * time.Second)
		assert.Len(t, append(a.enq.accepted(), b.enq.accepted()...), 1, "handed back")
	})
}

// Fenced, not claimed, and not told: the work is done, so Done is nil and nobody runs it again.
func TestZombie_doneBeforeTheClaim(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.join("a", Config{})
		l := w.track(a, "job")[0]
		require.NoError(t, a.fenceOwn(bg, a.current.Load()))
		require.NoError(t, l.Done())
		b := w.join("b", Config{})
		time.Sleep(time.Minute)
		assert.Empty(t, append(a.enq.called(), b.enq.called()...))
	})
}

func TestZombie_trackRejoins(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.join("a", Config{})
		old := a.WorkerID()
		require.NoError(t, a.fenceOwn(bg, a.current.Load()))
		l := w.track(a, "job")[0]
		assert.NotEqual(t, old, a.WorkerID())
		assert.True(t, strings.HasPrefix(l.ID(), a.WorkerID()+"/"))
		assert.EqualValues(t, 1, a.Stats().Rejoins)
		assert.Empty(t, w.raw.HKeys(bg, w.keys(old).jobs).Val(), "a refused Track leaves no record")
		require.NoError(t, l.Done())
	})
}

// The first copy of a Track was executed, its reply was lost, and the session fenced before the second came: the job is on its way
// back, and must not be tracked again.
func TestTrack_executedThenFenced(t *testing.T) {
	bothWays(t, func(t *testing.T, w *world) {
		a := w.join("a", Config{HeartbeatInterval: time.Hour, OrphanThreshold: 4 * time.Hour})
		inc := a.current.Load()
		require.NoError(t, w.track(a, "before")[0].Done())
		a.faults.add(&fault{mode: twice, on: "commit", between: func() { require.NoError(t, a.fenceOwn(bg, inc)) }})
		_, err := a.Track(bg, Job{ID: "job"})
		require.ErrorIs(t, err, ErrLost)
		assert.Len(t, w.inflight(inc.id), 1)
		assert.Len(t, w.raw.HKeys(bg, inc.keys.jobs).Val(), 1)
		_, err = a.Sweep(bg)
		require.NoError(t, err)
	})
}

func TestSelfFence(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.join("a", Config{SelfFence: true}), w.join("b", Config{})
		l := w.track(a, "job")[0]
		ctx := l.Context()
		a.faults.add(&fault{mode: hang, times: -1})
		last := a.Stats().LastBeat
		<-ctx.Done()
		assert.ErrorIs(t, context.Cause(ctx), ErrLost)
		assert.Equal(t, a.tm.trust, time.Since(last), "at the moment, not at the next beat")
		assert.Empty(t, b.enq.called(), "strictly before a peer takes it")
		assert.ErrorContains(t, a.Check(), "no good heartbeat for")
		require.ErrorIs(t, l.Done(), ErrLost)
		a.faults.clear()
		time.Sleep(30 * time.Second)
		assert.Len(t, append(a.enq.accepted(), b.enq.accepted()...), 1, "handed back, although Redis never missed us")
		require.NoError(t, a.Check())
		require.NoError(t, w.track(a, "more")[0].Done())
	})
}

func TestNoSelfFence_goesOnUntilTold(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.join("a", Config{})
		l := w.track(a, "job")[0]
		ctx := l.Context()
		a.faults.add(&fault{mode: failBefore, times: -1})
		time.Sleep(time.Hour)
		require.NoError(t, ctx.Err(), "nobody is there who could have taken it")
		require.Error(t, a.Check())
		a.faults.clear()
		time.Sleep(5 * time.Second)
		require.NoError(t, a.Check())
		require.NoError(t, l.Done())
	})
}
