// Package redislist has the tests of both programs.
package redislist

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/crashsafe/recovery/examples/internal/fleet"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const (
	list        = "mails"
	concurrency = 4
)

var bg = context.Background()

// binDir is where both programs are compiled to.
var binDir string

func TestMain(m *testing.M) {
	var err error
	if binDir, err = os.MkdirTemp("", "redis-list"); err != nil {
		panic(err)
	}
	defer os.RemoveAll(binDir)
	m.Run() // its code is the process's, by the testing package
}

// compile compiles both programs, once for all tests.
var compile = sync.OnceValues(func() (string, error) {
	out, err := exec.Command("go", "build", "-o", binDir+"/", "./before", "./after").CombinedOutput()
	return string(out), err
})

// build returns the program in directory dir.
func build(t *testing.T, dir string) string {
	t.Helper()
	out, err := compile()
	require.NoError(t, err, out)
	return filepath.Join(binDir, dir)
}

// office is a Redis with mails, and the file that they are sent to.
type office struct {
	t      *testing.T
	rdb    *redis.Client
	outbox string
	mails  []string
}

func newOffice(t *testing.T) *office {
	t.Helper()
	return &office{t: t, rdb: fleet.StartRedis(t).Client, outbox: filepath.Join(t.TempDir(), "outbox")}
}

// push is all that a producer does, before and after.
func (o *office) push(n int) {
	o.t.Helper()
	for range n {
		mail := fmt.Sprintf("mail-%03d", len(o.mails)+1)
		require.NoError(o.t, o.rdb.LPush(bg, list, mail).Err())
		o.mails = append(o.mails, mail)
	}
}

func (o *office) start(bin, takes string, more ...string) *fleet.Process {
	o.t.Helper()
	args := []string{"-redis", o.rdb.Options().Addr, "-outbox", o.outbox, "-takes", takes, "-concurrency", strconv.Itoa(concurrency)}
	return fleet.Start(o.t, exec.Command(bin, append(args, more...)...))
}

// sending counts the mails that a worker has begun to send.
func sending(p *fleet.Process) int { return p.Says(" sending ") }

// sent tells for each mail the processes that sent it, in their order.
func (o *office) sent() map[string][]int {
	o.t.Helper()
	return fleet.ByJob(fleet.Ledger(o.t, o.outbox))
}

// unsent are the mails that nobody has sent.
func (o *office) unsent() []string {
	sent := o.sent()
	return slices.DeleteFunc(slices.Clone(o.mails), func(mail string) bool { return len(sent[mail]) > 0 })
}

// killBusy starts a worker and kills it when it is in the middle of as many mails as it takes at a time.
func (o *office) killBusy(bin string, more ...string) {
	o.t.Helper()
	p := o.start(bin, "1h", more...)
	fleet.Eventually(o.t, "the worker is busy", func() bool { return sending(p) == concurrency })
	p.Kill()
}

var quick = []string{"-heartbeat", "250ms"} // OrphanThreshold: 1s

func TestBefore_losesWhatItWasSending(t *testing.T) {
	t.Parallel()
	o := newOffice(t)
	bin := build(t, "before")
	o.push(20)
	o.killBusy(bin)
	survivor := o.start(bin, "1ms")
	fleet.Eventually(t, "the survivor sends the rest", func() bool { return o.rdb.LLen(bg, list).Val() == 0 && len(o.sent()) == 16 })
	survivor.Terminate()
	assert.Equal(t, []string{"mail-001", "mail-002", "mail-003", "mail-004"}, o.unsent(), "these are in no list, and nobody knows of them")
}

func TestAfter_losesNothing(t *testing.T) {
	t.Parallel()
	o := newOffice(t)
	bin := build(t, "after")
	o.push(20)
	o.killBusy(bin, quick...)
	survivor := o.start(bin, "1ms", quick...)
	fleet.Eventually(t, "all mails are sent", func() bool { return len(o.unsent()) == 0 })
	survivor.Terminate()
	for mail, by := range o.sent() {
		assert.Equal(t, []int{survivor.Pid()}, by, "%s: the dead one had sent nothing, so there is no reason for a double", mail)
	}
	o.nothingLeft()
}

// Killed wherever it happens to be, also between the sending and the note that it is done: that is the double which remains.
func TestAfter_killedAgainAndAgain(t *testing.T) {
	t.Parallel()
	o := newOffice(t)
	bin := build(t, "after")
	o.push(400)
	killed := map[int]bool{}
	for round := range 3 { // no more than Config.MaxRecoveries: none may become a dead letter
		p := o.start(bin, "3ms", quick...)
		fleet.Eventually(t, "the worker is at work", func() bool { return sending(p) > 10*(round+1) })
		p.Kill()
		killed[p.Pid()] = true
	}
	survivor := o.start(bin, "1ms", quick...)
	fleet.Eventually(t, "all mails are sent", func() bool { return len(o.unsent()) == 0 && o.rdb.LLen(bg, list).Val() == 0 })
	survivor.Terminate()
	o.nothingLeft()
	doubles := map[int]int{}
	for mail, by := range o.sent() {
		for _, pid := range by[:len(by)-1] {
			assert.True(t, killed[pid], "%s was sent again, although process %d, which had sent it, lived to say so", mail, pid)
			doubles[pid]++
		}
	}
	for pid, n := range doubles {
		assert.LessOrEqual(t, n, concurrency, "doubles of process %d: it can't have been in the middle of more", pid)
	}
	t.Logf("400 mails, 3 workers killed, sent again: %v", doubles)
}

// As in a rolling deploy: both programs on one list, the old one ends by SIGTERM, one of the new ones by SIGKILL.
func TestBothTogether(t *testing.T) {
	t.Parallel()
	o := newOffice(t)
	before, after := build(t, "before"), build(t, "after")
	old, doomed := o.start(before, "5ms"), o.start(after, "5ms", quick...)
	survivor := o.start(after, "5ms", quick...)
	for len(o.mails) < 300 || sending(old) == 0 || sending(doomed) == 0 || sending(survivor) == 0 {
		o.push(20)
		require.Less(t, len(o.mails), 100_000, "one of the workers gets nothing")
	}
	old.Terminate()
	o.push(100)
	begun := sending(doomed)
	fleet.Eventually(t, "the doomed worker is at work", func() bool { return sending(doomed) > begun })
	doomed.Kill()
	fleet.Eventually(t, "all mails are sent", func() bool { return len(o.unsent()) == 0 })
	survivor.Terminate()
	o.nothingLeft()
	for mail, by := range o.sent() {
		for _, pid := range by[:len(by)-1] {
			assert.Equal(t, doomed.Pid(), pid, "%s was sent twice: %v", mail, by)
		}
	}
}

// SIGTERM in the middle: what was begun is sent, the rest is in the list.
func TestAfter_terminated(t *testing.T) {
	t.Parallel()
	o := newOffice(t)
	p := o.start(build(t, "after"), "300ms")
	o.push(20)
	fleet.Eventually(t, "the worker is busy", func() bool { return sending(p) >= concurrency })
	p.Terminate()
	sent := o.sent()
	assert.Len(t, sent, sending(p), "everything that was begun was sent")
	waiting, err := o.rdb.LRange(bg, list, 0, -1).Result()
	require.NoError(t, err)
	assert.ElementsMatch(t, o.unsent(), waiting)
	assert.NotEmpty(t, waiting)
}

// nothingLeft checks that no mail is in the list, in the records of a worker, or among the dead letters.
func (o *office) nothingLeft() {
	o.t.Helper()
	keys, err := o.rdb.Keys(bg, "*").Result()
	require.NoError(o.t, err)
	for _, key := range keys {
		left := regexp.MustCompile(`^mails$|:jobs$|:inflight$|:claims$|:list$`).MatchString(key)
		assert.False(o.t, left, "%s is left", key)
	}
}

func TestREADME_diff(t *testing.T) {
	t.Parallel()
	_, err := exec.LookPath("diff")
	fleet.Need(t, err)
	// It ends with 1 where files differ.
	diff, _ := exec.Command("diff", "-u", "--label", "before/main.go", "--label", "after/main.go", "before/main.go", "after/main.go").Output()
	readme, err := os.ReadFile("README.md")
	require.NoError(t, err)
	_, rest, found := strings.Cut(string(readme), "```diff\n")
	require.True(t, found, "README.md has no diff")
	shown, _, _ := strings.Cut(rest, "```\n")
	assert.Equal(t, string(diff), shown, "README.md must show diff -u before/main.go after/main.go")
}
