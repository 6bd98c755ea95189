package fleet

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestMain(m *testing.M) { Main(m, worker) }

// worker says hello, repeats what it is told, and ends with its stdin.
func worker() {
	fmt.Println("hello from", os.Args[1])
	var word string
	for {
		if _, err := fmt.Scanln(&word); err != nil {
			return
		}
		fmt.Println(word)
	}
}

func TestProcess(t *testing.T) {
	t.Parallel()
	p := Start(t, Self(t, "ann"))
	Eventually(t, "it says hello", func() bool { return p.Says("hello from ann\n") == 1 })
	p.Signal(syscall.SIGSTOP)
	_, err := fmt.Fprintln(p.Stdin, "echo")
	require.NoError(t, err)
	p.Signal(syscall.SIGCONT)
	p.Leave()
	assert.Equal(t, "hello from ann\necho\n", p.Text(), "all of it is there when it has ended")
	p.Kill()
	assert.Equal(t, "exit status 0", p.Wait(), "it had ended before it was killed")

	p = Start(t, Self(t, "bob"))
	p.Kill()
	assert.Equal(t, "signal: killed", p.Wait())
	p = Start(t, Self(t, "cid"))
	p.Signal(syscall.SIGTERM)
	assert.Equal(t, "signal: terminated", p.Wait())
}

func TestRedis(t *testing.T) {
	t.Parallel()
	a, b := StartRedis(t), StartRedis(t)
	require.NoError(t, a.Client.Set(t.Context(), "key", "a", 0).Err())
	assert.Zero(t, b.Client.Exists(t.Context(), "key").Val(), "each has its own")
	a.Server.Kill()
	assert.Error(t, a.Client.Ping(t.Context()).Err())
	assert.NoError(t, b.Client.Ping(t.Context()).Err())
}

// Lines come in pieces, from several workers, and the last one may be cut off.
func TestReports(t *testing.T) {
	t.Parallel()
	r := NewReports[struct{ N int }](t)
	ann, bob := r.Of("ann"), r.Of("bob")
	fmt.Fprint(ann, `{"N":1}`+"\n"+`{"N"`)
	fmt.Fprint(bob, `{"N":2}`+"\n")
	before := r.All()
	fmt.Fprint(ann, `:3}`+"\n"+`{"N":4`)
	assert.Equal(t, "[{ann {1}} {bob {2}} {ann {3}}]", fmt.Sprint(r.All()))
	assert.Len(t, before, 2)
}

func TestLedger(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "ledger")
	assert.Empty(t, Ledger(t, file))
	require.NoError(t, os.WriteFile(file, []byte("7 a\n8 b\n9 a\n"), 0o600))
	assert.Equal(t, []Entry{{7, "a"}, {8, "b"}, {9, "a"}}, Ledger(t, file))
	assert.Equal(t, map[string][]int{"a": {7, 9}, "b": {8}}, ByJob(Ledger(t, file)))
}
