package fleet

import (
	"errors"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"testing"
)

// Entry is a job that a process has done.
type Entry struct {
	Pid int
	Job string
}

// Ledger reads a file to which workers append a line "pid job" for each job that they have done. There is none before the first.
func Ledger(t testing.TB, file string) (entries []Entry) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		number, job, ok := strings.Cut(strings.TrimSpace(line), " ")
		pid, err := strconv.Atoi(number)
		if !ok || err != nil {
			t.Fatalf("%s has the line %q", file, line)
		}
		entries = append(entries, Entry{pid, job})
	}
	return entries
}

// ByJob tells for each job the processes that have done it, in their order.
func ByJob(entries []Entry) map[string][]int {
	pids := map[string][]int{}
	for _, e := range entries {
		pids[e.Job] = append(pids[e.Job], e.Pid)
	}
	return pids
}
