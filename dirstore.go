package recovery

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"
)

// PayloadStore keeps payloads outside of Redis, under keys that may be any bytes and are never used for two payloads. All methods
// must be safe for concurrent use, by any worker of the fleet, and return soon after ctx ended.
type PayloadStore interface {
	// Put stores payload under key, and replaces what was there. When it returns nil the payload is durable, and every worker
	// can Get it. It must not keep a reference to payload.
	Put(ctx context.Context, key string, payload []byte) error

	// Get returns what was put, byte for byte. If, and only if, it is certain that there is nothing under key, the error wraps
	// fs.ErrNotExist: the job is given up then. A store that can't be reached is another error.
	Get(ctx context.Context, key string) ([]byte, error)

	// Delete removes what is under key. That there is nothing is no error.
	Delete(ctx context.Context, key string) error
}

// A DirStore's directory holds a directory for each value of the first byte of a key's SHA-256, and in them a file for each payload,
// named by all of that hash in hex: no key can name anything else. Invariants:
//
//   - A file under its final name is complete and durable. It is written under a temporary name beside it and renamed.
//   - All 256 directories are there from NewDirStore on, and nobody removes one. If one is missing, so is the store (an absent
//     mount, say), and nothing can be said about a payload.
//
// A payload file:
//
//	payloadMagic
//	4 bytes    CRC32C of all that follows, big endian
//	uvarint    length of the payload
//	string     key          (uvarint length, then the bytes)
//	bytes      payload
const (
	payloadMagic = "recovery payload 1\n"
	payloadSum   = 4
	tempPattern  = "put-*.tmp"
	fanOut       = 256
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// DirStore is a PayloadStore in a directory that all workers share: on NFS, EFS, or a volume. Its methods are safe for concurrent
// use. They look at ctx between their steps; a file system that hangs can't be interrupted.
type DirStore struct {
	dir string // absolute
}

var _ PayloadStore = (*DirStore)(nil)

// NewDirStore returns a DirStore in dir, and makes sure that it can write there. Where dir is missing it is created, for this user
// only (mode 0700; files have 0600): all workers need the same user. It does not create dir's parent: if that lies on the
// mount, a worker that starts without the mount gets an error, and not an empty store of its own on the local disk.
func NewDirStore(dir string) (*DirStore, error) {
	if dir == "" {
		return nil, errors.New("open payload store: dir is empty")
	}
	abs, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("open payload store %s: %w", dir, err)
	}
	s := &DirStore{dir: abs}
	if err := s.prepare(); err != nil {
		return nil, fmt.Errorf("open payload store %s: %w", abs, err)
	}
	return s, nil
}

// Put implements PayloadStore. A payload that was there is replaced in one step: Get sees the one or the other. After an
// error the old one, the new one or, if there was none, nothing may be there.
func (s *DirStore) Put(ctx context.Context, key string, payload []byte) error {
	dir, name := s.place(key)
	temp, err := writeTemp(ctx, dir, payloadHeader(key, payload), payload)
	if err == nil {
		err = publish(ctx, temp, filepath.Join(dir, name))
	}
	if err != nil {
		return fmt.Errorf("put payload %q: %w", key, err)
	}
	return nil
}

// Get implements PayloadStore. A file that is cut short, damaged or not of this key is an error that is marked by Permanent: to
// read it again won't help. The file stays, for a person to look at.
func (s *DirStore) Get(ctx context.Context, key string) ([]byte, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("get payload %q: %w", key, err)
	}
	dir, name := s.place(key)
	path := filepath.Join(dir, name)
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("get payload %q: %w", key, presence(dir, err))
	}
	payload, err := parsePayload(raw, key)
	if err != nil {
		return nil, Permanent(fmt.Errorf("get payload %q: file %s: %w", key, path, err))
	}
	return payload, nil
}

// Delete implements PayloadStore. It is not made durable: a payload that comes back after a power failure is one for Sweep.
func (s *DirStore) Delete(ctx context.Context, key string) error {
	dir, name := s.place(key)
	err := ctx.Err()
	if err == nil {
		err = presence(dir, os.Remove(filepath.Join(dir, name)))
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("delete payload %q: %w", key, err)
	}
	return nil
}

// Sweep removes payloads that were put, and temporary files that were written, longer ago than olderThan, by the file system's
// clock, and returns how many. They are what a worker leaves that dies between Put and Track, or before a Delete. Files that a
// DirStore can't have written stay. It blocks until it has looked at every file or ctx ends, and goes on after errors.
//
// Sweep does not ask Redis who still needs a payload. Choose olderThan well above the age that a payload can reach: the longest job,
// with all its recoveries, and Config.InflightTTL and RecoveryWindow on top; longer still, while dead letters that you
// may want to run again keep theirs. Once a day, by one worker, is often enough.
func (s *DirStore) Sweep(ctx context.Context, olderThan time.Duration) (removed int, err error) {
	if olderThan <= 0 {
		return 0, fmt.Errorf("sweep payload store %s: olderThan is %v, must be above 0", s.dir, olderThan)
	}
	now, err := s.now()
	if err != nil {
		return 0, fmt.Errorf("sweep payload store %s: %w", s.dir, err)
	}
	var errs []error
	for i := -1; i < fanOut && ctx.Err() == nil; i++ {
		dir := s.dir // which has temporary files only
		if i >= 0 {
			dir = s.fan(byte(i))
		}
		n, err := sweepDir(ctx, dir, i >= 0, now.Add(-olderThan))
		removed += n
		errs = append(errs, err)
	}
	if err := errors.Join(append(errs, ctx.Err())...); err != nil {
		return removed, fmt.Errorf("sweep payload store %s: %w", s.dir, err)
	}
	return removed, nil
}

// prepare creates what is missing of the directories, durably, and tries to write.
func (s *DirStore) prepare() error {
	switch err := os.Mkdir(s.dir, 0o700); {
	case err == nil:
		if err := syncDir(filepath.Dir(s.dir)); err != nil {
			return err
		}
	case !errors.Is(err, fs.ErrExist):
		return err
	}
	entries, err := os.ReadDir(s.dir) // one call instead of 256, in all but the first start of the fleet
	if err != nil {
		return err
	}
	there := make(map[string]bool, len(entries))
	for _, e := range entries {
		there[e.Name()] = e.IsDir()
	}
	for i := range fanOut {
		dir := s.fan(byte(i))
		if there[filepath.Base(dir)] {
			continue
		}
		if err := os.Mkdir(dir, 0o700); err != nil && !isDir(dir) { // a peer may have been faster
			return err
		}
	}
	// Even if all were there: whoever made them may have died right before this.
	if err := syncDir(s.dir); err != nil {
		return err
	}
	_, err = s.now()
	return err
}

// now is the file system's time, by which files are dated; this machine's clock may differ from a file server's.
func (s *DirStore) now() (t time.Time, err error) {
	temp, err := writeTemp(context.Background(), s.dir, []byte("now"))
	if err != nil {
		return t, err
	}
	info, err := os.Stat(temp)
	if err = errors.Join(err, os.Remove(temp)); err != nil {
		return t, err
	}
	return info.ModTime(), nil
}

// fan is the directory for hashes that begin with b.
func (s *DirStore) fan(b byte) string { return filepath.Join(s.dir, hex.EncodeToString([]byte{b})) }

// place is where key's payload lies.
func (s *DirStore) place(key string) (dir, name string) {
	sum := sha256.Sum256([]byte(key))
	return s.fan(sum[0]), hex.EncodeToString(sum[:])
}

// writeTemp writes a temporary file in dir, durably up to its name, and returns its path. After an error there is none.
func writeTemp(ctx context.Context, dir string, parts ...[]byte) (path string, err error) {
	if err := ctx.Err(); err != nil {
		return "", err
	}
	f, err := os.CreateTemp(dir, tempPattern) // mode 0600
	if err != nil {
		return "", presence(dir, err)
	}
	for _, part := range parts {
		if err == nil {
			_, err = f.Write(part)
		}
	}
	if err == nil {
		err = ctx.Err()
	}
	if err == nil {
		err = f.Sync()
	}
	// Close can fail for the first time: some network file systems write no sooner.
	if err = errors.Join(err, f.Close()); err != nil {
		return "", errors.Join(err, os.Remove(f.Name()))
	}
	return f.Name(), nil
}

// publish gives a temporary file its final name, durably. Both names are in one directory, so that one fsync covers both.
func publish(ctx context.Context, temp, path string) error {
	err := ctx.Err()
	if err == nil {
		err = os.Rename(temp, path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(temp))
	}
	return syncDir(filepath.Dir(path)) // ctx no longer matters: the payload is there, and only its durability is open
}

// syncDir makes the names in dir durable, where the file system knows how.
func syncDir(dir string) error {
	if runtime.GOOS == "windows" {
		return nil // directories can't be synced, and NTFS journals names
	}
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	err = d.Sync()
	if errors.Is(err, syscall.EINVAL) || errors.Is(err, errors.ErrUnsupported) {
		err = nil // some network file systems: names are durable at once there, or never
	}
	return errors.Join(err, d.Close())
}

// presence keeps "there is no such payload" apart from "there is no store": err wraps fs.ErrNotExist only if dir is there.
func presence(dir string, err error) error {
	if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if _, derr := os.Stat(dir); derr != nil {
		return fmt.Errorf("the store is not there, is it mounted? %v", derr) // not %w
	}
	return err
}

// sweepDir removes files of dir that were written before a moment. One that can't be removed does not keep the others;
// the first such error stands for all.
func sweepDir(ctx context.Context, dir string, payloads bool, before time.Time) (removed int, first error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return 0, err
	}
	for _, e := range entries {
		if ctx.Err() != nil {
			break // Sweep reports it
		}
		if !e.Type().IsRegular() || !isTempName(e.Name()) && !(payloads && isPayloadName(e.Name())) {
			continue
		}
		ok, err := removeOld(filepath.Join(dir, e.Name()), before)
		if ok {
			removed++
		}
		if first == nil {
			first = err
		}
	}
	return removed, first
}

// removeOld removes a file that was written before a moment. If another worker does so at the same time, one of them has removed
// it. A Put between the two calls would be lost, but nobody puts a payload again under a key that old: a lease's ID is used once.
func removeOld(path string, before time.Time) (bool, error) {
	info, err := os.Lstat(path)
	if err == nil && info.ModTime().Before(before) {
		err = os.Remove(path)
		if err == nil {
			return true, nil
		}
	}
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return false, err
}

// payloadHeader is what a file has before the payload.
func payloadHeader(key string, payload []byte) []byte {
	b := make([]byte, len(payloadMagic)+payloadSum, len(payloadMagic)+payloadSum+len(key)+2*binary.MaxVarintLen64)
	copy(b, payloadMagic)
	b = binary.AppendUvarint(b, uint64(len(payload)))
	b = appendString(b, key)
	sum := crc32.Checksum(b[len(payloadMagic)+payloadSum:], castagnoli)
	binary.BigEndian.PutUint32(b[len(payloadMagic):], crc32.Update(sum, castagnoli, payload))
	return b
}

// parsePayload returns the payload in a file, if it is whole and key's. It shares memory with raw.
func parsePayload(raw []byte, key string) ([]byte, error) {
	rest, ok := bytes.CutPrefix(raw, []byte(payloadMagic))
	switch {
	case !ok && !bytes.HasPrefix([]byte(payloadMagic), raw):
		return nil, errors.New("not a payload file, or of another version")
	case len(rest) < payloadSum || !ok:
		return nil, fmt.Errorf("cut short: %d bytes", len(raw))
	}
	want, got := binary.BigEndian.Uint32(rest), crc32.Checksum(rest[payloadSum:], castagnoli)
	d := decoder{rest: rest[payloadSum:]}
	size, owner := d.uvarint(), d.string()
	switch {
	case d.err != nil || uint64(len(d.rest)) < size:
		return nil, fmt.Errorf("cut short or damaged: %d bytes", len(raw))
	case got != want || uint64(len(d.rest)) > size:
		return nil, fmt.Errorf("damaged: checksum of %d bytes is %08x, should be %08x", len(raw), got, want)
	case owner != key:
		return nil, fmt.Errorf("holds the payload of %q", owner)
	}
	return d.rest, nil
}

func isTempName(name string) bool {
	ok, _ := filepath.Match(tempPattern, name) // the pattern is good
	return ok
}

func isPayloadName(name string) bool {
	sum, err := hex.DecodeString(name)
	return err == nil && len(sum) == sha256.Size && name == strings.ToLower(name)
}

func isDir(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.IsDir()
}
