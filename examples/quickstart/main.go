// Quickstart starts three worker processes on one queue, kills one of them with SIGKILL in the middle of its jobs, and shows how the
// others take over what it was running. It needs nothing but Go:
//
//	go run ./examples/quickstart
//
// Redis is embedded, unless -redis names a server. How the library is used is in worker.go.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
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
	f.StringVar(&o.redis, "redis", "", "`address` of a Redis server, host:port or redis:// URL (default: an embedded one)")
	f.IntVar(&o.workers, "workers", 3, "`number` of worker processes, 1 to 50")
	f.IntVar(&o.jobs, "jobs", 60, "`number` of jobs, 1 to 10000")
	f.IntVar(&o.kill, "kill", 1, "`number` of workers to kill, 0 to workers-1")
	if err := f.Parse(args); err != nil {
		return o, err
	}
	if f.NArg() > 0 {
		return o, fmt.Errorf("unexpected argument %q", f.Arg(0))
	}
	return o, errors.Join(
		within("-workers", o.workers, 1, 50, ""),
		within("-jobs", o.jobs, 1, 10000, ""),
		within("-kill", o.kill, 0, max(0, o.workers-1), ": one worker must survive"),
	)
}

func within(name string, value, low, high int, why string) error {
	if value < low || value > high {
		return fmt.Errorf("%s is %d, must be from %d to %d%s", name, value, low, high, why)
	}
	return nil
}
