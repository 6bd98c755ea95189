package recovery

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func z(member string, score float64) redis.Z { return redis.Z{Member: member, Score: score} }

// Damage to the records of a dead worker: each is handled, none keeps the others, nothing that is understood is dropped.
func TestDamage_deadWorker(t *testing.T) {
	good := []string{"one", "three", "two"}
	for name, c := range map[string]struct {
		damage func(w *world, k workerKeys)
		back   []string // handed back
		buried int
	}{
		"index without record": {func(w *world, k workerKeys) { w.raw.HDel(bg, k.jobs, "2") }, []string{"one", "three"}, 1},
		"record without index": {func(w *world, k workerKeys) { w.raw.ZRem(bg, k.inflight, "2") }, good, 0},
		"no index at all":      {func(w *world, k workerKeys) { w.raw.Del(bg, k.inflight) }, good, 0},
		"unknown version":      {func(w *world, k workerKeys) { w.raw.HSet(bg, k.jobs, "2", "\x63rest") }, []string{"one", "three"}, 1},
		"unknown flags":        {func(w *world, k workerKeys) { w.raw.HSet(bg, k.jobs, "2", "\x01\x80rest") }, []string{"one", "three"}, 1},
		"garbage":              {func(w *world, k workerKeys) { w.raw.HSet(bg, k.jobs, "2", "\x01\x00\xff\xff\xff\xff\xff") }, []string{"one", "three"}, 1},
		"empty record":         {func(w *world, k workerKeys) { w.raw.HSet(bg, k.jobs, "2", "") }, []string{"one", "three"}, 1},
		"strange members":      {func(w *world, k workerKeys) { w.raw.ZAdd(bg, k.inflight, z("\x00\xff%d{}", 3), z("", 4)) }, good, 2},
		"lone checkpoint":      {func(w *world, k workerKeys) { w.raw.HSet(bg, k.jobs, "9.cp", "x", "8.claim", "1 1 crashed") }, good, 0},
		"broken claim note": {func(w *world, k workerKeys) {
			w.raw.ZRem(bg, k.inflight, "2")
			w.raw.ZAdd(bg, k.claims, z("2", 1))
			w.raw.HSet(bg, k.jobs, "2.claim", "nonsense")
		}, good, 0},
		"no session": {func(w *world, k workerKeys) { w.raw.Del(bg, k.session) }, good, 0},
		"session of wrong type": {func(w *world, k workerKeys) {
			w.raw.Del(bg, k.session)
			w.raw.Set(bg, k.session, "x", 0)
		}, good, 0},
		"index of wrong type": {func(w *world, k workerKeys) {
			w.raw.Del(bg, k.inflight)
			w.raw.Set(bg, k.inflight, "x", 0)
		}, good, 0},
		"records of wrong type": {func(w *world, k workerKeys) {
			w.raw.Rename(bg, k.jobs, k.jobs+"-aside")
			w.raw.Set(bg, k.jobs, "x", 0)
		}, nil, 3},
		"claims of wrong type":  {func(w *world, k workerKeys) { w.raw.Set(bg, k.claims, "x", 0) }, good, 0},
		"handed of wrong type":  {func(w *world, k workerKeys) { w.raw.Set(bg, k.handed, "x", 0) }, good, 0},
		"beat of wrong type":    {func(w *world, k workerKeys) { w.raw.Del(bg, k.beat); w.raw.LPush(bg, k.beat, "x") }, good, 0},
		"beat without TTL":      {func(w *world, k workerKeys) { w.raw.Set(bg, k.beat, "x", 0) }, good, 0},
		"suspect of wrong type": {func(w *world, k workerKeys) { w.raw.LPush(bg, k.suspect, "x") }, good, 0},
		"suspect from tomorrow": {func(w *world, k workerKeys) {
			w.raw.Set(bg, k.suspect, time.Now().Add(24*time.Hour).UnixMilli(), 0)
		}, good, 0},
		"crashes of wrong type": {func(w *world, k workerKeys) { w.raw.Set(bg, newKeyspace(w.ns, "").crashes("two"), "x", 0) }, good, 0},
	} {
		t.Run(name, func(t *testing.T) {
			bothWays(t, func(t *testing.T, w *world) {
				var graves collected[BuriedInfo]
				cfg := fast()
				cfg.Events.Buried = graves.add
				dead, peer := w.join("dead", fast()), w.join("peer", cfg)
				w.track(dead, "one", "two", "three")
				other := w.join("other", fast())
				w.track(other, "fine")
				dead.crash()
				c.damage(w, w.keys(dead.WorkerID()))
				other.crash()
				w.eventually(func() bool { return slices.Equal(w.workers(), []string{peer.WorkerID()}) }, "both are retired")
				want := append(slices.Clone(c.back), "fine")
				slices.Sort(want)
				assert.Equal(t, want, peer.enq.ids())
				buried := graves.all()
				require.Len(t, buried, c.buried)
				assert.EqualValues(t, c.buried, w.raw.ZCard(bg, peer.keys.deadIndex()).Val())
				for _, b := range buried {
					text := w.raw.HGet(bg, peer.keys.deadJobs(), b.Orphan.Key).Val()
					assert.Contains(t, text, b.Reason)
				}
			})
		})
	}
}

// What can't be read goes to the dead letters as it is.
func TestDamage_buriedUntouched(t *testing.T) {
	inBubble(t, func(w *world) {
		dead, peer := w.join("dead", Config{}), w.join("peer", Config{})
		l := w.track(dead, "job")[0]
		raw := "\x07 of a later version \x00\xff"
		w.raw.HSet(bg, w.keys(dead.WorkerID()).jobs, "1", raw, "1.cp", "where it got to")
		dead.crash()
		time.Sleep(time.Minute)
		assert.Equal(t, raw, w.raw.HGet(bg, peer.keys.deadJobs(), l.ID()+".rec").Val())
		assert.Equal(t, "where it got to", w.raw.HGet(bg, peer.keys.deadJobs(), l.ID()+".cp").Val())
		assert.Contains(t, w.raw.HGet(bg, peer.keys.deadJobs(), l.ID()).Val(), "record has version 7, this program knows 1")
		assert.Contains(t, w.logs.String(), "recovery: job put into the dead letters")
	})
}

func TestDamage_registryEntryWithoutSession(t *testing.T) {
	inBubble(t, func(w *world) {
		peer := w.join("peer", Config{})
		w.raw.SAdd(bg, peer.keys.workers(), "ghost", "", "\x00{}")
		time.Sleep(30 * time.Second)
		assert.Equal(t, []string{peer.WorkerID()}, w.workers())
		assert.Equal(t, "fenced", w.raw.HGet(bg, w.keys("ghost").session, "state").Val(), "fenced, so that a late join fails")
		joined, err := joinScript.Run(bg, w.raw, []string{w.keys("ghost").session, w.keys("ghost").beat}, "{}", 1000, 0).Int()
		require.NoError(t, err)
		assert.Zero(t, joined)
	})
}

// Damage to a live worker: it is told, and nothing is lost. Not on miniredis, which does not mind some wrong types.
func TestDamage_liveWorker(t *testing.T) {
	for _, key := range []string{"session", "inflight", "jobs"} {
		t.Run(key, func(t *testing.T) {
			t.Parallel()
			w := onReal(t)
			a := w.join("a", fast())
			b := w.join("b", fast())
			leases := w.track(a, "one", "two")
			old := a.WorkerID()
			name := w.keys(old)
			bad := map[string]string{"session": name.session, "inflight": name.inflight, "jobs": name.jobs}[key]
			w.raw.Del(bg, bad)
			w.raw.Set(bg, bad, "x", 0)
			for _, l := range leases {
				<-l.Context().Done()
				assert.ErrorIs(t, context.Cause(l.Context()), ErrLost)
				assert.ErrorIs(t, l.Done(), ErrLost)
			}
			w.eventually(func() bool { return !slices.Contains(w.workers(), old) }, "the old incarnation is retired")
			// With the records unreadable a peer can only bury them, but their worker still has them: whoever comes first.
			w.eventually(func() bool {
				return len(a.enq.accepted())+len(b.enq.accepted())+int(w.raw.ZCard(bg, a.keys.deadIndex()).Val()) == 2
			}, "none is lost")
			if key != "jobs" {
				assert.Len(t, append(a.enq.accepted(), b.enq.accepted()...), 2)
			}
			w.eventually(func() bool {
				l, err := a.Track(bg, Job{ID: "more"})
				return err == nil && l.Done() == nil
			}, "goes on as a new incarnation")
			if key == "session" {
				assert.Equal(t, "fenced", w.raw.HGet(bg, name.session, "state").Val())
			}
			assert.Equal(t, "x", w.raw.Get(bg, name.damaged).Val(), "put aside, not destroyed")
		})
	}
}

func TestDamage_lockOfWrongType(t *testing.T) {
	inBubble(t, func(w *world) {
		dead, peer := w.join("dead", Config{}), w.join("peer", Config{})
		w.track(dead, "job")
		w.raw.Del(bg, peer.keys.gc())
		w.raw.LPush(bg, peer.keys.gc(), "x")
		dead.crash()
		time.Sleep(26 * time.Second)
		synctest.Wait()
		assert.Equal(t, []string{"job"}, peer.enq.ids())
	})
}

func TestDamage_lockWithoutTTL(t *testing.T) {
	inBubble(t, func(w *world) {
		dead, peer := w.join("dead", Config{}), w.join("peer", Config{})
		w.track(dead, "job")
		w.raw.Set(bg, peer.keys.gc(), "+nobody", 0)
		dead.crash()
		time.Sleep(time.Minute)
		assert.Equal(t, []string{"job"}, peer.enq.ids(), "a lock that never ends must not end all sweeps")
	})
}

func TestPermanent(t *testing.T) {
	inBubble(t, func(w *world) {
		dead, peer := w.join("dead", Config{}), w.join("peer", Config{})
		peer.enq.set(func(_ context.Context, o Orphan) error {
			if o.ID == "bad" {
				return fmt.Errorf("wrapped: %w", Permanent(fmt.Errorf("no such queue")))
			}
			return nil
		})
		w.track(dead, "bad", "good")
		dead.crash()
		time.Sleep(time.Minute)
		assert.Equal(t, []string{"good"}, peer.enq.ids())
		assert.Len(t, peer.enq.called(), 2, "never offered again")
		assert.EqualValues(t, 1, w.raw.ZCard(bg, peer.keys.deadIndex()).Val())
		assert.Len(t, w.workers(), 1)
		assert.NoError(t, Permanent(nil))
	})
}
