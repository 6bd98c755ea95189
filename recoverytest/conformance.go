package recoverytest

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/crashsafe/recovery"
)

// Subject is an Enqueuer under test, and how to see what it did.
type Subject struct {
	Enqueuer recovery.Enqueuer
	// Delivered answers the payloads that have arrived so far, where a consumer would find them, in any order. It is called when no Enqueue is under way.
	Delivered func(t testing.TB) [][]byte
	// AtLeastOnce says that a repeated call with the same Key may deliver again, as a plain list does: whoever runs the jobs has to bear it.
	AtLeastOnce bool
	// Break, if there is one, makes the queue unusable: closes its connection, say.
	Break func(t testing.TB)
}

// EnqueuerConformance runs what every Enqueuer should pass, each part on a fresh Subject: payloads arrive byte for byte; a repeated call with the same Key does not
// deliver twice, unless the Subject is AtLeastOnce; the same job with another Key does; calls may be concurrent; a context that has ended does not keep a call; a batch
// answers for each; a queue that is broken makes an error.
func EnqueuerConformance(t *testing.T, factory func(t testing.TB) Subject) {
	t.Run("payload", func(t *testing.T) {
		for name, payload := range map[string][]byte{"empty": {}, "binary": {0, 255, '\r', '\n', '{'}, "large": bytes.Repeat([]byte("x"), 1<<20), "unicode": []byte("grüße \u2028")} {
			t.Run(name, func(t *testing.T) {
				s := factory(t)
				enqueue(t, s, orphan("job", "w-1/1", payload))
				got := s.Delivered(t)
				if len(got) != 1 || !bytes.Equal(got[0], payload) {
					t.Fatalf("recoverytest: delivered %s, not the payload of %d bytes, byte for byte", shortList(got), len(payload))
				}
			})
		}
	})
	t.Run("same Key", func(t *testing.T) {
		s := factory(t)
		o := orphan("job", "w-1/1", []byte("once"))
		enqueue(t, s, o)
		enqueue(t, s, o) // as after a sweeper that died before it could forget the lease
		if got := s.Delivered(t); len(got) < 1 || len(got) > 1 && !s.AtLeastOnce {
			t.Fatalf("recoverytest: Enqueue was repeated with the same Key, and delivered %d times: %s\n"+
				"remember Keys that were accepted; or set Subject.AtLeastOnce, if whoever runs the jobs can bear that", len(got), shortList(got))
		}
	})
	t.Run("same Key at the same time", func(t *testing.T) {
		s := factory(t)
		o := orphan("job", "w-1/1", []byte("once"))
		var wg sync.WaitGroup
		for range 8 { // two sweepers, one of which was slow
			wg.Go(func() { _ = s.Enqueuer.Enqueue(context.Background(), o) }) // an error is no promise
		}
		wg.Wait()
		enqueue(t, s, o)
		if got := s.Delivered(t); len(got) < 1 || len(got) > 1 && !s.AtLeastOnce {
			t.Fatalf("recoverytest: Enqueue was called with the same Key at the same time, and delivered %d times: %s", len(got), shortList(got))
		}
	})
	t.Run("same job, other Key", func(t *testing.T) {
		s := factory(t)
		enqueue(t, s, orphan("job", "w-1/1", []byte("a")))
		enqueue(t, s, orphan("job", "w-2/1", []byte("a"))) // a second run of the same job crashed, too
		if got := s.Delivered(t); len(got) != 2 {
			t.Fatalf("recoverytest: two runs of one job were lost, and %d came back: an Enqueuer must dedupe by Key, never by job ID", len(got))
		}
	})
	t.Run("concurrent", func(t *testing.T) {
		s := factory(t)
		const n = 50
		var wg sync.WaitGroup
		errs := make([]error, n)
		for i := range n {
			wg.Go(func() {
				errs[i] = s.Enqueuer.Enqueue(context.Background(), orphan(fmt.Sprint("job-", i), fmt.Sprint("w-1/", i), fmt.Append(nil, i)))
			})
		}
		wg.Wait()
		for _, err := range errs {
			if err != nil {
				t.Fatalf("recoverytest: Enqueue: %v", err)
			}
		}
		got := s.Delivered(t)
		if len(got) != n {
			t.Fatalf("recoverytest: %d concurrent calls were accepted, %d jobs arrived", n, len(got))
		}
		for i := range n {
			requireDelivered(t, got, fmt.Append(nil, i))
		}
	})
	if factory(t).Break != nil {
		t.Run("broken", func(t *testing.T) {
			s := factory(t)
			s.Break(t)
			ctx, cancel := context.WithTimeout(context.Background(), time.Second)
			defer cancel()
			if err := s.Enqueuer.Enqueue(ctx, orphan("job", "w-1/1", []byte("kept"))); err == nil {
				t.Fatal("recoverytest: the queue is broken, and Enqueue returned nil: the job would be forgotten")
			}
		})
	}
	t.Run("ended context", func(t *testing.T) {
		s := factory(t)
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		returned := make(chan error, 1)
		go func() { returned <- s.Enqueuer.Enqueue(ctx, orphan("job", "w-1/1", []byte("late"))) }()
		select {
		case err := <-returned:
			// nil promises that the job has arrived; an error promises nothing.
			if got := s.Delivered(t); err == nil && len(got) != 1 {
				t.Fatalf("recoverytest: Enqueue returned nil, and %d jobs arrived", len(got))
			}
		case <-time.After(10 * time.Second):
			t.Fatal("recoverytest: Enqueue goes on although its context has ended")
		}
	})
	if _, ok := factory(t).Enqueuer.(recovery.BatchEnqueuer); !ok {
		return
	}
	t.Run("batch", func(t *testing.T) {
		s := factory(t)
		batch := s.Enqueuer.(recovery.BatchEnqueuer)
		os := []recovery.Orphan{orphan("a", "w-1/1", []byte("a")), orphan("b", "w-1/2", []byte("b")), orphan("c", "w-1/3", []byte("c"))}
		for range 2 { // the second time must change nothing
			errs := batch.EnqueueAll(context.Background(), os)
			if errs != nil && len(errs) != len(os) {
				t.Fatalf("recoverytest: EnqueueAll answered %d errors for %d orphans: nil, or one for each", len(errs), len(os))
			}
			for i, err := range errs {
				if err != nil {
					t.Fatalf("recoverytest: EnqueueAll, orphan %d: %v", i, err)
				}
			}
		}
		got := s.Delivered(t)
		if len(got) != len(os) && !s.AtLeastOnce {
			t.Fatalf("recoverytest: %d orphans were enqueued in one call, twice, and delivered as %s", len(os), shortList(got))
		}
		for _, o := range os {
			requireDelivered(t, got, o.Payload)
		}
	})
}

func requireDelivered(t testing.TB, got [][]byte, payload []byte) {
	t.Helper()
	if !slices.ContainsFunc(got, func(g []byte) bool { return bytes.Equal(g, payload) }) {
		t.Fatalf("recoverytest: %q did not arrive: %s", payload, shortList(got))
	}
}

func enqueue(t testing.TB, s Subject, o recovery.Orphan) {
	t.Helper()
	if err := s.Enqueuer.Enqueue(context.Background(), o); err != nil {
		t.Fatalf("recoverytest: Enqueue: %v", err)
	}
}

func orphan(id, key string, payload []byte) recovery.Orphan {
	return recovery.Orphan{Job: recovery.Job{ID: id, Queue: "queue", Payload: payload}, Key: key, Recovery: 1, Worker: "w-1", TrackedAt: time.Now()}
}

func shortList(payloads [][]byte) string {
	var parts []string
	for _, p := range payloads {
		parts = append(parts, fmt.Sprintf("%.40q", p))
	}
	return "[" + strings.Join(parts, " ") + "]"
}
