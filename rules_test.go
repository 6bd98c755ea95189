package recovery

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// The rules of section "jobs": limits, dead letters, backoff, timeouts, checkpoints, sealed and stored payloads.

// crashRun tracks a job on a new worker, which dies with it, and waits until peers have dealt with that.
func (w *world) crashRun(job Job, cfg Config) {
	w.t.Helper()
	m := w.join("victim", cfg)
	_, err := m.Track(bg, job)
	require.NoError(w.t, err)
	m.crash()
	full := cfg.withDefaults()
	time.Sleep(2 * (full.OrphanThreshold + full.SweepInterval))
	synctest.Wait()
}

func TestRules_recoveryLimit(t *testing.T) {
	inBubble(t, func(w *world) {
		peer := w.join("peer", Config{})
		for n := 1; n <= 4; n++ {
			w.crashRun(Job{ID: "poison", Payload: []byte("p"), Headers: map[string]string{"h": "v"}, Checkpoint: []byte("cp")}, Config{})
		}
		var recoveries []int
		for _, o := range peer.enq.accepted() {
			recoveries = append(recoveries, o.Recovery)
		}
		assert.Equal(t, []int{1, 2, 3}, recoveries, "three times, then no more")

		i := NewInspector(w.raw, w.ns)
		letters, err := i.DeadLetters(bg, 0, 10)
		require.NoError(t, err)
		require.Len(t, letters, 1)
		l := letters[0]
		require.NoError(t, l.Err)
		assert.Equal(t, "poison", l.ID)
		assert.Equal(t, "p", string(l.Payload))
		assert.Equal(t, map[string]string{"h": "v"}, l.Headers)
		assert.Equal(t, "cp", string(l.Orphan.Checkpoint))
		assert.Equal(t, "recovered 3 times within 72h0m0s, the limit is 3", l.Cause)
		require.Len(t, l.Crashes, 4, "each crash with worker and time")
		for n, c := range l.Crashes {
			assert.True(t, strings.HasPrefix(c.Worker, "victim-"), c.Worker)
			assert.WithinDuration(t, time.Now().Add(-time.Duration(3-n)*50*time.Second), c.At, time.Minute)
		}
		assert.Equal(t, l.Key, l.Crashes[3].Lease)

		again := &recorder{}
		require.NoError(t, i.Requeue(bg, l.Key, again))
		assert.Equal(t, []string{"poison"}, again.ids())
		letters, err = i.DeadLetters(bg, 0, 10)
		require.NoError(t, err)
		assert.Empty(t, letters)
		require.ErrorIs(t, i.Requeue(bg, l.Key, again), ErrNoLetter)
		require.ErrorIs(t, i.Discard(bg, l.Key), ErrNoLetter)
		w.crashRun(Job{ID: "poison"}, Config{})
		assert.Equal(t, 1, peer.enq.accepted()[3].Recovery, "the count is reset")
	})
}

func TestRules_limitPerJobAndWindow(t *testing.T) {
	inBubble(t, func(w *world) {
		cfg := Config{HeartbeatInterval: time.Minute, MaxRecoveries: 1, RecoveryWindow: 3 * time.Hour}
		peer := w.join("peer", cfg)
		for range 5 {
			w.crashRun(Job{ID: "for ever", MaxRecoveries: NoLimit}, cfg)
			w.crashRun(Job{ID: "twice", MaxRecoveries: 2}, cfg)
		}
		for range 3 {
			w.crashRun(Job{ID: "rare"}, cfg)
			time.Sleep(190 * time.Minute)
		}
		count := map[string]int{}
		for _, o := range peer.enq.accepted() {
			count[o.ID]++
		}
		assert.Equal(t, map[string]int{"for ever": 5, "twice": 2, "rare": 3}, count)
		assert.EqualValues(t, 3, peer.Stats().Buried)
	})
}

// The sweeper dies between count and Enqueue, or after Enqueue: the crash counts once. See also TestSweeper_dies/AfterCount.
func TestRules_countedOncePerRun(t *testing.T) {
	inBubble(t, func(w *world) {
		peer := w.join("peer", Config{})
		peer.enq.set(func(context.Context, Orphan) error {
			if len(peer.enq.called()) < 6 {
				return errors.New("not yet")
			}
			return nil
		})
		w.crashRun(Job{ID: "job"}, Config{})
		time.Sleep(20 * time.Minute)
		require.Len(t, peer.enq.accepted(), 1)
		for _, o := range peer.enq.called() {
			assert.Equal(t, 1, o.Recovery)
		}
	})
}

func TestRules_maxDead(t *testing.T) {
	inBubble(t, func(w *world) {
		var dropped collected[string]
		peer := w.join("peer", Config{MaxDead: 3, Events: Events{Dropped: func(i DroppedInfo) { dropped.add(i.Job) }}})
		peer.enq.set(func(context.Context, Orphan) error { return Permanent(errors.New("no")) })
		for n := range 5 {
			w.crashRun(Job{ID: fmt.Sprint(n)}, Config{})
		}
		assert.Equal(t, []string{"0", "1"}, dropped.all(), "the oldest, each announced")
		assert.EqualValues(t, 2, peer.Stats().Dropped)
		i := NewInspector(w.raw, w.ns)
		var ids []string
		for offset := 0; ; offset += 2 { // paged
			page, err := i.DeadLetters(bg, offset, 2)
			require.NoError(t, err)
			if len(page) == 0 {
				break
			}
			for _, l := range page {
				ids = append(ids, l.ID)
				assert.Equal(t, "no", l.LastError)
			}
		}
		assert.Equal(t, []string{"2", "3", "4"}, ids)
		assert.Len(t, w.raw.HKeys(bg, peer.keys.deadJobs()).Val(), 6, "letter and record of each, nothing of the dropped")
		page, err := i.DeadLetters(bg, 0, 1)
		require.NoError(t, err)
		require.ErrorContains(t, i.Requeue(bg, page[0].Key, EnqueuerFunc(func(context.Context, Orphan) error { return assert.AnError })), "requeue dead letter")
		require.NoError(t, i.Discard(bg, page[0].Key), "it was still there")
		_, err = i.DeadLetters(bg, -1, 0)
		require.ErrorContains(t, err, "offset is -1")
	})
}

func TestRules_backoff(t *testing.T) {
	inBubble(t, func(w *world) {
		cfg := Config{Backoff: func(recovery int) time.Duration { return time.Duration(recovery-1) * 10 * time.Minute }, MaxRecoveries: NoLimit}
		a := w.join("a", cfg)
		w.crashRun(Job{ID: "job"}, cfg)
		require.Len(t, a.enq.accepted(), 1, "the first recovery is immediate")
		w.crashRun(Job{ID: "job"}, cfg)
		require.Len(t, a.enq.accepted(), 1)
		time.Sleep(5 * time.Minute)
		a.crash() // the sweeper that decided it dies; the delay goes on
		b := w.join("b", cfg)
		time.Sleep(4 * time.Minute)
		assert.Empty(t, b.enq.called())
		time.Sleep(2 * time.Minute)
		require.Len(t, b.enq.accepted(), 1)
		assert.Equal(t, 2, b.enq.accepted()[0].Recovery)
		assert.Zero(t, b.Stats().HandBackFailed, "waiting is no failure")
	})
}

// On a real server: the sweeper dies right after it has put the hand-back off.
func TestRules_sweeperDiesBetweenBackoffAndEnqueue(t *testing.T) {
	t.Parallel()
	w := onReal(t)
	book := ledger(t)
	worker := w.fork(orders{Name: "worker", Jobs: []string{"job"}})
	sweeper := w.fork(orders{Name: "sweeper", Kill: "after postpone", Ledger: book, Backoff: time.Second})
	worker.signal(syscall.SIGKILL)
	sweeper.died()
	peer := w.join("peer", fast())
	peer.enq.set(ledgerEnqueuer(book))
	w.eventually(func() bool { return len(w.workers()) == 1 }, "retired")
	lines := enqueued(t, book)
	require.Len(t, lines, 1, "once")
	assert.Equal(t, "1", strings.Fields(lines[0])[3], "counted once")
	o := peer.enq.accepted()[0]
	assert.Equal(t, "job", o.ID)
}

func TestRules_backoffPanics(t *testing.T) {
	inBubble(t, func(w *world) {
		cfg := Config{Backoff: func(int) time.Duration { panic("no") }}
		peer := w.join("peer", cfg)
		w.crashRun(Job{ID: "job"}, cfg)
		assert.Len(t, peer.enq.accepted(), 1)
	})
}

func TestRules_timeout(t *testing.T) {
	inBubble(t, func(w *world) {
		m := w.join("a", Config{JobTimeout: time.Hour, HeartbeatInterval: time.Minute})
		began := time.Now()
		slowJob := w.track(m, "slow")[0]
		short, err := m.Track(bg, Job{ID: "short", Timeout: time.Minute, Checkpoint: []byte("cp")})
		require.NoError(t, err)
		long, err := m.Track(bg, Job{ID: "long", Timeout: NoTimeout})
		require.NoError(t, err)
		quick := w.track(m, "quick")[0]
		require.NoError(t, quick.Done())
		<-short.Context().Done()
		assert.Equal(t, time.Minute, time.Since(began))
		assert.ErrorIs(t, context.Cause(short.Context()), ErrLost)
		synctest.Wait()
		require.Len(t, m.enq.accepted(), 1)
		o := m.enq.accepted()[0]
		assert.Equal(t, TimedOut, o.Reason)
		assert.Equal(t, 1, o.Recovery, "counted")
		assert.Equal(t, "cp", string(o.Checkpoint))
		assert.ErrorIs(t, short.Done(), ErrLost, "its late Done")
		<-slowJob.Context().Done()
		assert.Equal(t, time.Hour, time.Since(began))
		time.Sleep(3 * time.Hour)
		assert.Equal(t, []string{"short", "slow"}, m.enq.ids(), "a job without timeout may run for days")
		require.NoError(t, long.Done())
		assert.Zero(t, m.Stats().Repaired)
		require.NoError(t, m.Stop(bg))
	})
}

func TestRules_release(t *testing.T) {
	bothWays(t, func(t *testing.T, w *world) {
		m := w.join("a", fast())
		l := w.track(m, "job")[0]
		require.NoError(t, l.Checkpoint(bg, []byte("half-way")))
		m.enq.set(func(context.Context, Orphan) error { return errors.New("queue is down") })
		require.ErrorContains(t, l.Release(), `release job "job": queue is down`)
		require.NoError(t, l.Context().Err(), "tracked as before")
		require.NoError(t, l.Confirm(bg))
		for range 3 {
			require.NoError(t, m.heart.beatOnce(bg))
		}
		assert.Zero(t, m.Stats().Repaired)
		m.enq.set(nil)
		require.NoError(t, l.Release())
		require.Len(t, m.enq.accepted(), 1)
		o := m.enq.accepted()[0]
		assert.Equal(t, Released, o.Reason)
		assert.Equal(t, "half-way", string(o.Checkpoint))
		assert.EqualValues(t, 0, w.raw.Exists(bg, m.keys.crashes("job")).Val(), "not counted as a crash")
		assert.ErrorIs(t, context.Cause(l.Context()), ErrLost)
		assert.ErrorIs(t, l.Done(), ErrLost)
		assert.ErrorIs(t, l.Release(), ErrLost)
		assert.Zero(t, m.Stats().Inflight)
		l = w.track(m, "done")[0]
		require.NoError(t, l.Done())
		assert.ErrorContains(t, l.Release(), "already done")
		require.NoError(t, m.Stop(bg))
	})
}

func TestRules_releaseFaults(t *testing.T) {
	for _, call := range []string{"take", "untake", "forget", "count"} {
		for name, mode := range map[string]faultMode{"before": failBefore, "reply lost": loseReply, "hangs": hang} {
			t.Run(call+" "+name, func(t *testing.T) {
				inBubble(t, func(w *world) {
					m, peer := w.join("a", Config{}), w.join("b", Config{})
					if call == "untake" {
						m.enq.set(func(context.Context, Orphan) error {
							if len(m.enq.called()) == 1 {
								return errors.New("not yet")
							}
							return nil
						})
					}
					l := w.track(m, "job")[0]
					m.faults.add(&fault{mode: mode, on: call, times: 1})
					err := l.Release()
					time.Sleep(2 * time.Minute)
					back := len(m.enq.accepted()) + len(peer.enq.accepted())
					if l.Done() == nil {
						assert.Error(t, err)
						assert.Zero(t, back, "still the holder's: done")
					} else {
						assert.Equal(t, 1, back, "the holder was told, and it is handed back once")
					}
					assert.Empty(t, w.inflight(m.WorkerID()))
					require.NoError(t, m.Stop(bg))
				})
			})
		}
	}
}

func TestRules_releaseOfAZombie(t *testing.T) {
	inBubble(t, func(w *world) {
		m, peer := w.join("a", Config{HeartbeatInterval: time.Hour}), w.join("b", Config{})
		l := w.track(m, "job")[0]
		require.NoError(t, m.fenceOwn(bg, m.current.Load()))
		time.Sleep(time.Minute)
		require.Len(t, peer.enq.accepted(), 1)
		require.ErrorIs(t, l.Release(), ErrLost)
		assert.Empty(t, m.enq.called())
	})
}

func TestRules_checkpoint(t *testing.T) {
	bothWays(t, func(t *testing.T, w *world) {
		cfg := fast()
		cfg.MaxPayload = 100
		a, b := w.join("a", cfg), w.join("b", cfg)
		all := make([]byte, 100)
		for i := range all {
			all[i] = byte(i * 7)
		}
		l := w.track(a, "job")[0]
		require.NoError(t, l.Checkpoint(bg, []byte("first")))
		require.NoError(t, l.Checkpoint(bg, all))
		err := l.Checkpoint(bg, make([]byte, 101))
		require.ErrorIs(t, err, ErrPayloadTooLarge)
		require.ErrorContains(t, err, "101 bytes, Config.MaxPayload is 100")
		gone := w.track(a, "removed")[0]
		require.NoError(t, gone.Checkpoint(bg, []byte("x")))
		require.NoError(t, gone.Checkpoint(bg, nil))
		finished := w.track(a, "finished")[0]
		require.NoError(t, finished.Checkpoint(bg, []byte("x")))
		require.NoError(t, finished.Done())
		require.ErrorContains(t, finished.Checkpoint(bg, nil), "already done")
		for _, f := range w.raw.HKeys(bg, w.keys(a.WorkerID()).jobs).Val() {
			assert.False(t, strings.HasPrefix(f, "3"), "nothing is left of the finished one: %s", f)
		}
		_, err = a.Track(bg, Job{ID: "second run", Checkpoint: []byte("of the first")})
		require.NoError(t, err)
		a.crash()
		w.eventually(func() bool { return len(b.enq.accepted()) == 3 }, "handed back")
		for _, o := range b.enq.accepted() {
			switch o.ID {
			case "job":
				assert.Equal(t, all, o.Checkpoint)
			case "removed":
				assert.Nil(t, o.Checkpoint)
			case "second run":
				assert.Equal(t, "of the first", string(o.Checkpoint), "survives a second crash, until replaced")
			}
		}
	})
}

// A zombie's checkpoint changes nothing.
func TestRules_checkpointOfAZombie(t *testing.T) {
	bothWays(t, func(t *testing.T, w *world) {
		a := w.join("a", Config{HeartbeatInterval: time.Hour, OrphanThreshold: 4 * time.Hour})
		l := w.track(a, "job")[0]
		require.NoError(t, l.Checkpoint(bg, []byte("mine")))
		inc := a.current.Load()
		require.NoError(t, a.fenceOwn(bg, inc))
		require.ErrorIs(t, l.Checkpoint(bg, []byte("a zombie's")), ErrLost, "fenced, not yet claimed")
		c, err := a.claim(bg, inc.id, false)
		require.NoError(t, err)
		require.Len(t, c.leases, 1)
		require.ErrorIs(t, l.Checkpoint(bg, []byte("a zombie's")), ErrLost, "claimed")
		assert.Equal(t, "mine", w.raw.HGet(bg, inc.keys.jobs, "1.cp").Val())
	})
}

// A late copy of an older checkpoint must not replace a newer one.
func TestRules_checkpointLateCopy(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.join("a", Config{})
		l := w.track(a, "job")[0]
		require.NoError(t, l.Checkpoint(bg, []byte("one")))
		require.NoError(t, l.Checkpoint(bg, []byte("two")))
		inc := a.current.Load()
		_, err := a.save(bg, inc, "1", 1, []byte("one"))
		require.NoError(t, err)
		assert.Equal(t, "two", w.raw.HGet(bg, inc.keys.jobs, "1.cp").Val())
		w.mini.FlushAll()
		require.ErrorContains(t, l.Checkpoint(bg, []byte("three")), "not in Redis")
		time.Sleep(10 * time.Second)
		require.NoError(t, l.Confirm(bg))
		require.NoError(t, l.Checkpoint(bg, []byte("four")))
		a.crash()
		b := w.join("b", Config{})
		time.Sleep(time.Minute)
		require.Len(t, b.enq.accepted(), 1)
		assert.Equal(t, "four", string(b.enq.accepted()[0].Checkpoint))
	})
}

func TestRules_checkpointTrackedAgain(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.join("a", Config{}), w.join("b", Config{})
		l := w.track(a, "job")[0]
		require.NoError(t, l.Checkpoint(bg, []byte("kept")))
		w.mini.FlushAll()
		time.Sleep(10 * time.Second)
		a.crash()
		time.Sleep(time.Minute)
		require.Len(t, b.enq.accepted(), 1)
		assert.Equal(t, "kept", string(b.enq.accepted()[0].Checkpoint))
	})
}

// With a Codec nothing of payload, headers or checkpoint is readable in Redis; what can't be opened is buried untouched.
func TestRules_sealed(t *testing.T) {
	inBubble(t, func(w *world) {
		key, other := []byte(strings.Repeat("k", 32)), []byte(strings.Repeat("o", 32))
		sealed := func(keys ...[]byte) Config { return Config{Codec: AESGCM(keys...)} }
		job := Job{ID: "job", Payload: []byte("secret payload"), Headers: map[string]string{"name": "secret header"}, Checkpoint: []byte("secret start")}
		dead := w.join("dead", sealed(key))
		l, err := dead.Track(bg, job)
		require.NoError(t, err)
		require.NoError(t, l.Checkpoint(bg, []byte("secret checkpoint")))
		_, err = dead.Track(bg, Job{ID: "job2", Payload: []byte("secret")})
		require.NoError(t, err)
		assert.NotContains(t, w.mini.Dump(), "secret")
		dead.crash()
		stranger := w.join("stranger", sealed(other))
		foreign := w.join("foreign", Config{})
		w.track(foreign, "plain")
		foreign.crash()
		time.Sleep(time.Minute)
		assert.Equal(t, []string{"plain"}, stranger.enq.ids(), "others go on")
		assert.NotContains(t, w.mini.Dump(), "secret")
		i := NewInspector(w.raw, w.ns, InspectCodec(AESGCM(other, key)))
		letters, err := i.DeadLetters(bg, 0, 10)
		require.NoError(t, err)
		require.Len(t, letters, 2)
		again := &recorder{}
		for _, l := range letters {
			assert.Equal(t, "record unreadable", l.Cause)
			require.NoError(t, i.Requeue(bg, l.Key, again))
		}
		got := again.accepted()
		slices.SortFunc(got, func(a, b Orphan) int { return strings.Compare(a.ID, b.ID) })
		assert.Equal(t, "secret payload", string(got[0].Payload))
		assert.Equal(t, "secret header", got[0].Headers["name"])
		assert.Equal(t, "secret checkpoint", string(got[0].Checkpoint))
		_, err = New(w.raw, again, Config{Codec: AESGCM([]byte("short"))})
		require.ErrorIs(t, err, ErrInvalidConfig)
		require.ErrorContains(t, err, "5 bytes")
	})
}

// memStore is a PayloadStore that can fail.
type memStore struct {
	mu    sync.Mutex
	m     map[string][]byte
	fails map[string]error
}

func (s *memStore) do(op, key string) error {
	if err := s.fails[op]; err != nil {
		return err
	}
	return nil
}

func (s *memStore) Put(_ context.Context, key string, p []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.do("put", key); err != nil {
		return err
	}
	s.m[key] = slices.Clone(p)
	return nil
}

func (s *memStore) Get(_ context.Context, key string) ([]byte, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.do("get", key); err != nil {
		return nil, err
	}
	p, ok := s.m[key]
	if !ok {
		return nil, fmt.Errorf("get %q: %w", key, fs.ErrNotExist)
	}
	return p, nil
}

func (s *memStore) Delete(_ context.Context, key string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.m, key)
	return s.do("delete", key)
}

func (s *memStore) fail(op string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fails[op] = err
}

func (s *memStore) size() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.m)
}

func TestRules_payloadStore(t *testing.T) {
	inBubble(t, func(w *world) {
		store := &memStore{m: map[string][]byte{}, fails: map[string]error{}}
		cfg := Config{PayloadStore: store, PayloadThreshold: 10, Codec: AESGCM([]byte(strings.Repeat("k", 16)))}
		dead, peer := w.join("dead", cfg), w.join("peer", cfg)
		big := []byte("a secret payload that is big")
		track := func(m *member, id string) *Lease {
			l, err := m.Track(bg, Job{ID: id, Payload: big})
			require.NoError(t, err)
			return l
		}
		_, err := dead.Track(bg, Job{ID: "small", Payload: []byte("small")})
		require.NoError(t, err)
		assert.Zero(t, store.size(), "below the threshold")
		done := track(dead, "done")
		require.Equal(t, 1, store.size())
		for _, p := range store.m {
			assert.NotContains(t, string(p), "secret")
		}
		require.NoError(t, done.Done())
		synctest.Wait()
		assert.Zero(t, store.size(), "until the job is done")

		store.fail("put", errors.New("disk full"))
		_, err = dead.Track(bg, Job{ID: "job", Payload: big})
		require.ErrorContains(t, err, `job "job": store payload: disk full`)
		store.fail("put", nil)
		assert.Len(t, w.inflight(dead.WorkerID()), 1)

		track(dead, "back")
		lost := track(dead, "payload lost")
		require.NoError(t, store.Delete(bg, lost.ID()))
		store.fail("get", errors.New("network share is away"))
		dead.crash()
		time.Sleep(time.Minute)
		assert.Equal(t, []string{"small"}, peer.enq.ids(), "the others wait")
		store.fail("get", nil)
		time.Sleep(10 * time.Minute)
		require.Equal(t, []string{"back", "small"}, peer.enq.ids())
		for _, o := range peer.enq.accepted() {
			if o.ID == "back" {
				assert.Equal(t, big, o.Payload)
			}
		}
		assert.Zero(t, store.size(), "until the Enqueuer has taken it")
		i := NewInspector(w.raw, w.ns, InspectCodec(cfg.Codec), InspectStore(store))
		letters, err := i.DeadLetters(bg, 0, 10)
		require.NoError(t, err)
		require.Len(t, letters, 1, "a missing one is no crash loop")
		assert.Equal(t, "payload missing", letters[0].Cause)
		require.ErrorContains(t, i.Requeue(bg, letters[0].Key, &recorder{}), "load payload")

		peer.enq.set(func(context.Context, Orphan) error { return Permanent(errors.New("no")) })
		w.crashRun(Job{ID: "buried", Payload: big}, cfg)
		assert.Equal(t, 1, store.size(), "a dead letter keeps its payload")
		letters, err = i.DeadLetters(bg, 1, 1)
		require.NoError(t, err)
		again := &recorder{}
		require.NoError(t, i.Requeue(bg, letters[0].Key, again))
		assert.Equal(t, big, again.accepted()[0].Payload)
		assert.Zero(t, store.size())
	})
}

// For any sequence of crash, timeout, panic, release and retry each tracked job ends in exactly one of done, handed back, dead.
func TestRules_property(t *testing.T) {
	for seed := range uint64(6) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			inBubble(t, func(w *world) { property(w, rand.New(rand.NewPCG(seed, 1))) })
		})
	}
}

func property(w *world, rnd *rand.Rand) {
	answers := rand.New(rand.NewPCG(rnd.Uint64(), 2))
	cfg := Config{HeartbeatInterval: 30 * time.Second, MaxRecoveries: 2, JobTimeout: 10 * time.Minute, Backoff: Exponential(time.Second, 5*time.Minute)}
	var dice sync.Mutex
	flaky := func(m *member) {
		m.enq.set(func(_ context.Context, o Orphan) error {
			dice.Lock()
			defer dice.Unlock()
			switch answers.IntN(6) {
			case 0:
				return errors.New("try again")
			case 1:
				return Permanent(errors.New("never"))
			}
			return nil
		})
	}
	var mu sync.Mutex
	ends := map[string][]string{} // lease -> how it ended, for its holder
	note := func(l *Lease, how string) {
		mu.Lock()
		defer mu.Unlock()
		ends[l.ID()] = append(ends[l.ID()], how)
	}
	anchor := w.join("anchor", cfg, flaky)
	workers := []*member{anchor}
	var tracked []string
	var wg sync.WaitGroup
	for step := range 40 {
		if len(workers) < 2 || rnd.IntN(8) == 0 {
			workers = append(workers, w.join(fmt.Sprint("w", step), cfg, flaky))
		}
		pick := rnd.IntN(len(workers))
		m := workers[pick]
		id := fmt.Sprint("job", rnd.IntN(6))
		l, err := m.Track(bg, Job{ID: id})
		require.NoError(w.t, err)
		tracked = append(tracked, l.ID())
		switch rnd.IntN(6) {
		case 0:
			if pick > 0 {
				note(l, "crash")
				m.crash()
				workers = slices.Delete(workers, pick, pick+1)
				break
			}
			fallthrough
		case 1:
			if l.Done() == nil {
				note(l, "done")
			}
		case 2:
			if err := l.Release(); err != nil && !errors.Is(err, ErrLost) && l.Done() == nil {
				note(l, "done")
			}
		case 3:
			m.surrender(l, Panicked)
		case 4: // left to its timeout
		case 5:
			wg.Add(1)
			wait := time.Duration(rnd.IntN(1200)) * time.Second
			go func() {
				defer wg.Done()
				time.Sleep(wait)
				if l.Done() == nil {
					note(l, "done")
				}
			}()
		}
		time.Sleep(time.Duration(rnd.IntN(100)) * time.Second)
	}
	wg.Wait()
	time.Sleep(2 * time.Hour)
	synctest.Wait()
	letters, err := NewInspector(w.raw, w.ns).DeadLetters(bg, 0, 1000)
	require.NoError(w.t, err)
	fate := map[string][]string{}
	for lease, how := range ends {
		if slices.Contains(how, "done") {
			fate[lease] = append(fate[lease], "done")
		}
	}
	for _, l := range letters {
		fate[l.Key] = append(fate[l.Key], "dead")
	}
	for _, m := range w.all {
		for _, o := range m.enq.accepted() {
			fate[o.Key] = append(fate[o.Key], "handed back")
		}
	}
	for _, id := range tracked {
		assert.NotEmpty(w.t, fate[id], "%s: lost", id)
	}
	assert.Len(w.t, fate, 40, "each of them")
	for lease, f := range fate {
		assert.Len(w.t, f, 1, "%s: exactly one", lease)
	}
}

// An Enqueuer that says never to a Release makes it a dead letter, whichever way it is called.
func TestRules_releaseRefusedForGood(t *testing.T) {
	for name, opt := range map[string]func(*member){
		"Enqueuer": func(m *member) {
			m.enq.set(func(context.Context, Orphan) error { return Permanent(errors.New("never")) })
		},
		"ListQueue": into(NewListQueue("jobs", ElementFormat(stubborn{}))),
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(w *world) {
				m := w.join("a", Config{}, opt)
				l := w.track(m, "job")[0]
				err := l.Release()
				assert.ErrorIs(t, err, ErrLost)
				assert.ErrorContains(t, err, "never")
				assert.ErrorIs(t, l.Done(), ErrLost)
				letters, err := NewInspector(w.raw, w.ns).DeadLetters(bg, 0, 10)
				require.NoError(t, err)
				require.Len(t, letters, 1)
				assert.Equal(t, "job", letters[0].ID)
				assert.EqualValues(t, 1, m.Stats().Buried)
				time.Sleep(5 * time.Minute)
				assert.EqualValues(t, 1, m.Stats().Buried, "once")
				assert.Zero(t, m.Stats().Inflight)
				require.NoError(t, m.Stop(bg))
			})
		})
	}
}

// stubborn takes nothing back.
type stubborn struct{ payloadFormat }

func (stubborn) Encode(Orphan) ([]byte, error) { return nil, Permanent(errors.New("never")) }

// moody does not take it back today.
type moody struct{ payloadFormat }

func (moody) Encode(Orphan) ([]byte, error) { return nil, errors.New("not today") }

// A format that can't write the job refuses as any Enqueuer does: nothing was sent, so the lease is as before.
func TestRules_releaseNotEncoded(t *testing.T) {
	inBubble(t, func(w *world) {
		m := w.join("a", Config{}, into(NewListQueue("jobs", ElementFormat(moody{}))))
		l := w.track(m, "job")[0]
		err := l.Release()
		assert.ErrorContains(t, err, "not today")
		assert.NotErrorIs(t, err, ErrLost)
		require.NoError(t, l.Confirm(bg))
		require.NoError(t, l.Done())
	})
}

func TestDo_withoutFunc(t *testing.T) {
	inBubble(t, func(w *world) {
		m := w.join("a", Config{})
		err := m.Do(bg, Job{ID: "job"}, nil)
		require.ErrorIs(t, err, ErrInvalidConfig)
		require.ErrorContains(t, err, `do job "job": `)
		assert.Zero(t, m.Stats().Tracked)
	})
}

// A log says why a job was lost: what the worker itself has done reads differently from what was done to it.
func TestRules_lostAndWhy(t *testing.T) {
	inBubble(t, func(w *world) {
		var reasons collected[string]
		cfg := Config{Events: Events{Lost: func(i LostInfo) { reasons.add(i.Job + ": " + i.Reason) }}}
		a := w.join("a", cfg)
		require.NoError(t, w.track(a, "back")[0].Release())
		slow, err := a.Track(bg, Job{ID: "slow", Timeout: time.Second})
		require.NoError(t, err)
		<-slow.Context().Done()
		w.track(a, "zombie")
		w.join("b", Config{})
		a.faults.add(&fault{mode: failBefore, times: -1})
		time.Sleep(time.Minute)
		a.faults.clear()
		time.Sleep(time.Minute)
		w.track(a, "left")
		ctx, cancel := context.WithCancel(bg)
		cancel()
		require.ErrorIs(t, a.Stop(ctx), context.Canceled)
		assert.Equal(t, []string{"back: released", "slow: timed-out", "zombie: declared dead by a peer", "left: stopping"}, reasons.all())
		assert.Contains(t, w.logs.String(), "recovery: heartbeat is back")
	})
}

// An Inspector of a fleet that can't exist says so, instead of that all is well.
func TestInspector_refuses(t *testing.T) {
	inBubble(t, func(w *world) {
		for _, i := range []*Inspector{NewInspector(w.raw, "a b"), NewInspector(nil, "ns"), NewInspector(w.raw, "ns", InspectHashTag("{tag}"))} {
			_, workers := i.Workers(bg)
			_, inflight := i.Inflight(bg, "w")
			_, letters := i.DeadLetters(bg, 0, 1)
			_, letter := i.DeadLetter(bg, "w/1")
			_, doctor := i.Doctor(bg)
			for _, err := range []error{workers, inflight, letters, letter, doctor, i.Requeue(bg, "w/1", &recorder{}), i.Discard(bg, "w/1")} {
				assert.ErrorIs(t, err, ErrInvalidConfig)
			}
		}
	})
}

func TestInspector_claimed(t *testing.T) {
	bothWays(t, func(t *testing.T, w *world) {
		a, b := w.join("a", slowHeart()), w.join("b", slowHeart())
		b.enq.set(func(context.Context, Orphan) error { return errors.New("queue is full") })
		_, err := a.Track(bg, Job{ID: "job", Queue: "q", Payload: []byte("12345")})
		require.NoError(t, err)
		require.NoError(t, a.fenceOwn(bg, a.current.Load()))
		_, err = b.Sweep(bg)
		require.NoError(t, err)
		claims, err := NewInspector(w.raw, w.ns).Claimed(bg, a.WorkerID())
		require.NoError(t, err)
		require.Len(t, claims, 1)
		c := claims[0]
		assert.Equal(t, []any{"job", "q", 5, 1, "queue is full", Crashed, a.WorkerID() + "/1"},
			[]any{c.Job.ID, c.Job.Queue, c.Size, c.Attempts, c.LastError, c.Reason, c.Lease})
		assert.WithinDuration(t, time.Now(), c.Started, time.Minute)
		assert.True(t, c.Due.After(time.Now()), "%v", c.Due)
		claims, err = NewInspector(w.raw, w.ns).Claimed(bg, b.WorkerID())
		require.NoError(t, err)
		assert.Empty(t, claims)
	})
}
