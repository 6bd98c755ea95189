package recovery

import (
	"strings"
	"time"

	"github.com/stretchr/testify/assert"
)

// chaosTally counts what a chaos test did and found. Every test logs its own as one line, and internal/tools/chaos.sh adds them up.
type chaosTally struct {
	kills, stops, restarts, freezes, failovers, migrations, jumps, jobs int
	lost, doubles, explained                                            int

	// worst is the longest time from a kill to the first Enqueue of a lease of the one who was killed. Beyond five times bound it is a fault;
	// between them it is only reported: a machine that others share may be late, and several who sweep may die one after the other. bound is 0
	// where Redis itself is away for a while.
	worst, bound time.Duration

	recovered, late int // leases of those who were killed; and those that took longer than OrphanThreshold + SweepInterval

	outages []outage
}

// outage is a time in which Redis may forget what it has confirmed, except to those that waited for replicas.
type outage struct{ from, to time.Time }

// measure looks for the longest recovery.
func (y *chaosTally) measure(fates map[string]*chaosFate, killed map[string]time.Time, promised time.Duration) {
	for key, f := range fates {
		worker := workerOf(key)
		at, ok := killed[worker[:max(0, strings.LastIndex(worker, "-"))]]
		if ok && f.taken && f.takenAt.After(at) {
			took := f.takenAt.Sub(at)
			y.worst = max(y.worst, took)
			y.recovered++
			y.late += count(took > promised)
		}
	}
}

// excused reports a Done that Redis may have forgotten: it does not wait for replicas, and that is documented.
func (c *chaos) excused(f *chaosFate) bool {
	for _, o := range c.tally.outages {
		if f.doneAt.After(o.from) && f.doneAt.Before(o.to) {
			return true
		}
	}
	return false
}

// recoveryBound is OrphanThreshold + SweepInterval for a worker that dies; and the time of a claim, because those who sweep die, too.
func recoveryBound(cfg Config) time.Duration {
	return cfg.OrphanThreshold + cfg.SweepInterval + cfg.timing().claimTTL
}

// report logs the line.
func (c *chaos) report() {
	c.t.Helper()
	y := c.tally
	if y.bound > 0 {
		assert.LessOrEqual(c.t, y.worst, 5*y.bound, "from a kill to Enqueue")
	}
	c.t.Logf("chaos: kills=%d stops=%d restarts=%d freezes=%d failovers=%d migrations=%d jumps=%d jobs=%d lost=%d doubles=%d explained=%d recovered=%d late=%d worst=%.3fs bound=%.3fs",
		y.kills, y.stops, y.restarts, y.freezes, y.failovers, y.migrations, y.jumps, y.jobs, y.lost, y.doubles, y.explained, y.recovered, y.late, y.worst.Seconds(), y.bound.Seconds())
}
