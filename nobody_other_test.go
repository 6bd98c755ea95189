//go:build !linux

package recovery

import (
	"os"
	"testing"
)

// asNobody calls f as a user whom modes keep out.
func asNobody(t *testing.T, _ string, f func()) {
	t.Helper()
	if os.Geteuid() <= 0 {
		t.Skip("root, or Windows: modes keep nobody out")
	}
	f()
}
