package recoverytest_test

import (
	"context"
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

// An Enqueuer of your own is asked for what the library relies on.
func ExampleEnqueuerConformance() {
	_ = func(t *testing.T) { // func TestMyEnqueuer(t *testing.T)
		recoverytest.EnqueuerConformance(t, func(t testing.TB) recoverytest.Subject {
			q := &recoverytest.Enqueuer{} // instead of yours, fresh and empty
			return recoverytest.Subject{Enqueuer: q, Delivered: func(testing.TB) (payloads [][]byte) {
				seen := map[string]bool{}
				for _, o := range q.Orphans() {
					if !seen[o.Key] {
						payloads, seen[o.Key] = append(payloads, o.Payload), true
					}
				}
				return payloads
			}}
		})
	}
}
