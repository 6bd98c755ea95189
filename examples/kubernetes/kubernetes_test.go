package main

import (
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

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// pod is a worker with its probes.
type pod struct {
	*process
	addr string
}

// cluster is a Redis with jobs, the workers' binary, and the file that they write to.
type cluster struct {
	t        *testing.T
	redis    *server
	bin, out string
	jobs     []string
}

func newCluster(t *testing.T, s *server) *cluster {
	t.Helper()
	return &cluster{t: t, redis: s, bin: build(t), out: filepath.Join(t.TempDir(), "out")}
}

func (c *cluster) pod(name, takes string, more ...string) *pod {
	c.t.Helper()
	args := []string{"-redis", c.redis.addr, "-listen", "127.0.0.1:0", "-name", name, "-out", c.out, "-takes", takes, "-concurrency", "4"}
	p := &pod{process: start(c.t, c.bin, append(args, more...)...)}
	eventually(c.t, func() bool {
		_, rest, _ := strings.Cut(p.text(), "probes at ")
		addr, _, found := strings.Cut(rest, "\n")
		p.addr = addr
		return found
	}, "the worker listens")
	return p
}

func (c *cluster) push(n int) {
	c.t.Helper()
	for range n {
		job := fmt.Sprintf("job-%02d", len(c.jobs)+1)
		require.NoError(c.t, c.redis.rdb.LPush(bg, "jobs", job).Err())
		c.jobs = append(c.jobs, job)
	}
}

// waiting is the list, the next job first.
func (c *cluster) waiting() []string {
	c.t.Helper()
	jobs, err := c.redis.rdb.LRange(bg, "jobs", 0, -1).Result()
	require.NoError(c.t, err)
	slices.Reverse(jobs)
	return jobs
}

// done tells for each job the processes that ended it.
func (c *cluster) done() map[string][]string {
	c.t.Helper()
	text, err := os.ReadFile(c.out)
	if !os.IsNotExist(err) {
		require.NoError(c.t, err)
	}
	done := map[string][]string{}
	for line := range strings.Lines(string(text)) {
		pid, job, _ := strings.Cut(strings.TrimSpace(line), " ")
		done[job] = append(done[job], pid)
	}
	return done
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
	eventually(p.t, func() bool {
		s, why := p.get(livePath)
		assert.Equal(p.t, http.StatusOK, s, "live: %s", why)
		s, why = p.get(readyPath)
		return s == status && strings.Contains(why, text)
	}, fmt.Sprintf("ready is %d %s", status, text))
}

var quick = []string{"-heartbeat", "250ms"} // OrphanThreshold: 1s

// From a start without Redis to the last moment of a drain that ends well.
func TestLifeCycle(t *testing.T) {
	t.Parallel()
	c := newCluster(t, newServer(t))
	p := c.pod("worker-0", "3s")
	p.becomes(http.StatusServiceUnavailable, "state is new")
	require.True(t, c.redis.start(), "redis-server at %s", c.redis.addr)
	p.becomes(http.StatusOK, "ok")
	workers, err := c.redis.rdb.SMembers(bg, "recovery:1:jobs:workers").Result()
	require.NoError(t, err)
	require.Len(t, workers, 1)
	assert.True(t, strings.HasPrefix(workers[0], "worker-0-"), "%q begins with the pod's name", workers[0])

	c.push(10)
	eventually(t, func() bool { return p.busy() == 4 }, "the worker is busy")
	p.signal(syscall.SIGTERM)
	p.becomes(http.StatusServiceUnavailable, "state is draining")
	assert.Zero(t, p.ended(), "everything that ran has ended")
	assert.Len(t, c.done(), 4)
	assert.Equal(t, c.jobs[4:], c.waiting(), "nothing was begun after SIGTERM")
	assert.Empty(t, c.redis.rdb.SMembers(bg, "recovery:1:jobs:workers").Val(), "it has left")
}

// Jobs that take longer than the grace period allows are back before SIGKILL would come, and no threshold is waited for.
func TestTerminated_jobsGoBack(t *testing.T) {
	t.Parallel()
	c := newCluster(t, startRedis(t))
	const stopTimeout = time.Second
	p := c.pod("worker-0", "1h", "-stop-timeout", stopTimeout.String(), "-heartbeat", "1m") // four minutes, if it were for the peers
	c.push(6)
	eventually(t, func() bool { return p.busy() == 4 }, "the worker is busy")
	grace := time.AfterFunc(stopTimeout+overtime+margin, func() { _ = p.cmd.Process.Kill() }) // as the kubelet does
	defer grace.Stop()
	p.signal(syscall.SIGTERM)
	assert.Equal(t, 1, p.ended(), "-1 is SIGKILL: it did not end within the grace period")
	assert.ElementsMatch(t, c.jobs, c.waiting(), "all jobs are in the list")
	assert.Contains(t, p.text(), "4 jobs had not ended")
	assert.Empty(t, c.done())
}

// Redis hangs, for longer than OrphanThreshold: nobody is restarted, and the jobs go on.
func TestRedisAway(t *testing.T) {
	t.Parallel()
	c := newCluster(t, startRedis(t))
	p := c.pod("worker-0", "6s", quick...)
	p.becomes(http.StatusOK, "ok")
	c.push(4)
	eventually(t, func() bool { return p.busy() == 4 }, "the worker is busy")
	c.redis.signal(syscall.SIGSTOP)
	p.becomes(http.StatusServiceUnavailable, "no good heartbeat")
	for end := time.Now().Add(4 * time.Second); time.Now().Before(end); time.Sleep(100 * time.Millisecond) { // live's limit is 3s here
		status, why := p.get(livePath)
		require.Equal(t, http.StatusOK, status, why)
	}
	c.redis.signal(syscall.SIGCONT)
	p.becomes(http.StatusOK, "ok")
	eventually(t, func() bool { return len(c.done()) == 4 }, "the jobs end")
	assert.Equal(t, 4, p.busy(), "none was begun twice")
	p.signal(syscall.SIGTERM)
	assert.Zero(t, p.ended())
}

// OOMKill, node loss, a grace period that is over: all of them are SIGKILL.
func TestKilled_peerTakesOver(t *testing.T) {
	t.Parallel()
	c := newCluster(t, startRedis(t))
	doomed := c.pod("worker-0", "1h", quick...)
	c.push(10)
	eventually(t, func() bool { return doomed.busy() == 4 }, "the worker is busy")
	peer := c.pod("worker-1", "1ms", quick...)
	eventually(t, func() bool { return len(c.done()) == 6 }, "the peer does the rest")
	doomed.kill()
	eventually(t, func() bool { return len(c.done()) == 10 }, "the peer does what the dead one had begun")
	peer.signal(syscall.SIGTERM)
	assert.Zero(t, peer.ended())
	for job, by := range c.done() {
		assert.Equal(t, []string{fmt.Sprint(peer.pid())}, by, "%s: the dead one had done nothing, so there is no reason for a double", job)
	}
	assert.Empty(t, c.waiting())
	keys, err := c.redis.rdb.Keys(bg, "*:inflight").Result()
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
