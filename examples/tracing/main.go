// Tracing shows how a trace survives the death of a worker: W3C trace context goes with the job, in its headers, and the run after a
// recovery has a link to the run before it. It needs nothing but Go: Redis is inside of the program, and the worker that dies is
// this program, run once more and killed with SIGKILL.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/crashsafe/recovery"
	"github.com/redis/go-redis/v9"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/propagation"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
)

const (
	redisEnv = "TRACING_REDIS" // makes this program the worker that is killed
	sending  = "sending "      // what a worker says when it is in the middle of a job
)

var (
	provider   = sdktrace.NewTracerProvider(sdktrace.WithSyncer(printer{}))
	tracer     = provider.Tracer("worker")
	propagator = propagation.TraceContext{}
)

func main() {
	ctx := context.Background()
	if addr := os.Getenv(redisEnv); addr != "" {
		doomed(ctx, addr)
		return
	}
	server := miniredis.NewMiniRedis() // instead of your Redis
	server.ClockTTL(true)
	check(server.Start())
	defer server.Close()

	rdb := redis.NewClient(&redis.Options{Addr: server.Addr()})
	check(push(ctx, rdb, message{Job: recovery.Job{ID: "mail-1", Queue: "mails", Payload: []byte("to: ann")}}))
	killWorker(server.Addr())

	r := start(ctx, rdb, "survivor")
	m := pop(ctx, rdb) // a moment later, from the survivor's sweep
	check(run(ctx, r, m, func(context.Context) error {
		fmt.Println("done with", m.Job.ID)
		return nil
	}))
	check(r.Stop(ctx))
	check(provider.Shutdown(ctx))
}

// message is a job in the queue, which is a list in Redis.
type message struct {
	Job      recovery.Job
	Recovery int // 0 for a job that was never recovered
}

// start joins the fleet. Orphans go back to the queue with their headers, and so with the trace context of the run that was lost.
func start(ctx context.Context, rdb *redis.Client, name string) *recovery.Recoverer {
	enqueue := func(ctx context.Context, o recovery.Orphan) error { return push(ctx, rdb, message{o.Job, o.Recovery}) }
	r, err := recovery.New(rdb, recovery.EnqueuerFunc(enqueue), recovery.Config{
		WorkerName:        name,
		HeartbeatInterval: 100 * time.Millisecond, // default: 5s
		OrphanThreshold:   500 * time.Millisecond, // default: 20s
		SweepInterval:     100 * time.Millisecond, // default: 5s
		Logger:            slog.New(slog.DiscardHandler),
	})
	check(err)
	check(r.Start(ctx))
	return r
}

// run runs a job, for the first time or again. Each run is a trace of its own, with a link to the run before: the dead one is not a parent
// that still waits for this one, and a job that is recovered a week later would stretch its trace by a week.
func run(ctx context.Context, r *recovery.Recoverer, m message, f func(context.Context) error) error {
	options := []trace.SpanStartOption{trace.WithNewRoot(), trace.WithAttributes(attribute.Int("recovery", m.Recovery))}
	before := trace.SpanContextFromContext(propagator.Extract(ctx, propagation.MapCarrier(m.Job.Headers)))
	if before.IsValid() {
		options = append(options, trace.WithLinks(trace.Link{SpanContext: before}))
	}
	ctx, take := tracer.Start(ctx, "take "+m.Job.ID, options...)
	defer take.End()
	headers := map[string]string{}
	maps.Copy(headers, m.Job.Headers)
	propagator.Inject(ctx, propagation.MapCarrier(headers)) // before Track: what Redis has is all that a peer will find
	m.Job.Headers = headers
	return r.Do(ctx, m.Job, func(ctx context.Context) error {
		// A span that is open when its process is killed is never exported. What the next run links to must be: it ends here, when
		// the job is in Redis and before it runs. The span of the work itself is a child, and dies with the worker.
		take.End()
		ctx, send := tracer.Start(ctx, "send "+m.Job.ID)
		defer send.End()
		return f(ctx)
	})
}

// doomed takes a job and never comes to its end.
func doomed(ctx context.Context, addr string) {
	go func() { // do not outlive the parent
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(1)
	}()
	rdb := redis.NewClient(&redis.Options{Addr: addr})
	m := pop(ctx, rdb)
	check(run(ctx, start(ctx, rdb, "doomed"), m, func(ctx context.Context) error {
		fmt.Println(sending + m.Job.ID)
		<-ctx.Done()
		return ctx.Err()
	}))
}

// killWorker starts a worker, and kills it in the middle of its job.
func killWorker(addr string) {
	self, err := os.Executable()
	check(err)
	worker := exec.Command(self)
	worker.Env = append(os.Environ(), redisEnv+"="+addr)
	worker.Stderr = os.Stderr
	_, err = worker.StdinPipe() // closed when this process ends
	check(err)
	stdout, err := worker.StdoutPipe()
	check(err)
	check(worker.Start())
	for lines := bufio.NewScanner(stdout); lines.Scan(); {
		fmt.Println(lines.Text())
		if strings.HasPrefix(lines.Text(), sending) {
			check(worker.Process.Kill())
		}
	}
	fmt.Println("worker:", worker.Wait())
}

func push(ctx context.Context, rdb *redis.Client, m message) error {
	text, err := json.Marshal(m)
	if err != nil {
		return recovery.Permanent(err)
	}
	return rdb.RPush(ctx, "mails", text).Err()
}

// pop waits for a job. A worker of yours must not lose one between here and Track: see the quickstart's.
func pop(ctx context.Context, rdb *redis.Client) (m message) {
	answer, err := rdb.BLPop(ctx, 10*time.Second, "mails").Result()
	check(err)
	check(json.Unmarshal([]byte(answer[1]), &m))
	return m
}

// printer is an exporter that prints a line for each span, instead of sending it to a collector.
type printer struct{}

func (printer) ExportSpans(_ context.Context, spans []sdktrace.ReadOnlySpan) error {
	for _, s := range spans {
		fmt.Printf("span %q trace=%s id=%s", s.Name(), s.SpanContext().TraceID(), s.SpanContext().SpanID())
		for _, a := range s.Attributes() {
			fmt.Printf(" %s=%s", a.Key, a.Value.Emit())
		}
		for _, l := range s.Links() {
			fmt.Printf(" link=%s/%s", l.SpanContext.TraceID(), l.SpanContext.SpanID())
		}
		fmt.Println()
	}
	return nil
}

func (printer) Shutdown(context.Context) error { return nil }

func check(err error) {
	if err != nil {
		panic(err)
	}
}
