package recovery

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Real processes on real lists, killed at random moments.

func init() {
	children["fetcher"] = childFetcher
	children["sweeper"] = childSweeper
}

// child is what both kinds of process begin with.
func child(cfg Config, q *ListQueue) (*Recoverer, orders) {
	var o orders
	if err := json.Unmarshal([]byte(os.Getenv(ordersEnv)), &o); err != nil {
		fatal(err)
	}
	rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:6379", Dialer: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", o.Socket)
	}})
	cfg.Namespace, cfg.WorkerName, cfg.MaxRecoveries = o.NS, o.Name, NoLimit
	cfg.Logger = slog.New(slog.DiscardHandler)
	r, err := New(rdb, q, cfg)
	if err == nil {
		err = r.Start(context.Background())
	}
	if err != nil {
		fatal(err)
	}
	return r, o
}

// childFetcher works off a list, and writes down what it has done before it says so to Redis.
func childFetcher() {
	q := NewListQueue(os.Getenv("RECOVERY_TEST_LIST"))
	r, o := child(fast(), q)
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
	r, _ := child(slowSweeps(), NewListQueue(os.Getenv("RECOVERY_TEST_LIST")))
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
	text, err := json.Marshal(orders{Socket: w.socket(), NS: w.ns, Name: kind, Ledger: ledger})
	require.NoError(w.t, err)
	p := &process{t: w.t, cmd: exec.Command(os.Args[0])}
	p.cmd.Env = append(os.Environ(), childEnv+"="+kind, ordersEnv+"="+string(text), "RECOVERY_TEST_LIST="+list)
	p.cmd.Stderr = os.Stderr
	p.in, err = p.cmd.StdinPipe()
	require.NoError(w.t, err)
	out, err := p.cmd.StdoutPipe()
	require.NoError(w.t, err)
	p.out = bufio.NewScanner(out)
	require.NoError(w.t, p.cmd.Start())
	w.t.Cleanup(func() { _ = p.cmd.Process.Kill(); _ = p.cmd.Wait() })
	return p
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
		require.NoError(t, w.raw.HSet(bg, w.keys(dead.WorkerID()).session, "state", "fenced").Err())
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
	sleep(bg, time.Second) // the first sweep of a new worker
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
