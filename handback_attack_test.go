package recovery

import (
	"context"
	"os"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Release of a job whose payload is missing in the store. Nobody refused it; before, the lease stayed the holder's, who has the payload.
func TestHandBack_releaseBuriesForAMissingPayload(t *testing.T) {
	inBubble(t, func(w *world) {
		store, err := NewDirStore(t.TempDir())
		require.NoError(t, err)
		a := w.join("a", Config{PayloadStore: store, PayloadThreshold: 1})
		l := w.track(a, "job")[0]
		require.NoError(t, store.Delete(bg, l.ID()))
		err = l.Release()
		require.Error(t, err)
		t.Log(err)
		assert.Zero(t, a.Stats().Buried, "the holder runs it, and has the payload")
		assert.NotErrorIs(t, err, ErrLost)
	})
}

// Redis lost the session and the records, but not the index: the worker goes on with its job under a new incarnation, and the old index entry
// is buried as a job of which there is no record.
func TestHandBack_carriedAndBuried(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.join("a", Config{})
		w.join("b", Config{})
		l := w.track(a, "job")[0]
		k := w.keys(a.WorkerID())
		require.NoError(t, w.raw.Del(bg, k.session, k.jobs).Err())
		a.heart.kick() // before a peer's sweep
		time.Sleep(2 * time.Minute)
		letters, err := NewInspector(w.raw, w.ns).DeadLetters(bg, 0, 10)
		require.NoError(t, err)
		require.NoError(t, l.Done(), "it ended in Done")
		assert.Empty(t, letters, "and only there")
	})
}

// refuse answers TRYAGAIN to the script of a beat, as a Cluster does while the slot is open.
type refuse struct{}

type tryAgain struct{}

func (tryAgain) Error() string { return "TRYAGAIN Multiple keys request during rehashing of slot" }
func (tryAgain) RedisError()   {}

func (refuse) DialHook(next redis.DialHook) redis.DialHook { return next }
func (refuse) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error { return next(ctx, cmd) }
}
func (refuse) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		for _, c := range cmds {
			if nameOf(c) == "beat" && c.Name() != "set" {
				for _, c := range cmds {
					c.SetErr(tryAgain{})
				}
				return tryAgain{}
			}
		}
		return next(ctx, cmds)
	}
}

// While only light beats are possible, nobody renews the TTLs of the records: a worker that lives, and says so, loses its records after InflightTTL.
func TestHandBack_lightBeatsLetRecordsExpire(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.join("a", Config{InflightTTL: 2 * time.Minute})
		l := w.track(a, "job")[0]
		k := w.keys(a.WorkerID())
		a.rdb.AddHook(refuse{})
		for range 30 {
			time.Sleep(10 * time.Second)
			if a.Check() != nil {
				t.Log("Check:", a.Check())
			}
			require.True(t, w.raw.HExists(bg, k.jobs, l.member).Val(), "the record of a running job of a live worker")
		}
	})
}

// narrow is a link on which a KiB takes some time, and a client with a ReadTimeout of 5 s, as is go-redis' default.
type narrow struct{ perKiB time.Duration }

func (narrow) DialHook(next redis.DialHook) redis.DialHook { return next }
func (narrow) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}
func (n narrow) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		err := next(ctx, cmd)
		size := 0
		if c, ok := cmd.(*redis.SliceCmd); ok {
			for _, v := range c.Val() {
				text, _ := v.(string)
				size += len(text)
			}
		}
		took := time.Duration(size) * n.perKiB / 1024
		time.Sleep(min(took, 5*time.Second))
		if took > 5*time.Second {
			cmd.SetErr(os.ErrDeadlineExceeded)
			return os.ErrDeadlineExceeded
		}
		return err
	}
}

// Over a link that brings one record in a second, eight of them do not arrive before the client's ReadTimeout (5 s): they are asked for in one command, each
// time again, and none is ever handed back.
func TestHandBack_eightLargeRecordsAtOnce(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.join("a", Config{})
		for _, id := range []string{"1", "2", "3", "4", "5", "6", "7", "8"} {
			_, err := a.Track(bg, Job{ID: id, Payload: make([]byte, 16<<10)})
			require.NoError(t, err)
		}
		b := w.join("b", Config{}, func(m *member) { m.rdb.AddHook(narrow{time.Second / 16}) }) // 16 KiB a second; as 128 Mbit/s is for records of 16 MiB
		a.crash()
		time.Sleep(3 * time.Minute)
		assert.Len(t, b.enq.ids(), 8)
	})
}

// One record that can't be read keeps all others of its worker: handback.go says that it does not.
func TestHandBack_oneRecordKeepsTheOthers(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.join("a", Config{})
		_, err := a.Track(bg, Job{ID: "giant", Payload: make([]byte, 256<<10)})
		require.NoError(t, err)
		w.track(a, "x", "y", "z")
		b := w.join("b", Config{}, func(m *member) { m.rdb.AddHook(narrow{time.Second / 16}) }) // 16 KiB a second; as 128 Mbit/s is for records of 16 MiB
		a.crash()
		time.Sleep(3 * time.Minute)
		assert.Equal(t, []string{"x", "y", "z"}, b.enq.ids())
	})
}

// Counting may take longer than what the claim leaves for a call. Then that is told, each time, and when it is faster again the job goes back.
func TestHandBack_slowCountIsTold(t *testing.T) {
	inBubble(t, func(w *world) {
		cfg := Config{EnqueueTimeout: time.Second} // a claim: 3 s; a call: 10 s
		a, b := w.join("a", cfg), w.join("b", cfg)
		w.track(a, "job")
		b.faults.add(&fault{mode: slow, on: "count", delay: 2500 * time.Millisecond, times: -1}) // one node of a Cluster hangs, say
		a.crash()
		time.Sleep(10 * time.Minute)
		assert.Empty(t, b.enq.ids())
		assert.Contains(t, w.logs.String(), "count recoveries: ")
		b.faults.clear()
		time.Sleep(6 * time.Minute)
		assert.Equal(t, []string{"job"}, b.enq.ids())
	})
}
