//go:build unix

package main

import (
	"context"
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/crashsafe/recovery"
	"github.com/crashsafe/recovery/examples/internal/fleet"
	"github.com/stretchr/testify/require"
)

func TestMain(m *testing.M) { fleet.Main(m, main) }

// firm is the workers of one test, and everything that they said.
type firm struct {
	t     *testing.T
	desk  desk
	store *store
	insp  *recovery.Inspector
	said  *fleet.Reports[report]
}

func newFirm(t *testing.T) *firm {
	t.Helper()
	server := fleet.StartRedis(t)
	s := setup{redis: "unix://" + server.Addr, namespace: "test"}
	f := &firm{t: t, desk: desk{setup: s, rdb: server.Client, out: io.Discard}, store: &store{rdb: server.Client, prefix: s.prefix()},
		insp: recovery.NewInspector(server.Client, s.namespace), said: fleet.NewReports[report](t)}
	t.Cleanup(func() {
		if t.Failed() {
			workers, err := f.insp.Workers(context.Background())
			t.Logf("%+v %v", workers, err)
		}
	})
	return f
}

// hire starts a worker, and waits until it has joined.
func (f *firm) hire(name string, flags ...string) *fleet.Process {
	f.t.Helper()
	args := []string{"worker", "-redis", f.desk.redis, "-namespace", f.desk.namespace, "-name", name, "-threshold", "1s"}
	cmd := fleet.Self(f.t, append(args, flags...)...)
	cmd.Stdout = f.said.Of(name)
	p := fleet.Start(f.t, cmd)
	f.at(name, "", ready)
	return p
}

// close has the last worker leave, when it has retired those that died: nobody else would.
func (f *firm) close(last *fleet.Process) {
	f.t.Helper()
	fleet.Eventually(f.t, "the last worker is alone", func() bool {
		workers, err := f.insp.Workers(context.Background())
		return err == nil && len(workers) == 1
	})
	last.Leave()
}

// count counts the sagas of which a worker said one of points; "" is any worker.
func (f *firm) count(worker string, points ...string) int {
	sagas := map[string]bool{}
	for _, s := range f.said.All() {
		for _, p := range points {
			if s.Said.Point == p && (worker == "" || s.Worker == worker) {
				sagas[s.Said.Run.Saga] = true
			}
		}
	}
	return len(sagas)
}

// at waits until a saga has reached a point in a worker.
func (f *firm) at(worker, saga, point string) (found report) {
	f.t.Helper()
	fleet.Eventually(f.t, fmt.Sprintf("%s of %s in %s", point, saga, worker), func() bool {
		for _, s := range f.said.All() {
			if s.Worker == worker && s.Said.Run.Saga == saga && s.Said.Point == point {
				found = s.Said
				return true
			}
		}
		return false
	})
	return found
}

// do runs a command of the program.
func (f *firm) do(line string) string {
	f.t.Helper()
	var out strings.Builder
	d := f.desk
	d.out = &out
	words := strings.Fields(line)
	require.NoError(f.t, d.do(context.Background(), words[0], words[1:]), line)
	return out.String()
}

func (f *firm) submit(orders ...Order) {
	f.t.Helper()
	for _, o := range orders {
		require.NoError(f.t, submit(context.Background(), f.desk.rdb, f.desk.list(), o))
	}
}

func (f *firm) letters() []recovery.DeadLetter {
	f.t.Helper()
	letters, err := f.insp.DeadLetters(context.Background(), 0, 1000)
	require.NoError(f.t, err)
	return letters
}

// letter waits for the only dead letter.
func (f *firm) letter() recovery.DeadLetter {
	f.t.Helper()
	fleet.Eventually(f.t, "a dead letter", func() bool { return len(f.letters()) > 0 })
	require.Len(f.t, f.letters(), 1)
	return f.letters()[0]
}
