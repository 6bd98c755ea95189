package recovery

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// counted calls countCrashes for one crash of a job, as of a moment, and answers the number that it is told.
func (w *world) counted(m *member, job, lease string, reason Reason, at time.Duration) int {
	w.t.Helper()
	o := &orphan{Orphan: Orphan{Job: Job{ID: job}, Key: lease, Reason: reason}, lease: &claimedLease{}}
	m.countCrashes(bg, 1_700_000_000_000+ms(at), []*orphan{o})
	require.NoError(w.t, o.err)
	return o.Recovery
}

func TestCountCrashes(t *testing.T) {
	bothWays(t, func(t *testing.T, w *world) {
		m := w.join("a", Config{RecoveryWindow: time.Hour})
		key := m.keys.crashes("job")
		assert.Equal(t, 1, w.counted(m, "job", "a/1", Released, 0), "no crash")
		assert.EqualValues(t, 0, w.raw.Exists(bg, key).Val())
		assert.Equal(t, 1, w.counted(m, "job", "a/1", Crashed, 0))
		assert.Equal(t, 1, w.counted(m, "job", "a/1", Crashed, time.Minute), "the same crash")
		assert.Equal(t, 1, w.counted(m, "job", "a/9", Released, time.Minute))
		assert.Equal(t, 2, w.counted(m, "job", "b/1", Panicked, 30*time.Minute))
		assert.Equal(t, 2, w.counted(m, "job", "b/1", Panicked, 31*time.Minute))
		assert.Equal(t, 2, w.counted(m, "job", "b/2", Released, 32*time.Minute))
		assert.Equal(t, "1700000000000 a/1\n1700001800000 b/1", w.raw.Get(bg, key).Val())
		assert.InDelta(t, time.Hour, w.raw.PTTL(bg, key).Val(), float64(time.Minute))
		assert.Equal(t, 2, w.counted(m, "job", "c/1", TimedOut, time.Hour), "the first is past the window")
		assert.Equal(t, "1700001800000 b/1\n1700003600000 c/1", w.raw.Get(bg, key).Val())
		assert.Equal(t, 1, w.counted(m, "job", "d/1", Released, 80*time.Minute+30*time.Minute-1), "only c/1 is within it")
		history := m.history(bg, &orphan{Orphan: Orphan{Job: Job{ID: "job"}}})
		assert.Equal(t, []crash{{"b/1", 1700001800000}, {"c/1", 1700003600000}}, history)
		require.NoError(t, m.Stop(bg))
	})
}

// What lies there and is no history is left alone, and does not keep a job from being handed back.
func TestCountCrashes_noHistory(t *testing.T) {
	bothWays(t, func(t *testing.T, w *world) {
		m := w.join("a", Config{})
		for _, text := range []string{"x", "17 ", "text 1700000000000 with a number"} {
			key := m.keys.crashes(text)
			w.raw.Set(bg, key, text, 0)
			assert.Equal(t, 1, w.counted(m, text, "a/1", Crashed, 0), "%q", text)
			assert.Equal(t, 1, w.counted(m, text, "a/2", Released, 0), "%q", text)
			assert.Equal(t, text, w.raw.Get(bg, key).Val())
		}
		w.raw.LPush(bg, m.keys.crashes("list"), "x")
		assert.Equal(t, 1, w.counted(m, "list", "a/1", Crashed, 0))
		assert.Empty(t, m.history(bg, &orphan{Orphan: Orphan{Job: Job{ID: "list"}}}))
		require.NoError(t, m.Stop(bg))
	})
}

// The history of a job that crashes for ever does not grow for ever, and one that may crash often is still found.
func TestCountCrashes_bounded(t *testing.T) {
	bothWays(t, func(t *testing.T, w *world) {
		m := w.join("a", Config{MaxRecoveries: NoLimit})
		lines := make([]string, maxHistory)
		for i := range lines {
			lines[i] = fmt.Sprintf("1700000000000 a/%d", i)
		}
		w.raw.Set(bg, m.keys.crashes("job"), strings.Join(lines, "\n"), 0)
		assert.Equal(t, maxHistory, w.counted(m, "job", "b/1", Crashed, time.Second))
		text := w.raw.Get(bg, m.keys.crashes("job")).Val()
		assert.Equal(t, maxHistory-1, strings.Count(text, "\n"))
		assert.True(t, strings.HasPrefix(text, lines[1]+"\n"), "the oldest made room")
		assert.True(t, strings.HasSuffix(text, " b/1"))
		assert.Len(t, m.history(bg, &orphan{Orphan: Orphan{Job: Job{ID: "job"}}}), 100)

		m.cfg.MaxRecoveries = maxHistory + 5
		assert.Equal(t, maxHistory+1, w.counted(m, "job", "b/2", Crashed, time.Second), "room for as many as the limit needs")
		require.NoError(t, m.Stop(bg))
	})
}

// Many at once, some of which have crashed before: each gets its own number, and one that can't be counted does not keep the others.
func TestCountCrashes_page(t *testing.T) {
	inBubble(t, func(w *world) {
		m := w.join("a", Config{})
		var page []*orphan
		for i := range 300 {
			for n := range i % 3 {
				w.counted(m, fmt.Sprint("job", i), fmt.Sprint("x/", n), Crashed, 0)
			}
			page = append(page, &orphan{Orphan: Orphan{Job: Job{ID: fmt.Sprint("job", i)}, Key: fmt.Sprint("a/", i)}, lease: &claimedLease{}})
		}
		page[7].grave, page[7].err = "unreadable", errors.New("unreadable")
		m.countCrashes(bg, 1_700_000_000_001, page)
		for i, o := range page {
			if i == 7 {
				assert.Zero(t, o.Recovery)
				continue
			}
			require.NoError(t, o.err)
			assert.Equal(t, i%3+1, o.Recovery, "%d", i)
		}
	})
}
