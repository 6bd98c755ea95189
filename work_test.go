package recovery

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// working runs Work in the background.
func working(m *member, ctx context.Context, src Source, n int, f func(context.Context, *Lease) error) chan error {
	ended := make(chan error, 1)
	go func() { ended <- m.Work(ctx, src, n, f) }()
	synctest.Wait()
	return ended
}

func TestWork_runsEverything(t *testing.T) {
	inBubble(t, func(w *world) {
		q := NewListQueue("jobs")
		m := w.join("a", Config{}, into(q))
		var mu sync.Mutex
		seen := map[string]int{}
		var running, most atomic.Int64
		ctx, cancel := context.WithCancel(bg)
		ended := working(m, ctx, q, 4, func(ctx context.Context, l *Lease) error {
			if n := running.Add(1); n > most.Load() {
				most.Store(n)
			}
			defer running.Add(-1)
			time.Sleep(time.Millisecond)
			mu.Lock()
			defer mu.Unlock()
			seen[string(l.Job().Payload)]++
			return nil
		})
		want := map[string]int{}
		for i := range 100 {
			want[fmt.Sprint(i)] = 1
			w.push("jobs", fmt.Sprint(i))
		}
		time.Sleep(5 * time.Second)
		mu.Lock()
		assert.Equal(t, want, seen)
		mu.Unlock()
		assert.Equal(t, int64(4), most.Load(), "as many at a time as it was told")
		assert.Empty(t, w.inflight(m.WorkerID()))
		assert.Equal(t, uint64(100), m.Stats().Done)
		cancel()
		assert.NoError(t, <-ended)
		assert.NoError(t, m.Stop(bg))
	})
}

// When ctx ends, or the Recoverer stops, what runs goes on to its end and what was not begun is in the list again, in its order.
func TestWork_drains(t *testing.T) {
	for _, how := range []string{"ctx", "quiet", "stop"} {
		t.Run(how, func(t *testing.T) {
			inBubble(t, func(w *world) {
				q := NewListQueue("jobs")
				m := w.join("a", Config{}, into(q))
				ctx, cancel := context.WithCancel(bg)
				defer cancel()
				var done atomic.Int64
				var quick atomic.Bool // at first, so that Work fetches ahead
				quick.Store(true)
				ended := working(m, ctx, q, 2, func(ctx context.Context, l *Lease) error {
					if quick.Load() {
						time.Sleep(time.Millisecond)
						return nil
					}
					time.Sleep(10 * time.Second)
					assert.NoError(t, ctx.Err(), "a job that runs may end")
					done.Add(1)
					return nil
				})
				w.push("jobs", "w1", "w2", "w3")
				time.Sleep(time.Second)
				quick.Store(false)
				w.push("jobs", "a", "b", "c", "d", "e")
				began := time.Now()
				time.Sleep(time.Second)
				assert.Len(t, w.inflight(m.WorkerID()), 5, "two run, the others were fetched ahead")
				stopped := make(chan error, 1)
				switch how {
				case "ctx":
					cancel()
				case "quiet":
					m.Quiet()
				case "stop":
					go func() { stopped <- m.Stop(bg) }()
				}
				time.Sleep(time.Second)
				assert.Equal(t, []string{"c", "d", "e"}, w.queued("jobs"))
				assert.Len(t, w.inflight(m.WorkerID()), 2)
				assert.NoError(t, <-ended)
				assert.WithinDuration(t, began.Add(10*time.Second), time.Now(), time.Second, "when the last handler did")
				assert.Equal(t, int64(2), done.Load())
				if how == "stop" {
					assert.NoError(t, <-stopped)
				}
				assert.Zero(t, m.Stats().Inflight)
				assert.Zero(t, m.Stats().Lost, "nobody lost anything")
			})
		})
	}
}

// A place is free when its handler has returned, not when Redis has confirmed it: but no more jobs are open than Work fetches ahead.
func TestWork_goesOnBeforeDoneIsConfirmed(t *testing.T) {
	inBubble(t, func(w *world) {
		q := NewListQueue("jobs")
		m := w.join("a", Config{}, into(q))
		ctx, cancel := context.WithCancel(bg)
		defer cancel()
		var runs atomic.Int64
		ended := working(m, ctx, q, 1, func(context.Context, *Lease) error { runs.Add(1); return nil })
		w.push("jobs", "warm up")
		time.Sleep(time.Second)
		m.faults.add(&fault{mode: slow, on: "commit", delay: time.Second, times: -1})
		for i := range 30 {
			w.push("jobs", fmt.Sprint(i))
		}
		time.Sleep(500 * time.Millisecond)
		assert.EqualValues(t, 1, m.Stats().Done, "the first is not confirmed yet")
		assert.EqualValues(t, 1+1+mostAhead(1), runs.Load(), "and others have run")
		assert.Len(t, w.inflight(m.WorkerID()), 1+mostAhead(1), "no more than that")
		time.Sleep(20 * time.Second)
		assert.EqualValues(t, 31, m.Stats().Done)
		assert.EqualValues(t, 31, runs.Load())
		cancel()
		assert.NoError(t, <-ended)
	})
}

// Work returns when what its handlers did is confirmed, or known not to be: a process that ends then has nothing of it repeated.
func TestWork_returnsWhenDoneIsConfirmed(t *testing.T) {
	inBubble(t, func(w *world) {
		q := NewListQueue("jobs")
		m := w.join("a", Config{}, into(q))
		ctx, cancel := context.WithCancel(bg)
		ended := working(m, ctx, q, 2, func(context.Context, *Lease) error { return nil })
		m.faults.add(&fault{mode: slow, on: "commit", delay: time.Second})
		w.push("jobs", "a")
		time.Sleep(500 * time.Millisecond)
		cancel()
		assert.NoError(t, <-ended)
		assert.Empty(t, w.inflight(m.WorkerID()))

		ctx, cancel = context.WithCancel(bg)
		defer cancel()
		ended = working(m, ctx, q, 2, func(context.Context, *Lease) error { return nil })
		m.faults.add(&fault{mode: failBefore, on: "commit"})
		w.push("jobs", "b")
		time.Sleep(500 * time.Millisecond)
		assert.Contains(t, w.logs.String(), "recovery: a job's end is not confirmed yet")
		cancel()
		assert.NoError(t, <-ended)
		time.Sleep(10 * time.Second)
		assert.Empty(t, w.inflight(m.WorkerID()), "it was repeated")
		assert.EqualValues(t, 2, m.Stats().Done)
	})
}

// What waits here, waits for 20 ms at most.
func TestWork_ahead(t *testing.T) {
	p := &pool{places: 10}
	for took, want := range map[time.Duration]int{0: 0, 1: 80, time.Millisecond: 80, 4 * time.Millisecond: 50, 19 * time.Millisecond: 10, 21 * time.Millisecond: 0, time.Hour: 0} {
		p.took.Store(int64(took))
		assert.Equal(t, want, p.ahead(), "%v", took)
	}
	p.places = 1000
	p.took.Store(1)
	assert.Equal(t, 512, p.ahead())
}

// Slow handlers: nothing waits here while a peer could run it.
func TestWork_slowHandlersFetchNotAhead(t *testing.T) {
	inBubble(t, func(w *world) {
		q := NewListQueue("jobs")
		m := w.join("a", Config{}, into(q))
		w.push("jobs", "a", "b", "c", "d")
		ctx, cancel := context.WithCancel(bg)
		ended := working(m, ctx, q, 2, func(context.Context, *Lease) error { time.Sleep(time.Second); return nil })
		time.Sleep(500 * time.Millisecond)
		assert.Equal(t, []string{"c", "d"}, w.queued("jobs"))
		time.Sleep(time.Second)
		assert.Empty(t, w.queued("jobs"))
		cancel()
		assert.NoError(t, <-ended)
	})
}

func TestWork_handlerTrouble(t *testing.T) {
	inBubble(t, func(w *world) {
		q := NewListQueue("jobs")
		m := w.join("a", Config{JobTimeout: time.Minute}, into(q))
		var mu sync.Mutex
		runs := map[string]int{}
		ctx, cancel := context.WithCancel(bg)
		ended := working(m, ctx, q, 3, func(ctx context.Context, l *Lease) error {
			what := string(l.Job().Payload)
			mu.Lock()
			runs[what]++
			n := runs[what]
			mu.Unlock()
			switch {
			case what == "error":
				return errors.New("bad luck")
			case what == "done":
				assert.NoError(t, l.Done())
			case what == "panic" && n < 3:
				panic("on purpose")
			case what == "goexit" && n < 3:
				runtime.Goexit()
			case what == "release" && n < 3:
				assert.NoError(t, l.Release())
			case what == "hang" && n < 2:
				<-ctx.Done()
				assert.ErrorIs(t, context.Cause(ctx), ErrLost)
			}
			return nil
		})
		w.push("jobs", "error", "panic", "goexit", "release", "hang", "done", "fine")
		time.Sleep(10 * time.Minute)
		mu.Lock()
		assert.Equal(t, map[string]int{"error": 1, "panic": 3, "goexit": 3, "release": 3, "hang": 2, "done": 1, "fine": 1}, runs)
		mu.Unlock()
		assert.Empty(t, w.queued("jobs"))
		assert.Empty(t, w.inflight(m.WorkerID()))
		assert.Contains(t, w.logs.String(), "bad luck")
		cancel()
		assert.NoError(t, <-ended)
		assert.Zero(t, m.Stats().Inflight)
	})
}

// A handler that ends its goroutine has its job handed back, and another goroutine takes its place.
func TestWork_goexit(t *testing.T) {
	inBubble(t, func(w *world) {
		q := NewListQueue("jobs")
		m := w.join("a", Config{}, into(q))
		var runs atomic.Int64
		ctx, cancel := context.WithCancel(bg)
		ended := working(m, ctx, q, 1, func(context.Context, *Lease) error {
			if runs.Add(1) == 1 {
				runtime.Goexit()
			}
			return nil
		})
		w.push("jobs", "a", "b")
		time.Sleep(time.Minute)
		assert.EqualValues(t, 3, runs.Load())
		assert.Empty(t, w.inflight(m.WorkerID()))
		cancel()
		assert.NoError(t, <-ended)
	})
}

// Redis goes away and comes back: Work goes on by itself.
func TestWork_survivesRedis(t *testing.T) {
	inBubble(t, func(w *world) {
		q := NewListQueue("jobs")
		m := w.join("a", Config{}, into(q))
		var done atomic.Int64
		ctx, cancel := context.WithCancel(bg)
		ended := working(m, ctx, q, 3, func(context.Context, *Lease) error { done.Add(1); return nil })
		m.faults.add(&fault{mode: failBefore, times: -1})
		w.push("jobs", "a", "b")
		time.Sleep(time.Minute)
		m.faults.clear()
		time.Sleep(time.Minute)
		assert.Equal(t, int64(2), done.Load())
		w.mini.FlushAll()
		time.Sleep(time.Minute)
		w.push("jobs", "c")
		time.Sleep(time.Minute)
		assert.Equal(t, int64(3), done.Load())
		cancel()
		assert.NoError(t, <-ended)
	})
}

// A worker that was declared dead in the middle of its work loses what it ran, and goes on with the next.
func TestWork_fenced(t *testing.T) {
	inBubble(t, func(w *world) {
		q := NewListQueue("jobs")
		m := w.join("a", Config{}, into(q))
		other := w.join("other", Config{}, into(q))
		var lost, done atomic.Int64
		ctx, cancel := context.WithCancel(bg)
		ended := working(m, ctx, q, 2, func(ctx context.Context, l *Lease) error {
			select {
			case <-ctx.Done():
				lost.Add(1)
			case <-time.After(2 * time.Minute):
				done.Add(1)
			}
			return nil
		})
		w.push("jobs", "a", "b")
		time.Sleep(time.Second)
		m.faults.add(&fault{mode: failBefore, times: -1})
		time.Sleep(40 * time.Second)
		assert.Equal(t, uint64(2), other.Stats().HandedBack)
		m.faults.clear()
		time.Sleep(5 * time.Minute)
		assert.Equal(t, int64(2), lost.Load())
		assert.Equal(t, int64(2), done.Load())
		cancel()
		assert.NoError(t, <-ended)
		require.NoError(t, m.Stop(bg))
	})
}

func TestWork_notRunning(t *testing.T) {
	inBubble(t, func(w *world) {
		q := NewListQueue("jobs")
		m := w.make("a", Config{}, into(q))
		err := m.Work(bg, q, 1, func(context.Context, *Lease) error { return nil })
		assert.ErrorIs(t, err, ErrNotRunning)
	})
}

// Capacity that others use up is waited for.
func TestWork_atCapacity(t *testing.T) {
	inBubble(t, func(w *world) {
		q := NewListQueue("jobs")
		m := w.join("a", Config{MaxInflight: 1}, into(q))
		held := w.track(m, "held")
		w.push("jobs", "a", "b")
		var done atomic.Int64
		ctx, cancel := context.WithCancel(bg)
		ended := working(m, ctx, q, 4, func(context.Context, *Lease) error { done.Add(1); return nil })
		time.Sleep(time.Second)
		assert.Zero(t, done.Load())
		doneWith(t, held)
		time.Sleep(time.Minute)
		assert.Equal(t, int64(2), done.Load())
		cancel()
		assert.NoError(t, <-ended)
	})
}
