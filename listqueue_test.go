package recovery

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
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

// into makes q the Enqueuer.
func into(q *ListQueue) func(*member) { return func(m *member) { m.list = q } }

func (w *world) push(key string, elements ...string) {
	w.t.Helper()
	for _, e := range elements {
		require.NoError(w.t, w.raw.LPush(bg, key, e).Err())
	}
}

// queued are the elements of a list, the next to be consumed first.
func (w *world) queued(key string) []string {
	w.t.Helper()
	all, err := w.raw.LRange(bg, key, 0, -1).Result()
	require.NoError(w.t, err)
	slices.Reverse(all)
	return all
}

func payloads(leases []*Lease) (all []string) {
	for _, l := range leases {
		all = append(all, string(l.Job().Payload))
	}
	return all
}

func doneWith(t *testing.T, leases []*Lease) {
	t.Helper()
	for _, l := range leases {
		require.NoError(t, l.Done())
	}
}

func TestFetch_popsAndTracks(t *testing.T) {
	inBubble(t, func(w *world) {
		q := NewListQueue("jobs")
		m := w.join("a", Config{}, into(q))
		w.push("jobs", "one", "two", "three")
		leases, err := m.Fetch(bg, q, 2)
		require.NoError(t, err)
		assert.Equal(t, []string{"one", "two"}, payloads(leases), "in the order of a consumer")
		assert.Equal(t, []string{"three"}, w.queued("jobs"))
		assert.Len(t, w.inflight(m.WorkerID()), 2)
		assert.Equal(t, 2, m.Stats().Inflight)
		assert.Equal(t, "jobs", leases[0].Job().Queue)
		assert.NotEmpty(t, leases[0].Job().ID)
		assert.NotZero(t, leases[0].Fence())
		assert.NoError(t, leases[0].Confirm(bg))
		doneWith(t, leases)
		assert.Empty(t, w.inflight(m.WorkerID()))
		assert.Zero(t, m.Stats().Inflight)
		assert.NoError(t, m.Stop(bg))
		assert.Equal(t, []string{"three"}, w.queued("jobs"))
	})
}

// What a dead worker had fetched is in its list again, once, byte for byte and first in line.
func TestFetch_deathPutsBack(t *testing.T) {
	for name, payload := range map[string]string{
		"plain": "hello", "empty": "", "binary": "\x00\xff\r\n{}\x01", "large": strings.Repeat("x", 1<<20),
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(w *world) {
				q := NewListQueue("jobs")
				doomed := w.join("doomed", Config{}, into(q))
				other := w.join("other", Config{}, into(q))
				w.push("jobs", payload, payload, "another")
				leases, err := doomed.Fetch(bg, q, 3)
				require.NoError(t, err)
				assert.Equal(t, name != "large", len(leases) == 3, "bounded by bytes, too")
				for len(leases) < 3 { // large ones come one by one
					more, err := doomed.Fetch(bg, q, 3)
					require.NoError(t, err)
					leases = append(leases, more...)
				}
				w.push("jobs", "younger")
				doomed.crash()
				time.Sleep(30 * time.Second)
				back := w.queued("jobs")
				require.Len(t, back, 4)
				assert.Equal(t, "younger", back[3], "recovered jobs are first")
				slices.Sort(back)
				want := []string{payload, payload, "another", "younger"}
				slices.Sort(want)
				for i := range want {
					require.True(t, want[i] == back[i], "byte for byte")
				}
				assert.Equal(t, uint64(3), other.Stats().HandedBack)
				assert.Positive(t, w.raw.PTTL(bg, w.keys(doomed.WorkerID()).handed).Val(), "the proof does not stay for ever")
				assert.Zero(t, other.Stats().Buried, "equal payloads that were in flight together are one crash")
				doomed.faults.clear()
				assert.ErrorIs(t, leases[0].Done(), ErrLost, "a zombie is told")
			})
		})
	}
}

func TestListQueue_ends(t *testing.T) {
	for _, c := range []struct {
		name string
		opts []ListOption
		left bool // producers push right, consumers pop left
		want []string
	}{
		{"first", nil, false, []string{"old", "waiting"}},
		{"last", []ListOption{RecoveredLast()}, false, []string{"waiting", "old"}},
		{"left first", []ListOption{ConsumeLeft()}, true, []string{"old", "waiting"}},
		{"left last", []ListOption{ConsumeLeft(), RecoveredLast()}, true, []string{"waiting", "old"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			inBubble(t, func(w *world) {
				q := NewListQueue("jobs", c.opts...)
				push, pop := w.raw.LPush, w.raw.RPop
				if c.left {
					push, pop = w.raw.RPush, w.raw.LPop
				}
				doomed := w.join("doomed", Config{}, into(q))
				w.join("other", Config{}, into(q))
				require.NoError(t, push(bg, "jobs", "old").Err())
				_, err := doomed.Fetch(bg, q, 1)
				require.NoError(t, err)
				require.NoError(t, push(bg, "jobs", "waiting").Err())
				doomed.crash()
				time.Sleep(30 * time.Second)
				var got []string
				for range 2 {
					got = append(got, pop(bg, "jobs").Val())
				}
				assert.Equal(t, c.want, got)
			})
		})
	}
}

// A worker that pops by itself and calls Track has its jobs handed back by the same queue, in the list's own format.
func TestListQueue_handsBackTracked(t *testing.T) {
	inBubble(t, func(w *world) {
		q := NewListQueue("jobs")
		doomed := w.join("doomed", Config{}, into(q))
		other := w.join("other", Config{}, into(q))
		for _, p := range []string{"a", "", "b\x00"} {
			_, err := doomed.Track(bg, Job{ID: "id" + p, Payload: []byte(p), Headers: map[string]string{"k": "v"}})
			require.NoError(t, err)
		}
		doomed.crash()
		time.Sleep(30 * time.Second)
		assert.ElementsMatch(t, []string{"a", "", "b\x00"}, w.queued("jobs"))
		assert.Zero(t, other.faults.count("forget"), "push and forget are one step")
		assert.Positive(t, other.faults.count("deliver"))
		assert.Empty(t, w.raw.HGetAll(bg, w.keys(doomed.WorkerID()).jobs).Val())
		assert.Equal(t, []string{other.WorkerID()}, w.workers())
	})
}

func TestListQueue_handsBackSealedAndStored(t *testing.T) {
	for name, codec := range map[string]Codec{"sealed": AESGCM(bytes.Repeat([]byte("k"), 32)), "plain": nil} {
		t.Run(name, func(t *testing.T) { handsBackStored(t, codec) })
	}
}

func handsBackStored(t *testing.T, codec Codec) {
	inBubble(t, func(w *world) {
		dir := t.TempDir()
		store, err := NewDirStore(dir)
		require.NoError(t, err)
		cfg := Config{Codec: codec, PayloadStore: store, PayloadThreshold: 10}
		q := NewListQueue("jobs")
		doomed := w.join("doomed", cfg, into(q))
		w.join("other", cfg, into(q))
		for _, p := range []string{"short", "longer than ten"} {
			_, err := doomed.Track(bg, Job{ID: p, Payload: []byte(p)})
			require.NoError(t, err)
		}
		doomed.crash()
		time.Sleep(30 * time.Second)
		assert.ElementsMatch(t, []string{"short", "longer than ten"}, w.queued("jobs"))
		assert.Empty(t, storedIn(t, dir), "and the store is empty")
	})
}

// storedIn are the files below a directory.
func storedIn(t *testing.T, dir string) (files []string) {
	t.Helper()
	require.NoError(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			files = append(files, path)
		}
		return err
	}))
	return files
}

// Jobs without a name share the count of their contents; those that one worker held are one crash.
func TestFetch_manyEqualPayloads(t *testing.T) {
	inBubble(t, func(w *world) {
		q := NewListQueue("jobs")
		doomed := w.join("doomed", Config{}, into(q))
		other := w.join("other", Config{}, into(q))
		w.push("jobs", "same", "same", "same", "same", "same", "same")
		_, err := doomed.Fetch(bg, q, 6)
		require.NoError(t, err)
		doomed.crash()
		time.Sleep(30 * time.Second)
		assert.Len(t, w.queued("jobs"), 6)
		assert.Zero(t, other.Stats().Buried)
	})
}

// The incarnation ends while the answer is on its way: what was taken is with the peers.
func TestFetch_fencedMeanwhile(t *testing.T) {
	inBubble(t, func(w *world) {
		w.loadScripts()
		q := NewListQueue("jobs")
		m := w.join("a", Config{}, into(q))
		w.push("jobs", "a")
		inc := m.current.Load()
		m.faults.add(&fault{mode: twice, on: "fetch", between: func() { inc.close(ErrLost) }})
		leases, err := m.Fetch(bg, q, 1)
		assert.ErrorIs(t, err, ErrLost)
		assert.Empty(t, leases)
		assert.Zero(t, m.Stats().Inflight)
	})
}

// The registry of queues: every beat renews it, and a sweep drops what nobody has renewed for long.
func TestFetch_registryOfQueues(t *testing.T) {
	inBubble(t, func(w *world) {
		q := NewListQueue("jobs")
		m := w.join("a", Config{}, into(q))
		ctx, cancel := context.WithTimeout(bg, time.Second)
		defer cancel()
		_, _ = m.Fetch(ctx, q, 1)
		require.NoError(t, w.raw.Del(bg, m.keys.queues()).Err())
		require.NoError(t, w.raw.ZAdd(bg, m.keys.queues(), redis.Z{Score: float64(time.Now().Add(-8 * 24 * time.Hour).UnixMilli()), Member: "RIGHT:old"}).Err())
		time.Sleep(12 * time.Second)
		assert.Equal(t, []string{"RIGHT:jobs"}, w.raw.ZRange(bg, m.keys.queues(), 0, -1).Val())
	})
}

// The list may hold something else for a while: jobs wait, and are told of.
func TestListQueue_wrongType(t *testing.T) {
	inBubble(t, func(w *world) {
		q := NewListQueue("jobs")
		doomed := w.join("doomed", Config{}, into(q))
		other := w.join("other", Config{}, into(q))
		w.push("jobs", "a")
		_, err := doomed.Fetch(bg, q, 1)
		require.NoError(t, err)
		require.NoError(t, w.raw.Set(bg, "jobs", "no list", 0).Err())
		_, err = other.Fetch(bg, q, 1)
		assert.ErrorContains(t, err, "WRONGTYPE")
		doomed.crash()
		time.Sleep(30 * time.Second)
		assert.Positive(t, other.Stats().HandBackFailed)
		assert.Contains(t, w.logs.String(), "WRONGTYPE")
		require.NoError(t, w.raw.Del(bg, "jobs").Err())
		time.Sleep(10 * time.Minute)
		assert.Equal(t, []string{"a"}, w.queued("jobs"))
		assert.Equal(t, uint64(1), other.Stats().HandedBack)
	})
}

func TestFetch_waitsAndWakes(t *testing.T) {
	inBubble(t, func(w *world) {
		q := NewListQueue("jobs")
		m := w.join("a", Config{}, into(q))
		got := make(chan []*Lease)
		go func() {
			leases, err := m.Fetch(bg, q, 10)
			assert.NoError(t, err)
			got <- leases
		}()
		time.Sleep(3 * time.Minute)
		began := time.Now()
		w.push("jobs", "a")
		leases := <-got
		assert.Equal(t, []string{"a"}, payloads(leases))
		assert.Less(t, time.Since(began), 10*time.Millisecond, "fake time: no timer was waited for")
		assert.LessOrEqual(t, m.faults.count("fetch"), 4, "no polling: one look, and one when woken")
		doneWith(t, leases)
	})
}

// Many calls wait for one list: each job wakes one of them, and none is overlooked.
func TestFetch_manyWait(t *testing.T) {
	inBubble(t, func(w *world) {
		q := NewListQueue("jobs")
		m := w.join("a", Config{}, into(q))
		var mu sync.Mutex
		var got []string
		var wg sync.WaitGroup
		for range 10 {
			wg.Go(func() {
				leases, err := m.Fetch(bg, q, 1)
				assert.NoError(t, err)
				mu.Lock()
				defer mu.Unlock()
				got = append(got, payloads(leases)...)
				doneWith(t, leases)
			})
		}
		synctest.Wait()
		want := []string{}
		for i := range 10 {
			want = append(want, fmt.Sprint(i))
			w.push("jobs", fmt.Sprint(i))
		}
		began := time.Now()
		wg.Wait()
		assert.Less(t, time.Since(began), time.Second)
		assert.ElementsMatch(t, want, got)
	})
}

func TestFetch_endsEarly(t *testing.T) {
	wait := func(t *testing.T, m *member, q Source) chan error {
		ended := make(chan error, 1)
		go func() {
			_, err := m.Fetch(bg, q, 1)
			ended <- err
		}()
		synctest.Wait()
		return ended
	}
	within := func(t *testing.T, ended chan error) error {
		t.Helper()
		began := time.Now()
		err := <-ended
		assert.Less(t, time.Since(began), 100*time.Millisecond)
		return err
	}
	t.Run("ctx", func(t *testing.T) {
		inBubble(t, func(w *world) {
			q := NewListQueue("jobs")
			m := w.join("a", Config{}, into(q))
			ctx, cancel := context.WithTimeout(bg, time.Second)
			defer cancel()
			began := time.Now()
			_, err := m.Fetch(ctx, q, 1)
			assert.ErrorIs(t, err, context.DeadlineExceeded)
			assert.Less(t, time.Since(began), 1100*time.Millisecond)
			w.push("jobs", "later") // the move is still under way, and nobody waits
			time.Sleep(time.Second)
			assert.Equal(t, []string{"later"}, w.queued("jobs"), "put back")
			leases, err := m.Fetch(bg, q, 1)
			require.NoError(t, err)
			assert.Equal(t, []string{"later"}, payloads(leases))
			doneWith(t, leases)
		})
	})
	t.Run("quiet", func(t *testing.T) {
		inBubble(t, func(w *world) {
			q := NewListQueue("jobs")
			m := w.join("a", Config{}, into(q))
			ended := wait(t, m, q)
			m.Quiet()
			assert.ErrorIs(t, within(t, ended), ErrNotRunning)
		})
	})
	t.Run("stop", func(t *testing.T) {
		inBubble(t, func(w *world) {
			q := NewListQueue("jobs")
			m := w.join("a", Config{}, into(q))
			ended := wait(t, m, q)
			require.NoError(t, m.Stop(bg))
			assert.ErrorIs(t, within(t, ended), ErrNotRunning)
			w.push("jobs", "later")
			time.Sleep(time.Minute)
			assert.Equal(t, []string{"later"}, w.queued("jobs"), "a worker that has left takes nothing")
		})
	})
	t.Run("fenced", func(t *testing.T) {
		inBubble(t, func(w *world) {
			q := NewListQueue("jobs")
			m := w.join("a", Config{}, into(q))
			ended := wait(t, m, q)
			w.fence(m.WorkerID())
			time.Sleep(6 * time.Second) // a beat
			assert.ErrorIs(t, within(t, ended), ErrLost)
			w.push("jobs", "a")
			leases, err := m.Fetch(bg, q, 1)
			require.NoError(t, err, "and may be called again")
			doneWith(t, leases)
		})
	})
	t.Run("fenced before", func(t *testing.T) {
		inBubble(t, func(w *world) {
			q := NewListQueue("jobs")
			m := w.join("a", Config{}, into(q))
			old := m.WorkerID()
			w.fence(old)
			w.push("jobs", "a")
			leases, err := m.Fetch(bg, q, 1)
			require.NoError(t, err, "the worker rejoins")
			assert.NotEqual(t, old, m.WorkerID())
			assert.Equal(t, []string{leases[0].member}, w.inflight(m.WorkerID()), "and nothing is taken behind a fence")
			doneWith(t, leases)
		})
	})
	t.Run("before start and after stop", func(t *testing.T) {
		inBubble(t, func(w *world) {
			q := NewListQueue("jobs")
			m := w.make("a", Config{}, into(q))
			_, err := m.Fetch(bg, q, 1)
			assert.ErrorIs(t, err, ErrNotRunning)
			require.NoError(t, m.Start(bg))
			require.NoError(t, m.Stop(bg))
			_, err = m.Fetch(bg, q, 1)
			assert.ErrorIs(t, err, ErrNotRunning)
		})
	})
}

func TestFetch_refuses(t *testing.T) {
	inBubble(t, func(w *world) {
		m := w.join("a", Config{MaxInflight: 2})
		var none *ListQueue
		for want, call := range map[string]func() error{
			"max is 0":   func() error { _, err := m.Fetch(bg, NewListQueue("q"), 0); return err },
			"no queue":   func() error { _, err := m.Fetch(bg, none, 1); return err },
			"src has no": func() error { _, err := m.Fetch(bg, InOrder(), 1); return err },
			"key is empty": func() error {
				_, err := m.Fetch(bg, NewListQueue(""), 1)
				return err
			},
			"reserved":         func() error { _, err := m.Fetch(bg, NewListQueue("recovery:1:x"), 1); return err },
			"ElementFormat":    func() error { _, err := m.Fetch(bg, NewListQueue("q", ElementFormat(nil)), 1); return err },
			"not a queue of":   func() error { _, err := m.Fetch(bg, NewListQueue("q", Sidekiq()), 1); return err },
			"concurrency is 0": func() error { return m.Work(bg, NewListQueue("q"), 0, nil) },
			"handler is nil":   func() error { return m.Work(bg, NewListQueue("q"), 1, nil) },
		} {
			err := call()
			assert.ErrorIs(t, err, ErrInvalidConfig, want)
			assert.ErrorContains(t, err, want)
		}
		_, err := New(m.rdb, NewListQueue(""), Config{})
		assert.ErrorIs(t, err, ErrInvalidConfig)

		w.push("q", "a", "b", "c")
		leases, err := m.Fetch(bg, NewListQueue("q"), 3)
		require.NoError(t, err)
		assert.Len(t, leases, 2, "as many as there is room for")
		_, err = m.Fetch(bg, NewListQueue("q"), 3)
		assert.ErrorIs(t, err, ErrAtCapacity)
		doneWith(t, leases)
	})
}

func TestFetch_inOrder(t *testing.T) {
	inBubble(t, func(w *world) {
		high, mid, low := NewListQueue("high"), NewListQueue("mid"), NewListQueue("low")
		src := InOrder(high, mid, low, high)
		m := w.join("a", Config{}, into(high))
		w.push("low", "l1", "l2")
		w.push("high", "h1", "h2")
		w.push("mid", "m1")
		leases, err := m.Fetch(bg, src, 4)
		require.NoError(t, err)
		assert.Equal(t, []string{"h1", "h2", "m1", "l1"}, payloads(leases))
		assert.Equal(t, "mid", leases[2].Job().Queue)
		more, err := m.Fetch(bg, src, 4)
		require.NoError(t, err)
		doneWith(t, append(leases, more...))

		got := make(chan []*Lease)
		for _, key := range []string{"low", "mid", "high"} {
			go func() {
				leases, err := m.Fetch(bg, src, 4)
				assert.NoError(t, err)
				got <- leases
			}()
			synctest.Wait()
			w.push(key, "to "+key)
			leases := <-got
			assert.Equal(t, []string{"to " + key}, payloads(leases))
			doneWith(t, leases)
		}
		// A death puts each back to where it was.
		w.push("low", "l")
		w.push("mid", "m")
		_, err = m.Fetch(bg, src, 4)
		require.NoError(t, err)
		w.join("other", Config{}, into(high))
		m.crash()
		time.Sleep(30 * time.Second)
		assert.Equal(t, []string{"l"}, w.queued("low"))
		assert.Equal(t, []string{"m"}, w.queued("mid"))
		assert.Empty(t, w.queued("high"))
	})
}

// An arrival that wakes nobody who can take it (its worker is dead, its connection is not) is put back by a sweep.
func TestFetch_arrivalOfTheDead(t *testing.T) {
	inBubble(t, func(w *world) {
		q := NewListQueue("jobs")
		m := w.join("a", Config{}, into(q))
		ctx, cancel := context.WithTimeout(bg, time.Second)
		defer cancel()
		_, err := m.Fetch(ctx, q, 1)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		arrived := m.keys.arrived("jobs")
		require.NoError(t, w.raw.LPush(bg, arrived, "1st", "2nd").Err())
		time.Sleep(6 * time.Second)
		assert.Equal(t, []string{"1st", "2nd"}, w.queued("jobs"))
		assert.Empty(t, w.queued(arrived))

		require.NoError(t, w.raw.LPush(bg, arrived, "3rd").Err())
		leases, err := m.Fetch(bg, q, 10)
		require.NoError(t, err)
		assert.Equal(t, []string{"3rd", "1st", "2nd"}, payloads(leases), "and by every Fetch")
		doneWith(t, leases)
	})
}

// The reply to a Fetch may be lost, and the call may be repeated by the client, late.
func TestFetch_lostReply(t *testing.T) {
	for _, mode := range []faultMode{failBefore, loseReply, twice, hang} {
		t.Run(fmt.Sprint(mode), func(t *testing.T) {
			inBubble(t, func(w *world) {
				w.loadScripts()
				q := NewListQueue("jobs")
				m := w.join("a", Config{}, into(q))
				w.push("jobs", "a", "b", "c")
				m.faults.add(&fault{mode: mode, on: "fetch"})
				leases, err := m.Fetch(bg, q, 2)
				if mode == twice {
					require.NoError(t, err)
					assert.Equal(t, []string{"a", "b"}, payloads(leases), "a copy answers the same")
					doneWith(t, leases)
					return
				}
				require.Error(t, err)
				assert.Zero(t, m.Stats().Inflight)
				time.Sleep(20 * time.Second) // some beats, some audits
				assert.Equal(t, []string{"a", "b", "c"}, w.queued("jobs"), "nothing is held by nobody")
				assert.Empty(t, w.inflight(m.WorkerID()))
				leases, err = m.Fetch(bg, q, 10)
				require.NoError(t, err)
				assert.Equal(t, []string{"a", "b", "c"}, payloads(leases))
				doneWith(t, leases)
				assert.Zero(t, m.Stats().Inflight)
			})
		})
	}
}

// A copy of a call that comes when its jobs are long done takes nothing.
func TestFetch_lateCopy(t *testing.T) {
	inBubble(t, func(w *world) {
		q := NewListQueue("jobs")
		m := w.join("a", Config{}, into(q))
		w.push("jobs", "a", "b")
		var copied redis.Cmder
		m.rdb.AddHook(capture{name: "fetch", keep: &copied})
		leases, err := m.Fetch(bg, q, 1)
		require.NoError(t, err)
		doneWith(t, leases)
		first := copied
		again := redis.NewCmd(bg, first.Args()...)
		require.NoError(t, w.raw.Process(bg, again))
		answer, _ := again.Slice()
		assert.Equal(t, []any{nil}, answer[3:], "the one that it took is gone")
		assert.Equal(t, []string{"b"}, w.queued("jobs"))
		assert.Empty(t, w.inflight(m.WorkerID()))
		leases, err = m.Fetch(bg, q, 1)
		require.NoError(t, err)
		older := redis.NewCmd(bg, first.Args()...)
		require.NoError(t, w.raw.Process(bg, older))
		answer, _ = older.Slice()
		assert.Len(t, answer, 3, "a copy of an older call does not answer for the last one")
		assert.Equal(t, []string{"b"}, payloads(leases))
		assert.Len(t, w.inflight(m.WorkerID()), 1)
		doneWith(t, leases)
	})
}

// capture keeps the last command of a name.
type capture struct {
	name string
	keep *redis.Cmder
}

func (c capture) DialHook(next redis.DialHook) redis.DialHook { return next }
func (c capture) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if nameOf(cmd) == c.name {
			*c.keep = cmd
		}
		return next(ctx, cmd)
	}
}
func (c capture) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

// A caller that gives up while the script runs leaves nothing behind.
func TestFetch_ctxEndsDuringTheCall(t *testing.T) {
	inBubble(t, func(w *world) {
		w.loadScripts()
		q := NewListQueue("jobs")
		m := w.join("a", Config{}, into(q))
		w.push("jobs", "a", "b")
		m.faults.add(&fault{mode: slow, on: "fetch", delay: 3 * time.Second})
		ctx, cancel := context.WithTimeout(bg, time.Second)
		defer cancel()
		began := time.Now()
		_, err := m.Fetch(ctx, q, 1)
		assert.ErrorIs(t, err, context.DeadlineExceeded)
		assert.Less(t, time.Since(began), 1100*time.Millisecond)
		time.Sleep(15 * time.Second)
		assert.Equal(t, []string{"a", "b"}, w.queued("jobs"))
		assert.Empty(t, w.inflight(m.WorkerID()))
	})
}

// An audit must not take what a Fetch with a lost reply has recorded for strays: they are the only copy.
func TestFetch_auditKeepsUnsettled(t *testing.T) {
	inBubble(t, func(w *world) {
		w.loadScripts()
		q := NewListQueue("jobs")
		m := w.join("a", Config{}, into(q))
		w.push("jobs", "a", "b")
		m.faults.add(&fault{mode: loseReply, on: "fetch", times: 1})
		m.faults.add(&fault{mode: failBefore, on: "fetch", times: -1}) // settling fails, too
		_, err := m.Fetch(bg, q, 2)
		require.Error(t, err)
		require.NoError(t, w.raw.ZAdd(bg, w.keys(m.WorkerID()).inflight, z("99", 1)).Err())
		time.Sleep(20 * time.Second)
		assert.Equal(t, []string{"1", "2"}, w.inflight(m.WorkerID()), "the audit has removed the stray, and only that")
		m.faults.clear()
		time.Sleep(20 * time.Second)
		assert.Equal(t, []string{"a", "b"}, w.queued("jobs"))
	})
}

// A failover to an older state puts the elements back into their lists. Whoever runs them is told, and they are not tracked again.
func TestFetch_undoneByFailover(t *testing.T) {
	inBubble(t, func(w *world) {
		q := NewListQueue("jobs")
		m := w.join("a", Config{}, into(q))
		w.push("jobs", "a", "b")
		kept, err := m.Fetch(bg, q, 1)
		require.NoError(t, err)
		lost, err := m.Fetch(bg, q, 1)
		require.NoError(t, err)
		// As the replica has it: the first Fetch, not the second.
		k := w.keys(m.WorkerID())
		require.NoError(t, w.raw.HSet(bg, k.session, "fetch", 1, "fetched", 1).Err())
		require.NoError(t, w.raw.ZRem(bg, k.inflight, lost[0].member).Err())
		require.NoError(t, w.raw.HDel(bg, k.jobs, lost[0].member).Err())
		w.push("jobs", "b")
		time.Sleep(12 * time.Second)
		assert.ErrorIs(t, context.Cause(lost[0].Context()), ErrLost)
		assert.ErrorIs(t, lost[0].Done(), ErrLost)
		assert.Equal(t, []string{"b"}, w.queued("jobs"))
		assert.NoError(t, kept[0].Context().Err())
		assert.Equal(t, []string{kept[0].member}, w.inflight(m.WorkerID()))
		again, err := m.Fetch(bg, q, 5)
		require.NoError(t, err)
		assert.Equal(t, []string{"b"}, payloads(again))
		doneWith(t, append(again, kept...))
	})
}

// A flush loses the list and the records. What runs is tracked again, by the process that has it.
func TestFetch_flush(t *testing.T) {
	inBubble(t, func(w *world) {
		q := NewListQueue("jobs")
		m := w.join("a", Config{}, into(q))
		w.push("jobs", "a")
		leases, err := m.Fetch(bg, q, 1)
		require.NoError(t, err)
		require.NoError(t, w.raw.FlushAll(bg).Err())
		time.Sleep(12 * time.Second)
		assert.NoError(t, leases[0].Context().Err())
		w.join("other", Config{}, into(q))
		m.crash()
		time.Sleep(30 * time.Second)
		assert.Equal(t, []string{"a"}, w.queued("jobs"))
	})
}

// A list must come back after a flush from the memory of a worker that had given the job up.
func TestListQueue_flushOfAGivenUpJob(t *testing.T) {
	inBubble(t, func(w *world) {
		q := NewListQueue("jobs")
		m := w.join("a", Config{}, into(q))
		w.push("jobs", "a")
		leases, err := m.Fetch(bg, q, 1)
		require.NoError(t, err)
		m.faults.add(&fault{mode: failBefore, on: "take", times: 1})
		m.surrender(leases[0], TimedOut)
		require.NoError(t, w.raw.FlushAll(bg).Err())
		time.Sleep(time.Minute)
		assert.Equal(t, []string{"a"}, w.queued("jobs"))
	})
}

func TestFetch_undecodable(t *testing.T) {
	inBubble(t, func(w *world) {
		q := NewListQueue("queue:mail", Sidekiq())
		m := w.join("a", Config{}, into(q))
		good := `{"class":"Mail","args":[1],"jid":"j1","queue":"mail","created_at":1700000000000,"enqueued_at":1700000000001}`
		w.push("queue:mail", "no json \xff", good, `{"jid":"j2"}`)
		leases, err := m.Fetch(bg, q, 10)
		require.NoError(t, err)
		require.Len(t, leases, 1)
		assert.Equal(t, "j1", leases[0].Job().ID)
		assert.Equal(t, "mail", leases[0].Job().Queue)
		doneWith(t, leases)
		synctest.Wait()
		i := NewInspector(w.raw, w.ns)
		letters, err := i.DeadLetters(bg, 0, 10)
		require.NoError(t, err)
		require.Len(t, letters, 2)
		var bytes []string
		for _, l := range letters {
			bytes = append(bytes, string(l.Payload))
			assert.Equal(t, "element unreadable", l.Cause)
			assert.NotEmpty(t, l.LastError)
		}
		assert.ElementsMatch(t, []string{"no json \xff", `{"jid":"j2"}`}, bytes)
		assert.Empty(t, w.queued("queue:mail"))
		assert.Empty(t, w.inflight(m.WorkerID()))
		// A person repairs the program, and sends them back.
		require.NoError(t, i.Requeue(bg, letters[0].Key, q))
		assert.Equal(t, []string{string(letters[0].Payload)}, w.queued("queue:mail"))
	})
}

// panicky is a format that panics.
type panicky struct{ payloadFormat }

func (panicky) Decode([]byte) (Job, error) { panic("on purpose") }

func TestFetch_formatPanics(t *testing.T) {
	inBubble(t, func(w *world) {
		q := NewListQueue("jobs", ElementFormat(panicky{}))
		m := w.join("a", Config{}, into(q))
		w.push("jobs", "a")
		ctx, cancel := context.WithTimeout(bg, time.Second)
		defer cancel()
		_, err := m.Fetch(ctx, q, 1)
		assert.ErrorIs(t, err, context.DeadlineExceeded)
		assert.Equal(t, uint64(1), m.Stats().Buried)
	})
}

// enveloped is a format of a caller's own.
type enveloped struct{}

func (enveloped) Decode(e []byte) (Job, error) {
	id, body, ok := strings.Cut(string(e), "|")
	if !ok {
		return Job{}, errors.New("no envelope")
	}
	job := Job{ID: id, Payload: []byte(body)}
	if id == "7" {
		job.MaxRecoveries = 1
	}
	return job, nil
}
func (enveloped) Encode(o Orphan) ([]byte, error) { return []byte(o.ID + "|" + string(o.Payload)), nil }

func TestListQueue_formatOfOnesOwn(t *testing.T) {
	inBubble(t, func(w *world) {
		q := NewListQueue("jobs", ElementFormat(enveloped{}))
		doomed := w.join("doomed", Config{}, into(q))
		w.push("jobs", "7|hello")
		leases, err := doomed.Fetch(bg, q, 1)
		require.NoError(t, err)
		assert.Equal(t, "7", leases[0].Job().ID)
		assert.Equal(t, "hello", string(leases[0].Job().Payload))
		_, err = doomed.Track(bg, Job{ID: "8", Payload: []byte("tracked")})
		require.NoError(t, err)
		second := w.join("second", Config{}, into(q))
		doomed.crash()
		time.Sleep(30 * time.Second)
		assert.ElementsMatch(t, []string{"7|hello", "8|tracked"}, w.queued("jobs"))
		// The job's own limit holds: the next crash is the second.
		_, err = second.Fetch(bg, q, 2)
		require.NoError(t, err)
		third := w.join("third", Config{}, into(q))
		second.crash()
		time.Sleep(30 * time.Second)
		assert.Equal(t, []string{"8|tracked"}, w.queued("jobs"))
		assert.Equal(t, uint64(1), third.Stats().Buried)
	})
}

// A poison job without a name is found all the same.
func TestFetch_poison(t *testing.T) {
	inBubble(t, func(w *world) {
		q := NewListQueue("jobs")
		w.push("jobs", "poison")
		last := w.join("survivor", Config{}, into(q))
		for i := range 4 {
			doomed := w.join(fmt.Sprint("doomed", i), Config{}, into(q))
			_, err := doomed.Fetch(bg, q, 1)
			require.NoError(t, err)
			doomed.crash()
			time.Sleep(30 * time.Second)
		}
		assert.Empty(t, w.queued("jobs"))
		letters, err := NewInspector(w.raw, w.ns).DeadLetters(bg, 0, 10)
		require.NoError(t, err)
		require.Len(t, letters, 1)
		assert.Equal(t, "poison", string(letters[0].Payload))
		assert.Len(t, letters[0].Crashes, 4)
		assert.Equal(t, uint64(3), last.Stats().HandedBack)
	})
}

func TestListQueue_releaseAndStop(t *testing.T) {
	inBubble(t, func(w *world) {
		q := NewListQueue("jobs")
		m := w.join("a", Config{}, into(q))
		w.push("jobs", "a", "b")
		leases, err := m.Fetch(bg, q, 2)
		require.NoError(t, err)
		require.NoError(t, leases[0].Release())
		assert.Equal(t, []string{"a"}, w.queued("jobs"))
		assert.ErrorIs(t, leases[0].Done(), ErrLost)
		ctx, cancel := context.WithCancel(bg)
		cancel()
		assert.Error(t, m.Stop(ctx))
		assert.ElementsMatch(t, []string{"a", "b"}, w.queued("jobs"))
		assert.Empty(t, w.workers())
	})
}

// Wrapped in an Enqueuer of the caller's own, it pushes by the client that it was given.
func TestListQueue_wrapped(t *testing.T) {
	inBubble(t, func(w *world) {
		bare := NewListQueue("jobs")
		assert.ErrorContains(t, bare.Enqueue(bg, Orphan{}), "no client")
		q := NewListQueue("jobs", ListClient(w.raw))
		require.NoError(t, q.Enqueue(bg, Orphan{Job: Job{ID: "1", Payload: []byte("p")}}))
		for _, err := range q.EnqueueAll(bg, []Orphan{{Job: Job{Payload: []byte("x")}}, {Job: Job{Payload: []byte("y")}}}) {
			assert.NoError(t, err)
		}
		assert.Equal(t, []string{"x", "y", "p"}, w.queued("jobs"))
		assert.Equal(t, "jobs", q.Key())
	})
}

func TestSidekiq_encode(t *testing.T) {
	f := sidekiqFormat{name: "mail"}
	whole := []byte(`{"class":"A","args":[12345678901234567890],"jid":"j","queue":"mail","created_at":1,"enqueued_at":2.5}` + "\n")
	got, err := f.Encode(Orphan{Job: Job{ID: "x", Payload: whole}})
	require.NoError(t, err)
	assert.Equal(t, whole, got, "not a byte differs")

	before := time.Now().UnixMilli()
	got, err = f.Encode(Orphan{Job: Job{ID: "x\"y", Payload: []byte(`{"class":"A","args":[12345678901234567890]} `)}})
	require.NoError(t, err)
	job, err := f.Decode(got)
	require.NoError(t, err)
	assert.Equal(t, "x\"y", job.ID)
	assert.Contains(t, string(got), `"args":[12345678901234567890]`)
	var created, enqueued int64
	_, err = fmt.Sscanf(string(got[bytes.Index(got, []byte(`"created_at"`)):]), `"created_at":%d,"enqueued_at":%d}`, &created, &enqueued)
	require.NoError(t, err, string(got))
	assert.GreaterOrEqual(t, created, before, "whole milliseconds")
	assert.LessOrEqual(t, enqueued, time.Now().UnixMilli())

	_, err = f.Encode(Orphan{Job: Job{Payload: []byte("no json")}})
	assert.True(t, isPermanent(err))
}

func TestSidekiq_handBackEntersTheQueue(t *testing.T) {
	for key, index := range map[string]string{"queue:mail": "queues", "app:queue:mail": "app:queues"} {
		inBubble(t, func(w *world) {
			q := NewListQueue(key, Sidekiq())
			doomed := w.join("doomed", Config{}, into(q))
			w.join("other", Config{}, into(q))
			element := `{"class":"Mail","args":[],"jid":"j1","enqueued_at":1700000000.25}`
			w.push(key, element)
			_, err := doomed.Fetch(bg, q, 1)
			require.NoError(t, err)
			doomed.crash()
			time.Sleep(30 * time.Second)
			assert.Equal(t, []string{element}, w.queued(key))
			assert.Equal(t, []string{"mail"}, w.raw.SMembers(bg, index).Val())
		})
	}
}

// named is a format with a name and a place for a checkpoint: "id|checkpoint".
type named struct{}

func (named) Decode(e []byte) (Job, error) {
	id, checkpoint, ok := strings.Cut(string(e), "|")
	job := Job{ID: id, Payload: []byte("payload of " + id)}
	if ok {
		job.Checkpoint = []byte(checkpoint)
	}
	return job, nil
}

func (named) Encode(o Orphan) ([]byte, error) {
	return []byte(o.ID + "|" + string(o.Checkpoint)), nil
}

// A letter of a fetched job has the name that its format gave it, so that Requeue forgets the right crashes, and takes the checkpoint along.
func TestListQueue_requeueWithFormat(t *testing.T) {
	inBubble(t, func(w *world) {
		q := NewListQueue("jobs", ElementFormat(named{}))
		m := w.join("a", Config{MaxRecoveries: 1}, into(q))
		var runs atomic.Int32
		ended := working(m, bg, q, 1, func(ctx context.Context, l *Lease) error {
			n := runs.Add(1)
			if n > 2 {
				assert.Equal(t, "page 2", string(l.Job().Checkpoint))
				return nil
			}
			assert.NoError(t, l.Checkpoint(ctx, fmt.Append(nil, "page ", n)))
			panic("on purpose")
		})
		w.push("jobs", "order-7")
		time.Sleep(time.Minute)
		inspector := NewInspector(w.raw, w.ns)
		letters, err := inspector.DeadLetters(bg, 0, 10)
		require.NoError(t, err)
		require.Len(t, letters, 1)
		assert.Equal(t, "order-7", letters[0].ID)
		assert.Equal(t, "jobs", letters[0].Queue)
		assert.Equal(t, "page 2", string(letters[0].Checkpoint))
		assert.Len(t, letters[0].Crashes, 2)
		assert.Equal(t, "panic: on purpose", letters[0].LastError)
		require.NoError(t, inspector.Requeue(bg, letters[0].Key, q))
		assert.EqualValues(t, 0, w.raw.Exists(bg, m.keys.crashes("order-7")).Val(), "it has all its recoveries again")
		time.Sleep(time.Minute)
		assert.EqualValues(t, 3, runs.Load())
		require.NoError(t, m.Stop(bg))
		<-ended
	})
}

// A person who names a list means that list.
func TestListQueue_requeueElsewhere(t *testing.T) {
	inBubble(t, func(w *world) {
		q := NewListQueue("jobs")
		m := w.join("a", Config{MaxRecoveries: 1}, into(q))
		ended := working(m, bg, q, 1, func(context.Context, *Lease) error { panic("on purpose") })
		w.push("jobs", "poison")
		time.Sleep(time.Minute)
		require.NoError(t, m.Stop(bg))
		<-ended
		inspector := NewInspector(w.raw, w.ns)
		letters, err := inspector.DeadLetters(bg, 0, 10)
		require.NoError(t, err)
		require.Len(t, letters, 1)
		require.ErrorContains(t, inspector.Requeue(bg, letters[0].Key, nil), "enq is nil")
		require.NoError(t, inspector.Requeue(bg, letters[0].Key, NewListQueue("quarantine", ConsumeLeft())))
		assert.Empty(t, w.queued("jobs"))
		assert.Equal(t, []string{"poison"}, w.queued("quarantine"))
	})
}
