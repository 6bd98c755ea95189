package main

import (
	"math/rand/v2"
	"syscall"
	"testing"
	"time"

	"github.com/crashsafe/recovery/examples/internal/fleet"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A worker dies at each point of its way, in its second block, and a peer that starts later finds what it left.
func TestKilledAt(t *testing.T) {
	for _, c := range []struct {
		point        string
		count        int64
		done, inprog int // rows that it leaves, at least; of the others in its block some may have ended before
	}{
		{point: "locked", count: 2, done: 5},
		{point: "tracked", count: 2, done: 5},
		{point: "marked", count: 2, done: 5},
		{point: "committed", count: 2, done: 5, inprog: 5},
		{point: "working", count: 8, done: 5, inprog: 1},
		{point: "worked", count: 8, done: 5, inprog: 1},
		{point: "written", count: 8, done: 8},
	} {
		t.Run(c.point, func(t *testing.T) {
			t.Parallel()
			b := newBank(t, 20)
			b.startDoomed(&child{DieAt: c.point, DieCount: c.count})
			b.eventually("PostgreSQL has noticed", func() bool {
				return b.count("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in transaction%'") == 0
			})
			assert.GreaterOrEqual(t, b.inStatus("done"), c.done)
			assert.GreaterOrEqual(t, b.inStatus("inprog"), c.inprog)
			if c.done+c.inprog == 5 {
				assert.Zero(t, b.inStatus("inprog"), "what was not committed is not marked")
			}
			peer := b.start(&child{})
			b.awaitAllDone()
			b.judge()
			peer.Leave()
		})
	}
}

// A sweeper dies when it has put rows back and the library does not know it yet: the call is repeated by the next one.
func TestKilledAt_putback(t *testing.T) {
	t.Parallel()
	b := newBank(t, 20)
	b.startDoomed(&child{DieAt: "committed", DieCount: 2})
	b.startDoomed(&child{DieAt: "putback", DieCount: 1})
	peer := b.start(&child{})
	b.awaitAllDone()
	b.judge()
	peer.Leave()
}

// A worker is frozen when it is about to write a result, until a peer has done all its rows. Its write must be refused.
func TestFrozen_staleResult(t *testing.T) {
	t.Parallel()
	b := newBank(t, 20)
	zombie := b.startFrozen(&child{FreezeAt: "worked", FreezeCount: 3})
	peer := b.start(&child{})
	b.awaitAllDone()
	zombie.Signal(syscall.SIGCONT)
	b.eventually("refused", func() bool { return zombie.Says("result refused") > 0 })
	b.judge()
	zombie.Leave()
	b.judge() // the peer retires what the zombie left
	peer.Leave()
	b.judge()
}

// A worker is frozen with a mark that is not committed, for so long that PostgreSQL ends its transaction.
func TestFrozen_transactionEnded(t *testing.T) {
	t.Parallel()
	b := newBank(t, 20)
	zombie := b.startFrozen(&child{FreezeAt: "marked", FreezeCount: 2})
	peer := b.start(&child{})
	b.awaitAllDone() // while it is frozen
	zombie.Signal(syscall.SIGCONT)
	b.eventually("told", func() bool { return zombie.Says("take rows") > 0 })
	b.judge()
	zombie.Leave()
	b.judge() // the peer retires what the zombie left
	peer.Leave()
	b.judge()
}

// The same, but PostgreSQL waits, and the mark is committed long after the worker was declared dead. The worker then dies for
// good: only the hand-back that had to wait for its commit can know of these rows.
func TestFrozen_lateCommit(t *testing.T) {
	t.Parallel()
	b := newBank(t, 20)
	b.settings.Idle = time.Hour
	zombie := b.startFrozen(&child{FreezeAt: "marked", FreezeCount: 2, DieAt: "committed", DieCount: 2})
	peer := b.start(&child{})
	b.eventually("the hand-back waits for the mark", func() bool {
		return b.count(`SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'`) > 0
	})
	zombie.Signal(syscall.SIGCONT)
	require.Equal(t, "signal: killed", zombie.Wait())
	b.awaitAllDone()
	b.judge()
	peer.Leave()
}

// Four workers; every moment one is killed, wherever it is, and another one takes its place. Now and then PostgreSQL drops all
// connections: the answers to some commits are lost.
func TestChaos(t *testing.T) {
	t.Parallel()
	b := newBank(t, 600)
	b.settings.Block = 10
	points := []string{"locked", "tracked", "marked", "committed", "working", "worked", "written", "putback"}
	recruit := func() *fleet.Process {
		if rand.N(2) == 0 {
			return b.start(&child{})
		}
		return b.start(&child{DieAt: points[rand.N(len(points))], DieCount: 1 + rand.N[int64](12)})
	}
	workers := make([]*fleet.Process, 4)
	for i := range workers {
		workers[i] = recruit()
	}
	kills, drops := 0, 0
	for kills < 30 && b.inStatus("done") < b.rows {
		time.Sleep(rand.N(200 * time.Millisecond)) // the chaos itself, nothing is waited for
		i := rand.N(len(workers))
		workers[i].Kill()
		workers[i] = recruit()
		if kills++; kills%4 == 0 {
			drops += b.count(`SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
				WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'`)
		}
	}
	for _, p := range workers {
		p.Kill()
	}
	survivor := b.start(&child{})
	b.awaitAllDone()
	b.judge()
	survivor.Leave()
	t.Logf("%d rows, %d kills, %d connections dropped", b.rows, kills, drops)
	assert.Greater(t, kills, 15)
}
