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
	"time"

	"github.com/crashsafe/recovery"
	"github.com/crashsafe/recovery/examples/internal/fleet"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// How often a request is sent, and its callback runs, if its first worker is killed at a point.
type crashPoint struct {
	point       string
	sent, calls int
	over        bool // there is no second run
}

var (
	confirmPoints = []crashPoint{
		{sending, 1, 1, false},
		{"hang", 2, 1, false}, // no answer yet
		{answered, 2, 1, false},
		{confirmed, 2, 1, false},
		{called, 2, 2, false}, // the window: the callback ran, and nothing says so
		{done, 1, 1, true},
	}
	donePoints = []crashPoint{
		{sending, 1, 1, false},
		{"hang", 2, 1, false},
		{answered, 2, 1, false},
		{done, 1, 0, true}, // the window: the answer is lost
		{called, 1, 1, true},
	}
)

func TestPool_killedAtEveryPoint(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		flags  []string
		points []crashPoint
	}{
		"confirm first": {nil, confirmPoints},
		"done first":    {[]string{"-done-first"}, donePoints},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f, s := newFirm(t), newTarget(t)
			var halts, hanging []string
			var fromList, own []Request
			want := map[string]crashPoint{}
			for _, c := range test.points {
				for _, way := range []string{"list", "own"} {
					id := fmt.Sprintf("%s-%s", way, c.point)
					path := "/ok"
					if c.point == "hang" {
						path, hanging = "/hang", append(hanging, id)
					}
					halts = append(halts, id+"="+c.point)
					want[id] = c
					if r := s.request(path, id); way == "list" {
						fromList = append(fromList, r)
					} else {
						r.Header.Del("X-Latin") // stdin is JSON
						own = append(own, r)
					}
				}
			}
			f.submit(fromList...)
			p := f.hire("doomed", append(test.flags, "-places", "20", "-halt", strings.Join(halts, ","))...)
			p.send(own...)
			fleet.Eventually(t, "all are at their points", func() bool {
				for _, id := range hanging {
					if s.hits(id) == 0 {
						return false
					}
				}
				return f.count("doomed", "", halted) == len(want)-len(hanging)
			})
			p.Kill()
			s.letGo(hanging...)
			p = f.hire("survivor", test.flags...)
			again := 0
			for _, c := range want {
				if !c.over {
					again++
				}
			}
			fleet.Eventually(t, "what was lost is done", func() bool {
				return f.count("survivor", "", done) == again && f.count("survivor", "", called) == again
			})
			f.close(p)
			for _, r := range slices.Concat(fromList, own) {
				c := want[r.ID]
				s.requireExact(r, c.sent)
				calls := f.calls()[r.ID]
				require.Len(t, calls, c.calls, "callbacks of %s", r.ID)
				if c.calls == 2 {
					assert.Less(t, calls[0].Fence, calls[1].Fence)
					assert.Equal(t, calls[1], f.results()[r.ID], "the later run's")
				}
				if c.calls > 0 {
					assert.Equal(t, "answer to "+r.ID, string(f.results()[r.ID].Body))
				}
			}
			f.requireIdle()
		})
	}
}

// requireIdle is for the end, when all workers have left.
func (f *firm) requireIdle() {
	f.t.Helper()
	left, err := f.rdb.LLen(context.Background(), f.setup.list()).Result()
	require.NoError(f.t, err)
	assert.Zero(f.t, left, "in the list")
	workers, err := f.insp.Workers(context.Background())
	require.NoError(f.t, err)
	assert.Empty(f.t, workers, "in the registry")
	letters, err := f.insp.DeadLetters(context.Background(), 0, 10)
	require.NoError(f.t, err)
	assert.Empty(f.t, letters)
}

// A worker is frozen while its requests are under way, and wakes up after somebody else has them done. It gets its answers, and must not call back.
func TestPool_frozen(t *testing.T) {
	t.Parallel()
	for name, flags := range map[string][]string{"confirm first": nil, "done first": {"-done-first"}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f, s := newFirm(t), newTarget(t)
			waiting, arrived := s.request("/hang", "waiting"), s.request("/ok", "arrived")
			f.submit(waiting, arrived)
			frozen := f.hire("frozen", append(flags, "-halt", "arrived="+answered)...)
			f.at("frozen", "arrived", halted)
			fleet.Eventually(t, "the server has it", func() bool { return s.hits("waiting") == 1 })
			frozen.Signal(syscall.SIGSTOP)
			// A signal takes effect a little later than it is sent. What the frozen worker must not see while it still runs comes when a peer has its
			// requests: the answer, which then waits in its socket, and the word to go on.
			p := f.hire("survivor", flags...)
			f.at("survivor", "waiting", sending)
			s.letGo("waiting")
			for _, id := range []string{"waiting", "arrived"} {
				f.at("survivor", id, done)
				f.at("survivor", id, called)
			}
			frozen.say("go on")
			frozen.Signal(syscall.SIGCONT)
			f.at("frozen", "waiting", lost)
			f.at("frozen", "arrived", lost)
			frozen.Leave()
			f.close(p)
			assert.Zero(t, f.count("frozen", "", called))
			for _, r := range []Request{waiting, arrived} {
				s.requireExact(r, 2)
				require.Len(t, f.calls()[r.ID], 1, "callbacks of %s", r.ID)
				assert.Equal(t, "survivor", f.results()[r.ID].Worker)
			}
			f.requireIdle()
		})
	}
}

// Frozen between Confirm and the callback: it runs twice, and the fence decides which result stays.
func TestPool_frozenAfterConfirm(t *testing.T) {
	t.Parallel()
	f, s := newFirm(t), newTarget(t)
	r := s.request("/ok", "late")
	f.submit(r)
	frozen := f.hire("frozen", "-halt", "late="+confirmed)
	f.at("frozen", "late", halted)
	frozen.Signal(syscall.SIGSTOP)
	p := f.hire("survivor")
	f.at("survivor", "late", done)
	frozen.say("go on")
	frozen.say("go on") // once more does no harm
	frozen.Signal(syscall.SIGCONT)
	fleet.Eventually(t, "it gives up", func() bool { return f.count("frozen", "late", lost)+f.count("frozen", "late", givenBack) > 0 })
	frozen.Leave()
	f.close(p)
	s.requireExact(r, 2)
	assert.Equal(t, "survivor", f.results()["late"].Worker)
	f.requireIdle()
}

func TestResults_write(t *testing.T) {
	t.Parallel()
	f := newFirm(t)
	write := func(fence int64, status int) error {
		return f.rows.write(context.Background(), Answer{Request: Request{ID: "a"}, Status: status, Fence: fence})
	}
	require.NoError(t, write(20, 200))
	assert.ErrorIs(t, write(19, 500), errStale)
	assert.NoError(t, f.rows.keep(context.Background(), Answer{Request: Request{ID: "a"}, Status: 500, Fence: 19}), "it is answered")
	assert.Equal(t, 200, f.results()["a"].Status)
	require.NoError(t, write(20, 200), "the reply was lost")
	require.NoError(t, write(21, 202))
	assert.Equal(t, 202, f.results()["a"].Status)
	assert.Len(t, f.calls()["a"], 5)
}

// SIGTERM: nothing new is taken, what ends in time is called back, and the rest is handed back.
func TestPool_terminated(t *testing.T) {
	t.Parallel()
	f, s := newFirm(t), newTarget(t)
	inTime, tooSlow, own := s.request("/hang", "in-time"), s.request("/hang", "too-slow"), s.request("/hang", "own")
	own.Header.Del("X-Latin") // stdin is JSON
	f.submit(inTime, tooSlow)
	p := f.hire("leaving", "-grace", "2s")
	p.send(own)
	fleet.Eventually(t, "all are under way", func() bool { return s.hits("in-time")+s.hits("too-slow")+s.hits("own") == 3 })
	p.Signal(syscall.SIGTERM)
	f.at("leaving", "", quiet)
	later, refusedOne := s.request("/ok", "later"), s.request("/ok", "refused")
	f.submit(later)
	p.send(refusedOne)
	f.at("leaving", "refused", refused)
	s.letGo("in-time")
	f.at("leaving", "in-time", done)
	require.Equal(t, "exit status 0", p.Wait())
	assert.Equal(t, 1, f.count("leaving", "", done))
	assert.Equal(t, 1, f.count("leaving", "too-slow", lost))
	assert.Equal(t, 1, f.count("leaving", "own", lost))
	assert.Zero(t, s.hits("later"), "taken from the list by a worker that is quiet")
	waiting, err := f.rdb.LLen(context.Background(), f.setup.list()).Result()
	require.NoError(t, err)
	assert.EqualValues(t, 3, waiting, "handed back at once, without a threshold")

	s.letGo("too-slow", "own")
	p = f.hire("next")
	fleet.Eventually(t, "all are done", func() bool { return f.count("next", "", done) == 3 })
	f.close(p)
	s.requireExact(inTime, 1)
	s.requireExact(tooSlow, 2)
	s.requireExact(own, 2)
	s.requireExact(later, 1)
	assert.Zero(t, s.hits("refused"))
	for _, r := range []Request{inTime, tooSlow, own, later} {
		assert.Len(t, f.calls()[r.ID], 1, "callbacks of %s", r.ID)
	}
	f.requireIdle()
}

func TestPool_bounded(t *testing.T) {
	t.Parallel()
	f, s := newFirm(t), newTarget(t)
	const places, all = 4, 20
	var ids []string
	for i := range all {
		id := fmt.Sprint("r", i)
		ids = append(ids, id)
		f.submit(s.request("/hang", id))
	}
	p := f.hire("worker", "-places", fmt.Sprint(places))
	under := func() int { s.mu.Lock(); defer s.mu.Unlock(); return s.now }
	fleet.Eventually(t, "all places are taken", func() bool { return under() == places })
	for _, id := range ids {
		s.letGo(id)
	}
	fleet.Eventually(t, "all are done", func() bool { return f.count("worker", "", done) == all })
	f.close(p)
	assert.Equal(t, places, s.highest)
	assert.Len(t, f.results(), all)
	f.requireIdle()
}

// A request that has no answer is called back, too, with an error; and it is not sent again by the pool.
func TestPool_noAnswer(t *testing.T) {
	t.Parallel()
	f, s := newFirm(t), newTarget(t)
	slow := s.request("/hang", "slow")
	slow.Timeout = 200 * time.Millisecond
	nobody := s.request("/ok", "nobody")
	nobody.URL = "http://127.0.0.1:1/" // tcpmux: nobody listens there
	f.submit(slow, nobody)
	p := f.hire("worker")
	fleet.Eventually(t, "both are done", func() bool { return f.count("worker", "", done) == 2 })
	f.close(p)
	s.requireExact(slow, 1)
	assert.Contains(t, f.results()["slow"].Err, "deadline exceeded")
	assert.Contains(t, f.results()["nobody"].Err, "connection refused")
	assert.Len(t, f.calls()["slow"], 1)
	f.requireIdle()
}

// Workers are killed at random. Every request has a result; a callback that ran twice was in the window.
func TestPool_killedAtRandom(t *testing.T) {
	t.Parallel()
	f, s := newFirm(t), newTarget(t)
	const all = 300
	for i := range all {
		f.submit(s.request("/ok", fmt.Sprint("r", i)))
	}
	hired := 0
	hire := func() *proc { hired++; return f.hire(fmt.Sprint("worker-", hired), "-places", "3") }
	procs := []*proc{hire(), hire()}
	dead := map[string]bool{}
	for range 6 {
		said := len(f.said.All())
		more := 20 + rand.N(60)
		fleet.Eventually(t, "something happens", func() bool { return len(f.said.All()) >= said+more || len(f.results()) == all })
		i := rand.N(len(procs))
		procs[i].Kill()
		dead[procs[i].name] = true
		procs[i] = hire()
	}
	fleet.Eventually(t, "all have a result", func() bool { return len(f.results()) == all })
	for _, p := range procs {
		p.Leave()
	}
	// What a dead worker had called back and not ended may have gone back to the list after all had a result.
	p := f.hire("last")
	fleet.Eventually(t, "nothing is left", func() bool {
		workers, err := f.insp.Workers(context.Background())
		left, err2 := f.rdb.LLen(context.Background(), f.setup.list()).Result()
		return err == nil && err2 == nil && left == 0 && len(workers) == 1 && workers[0].Inflight == 0
	})
	p.Leave()
	f.requireIdle()
	twice := 0
	for id, calls := range f.calls() {
		for i, c := range calls[:len(calls)-1] {
			twice++
			window := dead[c.Worker] || f.count(c.Worker, id, lost) > 0 // killed, or taken for dead on a busy machine
			assert.True(t, window, "the callback of %s ran in %s, which lived, and again in %s", id, c.Worker, calls[i+1].Worker)
			assert.Zero(t, f.count(c.Worker, id, done), "%s was done", id)
			assert.Less(t, c.Fence, calls[i+1].Fence)
		}
	}
	t.Logf("%d requests, 6 kills, %d callbacks ran again", all, twice)
}

func TestRequest_roundTrip(t *testing.T) {
	t.Parallel()
	s := newTarget(t)
	r := s.request("/ok", "id \x00\xff")
	r.Timeout = time.Minute
	job, err := r.job()
	require.NoError(t, err)
	element, err := format{}.Encode(recovery.Orphan{Job: job})
	require.NoError(t, err)
	back, err := format{}.Decode(element)
	require.NoError(t, err)
	assert.Equal(t, job, back)
	got, err := decode(back.Payload)
	require.NoError(t, err)
	assert.Equal(t, r, got)
}

func TestRequest_validate(t *testing.T) {
	t.Parallel()
	for want, r := range map[string]Request{
		"ID is empty":      {URL: "http://a"},
		`URL is "ftp://a"`: {ID: "a", URL: "ftp://a"},
		"invalid method":   {ID: "a", URL: "http://a", Method: "a b"},
		"Timeout is -1s":   {ID: "a", URL: "http://a", Timeout: -time.Second},
	} {
		_, err := r.job()
		assert.ErrorContains(t, err, want)
	}
	_, err := format{}.Decode([]byte("no gob"))
	assert.ErrorContains(t, err, "can't be read")
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
	for _, want := range []string{"two: lost hook-1", "three: called hook-1", `hook-1 200 "thank you"`} {
		assert.Contains(t, out.String(), want)
	}
	assert.Equal(t, 1, strings.Count(out.String(), ": called hook-1"))
}
