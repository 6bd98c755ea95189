// Async-http sends HTTP requests in the background, on workers that may be killed at any moment. See README.md.
//
//	go run ./examples/async-http demo
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

const usage = `async-http COMMAND [flags] [arguments]

  demo                              all of it in a few seconds, on a Redis inside of the program
  worker                            sends what is in the list, and requests that come in on stdin: one JSON object a line
  submit ID METHOD URL [BODY]       puts a request into the list
  results                           what came back

flags:
`

func main() {
	err := command(context.Background(), os.Args[1:], os.Stdout)
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "async-http:", err)
		os.Exit(1)
	}
}

func command(ctx context.Context, args []string, out io.Writer) error {
	var s setup
	f := flag.NewFlagSet("async-http", flag.ContinueOnError)
	f.Usage = func() { fmt.Fprint(f.Output(), usage); f.PrintDefaults() }
	f.StringVar(&s.redis, "redis", "127.0.0.1:6379", "`address` of a Redis server: host:port, redis:// or unix:// URL")
	f.StringVar(&s.namespace, "namespace", "async-http", "`name` of the fleet")
	f.StringVar(&s.name, "name", fmt.Sprintf("worker-%d", os.Getpid()), "`name` of the worker")
	f.IntVar(&s.places, "places", 8, "requests under way at a time, at least 2")
	f.DurationVar(&s.threshold, "threshold", 5*time.Second, "silence after which a worker is dead")
	f.DurationVar(&s.timeout, "timeout", 30*time.Second, "of a request that has none of its own")
	f.DurationVar(&s.grace, "grace", 10*time.Second, "how long requests may go on after SIGTERM")
	f.BoolVar(&s.doneFirst, "done-first", false, "callback after Done, at most once; default: after Confirm, at least once")
	f.StringVar(&s.halt, "halt", "", "`ID=POINT,…`: stop these requests there, until a line \"go on\" on stdin")
	if len(args) == 0 || strings.HasPrefix(args[0], "-") { // -h, or a flag before the command
		f.Usage()
		return flag.ErrHelp
	}
	name := args[0]
	if err := f.Parse(args[1:]); err != nil {
		return err
	}
	if name == "demo" {
		return demo(ctx, out)
	}
	options, err := server(s.redis)
	if err != nil {
		return fmt.Errorf("-redis is %q: %w", s.redis, err)
	}
	rdb := redis.NewClient(options)
	defer rdb.Close()
	switch rest := f.Args(); {
	case name == "worker" && len(rest) == 0:
		return runWorker(s, rdb)
	case name == "submit" && (len(rest) == 3 || len(rest) == 4):
		r := Request{ID: rest[0], Method: rest[1], URL: rest[2], Body: []byte(strings.Join(rest[3:], "")),
			Header: http.Header{"Idempotency-Key": {rest[0]}}}
		return submit(ctx, rdb, s.list(), r)
	case name == "results" && len(rest) == 0:
		return show(ctx, &results{rdb: rdb, prefix: s.prefix()}, out)
	}
	return fmt.Errorf("%q with %d arguments is no command; async-http -h lists them", name, f.NArg())
}

// server accepts host:port and URLs.
func server(addr string) (*redis.Options, error) {
	if strings.Contains(addr, "://") {
		return redis.ParseURL(addr)
	}
	return &redis.Options{Addr: addr}, nil
}

// submit puts a request into the list.
func submit(ctx context.Context, rdb redis.Cmdable, list string, r Request) error {
	job, err := r.job()
	if err != nil {
		return err
	}
	return rdb.LPush(ctx, list, job.Payload).Err()
}

// show prints the results, by ID.
func show(ctx context.Context, r *results, out io.Writer) error {
	rows, err := r.rdb.HVals(ctx, r.rows()).Result()
	if err != nil {
		return err
	}
	slices.Sort(rows) // they begin with the ID
	for _, text := range rows {
		var row result
		if err := json.Unmarshal([]byte(text), &row); err != nil {
			return fmt.Errorf("result %q: %w", text, err)
		}
		fmt.Fprintf(out, "%s %d %q %s fence %d, by %s\n", row.ID, row.Status, row.Body, row.Err, row.Fence, row.Worker)
	}
	return nil
}
