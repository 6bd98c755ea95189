//go:build unix

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"testing"

	"github.com/crashsafe/recovery"
	"github.com/crashsafe/recovery/examples/internal/fleet"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
)

func TestMain(m *testing.M) { fleet.Main(m, main) }

// firm is the workers of one test, and everything that they said.
type firm struct {
	t     *testing.T
	setup setup
	rdb   *redis.Client
	rows  *results
	insp  *recovery.Inspector
	said  *fleet.Reports[report]
}

func newFirm(t *testing.T) *firm {
	t.Helper()
	server := fleet.StartRedis(t)
	s := setup{redis: "unix://" + server.Addr, namespace: "test"}
	f := &firm{t: t, setup: s, rdb: server.Client, rows: &results{rdb: server.Client, prefix: s.prefix()},
		insp: recovery.NewInspector(server.Client, s.namespace), said: fleet.NewReports[report](t)}
	t.Cleanup(func() {
		if t.Failed() {
			workers, err := f.insp.Workers(context.Background())
			t.Logf("%+v %v", workers, err)
		}
	})
	return f
}

// proc is a worker.
type proc struct {
	*fleet.Process
	t    *testing.T
	name string
}

// hire starts a worker, and waits until it has joined.
func (f *firm) hire(name string, flags ...string) *proc {
	f.t.Helper()
	args := []string{"worker", "-redis", f.setup.redis, "-namespace", f.setup.namespace, "-name", name, "-threshold", "1s"}
	cmd := fleet.Self(f.t, append(args, flags...)...)
	cmd.Stdout = f.said.Of(name)
	p := &proc{fleet.Start(f.t, cmd), f.t, name}
	f.at(name, "", ready)
	return p
}

// close has the last worker leave, when it has retired those that died: nobody else would.
func (f *firm) close(last *proc) {
	f.t.Helper()
	fleet.Eventually(f.t, "the last worker is alone", func() bool {
		workers, err := f.insp.Workers(context.Background())
		return err == nil && len(workers) == 1
	})
	last.Leave()
}

// send gives the worker requests of its own, which it tracks, unlike those in the list.
func (p *proc) send(rs ...Request) {
	p.t.Helper()
	for _, r := range rs {
		text, err := json.Marshal(r)
		require.NoError(p.t, err)
		p.say(string(text))
	}
}

func (p *proc) say(line string) {
	p.t.Helper()
	_, err := fmt.Fprintln(p.Stdin, line)
	require.NoError(p.t, err)
}

// submit puts requests into the list.
func (f *firm) submit(rs ...Request) {
	f.t.Helper()
	for _, r := range rs {
		require.NoError(f.t, submit(context.Background(), f.rdb, f.setup.list(), r))
	}
}

// count counts what was said; "" is any.
func (f *firm) count(worker, id, point string) (n int) {
	for _, s := range f.said.All() {
		if s.Said.Point == point && (worker == "" || s.Worker == worker) && (id == "" || s.Said.ID == id) {
			n++
		}
	}
	return n
}

// at waits until a request has reached a point in a worker.
func (f *firm) at(worker, id, point string) {
	f.t.Helper()
	fleet.Eventually(f.t, fmt.Sprintf("%s of %q in %q", point, id, worker), func() bool { return f.count(worker, id, point) > 0 })
}

// results reads all rows.
func (f *firm) results() map[string]result {
	f.t.Helper()
	rows, err := f.rdb.HGetAll(context.Background(), f.rows.rows()).Result()
	require.NoError(f.t, err)
	all := map[string]result{}
	for id, text := range rows {
		var r result
		require.NoError(f.t, json.Unmarshal([]byte(text), &r))
		all[id] = r
	}
	return all
}

// calls reads every call of the Callback, by request.
func (f *firm) calls() map[string][]result {
	f.t.Helper()
	lines, err := f.rdb.LRange(context.Background(), f.rows.calls(), 0, -1).Result()
	require.NoError(f.t, err)
	all := map[string][]result{}
	for _, text := range lines {
		var r result
		require.NoError(f.t, json.Unmarshal([]byte(text), &r))
		all[r.ID] = append(all[r.ID], r)
	}
	return all
}
