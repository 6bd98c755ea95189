package recovery

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// One connection that hangs does not stop Work, with whatever client.
func TestWork_behindAHangingDone(t *testing.T) {
	inBubble(t, func(w *world) {
		w.loadScripts()
		q := NewListQueue("jobs")
		m := w.join("a", Config{}, into(q))
		m.bounds = false // as with a client that has no timeouts
		gate := make(chan struct{})
		m.rdb.AddHook(&deaf{gate: gate, once: "commit"})
		ctx, cancel := context.WithCancel(bg)
		defer cancel()
		var runs atomic.Int64
		ended := working(m, ctx, q, 1, func(context.Context, *Lease) error { time.Sleep(time.Second); runs.Add(1); return nil })
		w.push("jobs", "a", "b", "c")
		time.Sleep(10 * time.Minute)
		assert.EqualValues(t, 3, runs.Load())
		close(gate)
		cancel()
		assert.NoError(t, <-ended)
	})
}

// A worker that dies before its Dones are confirmed, or after they were executed, has nothing lost: what Redis did not get comes back.
func TestWork_diesBeforeDoneIsConfirmed(t *testing.T) {
	for name, f := range map[string]fault{"not sent": {mode: hang}, "executed": {mode: loseReply}} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(w *world) {
				w.loadScripts()
				q := NewListQueue("jobs")
				m := w.join("a", Config{}, into(q))
				w.join("peer", Config{}, into(q))
				var runs collected[string]
				ctx, cancel := context.WithCancel(bg)
				ended := working(m, ctx, q, 1, func(_ context.Context, l *Lease) error { runs.add(string(l.Payload())); return nil })
				w.push("jobs", "warm up")
				time.Sleep(time.Second)
				f.on, f.times = "commit", -1
				m.faults.add(&f)
				w.push("jobs", "a", "b", "c")
				time.Sleep(100 * time.Millisecond)
				ran := runs.all()[1:]
				require.Greater(t, len(ran), 1, "it went on")
				m.crash()
				time.Sleep(time.Minute)
				back := w.queued("jobs")
				if name == "not sent" {
					assert.Equal(t, []string{"a", "b", "c"}, back)
				} else {
					assert.Empty(t, back)
				}
				assert.Empty(t, w.inflight(m.WorkerID()))
				cancel()
				assert.NoError(t, <-ended)
			})
		})
	}
}

// Leases are named by numbers, however large.
func TestFetch_namesOf15Digits(t *testing.T) {
	t.Parallel()
	w := onReal(t)
	q := NewListQueue("jobs:" + w.ns)
	m := w.join("a", fast(), into(q))
	inc := m.current.Load()
	inc.mu.Lock()
	inc.lastID = 99_999_999_999_997
	inc.mu.Unlock()
	for i := range 6 {
		w.push(q.key, fmt.Sprint(i))
	}
	leases, err := m.Fetch(bg, q, 6)
	require.NoError(t, err)
	assert.Len(t, leases, 6)
	assert.Len(t, w.inflight(m.WorkerID()), 6)
	for _, l := range leases {
		assert.NoError(t, l.Confirm(bg), l.ID())
	}
	doneWith(t, leases)
}

// A job without a name has one as soon as it is asked for, and keeps it whatever its holder does to the payload.
func TestFetch_namedByItsContents(t *testing.T) {
	inBubble(t, func(w *world) {
		q := NewListQueue("jobs")
		m := w.join("a", Config{}, into(q))
		w.push("jobs", "one", "one", "two")
		leases, err := m.Fetch(bg, q, 3)
		require.NoError(t, err)
		require.Len(t, leases, 3)
		assert.Equal(t, "one", string(leases[0].Payload()))
		copy(leases[0].Payload(), "xxx")
		assert.Equal(t, contentID([]byte("one")), leases[0].Job().ID)
		assert.Equal(t, leases[0].Job().ID, leases[1].Job().ID)
		assert.Equal(t, contentID([]byte("two")), leases[2].Job().ID)
		assert.Equal(t, "xxx", string(leases[0].Job().Payload), "it is the holder's")
		require.NoError(t, leases[0].Release())
		assert.Equal(t, []string{"one"}, w.queued("jobs"), "and the element goes back as it was")
		doneWith(t, leases[1:])
	})
}

// refused is a Redis whose ACL was changed: it refuses a command inside of pipelines.
type refused struct{ command string }

func (refused) DialHook(next redis.DialHook) redis.DialHook          { return next }
func (refused) ProcessHook(next redis.ProcessHook) redis.ProcessHook { return next }

func (r refused) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		var rest []redis.Cmder
		for _, c := range cmds {
			if c.Name() == r.command {
				c.SetErr(noPermission{})
			} else {
				rest = append(rest, c)
			}
		}
		return next(ctx, rest)
	}
}

type noPermission struct{}

func (noPermission) Error() string { return "NOPERM this user has no permissions to run the command" }
func (noPermission) RedisError()   {}

// Where a plain command does not renew the records' TTLs, the script does.
func TestHeartbeat_renewalRefused(t *testing.T) {
	inBubble(t, func(w *world) {
		m := w.join("a", Config{InflightTTL: 2 * time.Minute})
		w.track(m, "one")
		id := m.WorkerID()
		m.rdb.AddHook(refused{"pexpire"})
		for range 10 {
			time.Sleep(time.Minute)
			k := w.keys(id)
			for _, key := range []string{k.session, k.inflight, k.jobs} {
				assert.Greater(t, w.raw.PTTL(bg, key).Val(), time.Minute, key)
			}
		}
		assert.Equal(t, id, m.WorkerID(), "it was never away")
	})
}

// What redis-keys.md tells people to do.
func TestFence_byHand(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.join("a", Config{}), w.join("b", Config{SweepInterval: time.Hour})
		w.track(a, "one")
		a.crash()
		k := w.keys(a.WorkerID())
		require.NoError(t, w.raw.HSet(bg, k.session, "state", "fenced").Err())
		require.NoError(t, w.raw.Del(bg, k.beat).Err())
		report, err := b.Sweep(bg)
		require.NoError(t, err)
		assert.Equal(t, 1, report.HandedBack)
	})
}

// Whatever handlers, Redis and peers do: every job is done or a dead letter, nothing is left open, and Work and Stop return at once.
func TestWork_property(t *testing.T) {
	for seed := range uint64(15) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			inBubble(t, func(w *world) {
				w.loadScripts()
				dice := &dice{rnd: rand.New(rand.NewPCG(seed, 1))}
				q := NewListQueue("jobs")
				cfg := Config{SelfFence: dice.roll(3) == 0}
				if dice.roll(3) == 0 {
					cfg.MaxInflight = 1 + dice.roll(5)
				}
				m := w.join("a", cfg, into(q))
				w.join("peer", Config{}, into(q))
				var done collected[string]
				ctx, cancel := context.WithCancel(bg)
				defer cancel()
				var ends []chan error
				for range 1 + dice.roll(3) {
					ends = append(ends, working(m, ctx, q, 1+dice.roll(6), dice.handler(&done)))
				}
				for i := range 200 {
					w.push("jobs", fmt.Sprint(i))
				}
				for range 6 {
					dice.harm(w, m)
				}
				m.faults.clear()
				ended := map[string]bool{}
				for range 100 { // what was refused is offered again after up to five minutes
					time.Sleep(10 * time.Second)
					for _, payload := range done.all() {
						ended[payload] = true
					}
					letters, err := NewInspector(w.raw, w.ns).DeadLetters(bg, 0, 1000)
					require.NoError(t, err)
					for _, l := range letters {
						ended[string(l.Payload)] = true
					}
					open := int64(len(w.queued("jobs"))) + w.raw.ZCard(bg, w.keys(m.WorkerID()).claims).Val() + int64(m.Stats().Inflight) // some come back
					if len(ended) == 200 && open == 0 {
						break
					}
				}
				assert.Equal(t, 200, len(ended))
				assert.Empty(t, w.queued("jobs"))
				assert.Empty(t, w.inflight(m.WorkerID()))
				began := time.Now()
				cancel()
				for _, e := range ends {
					assert.NoError(t, <-e)
				}
				require.NoError(t, m.Stop(bg))
				assert.Less(t, time.Since(began), time.Second)
			})
		})
	}
}

// dice are what a schedule is made of; handlers roll them, too.
type dice struct {
	mu  sync.Mutex
	rnd *rand.Rand
}

func (d *dice) roll(n int) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.rnd.IntN(n)
}

func (d *dice) handler(done *collected[string]) func(context.Context, *Lease) error {
	return func(_ context.Context, l *Lease) error {
		time.Sleep(time.Duration(d.roll(30)) * time.Millisecond)
		switch d.roll(30) {
		case 0:
			panic("on purpose")
		case 1:
			runtime.Goexit()
		case 2:
			_ = l.Release()
			return nil
		case 3:
			if errors.Is(l.Done(), ErrLost) {
				return nil
			}
		case 4:
			go l.Done()
		case 5:
			time.Sleep(2 * time.Second)
		}
		done.add(string(l.Payload()))
		return nil
	}
}

// harm does something to a worker.
func (d *dice) harm(w *world, m *member) {
	m.faults.add(&fault{
		mode:  []faultMode{failBefore, loseReply, twice, slow, hang}[d.roll(5)],
		on:    []string{"commit", "fetch", "beat", "where", "", "take", "deliver"}[d.roll(7)],
		times: 1 + d.roll(6),
		delay: time.Duration(d.roll(3000)) * time.Millisecond,
	})
	time.Sleep(time.Duration(d.roll(4000)) * time.Millisecond)
	switch k := w.keys(m.WorkerID()); d.roll(12) {
	case 0:
		w.fence(m.WorkerID())
	case 1:
		w.raw.Del(bg, k.session)
	case 2:
		w.raw.Del(bg, k.beat)
	}
}
