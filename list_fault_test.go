package recovery

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Every script that lists need runs twice, as after a lost reply: nothing changes for anybody.
func TestListQueue_everyScriptTwice(t *testing.T) {
	for _, script := range []string{"fetch", "deliver", "claim", "take", "commit", "restore"} {
		t.Run(script, func(t *testing.T) {
			bothWays(t, func(t *testing.T, w *world) {
				w.loadScripts()
				q := NewListQueue("jobs:" + w.ns)
				twiceAlways := func(m *member) { m.faults.add(&fault{mode: twice, on: script, times: -1}) }
				a, b := w.join("a", fast(), into(q), twiceAlways), w.join("b", fast(), into(q), twiceAlways)
				w.push(q.key, "done", "released", "unbegun", "crashed", "waiting")
				leases, err := a.Fetch(bg, q, 4)
				require.NoError(t, err)
				require.Equal(t, []string{"done", "released", "unbegun", "crashed"}, payloads(leases))
				require.NoError(t, leases[0].Done())
				require.NoError(t, leases[1].Release())
				assert.Equal(t, []string{"released", "waiting"}, w.queued(q.key))
				a.unfetch(bg, leases[2:3])
				assert.Equal(t, []string{"unbegun", "released", "waiting"}, w.queued(q.key))
				require.NoError(t, w.raw.LPush(bg, a.keys.arrived(q.key), "arrived").Err())
				a.waits.putBack(bg, []*ListQueue{q})
				assert.Equal(t, []string{"arrived", "unbegun", "released", "waiting"}, w.queued(q.key))
				w.track(a, "tracked")
				a.crash()
				w.eventually(func() bool { return len(w.workers()) == 1 }, "retired")
				assert.ElementsMatch(t, []string{"payload of tracked", "crashed", "arrived", "unbegun", "released", "waiting"}, w.queued(q.key), "once each")
				assert.Equal(t, uint64(2), b.Stats().HandedBack)
				assert.Positive(t, a.faults.count(script)+b.faults.count(script), "it was called at all")
			})
		})
	}
}

// Every call in four fault modes, while jobs go through Fetch and a death: what went in is done, or in the list, or in the hands of who was told.
func TestListQueue_everyCallFails(t *testing.T) {
	calls := []string{"fetch", "deliver", "claim", "commit", "take", "beat", "zadd", "zrange", "llen", "restore", "where", "postpone"}
	modes := map[string]faultMode{"before": failBefore, "reply lost": loseReply, "slow": slow, "hangs": hang}
	for _, call := range calls {
		for name, mode := range modes {
			t.Run(call+" "+name, func(t *testing.T) {
				inBubble(t, func(w *world) {
					w.loadScripts()
					q := NewListQueue("jobs")
					a, b := w.join("a", Config{MaxRecoveries: NoLimit}, into(q)), w.join("b", Config{MaxRecoveries: NoLimit}, into(q))
					for _, m := range []*member{a, b} {
						m.faults.add(&fault{mode: mode, on: call, times: 3, delay: 3 * time.Second})
					}
					in, done := map[string]int{}, map[string]int{}
					for i := range 20 {
						in[fmt.Sprint("job-", i)]++
						w.push("jobs", fmt.Sprint("job-", i))
					}
					for round := range 6 {
						leases, err := a.Fetch(bg, q, 3)
						if err != nil {
							continue
						}
						for i, l := range leases {
							switch {
							case i == 0 && round%2 == 0:
								a.unfetch(bg, []*Lease{l})
							case i == 1 && round%2 == 1:
								_ = l.Release()
							default:
								for err = l.Done(); err != nil; err = l.Done() {
									require.NotErrorIs(t, err, ErrLost)
									time.Sleep(time.Second)
								}
								done[string(l.Job().Payload)]++
							}
						}
						in[fmt.Sprint("arrived-", round)]++
						require.NoError(t, w.raw.LPush(bg, a.keys.arrived("jobs"), fmt.Sprint("arrived-", round)).Err())
						time.Sleep(7 * time.Second)
					}
					crashed, err := a.Fetch(bg, q, 2)
					for err != nil {
						crashed, err = a.Fetch(bg, q, 2)
					}
					a.crash()
					time.Sleep(5 * time.Minute)
					out := map[string]int{}
					for job, n := range done {
						out[job] += n
					}
					for _, e := range append(w.queued("jobs"), w.queued(a.keys.arrived("jobs"))...) {
						out[e]++
					}
					assert.Equal(t, in, out, "each is there once, %d were fetched by the dead", len(crashed))
					assert.Equal(t, []string{b.WorkerID()}, w.workers())
				})
			})
		}
	}
}

// A full Redis: a Fetch moves bytes and makes none, and a hand-back makes room.
func TestListQueue_outOfMemory(t *testing.T) {
	t.Parallel()
	w := onSocket(t, startServer(t).socket)
	q := NewListQueue("jobs")
	a, dead := w.join("a", fast(), into(q)), w.join("dead", fast(), into(q))
	w.push("jobs", "orphan", "one", "two")
	_, err := dead.Fetch(bg, q, 1)
	require.NoError(t, err)
	require.NoError(t, w.raw.ConfigSet(bg, "maxmemory", "1").Err())
	leases, err := a.Fetch(bg, q, 5)
	require.NoError(t, err)
	assert.Equal(t, []string{"one", "two"}, payloads(leases))
	doneWith(t, leases)
	dead.crash()
	w.eventually(func() bool { return len(w.queued("jobs")) == 1 }, "handed back")
	assert.Equal(t, []string{"orphan"}, w.queued("jobs"))
}
