// Quickstart starts three worker processes on one queue, kills one of them with SIGKILL in the middle of its jobs, and
// shows how the others take over what it was running. It needs nothing but Go:
//
//	go run ./examples/quickstart
//
// Redis is embedded, unless -redis names a server. Do kill more of the workers yourself: their process ids are shown. How the
// library is used is in worker.go; the other files are the show around it.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
)

// options are the flags.
type options struct {
	redis               string
	workers, jobs, kill int
}

// Exit codes.
const (
	exitFailed      = 1 // a job was lost, or the show could not be given
	exitUsage       = 2
	exitInterrupted = 130
)

func main() {
	if env, ok := os.LookupEnv(setupEnv); ok {
		var s setup
		err := json.Unmarshal([]byte(env), &s)
		if err == nil {
			err = runWorker(s)
		}
		exit(err, exitFailed)
		return
	}
	o, err := parse(os.Args[1:])
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	exit(err, exitUsage)
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second Ctrl-C does not wait
	err = run(ctx, o)
	if ctx.Err() != nil {
		exit(err, exitInterrupted)
	}
	exit(err, exitFailed)
}

// exit ends the program if there is an error.
func exit(err error, code int) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "quickstart:", err)
		os.Exit(code)
	}
}

func parse(args []string) (options, error) {
	var o options
	f := flag.NewFlagSet("quickstart", flag.ContinueOnError)
	f.SetOutput(io.Discard) // errors are printed by exit
	f.StringVar(&o.redis, "redis", "", "`address` of a Redis server, host:port or redis:// URL (default: an embedded one)")
	f.IntVar(&o.workers, "workers", 3, "`number` of worker processes, 1 to 50")
	f.IntVar(&o.jobs, "jobs", 60, "`number` of jobs, 1 to 10000")
	f.IntVar(&o.kill, "kill", 1, "`number` of workers to kill, 0 to workers-1")
	if err := f.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			f.SetOutput(os.Stdout)
			f.Usage()
		}
		return o, err
	}
	return o, o.validate(f.Args())
}

// validate reports every problem at once.
func (o options) validate(rest []string) error {
	var errs []error
	check := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	_, err := server(o.redis)
	check(err == nil, "-redis is %q: %v", o.redis, err)
	check(o.workers >= 1 && o.workers <= 50, "-workers is %d, must be from 1 to 50", o.workers)
	check(o.jobs >= 1 && o.jobs <= 10000, "-jobs is %d, must be from 1 to 10000", o.jobs)
	check(o.kill >= 0, "-kill is %d, must not be negative", o.kill)
	check(o.kill < max(1, o.workers), "-kill is %d and -workers is %d: one worker must survive", o.kill, o.workers)
	check(len(rest) == 0, "unexpected arguments: %q", rest)
	return errors.Join(errs...)
}
