package recovery

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// freePort finds a loopback port whose cluster bus port is in range, too.
func freePort(t *testing.T) int {
	t.Helper()
	for range 100 {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		port := l.Addr().(*net.TCPAddr).Port
		require.NoError(t, l.Close())
		if port < 50000 {
			return port
		}
	}
	t.Fatal("no free port below 50000")
	return 0
}

// startTCP runs a redis-server on a loopback port and returns its address and its process.
func startTCP(t *testing.T, args ...string) (string, *exec.Cmd) {
	t.Helper()
	needServer(t)
	port := freePort(t)
	addr := fmt.Sprintf("127.0.0.1:%d", port)
	cmd := exec.Command("redis-server", append([]string{"--port", fmt.Sprint(port), "--bind", "127.0.0.1", "--dir", t.TempDir(), "--save", "", "--loglevel", "warning"}, args...)...)
	cmd.Stderr = os.Stderr
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	rdb := redis.NewClient(&redis.Options{Addr: addr})
	defer rdb.Close()
	require.Eventually(t, func() bool { return rdb.Ping(bg).Err() == nil }, 10*time.Second, 20*time.Millisecond)
	return addr, cmd
}

// startCluster makes a cluster of three masters.
func startCluster(t *testing.T) []string {
	t.Helper()
	var addrs []string
	for range 3 {
		addr, _ := startTCP(t, "--cluster-enabled", "yes", "--cluster-node-timeout", "2000")
		addrs = append(addrs, addr)
	}
	host, port, err := net.SplitHostPort(addrs[0])
	require.NoError(t, err)
	for i, addr := range addrs {
		rdb := redis.NewClient(&redis.Options{Addr: addr})
		defer rdb.Close()
		from, to := i*16384/3, (i+1)*16384/3-1
		require.NoError(t, rdb.ClusterAddSlotsRange(bg, from, to).Err())
		require.NoError(t, rdb.Do(bg, "CLUSTER", "SET-CONFIG-EPOCH", i+1).Err())
		if i > 0 {
			require.NoError(t, rdb.ClusterMeet(bg, host, port).Err())
		}
	}
	for _, addr := range addrs {
		rdb := redis.NewClient(&redis.Options{Addr: addr})
		defer rdb.Close()
		require.Eventually(t, func() bool {
			info, err := rdb.ClusterInfo(bg).Result()
			return err == nil && strings.Contains(info, "cluster_state:ok") && strings.Contains(info, "cluster_known_nodes:3")
		}, 20*time.Second, 50*time.Millisecond)
	}
	return addrs
}

func newOn(t *testing.T, rdb redis.UniversalClient, enq Enqueuer, cfg Config) *Recoverer {
	t.Helper()
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	r, err := New(rdb, enq, cfg)
	require.NoError(t, err)
	require.NoError(t, r.Start(bg))
	t.Cleanup(func() {
		ctx, cancel := context.WithCancel(bg)
		cancel()
		_ = r.Stop(ctx)
	})
	return r
}

// A real cluster: it alone reports keys of different slots in one script.
func TestTopology_cluster(t *testing.T) {
	t.Parallel()
	addrs := startCluster(t)
	for _, tag := range []string{"", "one-slot"} {
		t.Run("tag="+tag, func(t *testing.T) {
			cfg := fast()
			cfg.HashTag, cfg.Namespace = tag, "ns"+tag
			var workers []*Recoverer
			enq := &recorder{}
			for i := range 4 {
				rdb := redis.NewClusterClient(&redis.ClusterOptions{Addrs: addrs})
				t.Cleanup(func() { rdb.Close() })
				cfg.WorkerName = fmt.Sprint("w", i)
				workers = append(workers, newOn(t, rdb, enq, cfg))
			}
			want := 0
			for i, r := range workers[:3] {
				for n := range 10 {
					l, err := r.Track(bg, Job{ID: fmt.Sprintf("%d-%d", i, n), Payload: make([]byte, 5000)})
					require.NoError(t, err)
					require.NoError(t, l.Confirm(bg))
					if n%2 == 0 {
						require.NoError(t, l.Done())
					} else {
						want++
					}
				}
			}
			infos, err := NewInspector(workers[0].rdb, cfg.Namespace, InspectHashTag(tag)).Workers(bg)
			require.NoError(t, err)
			assert.Len(t, infos, 4)
			for _, r := range workers[:3] { // crash
				r.endSweeps()
				r.endLife()
			}
			require.Eventually(t, func() bool { return len(enq.accepted()) == want }, 20*time.Second, 10*time.Millisecond)
			require.Eventually(t, func() bool {
				ids, err := workers[3].rdb.SMembers(bg, workers[3].keys.workers()).Result()
				return err == nil && len(ids) == 1
			}, 20*time.Second, 10*time.Millisecond)
			assert.Len(t, enq.called(), want, "once each")
			l, err := workers[3].Track(bg, Job{ID: "left"})
			require.NoError(t, err)
			ctx, cancel := context.WithCancel(bg)
			cancel()
			require.ErrorIs(t, workers[3].Stop(ctx), context.Canceled)
			require.ErrorIs(t, l.Done(), ErrLost)
			assert.Len(t, enq.called(), want+1)
		})
	}
}

func TestTopology_waitReplicas(t *testing.T) {
	t.Parallel()
	master, _ := startTCP(t)
	host, port, err := net.SplitHostPort(master)
	require.NoError(t, err)
	_, replica := startTCP(t, "--replicaof", host+" "+port)
	rdb := redis.NewClient(&redis.Options{Addr: master})
	t.Cleanup(func() { rdb.Close() })
	require.Eventually(t, func() bool { return rdb.Do(bg, "WAIT", 1, 100).Val() == int64(1) }, 10*time.Second, 50*time.Millisecond)
	cfg := fast()
	cfg.WaitReplicas = 1
	enq := &recorder{}
	a, b := newOn(t, rdb, enq, cfg), newOn(t, rdb, enq, cfg)
	require.NoError(t, rdb.ScriptFlush(bg).Err())
	l, err := a.Track(bg, Job{ID: "one", Payload: []byte("p")})
	require.NoError(t, err)
	require.NoError(t, l.Done())
	_, err = a.Track(bg, Job{ID: "orphan"})
	require.NoError(t, err)
	a.endSweeps()
	a.endLife()
	require.Eventually(t, func() bool { return len(enq.accepted()) == 1 }, 10*time.Second, 10*time.Millisecond)

	require.NoError(t, replica.Process.Kill())
	_, err = b.Track(bg, Job{ID: "two"})
	require.ErrorIs(t, err, errTooFewReplicas)
	require.ErrorContains(t, err, "0 of 1")
	require.Eventually(t, func() bool { return rdb.ZCard(bg, b.keys.worker(b.WorkerID()).inflight).Val() == 0 }, 10*time.Second, 10*time.Millisecond,
		"and leaves nothing behind")
}

// minimalACL is what the README tells people to grant.
var minimalACL = []string{"~recovery:1:*", "+eval", "+evalsha", "+multi", "+exec", "+time", "+type", "+rename", "+del", "+exists",
	"+get", "+set", "+setrange", "+pttl", "+pexpire", "+hset", "+hget", "+hmget", "+hdel", "+hlen", "+hexists", "+hrandfield",
	"+zadd", "+zrem", "+zcard", "+zscore", "+zrange", "+zrangebyscore", "+zremrangebyrank", "+zscan", "+sadd", "+srem", "+sismember", "+smembers", "+sscan"}

func TestTopology_minimalACL(t *testing.T) {
	t.Parallel()
	addr, _ := startTCP(t)
	admin := redis.NewClient(&redis.Options{Addr: addr})
	t.Cleanup(func() { admin.Close() })
	rule := []any{"ACL", "SETUSER", "worker", "on", ">secret", "resetkeys", "-@all"}
	for _, r := range minimalACL {
		rule = append(rule, r)
	}
	require.NoError(t, admin.Do(bg, rule...).Err())
	rdb := redis.NewClient(&redis.Options{Addr: addr, Username: "worker", Password: "secret"})
	t.Cleanup(func() { rdb.Close() })
	enq := &recorder{}
	a, b := newOn(t, rdb, enq, fast()), newOn(t, rdb, enq, fast())
	l, err := a.Track(bg, Job{ID: "done"})
	require.NoError(t, err)
	require.NoError(t, l.Confirm(bg))
	require.NoError(t, l.Checkpoint(bg, []byte("half-way")))
	enq.set(func(context.Context, Orphan) error { return errors.New("not now") })
	require.ErrorContains(t, l.Release(), "not now")
	enq.set(nil)
	require.NoError(t, l.Done())
	l, err = a.Track(bg, Job{ID: "released"})
	require.NoError(t, err)
	require.NoError(t, l.Release())
	require.Error(t, guard(func() { _ = a.Do(bg, Job{ID: "panics"}, func(context.Context) error { panic("x") }) }))
	for i := range 3 {
		_, err = a.Track(bg, Job{ID: fmt.Sprint("orphan", i)})
		require.NoError(t, err)
	}
	require.NoError(t, admin.HSet(bg, a.keys.worker(a.WorkerID()).jobs, "5", "garbage").Err())
	require.NoError(t, admin.ZRem(bg, a.keys.worker(a.WorkerID()).inflight, "6").Err())
	require.NoError(t, a.heart.auditOnce(bg, a.current.Load()))
	a.endSweeps()
	a.endLife()
	i := NewInspector(rdb, "default")
	require.Eventually(t, func() bool { infos, err := i.Workers(bg); return err == nil && len(infos) == 1 }, 10*time.Second, 10*time.Millisecond)
	assert.Len(t, enq.accepted(), 4, "one released, one panicked, two orphans; the garbage is buried")
	claims, err := i.Claimed(bg, b.WorkerID())
	require.NoError(t, err)
	assert.Empty(t, claims)
	_, err = i.Inflight(bg, b.WorkerID())
	require.NoError(t, err)
	_, err = b.Track(bg, Job{ID: "left"})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(bg)
	cancel()
	require.ErrorIs(t, b.Stop(ctx), context.Canceled)
	assert.Len(t, enq.accepted(), 5)
	assertDenied(t, admin)
}

// assertDenied looks that nothing was refused but what may be: the look at maxmemory-policy, and what go-redis says about itself.
func assertDenied(t *testing.T, admin *redis.Client) {
	t.Helper()
	denied, err := admin.Do(bg, "ACL", "LOG").Slice()
	require.NoError(t, err)
	for _, entry := range denied {
		text := fmt.Sprint(entry)
		assert.True(t, strings.Contains(text, "config") || strings.Contains(text, "client|setinfo"), "refused: %s", text)
	}
}
