package recovery

import (
	"bufio"
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Real processes on real lists, killed at random moments.

func init() {
	children["fetcher"] = childFetcher
	children["sweeper"] = childSweeper
}

// listChild is what both kinds of process begin with.
func listChild(cfg Config) (*Recoverer, *ListQueue, orders) {
	var o orders
	readOrders(&o)
	q := NewListQueue(o.List)
	cfg.Namespace, cfg.WorkerName, cfg.MaxRecoveries = o.NS, o.Name, NoLimit
	cfg.Logger = slog.New(slog.DiscardHandler)
	r, err := New(socketClient(o.Socket), q, cfg)
	if err == nil {
		err = r.Start(context.Background())
	}
	if err != nil {
		fatal(err)
	}
	return r, q, o
}

// childFetcher works off a list, and writes down what it has done before it says so to Redis.
func childFetcher() {
	endWithStdin()
	r, q, o := listChild(fast())
	f, err := os.OpenFile(o.Ledger, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		fatal(err)
	}
	fmt.Println("ready")
	err = r.Work(context.Background(), q, 8, func(_ context.Context, l *Lease) error {
		if rand.IntN(4) == 0 {
			time.Sleep(time.Duration(rand.IntN(3000)) * time.Microsecond)
		}
		_, err := fmt.Fprintf(f, "%s\n", l.Job().Payload)
		return err
	})
	fatal(err)
}

// childSweeper sweeps, from when it is told to, until it is killed.
func childSweeper() {
	r, _, _ := listChild(slowSweeps())
	fmt.Println("ready")
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		fmt.Println("sweeping")
		for {
			if report, _ := r.Sweep(context.Background()); report.Skipped {
				time.Sleep(time.Millisecond) // the lock of one that was killed
			}
		}
	}
}

// slowSweeps is for workers that sweep only on demand, and whose claims run out soon.
func slowSweeps() Config {
	return Config{HeartbeatInterval: time.Minute, OrphanThreshold: 5 * time.Minute, SweepInterval: time.Hour, GCLockTTL: 10 * time.Millisecond,
		EnqueueTimeout: 10 * time.Millisecond, MaxRecoveries: NoLimit}
}

// spawn starts a child of a kind.
func (w *world) spawn(kind, list, ledger string) *process {
	w.t.Helper()
	return startChild(w.t, kind, kind, orders{Socket: w.socket(), NS: w.ns, Name: kind, Ledger: ledger, List: list})
}

func readLines(t *testing.T, path string) map[string]int {
	t.Helper()
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	count := map[string]int{}
	for _, line := range strings.Split(strings.TrimSuffix(string(text), "\n"), "\n") {
		count[line]++
	}
	return count
}

// A busy worker that fetches is killed at a random moment, 200 times. Every job that went in is done or still queued, in the end all are done.
func TestFetch_killedAtRandom(t *testing.T) {
	t.Parallel()
	w := onReal(t)
	list, ledger := "jobs:"+w.ns, filepath.Join(t.TempDir(), "done")
	q := NewListQueue(list)
	survivor := w.join("survivor", func() Config { c := fast(); c.MaxRecoveries = NoLimit; return c }(), into(q))
	in := 0
	feed := func(n int) {
		values := make([]any, n)
		for i := range values {
			in++
			values[i] = fmt.Sprint("job-", in)
		}
		require.NoError(t, w.raw.LPush(bg, list, values...).Err())
	}
	const kills = 200
	next := w.spawn("fetcher", list, ledger)
	next.expect("ready")
	for range kills {
		if w.raw.LLen(bg, list).Val() < 500 { // busy, but not beyond what this machine can do
			feed(200)
		}
		p := next
		next = w.spawn("fetcher", list, ledger) // starts while the other one works
		time.Sleep(time.Duration(rand.IntN(30_000)) * time.Microsecond)
		p.signal(syscall.SIGKILL)
		_ = p.cmd.Wait()
		next.expect("ready")
	}
	next.signal(syscall.SIGKILL)
	_ = next.cmd.Wait()

	// The dead are recovered, then one lives to do the rest.
	w.eventually(func() bool { return len(w.workers()) == 1 }, "all dead workers are retired")
	done, queued := readLines(t, ledger), map[string]int{}
	for _, e := range w.queued(list) {
		queued[e]++
	}
	for i := range in {
		job := fmt.Sprint("job-", i+1)
		require.Positive(t, done[job]+queued[job], "%s is lost", job)
		require.LessOrEqual(t, queued[job], 1, "%s is in the list twice", job)
	}
	t.Logf("in %d, done %d, queued %d, handed back %d", in, len(done), len(queued), survivor.Stats().HandedBack)
	require.Positive(t, survivor.Stats().HandedBack, "or nobody died with a job")
	last := w.spawn("fetcher", list, ledger)
	last.expect("ready")
	w.eventually(func() bool { return len(readLines(t, ledger)) == in }, "all are done")
	assert.Empty(t, w.queued(list))
	assert.Empty(t, w.queued(survivor.keys.arrived(list)))
}

// Sweepers are killed at a random moment of their pass, 100 times. No job comes back twice, and none is missing.
func TestListQueue_sweeperKilledAtRandom(t *testing.T) {
	t.Parallel()
	w := onReal(t)
	list := "jobs:" + w.ns
	q := NewListQueue(list)
	in := 0
	next := w.spawn("sweeper", list, "")
	next.expect("ready")
	returned := map[string]int{}
	for round := range 100 {
		dead := w.join(fmt.Sprint("dead", round), slowSweeps(), into(q))
		var jobs []Job
		for range 300 {
			in++
			jobs = append(jobs, Job{ID: fmt.Sprint(in), Payload: fmt.Append(nil, "job-", in)})
		}
		if round%2 == 0 {
			_, err := dead.TrackAll(bg, jobs...)
			require.NoError(t, err)
		} else {
			own := "own:" + w.ns // so that it does not take what the consumer below counts
			for _, j := range jobs {
				require.NoError(t, w.raw.LPush(bg, own, j.Payload).Err())
			}
			for n := 0; n < len(jobs); {
				leases, err := dead.Fetch(bg, NewListQueue(own), len(jobs))
				require.NoError(t, err)
				n += len(leases)
			}
		}
		dead.crash()
		w.fence(dead.WorkerID())
		p := next
		next = w.spawn("sweeper", list, "")
		p.say("sweep")
		p.expect("sweeping")
		time.Sleep(time.Duration(rand.IntN(60_000)) * time.Microsecond)
		p.signal(syscall.SIGKILL)
		_ = p.cmd.Wait()
		next.expect("ready")
	}
	last := w.join("last", slowSweeps(), into(q))
	w.eventually(func() bool {
		_, err := last.Sweep(bg)
		require.NoError(t, err)
		for _, id := range w.workers() {
			if strings.HasPrefix(id, "dead") {
				return false
			}
		}
		return true
	}, "everything is swept")
	for _, key := range []string{list, "own:" + w.ns} {
		for _, e := range w.queued(key) {
			returned[e]++
		}
	}
	for i := range in {
		require.Equal(t, 1, returned[fmt.Sprint("job-", i+1)], "job-%d", i+1)
	}
	t.Logf("in %d, back %d, by the last sweeper %d", in, len(returned), last.Stats().HandedBack)
	require.Positive(t, last.Stats().HandedBack, "or no sweeper was killed before its end")
	require.Less(t, last.Stats().HandedBack, uint64(in), "or none was killed after its beginning")
}

// A Fetch that waits costs one connection and no commands.
func TestFetch_idle(t *testing.T) {
	t.Parallel()
	w := onSocket(t, startServer(t).socket)
	q := NewListQueue("jobs")
	cfg := Config{HeartbeatInterval: time.Hour, OrphanThreshold: 4 * time.Hour, InflightTTL: 100 * time.Hour, SweepInterval: time.Hour}
	m := w.join("a", cfg, into(q))
	got := make(chan []*Lease, 1)
	go func() {
		leases, _ := m.Fetch(bg, q, 1)
		got <- leases
	}()
	blocked := func() (n int) {
		list, err := w.raw.ClientList(bg).Result()
		require.NoError(t, err)
		for _, line := range strings.Split(list, "\n") {
			if strings.Contains(line, "flags=b") {
				n++
			}
		}
		return n
	}
	w.eventually(func() bool { return blocked() == 1 }, "one connection waits")
	commands := func() (n int) {
		info, err := w.raw.Info(bg, "stats").Result()
		require.NoError(t, err)
		_, rest, _ := strings.Cut(info, "total_commands_processed:")
		_, err = fmt.Sscan(rest, &n)
		require.NoError(t, err)
		return n
	}
	m.endSweeps()
	<-m.sweepEnded
	before := commands()
	sleep(bg, 10*time.Second)
	assert.Equal(t, 1, commands()-before, "but for the one that asks")
	assert.Equal(t, 1, blocked())
	w.push("jobs", "a")
	leases := <-got
	assert.Equal(t, []string{"a"}, payloads(leases))
	doneWith(t, leases)
	go func() { _, _ = m.Fetch(bg, q, 1) }()
	w.eventually(func() bool { return blocked() == 1 }, "and again")
	require.NoError(t, m.Stop(bg))
	w.eventually(func() bool { return blocked() == 0 }, "Stop leaves nothing behind")
}

// A producer that is a person at a prompt.
func TestFetch_redisCLI(t *testing.T) {
	t.Parallel()
	w := onReal(t)
	if _, err := exec.LookPath("redis-cli"); err != nil {
		if os.Getenv("CI") != "" {
			t.Fatal("redis-cli is not installed, and CI is set: it comes with redis-server")
		}
		t.Skip("redis-cli is not installed")
	}
	list := "jobs:" + w.ns
	m := w.join("a", fast(), into(NewListQueue(list)))
	require.NoError(t, exec.Command("redis-cli", "-s", w.socket(), "LPUSH", list, "by hand", "two").Run())
	leases, err := m.Fetch(bg, NewListQueue(list), 5)
	require.NoError(t, err)
	assert.Equal(t, []string{"by hand", "two"}, payloads(leases))
	doneWith(t, leases)
}

// A worker that waits for a list is frozen, and Redis, which can't know, moves the next element for it. A peer that waits, too, is not told of it,
// but the next sweep puts it first in line.
func TestFetch_frozenWhileItWaits(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	w := onSocket(t, s.socket)
	list, ledger := "jobs", filepath.Join(t.TempDir(), "done")
	q := NewListQueue(list)
	frozen := startChild(t, "fetcher", "fetcher", orders{Socket: s.socket, NS: w.ns, Name: "frozen", Ledger: ledger, List: list})
	frozen.expect("ready")
	w.eventually(func() bool { return strings.Contains(w.raw.Info(bg, "clients").Val(), "blocked_clients:1") }, "it waits")
	frozen.signal(syscall.SIGSTOP)
	survivor := w.join("survivor", fast(), into(q))
	got := make(chan string, 1)
	go func() {
		if leases, err := survivor.Fetch(bg, q, 1); assert.NoError(t, err) {
			assert.NoError(t, leases[0].Done())
			got <- string(leases[0].Job().Payload)
		}
	}()
	w.eventually(func() bool { return strings.Contains(w.raw.Info(bg, "clients").Val(), "blocked_clients:2") }, "and so does its peer, behind it")
	w.push(list, "job")
	select {
	case job := <-got:
		assert.Equal(t, "job", job)
	case <-time.After(20 * time.Second):
		t.Fatal("nobody has the job")
	}
	frozen.signal(syscall.SIGCONT)
	w.push(list, "next")
	w.eventually(func() bool { return strings.Contains(fileText(ledger), "next") }, "it goes on")
	assert.Equal(t, map[string]int{"next": 1}, readLines(t, ledger))
}

func fileText(path string) string {
	text, _ := os.ReadFile(path)
	return string(text)
}
