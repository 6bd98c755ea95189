package recovery

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestTrack_recordIndexAndRegistry(t *testing.T) {
	inBubble(t, func(w *world) {
		m := w.join("a", Config{})
		l := w.track(m, "job")[0]
		assert.Equal(t, []string{m.WorkerID()}, w.workers())
		assert.Len(t, w.inflight(m.WorkerID()), 1)
		assert.EqualValues(t, 1, w.raw.HLen(context.Background(), w.keys(m.WorkerID()).jobs).Val())
		require.NoError(t, l.Done())
		assert.Empty(t, w.inflight(m.WorkerID()))
		assert.EqualValues(t, 0, w.raw.Exists(context.Background(), w.keys(m.WorkerID()).jobs).Val())
	})
}

func TestDeath_jobsComeBack(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.join("a", Config{}), w.join("b", Config{})
		w.track(a, "one", "two")
		began := time.Now()
		a.crash()
		time.Sleep(25 * time.Second)
		synctest.Wait()
		assert.Equal(t, []string{"one", "two"}, b.enq.ids())
		t.Log(time.Since(began), "\n", w.logs.String())
		time.Sleep(time.Hour)
		assert.Len(t, b.enq.called(), 2)
		assert.Equal(t, []string{b.WorkerID()}, w.workers())
		t.Log(w.allKeys())
	})
}
