package recoverytest_test

import (
	"context"
	"maps"
	"slices"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/crashsafe/recovery"
	"github.com/crashsafe/recovery/recoverytest"
)

// A first crash test. The bubble makes its time fake: the 20 seconds after which a worker counts as dead pass in milliseconds.
func Example() {
	_ = func(t *testing.T) { // func TestMailer_crash(t *testing.T)
		synctest.Test(t, func(t *testing.T) {
			env := recoverytest.New(t)
			doomed, _ := env.Start("doomed"), env.Start("survivor")
			if _, err := doomed.Track(context.Background(), recovery.Job{ID: "mail-1", Payload: []byte("to: ann")}); err != nil {
				t.Fatal(err)
			}
			doomed.Crash()
			env.RequireHandedBack("mail-1")
		})
	}
}

// shelf is an Enqueuer that remembers Keys.
type shelf struct {
	mu   sync.Mutex
	jobs map[string][]byte // by Key
}

func (s *shelf) Enqueue(_ context.Context, o recovery.Orphan) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.jobs[o.Key] = o.Payload
	return nil
}

// An Enqueuer of your own is asked for what the library relies on.
func ExampleEnqueuerConformance() {
	_ = func(t *testing.T) { // func TestShelf(t *testing.T)
		recoverytest.EnqueuerConformance(t, func(t testing.TB) recoverytest.Subject {
			s := &shelf{jobs: map[string][]byte{}} // fresh and empty
			return recoverytest.Subject{Enqueuer: s, Delivered: func(testing.TB) [][]byte { return slices.Collect(maps.Values(s.jobs)) }}
		})
	}
}
