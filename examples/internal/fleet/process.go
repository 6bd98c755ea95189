package fleet

import (
	"bytes"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// ChildEnv is set in the environment of a worker.
const ChildEnv = "FLEET_CHILD"

// Main is all that a TestMain has to do: it runs the tests, or, in a process that Self has made, the worker.
func Main(m *testing.M, worker func()) {
	if os.Getenv(ChildEnv) != "" {
		worker()
		return
	}
	m.Run() // its code is the process's, by the testing package
}

// Self is the test binary as a worker.
func Self(t testing.TB, args ...string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self, args...)
	// With -race, every exit would otherwise take a second longer.
	cmd.Env = append(os.Environ(), ChildEnv+"=1", "GORACE="+os.Getenv("GORACE")+" atexit_sleep_ms=0")
	return cmd
}

// Process is a process that ends with the test.
type Process struct {
	Stdin io.WriteCloser

	t     testing.TB
	cmd   *exec.Cmd
	said  transcript
	ended chan struct{} // closed when it has ended, and all that it wrote has been read
}

// Start runs cmd. Text has what it writes, but not stdout if cmd.Stdout is set.
func Start(t testing.TB, cmd *exec.Cmd) *Process {
	t.Helper()
	p := &Process{t: t, cmd: cmd, ended: make(chan struct{})}
	cmd.Stderr = &p.said
	if cmd.Stdout == nil {
		cmd.Stdout = &p.said
	}
	var err error
	if p.Stdin, err = cmd.StdinPipe(); err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(p.ended)
		_ = cmd.Wait() // ProcessState has it
	}()
	t.Cleanup(func() {
		p.Kill()
		if strings.Contains(p.Text(), "DATA RACE") {
			t.Errorf("process %d has a data race", p.Pid())
		}
		if t.Failed() {
			t.Logf("process %d, %v, %q:\n%s", p.Pid(), cmd.ProcessState, cmd.Args, p.Text())
		}
	})
	return p
}

// Pid is its number.
func (p *Process) Pid() int { return p.cmd.Process.Pid }

// Text is everything that it has written so far.
func (p *Process) Text() string { return p.said.String() }

// Says counts how often it has written something.
func (p *Process) Says(text string) int { return strings.Count(p.Text(), text) }

// Signal takes effect a little later than it returns.
func (p *Process) Signal(s syscall.Signal) {
	p.t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil {
		p.t.Fatalf("%v to process %d: %v", s, p.Pid(), err)
	}
}

// Kill is kill -9. It returns when the process is gone, and does nothing to one that has ended.
func (p *Process) Kill() {
	_ = p.cmd.Process.Kill()
	<-p.ended
}

// Wait waits until the process has ended, and returns how: "exit status 0", "signal: killed".
func (p *Process) Wait() string {
	p.t.Helper()
	select {
	case <-p.ended:
	case <-time.After(Patience):
		p.t.Fatalf("process %d has not ended within %v", p.Pid(), Patience)
	}
	return p.cmd.ProcessState.String()
}

// Terminate is SIGTERM, after which the process must end well.
func (p *Process) Terminate() {
	p.t.Helper()
	p.Signal(syscall.SIGTERM)
	p.endWell()
}

// Leave ends its stdin, after which the process must end well.
func (p *Process) Leave() {
	p.t.Helper()
	_ = p.Stdin.Close()
	p.endWell()
}

func (p *Process) endWell() {
	p.t.Helper()
	if how := p.Wait(); how != "exit status 0" {
		p.t.Fatalf("process %d was asked to leave, and ended with %s", p.Pid(), how)
	}
}

// transcript is a buffer that is read while it is written.
type transcript struct {
	mu   sync.Mutex // guards text
	text bytes.Buffer
}

func (s *transcript) Write(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.Write(b)
}

func (s *transcript) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.String()
}
