package recovery

import (
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A registry that lost the entry of a dead worker hides its jobs. Doctor finds them.
func TestDoctor(t *testing.T) {
	inBubble(t, func(w *world) {
		dead, gone, peer := w.join("dead:1", Config{}), w.join("gone", Config{}), w.join("peer", Config{})
		w.track(dead, "job")
		require.NoError(t, gone.Stop(bg), "its tombstone is nothing to repair")
		dead.crash()
		w.raw.SRem(bg, peer.keys.workers(), dead.WorkerID())
		w.raw.Set(bg, w.keys("old").damaged, "x", 0)
		w.raw.Set(bg, newKeyspace("other", "").worker("x").session, "x", 0)
		time.Sleep(time.Minute)
		require.Empty(t, peer.enq.called(), "nobody looks at it")
		i := NewInspector(w.raw, w.ns)
		report, err := i.Doctor(bg)
		require.NoError(t, err)
		assert.Equal(t, DoctorReport{Workers: 3, Hidden: []string{dead.WorkerID()}, Damaged: []string{w.keys("old").damaged}}, report)
		time.Sleep(time.Minute)
		assert.Equal(t, []string{"job"}, peer.enq.ids())
		report, err = i.Doctor(bg)
		require.NoError(t, err)
		assert.Empty(t, report.Hidden)
		require.NoError(t, peer.Stop(bg))
	})
}

// On a cluster SCAN sees one node: Doctor asks them all.
func TestDoctor_cluster(t *testing.T) {
	t.Parallel()
	rdb := redis.NewClusterClient(&redis.ClusterOptions{Addrs: startCluster(t)})
	t.Cleanup(func() { rdb.Close() })
	for _, tag := range []string{"", "tag"} {
		cfg := Config{Namespace: "ns*" + tag, HashTag: tag}
		var ids []string
		for range 8 {
			r := newOn(t, rdb, &recorder{}, cfg)
			_, err := r.Track(bg, Job{ID: "job"})
			require.NoError(t, err)
			ids = append(ids, r.WorkerID())
			r.endSweeps()
		}
		require.NoError(t, rdb.Del(bg, newKeyspace(cfg.Namespace, tag).workers()).Err())
		report, err := NewInspector(rdb, cfg.Namespace, InspectHashTag(tag)).Doctor(bg)
		require.NoError(t, err)
		assert.ElementsMatch(t, ids, report.Hidden)
	}
}

func TestKeyspace_parseWorker(t *testing.T) {
	for _, tag := range []string{"", "tag:x"} {
		k := newKeyspace("ns", tag)
		id, name, ok := k.parseWorker(k.worker("host:1-abc").inflight)
		assert.True(t, ok)
		assert.Equal(t, "host:1-abc", id)
		assert.Equal(t, "inflight", name)
		for _, key := range []string{k.workers(), k.gc(), "recovery:1:other:{w}:session", ""} {
			id, _, _ = k.parseWorker(key)
			assert.NotEqual(t, "host:1-abc", id)
		}
	}
}
