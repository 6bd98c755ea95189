//go:build unix

package main

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/crashsafe/recovery"
	"github.com/crashsafe/recovery/examples/internal/fleet"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// The points of a run without a crash.
var (
	finePoints = []string{fetched, begun, "applying:reserve", "applied:reserve", "saved:reserve", "applying:charge", "applied:charge",
		"saved:charge", "applying:ship", "applied:ship", "saved:ship", completed}
	failingPoints = []string{fetched, begun, "applying:reserve", "applied:reserve", "saved:reserve", "applying:charge", "applied:charge",
		"saved:charge", "applying:ship", decided, "clearing:ship", "cleared:ship", "resaved:ship", "clearing:charge", "cleared:charge",
		"resaved:charge", "clearing:reserve", "cleared:reserve", "resaved:reserve", rolledBack}
)

// reachable reports whether a run comes by point q when the one before it was killed at p.
func reachable(points []string, p, q string) bool {
	kept := 0
	for i, point := range points[:slices.Index(points, p)+1] {
		if point, _, _ := strings.Cut(point, ":"); point == saved || point == resaved || point == decided {
			kept = i
		}
	}
	return q == fetched || q == begun || slices.Index(points, q) > kept
}

// Every saga is killed at one point, and its next run at another: all pairs that there are. All of them at once, because a worker that is killed takes all
// its sagas along.
func TestSaga_killedTwiceAtEveryPoint(t *testing.T) {
	t.Parallel()
	f := newFirm(t)
	f.fund()
	var orders []Order
	var first, second []string
	crashes := map[string][2]string{}
	for kind, points := range [][]string{finePoints, failingPoints} {
		for _, p := range points {
			for _, q := range points {
				if !reachable(points, p, q) {
					continue
				}
				o := fine(fmt.Sprintf("order-%d", len(orders)))
				if kind == 1 {
					o = failing(o.ID, "ship")
				}
				orders = append(orders, o)
				first, second = append(first, o.ID+"="+p), append(second, o.ID+"="+q)
				crashes[o.ID] = [2]string{p, q}
			}
		}
	}
	f.submit(orders...)
	all := []string{"-concurrency", fmt.Sprint(len(orders)), "-max-recoveries", "10"}
	for i, halts := range [][]string{first, second} {
		name := fmt.Sprintf("doomed-%d", i+1)
		p := f.hire(name, append(all, "-halt", strings.Join(halts, ","))...)
		fleet.Eventually(t, "all of "+name+" are at their point", func() bool { return f.count(name, halted) == len(orders) })
		p.Kill()
	}
	p := f.hire("survivor", all...)
	fleet.Eventually(t, "all have ended", func() bool { return f.count("survivor", completed, rolledBack) == len(orders) })
	f.close(p)
	f.judge(orders...)
	t.Logf("%d sagas, each killed twice", len(orders))

	// What a step sees: the attempt counts runs that began, recovery the crashes, once there is a checkpoint to carry it.
	for _, s := range f.said.All() {
		if s.Worker != "survivor" || s.Said.Point != completed && s.Said.Point != rolledBack {
			continue
		}
		attempt, recovered := 1, 0
		for _, point := range crashes[s.Said.Run.Saga] {
			if point != fetched {
				attempt, recovered = attempt+1, 2
			}
		}
		assert.GreaterOrEqual(t, s.Said.Run.Attempt, attempt, "%+v, killed at %v", s, crashes[s.Said.Run.Saga])
		assert.GreaterOrEqual(t, s.Said.Run.Recovery, recovered, "%+v, killed at %v", s, crashes[s.Said.Run.Saga])
	}
}

// Workers are killed at random. A saga that was there too often becomes a dead letter, and is sent back by a person.
func TestSaga_killedAtRandom(t *testing.T) {
	t.Parallel()
	f := newFirm(t)
	f.fund()
	var orders []Order
	for i := range 60 {
		o := fine(fmt.Sprintf("order-%d", i))
		if i%2 == 1 {
			o = failing(o.ID, []string{"reserve", "charge", "ship"}[i/2%3])
		}
		orders = append(orders, o)
	}
	f.submit(orders...)
	hired := 0
	hire := func() *fleet.Process {
		hired++
		return f.hire(fmt.Sprintf("worker-%d", hired), "-pace", "15ms", "-max-recoveries", "1")
	}
	procs := []*fleet.Process{hire(), hire(), hire()}
	for range 8 {
		said := len(f.said.All())
		more := 20 + rand.N(60)
		fleet.Eventually(t, "something happens", func() bool {
			return len(f.said.All()) >= said+more || f.settled() == len(orders)
		})
		i := rand.N(len(procs))
		procs[i].Kill()
		procs[i] = hire()
	}
	requeued := 0
	fleet.Eventually(t, "all have ended", func() bool {
		for _, l := range f.letters() {
			f.do("requeue " + l.Key)
			requeued++
		}
		return f.count("", completed, rolledBack) == len(orders) && f.idle()
	})
	for _, p := range procs {
		p.Leave()
	}
	f.judge(orders...)
	t.Logf("%d reports, %d sagas were sent back by a person", len(f.said.All()), requeued)
}

// settled counts the sagas that have ended, or wait for a person.
func (f *firm) settled() int {
	f.t.Helper()
	sagas := map[string]bool{}
	for _, s := range f.said.All() {
		if s.Said.Point == completed || s.Said.Point == rolledBack {
			sagas[s.Said.Run.Saga] = true
		}
	}
	for _, l := range f.letters() {
		m, _, err := read(l.Job)
		require.NoError(f.t, err)
		sagas[m.Order.ID] = true
	}
	return len(sagas)
}

// idle reports that nothing is in the queue, in flight, or waiting for a person.
func (f *firm) idle() bool {
	for range 3 { // a job that moves from one place to the other may be seen in neither, but hardly three times
		workers, err := f.insp.Workers(context.Background())
		left, err2 := f.desk.rdb.LLen(context.Background(), f.desk.list()).Result()
		if err != nil || err2 != nil || left > 0 || len(f.letters()) > 0 {
			return false
		}
		for _, w := range workers {
			if w.Inflight+w.Claimed > 0 || w.State != recovery.WorkerRunning {
				return false
			}
		}
	}
	return true
}

func TestSaga_undoKeepsFailing(t *testing.T) {
	t.Parallel()
	f := newFirm(t)
	f.fund()
	order := failing("order", "ship")
	f.do("close undo:charge")
	f.submit(order)
	p := f.hire("worker")
	l := f.letter()
	assert.Contains(t, l.LastError, "undo charge: refused: closed")
	_, s, err := read(l.Job)
	require.NoError(t, err)
	assert.Equal(t, State{Phase: stuck, Next: 1, Attempt: 1, Why: "ship: refused: not enough", Stuck: "undo charge: refused: closed"}, s)
	assert.Contains(t, f.do("letters"), l.Key+" order round 1 stuck next 1 attempt 1 crashes 0: ship: refused: not enough")
	entries, err := f.store.entries(context.Background())
	require.NoError(t, err)
	assert.Equal(t, "apply:reserve apply:charge void:ship", told(entries), "nothing is undone past the step that can't be")

	// Sent back too early, it is back here.
	f.do("requeue " + l.Key)
	fleet.Eventually(t, "a second letter", func() bool { return len(f.letters()) == 1 && f.letters()[0].Key != l.Key })
	f.do("open undo:charge")
	l = f.letter()
	f.do("requeue " + l.Key)
	assert.ErrorIs(t, f.insp.Requeue(context.Background(), l.Key, requeuer{f.desk.rdb, f.desk.list(), f.desk.prefix()}), recovery.ErrNoLetter)
	f.at("worker", "order", rolledBack)
	f.close(p)
	f.judge(order)
}

// A dead letter may be sent back twice by a Requeue that was interrupted. It must be in the queue once.
func TestRequeuer_twice(t *testing.T) {
	t.Parallel()
	f := newFirm(t)
	o := recovery.Orphan{Key: "worker/1", Job: recovery.Job{ID: "order/1", Payload: []byte(`{"Order":{"ID":"order"},"Round":1}`),
		Checkpoint: []byte(`{"Phase":"stuck","Next":1,"Attempt":4,"Why":"w","Stuck":"s"}`)}}
	for range 2 {
		require.NoError(t, requeuer{f.desk.rdb, f.desk.list(), f.desk.prefix()}.Enqueue(context.Background(), o))
	}
	got, err := f.desk.rdb.LRange(context.Background(), f.desk.list(), 0, -1).Result()
	require.NoError(t, err)
	require.Len(t, got, 1)
	job, err := format{}.Decode([]byte(got[0]))
	require.NoError(t, err)
	assert.Equal(t, "order/2", job.ID)
	assert.JSONEq(t, `{"Phase":"undoing","Next":1,"Attempt":4,"Why":"w"}`, string(job.Checkpoint))
}

func TestSaga_keepsKillingItsWorkers(t *testing.T) {
	t.Parallel()
	f := newFirm(t)
	f.fund()
	order := fine("order")
	f.submit(order)
	doom := func(name, point string) {
		p := f.hire(name, "-max-recoveries", "1", "-halt", "order="+point)
		f.at(name, "order", halted)
		p.Kill()
	}
	doom("one", "applied:charge")
	doom("two", "applied:charge")
	p := f.hire("three", "-max-recoveries", "1", "-halt", "order=applied:ship")
	l := f.letter()
	assert.Len(t, l.Crashes, 2)
	_, s, err := read(l.Job)
	require.NoError(t, err)
	assert.Equal(t, State{Phase: forward, Next: 1, Attempt: 2}, s, "where it was")
	assert.Contains(t, f.do("letters"), "crashes 2: ; recovered 1 times within 72h0m0s, the limit is 1")

	f.do("requeue " + l.Key)
	f.at("three", "order", halted)
	p.Kill() // once more: it has all its recoveries again
	p = f.hire("four", "-max-recoveries", "1")
	r := f.at("four", "order", completed)
	assert.Equal(t, 4, r.Run.Attempt)
	assert.Equal(t, 1, r.Run.Recovery)
	f.close(p)
	f.judge(order)
}

// A worker that was frozen and taken for dead wakes up in the middle of a step, after somebody else has finished its saga.
func TestSaga_frozen(t *testing.T) {
	t.Parallel()
	f := newFirm(t)
	f.fund()
	orders := []Order{fine("a"), failing("b", "ship")}
	f.submit(orders...)
	frozen := f.hire("frozen", "-halt", "a=applying:ship,b=clearing:charge")
	f.at("frozen", "a", halted)
	f.at("frozen", "b", halted)
	frozen.Signal(syscall.SIGSTOP)
	p := f.hire("survivor")
	f.at("survivor", "a", completed)
	f.at("survivor", "b", rolledBack)
	_, err := fmt.Fprintln(frozen.Stdin, "go on") // not before: a signal takes effect a little later than it is sent
	require.NoError(t, err)
	frozen.Signal(syscall.SIGCONT)
	f.at("frozen", "a", dropped)
	f.at("frozen", "b", dropped)
	frozen.Leave()
	f.close(p)
	f.judge(orders...)
}

// After Redis' clock went back, fences are smaller than those that the store has seen. The saga waits in the queue until they are not.
func TestSaga_clockWentBack(t *testing.T) {
	t.Parallel()
	f := newFirm(t)
	f.fund()
	order := fine("order")
	require.NoError(t, f.desk.rdb.HSet(context.Background(), f.store.marks("order"), "fence", 1<<52).Err())
	f.submit(order)
	p := f.hire("worker")
	f.at("worker", "order", dropped)
	require.NoError(t, f.desk.rdb.HDel(context.Background(), f.store.marks("order"), "fence").Err())
	f.at("worker", "order", completed)
	f.close(p)
	f.judge(order)
}

// SIGTERM gives running sagas some time, and the rest back. That is no crash.
func TestSaga_terminated(t *testing.T) {
	t.Parallel()
	f := newFirm(t)
	f.fund()
	order := failing("order", "ship")
	f.submit(order)
	p := f.hire("leaving", "-max-recoveries", "1", "-halt", "order=resaved:charge")
	f.at("leaving", "order", halted)
	p.Terminate()
	p = f.hire("survivor", "-max-recoveries", "1")
	r := f.at("survivor", "order", rolledBack)
	assert.Equal(t, 2, r.Run.Attempt)
	f.close(p)
	f.judge(order)
}

func TestStore_act(t *testing.T) {
	t.Parallel()
	f := newFirm(t)
	f.do("fill till 10")
	act := func(verb string, fence int64, step string, amount int) error {
		return f.store.act(context.Background(), verb, Run{Saga: "s", Fence: fence}, step, "till", amount)
	}
	till := func() int {
		n, err := f.desk.rdb.Get(context.Background(), f.store.account("till")).Int()
		require.NoError(t, err)
		return n
	}
	require.NoError(t, act(applyVerb, 20, "one", 3))
	require.NoError(t, act(applyVerb, 20, "one", 3), "the reply was lost")
	assert.Equal(t, 7, till())
	assert.ErrorIs(t, act(applyVerb, 19, "two", 1), errStale)
	assert.ErrorIs(t, act(undoVerb, 19, "one", 3), errStale)
	assert.ErrorIs(t, act(applyVerb, 21, "two", 8), errRefused, "not enough")
	require.NoError(t, act(undoVerb, 21, "two", 8), "it may have acted")
	require.NoError(t, act(undoVerb, 21, "one", 3))
	require.NoError(t, act(undoVerb, 22, "one", 3))
	assert.Equal(t, 10, till())
	assert.ErrorIs(t, act(applyVerb, 22, "one", 3), errRefused, "after it was undone")
	assert.ErrorIs(t, act(applyVerb, 22, "two", 1), errRefused, "it comes late")
	assert.Equal(t, 10, till())
}

func TestFormat_decode(t *testing.T) {
	t.Parallel()
	for _, bad := range []string{"", "no json", `{}`, `{"Order":{"ID":"a"}}`, `{"Round":1}`} {
		_, err := format{}.Decode([]byte(bad))
		assert.Error(t, err, bad)
	}
}

func TestCommand_help(t *testing.T) {
	for _, args := range [][]string{nil, {"-h"}, {"worker", "-h"}} {
		assert.ErrorIs(t, command(context.Background(), args, io.Discard), flag.ErrHelp, "%q", args)
	}
	assert.ErrorContains(t, command(context.Background(), []string{"nothing"}, io.Discard), `"nothing"`)
}

func TestDemo(t *testing.T) {
	t.Setenv(fleet.ChildEnv, "1") // the demo's workers are this binary, too
	var out bytes.Buffer
	require.NoError(t, command(context.Background(), []string{"demo"}, &out), "%s", &out)
	for _, want := range []string{"kill -9 of worker one", "two: ann applying:charge, attempt 2", "cid round 1 stuck next 1", "undo  cid      reserve"} {
		assert.Contains(t, out.String(), want)
	}
	assert.Equal(t, 1, strings.Count(out.String(), "apply ann      charge"), "%s", &out)
}
