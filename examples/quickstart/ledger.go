package main

import "fmt"

// ledger is the parent's own account of the jobs. It rests on what the parent put in and what workers reported as finished,
// not on anything that the recovery library keeps or says, so that it can convict it.
type ledger struct {
	jobs      []string
	starts    map[string]int // how often each job was begun
	finishes  map[string]int // and finished
	recovered map[string]bool
}

func newLedger(n int) *ledger {
	l := &ledger{starts: make(map[string]int), finishes: make(map[string]int), recovered: make(map[string]bool)}
	for i := range n {
		l.jobs = append(l.jobs, fmt.Sprintf("job-%03d", i+1))
	}
	return l
}

// done counts the jobs that were finished at least once.
func (l *ledger) done() int { return len(l.finishes) }

func (l *ledger) complete() bool { return l.done() == len(l.jobs) }

// tally is the result.
type tally struct {
	in, done, recovered int
	again               int      // finishes beyond the first
	queued              int      // not done, but still in the queue
	lost                []string // neither
}

// close judges, when all workers have ended. queued is what is in the queue then.
func (l *ledger) close(queued []string) tally {
	t := tally{in: len(l.jobs), recovered: len(l.recovered)}
	waiting := make(map[string]bool)
	for _, job := range queued {
		waiting[job] = true
	}
	for _, job := range l.jobs {
		n := l.finishes[job]
		switch {
		case n > 0:
			t.done++
			t.again += n - 1
		case waiting[job]:
			t.queued++
		default:
			t.lost = append(t.lost, job)
		}
	}
	return t
}

func (t tally) String() string {
	s := fmt.Sprintf("jobs in %d, done %d, recovered %d, lost %d", t.in, t.done, t.recovered, len(t.lost))
	if t.queued > 0 {
		s += fmt.Sprintf(", left in the queue %d", t.queued)
	}
	if t.again > 0 {
		s += fmt.Sprintf(" (done twice %d)", t.again)
	}
	return s
}
