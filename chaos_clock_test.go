package recovery

import (
	"context"
	"encoding/binary"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Clocks that are set while everything runs.

// wallClock is all that this package does with the time of day of a worker's machine, function by function, and why a wrong one is no harm.
// Everything else is Redis' clock, or counted by the monotonic one: time.Now carries it, and Sub, Since, Until, Before and After use it.
var wallClock = map[string]string{
	"Recoverer.takeOut":    "documented: a crash of a job that Redis has lost is dated by its worker's clock",
	"newSessionInfo":       "shown to people",
	"sidekiqFormat.Encode": "Sidekiq's own field, shown to people",
	"pass.arrivals":        "Redis' clock",
}

// A time loses the monotonic clock by these, or tells what only the wall clock knows.
var wallMethods = []string{"Unix", "UnixMilli", "UnixMicro", "UnixNano", "UTC", "Local", "In", "Date", "Clock", "Format", "MarshalJSON", "MarshalText",
	"MarshalBinary", "Hour", "Weekday", "YearDay"}

// A worker's clock may be wrong, and may be set while it runs. No test can set the wall clock of a Go process and leave its monotonic one alone, so
// this one reads the source: whoever uses the time of day has to be in the list above, with a reason.
func TestClock_wallClockIsNotUsed(t *testing.T) {
	files, err := filepath.Glob("*.go")
	require.NoError(t, err)
	found := map[string][]string{}
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		set := token.NewFileSet()
		file, err := parser.ParseFile(set, name, nil, 0)
		require.NoError(t, err)
		for _, decl := range file.Decls {
			ast.Inspect(decl, func(n ast.Node) bool {
				call, ok := n.(*ast.CallExpr)
				if !ok {
					return true
				}
				sel, ok := call.Fun.(*ast.SelectorExpr)
				if !ok || !slices.Contains(wallMethods, sel.Sel.Name) {
					return true
				}
				if from, ok := sel.X.(*ast.Ident); ok && from.Name == "time" {
					return true // time.UnixMilli makes a time of a number that Redis gave
				}
				where := funcName(decl)
				found[where] = append(found[where], set.Position(call.Pos()).String()+": "+sel.Sel.Name)
				return true
			})
		}
	}
	for where, calls := range found {
		assert.NotEmpty(t, wallClock[where], "%s uses the time of day: %v", where, calls)
	}
	for where := range wallClock {
		assert.NotEmpty(t, found[where], "%s is in the list, and does not use the time of day", where)
	}
}

// funcName is Type.method, or the function's name.
func funcName(decl ast.Decl) string {
	f, ok := decl.(*ast.FuncDecl)
	if !ok {
		return "a declaration"
	}
	if f.Recv == nil {
		return f.Name.Name
	}
	recv := f.Recv.List[0].Type
	if star, ok := recv.(*ast.StarExpr); ok {
		recv = star.X
	}
	return fmt.Sprint(recv) + "." + f.Name.Name
}

// serverClock is the wall clock of a redis-server, to be set while it runs.
type serverClock struct {
	t     *testing.T
	file  *os.File
	ahead time.Duration
}

func newServerClock(t *testing.T) (clock *serverClock, env []string) {
	t.Helper()
	gcc, err := exec.LookPath("gcc")
	if err != nil && os.Getenv("CI") == "" {
		t.Skip("gcc is not installed: `make test` installs it")
	}
	require.NoError(t, err)
	dir := t.TempDir()
	lib := filepath.Join(dir, "clock.so")
	out, err := exec.Command(gcc, "-shared", "-fPIC", "-O1", "-o", lib, filepath.Join("testdata", "clock.c")).CombinedOutput()
	require.NoError(t, err, "%s", out)
	file, err := os.Create(filepath.Join(dir, "ahead"))
	require.NoError(t, err)
	t.Cleanup(func() { file.Close() })
	clock = &serverClock{t: t, file: file}
	clock.jump(0)
	return clock, append(os.Environ(), "LD_PRELOAD="+lib, "RECOVERY_TEST_CLOCK="+file.Name())
}

func (s *serverClock) jump(d time.Duration) {
	s.t.Helper()
	s.ahead += d
	_, err := s.file.WriteAt(binary.NativeEndian.AppendUint64(nil, uint64(s.ahead.Microseconds())), 0)
	require.NoError(s.t, err)
}

// The clock of Redis is set, forwards and backwards, while workers run and die. Forwards every beat, suspicion and claim runs out at once;
// backwards they last longer. It may look as if live workers were dead; they are told. Nothing is lost, and nothing runs twice unnoticed.
func TestChaos_clock(t *testing.T) {
	t.Parallel()
	for _, list := range []bool{false, true} {
		t.Run(fmt.Sprint("list=", list), func(t *testing.T) {
			t.Parallel()
			clock, env := newServerClock(t)
			n := startNodeWith(t, env, "--appendonly", "yes", "--appendfsync", "always")
			w := &world{t: t, ns: "t" + newWorkerID("")[1:], logs: &lockedBuffer{}}
			w.dial = func(ctx context.Context) (net.Conn, error) { return (&net.Dialer{}).DialContext(ctx, "tcp", n.addr()) }
			w.raw = w.client(nil)
			t.Cleanup(w.close)
			c := newChaos(w, "tcp", n.addr())
			if list {
				c.list = "jobs:" + c.ns
			}
			crew, fed := []*process{c.soak(), c.soak(), c.soak()}, 0
			for round := range chaosRounds(8) {
				for ; list && fed < 30*(round+1); fed++ {
					c.book.note("P", "?", fmt.Sprint("element", fed))
					c.push(c.list, fmt.Sprint("element", fed))
				}
				d := -time.Duration(rand.IntN(2000)) * time.Millisecond
				if round%2 == 0 {
					d = []time.Duration{150 * time.Millisecond, 400 * time.Millisecond, 3 * time.Second, time.Hour}[rand.IntN(4)]
				}
				clock.jump(d)
				c.tally.jumps++
				sleep(bg, time.Duration(rand.IntN(300))*time.Millisecond)
				if round%2 == 1 {
					i := rand.IntN(len(crew))
					c.kill(crew[i])
					crew[i] = c.soak()
				}
			}
			seen, err := c.raw.Time(bg).Result()
			require.NoError(t, err)
			require.InDelta(t, clock.ahead.Seconds(), time.Until(seen).Seconds(), 5, "or the clock was never set")
			c.finish(crew)
			sum := c.judge()
			t.Logf("%+v", sum)
			c.report()
			require.Positive(t, sum.done)
		})
	}
}
