package recovery

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/crashsafe/recovery/internal/bufpipe"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
)

// What tests share: a fake world (miniredis in a synctest bubble, where an hour passes in milliseconds), real redis-servers, clients
// whose calls can be made to fail, and an Enqueuer that remembers.

func TestMain(m *testing.M) {
	if child := os.Getenv(childEnv); child != "" {
		runChild(child)
		os.Exit(0)
	}
	redis.SetLogger(silence{}) // connections break on purpose
	code := m.Run()
	sharedServer.stop()
	os.Exit(code)
}

type silence struct{}

func (silence) Printf(context.Context, string, ...any) {}

// world is one Redis and the workers on it.
type world struct {
	t    *testing.T
	mini *miniredis.Miniredis // nil on a real server
	dial func(ctx context.Context) (net.Conn, error)
	ns   string
	logs *lockedBuffer
	raw  *redis.Client // without faults
	all  []*member
}

// member is one worker of a world, with what makes it fail.
type member struct {
	*Recoverer
	rdb    *redis.Client
	faults *faults
	enq    *recorder
	list   *ListQueue // the Enqueuer, if set
}

// inBubble runs f with fake time.
func inBubble(t *testing.T, f func(w *world)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		m := miniredis.NewMiniRedis()
		m.ClockTTL(true)
		w := &world{t: t, mini: m, ns: "test", logs: &lockedBuffer{}}
		var conns sync.Mutex
		var open []net.Conn
		w.dial = func(context.Context) (net.Conn, error) {
			c, err := m.Dial()
			if err != nil {
				return nil, err
			}
			c = bufpipe.New(c)
			conns.Lock()
			defer conns.Unlock()
			open = append(open, c)
			return c, nil
		}
		defer func() { // go-redis forgets a connection whose dial ends after its pool was closed
			for _, c := range open {
				_ = c.Close()
			}
		}()
		w.raw = w.client(nil)
		defer m.Close()
		defer w.close()
		f(w)
	})
}

// onReal gives a world on the package's redis-server, with a namespace of its own.
func onReal(t *testing.T) *world {
	t.Helper()
	socket := sharedServer.get(t)
	return onSocket(t, socket)
}

func onSocket(t *testing.T, socket string) *world {
	t.Helper()
	w := &world{t: t, ns: "t" + newWorkerID("")[1:], logs: &lockedBuffer{}}
	w.dial = func(ctx context.Context) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", socket)
	}
	w.raw = w.client(nil)
	t.Cleanup(w.close)
	return w
}

func (w *world) client(f *faults) *redis.Client {
	rdb := redis.NewClient(&redis.Options{
		Addr:   "127.0.0.1:6379", // never dialled: Dialer decides
		Dialer: func(ctx context.Context, _, _ string) (net.Conn, error) { return w.dial(ctx) },
		// Enough, also on one core: whoever waits for a connection uses a timer that go-redis keeps for all clients, and synctest refuses one that was
		// made in another bubble.
		PoolSize: 1000,
	})
	if f != nil {
		rdb.AddHook(f)
	}
	return rdb
}

// close ends every worker that a test left, and shows the log of a test that failed.
func (w *world) close() {
	for _, m := range w.all {
		m.faults.clear()
		m.halt()
	}
	for _, m := range w.all {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		if err := m.group.wait(ctx); err != nil {
			w.t.Errorf("worker %s: %v", m.WorkerID(), err)
		}
		cancel()
		m.rdb.Close()
	}
	w.raw.Close()
	if w.t.Failed() {
		w.t.Logf("log:\n%s", w.logs.String())
	}
}

// loadScripts makes sure that a fault on a script hits the script, and not the answer that Redis does not know it.
func (w *world) loadScripts() {
	w.t.Helper()
	files, err := luaFiles.ReadDir("lua")
	require.NoError(w.t, err)
	for _, f := range files {
		require.NoError(w.t, w.raw.ScriptLoad(context.Background(), luaSource(strings.TrimSuffix(f.Name(), ".lua"))).Err())
	}
}

// halt ends the loops without a word to Redis.
func (m *member) halt() {
	m.endSweeps()
	m.endLife()
	m.endHard()
}

// fast is a config whose times are short enough for real time.
func fast() Config {
	return Config{HeartbeatInterval: 50 * time.Millisecond, OrphanThreshold: 300 * time.Millisecond, SweepInterval: 50 * time.Millisecond,
		EnqueueTimeout: time.Second}
}

// join makes a worker and starts it.
func (w *world) join(name string, cfg Config, opts ...func(*member)) *member {
	w.t.Helper()
	m := w.make(name, cfg, opts...)
	require.NoError(w.t, m.Start(w.t.Context()))
	return m
}

func (w *world) make(name string, cfg Config, opts ...func(*member)) *member {
	w.t.Helper()
	m := &member{faults: &faults{}, enq: &recorder{}}
	m.rdb = w.client(m.faults)
	for _, o := range opts {
		o(m)
	}
	cfg.Namespace, cfg.WorkerName = w.ns, name
	if cfg.Logger == nil {
		cfg.Logger = w.logger()
	}
	var enq Enqueuer = m.enq
	if m.enq.batch {
		enq = batchRecorder{m.enq}
	}
	if m.list != nil {
		enq = m.list
	}
	r, err := New(m.rdb, enq, cfg)
	require.NoError(w.t, err)
	m.Recoverer = r
	w.all = append(w.all, m)
	return m
}

func (w *world) logger() *slog.Logger {
	return slog.New(slog.NewTextHandler(w.logs, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// crash ends a worker as kill -9 does: from now on it does nothing that anybody could see.
func (m *member) crash() {
	m.faults.add(&fault{mode: failBefore, times: -1})
	m.enq.set(func(ctx context.Context, _ Orphan) error { <-ctx.Done(); return ctx.Err() })
	m.halt()
}

func (w *world) keys(id string) workerKeys { return newKeyspace(w.ns, "").worker(id) }

// fence declares a worker dead, as a sweep does once it is sure.
func (w *world) fence(id string) {
	w.t.Helper()
	k := w.keys(id)
	require.NoError(w.t, w.raw.HSet(bg, k.session, "state", "fenced").Err())
	require.NoError(w.t, w.raw.Del(bg, k.beat, k.suspect).Err())
}

// allKeys lists the namespace.
func (w *world) allKeys() []string {
	w.t.Helper()
	keys, err := w.raw.Keys(context.Background(), newKeyspace(w.ns, "").prefix+"*").Result()
	require.NoError(w.t, err)
	slices.Sort(keys)
	return keys
}

func (w *world) track(m *member, ids ...string) []*Lease {
	w.t.Helper()
	var leases []*Lease
	for _, id := range ids {
		l, err := m.Track(context.Background(), Job{ID: id, Queue: "q", Payload: []byte("payload of " + id)})
		require.NoError(w.t, err)
		leases = append(leases, l)
	}
	return leases
}

// eventually waits for a condition in real time.
func (w *world) eventually(cond func() bool, what string) {
	w.t.Helper()
	require.Eventually(w.t, cond, 20*time.Second, 5*time.Millisecond, what)
}

// inflight are the members of a worker's index.
func (w *world) inflight(id string) []string {
	w.t.Helper()
	ids, err := w.raw.ZRange(context.Background(), w.keys(id).inflight, 0, -1).Result()
	require.NoError(w.t, err)
	return ids
}

func (w *world) workers() []string {
	w.t.Helper()
	ids, err := w.raw.SMembers(context.Background(), newKeyspace(w.ns, "").workers()).Result()
	require.NoError(w.t, err)
	return ids
}

// recorder is an Enqueuer that remembers what it was given.
type recorder struct {
	mu      sync.Mutex
	batch   bool
	orphans []Orphan // accepted
	calls   []Orphan
	f       func(context.Context, Orphan) error
}

func (r *recorder) Enqueue(ctx context.Context, o Orphan) error {
	r.mu.Lock()
	f := r.f
	r.calls = append(r.calls, o)
	r.mu.Unlock()
	if f != nil {
		if err := f(ctx, o); err != nil {
			return err
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.orphans = append(r.orphans, o)
	return nil
}

type batchRecorder struct{ *recorder }

func (b batchRecorder) EnqueueAll(ctx context.Context, os []Orphan) []error {
	errs := make([]error, len(os))
	for i, o := range os {
		errs[i] = b.Enqueue(ctx, o)
	}
	return errs
}

func (r *recorder) set(f func(context.Context, Orphan) error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.f = f
}

func (r *recorder) accepted() []Orphan {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.orphans)
}

func (r *recorder) called() []Orphan {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.calls)
}

// ids are the accepted jobs, sorted.
func (r *recorder) ids() []string { return jobIDs(r.accepted()) }

func jobIDs(os []Orphan) []string {
	var ids []string
	for _, o := range os {
		ids = append(ids, o.ID)
	}
	slices.Sort(ids)
	return ids
}

// faultMode is how a call to Redis goes wrong.
type faultMode int

const (
	failBefore faultMode = iota // it never reaches Redis
	loseReply                   // executed, but the caller is told that the connection broke
	twice                       // executed twice, as by a client that retries; the second answer is returned
	slow                        // it takes a while
	hang                        // no answer until ctx ends
)

type fault struct {
	mode  faultMode
	on    string // script's stem or command in lower case; "" for all
	times int    // -1: always
	after int    // so many calls pass first
	delay time.Duration

	between func() // twice: called between the two
}

// faults is a hook of a client. It also counts.
type faults struct {
	mu    sync.Mutex
	rules []*fault
	calls []string
}

func (f *faults) add(rule *fault) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if rule.times == 0 {
		rule.times = 1
	}
	f.rules = append(f.rules, rule)
}

func (f *faults) clear() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.rules = nil
}

// count returns how often a script or command was sent.
func (f *faults) count(name string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := 0
	for _, c := range f.calls {
		if c == name {
			n++
		}
	}
	return n
}

func (f *faults) total() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.calls)
}

func (f *faults) match(names []string) *fault {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls = append(f.calls, names...)
	for _, r := range f.rules {
		if r.times != 0 && (r.on == "" || slices.Contains(names, r.on)) {
			if r.after > 0 {
				r.after--
				continue
			}
			if r.times > 0 {
				r.times--
			}
			return r
		}
	}
	return nil
}

var errInjected = fmt.Errorf("injected: %w", io.EOF)

func (f *faults) strike(ctx context.Context, names []string, next func() error) error {
	rule := f.match(names)
	if rule == nil {
		return next()
	}
	switch rule.mode {
	case loseReply:
		_ = next()
		return errInjected
	case twice:
		_ = next()
		if rule.between != nil {
			rule.between()
		}
		return next()
	case slow:
		sleep(ctx, rule.delay)
		return next()
	case hang:
		<-ctx.Done()
		return ctx.Err()
	}
	return errInjected
}

func (f *faults) DialHook(next redis.DialHook) redis.DialHook { return next }

func (f *faults) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		err := f.strike(ctx, []string{nameOf(cmd)}, func() error { return next(ctx, cmd) })
		if err != nil && cmd.Err() == nil || errors.Is(err, errInjected) {
			cmd.SetErr(err)
		}
		return err
	}
}

func (f *faults) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		var names []string
		for _, c := range cmds {
			names = append(names, nameOf(c))
		}
		err := f.strike(ctx, names, func() error { return next(ctx, cmds) })
		if errors.Is(err, errInjected) || ctx.Err() != nil && err != nil {
			for _, c := range cmds {
				c.SetErr(err)
			}
		}
		return err
	}
}

var scriptNames = map[string]string{
	joinScript.Hash(): "join", beatScript.Hash(): "beat", trackScript.Hash(): "commit", doneScript.Hash(): "commit", whereScript.Hash(): "where",
	claimScript.Hash(): "claim", takeScript.Hash(): "take", postponeScript.Hash(): "postpone", forgetScript.Hash(): "forget",
	leaveScript.Hash(): "leave", lockScript.Hash(): "lock", unlockScript.Hash(): "unlock", buryScript.Hash(): "bury",
	countScript.Hash(): "count", untakeScript.Hash(): "untake", exhumeScript.Hash(): "exhume", checkpointScript.Hash(): "checkpoint",
	fetchScript.Hash(): "fetch", deliverScript.Hash(): "deliver", restoreScript.Hash(): "restore",
}

// nameOf is the script's stem, or the command's name.
func nameOf(cmd redis.Cmder) string {
	name := strings.ToLower(cmd.Name())
	args := cmd.Args()
	switch name {
	case "hmget":
		if key, _ := args[1].(string); strings.HasSuffix(key, ":jobs") {
			return "records"
		}
	case "set", "exists", "sadd": // what scripts do, done by plain commands
		switch key, _ := args[1].(string); {
		case strings.HasSuffix(key, ":beat"):
			return "beat"
		case strings.Contains(key, ":crashes:"):
			return "count"
		case strings.HasSuffix(key, ":handed"):
			return "forget"
		}
	case "evalsha":
		return scriptNames[args[1].(string)]
	case "eval":
		return scriptNames[redis.NewScript(args[1].(string)).Hash()]
	}
	return name
}

// lockedBuffer is a log that many may write.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// collected is what events and callbacks told, from whatever goroutine. A sleep in fake time orders what happens, but the race detector knows
// locks only.
type collected[T any] struct {
	mu    sync.Mutex
	items []T
}

func (c *collected[T]) add(item T) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.items = append(c.items, item)
}

func (c *collected[T]) all() []T {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.items)
}

// server is a redis-server of the tests' own.
type server struct {
	socket string
	dir    string
	args   []string
	cmd    *exec.Cmd
}

// needServer finds the binary. Only CI insists on it.
func needServer(t *testing.T) string {
	t.Helper()
	path, err := exec.LookPath("redis-server")
	if err != nil {
		if os.Getenv("CI") != "" {
			t.Fatal("redis-server is not installed, and CI is set: `make test` installs it")
		}
		t.Skip("redis-server is not installed: `make test` installs it")
	}
	return path
}

func startServer(t *testing.T, args ...string) *server {
	t.Helper()
	needServer(t)
	dir, err := os.MkdirTemp("", "recovery")
	require.NoError(t, err)
	s := &server{dir: dir, socket: filepath.Join(dir, "redis.sock"), args: args}
	t.Cleanup(func() { s.kill(); os.RemoveAll(dir) })
	require.NoError(t, s.start())
	return s
}

// start runs the server and waits until it answers.
func (s *server) start() error {
	args := append([]string{"--port", "0", "--unixsocket", s.socket, "--dir", s.dir, "--save", "", "--loglevel", "warning"}, s.args...)
	s.cmd = exec.Command("redis-server", args...)
	s.cmd.Stderr = os.Stderr
	if err := s.cmd.Start(); err != nil {
		return err
	}
	rdb := redis.NewClient(&redis.Options{Network: "unix", Addr: s.socket, MaxRetries: -1})
	defer rdb.Close()
	var err error
	for range 500 {
		if err = rdb.Ping(context.Background()).Err(); err == nil {
			return nil
		}
		sleep(context.Background(), 10*time.Millisecond)
	}
	return fmt.Errorf("redis-server does not answer: %w", err)
}

// kill ends the server as kill -9 does. Its files stay.
func (s *server) kill() {
	if s.cmd != nil {
		_ = s.cmd.Process.Kill()
		_ = s.cmd.Wait()
		s.cmd = nil
	}
}

// shared is the package's redis-server, started by the first test that wants it.
type shared struct {
	once sync.Once
	s    *server
	err  error
}

var sharedServer shared

func (s *shared) get(t *testing.T) string {
	t.Helper()
	needServer(t)
	s.once.Do(func() {
		dir, err := os.MkdirTemp("", "recovery")
		if err != nil {
			s.err = err
			return
		}
		s.s = &server{dir: dir, socket: filepath.Join(dir, "redis.sock")}
		s.err = s.s.start()
	})
	require.NoError(t, s.err)
	return s.s.socket
}

func (s *shared) stop() {
	if s.s != nil {
		s.s.kill()
		os.RemoveAll(s.s.dir)
	}
}

// childEnv makes the test binary a worker process.
const childEnv = "RECOVERY_TEST_CHILD"

var children = map[string]func(){}

func runChild(name string) {
	f, ok := children[name]
	if !ok {
		fmt.Fprintf(os.Stderr, "no child %q\n", name)
		os.Exit(2)
	}
	f()
}
