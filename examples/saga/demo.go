package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/crashsafe/recovery"
	"github.com/redis/go-redis/v9"
)

const demoPatience = 20 * time.Second

// demo submits three orders. Ann's is fine, and its worker is killed right after the charge, before that is written down. Bob's can't be shipped, and is
// undone. Cid's can't be shipped either, and his money can't be given back before a person opens a door.
func demo(ctx context.Context, out io.Writer) error {
	ctx, cancel := context.WithTimeout(ctx, demoPatience)
	defer cancel()
	server := miniredis.NewMiniRedis()
	server.ClockTTL(true)
	if err := server.Start(); err != nil {
		return err
	}
	defer server.Close()
	rdb := redis.NewClient(&redis.Options{Addr: server.Addr()})
	defer rdb.Close()
	d := desk{setup: setup{redis: server.Addr(), namespace: "demo"}, rdb: rdb, out: out}
	do := func(lines ...string) error {
		for _, line := range lines {
			fmt.Fprintln(out, "$ saga", line)
			words := strings.Fields(line)
			if err := d.do(ctx, words[0], words[1:]); err != nil {
				return err
			}
		}
		return nil
	}
	err := do("fill stock:book 10", "fill balance:ann 100", "fill balance:bob 100", "fill balance:cid 100", "fill places:north 5",
		"close undo:charge", "submit ann book ann 30 north", "submit cid book cid 30 south")
	if err != nil {
		return err
	}
	one, err := d.hire(ctx, "one", "-halt", "ann=applied:charge")
	if err != nil {
		return err
	}
	defer one.leave()
	if err := one.until(halted, gaveUp); err != nil {
		return err
	}
	if err := one.cmd.Process.Kill(); err != nil {
		return err
	}
	fmt.Fprintln(out, "  kill -9 of worker one")
	if err := do("open undo:charge", "submit bob book bob 30 south"); err != nil {
		return err
	}
	two, err := d.hire(ctx, "two")
	if err != nil {
		return err
	}
	defer two.leave()
	if err := two.until(completed, rolledBack); err != nil {
		return err
	}
	key, err := d.firstLetter(ctx)
	if err != nil {
		return err
	}
	if err := do("letters", "requeue "+key); err != nil {
		return err
	}
	if err := two.until(rolledBack); err != nil {
		return err
	}
	return do("letters", "ledger")
}

// firstLetter waits for a dead letter: that of a worker which is killed while it writes it is written by a peer, a moment later.
func (d desk) firstLetter(ctx context.Context) (string, error) {
	i := recovery.NewInspector(d.rdb, d.namespace)
	for {
		letters, err := i.DeadLetters(ctx, 0, 1)
		if err != nil {
			return "", err
		}
		if len(letters) > 0 {
			return letters[0].Key, nil
		}
		if !wait(ctx, 50*time.Millisecond) {
			return "", ctx.Err()
		}
	}
}

// hand is a worker process, as the demo sees it.
type hand struct {
	name  string
	cmd   *exec.Cmd
	lines *bufio.Scanner
	stdin io.Closer
	out   io.Writer
}

// hire starts this program again, as a worker.
func (d desk) hire(ctx context.Context, name string, more ...string) (*hand, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	args := []string{"worker", "-redis", d.redis, "-namespace", d.namespace, "-name", name, "-threshold", "1s"}
	h := &hand{name: name, cmd: exec.CommandContext(ctx, self, append(args, more...)...), out: d.out}
	h.cmd.Stderr = os.Stderr
	stdout, err := h.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if h.stdin, err = h.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	h.lines = bufio.NewScanner(stdout)
	return h, h.cmd.Start()
}

// until shows what the worker says until it has said each of points.
func (h *hand) until(points ...string) error {
	missing := map[string]bool{}
	for _, p := range points {
		missing[p] = true
	}
	for len(missing) > 0 {
		if !h.lines.Scan() {
			return fmt.Errorf("worker %s ended before %v: %w", h.name, points, h.cmd.Wait())
		}
		var r report
		if err := json.Unmarshal(h.lines.Bytes(), &r); err != nil {
			return err
		}
		fmt.Fprintf(h.out, "  %s: %s %s, attempt %d\n", h.name, r.Run.Saga, r.Point, r.Run.Attempt)
		delete(missing, r.Point)
	}
	return nil
}

// leave asks the worker to go, and waits until it has.
func (h *hand) leave() {
	_ = h.stdin.Close()
	for h.lines.Scan() {
	}
	_ = h.cmd.Wait()
}
