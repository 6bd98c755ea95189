package recovery

import (
	"os"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// asNobody calls f as a user whom modes keep out. Root, as which CI runs, they do not: then this thread, and no other, becomes nobody for as long
// as f takes.
func asNobody(t *testing.T, dir string, f func()) {
	t.Helper()
	if os.Geteuid() != 0 {
		f()
		return
	}
	for up := filepath.Dir(dir); up != filepath.Clean(os.TempDir()) && up != "/"; up = filepath.Dir(up) {
		require.NoError(t, os.Chmod(up, 0o755)) // nobody must get there
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	const nobody = 65534
	require.NoError(t, syscall.Setfsuid(nobody))
	defer func() { require.NoError(t, syscall.Setfsuid(0)) }()
	f()
}
