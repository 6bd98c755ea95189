// Saga runs orders as rows of steps that can be undone, on workers that may be killed at any moment. See README.md.
//
//	go run ./examples/saga demo
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/crashsafe/recovery"
	"github.com/redis/go-redis/v9"
)

const usage = `saga COMMAND [flags] [arguments]

  demo                          all of it in a few seconds, on a Redis inside of the program
  worker                        runs sagas; -halt ORDER=POINT,… stops them at a point, until a line on stdin
  fill ACCOUNT AMOUNT           for example stock:book 10, balance:ann 100, places:north 5
  close DOOR, open DOOR         a door is apply:STEP or undo:STEP; the steps are reserve, charge, ship
  submit ID ITEM CUSTOMER PRICE ROUTE
  ledger                        what was done and undone
  letters                       sagas that wait for a person
  requeue KEY                   sends one back, to where it was

flags:
`

func main() {
	err := command(context.Background(), os.Args[1:], os.Stdout)
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "saga:", err)
		os.Exit(1)
	}
}

func command(ctx context.Context, args []string, out io.Writer) error {
	var s setup
	f := flag.NewFlagSet("saga", flag.ContinueOnError)
	f.Usage = func() { fmt.Fprint(f.Output(), usage); f.PrintDefaults() }
	f.StringVar(&s.redis, "redis", "127.0.0.1:6379", "`address` of a Redis server: host:port, redis:// or unix:// URL")
	f.StringVar(&s.namespace, "namespace", "saga", "`name` of the fleet")
	f.StringVar(&s.name, "name", fmt.Sprintf("worker-%d", os.Getpid()), "`name` of the worker")
	f.IntVar(&s.concurrency, "concurrency", 4, "sagas that a worker runs at a time")
	f.DurationVar(&s.threshold, "threshold", 5*time.Second, "silence after which a worker is dead")
	f.IntVar(&s.limit, "max-recoveries", 3, "crashes after which a saga becomes a dead letter")
	f.DurationVar(&s.pace, "pace", 0, "pause at every point, for an audience")
	f.StringVar(&s.halt, "halt", "", "`ORDER=POINT,…`: stop these sagas there")
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
	if name == "worker" {
		return runWorker(s, rdb)
	}
	return desk{setup: s, rdb: rdb, out: out}.do(ctx, name, f.Args())
}

// server accepts host:port and URLs.
func server(addr string) (*redis.Options, error) {
	if strings.Contains(addr, "://") {
		return redis.ParseURL(addr)
	}
	return &redis.Options{Addr: addr}, nil
}

// desk is where people are: they submit orders, and look after what is stuck.
type desk struct {
	setup
	rdb *redis.Client
	out io.Writer
}

func (d desk) do(ctx context.Context, name string, args []string) error {
	want := map[string]int{"fill": 2, "close": 1, "open": 1, "submit": 5, "ledger": 0, "letters": 0, "requeue": 1}
	n, ok := want[name]
	if !ok {
		return fmt.Errorf("there is no command %q; saga -h lists them", name)
	}
	if len(args) != n {
		return fmt.Errorf("%s takes %d arguments, not %d: %q", name, n, len(args), args)
	}
	accounts := &store{rdb: d.rdb, prefix: d.prefix()}
	switch name {
	case "fill":
		var amount int
		if _, err := fmt.Sscan(args[1], &amount); err != nil {
			return fmt.Errorf("AMOUNT is %q: %w", args[1], err)
		}
		return d.rdb.IncrBy(ctx, accounts.account(args[0]), int64(amount)).Err()
	case "close":
		return d.rdb.SAdd(ctx, accounts.closed(), args[0]).Err()
	case "open":
		return d.rdb.SRem(ctx, accounts.closed(), args[0]).Err()
	case "submit":
		o := Order{ID: args[0], Item: args[1], Customer: args[2], Route: args[4]}
		if _, err := fmt.Sscan(args[3], &o.Price); err != nil || o.Price < 0 {
			return fmt.Errorf("PRICE is %q, must be a number and not negative", args[3])
		}
		return submit(ctx, d.rdb, d.list(), o)
	case "ledger":
		entries, err := accounts.entries(ctx)
		for _, e := range entries {
			fmt.Fprintf(d.out, "%-5s %-8s %-8s %4d %-14s attempt %d, recovery %d, fence %d, by %s\n",
				e.What, e.Saga, e.Step, e.Amount, e.Account, e.Attempt, e.Recovery, e.Fence, e.Worker)
		}
		return err
	case "letters":
		return d.letters(ctx)
	}
	i := recovery.NewInspector(d.rdb, d.namespace)
	return i.Requeue(ctx, args[0], requeuer{rdb: d.rdb, list: d.list(), prefix: d.prefix()})
}

// letters shows what a person has to decide on: the saga, where it stands, why it is here, and what it has been through.
func (d desk) letters(ctx context.Context) error {
	const page = 100
	i := recovery.NewInspector(d.rdb, d.namespace)
	for offset := 0; ; offset += page {
		letters, err := i.DeadLetters(ctx, offset, page)
		if err != nil || len(letters) == 0 {
			return err
		}
		for _, l := range letters {
			m, s, err := read(l.Job)
			if err = errors.Join(l.Err, err); err != nil {
				fmt.Fprintf(d.out, "%s unreadable: %v\n", l.Key, err)
				continue
			}
			fmt.Fprintf(d.out, "%s %s round %d %s next %d attempt %d crashes %d: %s; %s; %s\n",
				l.Key, m.Order.ID, m.Round, s.Phase, s.Next, s.Attempt, len(l.Crashes), s.Why, l.Cause, l.LastError)
		}
	}
}
