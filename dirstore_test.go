package recovery

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const leaseKey = "host:123-abc/17"

func newDirStore(t *testing.T) *DirStore {
	t.Helper()
	s, err := NewDirStore(filepath.Join(t.TempDir(), "payloads"))
	require.NoError(t, err)
	return s
}

func (s *DirStore) file(key string) string { return filepath.Join(s.place(key)) }

// files lists every file below the store's parent, relative to the store.
func (s *DirStore) files(t *testing.T) (names []string) {
	t.Helper()
	require.NoError(t, filepath.WalkDir(filepath.Dir(s.dir), func(path string, e fs.DirEntry, err error) error {
		if err == nil && !e.IsDir() {
			name, rerr := filepath.Rel(s.dir, path)
			names = append(names, name)
			return rerr
		}
		return err
	}))
	return names
}

func backdate(t *testing.T, path string, d time.Duration) {
	t.Helper()
	then := time.Now().Add(-d)
	require.NoError(t, os.Chtimes(path, then, then))
}

func TestDirStore_roundTrip(t *testing.T) {
	t.Parallel()
	s := newDirStore(t)
	all := make([]byte, 256)
	for i := range all {
		all[i] = byte(i)
	}
	payloads := map[string][]byte{
		leaseKey: all, "": []byte("no key"), "empty": {}, "nil": nil, "big": bytes.Repeat(all, 1<<12), string(all): []byte("x"),
		strings.Repeat("k", 1<<10): []byte("long key"), "a": []byte("a"), "A": []byte("A"),
	}
	for key, p := range payloads {
		require.NoError(t, s.Put(bg, key, p))
	}
	other, err := NewDirStore(s.dir) // another worker
	require.NoError(t, err)
	for key, p := range payloads {
		got, err := other.Get(bg, key)
		require.NoError(t, err)
		assert.True(t, bytes.Equal(p, got), "%q", key)
	}
	assert.Len(t, s.files(t), len(payloads), "no temporary file stays")
	for key := range payloads {
		require.NoError(t, other.Delete(bg, key))
	}
	assert.Empty(t, s.files(t))
}

func TestDirStore_modes(t *testing.T) {
	t.Parallel()
	if runtime.GOOS == "windows" {
		t.Skip("no modes")
	}
	s := newDirStore(t)
	require.NoError(t, s.Put(bg, leaseKey, []byte("secret")))
	for path, want := range map[string]fs.FileMode{
		s.dir: fs.ModeDir | 0o700, filepath.Dir(s.file(leaseKey)): fs.ModeDir | 0o700, s.file(leaseKey): 0o600,
	} {
		info, err := os.Stat(path)
		require.NoError(t, err)
		assert.Equal(t, want, info.Mode(), path)
	}
}

func TestDirStore_Put_overwrites(t *testing.T) {
	t.Parallel()
	s := newDirStore(t)
	for _, p := range []string{"first, and longer", "second", ""} {
		require.NoError(t, s.Put(bg, leaseKey, []byte(p)))
		got, err := s.Get(bg, leaseKey)
		require.NoError(t, err)
		assert.Equal(t, p, string(got))
	}
	assert.Len(t, s.files(t), 1)
}

func TestDirStore_Put_keepsNoReference(t *testing.T) {
	t.Parallel()
	s := newDirStore(t)
	p := []byte("payload")
	require.NoError(t, s.Put(bg, leaseKey, p))
	clear(p)
	got, err := s.Get(bg, leaseKey)
	require.NoError(t, err)
	assert.Equal(t, "payload", string(got))
}

func TestDirStore_missing(t *testing.T) {
	t.Parallel()
	s := newDirStore(t)
	_, err := s.Get(bg, leaseKey)
	assert.ErrorIs(t, err, fs.ErrNotExist)
	assert.ErrorContains(t, err, fmt.Sprintf("get payload %q", leaseKey))
	assert.False(t, isPermanent(err))
	require.NoError(t, s.Delete(bg, leaseKey))
	require.NoError(t, s.Put(bg, leaseKey, nil))
	require.NoError(t, s.Delete(bg, leaseKey))
	require.NoError(t, s.Delete(bg, leaseKey))
	_, err = s.Get(bg, leaseKey)
	assert.ErrorIs(t, err, fs.ErrNotExist)
}

// A store that is away must not look like one without the payload: the job would be given up.
func TestDirStore_away(t *testing.T) {
	t.Parallel()
	for name, empty := range map[string]bool{"directory is gone": false, "mount point is empty": true} {
		t.Run(name, func(t *testing.T) {
			s := newDirStore(t)
			require.NoError(t, s.Put(bg, leaseKey, []byte("payload")))
			mount := s.dir + ".away"
			require.NoError(t, os.Rename(s.dir, mount))
			if empty {
				require.NoError(t, os.Mkdir(s.dir, 0o700))
			}
			_, gerr := s.Get(bg, leaseKey)
			for what, err := range map[string]error{"get": gerr, "put": s.Put(bg, leaseKey, nil), "delete": s.Delete(bg, leaseKey)} {
				require.Error(t, err, what)
				assert.NotErrorIs(t, err, fs.ErrNotExist, what)
				assert.False(t, isPermanent(err), what)
				assert.ErrorContains(t, err, what+" payload")
				assert.ErrorContains(t, err, s.dir)
			}
			_, err := s.Sweep(bg, time.Hour)
			assert.ErrorContains(t, err, s.dir)

			require.NoError(t, os.RemoveAll(s.dir))
			require.NoError(t, os.Rename(mount, s.dir))
			got, err := s.Get(bg, leaseKey)
			require.NoError(t, err)
			assert.Equal(t, "payload", string(got))
		})
	}
}

func TestDirStore_Get_corrupt(t *testing.T) {
	t.Parallel()
	s := newDirStore(t)
	require.NoError(t, s.Put(bg, leaseKey, []byte("payload")))
	good, err := os.ReadFile(s.file(leaseKey))
	require.NoError(t, err)
	for i := range good {
		for bit := range 8 {
			bad := bytes.Clone(good)
			bad[i] ^= 1 << bit
			p, err := parsePayload(bad, leaseKey)
			require.Error(t, err, "byte %d, bit %d", i, bit)
			assert.Nil(t, p)
		}
	}
	good[len(good)-1]++
	require.NoError(t, os.WriteFile(s.file(leaseKey), good, 0o600))
	_, err = s.Get(bg, leaseKey)
	assert.ErrorContains(t, err, "damaged: checksum of")
	assert.ErrorContains(t, err, s.file(leaseKey))
	assert.True(t, isPermanent(err))
	assert.NotErrorIs(t, err, fs.ErrNotExist)
	assert.FileExists(t, s.file(leaseKey), "it stays, for a person to look at")
}

func TestDirStore_Get_truncated(t *testing.T) {
	t.Parallel()
	s := newDirStore(t)
	require.NoError(t, s.Put(bg, leaseKey, []byte("payload")))
	good, err := os.ReadFile(s.file(leaseKey))
	require.NoError(t, err)
	for n := range good {
		require.NoError(t, os.Truncate(s.file(leaseKey), int64(len(good)-1-n)))
		_, err := s.Get(bg, leaseKey)
		require.ErrorContains(t, err, "cut short")
		assert.True(t, isPermanent(err))
	}
	_, err = parsePayload(append(good, 0), leaseKey)
	assert.ErrorContains(t, err, "damaged")
	_, err = parsePayload(append(good[:len(good)-7], make([]byte, 7)...), leaseKey) // a hole
	assert.ErrorContains(t, err, "damaged")
}

func TestDirStore_Get_foreign(t *testing.T) {
	t.Parallel()
	s := newDirStore(t)
	require.NoError(t, os.WriteFile(s.file(leaseKey), []byte("#!/bin/sh"), 0o600))
	_, err := s.Get(bg, leaseKey)
	assert.ErrorContains(t, err, "not a payload file, or of another version")
	require.NoError(t, os.WriteFile(s.file(leaseKey), make([]byte, 4096), 0o600))
	_, err = s.Get(bg, leaseKey)
	assert.ErrorContains(t, err, "not a payload file")

	// What a collision of hashes would be, or a file that somebody renamed.
	require.NoError(t, s.Put(bg, "other", []byte("payload")))
	require.NoError(t, os.Rename(s.file("other"), s.file(leaseKey)))
	_, err = s.Get(bg, leaseKey)
	assert.ErrorContains(t, err, `holds the payload of "other"`)
	assert.True(t, isPermanent(err))

	require.NoError(t, os.Remove(s.file(leaseKey)))
	require.NoError(t, os.Mkdir(s.file(leaseKey), 0o700))
	_, err = s.Get(bg, leaseKey)
	assert.ErrorContains(t, err, s.file(leaseKey))
	assert.ErrorContains(t, s.Put(bg, leaseKey, nil), s.file(leaseKey))
	assert.Empty(t, s.files(t), "Put took its temporary file away")
}

// The format must not change: programs of different versions share a directory.
func TestDirStore_format(t *testing.T) {
	t.Parallel()
	s := newDirStore(t)
	require.NoError(t, s.Put(bg, "w/1", []byte("payload")))
	raw, err := os.ReadFile(filepath.Join(s.dir, "e0", "e0dcb624c5d54918b0a46dd7033b082af177244084e11058bff513df82335bc0"))
	require.NoError(t, err)
	assert.Equal(t, "recovery payload 1\n\xce\x9e\xc8\x85\x07\x03w/1payload", string(raw))
}

func FuzzDirStore_parsePayload(f *testing.F) {
	whole := append(payloadHeader(leaseKey, []byte("payload")), "payload"...)
	f.Add(whole)
	f.Add(whole[:len(whole)-1])
	f.Add([]byte(payloadMagic + "\x00\x00\x00\x00\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"))
	f.Fuzz(func(t *testing.T, raw []byte) {
		p, err := parsePayload(raw, leaseKey)
		if err == nil {
			require.True(t, bytes.HasSuffix(raw, p))
		}
		got, err := parsePayload(append(payloadHeader(string(raw), raw), raw...), string(raw))
		require.NoError(t, err)
		require.True(t, bytes.Equal(raw, got))
	})
}

func TestDirStore_keysCannotEscape(t *testing.T) {
	t.Parallel()
	s := newDirStore(t)
	keys := []string{"../x", "../../../../tmp/x", "/etc/passwd", "..", ".", "/", "a/../../b", "x\x00y", `..\x`, "put-1.tmp"}
	for _, key := range keys {
		require.NoError(t, s.Put(bg, key, []byte(key)), key)
	}
	for _, key := range keys {
		got, err := s.Get(bg, key)
		require.NoError(t, err)
		assert.Equal(t, key, string(got))
	}
	files := s.files(t)
	assert.Len(t, files, len(keys))
	for _, name := range files {
		assert.Regexp(t, `^([0-9a-f]{2})[/\\][0-9a-f]{64}$`, name)
		assert.Equal(t, name[:2], name[3:5])
	}
}

func TestDirStore_contextEnded(t *testing.T) {
	t.Parallel()
	s := newDirStore(t)
	require.NoError(t, s.Put(bg, leaseKey, []byte("payload")))
	backdate(t, s.file(leaseKey), time.Hour)
	ctx, cancel := context.WithCancel(bg)
	cancel()
	_, err := s.Get(ctx, leaseKey)
	assert.ErrorIs(t, err, context.Canceled)
	assert.ErrorIs(t, s.Put(ctx, leaseKey, nil), context.Canceled)
	assert.ErrorIs(t, s.Delete(ctx, leaseKey), context.Canceled)
	n, err := s.Sweep(ctx, time.Minute)
	assert.ErrorIs(t, err, context.Canceled)
	assert.Zero(t, n)
	assert.Len(t, s.files(t), 1)
}

// endsAt is a context that ends when it is looked at for the n-th time.
type endsAt struct {
	context.Context
	n int
}

func (c *endsAt) Err() error {
	if c.n--; c.n <= 0 {
		return context.Canceled
	}
	return nil
}

func TestDirStore_Put_contextEndsBetweenSteps(t *testing.T) {
	t.Parallel()
	s := newDirStore(t)
	for _, n := range []int{1, 2, 3} {
		assert.ErrorIs(t, s.Put(&endsAt{bg, n}, leaseKey, []byte("payload")), context.Canceled)
		assert.Empty(t, s.files(t), "neither a payload nor a temporary file")
	}
	require.NoError(t, s.Put(&endsAt{bg, 4}, leaseKey, []byte("payload")), "after the rename nothing is undone")
}

func TestDirStore_concurrent(t *testing.T) {
	t.Parallel()
	s := newDirStore(t)
	shared := func(g int) []byte { return bytes.Repeat([]byte{byte(g)}, 1000+g) }
	require.NoError(t, s.Put(bg, "shared", shared(0)))
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			for i := range 10 {
				key := fmt.Sprint(g, "/", i)
				assert.NoError(t, s.Put(bg, key, []byte(key)))
				assert.NoError(t, s.Put(bg, "shared", shared(g)))
				got, err := s.Get(bg, key)
				assert.NoError(t, err)
				assert.Equal(t, key, string(got))
				got, err = s.Get(bg, "shared")
				if assert.NoError(t, err) {
					assert.Equal(t, shared(int(got[0])), got, "one or the other, never a mixture")
				}
				_, err = s.Sweep(bg, time.Hour)
				assert.NoError(t, err)
				assert.NoError(t, s.Delete(bg, key))
			}
		})
	}
	wg.Wait()
	assert.Len(t, s.files(t), 1)
}

func TestDirStore_Sweep(t *testing.T) {
	t.Parallel()
	s := newDirStore(t)
	for _, key := range []string{"old", "older", "new"} {
		require.NoError(t, s.Put(bg, key, []byte(key)))
	}
	sub := filepath.Dir(s.file("new"))
	write := func(name string) string {
		require.NoError(t, os.WriteFile(name, nil, 0o600))
		return name
	}
	old := []string{s.file("old"), s.file("older"), write(filepath.Join(sub, "put-1.tmp")), write(filepath.Join(s.dir, "put-2.tmp"))}
	stays := []string{
		s.file("new"), write(filepath.Join(sub, "put-3.tmp")),
		write(filepath.Join(s.dir, "README")), write(filepath.Join(sub, ".nfs000123")), write(filepath.Join(s.dir, strings.Repeat("a", 64))),
		write(filepath.Join(sub, strings.Repeat("A", 64))), write(filepath.Join(sub, "put-4")),
	}
	for _, path := range append(old, stays[2:]...) {
		backdate(t, path, 2*time.Hour)
	}
	for _, d := range []time.Duration{0, -time.Hour} {
		_, err := s.Sweep(bg, d)
		assert.ErrorContains(t, err, "olderThan is "+d.String())
	}
	n, err := s.Sweep(bg, 3*time.Hour)
	require.NoError(t, err)
	assert.Zero(t, n)
	n, err = s.Sweep(bg, time.Hour)
	require.NoError(t, err)
	assert.Equal(t, len(old), n)
	assert.Len(t, s.files(t), len(stays))
	for _, path := range stays {
		assert.FileExists(t, path)
	}
	n, err = s.Sweep(bg, time.Hour)
	require.NoError(t, err)
	assert.Zero(t, n)
}

func TestDirStore_Sweep_goesOnAfterErrors(t *testing.T) {
	t.Parallel()
	s := newDirStore(t)
	require.NoError(t, s.Put(bg, leaseKey, nil))
	backdate(t, s.file(leaseKey), 2*time.Hour)
	gone := s.fan(0)
	if filepath.Dir(s.file(leaseKey)) == gone {
		gone = s.fan(1)
	}
	require.NoError(t, os.Remove(gone))
	n, err := s.Sweep(bg, time.Hour)
	assert.ErrorContains(t, err, gone)
	assert.Equal(t, 1, n)
}

func TestNewDirStore_unusable(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	half := filepath.Join(dir, "half")
	require.NoError(t, os.Mkdir(half, 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(half, "7f"), nil, 0o600))
	for _, path := range []string{file, filepath.Join(file, "sub"), filepath.Join(dir, "no", "parent"), filepath.Join(half, "7f"), half} {
		s, err := NewDirStore(path)
		assert.ErrorContains(t, err, "open payload store "+path)
		assert.Nil(t, s)
	}
	_, err := NewDirStore("")
	assert.ErrorContains(t, err, "dir is empty")
}

func TestNewDirStore_unwritable(t *testing.T) {
	t.Parallel()
	s := newDirStore(t)
	require.NoError(t, s.Put(bg, leaseKey, nil))
	sub := filepath.Dir(s.file(leaseKey))
	for _, dir := range []string{s.dir, sub} {
		require.NoError(t, os.Chmod(dir, 0o555))
		t.Cleanup(func() { _ = os.Chmod(dir, 0o700) })
	}
	asNobody(t, s.dir, func() {
		_, err := NewDirStore(s.dir)
		assert.ErrorIs(t, err, fs.ErrPermission)
		assert.ErrorContains(t, err, s.dir)
		err = s.Put(bg, leaseKey, nil)
		assert.ErrorIs(t, err, fs.ErrPermission)
		assert.ErrorContains(t, err, sub)
	})
}

func TestNewDirStore_completes(t *testing.T) {
	t.Parallel()
	s := newDirStore(t)
	require.NoError(t, os.Remove(s.fan(3))) // whoever began it died
	s, err := NewDirStore(s.dir)
	require.NoError(t, err)
	assert.DirExists(t, s.fan(3))

	var wg sync.WaitGroup
	fresh := filepath.Join(t.TempDir(), "fresh")
	for range 8 {
		wg.Go(func() {
			_, err := NewDirStore(fresh)
			assert.NoError(t, err)
		})
	}
	wg.Wait()
}

func TestNewDirStore_relative(t *testing.T) {
	t.Chdir(t.TempDir())
	s, err := NewDirStore("payloads")
	require.NoError(t, err)
	t.Chdir(t.TempDir())
	require.NoError(t, s.Put(bg, leaseKey, nil), "the directory is the one that it was")
}

const dirStoreEnv = "RECOVERY_TEST_DIRSTORE"

func init() { children["dirstore"] = childDirStore }

// childDirStore puts payloads of one letter each, as fast as it can, until it is killed or its stdin ends.
func childDirStore() {
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(0)
	}()
	s, err := NewDirStore(os.Getenv(dirStoreEnv))
	for i := 0; err == nil; i++ {
		err = s.Put(bg, leaseKey, bytes.Repeat([]byte{'a' + byte(i%26)}, 1<<18+i))
		fmt.Println("put", i)
	}
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

// Whenever a worker is killed, the payload is the old one or the new one, and what else it left is for Sweep.
func TestDirStore_crash(t *testing.T) {
	t.Parallel()
	s := newDirStore(t)
	for round := range 8 {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), childEnv+"=dirstore", dirStoreEnv+"="+s.dir)
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		stdin, err := cmd.StdinPipe()
		require.NoError(t, err)
		stdout, err := cmd.StdoutPipe()
		require.NoError(t, err)
		require.NoError(t, cmd.Start())
		last, lines := -1, bufio.NewScanner(stdout)
		for lines.Scan() {
			_, err := fmt.Sscanf(lines.Text(), "put %d", &last)
			require.NoError(t, err)
			if last == round {
				require.NoError(t, cmd.Process.Kill()) // wherever it is by now, in a later Put
			}
		}
		_ = stdin.Close()
		var exit *exec.ExitError
		require.True(t, errors.As(cmd.Wait(), &exit), "%s", &stderr)
		if status, ok := exit.Sys().(syscall.WaitStatus); ok && runtime.GOOS != "windows" {
			require.Equal(t, syscall.SIGKILL, status.Signal(), "%s", &stderr)
		}

		got, err := s.Get(bg, leaseKey)
		require.NoError(t, err)
		i := len(got) - 1<<18
		assert.Contains(t, []int{last, last + 1}, i)
		assert.Equal(t, len(got), bytes.Count(got, []byte{'a' + byte(i%26)}))
	}
	// As if each had died in the middle of a write.
	require.NoError(t, os.WriteFile(filepath.Join(filepath.Dir(s.file(leaseKey)), "put-0.tmp"), []byte(payloadMagic), 0o600))
	left := s.files(t)
	for _, name := range left {
		if path := filepath.Join(s.dir, name); path != s.file(leaseKey) {
			backdate(t, path, 2*time.Hour)
		}
	}
	n, err := s.Sweep(bg, time.Hour)
	require.NoError(t, err)
	assert.Equal(t, len(left)-1, n)
	_, err = s.Get(bg, leaseKey)
	require.NoError(t, err)
}

func BenchmarkDirStore_Put(b *testing.B) {
	s, err := NewDirStore(filepath.Join(b.TempDir(), "payloads"))
	require.NoError(b, err)
	payload := make([]byte, 64<<10)
	b.SetBytes(int64(len(payload)))
	b.ReportAllocs()
	for b.Loop() {
		if err := s.Put(bg, leaseKey, payload); err != nil {
			b.Fatal(err)
		}
	}
}
