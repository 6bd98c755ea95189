package recovery

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// bg is for calls that no test cancels.
var bg = context.Background()

// bothWays runs a test with fake time on miniredis and in real time on a redis-server.
func bothWays(t *testing.T, f func(t *testing.T, w *world)) {
	t.Run("miniredis", func(t *testing.T) { inBubble(t, func(w *world) { f(w.t, w) }) })
	t.Run("redis-server", func(t *testing.T) { f(t, onReal(t)) })
}

func TestTrack_recordIndexAndRegistry(t *testing.T) {
	bothWays(t, func(t *testing.T, w *world) {
		m := w.join("a", Config{})
		k := w.keys(m.WorkerID())
		l := w.track(m, "job")[0]
		assert.Equal(t, []string{m.WorkerID()}, w.workers())
		assert.Equal(t, []string{"1"}, w.inflight(m.WorkerID()))
		assert.Equal(t, "live", w.raw.HGet(bg, k.session, "state").Val())
		raw, err := w.raw.HGet(bg, k.jobs, "1").Bytes()
		require.NoError(t, err)
		job, err := decodeRecord(raw, l.ID(), nil)
		require.NoError(t, err)
		assert.Equal(t, Job{ID: "job", Queue: "q", Payload: []byte("payload of job")}, job)
		assert.Equal(t, 1, m.Stats().Inflight)

		require.NoError(t, l.Done())
		require.NoError(t, l.Done(), "Done is idempotent")
		assert.Empty(t, w.inflight(m.WorkerID()))
		assert.EqualValues(t, 0, w.raw.Exists(bg, k.jobs, k.claims, k.handed).Val())
		assert.Equal(t, 0, m.Stats().Inflight)
	})
}

func TestTrack_payloadByteForByte(t *testing.T) {
	all := make([]byte, 256)
	for i := range all {
		all[i] = byte(i)
	}
	payloads := map[string][]byte{"all": all, "empty": {}, "big": []byte(strings.Repeat("x\x00y\xff", 1<<18))}
	bothWays(t, func(t *testing.T, w *world) {
		a, b := w.join("a", fast()), w.join("b", fast())
		for id, p := range payloads {
			job := Job{ID: id + string(all), Queue: string(all), Payload: p, Headers: map[string]string{string(all): string(all), "": ""}, MaxRecoveries: 7}
			_, err := a.Track(bg, job)
			require.NoError(t, err)
		}
		a.crash()
		w.eventually(func() bool { return len(b.enq.accepted()) == 3 }, "all are handed back")
		for _, o := range b.enq.accepted() {
			id := strings.TrimSuffix(o.ID, string(all))
			assert.Equal(t, string(payloads[id]), string(o.Payload), id)
			assert.Equal(t, map[string]string{string(all): string(all), "": ""}, o.Headers)
			assert.Equal(t, string(all), o.Queue)
			assert.Equal(t, 7, o.MaxRecoveries)
		}
	})
}

func TestTrack_invalidJob(t *testing.T) {
	inBubble(t, func(w *world) {
		m := w.join("a", Config{MaxPayload: 10})
		for _, c := range []struct {
			job  Job
			want error
			text string
		}{
			{Job{}, ErrInvalidJob, "ID is empty"},
			{Job{ID: strings.Repeat("x", 1025)}, ErrInvalidJob, "1025 bytes, at most 1024"},
			{Job{ID: "x", Queue: strings.Repeat("x", 1025)}, ErrInvalidJob, "Queue"},
			{Job{ID: "x", Headers: map[string]string{"h": strings.Repeat("x", 1<<16)}}, ErrInvalidJob, "Headers"},
			{Job{ID: "x", Timeout: -2}, ErrInvalidJob, "Timeout"},
			{Job{ID: "x", Timeout: time.Millisecond}, ErrInvalidJob, "1ms, from 10ms to"},
			{Job{ID: "x", MaxRecoveries: -2}, ErrInvalidJob, "MaxRecoveries"},
			{Job{ID: "x", Payload: make([]byte, 11)}, ErrPayloadTooLarge, "11 bytes, Config.MaxPayload is 10"},
		} {
			_, err := m.TrackAll(bg, Job{ID: "good"}, c.job)
			assert.ErrorIs(t, err, c.want)
			assert.ErrorContains(t, err, c.text)
		}
		assert.Empty(t, w.inflight(m.WorkerID()), "all or none")
		assert.Equal(t, 0, m.Stats().Inflight)
	})
}

func TestTrackAll_allOrNone(t *testing.T) {
	bothWays(t, func(t *testing.T, w *world) {
		m := w.join("a", Config{MaxInflight: 2500})
		jobs := make([]Job, 2500)
		for i := range jobs {
			jobs[i] = Job{ID: fmt.Sprint(i)}
		}
		leases, err := m.TrackAll(bg, jobs...)
		require.NoError(t, err)
		assert.Len(t, w.inflight(m.WorkerID()), 2500)
		assert.EqualValues(t, 2500, w.raw.HLen(bg, w.keys(m.WorkerID()).jobs).Val())
		for _, l := range leases {
			assert.Equal(t, leases[0].Fence(), l.Fence())
		}
		_, err = m.TrackAll(bg, Job{ID: "a"}, Job{ID: "b"})
		assert.ErrorIs(t, err, ErrAtCapacity)
		require.NoError(t, leases[0].Done())
		_, err = m.TrackAll(bg, Job{ID: "a"}, Job{ID: "b"})
		assert.ErrorIs(t, err, ErrAtCapacity, "one place is not enough for two")
		assert.Len(t, w.inflight(m.WorkerID()), 2499)
		m.faults.add(&fault{mode: failBefore, on: "commit"})
		require.NoError(t, leases[1].r.Check())
		require.Error(t, leases[1].Done())
		none, err := m.TrackAll(bg)
		assert.NoError(t, err)
		assert.Empty(t, none)
	})
}

func TestTrack_sameJobTwice(t *testing.T) {
	inBubble(t, func(w *world) {
		m := w.join("a", Config{})
		leases := w.track(m, "job", "job")
		assert.NotEqual(t, leases[0].ID(), leases[1].ID())
		require.NoError(t, leases[0].Done())
		assert.Len(t, w.inflight(m.WorkerID()), 1, "the other run goes on")
		require.NoError(t, leases[1].Confirm(bg))
		require.NoError(t, leases[1].Done())
		assert.Empty(t, w.inflight(m.WorkerID()))
	})
}

// A Track whose answer was lost has failed for its caller. The record must go, or the job would be run twice.
func TestTrack_replyLost(t *testing.T) {
	bothWays(t, func(t *testing.T, w *world) {
		m := w.join("a", fast())
		require.NoError(t, w.track(m, "before")[0].Done())
		m.faults.add(&fault{mode: loseReply, on: "commit"})
		l, err := m.Track(bg, Job{ID: "job"})
		require.ErrorContains(t, err, `track job "job": injected`)
		require.Nil(t, l)
		assert.Len(t, w.inflight(m.WorkerID()), 1, "it was executed")
		w.eventually(func() bool { return len(w.inflight(m.WorkerID())) == 0 }, "removed with a later beat")
		assert.EqualValues(t, 0, w.raw.Exists(bg, w.keys(m.WorkerID()).jobs).Val())
		assert.Equal(t, 0, m.Stats().Inflight)
		assert.Zero(t, m.Stats().Repaired, "without an audit")
		l = w.track(m, "job")[0]
		require.NoError(t, l.Done())
	})
}

// A copy of a Track that arrives when its job is long done must not bring the record back.
func TestTrack_lateCopyIsRefused(t *testing.T) {
	bothWays(t, func(t *testing.T, w *world) {
		m := w.join("a", Config{})
		inc := m.current.Load()
		l := w.track(m, "job")[0]
		l2 := w.track(m, "other")[0]
		require.NoError(t, l.Done())
		for number := 1; number <= 2; number++ {
			// As the network would deliver it: the same MULTI again.
			a, err := m.write(bg, inc, "lane0", uint64(number), false, &writing{records: []any{"1", l.record, "2", l2.record}, track: []any{"1", "2"}})
			require.NoError(t, err)
			assert.Equal(t, l2.Fence(), a.start, "live, and a copy: the start is that of the first one")
		}
		assert.Equal(t, []string{"2"}, w.inflight(m.WorkerID()))
		assert.Equal(t, []string{"2"}, w.raw.HKeys(bg, inc.keys.jobs).Val(), "no stray record either")
		require.NoError(t, l2.Done())
	})
}

func TestTrack_callerGivesUp(t *testing.T) {
	inBubble(t, func(w *world) {
		m := w.join("a", Config{})
		m.faults.add(&fault{mode: slow, on: "commit", delay: 2 * time.Second})
		ctx, cancel := context.WithTimeout(bg, time.Second)
		defer cancel()
		began := time.Now()
		_, err := m.Track(ctx, Job{ID: "job"})
		require.ErrorIs(t, err, context.DeadlineExceeded)
		assert.Equal(t, time.Second, time.Since(began), "returns when ctx ends, not when Redis answers")
		time.Sleep(1500 * time.Millisecond)
		synctest.Wait()
		assert.Empty(t, w.inflight(m.WorkerID()), "what was written for nobody is removed")
		assert.EqualValues(t, 0, w.raw.Exists(bg, w.keys(m.WorkerID()).jobs).Val())
		assert.Equal(t, 0, m.Stats().Inflight)
	})
}

func TestTrack_notRunning(t *testing.T) {
	inBubble(t, func(w *world) {
		m := w.make("a", Config{})
		_, err := m.Track(bg, Job{ID: "job"})
		assert.ErrorIs(t, err, ErrNotRunning)
		require.NoError(t, m.Start(bg))
		l := w.track(m, "job")[0]
		m.Quiet()
		assert.Equal(t, StateDraining, m.State())
		_, err = m.Track(bg, Job{ID: "job"})
		assert.ErrorIs(t, err, ErrNotRunning)
		assert.ErrorContains(t, err, "draining")
		require.NoError(t, m.Check(), "draining, but it vouches for its jobs")
		require.NoError(t, l.Done())
		require.NoError(t, m.Stop(bg))
		_, err = m.Track(bg, Job{ID: "job"})
		assert.ErrorIs(t, err, ErrNotRunning)
		assert.ErrorIs(t, m.Check(), ErrNotRunning)
	})
}

// A Done whose answer was lost must not be taken for a job that somebody else has.
func TestDone_replyLost(t *testing.T) {
	bothWays(t, func(t *testing.T, w *world) {
		m := w.join("a", fast())
		l := w.track(m, "job")[0]
		m.faults.add(&fault{mode: loseReply, on: "commit"})
		err := l.Done()
		require.ErrorContains(t, err, "not confirmed by Redis")
		require.NotErrorIs(t, err, ErrLost)
		require.NoError(t, l.Done(), "a second call waits again, and the copy is nil")
		assert.Equal(t, 0, m.Stats().Inflight)
	})
}

func TestDone_redisAway(t *testing.T) {
	inBubble(t, func(w *world) {
		m := w.join("a", Config{})
		l := w.track(m, "job")[0]
		m.faults.add(&fault{mode: failBefore, times: -1})
		require.ErrorContains(t, l.Done(), `done with job "job": not confirmed by Redis, will be repeated: injected`)
		time.Sleep(10 * time.Second)
		assert.Len(t, w.inflight(m.WorkerID()), 1)
		m.faults.clear()
		time.Sleep(5 * time.Second)
		synctest.Wait()
		assert.Empty(t, w.inflight(m.WorkerID()), "repeated with a beat")
		require.NoError(t, l.Done())
	})
}

func TestLease_contextAndFence(t *testing.T) {
	inBubble(t, func(w *world) {
		m := w.join("a", Config{})
		type key struct{}
		ctx, cancel := context.WithCancel(context.WithValue(bg, key{}, "v"))
		l, err := m.Track(ctx, Job{ID: "job", Headers: map[string]string{"a": "b"}})
		require.NoError(t, err)
		assert.Equal(t, "v", l.Context().Value(key{}))
		assert.Equal(t, time.Now().UnixMicro(), l.Fence())
		assert.Equal(t, m.WorkerID()+"/1", l.ID())
		l.Job().Headers["a"] = "changed"
		assert.Equal(t, "b", l.Job().Headers["a"])
		cancel()
		assert.ErrorIs(t, l.Context().Err(), context.Canceled)
		require.NoError(t, l.Done())
		l = w.track(m, "job")[0]
		require.NoError(t, l.Done())
		assert.ErrorIs(t, l.Context().Err(), context.Canceled, "also if it was never asked for before")
		assert.ErrorContains(t, l.Confirm(bg), "already done")
	})
}

func TestFence_growsOverRuns(t *testing.T) {
	w := onReal(t)
	a, b := w.join("a", fast()), w.join("b", fast())
	var fences []int64
	workers := []*member{a, b}
	for i := range 20 {
		// Track, stop half-way, hand back, track: as fast as it goes.
		err := guard(func() {
			_ = workers[i%2].Do(bg, Job{ID: "job", MaxRecoveries: NoLimit}, func(context.Context) error { panic("half-way") })
		})
		require.Error(t, err)
		l := w.track(workers[(i+1)%2], "job")[0]
		fences = append(fences, l.Fence())
		require.NoError(t, l.Done())
	}
	for _, m := range workers {
		for _, o := range m.enq.accepted() {
			fences = append(fences, o.TrackedAt.UnixMicro())
		}
	}
	seen := map[int64]bool{} // that it grows is shown by the clock; that no two are equal is what could fail
	for _, f := range fences {
		assert.False(t, seen[f], "fence %d twice in %v", f, fences)
		seen[f] = true
	}
}

func TestTrack_concurrent(t *testing.T) {
	w := onReal(t)
	m := w.join("a", fast())
	var wg sync.WaitGroup
	for g := range 64 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for i := range 50 {
				ctx, cancel := context.WithCancel(bg)
				if i%7 == 0 {
					cancel() // given up at any moment
				}
				l, err := m.Track(ctx, Job{ID: fmt.Sprintf("%d-%d", g, i), Payload: make([]byte, g*10)})
				cancel()
				if err != nil {
					assert.ErrorIs(t, err, context.Canceled)
					continue
				}
				assert.NoError(t, l.Done())
			}
		}()
	}
	wg.Wait()
	w.eventually(func() bool { return len(w.inflight(m.WorkerID())) == 0 }, "everything is removed")
	assert.EqualValues(t, 0, w.raw.Exists(bg, w.keys(m.WorkerID()).jobs).Val())
	assert.Zero(t, m.Stats().Repaired, "%s", w.logs.String())
	assert.Zero(t, m.Stats().Inflight)
	assert.Less(t, m.faults.count("commit"), 64*50*2, "concurrent calls share round trips")
}

// One caller's bad job never fails another's, and a caller never waits for a lane that hangs.
func TestCommit_hangingLaneDoesNotHoldOthers(t *testing.T) {
	w := onReal(t)
	m := w.join("a", Config{})
	m.faults.add(&fault{mode: hang, on: "commit"})
	ctx, cancel := context.WithCancel(bg)
	hung := make(chan error, 1)
	go func() { _, err := m.Track(ctx, Job{ID: "hangs"}); hung <- err }()
	w.eventually(func() bool { return m.faults.count("commit") == 1 }, "it is under way")
	w.eventually(func() bool {
		l, err := m.Track(bg, Job{ID: "other"})
		return err == nil && l.Done() == nil
	}, "another lane takes the others")
	cancel()
	assert.ErrorIs(t, <-hung, context.Canceled)
	w.eventually(func() bool { return errors.Is(m.Check(), nil) }, "healthy")
}
