package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"time"
)

// proc is one worker process, as its parent sees it.
type proc struct {
	// Fixed after start.
	name  string
	cmd   *exec.Cmd
	stdin io.Closer

	// Owned by the goroutine that reads fleet.events.
	joined    bool
	running   []string // jobs, in the order in which they began
	lastStart time.Time
	killed    bool      // by us
	gone      bool      // has ended
	goneAt    time.Time // when it was killed, or ended
	orphans   []string  // what it was running then
}

// event is something that a worker said, or its end.
type event struct {
	*proc
	report report
	says   string // a line on stderr
	ended  bool   // the last event of a worker: everything that it ever wrote came before
	err    error  // how it ended
}

// fleet starts workers and gathers what they say.
type fleet struct {
	procs  []*proc
	events chan event
}

// start runs this program again, as a worker.
func (f *fleet) start(s setup) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	env, err := json.Marshal(s)
	if err != nil {
		return err
	}
	p := &proc{name: s.Name, cmd: exec.Command(self)}
	p.cmd.Env = append(os.Environ(), setupEnv+"="+string(env))
	stdout, err := p.cmd.StdoutPipe()
	if err != nil {
		return err
	}
	stderr, err := p.cmd.StderrPipe()
	if err != nil {
		return err
	}
	if p.stdin, err = p.cmd.StdinPipe(); err != nil {
		return err
	}
	if err := p.cmd.Start(); err != nil {
		return fmt.Errorf("start worker %s: %w", s.Name, err)
	}
	f.procs = append(f.procs, p)
	go f.listen(p, stdout, stderr)
	return nil
}

// listen reads both pipes to their end before it waits for the process: no line of a killed worker may be missed.
func (f *fleet) listen(p *proc, stdout, stderr io.Reader) {
	var reading sync.WaitGroup
	reading.Go(func() {
		for lines := bufio.NewScanner(stderr); lines.Scan(); {
			f.events <- event{proc: p, says: lines.Text()}
		}
	})
	reading.Go(func() {
		for lines := bufio.NewScanner(stdout); lines.Scan(); {
			e := event{proc: p}
			if json.Unmarshal(lines.Bytes(), &e.report) != nil {
				e.says = lines.Text() // cut off by the kill, or not ours
			}
			f.events <- e
		}
	})
	reading.Wait()
	f.events <- event{proc: p, ended: true, err: p.cmd.Wait()}
}

// kill is kill -9: the worker gets no chance to say or to clean up anything.
func (p *proc) kill() error {
	p.killed, p.goneAt = true, time.Now()
	return p.cmd.Process.Kill()
}

// leave asks every worker to finish what it runs and to go.
func (f *fleet) leave() {
	for _, p := range f.procs {
		_ = p.stdin.Close()
	}
}

// alive counts the workers that have not ended.
func (f *fleet) alive() int { return f.count(func(p *proc) bool { return !p.gone }) }

// standing counts those that are not about to end by our kill, either.
func (f *fleet) standing() int { return f.count(func(p *proc) bool { return !p.gone && !p.killed }) }

func (f *fleet) count(match func(*proc) bool) (n int) {
	for _, p := range f.procs {
		if match(p) {
			n++
		}
	}
	return n
}
