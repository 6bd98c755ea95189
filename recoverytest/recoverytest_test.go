package recoverytest_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/crashsafe/recovery"
	"github.com/crashsafe/recovery/recoverytest"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

var bg = context.Background()

func track(t *testing.T, w *recoverytest.Worker, ids ...string) (leases []*recovery.Lease) {
	t.Helper()
	for _, id := range ids {
		l, err := w.Track(bg, recovery.Job{ID: id, Payload: []byte("payload of " + id)})
		require.NoError(t, err)
		leases = append(leases, l)
	}
	return leases
}

func TestCrash(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		env := recoverytest.New(t)
		doomed, _ := env.Start("doomed"), env.Start("peer")
		leases := track(t, doomed, "one", "two")
		require.NoError(t, leases[1].Done())
		env.RequireTracked("one")
		env.RequireConsistent()
		doomed.Crash()
		env.RequireNothingLost("one")
		env.RequireHandedBack("one")
		env.RequireNothingLost("one")
		env.Advance(time.Minute)
		env.RequireConsistent()
		env.RequireTracked()
		o := env.Enqueuer.Orphans()[0]
		assert.Equal(t, "payload of one", string(o.Payload))
		assert.Equal(t, recovery.Crashed, o.Reason)
	})
}

// Outside of a bubble time is real.
func TestCrash_realTime(t *testing.T) {
	t.Parallel()
	env := recoverytest.New(t, recoverytest.WithConfig(recovery.Config{HeartbeatInterval: 50 * time.Millisecond, OrphanThreshold: 300 * time.Millisecond}))
	doomed, _ := env.Start("doomed"), env.Start("peer")
	track(t, doomed, "one")
	doomed.Crash()
	env.RequireHandedBack("one")
}

func TestFreeze_makesAZombie(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		env := recoverytest.New(t)
		zombie, _ := env.Start("zombie"), env.Start("peer")
		l := track(t, zombie, "one")[0]
		zombie.Freeze()
		env.RequireHandedBack("one")
		assert.NoError(t, l.Context().Err(), "it does not know")
		zombie.Thaw()
		env.Advance(time.Minute)
		assert.ErrorIs(t, context.Cause(l.Context()), recovery.ErrLost)
		assert.ErrorIs(t, l.Done(), recovery.ErrLost)
		require.NoError(t, track(t, zombie, "more")[0].Done(), "and it goes on")
	})
}

func TestFreeze_short(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		env := recoverytest.New(t)
		w, _ := env.Start("slow"), env.Start("peer")
		l := track(t, w, "one")[0]
		w.Freeze()
		env.Advance(5 * time.Second)
		w.Thaw()
		env.Advance(time.Minute)
		env.RequireTracked("one")
		require.NoError(t, l.Done())
		assert.Zero(t, env.Enqueuer.Calls())
	})
}

func TestPartition(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		env := recoverytest.New(t)
		w, _ := env.Start("away"), env.Start("peer")
		track(t, w, "one")
		w.Partition()
		_, err := w.Track(bg, recovery.Job{ID: "two"})
		assert.Error(t, err)
		env.RequireHandedBack("one")
		w.Heal()
		env.Advance(time.Minute)
		require.NoError(t, track(t, w, "three")[0].Done())
	})
}

func TestLoseReply(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		env := recoverytest.New(t)
		w := env.Start("unlucky")
		require.NoError(t, track(t, w, "first")[0].Done()) // connections, scripts
		w.LoseReply(1)
		_, err := w.Track(bg, recovery.Job{ID: "one"})
		require.Error(t, err, "go-redis does not repeat a transaction")
		env.Advance(time.Minute)
		env.RequireTracked() // executed, but its caller was told that it failed: nothing is left
		env.RequireConsistent()
		l := track(t, w, "two")[0]
		w.LoseReply(1)
		require.NoError(t, l.Done(), "but it repeats a single command")
		env.RequireTracked()
		env.RequireConsistent()
	})
}

func TestEnqueuer_failRefuseHang(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		env := recoverytest.New(t)
		doomed, _ := env.Start("doomed"), env.Start("peer")
		track(t, doomed, "one", "two")
		env.Enqueuer.Fail(errors.New("full"))
		doomed.Crash()
		env.Advance(time.Minute)
		assert.Positive(t, env.Enqueuer.Calls())
		env.RequireNothingLost("one", "two")
		env.Enqueuer.Hang()
		env.Advance(10 * time.Minute)
		assert.Empty(t, env.Enqueuer.Orphans())
		env.Enqueuer.Accept()
		env.Advance(10 * time.Minute)
		env.RequireHandedBack("one", "two")

		env.Enqueuer.Refuse(errors.New("never"))
		second := env.Start("second")
		track(t, second, "three")
		second.Crash()
		env.Advance(time.Minute)
		env.RequireNothingLost("three")
		letters, err := recovery.NewInspector(env.Client(), "").DeadLetters(bg, 0, 10)
		require.NoError(t, err)
		require.Len(t, letters, 1)
	})
}

func TestListQueue_inTheKit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		queue := recovery.NewListQueue("jobs")
		env := recoverytest.New(t, recoverytest.WithEnqueuer(queue))
		rdb := env.Client()
		require.NoError(t, rdb.LPush(bg, "jobs", "a", "b").Err())
		doomed, _ := env.Start("doomed"), env.Start("peer")
		_, err := doomed.Fetch(bg, queue, 1)
		require.NoError(t, err)
		doomed.Crash()
		env.Advance(30 * time.Second)
		assert.Equal(t, []string{"b", "a"}, rdb.LRange(bg, "jobs", 0, -1).Val())
		env.RequireConsistent()
	})
}

// fatal is a test that fails without failing this one.
type fatal struct {
	testing.TB
	text string
}

func (f *fatal) Helper() {}
func (f *fatal) Fatalf(format string, args ...any) {
	f.text = fmt.Sprintf(format, args...)
	panic(f)
}

// failing runs what should fail, and answers what it says.
func failing(t *testing.T, env func(tb testing.TB) *recoverytest.Env, f func(*recoverytest.Env)) (text string) {
	t.Helper()
	tb := &fatal{TB: t}
	e := env(tb)
	defer func() {
		if recover() != any(tb) {
			t.Error("it did not fail")
		}
		text = tb.text
	}()
	f(e)
	return ""
}

func TestRequire_messages(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var env *recoverytest.Env
		fresh := func(tb testing.TB) *recoverytest.Env {
			env = recoverytest.New(tb)
			track(t, env.Start("a"), "one")
			return env
		}
		text := failing(t, fresh, func(e *recoverytest.Env) { e.RequireTracked("other") })
		assert.Contains(t, text, "tracked: one")
		text = failing(t, fresh, func(e *recoverytest.Env) { e.RequireHandedBack("one") })
		assert.Contains(t, text, `job "one" was not handed back`)
		assert.Contains(t, text, "tracked: one")
		text = failing(t, fresh, func(e *recoverytest.Env) { e.RequireNothingLost("one", "gone") })
		assert.Contains(t, text, "lost: gone")
		text = failing(t, fresh, func(e *recoverytest.Env) {
			for _, key := range e.Redis.Keys() {
				if strings.HasSuffix(key, ":jobs") {
					e.Redis.Del(key)
				}
			}
			e.RequireConsistent()
		})
		assert.Contains(t, text, "has no record")
		text = failing(t, fresh, func(e *recoverytest.Env) { e.Redis.Del("recovery:1:default:workers"); e.RequireConsistent() })
		assert.Contains(t, text, "is not registered")
	})
}

// box is an Enqueuer that does everything right, unless it is told not to.
type box struct {
	mu        sync.Mutex
	keys      map[string]bool
	delivered [][]byte
	byID      bool // dedupes by the wrong name
	never     bool // does not dedupe
}

func (b *box) Enqueue(_ context.Context, o recovery.Orphan) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	key := o.Key
	if b.byID {
		key = o.ID
	}
	if b.keys[key] && !b.never {
		return nil
	}
	if b.keys == nil {
		b.keys = map[string]bool{}
	}
	b.keys[key] = true
	b.delivered = append(b.delivered, o.Payload)
	return nil
}

func (b *box) EnqueueAll(ctx context.Context, os []recovery.Orphan) []error {
	for _, o := range os {
		_ = b.Enqueue(ctx, o)
	}
	return nil
}

func TestEnqueuerConformance(t *testing.T) {
	recoverytest.EnqueuerConformance(t, func(testing.TB) recoverytest.Subject {
		b := &box{}
		return recoverytest.Subject{Enqueuer: b, Delivered: func(testing.TB) [][]byte { return b.delivered }}
	})
}

// A plain list delivers again: that can be said.
func TestEnqueuerConformance_atLeastOnce(t *testing.T) {
	recoverytest.EnqueuerConformance(t, func(t testing.TB) recoverytest.Subject {
		env := recoverytest.New(t)
		rdb := env.Client()
		q := recovery.NewListQueue("jobs", recovery.ListClient(rdb))
		return recoverytest.Subject{Enqueuer: q, AtLeastOnce: true, Break: func(testing.TB) { env.Redis.SetError("it is broken") }, Delivered: func(testing.TB) (all [][]byte) {
			for _, e := range rdb.LRange(bg, "jobs", 0, -1).Val() {
				all = append(all, []byte(e))
			}
			return all
		}}
	})
}

// The questions are answered for any Enqueuer, and Events of the test's own are called, too.
func TestRequire_otherEnqueuers(t *testing.T) {
	for name, enq := range map[string]recovery.Enqueuer{
		"func":  recovery.EnqueuerFunc(func(context.Context, recovery.Orphan) error { return nil }),
		"batch": &box{},
		"list":  recovery.NewListQueue("jobs"),
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var told atomic.Int32
				cfg := recovery.Config{Events: recovery.Events{HandedBack: func(recovery.HandedBackInfo) { told.Add(1) }}}
				env := recoverytest.New(t, recoverytest.WithEnqueuer(enq), recoverytest.WithConfig(cfg))
				doomed, _ := env.Start("doomed"), env.Start("peer")
				track(t, doomed, "one")
				doomed.Crash()
				env.RequireHandedBack("one")
				env.RequireNothingLost("one")
				assert.EqualValues(t, 1, told.Load())
			})
		})
	}
}

// What is put off is waited for, and why it does not come is shown.
func TestRequireHandedBack_later(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		env := recoverytest.New(t, recoverytest.WithConfig(recovery.Config{Backoff: func(int) time.Duration { return 10 * time.Minute }}))
		doomed, peer := env.Start("doomed"), env.Start("peer")
		track(t, doomed, "later")
		doomed.Crash()
		env.RequireHandedBack("later")

		track(t, peer, "refused")
		env.Start("third")
		env.Enqueuer.Fail(errors.New("queue is full"))
		peer.Crash()
		env.Advance(2 * time.Hour)
		env.Enqueuer.Accept()
		env.RequireHandedBack("later", "refused")
	})
}

func TestRequireHandedBack_saysWhyNot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fresh := func(tb testing.TB) *recoverytest.Env { return recoverytest.New(tb) }
		text := failing(t, fresh, func(e *recoverytest.Env) {
			a, _ := e.Start("a"), e.Start("b")
			track(t, a, "one")
			e.Enqueuer.Fail(errors.New("queue is full"))
			a.Crash()
			e.RequireHandedBack("one")
		})
		assert.Contains(t, text, "hand-backs failed: queue is full")
		text = failing(t, fresh, func(e *recoverytest.Env) {
			a := e.Start("a")
			track(t, a, "one")
			a.Crash()
			e.RequireHandedBack("one")
		})
		assert.Contains(t, text, "no worker is live")
	})
}

// One job that is claimed does not hide another one that is gone; nor does a worker's name.
func TestRequire_notFooled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fresh := func(tb testing.TB) *recoverytest.Env {
			e := recoverytest.New(tb)
			e.Enqueuer.Fail(errors.New("not now"))
			a, _ := e.Start("dead"), e.Start("b")
			track(t, a, "one")
			return e
		}
		text := failing(t, fresh, func(e *recoverytest.Env) {
			workers, err := recovery.NewInspector(e.Client(), "").Workers(bg)
			require.NoError(t, err)
			require.Len(t, workers, 2)
			e.Redis.HSet("recovery:1:default:{"+workers[1].ID+"}:session", "state", "fenced")
			e.Advance(10 * time.Second)
			e.RequireNothingLost("one")
			e.RequireNothingLost("one", "never tracked")
		})
		assert.Contains(t, text, "lost: never tracked")
		assert.Contains(t, text, "claimed, on their way: one")
		text = failing(t, fresh, func(e *recoverytest.Env) { e.Redis.Del("recovery:1:default:workers"); e.RequireConsistent() })
		assert.Contains(t, text, "is not registered")
	})
}
