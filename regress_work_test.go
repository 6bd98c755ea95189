package recovery

import (
	"context"
	"fmt"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// deafTo is a client without timeouts some of whose commands never get an answer.
type deafTo struct {
	on   string
	left atomic.Int64
	free chan struct{}
}

func (d *deafTo) DialHook(next redis.DialHook) redis.DialHook { return next }

func (d *deafTo) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if nameOf(cmd) == d.on && d.left.Add(-1) >= 0 {
			<-d.free
			cmd.SetErr(errInjected)
			return errInjected
		}
		return next(ctx, cmd)
	}
}

func (d *deafTo) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

// One connection that hangs does not stop Work, with whatever client.
func TestWork_behindAHangingDone(t *testing.T) {
	inBubble(t, func(w *world) {
		w.loadScripts()
		q := NewListQueue("jobs")
		hook := &deafTo{on: "commit", free: make(chan struct{})}
		m := w.join("a", Config{}, into(q), func(m *member) {
			m.rdb.Close()
			m.rdb = redis.NewClient(&redis.Options{Addr: "127.0.0.1:6379", ReadTimeout: -1, PoolSize: 1000,
				Dialer: func(ctx context.Context, _, _ string) (net.Conn, error) { return w.dial(ctx) }})
			m.rdb.AddHook(m.faults)
			m.rdb.AddHook(hook)
		})
		require.False(t, m.bounds)
		ctx, cancel := context.WithCancel(bg)
		defer cancel()
		var runs atomic.Int64
		ended := working(m, ctx, q, 1, func(context.Context, *Lease) error { time.Sleep(time.Second); runs.Add(1); return nil })
		hook.left.Store(1)
		w.push("jobs", "a", "b", "c")
		time.Sleep(10 * time.Minute)
		assert.EqualValues(t, 3, runs.Load())
		close(hook.free)
		cancel()
		assert.NoError(t, <-ended)
	})
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
