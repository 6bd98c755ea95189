package recovery

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func accept(context.Context, Orphan) error { return nil }

func TestNew_defaults(t *testing.T) {
	rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
	defer rdb.Close()
	r, err := New(rdb, EnqueuerFunc(accept), Config{})
	require.NoError(t, err)
	c := r.cfg
	assert.Equal(t, "default", c.Namespace)
	assert.Regexp(t, `^[^ {}/]+:\d+$`, c.WorkerName)
	assert.Equal(t, []time.Duration{5 * time.Second, 20 * time.Second, 5 * time.Second, 5 * time.Second, 0, 72 * time.Hour, 7 * 24 * time.Hour, 25 * time.Second, 10 * time.Second},
		[]time.Duration{c.HeartbeatInterval, c.OrphanThreshold, c.SweepInterval, c.GCLockTTL, c.JobTimeout, c.RecoveryWindow, c.InflightTTL, c.StopTimeout, c.EnqueueTimeout})
	assert.Equal(t, []int{3, 0, 1 << 20, 16, 0}, []int{c.MaxRecoveries, c.MaxInflight, c.MaxPayload, c.EnqueueConcurrency, c.WaitReplicas})
	assert.Equal(t, StateNew, r.State())
	assert.Empty(t, r.WorkerID())
	assert.Equal(t, Stats{}, r.Stats())

	r, err = New(rdb, EnqueuerFunc(accept), Config{HeartbeatInterval: time.Minute})
	require.NoError(t, err, "the others follow")
	assert.Equal(t, 4*time.Minute, r.cfg.OrphanThreshold)
	assert.Equal(t, time.Minute, r.cfg.SweepInterval)
	_, err = New(rdb, EnqueuerFunc(accept), Config{HeartbeatInterval: 100 * time.Millisecond, OrphanThreshold: 500 * time.Millisecond, SweepInterval: 100 * time.Millisecond})
	require.NoError(t, err, "sub-second settings work")
	_, err = New(rdb, EnqueuerFunc(accept), Config{InflightTTL: NoExpiry, MaxRecoveries: NoLimit})
	require.NoError(t, err)
}

func TestNew_refuses(t *testing.T) {
	rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
	defer rdb.Close()
	long := strings.Repeat("x", 201)
	for want, cfg := range map[string]Config{
		`Namespace "a b" contains ' '`:                       {Namespace: "a b"},
		`Namespace "a{b" contains '{'`:                       {Namespace: "a{b"},
		`WorkerName "a}b" contains '}'`:                      {WorkerName: "a}b"},
		`WorkerName "a/b" contains '/'`:                      {WorkerName: "a/b"},
		`WorkerName "a\nb" contains '\n'`:                    {WorkerName: "a\nb"},
		`HashTag "a\x00" contains '\x00'`:                    {HashTag: "a\x00"},
		"HashTag has 201 bytes, at most 200":                 {HashTag: long},
		`Namespace "\xff" contains`:                          {Namespace: "\xff"},
		"HeartbeatInterval is 9ms, at least 10ms":            {HeartbeatInterval: 9 * time.Millisecond},
		"HeartbeatInterval is -1s, at least 10ms":            {HeartbeatInterval: -time.Second, OrphanThreshold: time.Minute},
		"OrphanThreshold is 14s, at least 3 x HeartbeatInt":  {OrphanThreshold: 14 * time.Second},
		"SweepInterval is 1ms, at least 10ms":                {SweepInterval: time.Millisecond},
		"GCLockTTL is 1ms, at least 10ms":                    {GCLockTTL: time.Millisecond},
		"JobTimeout is 1ms, at least 10ms (0 for none)":      {JobTimeout: time.Millisecond},
		"JobTimeout is -1ns":                                 {JobTimeout: NoTimeout},
		"EnqueueTimeout is 1ns, at least 10ms":               {EnqueueTimeout: 1},
		"StopTimeout is -1ns, at least 10ms":                 {StopTimeout: -1},
		"RecoveryWindow is 1ms":                              {RecoveryWindow: time.Millisecond},
		"InflightTTL is 59s, at least 3 x OrphanThreshold":   {InflightTTL: 59 * time.Second},
		"InflightTTL is -2ns, at least 3 x OrphanThreshold":  {InflightTTL: -2},
		"MaxRecoveries is -2, from -1":                       {MaxRecoveries: -2},
		"MaxInflight is -1, from 0":                          {MaxInflight: -1},
		"MaxPayload is -1, from 1":                           {MaxPayload: -1},
		"EnqueueConcurrency is -1, from 1":                   {EnqueueConcurrency: -1},
		"WaitReplicas is -1, from 0":                         {WaitReplicas: -1},
		"OrphanThreshold is 2562047h47m16.854775807s, at mo": {OrphanThreshold: 1<<63 - 1, InflightTTL: NoExpiry},
	} {
		r, err := New(rdb, EnqueuerFunc(accept), cfg)
		assert.Nil(t, r)
		assert.ErrorIs(t, err, ErrInvalidConfig, want)
		assert.ErrorContains(t, err, want)
	}

	_, err := New(nil, nil, Config{Namespace: " ", HeartbeatInterval: time.Millisecond, MaxPayload: -1})
	for _, want := range []string{"rdb is nil", "enq is nil", "Namespace", "HeartbeatInterval", "MaxPayload"} {
		assert.ErrorContains(t, err, want, "every problem at once")
	}
	var none *redis.Client
	var f EnqueuerFunc
	_, err = New(none, f, Config{})
	assert.ErrorContains(t, err, "rdb is nil")
	assert.ErrorContains(t, err, "enq is nil")

	ring := redis.NewRing(&redis.RingOptions{Addrs: map[string]string{"a": "127.0.0.1:1"}})
	defer ring.Close()
	_, err = New(ring, EnqueuerFunc(accept), Config{HashTag: "tag"})
	assert.ErrorIs(t, err, ErrInvalidConfig)
	assert.ErrorContains(t, err, "rdb is a *redis.Ring")
}

func TestTiming(t *testing.T) {
	for _, threshold := range []time.Duration{20 * time.Second, 500 * time.Millisecond, 31 * time.Millisecond, 33333 * time.Microsecond} {
		cfg := Config{HeartbeatInterval: threshold / 3, OrphanThreshold: threshold}.withDefaults()
		tm := cfg.timing()
		assert.LessOrEqual(t, tm.trust, time.Duration(ms(tm.beatTTL)+ms(tm.confirm))*time.Millisecond)
		assert.LessOrEqual(t, tm.trust, threshold)
		assert.Greater(t, tm.suspectTTL, tm.confirm+cfg.SweepInterval)
		assert.Greater(t, tm.claimTTL, cfg.EnqueueTimeout)
		assert.Greater(t, tm.beatTTL, cfg.HeartbeatInterval)
	}
	assert.EqualValues(t, 1, ms(1), "never 0 by rounding")
	assert.EqualValues(t, 0, ms(0))
	forever := Config{InflightTTL: NoExpiry}.withDefaults().timing()
	assert.Zero(t, forever.retention)
	assert.Positive(t, forever.tombstone)
}

func TestExponential(t *testing.T) {
	f := Exponential(time.Second, time.Minute)
	assert.Zero(t, f(0))
	assert.Zero(t, f(1), "the first recovery is immediate")
	for n, most := range map[int]time.Duration{2: time.Second, 3: 2 * time.Second, 4: 4 * time.Second, 8: time.Minute, 1000: time.Minute} {
		for range 100 {
			assert.LessOrEqual(t, f(n), most)
			assert.GreaterOrEqual(t, f(n), most*4/5)
		}
	}
}

func FuzzConfig(f *testing.F) {
	f.Add("ns", "name", "tag", int64(0), int64(0), int64(0), int64(0), 0, 0, int64(0), int64(0), int64(0), 0, 0)
	f.Add("{}", "a b", "\x00", int64(-1), int64(1<<62), int64(1<<63-1), int64(1), -5, 1<<30, int64(-2), int64(1<<61), int64(7), -1, 1<<31)
	rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
	f.Fuzz(func(t *testing.T, ns, name, tag string, beat, orphan, sweep, ttl int64, payload, inflight int,
		lock, enqueue, other int64, recoveries, rest int) {
		cfg := Config{Namespace: ns, WorkerName: name, HashTag: tag, HeartbeatInterval: time.Duration(beat), OrphanThreshold: time.Duration(orphan),
			SweepInterval: time.Duration(sweep), InflightTTL: time.Duration(ttl), MaxPayload: payload, MaxInflight: inflight,
			GCLockTTL: time.Duration(lock), EnqueueTimeout: time.Duration(enqueue), JobTimeout: time.Duration(other), StopTimeout: time.Duration(other),
			RecoveryWindow: time.Duration(other), MaxRecoveries: recoveries, MaxDead: rest, PayloadThreshold: rest, WaitReplicas: rest, EnqueueConcurrency: rest}
		r, err := New(rdb, EnqueuerFunc(accept), cfg)
		if err != nil {
			require.ErrorIs(t, err, ErrInvalidConfig)
			return
		}
		for _, d := range []time.Duration{r.tm.beatTTL, r.tm.confirm, r.tm.suspectTTL, r.tm.claimTTL, r.tm.tombstone, r.tm.call, r.tm.trust} {
			require.Positive(t, ms(d))
		}
		k := r.keys.worker(newWorkerID(r.cfg.WorkerName))
		for _, key := range []string{k.session, k.beat, k.jobs} {
			require.Equal(t, 1, strings.Count(key, "{"), key)
			require.Equal(t, 1, strings.Count(key, "}"), key)
		}
	})
}

func FuzzRecord(f *testing.F) {
	for _, j := range []Job{{ID: "a"}, {ID: "b", Queue: "q", Payload: []byte("p"), Headers: map[string]string{"h": "v"}, Timeout: NoTimeout, MaxRecoveries: NoLimit}} {
		raw, err := encodeRecord(&j, "lease", nil, false)
		require.NoError(f, err)
		f.Add(raw)
	}
	f.Add([]byte{1, 0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1})
	f.Fuzz(func(t *testing.T, raw []byte) {
		job, err := decodeRecord(raw, "lease", nil)
		if err != nil {
			return
		}
		again, err := encodeRecord(&job, "lease", nil, false)
		require.NoError(t, err)
		back, err := decodeRecord(again, "lease", nil)
		require.NoError(t, err)
		require.Equal(t, job, back)
	})
}

// xor is a Codec that only a test would use.
type xor struct{ broken bool }

func (x xor) Seal(plain, context []byte) ([]byte, error) {
	if x.broken {
		return nil, errors.New("no key")
	}
	return append(flip(plain), context...), nil
}

func (x xor) Open(sealed, context []byte) ([]byte, error) {
	plain, ok := strings.CutSuffix(string(sealed), string(context))
	if !ok {
		panic("not sealed for " + string(context))
	}
	return flip([]byte(plain)), nil
}

func flip(b []byte) []byte {
	out := make([]byte, len(b))
	for i := range b {
		out[i] = b[i] ^ 0x55
	}
	return out
}

func TestRecord_codec(t *testing.T) {
	job := Job{ID: "id", Queue: "q", Payload: []byte("secret payload"), Headers: map[string]string{"key": "secret header"}}
	raw, err := encodeRecord(&job, "w/1", xor{}, false)
	require.NoError(t, err)
	assert.NotContains(t, string(raw), "secret")
	back, err := decodeRecord(raw, "w/1", xor{})
	require.NoError(t, err)
	assert.Equal(t, job, back)
	for name, f := range map[string]func() (Job, error){
		"another lease": func() (Job, error) { return decodeRecord(raw, "w/2", xor{}) },
		"no codec":      func() (Job, error) { return decodeRecord(raw, "w/1", nil) },
	} {
		back, err = f()
		assert.Error(t, err, name)
		assert.Equal(t, "id", back.ID, "what is readable is told: "+name)
		assert.Nil(t, back.Payload)
	}
	_, err = encodeRecord(&job, "w/1", xor{broken: true}, false)
	assert.ErrorContains(t, err, "seal: no key")
}

// With a Codec nothing private is readable in Redis, and recovery works all the same.
func TestCodec_endToEnd(t *testing.T) {
	inBubble(t, func(w *world) {
		cfg := Config{Codec: xor{}}
		dead, peer := w.join("dead", cfg), w.join("peer", cfg)
		_, err := dead.Track(bg, Job{ID: "job", Payload: []byte("secret"), Headers: map[string]string{"h": "secret"}})
		require.NoError(t, err)
		assert.NotContains(t, w.mini.Dump(), "secret")
		dead.crash()
		time.Sleep(time.Minute)
		require.Len(t, peer.enq.accepted(), 1)
		assert.Equal(t, "secret", string(peer.enq.accepted()[0].Payload))
		m := w.join("broken", Config{Codec: xor{broken: true}})
		_, err = m.Track(bg, Job{ID: "job"})
		require.ErrorContains(t, err, `track job "job": job "job": seal: no key`)
		assert.Zero(t, m.Stats().Inflight)
	})
}

func TestInspector(t *testing.T) {
	bothWays(t, func(t *testing.T, w *world) {
		cfg := Config{MaxInflight: 7}
		a, b := w.join("a", cfg), w.join("b", cfg)
		leases := w.track(a, "one", "two")
		i := NewInspector(w.raw, w.ns)
		infos, err := i.Workers(bg)
		require.NoError(t, err)
		require.Len(t, infos, 2)
		info := infos[0]
		assert.Equal(t, a.WorkerID(), info.ID)
		assert.Equal(t, "a", info.Name)
		assert.Equal(t, WorkerRunning, info.State)
		assert.Equal(t, a.info.Host, info.Host)
		assert.Equal(t, a.info.PID, info.PID)
		assert.Equal(t, 7, info.Capacity)
		assert.Equal(t, 2, info.Inflight)
		assert.WithinDuration(t, time.Now(), info.Started, time.Second)
		assert.WithinDuration(t, time.Now(), info.LastBeat, time.Second)
		b.Quiet()
		require.NoError(t, b.heart.beatOnce(bg))
		w.raw.Del(bg, w.keys(a.WorkerID()).beat)
		infos, err = i.Workers(bg)
		require.NoError(t, err)
		assert.Equal(t, WorkerSilent, infos[0].State)
		assert.Zero(t, infos[0].LastBeat)
		assert.Equal(t, WorkerDraining, infos[1].State)
		w.raw.Set(bg, w.keys(a.WorkerID()).suspect, 1, 0)
		w.raw.SAdd(bg, a.keys.workers(), "ghost")
		require.NoError(t, b.fenceOwn(bg, b.current.Load()))
		infos, err = i.Workers(bg)
		require.NoError(t, err)
		assert.Equal(t, []WorkerState{WorkerSuspect, WorkerFenced, WorkerAbsent}, []WorkerState{infos[0].State, infos[1].State, infos[2].State})

		w.raw.HSet(bg, w.keys(a.WorkerID()).jobs, "2", "garbage")
		w.raw.ZAdd(bg, w.keys(a.WorkerID()).inflight, z("9", 9e15))
		jobs, err := i.Inflight(bg, a.WorkerID())
		require.NoError(t, err)
		require.Len(t, jobs, 3)
		assert.Equal(t, leases[0].ID(), jobs[0].Lease)
		assert.Equal(t, Job{ID: "one", Queue: "q"}, jobs[0].Job)
		assert.Equal(t, len("payload of one"), jobs[0].Size)
		assert.Equal(t, leases[0].Fence(), jobs[0].Started.UnixMicro())
		assert.NoError(t, jobs[0].Err)
		assert.Error(t, jobs[1].Err)
		assert.ErrorContains(t, jobs[2].Err, "no record")
		jobs, err = i.Inflight(bg, "nobody")
		require.NoError(t, err)
		assert.Empty(t, jobs)
	})
}

func TestStrings(t *testing.T) {
	for r := Crashed; r <= Released; r++ {
		assert.Equal(t, r, parseReason(r.String()))
	}
	assert.Equal(t, "reason(99)", Reason(99).String())
	assert.Equal(t, "draining", StateDraining.String())
	assert.Equal(t, "state(9)", State(9).String())
}
