package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/crashsafe/recovery/examples/internal/fleet"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestMain(m *testing.M) { fleet.Main(m, main) }

var bg = context.Background()

// pod is a worker with its probes.
type pod struct {
	*fleet.Process
	t    *testing.T
	addr string
}

// busy counts the jobs that the worker has begun.
func (p *pod) busy() int { return p.Says(" exporting ") }

// cluster is a Redis with jobs, and the file that workers write to.
type cluster struct {
	t     *testing.T
	redis *fleet.Redis
	addr  string // of Redis, as workers know it
	out   string
	jobs  []string
}

func newCluster(t *testing.T) *cluster {
	t.Helper()
	s := fleet.StartRedis(t)
	return &cluster{t: t, redis: s, addr: s.Addr, out: filepath.Join(t.TempDir(), "out")}
}

func (c *cluster) pod(name, takes string, more ...string) *pod {
	c.t.Helper()
	args := []string{"-redis", c.addr, "-listen", "127.0.0.1:0", "-name", name, "-out", c.out, "-takes", takes, "-concurrency", "4"}
	p := &pod{t: c.t, Process: fleet.Start(c.t, fleet.Self(c.t, append(args, more...)...))}
	fleet.Eventually(c.t, "the worker listens", func() (found bool) {
		_, rest, _ := strings.Cut(p.Text(), "probes at ")
		p.addr, _, found = strings.Cut(rest, "\n")
		return found
	})
	return p
}

func (c *cluster) push(n int) {
	c.t.Helper()
	for range n {
		job := fmt.Sprintf("job-%02d", len(c.jobs)+1)
		require.NoError(c.t, c.redis.Client.LPush(bg, "jobs", job).Err())
		c.jobs = append(c.jobs, job)
	}
}

// waiting is the list, the next job first.
func (c *cluster) waiting() []string {
	c.t.Helper()
	jobs, err := c.redis.Client.LRange(bg, "jobs", 0, -1).Result()
	require.NoError(c.t, err)
	slices.Reverse(jobs)
	return jobs
}

// done tells for each job the processes that ended it.
func (c *cluster) done() map[string][]int {
	c.t.Helper()
	return fleet.ByJob(fleet.Ledger(c.t, c.out))
}

// get asks a probe: the status, 0 if there is no answer, and the text.
func (p *pod) get(path string) (int, string) {
	client := http.Client{Timeout: 5 * time.Second}
	answer, err := client.Get("http://" + p.addr + path)
	if err != nil {
		return 0, err.Error()
	}
	defer answer.Body.Close()
	text, _ := io.ReadAll(answer.Body)
	return answer.StatusCode, strings.TrimSpace(string(text))
}

// becomes waits for an answer of the readiness probe, and fails if the worker is not live meanwhile.
func (p *pod) becomes(status int, text string) {
	p.t.Helper()
	fleet.Eventually(p.t, fmt.Sprintf("ready is %d %s", status, text), func() bool {
		s, why := p.get(livePath)
		require.Equal(p.t, http.StatusOK, s, "live: %s", why)
		s, why = p.get(readyPath)
		return s == status && strings.Contains(why, text)
	})
}

var quick = []string{"-heartbeat", "250ms"} // OrphanThreshold: 1s

// From a start without Redis to the last moment of a drain that ends well.
func TestLifeCycle(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	c.addr += ".later" // nobody listens there yet
	p := c.pod("worker-0", "3s")
	p.becomes(http.StatusServiceUnavailable, "state is new")
	require.NoError(t, os.Symlink(c.redis.Addr, c.addr)) // now somebody does
	p.becomes(http.StatusOK, "ok")
	workers, err := c.redis.Client.SMembers(bg, "recovery:1:jobs:workers").Result()
	require.NoError(t, err)
	require.Len(t, workers, 1)
	assert.True(t, strings.HasPrefix(workers[0], "worker-0-"), "%q begins with the pod's name", workers[0])

	c.push(10)
	fleet.Eventually(t, "the worker is busy", func() bool { return p.busy() == 4 })
	p.Signal(syscall.SIGTERM)
	p.becomes(http.StatusServiceUnavailable, "state is draining")
	assert.Equal(t, "exit status 0", p.Wait(), "everything that ran has ended")
	assert.Len(t, c.done(), 4)
	assert.Equal(t, c.jobs[4:], c.waiting(), "nothing was begun after SIGTERM")
	assert.Empty(t, c.redis.Client.SMembers(bg, "recovery:1:jobs:workers").Val(), "it has left")
}

// Jobs that take longer than the grace period allows are back before SIGKILL would come, and no threshold is waited for.
func TestTerminated_jobsGoBack(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	const stopTimeout = time.Second
	p := c.pod("worker-0", "1h", "-stop-timeout", stopTimeout.String(), "-heartbeat", "1m") // four minutes, if it were for the peers
	c.push(6)
	fleet.Eventually(t, "the worker is busy", func() bool { return p.busy() == 4 })
	grace := time.AfterFunc(stopTimeout+overtime+margin, p.Kill) // as the kubelet does
	defer grace.Stop()
	p.Signal(syscall.SIGTERM)
	assert.Equal(t, "exit status 1", p.Wait(), "if killed, it did not end within the grace period")
	assert.ElementsMatch(t, c.jobs, c.waiting(), "all jobs are in the list")
	assert.Contains(t, p.Text(), "4 jobs had not ended")
	assert.Empty(t, c.done())
}

// Redis hangs, for longer than OrphanThreshold: nobody is restarted, and the jobs go on.
func TestRedisAway(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	p := c.pod("worker-0", "6s", quick...)
	p.becomes(http.StatusOK, "ok")
	c.push(4)
	fleet.Eventually(t, "the worker is busy", func() bool { return p.busy() == 4 })
	c.redis.Server.Signal(syscall.SIGSTOP)
	p.becomes(http.StatusServiceUnavailable, "no good heartbeat")
	for end := time.Now().Add(4 * time.Second); time.Now().Before(end); time.Sleep(100 * time.Millisecond) { // live's limit is 3s here
		status, why := p.get(livePath)
		require.Equal(t, http.StatusOK, status, why)
	}
	c.redis.Server.Signal(syscall.SIGCONT)
	p.becomes(http.StatusOK, "ok")
	fleet.Eventually(t, "the jobs end", func() bool { return len(c.done()) == 4 })
	assert.Equal(t, 4, p.busy(), "none was begun twice")
	p.Terminate()
}

// OOMKill, node loss, a grace period that is over: all of them are SIGKILL.
func TestKilled_peerTakesOver(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	doomed := c.pod("worker-0", "1h", quick...)
	c.push(10)
	fleet.Eventually(t, "the worker is busy", func() bool { return doomed.busy() == 4 })
	peer := c.pod("worker-1", "1ms", quick...)
	fleet.Eventually(t, "the peer does the rest", func() bool { return len(c.done()) == 6 })
	doomed.Kill()
	fleet.Eventually(t, "the peer does what the dead one had begun", func() bool { return len(c.done()) == 10 })
	peer.Terminate()
	for job, by := range c.done() {
		assert.Equal(t, []int{peer.Pid()}, by, "%s: the dead one had done nothing, so there is no reason for a double", job)
	}
	assert.Empty(t, c.waiting())
	keys, err := c.redis.Client.Keys(bg, "*:inflight").Result()
	require.NoError(t, err)
	assert.Empty(t, keys)
}

// A process that is stuck, as nothing but a probe can tell.
func TestHealth_live(t *testing.T) {
	t.Parallel()
	h := newHealth(20 * time.Second)
	assert.NoError(t, h.live(), "before the first beat")
	for ago, live := range map[time.Duration]bool{0: true, 50 * time.Second: true, 61 * time.Second: false} {
		then := time.Now().Add(-ago)
		h.tried.Store(&then)
		assert.Equal(t, live, h.live() == nil, "last beat tried %v ago: %v", ago, h.live())
	}
}
