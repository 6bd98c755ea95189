package fleet

import (
	"bytes"
	"encoding/json"
	"io"
	"sync"
	"testing"
)

// Reports are what the workers of a test say on stdout: JSON, an R on each line.
type Reports[R any] struct {
	t testing.TB

	mu  sync.Mutex // guards all
	all []Report[R]
}

// Report is one line.
type Report[R any] struct {
	Worker string
	Said   R
}

// NewReports has none yet.
func NewReports[R any](t testing.TB) *Reports[R] {
	r := &Reports[R]{t: t}
	t.Cleanup(func() {
		if t.Failed() {
			for _, report := range r.All() {
				t.Logf("%+v", report)
			}
		}
	})
	return r
}

// All returns the reports so far, of all workers, in the order in which they came in.
func (r *Reports[R]) All() []Report[R] {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.all[:len(r.all):len(r.all)]
}

// Of is for the Stdout of a worker's command.
func (r *Reports[R]) Of(worker string) io.Writer { return &mouth[R]{reports: r, worker: worker} }

// mouth makes reports of what a worker writes.
type mouth[R any] struct {
	reports *Reports[R]
	worker  string
	begun   []byte // a line whose end is still to come, or never comes: the worker was killed
}

func (m *mouth[R]) Write(text []byte) (int, error) {
	m.begun = append(m.begun, text...)
	for {
		line, rest, found := bytes.Cut(m.begun, []byte("\n"))
		if !found {
			return len(text), nil
		}
		m.begun = rest
		m.report(line)
	}
}

func (m *mouth[R]) report(line []byte) {
	r := Report[R]{Worker: m.worker}
	if err := json.Unmarshal(line, &r.Said); err != nil {
		m.reports.t.Errorf("worker %s says %q: %v", m.worker, line, err)
		return
	}
	m.reports.mu.Lock()
	defer m.reports.mu.Unlock()
	m.reports.all = append(m.reports.all, r)
}
