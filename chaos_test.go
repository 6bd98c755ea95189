package recovery

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Chaos: real worker processes on a real redis-server, killed at every named step and at random, frozen, cut off, and with a Redis that is
// killed, frozen, emptied and filled up. The judge is a book that is not in Redis: a file to which every process appends what it was told,
// before it does anything with it. It can't be wrong about a job: a line is written by one call, and outlives its process.
//
// RECOVERY_CHAOS=n is the long form: n times as many rounds.

func chaosRounds(short int) int {
	n, _ := strconv.Atoi(os.Getenv("RECOVERY_CHAOS"))
	return short * max(1, n)
}

func init() {
	children["chaos-steps"] = chaosSteps
	children["chaos-soak"] = chaosSoak
}

// chaosOrders are what a process shall do.
type chaosOrders struct {
	Network, Addr, NS, Name, Book string
	List                          string // the Enqueuer is this list
	Kill                          string // "before X" or "after X", X a script, a command or a callback
	Nth                           int    // at its nth time
	Prey                          string // worker to be swept
	Calm                          bool   // no Release and no panic: every job is done by its holder
	Cluster                       []string
	Tag                           string // HashTag
	Replicas                      int    // WaitReplicas
	Store                         string // directory for payloads: it has every callback, see dress
}

// queue is the list, with a format if the process is dressed.
func (o chaosOrders) queue(k *killer) *ListQueue {
	if o.Store != "" {
		return NewListQueue(o.List, ElementFormat(steppedFormat{k}))
	}
	return NewListQueue(o.List)
}

// client is the process's own.
func (o chaosOrders) client() redis.UniversalClient {
	const limit = 500 * time.Millisecond
	if len(o.Cluster) > 0 {
		return redis.NewClusterClient(&redis.ClusterOptions{Addrs: o.Cluster, DialTimeout: limit, ReadTimeout: limit})
	}
	return redis.NewClient(&redis.Options{Network: o.Network, Addr: o.Addr, DialTimeout: limit, ReadTimeout: limit})
}

// config is the one of chaosConfig; on a Cluster a failover must not look like a death.
func (o chaosOrders) config() Config {
	cfg := chaosConfig(o.NS, o.Name)
	cfg.HashTag, cfg.WaitReplicas = o.Tag, o.Replicas
	if len(o.Cluster) > 0 {
		cfg.HeartbeatInterval, cfg.OrphanThreshold, cfg.SweepInterval = 100*time.Millisecond, 600*time.Millisecond, 100*time.Millisecond
	}
	return cfg
}

func chaosConfig(ns, name string) Config {
	return Config{Namespace: ns, WorkerName: name, HeartbeatInterval: 50 * time.Millisecond, OrphanThreshold: 300 * time.Millisecond,
		SweepInterval: 50 * time.Millisecond, EnqueueTimeout: 300 * time.Millisecond, MaxRecoveries: NoLimit, Logger: slog.New(slog.DiscardHandler)}
}

// book is the judge's. A line is an op, a lease, a job, and the time in microseconds:
//
//	P  a producer put it into a list
//	T  Track or Fetch has returned it
//	W  the work is done; Done is about to be called
//	D  Done returned nil
//	L  Done, Release or Do returned ErrLost; or Release returned nil
//	U  Done returned another error: unknown
//	C  a checkpoint was confirmed
//	E  the Enqueuer has taken it
//	K  a process kills itself
//	X  the test kills the process of this name
//
// Every line is fsynced before its writer goes on.
type book struct {
	mu   sync.Mutex
	file *os.File
}

func openBook(path string) (*book, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	return &book{file: f}, err
}

func (b *book) write(op, lease, job string) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	// A kill may tear a write where a page of the file ends. A line has an end of its own, and does not hang on the one before it.
	_, err := fmt.Fprintf(b.file, "\n%s %s %s %d .", op, lease, job, time.Now().UnixMicro())
	return errors.Join(err, b.file.Sync())
}

// note is write for a process that can do nothing about an error but die.
func (b *book) note(op, lease, job string) {
	if err := b.write(op, lease, job); err != nil {
		fatal(err)
	}
}

// finish notes the work, calls Done, and notes what it was told.
func (b *book) finish(l *Lease) {
	key, job := l.ID(), jobName(l)
	b.note("W", key, job)
	err := l.Done()
	switch {
	case err == nil:
		b.note("D", key, job)
	case errors.Is(err, ErrLost):
		b.note("L", key, job)
	default:
		b.note("U", key, job)
	}
}

func (b *book) release(l *Lease) {
	key, job := l.ID(), jobName(l)
	if err := l.Release(); err == nil || errors.Is(err, ErrLost) {
		b.note("L", key, job)
		return
	}
	b.finish(l)
}

// enqueuer takes jobs into the book.
func (b *book) enqueuer() EnqueuerFunc {
	var mu sync.Mutex
	refused := map[string]bool{}
	return func(_ context.Context, o Orphan) error {
		mu.Lock()
		first := !refused[o.Key]
		refused[o.Key] = true
		mu.Unlock()
		switch {
		case strings.HasPrefix(o.ID, "poison"):
			return Permanent(errors.New("never"))
		case first && (strings.HasPrefix(o.ID, "keep") || strings.HasPrefix(o.ID, "later")):
			return errors.New("not now")
		}
		return b.write("E", o.Key, o.ID)
	}
}

// jobName is the job's name where it has one, else what it says.
func jobName(l *Lease) string {
	if l.fetch > 0 {
		return string(l.Job().Payload)
	}
	return l.Job().ID
}

// nthKiller kills its own process at the nth time that a step is reached, and writes it down first.
func nthKiller(b *book, where string, nth int) *killer {
	k := newKiller(where)
	var left atomic.Int64
	left.Store(int64(max(1, nth)))
	k.reached = func() {
		if left.Add(-1) == 0 {
			_ = b.write("K", strings.ReplaceAll(k.before+"|"+k.after, " ", "-"), "step")
			dieHere()
		}
	}
	return k
}

// chaosChild is what every process begins with. It ends with its stdin.
func chaosChild() (*Recoverer, chaosOrders, *book, *killer) {
	endWithStdin()
	redis.SetLogger(silence{})
	var o chaosOrders
	readOrders(&o)
	b, err := openBook(o.Book)
	if err != nil {
		fatal(err)
	}
	k := nthKiller(b, o.Kill, o.Nth)
	rdb := o.client()
	rdb.AddHook(k)
	takes := b.enqueuer()
	var enq Enqueuer = EnqueuerFunc(func(ctx context.Context, or Orphan) error {
		return k.callback("enqueue", func() error { return takes(ctx, or) })
	})
	cfg := o.config()
	if o.Store != "" {
		if cfg, err = dress(cfg, k, o.Store); err != nil {
			fatal(err)
		}
		enq = steppedBatch{k, takes}
	}
	if o.List != "" {
		enq = o.queue(k)
	}
	r, err := New(rdb, enq, cfg)
	if err != nil {
		fatal(err)
	}
	for range 100 { // Redis may be away just now
		if err = r.Start(bg); err == nil {
			break
		}
	}
	if err != nil {
		fatal(err)
	}
	r.waits.client, r.waits.own = dedicated(rdb) // as the first wait would
	r.waits.client.AddHook(k)
	r.group.spawn(func() { <-r.life.Done(); r.waits.close() })
	return r, o, b, k
}

// chaosSteps goes through every step of the protocol once, and is killed at one of them.
func chaosSteps() {
	r, o, b, k := chaosChild()
	track := func(id string) *Lease {
		l, err := r.Track(bg, Job{ID: id + o.Name, Payload: []byte(id + o.Name)})
		if err != nil {
			fatal(err)
		}
		b.note("T", l.ID(), id+o.Name)
		return l
	}
	a, held := track("a"), track("held")
	held.Context()
	if err := a.Checkpoint(bg, []byte("half")); err != nil {
		fatal(err)
	}
	b.note("C", a.ID(), "a"+o.Name)
	b.finish(a)
	b.release(track("back"))
	b.release(track("keep"))
	_ = guard(func() {
		_ = r.Do(bg, Job{ID: "panics" + o.Name, Payload: []byte("panics" + o.Name)}, func(context.Context) error {
			b.note("T", "?", "panics"+o.Name)
			return k.callback("do", func() error { panic("on purpose") })
		})
	})
	if o.List != "" {
		q := o.queue(k)
		leases, err := r.Fetch(bg, q, 2)
		if err != nil {
			fatal(err)
		}
		for i, l := range leases {
			b.note("T", l.ID(), jobName(l))
			if i == 0 {
				b.finish(l)
			}
		}
		go func() { // something for Stop to end
			for {
				more, err := r.Fetch(bg, q, 100)
				if err != nil {
					return
				}
				for _, l := range more {
					b.note("T", l.ID(), jobName(l))
				}
			}
		}()
	}
	for range 200 { // until the prey is swept
		_, _ = r.Sweep(bg)
		if is, err := r.rdb.SIsMember(bg, r.keys.workers(), o.Prey).Result(); err == nil && !is {
			break
		}
		sleep(bg, 5*time.Millisecond)
	}
	for range 200 { // until the Fetch waits
		if o.List == "" || len(r.waits.lists()) > 0 {
			break
		}
		sleep(bg, 5*time.Millisecond)
	}
	beats := r.Stats().Beats
	for range 200 { // until two more beats
		if r.Stats().Beats >= beats+2 {
			break
		}
		sleep(bg, 5*time.Millisecond)
	}
	ctx, cancel := context.WithTimeout(bg, 20*time.Millisecond)
	defer cancel()
	_ = r.Stop(ctx)
	_ = b.write("K", "end", "end")
	dieHere()
}

// chaosSoak does whatever workers do, until it is killed.
func chaosSoak() {
	r, o, b, _ := chaosChild()
	fmt.Println("ready")
	var n atomic.Int64
	if o.List != "" {
		go func() {
			for {
				_ = r.Work(bg, NewListQueue(o.List), 4, func(_ context.Context, l *Lease) error {
					b.note("T", l.ID(), jobName(l))
					chaosWork()
					if rand.IntN(20) == 0 && !o.Calm {
						b.release(l)
					} else {
						b.finish(l)
					}
					return nil
				})
			}
		}()
	}
	for range 4 {
		go func() {
			for {
				id := fmt.Sprintf("%s-%d-%d", o.Name, os.Getpid(), n.Add(1))
				chaosOne(r, b, id, o.Calm)
			}
		}()
	}
	select {}
}

func chaosWork() {
	d := time.Duration(rand.IntN(3000)) * time.Microsecond
	if rand.IntN(20) == 0 {
		d = time.Duration(rand.IntN(400)) * time.Millisecond
	}
	sleep(bg, d)
}

func chaosOne(r *Recoverer, b *book, id string, calm bool) {
	job := Job{ID: id, Payload: []byte(id)}
	if !calm && rand.IntN(20) == 0 {
		_ = guard(func() {
			_ = r.Do(bg, job, func(context.Context) error {
				b.note("T", "?", id)
				chaosWork()
				panic("on purpose")
			})
		})
		return
	}
	l, err := r.Track(bg, job)
	if err != nil {
		sleep(bg, 5*time.Millisecond)
		return
	}
	b.note("T", l.ID(), id)
	if rand.IntN(5) == 0 && l.Checkpoint(bg, []byte(id)) == nil {
		b.note("C", l.ID(), id)
	}
	chaosWork()
	if !calm && rand.IntN(15) == 0 {
		b.release(l)
	} else {
		b.finish(l)
	}
}

// chaos is a test's side of it.
type chaos struct {
	*world
	rdb    redis.UniversalClient // to look at Redis with
	path   string
	book   *book
	orders chaosOrders // of every process
	list   string
	calm   bool
	count  int
	tally  chaosTally
}

func newChaos(w *world, network, addr string) *chaos {
	w.t.Helper()
	c := &chaos{world: w, rdb: w.raw, orders: chaosOrders{Network: network, Addr: addr}, path: filepath.Join(w.t.TempDir(), "book")}
	var err error
	c.book, err = openBook(c.path)
	require.NoError(w.t, err)
	w.t.Cleanup(func() { c.book.file.Close() })
	return c
}

// spawn starts a process.
func (c *chaos) spawn(kind string, o chaosOrders) *process {
	c.t.Helper()
	c.count++
	if o.Addr == "" {
		o.Network, o.Addr = c.orders.Network, c.orders.Addr
	}
	o.Cluster, o.Tag, o.Replicas, o.Store = c.orders.Cluster, c.orders.Tag, c.orders.Replicas, c.orders.Store
	o.NS, o.Book, o.List, o.Calm = c.ns, c.path, c.list, c.calm
	o.Name = fmt.Sprint("p", c.count)
	return startChild(c.t, kind, o.Name, o)
}

func (c *chaos) soak() *process {
	c.t.Helper()
	p := c.spawn("chaos-soak", chaosOrders{})
	p.expect("ready")
	return p
}

// kill kills, and notes when.
func (c *chaos) kill(p *process) {
	c.t.Helper()
	c.book.note("X", p.name, "killed")
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
	c.tally.kills++
}

// survivor joins in this process. On a busy machine a disk that is slow may keep it waiting: then it tries again.
func (c *chaos) survivor(name string) *member {
	c.t.Helper()
	m := c.make(name, c.dressed(chaosConfig(c.ns, name)), func(m *member) {
		m.enq.set(c.book.enqueuer())
		if c.list != "" {
			m.list = c.queue()
		}
	})
	startUntil(c.t, m)
	return m
}

// dressed gives cfg what the scene's processes have, with no step to die at.
func (c *chaos) dressed(cfg Config) Config {
	c.t.Helper()
	if c.orders.Store != "" {
		var err error
		cfg, err = dress(cfg, newKiller(""), c.orders.Store)
		require.NoError(c.t, err)
	}
	return cfg
}

func (c *chaos) queue() *ListQueue {
	return chaosOrders{List: c.list, Store: c.orders.Store}.queue(newKiller(""))
}

// chaosFate is what the book says of one lease.
type chaosFate struct {
	job                                      string
	tracked, worked, done, lost, taken, dead bool
	doneAt, takenAt                          time.Time // takenAt: the first time
}

// chaosTotals are what a test can show.
type chaosTotals struct{ tracked, worked, done, lost, taken, dead, checkpoints int }

// judge reads the book. Nobody is alive but survivors that hold nothing.
func (c *chaos) judge() chaosTotals {
	c.t.Helper()
	letters := c.letters()
	fates, killed := map[string]*chaosFate{}, map[string]time.Time{}
	handed, panicked, produced := map[string]bool{}, map[string]bool{}, map[string]bool{}
	var sum chaosTotals
	for e := range c.entries() {
		op, key, job := e.op, e.key, e.job
		switch {
		case op == "P":
			produced[job] = true
			continue
		case op == "X":
			killed[key] = e.at
			continue
		case op == "K":
			continue
		case key == "?":
			panicked[job] = true
			continue
		}
		if fates[key] == nil {
			fates[key] = &chaosFate{job: job}
		}
		switch fate := fates[key]; op {
		case "T":
			fate.tracked = true
			sum.tracked++
		case "W":
			fate.worked = true
			sum.worked++
		case "D":
			fate.done, fate.doneAt = true, e.at
			sum.done++
		case "L":
			fate.lost = true
			sum.lost++
		case "E":
			if !fate.taken {
				fate.takenAt = e.at
			}
			fate.taken, handed[job] = true, true
			sum.taken++
		case "C":
			sum.checkpoints++
		}
	}
	for key := range letters {
		sum.dead++
		if fates[key] != nil {
			fates[key].dead = true
		}
	}
	c.tally.jobs += sum.tracked
	cfg := c.orders.config()
	c.tally.measure(fates, killed, cfg.OrphanThreshold+cfg.SweepInterval)
	if c.list != "" {
		c.judgeList(fates, panicked, produced)
		return sum
	}
	for key, f := range fates {
		if f.done && (f.taken || f.dead) && c.excused(f) {
			c.tally.explained++
		} else {
			c.tally.doubles += count(!assert.False(c.t, f.done && (f.taken || f.dead), "silent double: %s %+v", key, *f))
		}
		if f.tracked && !f.taken && !f.dead {
			c.tally.lost += count(!assert.True(c.t, f.worked && !f.lost, "lost: %s %+v", key, *f))
		}
	}
	for job := range panicked {
		c.tally.lost += count(!assert.True(c.t, handed[job], "lost: %s panicked, and was not handed back", job))
	}
	return sum
}

// entry is a line of the book.
type entry struct {
	op, key, job string
	at           time.Time
}

// entries reads the book.
func (c *chaos) entries() iter.Seq[entry] {
	c.t.Helper()
	file, err := os.Open(c.path)
	require.NoError(c.t, err)
	return func(yield func(entry) bool) {
		defer file.Close()
		lines := bufio.NewScanner(file)
		for lines.Scan() {
			f := strings.Fields(lines.Text())
			if len(f) == 0 || f[len(f)-1] != "." { // its writer was killed at it
				continue
			}
			require.Len(c.t, f, 5, "line %q", lines.Text())
			us, err := strconv.ParseInt(f[3], 10, 64)
			require.NoError(c.t, err)
			if !yield(entry{f[0], f[1], f[2], time.UnixMicro(us)}) {
				return
			}
		}
		require.NoError(c.t, lines.Err())
	}
}

func count(is bool) int {
	if is {
		return 1
	}
	return 0
}

// letters are the leases that are in the dead letters.
func (c *chaos) letters() map[string]bool {
	c.t.Helper()
	all := map[string]bool{}
	letters, err := NewInspector(c.rdb, c.ns, InspectHashTag(c.orders.Tag)).DeadLetters(bg, 0, 10000)
	require.NoError(c.t, err)
	for _, l := range letters {
		assert.True(c.t, strings.HasPrefix(l.Cause, "refused"), "dead letter of %s: %s", l.Key, l.Cause)
		all[l.Key] = true
	}
	return all
}

// judgeList: a job is done once, or in the list once.
func (c *chaos) judgeList(fates map[string]*chaosFate, panicked, produced map[string]bool) {
	c.t.Helper()
	queued := map[string]int{}
	for _, key := range []string{c.list, newKeyspace(c.ns, c.orders.Tag).arrived(c.list)} {
		all, err := c.rdb.LRange(bg, key, 0, -1).Result()
		require.NoError(c.t, err)
		for _, e := range all {
			queued[e]++
		}
	}
	done, maybe := map[string]int{}, map[string]bool{}
	for _, f := range fates {
		produced[f.job] = produced[f.job] || f.tracked
		if f.done {
			done[f.job]++
		} else if f.worked && !f.lost {
			maybe[f.job] = true
		}
	}
	for job := range panicked {
		produced[job] = true
	}
	for job := range produced {
		n := done[job] + queued[job]
		c.tally.doubles += count(!assert.LessOrEqual(c.t, n, 1, "double: %s is done %d times, and %d times in the list", job, done[job], queued[job]))
		if !maybe[job] {
			c.tally.lost += count(!assert.Positive(c.t, n, "lost: %s is neither done nor in the list", job))
		}
	}
}

// recovered waits until only the survivors are left.
func (c *chaos) recovered(survivors ...interface{ WorkerID() string }) {
	c.t.Helper()
	c.eventually(func() bool {
		var ids []string
		for _, m := range survivors {
			ids = append(ids, m.WorkerID())
		}
		is, err := c.rdb.SMembers(bg, newKeyspace(c.ns, c.orders.Tag).workers()).Result()
		slices.Sort(ids)
		slices.Sort(is)
		return err == nil && slices.Equal(ids, is)
	}, "the dead are recovered and retired")
}

// beaten waits until n workers live, and each has made a beat since it was seen to. An entry in the registry alone says little: after Redis lost its
// data a worker is there first, and then tracks its jobs again, all of it before its next beat.
func (c *chaos) beaten(n int) {
	c.t.Helper()
	k := newKeyspace(c.ns, c.orders.Tag)
	left, beats := map[string]time.Duration{}, map[string]bool{}
	c.eventually(func() bool {
		ids, err := c.rdb.SMembers(bg, k.workers()).Result()
		live := 0
		for _, id := range ids {
			w := k.worker(id)
			if c.rdb.HGet(bg, w.session, "state").Val() != "live" {
				continue
			}
			ttl := c.rdb.PTTL(bg, w.beat).Val()
			beats[id] = beats[id] || left[id] > 0 && ttl > left[id]
			left[id] = ttl
			live += count(beats[id])
		}
		return err == nil && live >= n
	}, "everybody beats")
}

// What a worker and a sweeper do, by the names that nameOf gives: scripts, commands and callbacks of the user.
var stepsOfTracking = []string{"config", "zrange", "get", "where", "sadd", "join", "beat", "commit", "checkpoint", "take", "untake", "lock", "sscan", "pttl", "claim", "records", "count", "enqueue",
	"do", "forget", "postpone", "bury", "srem", "unlock", "leave", "del"}
var stepsOfLists = []string{"blmove", "sadd", "zrange", "time", "where", "unlock", "fetch", "deliver", "restore", "take", "zadd", "claim", "records", "count", "srem", "leave", "commit"}

type killPoint struct {
	where   string
	nth     int
	list    bool
	dressed bool // the process has every callback there is
}

func killPoints() (all []killPoint) {
	for round := range chaosRounds(1) {
		nth := 1
		if round > 0 {
			nth = 1 + rand.IntN(6) // some are never reached: then the process dies at its end
		}
		for _, when := range []string{"before ", "after "} {
			for _, s := range stepsOfTracking {
				all = append(all, killPoint{when + s, nth, false, false})
			}
			for _, s := range stepsOfLists {
				all = append(all, killPoint{when + s, nth, true, false})
			}
			for _, s := range stepsOfCallbacks {
				all = append(all, killPoint{when + s, nth, false, true})
			}
			for _, s := range stepsOfFormats {
				all = append(all, killPoint{when + s, nth, true, true})
			}
		}
	}
	for _, when := range []string{"before ", "after "} { // the first commits are Track
		all = append(all, killPoint{when + "commit", 3, false, false}, killPoint{when + "commit", 3, true, false})
		for nth := 2; nth <= 5; nth++ { // of its own jobs, and then of those that it hands back
			all = append(all, killPoint{when + "delete", nth, false, true})
		}
	}
	return all
}

// A process is killed before, and after, every step. A survivor that comes later recovers it, and what it was recovering.
func TestChaos_everyStep(t *testing.T) {
	t.Parallel()
	s := startServer(t, "--appendonly", "yes", "--appendfsync", "always")
	var total chaosTally
	for batch := range slices.Chunk(killPoints(), 15) { // so that their waits overlap
		scenes := make([]*scene, len(batch))
		for i, at := range batch {
			scenes[i] = beginScene(t, s.socket, at)
		}
		for _, sc := range scenes {
			sc.victim.died()
			total.kills++
		}
		for _, sc := range scenes {
			sc.last = sc.survivor("survivor")
		}
		for _, sc := range scenes {
			sc.recovered(sc.last)
			sc.judge()
			total.jobs += sc.tally.jobs
			text, err := os.ReadFile(sc.path)
			require.NoError(t, err)
			if sc.at.nth == 1 {
				assert.Contains(t, string(text), " step ", "%s: it was never reached", sc.at.where)
			}
			sc.close()
			if t.Failed() {
				t.Fatalf("killed at %+v:\n%s", sc.at, text)
			}
		}
	}
	(&chaos{world: &world{t: t}, tally: total}).report() // a scene with a fault has ended the test
}

// scene is one victim, its prey, and the one who comes later.
type scene struct {
	*chaos
	at     killPoint
	victim *process
	last   *member
}

func beginScene(t *testing.T, socket string, at killPoint) *scene {
	t.Helper()
	sc := &scene{chaos: newChaos(onSocket(t, socket), "unix", socket), at: at}
	sc.loadScripts()
	if at.list {
		sc.list = "jobs:" + sc.ns
	}
	if at.dressed {
		sc.orders.Store = t.TempDir()
	}
	prey := sc.join("prey", sc.dressed(slowHeart()), func(m *member) {
		if at.list {
			m.list = sc.queue()
		}
	})
	jobs := []string{"one", "later", "poison"}
	if at.list {
		jobs = []string{"one", "two"}
		for i := range 4 {
			e := fmt.Sprint("element", i)
			sc.book.note("P", "?", e)
			sc.push(sc.list, e)
		}
		leases, err := prey.Fetch(bg, sc.queue(), 1)
		require.NoError(t, err)
		sc.book.note("T", leases[0].ID(), jobName(leases[0]))
	}
	for _, id := range jobs {
		l, err := prey.Track(bg, Job{ID: id, Payload: []byte(id)})
		require.NoError(t, err)
		sc.book.note("T", l.ID(), id)
	}
	prey.crash()
	sc.fence(prey.WorkerID()) // declared dead already, to save time
	sc.victim = sc.spawn("chaos-steps", chaosOrders{Kill: at.where, Nth: at.nth, Prey: prey.WorkerID()})
	return sc
}

// Busy processes are killed, and frozen for longer than the threshold, at random, in the middle of whatever they do.
func TestChaos_killsAndPauses(t *testing.T) {
	t.Parallel()
	for _, list := range []bool{false, true} {
		t.Run(fmt.Sprint("list=", list), func(t *testing.T) {
			t.Parallel()
			s := startServer(t, "--appendonly", "yes", "--appendfsync", "always")
			c := newChaos(onSocket(t, s.socket), "unix", s.socket)
			if list {
				c.list = "jobs:" + c.ns
			}
			if !list {
				c.tally.bound = recoveryBound(c.orders.config())
			}
			crew := []*process{c.soak(), c.soak(), c.soak(), c.soak(), c.soak()}
			fed := 0
			var pauses sync.WaitGroup
			defer pauses.Wait()
			for round := range chaosRounds(12) {
				if list && c.raw.LLen(bg, c.list).Val() < 200 {
					var more []any
					for range 100 {
						fed++
						c.book.note("P", "?", fmt.Sprint("element", fed))
						more = append(more, fmt.Sprint("element", fed))
					}
					require.NoError(t, c.raw.LPush(bg, c.list, more...).Err())
				}
				if round%4 == 3 {
					c.tally.stops++
					c.pause(&pauses, crew[rand.IntN(len(crew))], time.Duration(350+rand.IntN(500))*time.Millisecond)
				}
				i := rand.IntN(len(crew))
				c.kill(crew[i]) // it may be one that was stopped
				crew[i] = c.soak()
				sleep(bg, time.Duration(rand.IntN(60))*time.Millisecond)
			}
			pauses.Wait()
			c.finish(crew)
			t.Logf("%+v", c.judge())
			c.report()
		})
	}
}

// pause stops a process, and lets it go on after d, while the test does other things.
func (c *chaos) pause(wg *sync.WaitGroup, p *process, d time.Duration) {
	c.t.Helper()
	p.signal(syscall.SIGSTOP)
	wg.Go(func() {
		sleep(bg, d)
		_ = p.cmd.Process.Signal(syscall.SIGCONT) // unless it was killed meanwhile
	})
}

// finish kills everybody, and lets a survivor recover.
func (c *chaos) finish(crew []*process) {
	c.t.Helper()
	for _, p := range crew {
		c.kill(p)
	}
	c.recovered(c.survivor("survivor"))
}

// Redis is killed and restarted, frozen, and loses its scripts, while workers run and die.
func TestChaos_redis(t *testing.T) {
	t.Parallel()
	s := startServer(t, "--appendonly", "yes", "--appendfsync", "always")
	c := newChaos(onSocket(t, s.socket), "unix", s.socket)
	crew := []*process{c.soak(), c.soak(), c.soak()}
	for round := range chaosRounds(4) {
		if round%2 == 0 {
			s.kill()
			sleep(bg, time.Duration(rand.IntN(700))*time.Millisecond)
			require.NoError(t, s.start())
			c.tally.restarts++
		} else {
			require.NoError(t, s.cmd.Process.Signal(syscall.SIGSTOP))
			sleep(bg, time.Duration(350+rand.IntN(500))*time.Millisecond)
			require.NoError(t, s.cmd.Process.Signal(syscall.SIGCONT))
			c.tally.freezes++
		}
		require.NoError(t, c.raw.ScriptFlush(bg).Err())
		i := rand.IntN(len(crew))
		c.kill(crew[i])
		crew[i] = c.soak()
		sleep(bg, time.Duration(100+rand.IntN(300))*time.Millisecond)
	}
	c.finish(crew)
	sum := c.judge()
	t.Logf("%+v", sum)
	c.report()
	require.Positive(t, sum.done)
}

// Redis is full, under load, and a worker dies meanwhile.
func TestChaos_outOfMemory(t *testing.T) {
	t.Parallel()
	s := startServer(t, "--appendonly", "yes", "--appendfsync", "always", "--maxmemory-policy", "noeviction")
	c := newChaos(onSocket(t, s.socket), "unix", s.socket)
	crew := []*process{c.soak(), c.soak()}
	for range chaosRounds(2) {
		require.NoError(t, c.raw.ConfigSet(bg, "maxmemory", "1").Err())
		sleep(bg, time.Duration(rand.IntN(500))*time.Millisecond)
		c.kill(crew[0])
		sleep(bg, time.Duration(rand.IntN(700))*time.Millisecond)
		require.NoError(t, c.raw.ConfigSet(bg, "maxmemory", "0").Err())
		crew[0] = c.soak()
		sleep(bg, time.Duration(rand.IntN(300))*time.Millisecond)
	}
	c.finish(crew)
	t.Logf("%+v", c.judge())
	c.report()
}

// Redis is emptied while workers run. Nobody dies, so nothing may be lost, and nothing is handed back behind anybody's back.
func TestChaos_flushAll(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	c := newChaos(onSocket(t, s.socket), "unix", s.socket)
	c.calm = true
	crew := []*process{c.soak(), c.soak()}
	for range chaosRounds(3) {
		sleep(bg, time.Duration(200+rand.IntN(400))*time.Millisecond)
		require.NoError(t, c.raw.FlushAll(bg).Err())
	}
	c.beaten(len(crew))
	c.finish(crew)
	t.Logf("%+v", c.judge())
	c.report()
}

// Between the workers and Redis is a network: answers are lost, calls are late, one is cut off, all are.
func TestChaos_network(t *testing.T) {
	t.Parallel()
	addr, _ := startTCP(t, "--appendonly", "yes", "--appendfsync", "always")
	w := &world{t: t, ns: "t" + newWorkerID("")[1:], logs: &lockedBuffer{}}
	w.dial = func(ctx context.Context) (net.Conn, error) { return (&net.Dialer{}).DialContext(ctx, "tcp", addr) }
	w.raw = w.client(nil)
	t.Cleanup(w.close)
	c := newChaos(w, "tcp", addr)
	var crew []*process
	var nets []*proxy
	for range 3 {
		p := startProxy(t, addr)
		nets = append(nets, p)
		child := c.spawn("chaos-soak", chaosOrders{Network: "tcp", Addr: p.addr})
		child.expect("ready")
		crew = append(crew, child)
	}
	modes := map[proxyMode]int{}
	for round := range chaosRounds(12) {
		mode := proxyMode(1 + round%4)
		modes[mode]++
		some := nets[rand.IntN(len(nets)):][:1]
		if round%3 == 2 {
			some = nets
		}
		last := time.Duration(50+rand.IntN(300)) * time.Millisecond
		if mode == proxyHolds || mode == proxyCuts {
			last += 300 * time.Millisecond // beyond the threshold
		}
		for _, p := range some {
			p.set(mode, time.Duration(rand.IntN(100))*time.Millisecond)
		}
		sleep(bg, last)
		for _, p := range some {
			p.set(proxyPasses, 0)
		}
		sleep(bg, time.Duration(rand.IntN(200))*time.Millisecond)
	}
	dropped := 0
	for _, p := range nets {
		dropped += p.dropped()
	}
	c.finish(crew)
	sum := c.judge()
	t.Logf("dropped %d answers; rounds of dropping %d, delaying %d, holding %d, cutting %d: %+v", dropped, modes[proxyDrops], modes[proxyDelays],
		modes[proxyHolds], modes[proxyCuts], sum)
	c.report()
	require.Positive(t, dropped)
	require.Positive(t, sum.lost, "or nobody was out of touch for long enough")
}

// node is a redis-server on a port of its own, that can be killed and started again.
type node struct {
	t    *testing.T
	port int
	args []string
	env  []string
	cmd  *exec.Cmd
}

func startNode(t *testing.T, args ...string) *node { t.Helper(); return startNodeWith(t, nil, args...) }

func startNodeWith(t *testing.T, env []string, args ...string) *node {
	t.Helper()
	needServer(t)
	n := &node{t: t, port: freePort(t), env: env}
	n.args = append([]string{"--port", fmt.Sprint(n.port), "--bind", "127.0.0.1", "--dir", t.TempDir(), "--save", "", "--loglevel", "warning",
		"--repl-diskless-sync-delay", "0"}, args...)
	t.Cleanup(n.kill)
	n.start()
	return n
}

func (n *node) addr() string { return fmt.Sprintf("127.0.0.1:%d", n.port) }

func (n *node) client() *redis.Client {
	return redis.NewClient(&redis.Options{Addr: n.addr(), MaxRetries: -1})
}

func (n *node) start(more ...string) {
	n.t.Helper()
	n.cmd = exec.Command("redis-server", append(slices.Clone(n.args), more...)...)
	n.cmd.Stderr, n.cmd.Env = os.Stderr, n.env
	require.NoError(n.t, n.cmd.Start())
	rdb := n.client()
	defer rdb.Close()
	require.Eventually(n.t, func() bool { return rdb.Ping(bg).Err() == nil }, 10*time.Second, 20*time.Millisecond)
}

func (n *node) kill() {
	if n.cmd != nil {
		_ = n.cmd.Process.Kill()
		_ = n.cmd.Wait()
		n.cmd = nil
	}
}

// startSentinel watches a master, and is quick to replace it.
func startSentinel(t *testing.T, master *node) string {
	t.Helper()
	port := freePort(t)
	conf := filepath.Join(t.TempDir(), "sentinel.conf")
	text := fmt.Sprintf("port %d\nbind 127.0.0.1\ndir %s\nsentinel monitor fleet 127.0.0.1 %d 1\nsentinel down-after-milliseconds fleet 1000\n"+
		"sentinel failover-timeout fleet 1000\n", port, filepath.Dir(conf), master.port)
	require.NoError(t, os.WriteFile(conf, []byte(text), 0o600))
	cmd := exec.Command("redis-server", conf, "--sentinel", "--loglevel", "warning")
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	return fmt.Sprintf("127.0.0.1:%d", port)
}

// The master is killed, and Sentinel makes its replica the next one, while workers run. With WaitReplicas no job that was acknowledged is lost.
func TestChaos_sentinel(t *testing.T) {
	t.Parallel()
	nodes := []*node{startNode(t), startNode(t)}
	replica := nodes[1].client()
	require.NoError(t, replica.ReplicaOf(bg, "127.0.0.1", fmt.Sprint(nodes[0].port)).Err())
	replica.Close()
	sentinel := startSentinel(t, nodes[0])
	synced := func(master, other *node) bool {
		m, o := master.client(), other.client()
		defer m.Close()
		defer o.Close()
		info, err := o.Info(bg, "replication").Result()
		return err == nil && strings.Contains(info, "master_link_status:up") && m.Do(bg, "WAIT", 1, 100).Val() == int64(1)
	}
	require.Eventually(t, func() bool { return synced(nodes[0], nodes[1]) }, 20*time.Second, 50*time.Millisecond, "the replica follows")
	// Sentinel replaces a master only by a replica that it knows.
	watch := redis.NewSentinelClient(&redis.Options{Addr: sentinel})
	t.Cleanup(func() { watch.Close() })
	// On a busy machine Sentinel may replace a master that is only slow: who is who is for it to say.
	roles := func() (master, other *node) {
		at, err := watch.GetMasterAddrByName(bg, "fleet").Result()
		if err == nil && len(at) == 2 && at[1] == fmt.Sprint(nodes[1].port) {
			return nodes[1], nodes[0]
		}
		return nodes[0], nodes[1]
	}
	knows := func() bool {
		all, err := watch.Replicas(bg, "fleet").Result()
		return err == nil && len(all) == 1 && !strings.Contains(all[0]["flags"], "down")
	}
	require.Eventually(t, knows, 30*time.Second, 50*time.Millisecond, "Sentinel knows the replica")

	client := func() *redis.Client {
		rdb := redis.NewFailoverClient(&redis.FailoverOptions{MasterName: "fleet", SentinelAddrs: []string{sentinel}, ReadTimeout: 500 * time.Millisecond})
		t.Cleanup(func() { rdb.Close() })
		return rdb
	}
	w := &world{t: t, ns: "failover", logs: &lockedBuffer{}, raw: client()}
	c := newChaos(w, "", "")
	var crew []*Recoverer
	for i := range 3 {
		cfg := chaosConfig(c.ns, fmt.Sprint("w", i))
		cfg.HeartbeatInterval, cfg.OrphanThreshold, cfg.SweepInterval, cfg.WaitReplicas = 200*time.Millisecond, time.Second, 200*time.Millisecond, 1
		r, err := New(client(), c.book.enqueuer(), cfg)
		require.NoError(t, err)
		require.NoError(t, r.Start(bg))
		crew = append(crew, r)
	}
	stop := make(chan struct{})
	var load sync.WaitGroup
	end := sync.OnceFunc(func() { close(stop); load.Wait() })
	t.Cleanup(end) // also if the test fails: nobody writes to a book that is closed
	for _, r := range crew[:2] {
		for range 4 {
			load.Add(1)
			go func() {
				defer load.Done()
				for n := 0; ; n++ {
					select {
					case <-stop:
						return
					default:
						chaosOne(r, c.book, fmt.Sprintf("%s-%d-%d", r.cfg.WorkerName, n, rand.Int64()), true)
					}
				}
			}()
		}
	}
	var held *Lease
	require.Eventually(t, func() (ok bool) { // on a busy machine the replica may be late; then it was not tracked
		l, err := crew[2].Track(bg, Job{ID: "held"})
		held = l
		return err == nil
	}, 20*time.Second, 20*time.Millisecond)
	c.book.note("T", held.ID(), "held")
	began := time.Now()
	for range chaosRounds(1) {
		sleep(bg, time.Duration(200+rand.IntN(500))*time.Millisecond)
		master, other := roles()
		master.kill()
		require.Eventually(t, func() bool {
			at, err := watch.GetMasterAddrByName(bg, "fleet").Result()
			return err == nil && at[1] == fmt.Sprint(other.port)
		}, 30*time.Second, 50*time.Millisecond, "the replica is the master")
		c.tally.failovers++
		master.start("--replicaof", "127.0.0.1 "+fmt.Sprint(other.port))
		require.Eventually(t, func() bool { return synced(roles()) && knows() }, time.Minute, 50*time.Millisecond, "the old one follows")
		require.Eventually(t, func() bool {
			return !slices.ContainsFunc(crew, func(r *Recoverer) bool { return r.Check() != nil })
		}, 20*time.Second, 20*time.Millisecond, "beats go on")
	}
	end()
	c.book.finish(held)
	// One dies after it all, and is recovered from the new master.
	last, err := crew[0].Track(bg, Job{ID: "last"})
	require.NoError(t, err)
	c.book.note("T", last.ID(), "last")
	crew[0].endSweeps()
	crew[0].endLife()
	require.Eventually(t, func() bool {
		text, err := os.ReadFile(c.path)
		return err == nil && strings.Contains(string(text), "E "+last.ID())
	}, 20*time.Second, 20*time.Millisecond, "it is handed back")
	for _, r := range crew[1:] {
		ctx, cancel := context.WithTimeout(bg, 20*time.Second)
		require.NoError(t, r.Stop(ctx))
		cancel()
	}
	crew[0].endHard()
	c.tally.outages = []outage{{began, time.Now()}} // Sentinel may have replaced a slow master at any time
	c.judge()
	c.report()
}
