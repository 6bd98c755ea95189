package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/crashsafe/recovery"
	"github.com/crashsafe/recovery/examples/internal/fleet"
	"github.com/crashsafe/recovery/recoverytest"
	"github.com/hibiken/asynq"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestEnqueuer_conformance(t *testing.T) {
	recoverytest.EnqueuerConformance(t, func(t testing.TB) recoverytest.Subject {
		w := newWorld(t)
		inspector := asynq.NewInspectorFromRedisClient(w.rdb)
		return recoverytest.Subject{
			Enqueuer: enqueuer{asynq.NewClientFromRedisClient(w.rdb), keep},
			Delivered: func(t testing.TB) (payloads [][]byte) {
				tasks, err := inspector.ListPendingTasks("queue", asynq.PageSize(1000))
				if !errors.Is(err, asynq.ErrQueueNotFound) {
					require.NoError(t, err)
				}
				for _, task := range tasks {
					payloads = append(payloads, task.Payload)
				}
				return payloads
			},
		}
	})
}

func TestEnqueuer_headers(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	enq := enqueuer{asynq.NewClientFromRedisClient(w.rdb), keep}
	o := recovery.Orphan{Job: recovery.Job{ID: "a", Queue: queue, Headers: map[string]string{"traceparent": "00-1"}}, Key: "w/1"}
	require.NoError(t, enq.Enqueue(t.Context(), o))
	info, err := asynq.NewInspectorFromRedisClient(w.rdb).GetTaskInfo(queue, "w/1")
	require.NoError(t, err)
	assert.Equal(t, o.Headers, info.Headers)
	o.Key, o.Headers = "w/2", map[string]string{"bytes": "\xff"}
	assert.ErrorContains(t, enq.Enqueue(t.Context(), o), `header "bytes": "\xff"`)
}

// A repetition that comes when the task is done: what Retention is for.
func TestEnqueuer_repeatedAfterTheTaskIsDone(t *testing.T) {
	for _, c := range []struct {
		retention time.Duration
		runs      []string
	}{
		{keep, []string{"a"}},
		{0, []string{"a", "a"}}, // asynq has forgotten the ID
	} {
		t.Run(fmt.Sprint(c.retention), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			w.runTasks()
			enq := enqueuer{asynq.NewClientFromRedisClient(w.rdb), c.retention}
			o := recovery.Orphan{Job: recovery.Job{ID: "a", Queue: queue, Payload: []byte("a")}, Key: "w/1"}
			require.NoError(t, enq.Enqueue(t.Context(), o))
			w.requireDone("a")
			w.awaitState("w/1", c.retention > 0)
			require.NoError(t, enq.Enqueue(t.Context(), o))
			fleet.Eventually(t, "no task waits", func() bool {
				n, err := w.rdb.LLen(t.Context(), "asynq:{"+queue+"}:pending").Result()
				return err == nil && n == 0
			})
			w.requireDone(c.runs...)
		})
	}
}

// runTasks is a worker of asynq in this process, which is not of the fleet: it hands nothing back.
func (w *world) runTasks() {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- work(ctx, w.rdb, settings{Stop: time.Second}, testHandler(w.rdb, false)) }()
	w.t.Cleanup(func() {
		cancel()
		assert.NoError(w.t, <-ended)
	})
}

// awaitState waits until asynq has noted that a task is done: kept as completed, or gone.
func (w *world) awaitState(id string, kept bool) {
	w.t.Helper()
	inspector := asynq.NewInspectorFromRedisClient(w.rdb)
	fleet.Eventually(w.t, "task "+id+" is done", func() bool {
		info, err := inspector.GetTaskInfo(queue, id)
		if !kept {
			return errors.Is(err, asynq.ErrTaskNotFound)
		}
		return err == nil && info.State == asynq.TaskStateCompleted
	})
}

// A receiver is killed in the middle of jobs that it has accepted. Those go to asynq; those that were done do not.
func TestReceiverKilled(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	receiver, url := w.startReceiver()
	var fast, all []string
	for i := range 20 {
		fast = append(fast, fmt.Sprint("fast-", i))
		all = append(all, fmt.Sprint("slow-", i), fast[i])
	}
	for _, payload := range all {
		w.post(url, payload)
	}
	w.requireDone(fast...)
	fleet.Eventually(t, "all that was done is noted", func() bool { // Done comes after the ledger: killed in between, a job would rightly run again
		workers, err := recovery.NewInspector(w.rdb, "webhooks").Workers(t.Context())
		return err == nil && len(workers) == 1 && workers[0].Inflight == 20
	})
	receiver.Kill()
	w.start(child{}) // a worker of asynq, and the only one who is left to notice
	w.requireDone(all...)
	w.awaitRest()
	w.requireDone(all...)
}

// A sweeper is killed when asynq has the task and recovery does not know it. Asynq runs the task; then the hand-back is repeated.
func TestSweeperKilled(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	receiver, url := w.startReceiver()
	w.post(url, "slow-1")
	receiver.Kill()
	sweeper := w.start(child{Settings: settings{Listen: "127.0.0.1:0"}, DieOnEnqueue: true})
	require.Equal(t, "signal: killed", sweeper.Wait())

	pending, err := asynq.NewInspectorFromRedisClient(w.rdb).ListPendingTasks(queue)
	require.NoError(t, err)
	require.Len(t, pending, 1)
	w.runTasks()
	w.requireDone("slow-1")
	w.awaitState(pending[0].ID, true)

	w.start(child{})
	w.awaitRest() // the claim has run out, Enqueue was repeated and refused, and the record is gone
	w.requireDone("slow-1")
	letters, err := recovery.NewInspector(w.rdb, "webhooks").DeadLetters(t.Context(), 0, 1)
	require.NoError(t, err)
	assert.Empty(t, letters)
}

// A receiver that is asked to leave hands over what it can't finish in time.
func TestReceiverLeaves(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	receiver, url := w.startReceiver()
	w.post(url, "slow-1")
	require.NoError(t, receiver.Stdin.Close())
	require.Equal(t, "exit status 1", receiver.Wait(), "not everything had ended")
	w.start(child{})
	w.requireDone("slow-1")
}

// What fails in the receiver is tried again by asynq.
func TestReceiver_failedJob(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	_, url := w.startReceiver()
	w.start(child{})
	w.post(url, "bad-1")
	w.requireDone("bad-1")
	w.awaitRest()
}

// Without a record there is no 202.
func TestReceiver_refuses(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	rec, err := recovery.New(w.rdb, enqueuer{asynq.NewClientFromRedisClient(w.rdb), keep}, recovery.Config{})
	require.NoError(t, err)
	rc := &receiver{rec: rec, log: slog.New(slog.DiscardHandler)} // not started: it tracks nothing
	for _, c := range []struct {
		id, body string
		status   int
	}{
		{"a", "a", http.StatusServiceUnavailable},
		{"", "a", http.StatusBadRequest},
		{"a", strings.Repeat("x", maxBody+1), http.StatusBadRequest},
	} {
		req := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/", io.NopCloser(strings.NewReader(c.body)))
		req.Header.Set(idHeader, c.id)
		answer := httptest.NewRecorder()
		rc.ServeHTTP(answer, req)
		assert.Equal(t, c.status, answer.Code, "%q", c.id)
	}
}
