package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/crashsafe/recovery"
	"github.com/redis/go-redis/v9"
)

// setup is what the commands share.
type setup struct {
	redis     string
	namespace string
	name      string
	places    int
	threshold time.Duration
	timeout   time.Duration
	grace     time.Duration
	doneFirst bool
	halt      string
}

func (s setup) prefix() string { return "async-http:" + s.namespace + ":" }
func (s setup) list() string   { return s.prefix() + "queue" }

// report is a line on a worker's stdout.
type report struct {
	Point string
	ID    string `json:",omitempty"`
	Fence int64  `json:",omitempty"`
	Err   string `json:",omitempty"`
}

// Points that are not of one request.
const (
	ready   = "ready"   // the worker has joined
	halted  = "halted"  // the request waits, by -halt
	refused = "refused" // a request from stdin, by Send
	quiet   = "quiet"   // no more requests are taken
	stopped = "stopped" // Err says whether some were handed back
)

// worker is one process with a pool.
type worker struct {
	pool  *Pool
	halts map[string]string // request -> point
	going chan struct{}     // closed when halted requests may go on

	mu  sync.Mutex // guards out
	out *json.Encoder
}

// runWorker sends what is in the list, and what comes in on stdin, until SIGTERM or the end of stdin.
func runWorker(s setup, rdb *redis.Client) error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	w := &worker{halts: map[string]string{}, going: make(chan struct{}), out: json.NewEncoder(os.Stdout)}
	for _, h := range strings.Split(s.halt, ",") {
		id, point, _ := strings.Cut(h, "=")
		w.halts[id] = point
	}
	rows := &results{rdb: rdb, prefix: s.prefix(), worker: s.name}
	var err error
	w.pool, err = NewPool(rdb, Config{
		Recovery: recovery.Config{
			Namespace:         s.namespace,
			WorkerName:        s.name,
			HeartbeatInterval: s.threshold / 5,
			OrphanThreshold:   s.threshold,
			EnqueueTimeout:    s.threshold, // a request whose sweeper is killed, too, waits for twice that: 21s by default
			Logger:            slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError})),
		},
		List: s.list(), Places: s.places, Timeout: s.timeout, MaxBody: 1 << 20,
		Callback: rows.keep, DoneFirst: s.doneFirst, At: w.at,
	})
	if err != nil {
		return err
	}
	if err := w.pool.Start(ctx); err != nil {
		return err
	}
	w.tell(report{Point: ready})
	go w.listen(ctx, stop)
	<-ctx.Done()
	w.pool.Quiet()
	w.tell(report{Point: quiet})
	limited, cancel := context.WithTimeout(context.Background(), s.grace)
	defer cancel()
	err = w.pool.Shutdown(limited)
	r := report{Point: stopped}
	if errors.Is(err, context.DeadlineExceeded) { // what was left is back in the list: that is how it should be
		r.Err, err = err.Error(), nil
	}
	w.tell(r)
	return err
}

// at reports where a request is, and stops it there if -halt says so, until a line "go on" or until the request is lost.
func (w *worker) at(point string, l *recovery.Lease, err error) {
	r := report{Point: point, ID: l.Job().ID, Fence: l.Fence()}
	if err != nil {
		r.Err = err.Error()
	}
	w.tell(r)
	if w.halts[r.ID] != point {
		return
	}
	w.tell(report{Point: halted, ID: r.ID, Fence: r.Fence})
	over := l.Context().Done()
	if point == done {
		over = nil // Done ends the context, too
	}
	select {
	case <-w.going:
	case <-over:
	}
}

// tell writes one line. What was written survives a kill -9 of the writer, in the pipe.
func (w *worker) tell(r report) {
	w.mu.Lock()
	defer w.mu.Unlock()
	_ = w.out.Encode(r)
}

// listen reads stdin: requests as JSON, one on a line, or "go on". Its end ends the worker, so that it does not outlive whoever started it.
func (w *worker) listen(ctx context.Context, stop func()) {
	goOn := sync.OnceFunc(func() { close(w.going) })
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 4<<20)
	for lines.Scan() {
		if lines.Text() == "go on" {
			goOn()
			continue
		}
		var r Request
		err := json.Unmarshal(lines.Bytes(), &r)
		if err == nil {
			err = w.pool.Send(ctx, r)
		}
		if err != nil {
			w.tell(report{Point: refused, ID: r.ID, Err: err.Error()})
		}
	}
	stop()
}
