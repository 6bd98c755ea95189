// Package fleet is what the tests of the examples share: a redis-server and workers of a test's own, which are real processes that it can
// kill, freeze and listen to. All of them end with the test.
//
// Workers are the test binary itself, run again: TestMain calls Main, and Self is the command. Eventually waits for what they do, Reports and
// Ledger read what they have left.
package fleet

import (
	"os"
	"testing"
	"time"
)

// Patience is how long anything may take that a test waits for.
const Patience = 30 * time.Second

// Eventually waits for a condition. It is checked in the test's own goroutine, so it may end the test.
func Eventually(t testing.TB, what string, condition func() bool) {
	t.Helper()
	for end := time.Now().Add(Patience); !condition(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within %v: %s", Patience, what)
		}
	}
}

// Need ends a test for which something is missing on this machine. Only CI insists on it; elsewhere the test is skipped.
func Need(t testing.TB, err error) {
	t.Helper()
	switch {
	case err != nil && os.Getenv("CI") != "":
		t.Fatalf("%v, and CI is set: `make test` installs it", err)
	case err != nil:
		t.Skipf("%v: `make test` installs it", err)
	}
}
