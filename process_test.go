package recovery

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
)

// Worker processes: the test binary, run again, as a real worker that can really be killed. It takes its orders from the
// environment and its stdin, and answers on its stdout. It ends when its stdin does, so that none outlives its test.

// orders are what a worker process shall do.
type orders struct {
	Socket, NS, Name string
	Jobs             []string // to be tracked at once
	Kill             string   // where it kills itself: "before X" or "after X", X a script, command, or "enqueue"
	Panic            bool     // run the first job in Do, and panic in it
	Stop             bool     // when told "stop": Stop at once, with jobs running
	Backoff          time.Duration
	Ledger           string // file to which the Enqueuer appends a line a call, fsynced; or the handler of a fetcher
	List             string // of a fetcher or a sweeper
}

const ordersEnv = "RECOVERY_TEST_ORDERS"

func init() { children["worker"] = childWorker }

// process is a worker process as its test sees it.
type process struct {
	t    *testing.T
	name string
	cmd  *exec.Cmd
	in   io.WriteCloser
	out  *bufio.Scanner
	err  *bytes.Buffer
}

func (w *world) socket() string { return sharedServer.s.socket }

// fork starts a worker process and waits until it is ready, unless it is to die before that.
func (w *world) fork(o orders) *process {
	w.t.Helper()
	o.NS = w.ns
	if o.Socket == "" {
		o.Socket = w.socket()
	}
	p := startChild(w.t, "worker", o.Name, o)
	if o.Kill == "" || !strings.Contains(o.Kill, "join") && !strings.Contains(o.Kill, "sadd") && !strings.Contains(o.Kill, "commit") {
		p.expect("ready")
	}
	return p
}

// startChild runs the test binary as a process of a kind, with its orders.
func startChild(t *testing.T, kind, name string, orders any) *process {
	t.Helper()
	text, err := json.Marshal(orders)
	require.NoError(t, err)
	p := &process{t: t, name: name, cmd: exec.Command(os.Args[0]), err: &bytes.Buffer{}}
	p.cmd.Env = append(os.Environ(), childEnv+"="+kind, ordersEnv+"="+string(text))
	p.cmd.Stderr = p.err
	p.in, err = p.cmd.StdinPipe()
	require.NoError(t, err)
	out, err := p.cmd.StdoutPipe()
	require.NoError(t, err)
	p.out = bufio.NewScanner(out)
	require.NoError(t, p.cmd.Start())
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill()
		_ = p.cmd.Wait()
		if t.Failed() && p.err.Len() > 0 {
			t.Logf("process %s:\n%s", name, p.err)
		}
	})
	return p
}

// readOrders is how a process learns what to do.
func readOrders(o any) {
	if err := json.Unmarshal([]byte(os.Getenv(ordersEnv)), o); err != nil {
		fatal(err)
	}
}

// endWithStdin is for processes that read nothing else from it: none outlives its test.
func endWithStdin() {
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(0)
	}()
}

// socketClient is a client of the server at a unix socket.
func socketClient(socket string) *redis.Client {
	return redis.NewClient(&redis.Options{Addr: "127.0.0.1:6379", Dialer: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", socket)
	}})
}

func (p *process) expect(prefix string) string {
	p.t.Helper()
	require.True(p.t, p.out.Scan(), "process ended instead of saying %q:\n%s", prefix, p.err)
	require.Truef(p.t, strings.HasPrefix(p.out.Text(), prefix), "%q, not %q", p.out.Text(), prefix)
	return strings.TrimPrefix(p.out.Text(), prefix)
}

func (p *process) say(line string) {
	p.t.Helper()
	_, err := fmt.Fprintln(p.in, line)
	require.NoError(p.t, err)
}

func (p *process) signal(s syscall.Signal) {
	p.t.Helper()
	require.NoError(p.t, p.cmd.Process.Signal(s))
}

// died waits until the process was killed.
func (p *process) died() {
	p.t.Helper()
	overdue := time.AfterFunc(30*time.Second, func() { _ = p.cmd.Process.Signal(syscall.SIGTERM) })
	defer overdue.Stop()
	for p.out.Scan() {
	}
	var exit *exec.ExitError
	require.ErrorAs(p.t, p.cmd.Wait(), &exit)
	status, ok := exit.Sys().(syscall.WaitStatus)
	require.True(p.t, ok && status.Signaled() && status.Signal() == syscall.SIGKILL, "ended with %v, not by SIGKILL:\n%s", exit, p.err)
}

// ledger is the file to which Enqueuers append.
func ledger(t *testing.T) string { return filepath.Join(t.TempDir(), "ledger") }

// enqueued reads a ledger: "key job reason recovery" a call.
func enqueued(t *testing.T, path string) []string {
	t.Helper()
	text, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	require.NoError(t, err)
	return strings.Split(strings.TrimSpace(string(text)), "\n")
}

// ledgerEnqueuer writes down every call before it answers.
func ledgerEnqueuer(path string) EnqueuerFunc {
	return func(_ context.Context, o Orphan) error {
		f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
		if err != nil {
			return err
		}
		_, err = fmt.Fprintf(f, "%s %s %s %d\n", o.Key, o.ID, o.Reason, o.Recovery)
		return errors.Join(err, f.Sync(), f.Close())
	}
}

// killer kills its own process right before or after a call.
type killer struct {
	before, after string
	reached       func() // dieHere, or what comes to it
}

func newKiller(where string) *killer {
	k := &killer{reached: dieHere}
	if name, ok := strings.CutPrefix(where, "before "); ok {
		k.before = name
	} else if name, ok := strings.CutPrefix(where, "after "); ok {
		k.after = name
	}
	return k
}

func dieHere() {
	_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	select {}
}

func (k *killer) around(cmds []redis.Cmder, next func() error) error {
	for _, c := range cmds {
		if nameOf(c) == k.before {
			k.reached()
			break
		}
	}
	err := next()
	for _, c := range cmds {
		if nameOf(c) == k.after && !isNoScript(c.Err()) && !isNoScript(err) && (k.after != "claim" || tookLeases(c)) {
			k.reached()
			break
		}
	}
	return err
}

// callback is a failpoint around code of the user.
func (k *killer) callback(name string, f func() error) error {
	if k.before == name {
		k.reached()
	}
	defer func() { // also if it panics
		if k.after == name {
			k.reached()
		}
	}()
	return f()
}

// tookLeases tells a claim that took something from one that only suspected.
func tookLeases(c redis.Cmder) bool {
	answer, err := c.(*redis.Cmd).Slice()
	return err == nil && answer[0] == int64(verdictDead)
}

func (k *killer) DialHook(next redis.DialHook) redis.DialHook { return next }

func (k *killer) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		return k.around([]redis.Cmder{cmd}, func() error { return next(ctx, cmd) })
	}
}

func (k *killer) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		return k.around(cmds, func() error { return next(ctx, cmds) })
	}
}

// childWorker is the process.
func childWorker() {
	var o orders
	readOrders(&o)
	rdb := socketClient(o.Socket)
	k := newKiller(o.Kill)
	rdb.AddHook(k)
	enq := ledgerEnqueuer(o.Ledger)
	cfg := fast()
	cfg.Namespace, cfg.WorkerName = o.NS, o.Name
	if o.Backoff > 0 {
		cfg.Backoff = func(int) time.Duration { return o.Backoff }
	}
	r, err := New(rdb, EnqueuerFunc(func(ctx context.Context, or Orphan) error {
		return k.callback("enqueue", func() error { return enq(ctx, or) })
	}), cfg)
	if err == nil {
		err = r.Start(context.Background())
	}
	if err != nil {
		fatal(err)
	}
	if o.Panic {
		job := Job{ID: o.Jobs[0]}
		go func() {
			_ = guard(func() {
				_ = r.Do(context.Background(), job, func(context.Context) error { panic("on purpose") })
			})
		}()
		o.Jobs = nil
	}
	var leases []*Lease
	for _, id := range o.Jobs {
		l, err := r.Track(context.Background(), Job{ID: id, Payload: []byte(id)})
		if err != nil {
			fatal(err)
		}
		leases = append(leases, l)
		l.Context() // so that it can be cancelled
	}
	fmt.Println("ready " + r.WorkerID())
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		switch in.Text() {
		case "report": // a zombie tells what it was told
			for _, l := range leases {
				select {
				case <-l.Context().Done():
				case <-time.After(10 * time.Second):
				}
				fmt.Printf("lease %v %v\n", context.Cause(l.Context()), l.Done())
			}
			l, err := r.Track(context.Background(), Job{ID: "again"})
			if err == nil {
				err = l.Done()
			}
			fmt.Printf("again %v %s\n", err, r.WorkerID())
		case "stop":
			ctx, cancel := context.WithCancel(context.Background())
			cancel()
			fmt.Println("stopped", r.Stop(ctx))
		}
	}
}

func fatal(err error) {
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}
