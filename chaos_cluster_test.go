package recovery

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
)

// A real Redis Cluster, three masters with a replica each, under the same load and the same judge: masters are killed and replaced, and slots
// move to another master while they are in use.

// chaosCluster is one whose nodes can be killed.
type chaosCluster struct {
	t     *testing.T
	nodes []*node
}

func startChaosCluster(t *testing.T) *chaosCluster {
	t.Helper()
	c := &chaosCluster{t: t}
	for range 6 {
		// Without full coverage one master that is away does not end the others: workers lose the registry and keep their session, or the reverse.
		c.nodes = append(c.nodes, startNode(t, "--cluster-enabled", "yes", "--cluster-node-timeout", "1000",
			"--cluster-require-full-coverage", "no", "--cluster-replica-validity-factor", "0", "--repl-ping-replica-period", "1"))
	}
	for i, n := range c.nodes {
		c.on(n, func(rdb *redis.Client) {
			if i < 3 {
				require.NoError(t, rdb.ClusterAddSlotsRange(bg, i*16384/3, (i+1)*16384/3-1).Err())
			}
			require.NoError(t, rdb.Do(bg, "CLUSTER", "SET-CONFIG-EPOCH", i+1).Err())
			for _, other := range c.nodes[:i] { // gossip alone would take seconds
				require.NoError(t, rdb.ClusterMeet(bg, "127.0.0.1", fmt.Sprint(other.port)).Err())
			}
		})
	}
	c.until("everybody knows everybody", func() bool {
		return c.all(func(_ *node, rdb *redis.Client) bool {
			return strings.Contains(rdb.ClusterInfo(bg).Val(), "cluster_known_nodes:6")
		})
	})
	for i, n := range c.nodes[3:] {
		c.on(n, func(rdb *redis.Client) { require.NoError(t, rdb.ClusterReplicate(bg, c.id(c.nodes[i])).Err()) })
	}
	c.untilWhole()
	return c
}

func (c *chaosCluster) addrs() (all []string) {
	for _, n := range c.nodes {
		all = append(all, n.addr())
	}
	return all
}

func (c *chaosCluster) on(n *node, f func(rdb *redis.Client)) {
	rdb := n.client()
	defer rdb.Close()
	f(rdb)
}

// all asks every node that is not killed.
func (c *chaosCluster) all(f func(n *node, rdb *redis.Client) bool) bool {
	for _, n := range c.nodes {
		ok := true
		if n.cmd != nil {
			c.on(n, func(rdb *redis.Client) { ok = f(n, rdb) })
		}
		if !ok {
			return false
		}
	}
	return true
}

func (c *chaosCluster) until(what string, cond func() bool) {
	c.t.Helper()
	require.Eventually(c.t, cond, time.Minute, 20*time.Millisecond, what)
}

func (c *chaosCluster) id(n *node) (id string) {
	c.t.Helper()
	c.on(n, func(rdb *redis.Client) {
		var err error
		id, err = rdb.ClusterMyID(bg).Result()
		require.NoError(c.t, err)
	})
	return id
}

// untilWhole waits for six nodes that agree on who is who, with replicas that follow.
func (c *chaosCluster) untilWhole() {
	c.t.Helper()
	c.until("the cluster is whole", func() bool {
		var views []string
		return c.all(func(n *node, rdb *redis.Client) bool {
			info, err := rdb.Info(bg, "replication").Result()
			if err != nil || strings.Contains(info, "role:slave") && !strings.Contains(info, "master_link_status:up") {
				return false
			}
			if strings.Contains(info, "role:master") && rdb.Do(bg, "WAIT", 1, 100).Val() != int64(1) {
				return false
			}
			views = append(views, owners(rdb))
			return strings.Contains(rdb.ClusterInfo(bg).Val(), "cluster_state:ok") && views[0] != "" && views[0] == views[len(views)-1]
		})
	})
}

// owners is a node's view: the masters of all slots, if each has a replica.
func owners(rdb *redis.Client) string {
	all := rdb.ClusterShards(bg).Val()
	slices.SortFunc(all, func(a, b redis.ClusterShard) int { return strings.Compare(online(a, "master"), online(b, "master")) })
	var text strings.Builder
	for _, s := range all {
		if len(s.Slots) == 0 {
			continue // of one that was replaced
		}
		master := online(s, "master")
		if master == "" || online(s, "replica") == "" {
			return ""
		}
		fmt.Fprint(&text, master, "=", s.Slots, " ")
	}
	return text.String()
}

// online is the address of a shard's master, or replica, if it is well.
func online(s redis.ClusterShard, role string) string {
	for _, n := range s.Nodes {
		if n.Role == role && n.Health == "online" {
			return fmt.Sprintf("127.0.0.1:%d", n.Port)
		}
	}
	return ""
}

// shardOf is a node's view of who has a slot.
func shardOf(rdb *redis.Client, slot int) redis.ClusterShard {
	for _, s := range rdb.ClusterShards(bg).Val() {
		for _, r := range s.Slots {
			if int(r.Start) <= slot && slot <= int(r.End) {
				return s
			}
		}
	}
	return redis.ClusterShard{}
}

// pair are the master of a key's slot, and its replica. The cluster is whole.
func (c *chaosCluster) pair(rdb *redis.ClusterClient, key string) (master, replica *node, slot int) {
	c.t.Helper()
	n, err := rdb.ClusterKeySlot(bg, key).Result()
	require.NoError(c.t, err)
	c.on(c.nodes[0], func(one *redis.Client) {
		s := shardOf(one, int(n))
		master, replica = c.at(online(s, "master")), c.at(online(s, "replica"))
	})
	require.NotNil(c.t, master, "slot %d", n)
	require.NotNil(c.t, replica, "slot %d", n)
	return master, replica, int(n)
}

func (c *chaosCluster) at(addr string) *node {
	for _, n := range c.nodes {
		if n.addr() == addr {
			return n
		}
	}
	return nil
}

// masters are those that serve slots, as the first node sees it.
func (c *chaosCluster) masters() (all []*node) {
	c.t.Helper()
	c.on(c.nodes[0], func(one *redis.Client) {
		for _, s := range one.ClusterShards(bg).Val() {
			if n := c.at(online(s, "master")); n != nil && len(s.Slots) > 0 {
				all = append(all, n)
			}
		}
	})
	return all
}

// another is a master that is not this one.
func (c *chaosCluster) another(than *node) *node {
	c.t.Helper()
	others := slices.DeleteFunc(c.masters(), func(n *node) bool { return n == than })
	require.NotEmpty(c.t, others)
	return others[rand.IntN(len(others))]
}

// cutOff keeps a replica from following, so that what its master writes from now on is lost with it; or lets it follow again.
func (c *chaosCluster) cutOff(master, replica *node, cut bool) {
	c.t.Helper()
	user := ""
	if cut {
		user = "nobody"
	}
	c.on(replica, func(rdb *redis.Client) {
		require.NoError(c.t, rdb.ConfigSet(bg, "masteruser", user).Err())
		require.NoError(c.t, rdb.ConfigSet(bg, "masterauth", user).Err())
	})
	if cut {
		c.on(master, func(rdb *redis.Client) { require.NoError(c.t, rdb.Do(bg, "CLIENT", "KILL", "TYPE", "replica").Err()) })
	}
}

// failover kills the master of a key, and has its replica take over: elected by the others, or, which is quicker, told to.
func (c *chaosCluster) failover(rdb *redis.ClusterClient, key string, lossy, elected bool) outage {
	c.t.Helper()
	master, replica, slot := c.pair(rdb, key)
	out := outage{from: time.Now().Add(-100 * time.Millisecond)}
	if lossy {
		c.cutOff(master, replica, true)
		sleep(bg, time.Duration(20+rand.IntN(300))*time.Millisecond)
	}
	master.kill()
	if !elected {
		c.on(replica, func(rdb *redis.Client) { require.NoError(c.t, rdb.Do(bg, "CLUSTER", "FAILOVER", "TAKEOVER").Err()) })
	}
	c.until("the replica is the master", func() bool {
		return c.all(func(_ *node, one *redis.Client) bool { return online(shardOf(one, slot), "master") == replica.addr() })
	})
	c.cutOff(nil, replica, false)
	out.to = time.Now().Add(time.Second)
	master.start()
	c.untilWhole()
	return out
}

// migrate moves the slot of a key to another master, key by key, as a tool that rebalances does, and takes its time.
func (c *chaosCluster) migrate(rdb *redis.ClusterClient, key string) {
	c.t.Helper()
	from, _, slot := c.pair(rdb, key)
	to := c.another(from)
	source, target := from.client(), to.client()
	defer source.Close()
	defer target.Close()
	fromID, toID := c.id(from), c.id(to)
	require.NoError(c.t, target.Do(bg, "CLUSTER", "SETSLOT", slot, "IMPORTING", fromID).Err())
	require.NoError(c.t, source.Do(bg, "CLUSTER", "SETSLOT", slot, "MIGRATING", toID).Err())
	for n := 0; ; n++ {
		page := 1 + rand.IntN(3)
		if n >= 20 {
			page = 200 // the rest are counts of crashes, one for each job
		}
		keys, err := source.ClusterGetKeysInSlot(bg, slot, page).Result()
		require.NoError(c.t, err)
		if len(keys) == 0 {
			break
		}
		args := []any{"MIGRATE", "127.0.0.1", to.port, "", 0, 5000, "REPLACE", "KEYS"}
		for _, k := range keys {
			args = append(args, k)
		}
		require.NoError(c.t, source.Do(bg, args...).Err())
		d := time.Duration(rand.IntN(5000)) * time.Microsecond
		if n < 5 && rand.IntN(8) == 0 {
			d = time.Duration(rand.IntN(250)) * time.Millisecond // a slot that is half here and half there
		}
		sleep(bg, d)
	}
	sleep(bg, time.Duration(rand.IntN(5000))*time.Microsecond)
	for _, n := range append([]*node{to, from}, c.nodes...) {
		c.on(n, func(one *redis.Client) {
			err := one.Do(bg, "CLUSTER", "SETSLOT", slot, "NODE", toID).Err()
			if err == nil || !strings.Contains(err.Error(), "only with masters") { // replicas are told by their masters
				require.NoError(c.t, err)
			}
		})
	}
}

// fleet is a chaos on a cluster.
func (c *chaosCluster) fleet(t *testing.T, tag string, replicas int) (*chaos, *redis.ClusterClient) {
	t.Helper()
	rdb := redis.NewClusterClient(&redis.ClusterOptions{Addrs: c.addrs(), ReadTimeout: 500 * time.Millisecond, MaxRedirects: 10})
	t.Cleanup(func() { rdb.Close() })
	f := newChaos(&world{t: t, ns: "t" + newWorkerID("")[1:], logs: &lockedBuffer{}}, "", "")
	f.rdb, f.orders = rdb, chaosOrders{Cluster: c.addrs(), Tag: tag, Replicas: replicas, NS: f.ns, Name: "survivor"}
	return f, rdb
}

// end kills everybody, and lets a worker in this process recover.
func (c *chaos) end(crew []*process) {
	c.t.Helper()
	for _, p := range crew {
		c.kill(p)
	}
	var enq Enqueuer = c.book.enqueuer()
	if c.list != "" {
		enq = NewListQueue(c.list)
	}
	rdb := c.orders.client()
	c.t.Cleanup(func() { rdb.Close() })
	c.recovered(newOn(c.t, rdb, enq, c.orders.config()))
	c.t.Logf("%+v", c.judge())
	c.report()
}

// someSession is a key of a worker that is registered now.
func (c *chaos) someSession() string {
	c.t.Helper()
	k := newKeyspace(c.ns, c.orders.Tag)
	id, err := c.rdb.SRandMember(bg, k.workers()).Result()
	require.NoError(c.t, err)
	return k.worker(id).session
}

// The masters that have the registry, and a worker's session, are killed while workers run, and their replicas lack what was written last. With
// WaitReplicas no job that was acknowledged is lost. A Done does not wait: what Redis forgets of it in an outage may run again.
func TestChaos_clusterFailover(t *testing.T) {
	t.Parallel()
	cluster := startChaosCluster(t)
	for _, tag := range []string{"", "one-slot"} {
		t.Run("tag="+tag, func(t *testing.T) {
			c, rdb := cluster.fleet(t, tag, 1)
			crew := []*process{c.soak(), c.soak(), c.soak(), c.soak()}
			for round := range chaosRounds(2) {
				sleep(bg, time.Duration(100+rand.IntN(300))*time.Millisecond)
				key := newKeyspace(c.ns, tag).workers()
				if round%2 == 1 {
					key = c.someSession()
				}
				c.tally.outages = append(c.tally.outages, cluster.failover(rdb, key, rand.IntN(4) > 0, round%8 == 0))
				c.tally.failovers++
				// Nobody dies before a beat has entered it into the registry again: the entry of a worker that is dead by then is lost with the
				// master, and that is documented.
				c.beaten(len(crew))
				i := rand.IntN(len(crew))
				c.kill(crew[i])
				crew[i] = c.soak()
			}
			c.end(crew)
		})
	}
}

// Slots move while they are in use, back and forth, and workers die meanwhile. Nothing is lost, and nothing runs twice unnoticed.
func TestChaos_clusterMigration(t *testing.T) {
	t.Parallel()
	cluster := startChaosCluster(t)
	for _, test := range []struct {
		name, tag string
		list      bool
		replicas  int
	}{{name: "spread"}, {name: "one slot", tag: "tag"}, {name: "list", tag: "queue", list: true}, {name: "replicas", replicas: 1}} {
		t.Run(test.name, func(t *testing.T) {
			c, rdb := cluster.fleet(t, test.tag, test.replicas)
			if test.list {
				c.list = "{queue}:jobs:" + c.ns
			}
			crew, fed := []*process{c.soak(), c.soak(), c.soak(), c.soak()}, 0
			k := newKeyspace(c.ns, test.tag)
			// A patient one: a client that gives up waiting repeats an LPUSH that is executed all the same, behind a long MIGRATE say, and then there are two.
			producer := redis.NewClusterClient(&redis.ClusterOptions{Addrs: cluster.addrs(), ReadTimeout: time.Minute, MaxRedirects: 10})
			defer producer.Close()
			for round := range chaosRounds(8) {
				for n := rdb.LLen(bg, c.list).Val(); test.list && n < 100; n++ {
					fed++
					c.book.note("P", "?", fmt.Sprint("element", fed))
					require.NoError(t, pushUntil(producer, c.list, fmt.Sprint("element", fed)))
				}
				key := c.someSession()
				if round%4 == 0 {
					key = []string{k.workers(), k.gc()}[rand.IntN(2)]
				}
				cluster.migrate(rdb, key)
				c.tally.migrations++
				if round%2 == 1 {
					i := rand.IntN(len(crew))
					c.kill(crew[i])
					crew[i] = c.soak()
				}
			}
			c.end(crew)
		})
	}
}

// pushUntil is a producer's: what Redis refuses while a slot moves is not pushed.
func pushUntil(rdb *redis.ClusterClient, list, element string) (err error) {
	for range 100 {
		if err = rdb.LPush(bg, list, element).Err(); err == nil || !redis.HasErrorPrefix(err, "TRYAGAIN") {
			return err
		}
	}
	return errors.Join(errors.New("push"), err)
}
