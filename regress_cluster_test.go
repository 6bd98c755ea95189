package recovery

import (
	"fmt"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// worker starts one whose session is on another node.
func (c *chaosCluster) worker(t *testing.T, cfg Config, awayFrom *node) (*Recoverer, workerKeys) {
	t.Helper()
	for i := range 50 {
		rdb := redis.NewClusterClient(&redis.ClusterOptions{Addrs: c.addrs()})
		t.Cleanup(func() { rdb.Close() })
		cfg.WorkerName = fmt.Sprint("w", i)
		r := newOn(t, rdb, &recorder{}, cfg)
		k := newKeyspace(cfg.Namespace, "").worker(r.WorkerID())
		if master, _, _ := c.pair(rdb, k.session); master != awayFrom {
			return r, k
		}
		require.NoError(t, r.Stop(bg))
	}
	t.Fatal("no slot elsewhere")
	return nil, workerKeys{}
}

// openSlot begins to move a slot, moves its keys if asked, and does not end it.
func (c *chaosCluster) openSlot(rdb *redis.ClusterClient, key string, move bool) (end func()) {
	c.t.Helper()
	from, _, slot := c.pair(rdb, key)
	to := c.another(from)
	fromID, toID := c.id(from), c.id(to)
	c.on(to, func(one *redis.Client) {
		require.NoError(c.t, one.Do(bg, "CLUSTER", "SETSLOT", slot, "IMPORTING", fromID).Err())
	})
	c.on(from, func(one *redis.Client) {
		require.NoError(c.t, one.Do(bg, "CLUSTER", "SETSLOT", slot, "MIGRATING", toID).Err())
		for move {
			keys := one.ClusterGetKeysInSlot(bg, slot, 1).Val()
			if len(keys) == 0 {
				break
			}
			require.NoError(c.t, one.Do(bg, "MIGRATE", "127.0.0.1", to.port, keys[0], 0, 5000).Err())
		}
	})
	return func() {
		owner, id := from, fromID
		if move {
			owner, id = to, toID
		}
		for _, n := range []*node{owner, from, to} {
			c.on(n, func(one *redis.Client) {
				require.NoError(c.t, one.Do(bg, "CLUSTER", "SETSLOT", slot, "NODE", id).Err())
			})
		}
	}
}

// beatsOn waits for some beats, a full one among them.
func beatsOn(t *testing.T, r *Recoverer) {
	t.Helper()
	before := r.Stats().Beats
	require.Eventually(t, func() bool { return r.Stats().Beats >= before+12 }, 20*time.Second, 10*time.Millisecond)
}

// The node of the registry does not answer. The session of this worker is on another one, which is well: nobody can have taken its jobs.
func TestRegress_clusterRegistryFrozen(t *testing.T) {
	t.Parallel()
	cluster := startChaosCluster(t)
	c, rdb := cluster.fleet(t, "", 0)
	master, replica, _ := cluster.pair(rdb, newKeyspace(c.ns, "").workers())
	cfg := Config{Namespace: c.ns, HeartbeatInterval: 100 * time.Millisecond, OrphanThreshold: time.Second}
	plain, keys := cluster.worker(t, cfg, master)
	cfg.SelfFence = true
	fencing, _ := cluster.worker(t, cfg, master)
	l, err := fencing.Track(bg, Job{ID: "job"})
	require.NoError(t, err)
	beatsOn(t, plain)
	beatsOn(t, fencing)
	home, err := rdb.MasterForKey(bg, keys.beat)
	require.NoError(t, err)
	for _, n := range []*node{replica, master} {
		require.NoError(t, n.cmd.Process.Signal(syscall.SIGSTOP))
		defer func() { _ = n.cmd.Process.Signal(syscall.SIGCONT) }()
	}
	sleep(bg, 3*cfg.OrphanThreshold) // the outage has to last
	assert.Positive(t, home.PTTL(bg, keys.beat).Val(), "the beat's key")
	assert.NoError(t, plain.Check())
	assert.NoError(t, fencing.Check())
	assert.NoError(t, l.Context().Err(), "its own node has heard it all the time")
}

// A slot that is being moved, or whose move was given up half-way, answers TRYAGAIN to every script one of whose keys does not exist, and a full beat
// names such keys. Beats must go on: the plain commands of a light one are served, or followed.
func TestRegress_clusterOpenSlot(t *testing.T) {
	t.Parallel()
	cluster := startChaosCluster(t)
	for _, moved := range []bool{false, true} {
		t.Run(fmt.Sprint("moved=", moved), func(t *testing.T) {
			c, rdb := cluster.fleet(t, "", 0)
			cfg := Config{Namespace: c.ns, HeartbeatInterval: 100 * time.Millisecond, OrphanThreshold: time.Second, SelfFence: true}
			r, keys := cluster.worker(t, cfg, nil)
			l, err := r.Track(bg, Job{ID: "job"})
			require.NoError(t, err)
			beatsOn(t, r)
			end := cluster.openSlot(rdb, keys.session, moved)
			sleep(bg, 3*cfg.OrphanThreshold)
			assert.NoError(t, r.Check())
			assert.NoError(t, l.Context().Err())
			end()
			assert.NoError(t, l.Done())
		})
	}
}

// With WaitReplicas a write goes to a node by name, and no client follows ASK and MOVED for it.
func TestRegress_clusterReplicasFollow(t *testing.T) {
	t.Parallel()
	cluster := startChaosCluster(t)
	c, rdb := cluster.fleet(t, "", 1)
	cfg := Config{Namespace: c.ns, HeartbeatInterval: 500 * time.Millisecond, OrphanThreshold: 2 * time.Second, WaitReplicas: 1}
	r, keys := cluster.worker(t, cfg, nil)
	_, err := r.Track(bg, Job{ID: "held"})
	require.NoError(t, err)
	end := cluster.openSlot(rdb, keys.session, true)
	_, err = r.Track(bg, Job{ID: "asked"})
	assert.NoError(t, err, "ASK")
	end()
	_, err = r.Track(bg, Job{ID: "moved"})
	assert.NoError(t, err, "MOVED")
}
