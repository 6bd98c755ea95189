package recovery

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// On a cluster a list and a worker are one slot only if both have the same tag.
func TestListQueue_cluster(t *testing.T) {
	t.Parallel()
	addrs := startCluster(t)
	newWorker := func(t *testing.T, q *ListQueue, cfg Config, logs *lockedBuffer) *Recoverer {
		rdb := redis.NewClusterClient(&redis.ClusterOptions{Addrs: addrs})
		t.Cleanup(func() { rdb.Close() })
		cfg.Logger = (&world{logs: logs}).logger()
		return newOn(t, rdb, q, cfg)
	}
	crash := func(r *Recoverer) { r.endSweeps(); r.endLife() }
	back := func(t *testing.T, r *Recoverer, key string, want ...string) {
		t.Helper()
		require.Eventually(t, func() bool { return r.rdb.LLen(bg, key).Val() >= int64(len(want)) }, 20*time.Second, 10*time.Millisecond)
		require.Eventually(t, func() bool { return r.rdb.SCard(bg, r.keys.workers()).Val() == 1 }, 20*time.Second, 10*time.Millisecond)
		all, err := r.rdb.LRange(bg, key, 0, -1).Result()
		require.NoError(t, err)
		assert.ElementsMatch(t, want, all)
	}
	t.Run("one slot", func(t *testing.T) {
		cfg, logs := fast(), &lockedBuffer{}
		cfg.HashTag, cfg.Namespace = "mail", "tagged"
		q, low := NewListQueue("{mail}:jobs"), NewListQueue("{mail}:low")
		doomed, other := newWorker(t, q, cfg, logs), newWorker(t, q, cfg, logs)
		got := make(chan []*Lease, 1)
		go func() {
			leases, err := doomed.Fetch(bg, InOrder(q, low), 1)
			assert.NoError(t, err)
			got <- leases
		}()
		require.Eventually(t, doomed.isWaiting, 20*time.Second, time.Millisecond)
		require.NoError(t, other.rdb.LPush(bg, "{mail}:low", "waited for").Err())
		assert.Equal(t, []string{"waited for"}, payloads(<-got))
		require.NoError(t, other.rdb.LPush(bg, "{mail}:jobs", "one", "two", "three").Err())
		leases, err := doomed.Fetch(bg, q, 2)
		require.NoError(t, err)
		require.NoError(t, leases[0].Done())
		_, err = doomed.Track(bg, Job{ID: "t", Payload: []byte("tracked")})
		require.NoError(t, err)
		crash(doomed)
		back(t, other, "{mail}:jobs", "two", "three", "tracked")
		back(t, other, "{mail}:low", "waited for")
		assert.NotContains(t, logs.String(), "at least once")
		assert.Equal(t, uint64(3), other.Stats().HandedBack)
	})
	t.Run("many slots", func(t *testing.T) {
		cfg, logs := fast(), &lockedBuffer{}
		cfg.Namespace = "untagged"
		q := NewListQueue("jobs")
		doomed, other := newWorker(t, q, cfg, logs), newWorker(t, q, cfg, &lockedBuffer{})
		assert.Equal(t, 1, strings.Count(logs.String(), "at least once"), "said at Start, once")
		_, err := doomed.Fetch(bg, q, 1)
		require.ErrorIs(t, err, ErrInvalidConfig)
		require.ErrorContains(t, err, "hash tag")
		var want []string
		for i := range 20 {
			_, err := doomed.Track(bg, Job{ID: fmt.Sprint(i), Payload: fmt.Append(nil, "p", i)})
			require.NoError(t, err)
			want = append(want, fmt.Sprint("p", i))
		}
		crash(doomed)
		back(t, other, "jobs", want...)
		assert.Equal(t, 1, strings.Count(logs.String(), "at least once"))
	})
}

// A client that does not know that it talks to a cluster is told by the cluster.
func TestListQueue_crossSlot(t *testing.T) {
	inBubble(t, func(w *world) {
		q := NewListQueue("jobs")
		doomed := w.join("doomed", Config{}, into(q))
		other := w.join("other", Config{}, into(q))
		w.loadScripts()
		other.rdb.AddHook(refusing{on: "deliver", err: "CROSSSLOT Keys in request don't hash to the same slot"})
		w.track(doomed, "a", "b")
		doomed.crash()
		time.Sleep(30 * time.Second)
		assert.ElementsMatch(t, []string{"payload of a", "payload of b"}, w.queued("jobs"))
		assert.Equal(t, 1, strings.Count(w.logs.String(), "at least once"))
		assert.Positive(t, other.faults.count("forget"))
		_, err := other.Fetch(bg, q, 1)
		assert.ErrorIs(t, err, ErrInvalidConfig)
	})
}

// refusing is a server that refuses a script.
type refusing struct{ on, err string }

type serverError string

func (e serverError) Error() string { return string(e) }
func (serverError) RedisError()     {}

func (r refusing) DialHook(next redis.DialHook) redis.DialHook { return next }
func (r refusing) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if nameOf(cmd) == r.on {
			cmd.SetErr(serverError(r.err))
			return cmd.Err()
		}
		return next(ctx, cmd)
	}
}
func (r refusing) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

// What a user that fetches needs beyond minimalACL: its lists, and the commands of lists.
func TestListQueue_minimalACL(t *testing.T) {
	t.Parallel()
	addr, _ := startTCP(t)
	admin := redis.NewClient(&redis.Options{Addr: addr})
	t.Cleanup(func() { admin.Close() })
	rule := []any{"ACL", "SETUSER", "worker", "on", ">secret", "resetkeys", "-@all"}
	for _, r := range append(minimalACL[:len(minimalACL):len(minimalACL)], listACL...) {
		rule = append(rule, r)
	}
	require.NoError(t, admin.Do(bg, rule...).Err())
	rdb := redis.NewClient(&redis.Options{Addr: addr, Username: "worker", Password: "secret"})
	t.Cleanup(func() { rdb.Close() })
	q := NewListQueue("jobs", ConsumeLeft())
	a, b := newOn(t, rdb, q, fast()), newOn(t, rdb, q, fast())
	got := make(chan []*Lease, 1)
	go func() {
		leases, err := a.Fetch(bg, q, 1)
		assert.NoError(t, err)
		got <- leases
	}()
	require.Eventually(t, a.isWaiting, 20*time.Second, time.Millisecond)
	require.NoError(t, admin.RPush(bg, "jobs", "a", "b").Err())
	assert.Equal(t, []string{"a"}, payloads(<-got))
	require.NoError(t, admin.LPush(bg, a.keys.arrived("jobs"), "of the dead").Err())
	require.Eventually(t, func() bool { return admin.LLen(bg, "jobs").Val() == 2 }, 10*time.Second, 10*time.Millisecond)
	a.endSweeps()
	a.endLife()
	require.Eventually(t, func() bool { return admin.LLen(bg, "jobs").Val() == 3 }, 10*time.Second, 10*time.Millisecond)
	require.NoError(t, b.Stop(bg))
	assertDenied(t, admin)
}

var listACL = []string{"~jobs", "+lpush", "+rpush", "+lpop", "+rpop", "+llen", "+lmove", "+blmove", "+zmscore", "+smismember", "+ltrim"}

// isWaiting reports that a Fetch waits.
func (r *Recoverer) isWaiting() bool {
	r.waits.mu.Lock()
	defer r.waits.mu.Unlock()
	return len(r.waits.moves) > 0
}
