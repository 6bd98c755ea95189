package recovery

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Looks at watched workers take the resting lock from its holder and renew it. With two of them the lock never ends, everybody who finds it
// taken puts off his next pass, and there are no more passes: a worker that nobody has on watch is never looked at.
func TestRegress_looksStarvePasses(t *testing.T) {
	inBubble(t, func(w *world) {
		cfg := Config{HeartbeatInterval: time.Second, OrphanThreshold: 4 * time.Second, SweepInterval: 3 * time.Second}
		a, b := w.join("a", cfg), w.join("b", cfg)
		time.Sleep(10 * time.Second)
		for i := range 40 {
			_, err := a.Sweep(bg) // on demand: it takes the resting lock, and gives it up. Whoever comes next makes a pass, and watches, too
			require.NoError(w.t, err)
			time.Sleep(time.Minute + time.Duration(i)*77*time.Millisecond)
			before := a.Stats().Sweeps + b.Stats().Sweeps
			time.Sleep(time.Minute)
			passes := a.Stats().Sweeps + b.Stats().Sweeps - before
			require.GreaterOrEqual(w.t, passes, uint64(10), "passes in a minute; one each SweepInterval would be 20")
		}
		dead := w.join("dead", cfg)
		w.track(dead, "job")
		dead.crash()
		time.Sleep(cfg.OrphanThreshold + 2*cfg.SweepInterval)
		require.Len(w.t, append(a.enq.ids(), b.enq.ids()...), 1, "handed back within OrphanThreshold + SweepInterval")
	})
}

// A copy of take arrives after the Enqueuer refused and untake gave the lease back: it moves the running lease into the worker's own claims. The
// holder is told ErrLost by the audit, or by Done, but nobody hands the job back for as long as the worker lives.
func TestRegress_lateTakeAfterUntake(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.join("a", Config{}), w.join("b", Config{})
		l := w.track(a, "job")[0]
		a.enq.set(func(context.Context, Orphan) error { return assert.AnError })
		require.ErrorIs(w.t, l.Release(), assert.AnError)
		require.NoError(w.t, l.Confirm(bg), "refused: it is the holder's again")
		a.enq.set(nil)
		k := w.keys(a.WorkerID())
		require.NoError(w.t, takeScript.Run(bg, w.raw, []string{k.inflight, k.jobs, k.claims}, ms(a.tm.claimTTL), Released.String(), l.member).Err())
		time.Sleep(time.Hour)
		if err := l.Done(); err != nil {
			require.ErrorIs(w.t, err, ErrLost)
			time.Sleep(time.Hour)
			assert.Equal(w.t, []string{"job"}, append(a.enq.ids(), b.enq.ids()...), "who was told ErrLost must find it handed back")
		}
	})
}
