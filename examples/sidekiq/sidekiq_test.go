package main

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/crashsafe/recovery/examples/internal/fleet"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestMain(m *testing.M) { fleet.Main(m, main) }

var bg = context.Background()

// site is a Redis with jobs of Sidekiq's, and the file that mails are sent to.
type site struct {
	t      *testing.T
	rdb    *redis.Client
	outbox string
	jobs   int
}

func newSite(t *testing.T) *site {
	t.Helper()
	return &site{t: t, rdb: fleet.StartRedis(t).Client, outbox: filepath.Join(t.TempDir(), "outbox")}
}

// job is what Sidekiq 8 writes, to the letter: its order of members, and milliseconds.
func (s *site) job(queue, class, args, more string) string {
	s.jobs++
	now := time.Now().UnixMilli()
	return fmt.Sprintf(`{"retry":true,"queue":%q,"class":%q,"args":%s,"jid":"%024x","created_at":%d%s,"enqueued_at":%d}`,
		queue, class, args, s.jobs, now, more, now)
}

func (s *site) mail(queue, to string) string {
	return s.job(queue, "MailJob", fmt.Sprintf(`[%q,"hello"]`, to), "")
}

// push does what Sidekiq's client does.
func (s *site) push(queue string, jobs ...string) {
	s.t.Helper()
	_, err := s.rdb.Pipelined(bg, func(p redis.Pipeliner) error {
		p.SAdd(bg, "queues", queue)
		for _, j := range jobs {
			p.LPush(bg, "queue:"+queue, j)
		}
		return nil
	})
	require.NoError(s.t, err)
}

// waiting is a queue, the next job first.
func (s *site) waiting(queue string) []string {
	s.t.Helper()
	jobs, err := s.rdb.LRange(bg, "queue:"+queue, 0, -1).Result()
	require.NoError(s.t, err)
	slices.Reverse(jobs)
	return jobs
}

func (s *site) start(takes string, more ...string) *fleet.Process {
	s.t.Helper()
	args := []string{"-redis", s.rdb.Options().Addr, "-outbox", s.outbox, "-takes", takes, "-heartbeat", "250ms", "-poll", "100ms"}
	return fleet.Start(s.t, fleet.Self(s.t, append(args, more...)...))
}

// sent are the addresses that mails were sent to, in their order.
func (s *site) sent() (to []string) {
	s.t.Helper()
	for _, e := range fleet.Ledger(s.t, s.outbox) {
		to = append(to, e.Job)
	}
	return to
}

// set is one of Sidekiq's sorted sets: its members' texts with their scores.
func (s *site) set(name string) map[string]float64 {
	s.t.Helper()
	members, err := s.rdb.ZRangeWithScores(bg, name, 0, -1).Result()
	require.NoError(s.t, err)
	found := map[string]float64{}
	for _, z := range members {
		found[z.Member.(string)] = z.Score
	}
	return found
}

// killBusy starts a worker and kills it in the middle of n jobs.
func (s *site) killBusy(n int, more ...string) {
	s.t.Helper()
	p := s.start("1h", append([]string{"-concurrency", strconv.Itoa(n)}, more...)...)
	fleet.Eventually(s.t, "the worker is busy", func() bool { return p.Says(" sending ") == n })
	p.Kill()
}

func TestSidekiq_killed(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	strange := []string{ // that JSON may be written in other ways must not matter
		s.job("critical", "MailJob", `["a@x","<&>\u00e9 é \/"]`, `,"tags":["x"],"big":123456789012345678901234567890,"f":1.0`),
		s.job("critical", "MailJob", `[ "b@x" , "two" ]`, `,"cattr":{"tenant":7},"big":1e400`),
	}
	normal := []string{s.mail("default", "c@x"), s.mail("default", "d@x"), s.mail("default", "e@x")}
	low := []string{s.mail("low", "f@x"), s.mail("low", "g@x")}
	s.push("low", low...)
	s.push("default", normal...)
	s.push("critical", strange...)
	s.killBusy(4)
	require.Empty(t, s.waiting("critical"))
	require.Equal(t, normal[2:], s.waiting("default"), "two of each were in the dead worker's hands")

	// A peer that is there for another queue gives them back; it has no use for them.
	peer := s.start("1ms", "-queues", "other")
	fleet.Eventually(t, "they are back", func() bool { return len(s.waiting("critical"))+len(s.waiting("default")) == 5 })
	assert.ElementsMatch(t, strange, s.waiting("critical"), "byte for byte")
	assert.ElementsMatch(t, normal, s.waiting("default"))
	assert.Equal(t, low, s.waiting("low"))

	survivor := s.start("1ms", "-concurrency", "1")
	fleet.Eventually(t, "all are sent", func() bool { return len(s.sent()) >= 7 })
	survivor.Terminate()
	peer.Terminate()
	sent := s.sent()
	require.Len(t, sent, 7, "the dead one had sent nothing, so there is no reason for a double")
	assert.ElementsMatch(t, []string{"a@x", "b@x"}, sent[:2], "the most urgent queue first")
	assert.ElementsMatch(t, []string{"c@x", "d@x", "e@x"}, sent[2:5])
	assert.Equal(t, []string{"f@x", "g@x"}, sent[5:])
	s.nothingLeft()
}

func TestSidekiq_failed(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	s.push("default",
		s.mail("default", "nobody"),
		s.job("default", "RubyJob", `[]`, ""),
		s.job("default", "MailJob", `["nowhere","x"]`, `,"retry_count":24,"failed_at":1700000000000`),
		strings.Replace(s.mail("default", "once"), `"retry":true`, `"retry":false`, 1),
		s.mail("default", "ann@x"))
	began := time.Now()
	p := s.start("1ms")
	fleet.Eventually(t, "each is where it belongs", func() bool { return len(s.sent()) == 1 && len(s.set("retry")) == 2 && len(s.set("dead")) == 1 })
	p.Terminate()
	for text, due := range s.set("retry") {
		j, err := parseJob([]byte(text))
		require.NoError(t, err)
		assert.Equal(t, "0", string(j["retry_count"]))
		assert.Equal(t, "default", j.text("queue"))
		assert.WithinRange(t, j.time("failed_at"), began.Truncate(time.Millisecond), time.Now())
		assert.GreaterOrEqual(t, due, seconds(began)+15)
		assert.Less(t, due, seconds(time.Now())+25)
		assert.False(t, j.has("retried_at"))
		switch j.text("class") {
		case "MailJob":
			assert.Equal(t, "main.badAddress", j.text("error_class"))
			assert.Equal(t, `address "nobody" has no @`, j.text("error_message"))
			assert.JSONEq(t, `["nobody","hello"]`, string(j["args"]))
		case "RubyJob":
			assert.Equal(t, "main.unknownClass", j.text("error_class"))
		default:
			assert.Fail(t, "not one of ours", text)
		}
	}
	for text := range s.set("dead") {
		j, err := parseJob([]byte(text))
		require.NoError(t, err)
		assert.Equal(t, `["nowhere","x"]`, string(j["args"]))
		assert.Equal(t, "25", string(j["retry_count"]))
		assert.Equal(t, "1700000000000", string(j["failed_at"]))
		assert.True(t, j.has("retried_at"))
	}
	s.nothingLeft()
}

// A failure that can't be written down must not be the end of the job.
func TestSidekiq_retryRefused(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	require.NoError(t, s.rdb.Set(bg, "retry", "somebody else's", 0).Err())
	p := s.start("1ms", "-poll", "0")
	s.push("default", s.mail("default", "nobody"))
	fleet.Eventually(t, "Redis refuses", func() bool { return p.Says("WRONGTYPE") > 0 })
	require.NoError(t, s.rdb.Del(bg, "retry").Err())
	fleet.Eventually(t, "the job was kept, failed again, and is in the set now", func() bool { return len(s.set("retry")) == 1 })
	p.Terminate()
	assert.Less(t, p.Says("WRONGTYPE"), 10, "it was not tried without a pause")
	s.nothingLeft()
}

// Jobs that wait for their time, and two workers that look after them.
func TestSidekiq_due(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	a, b := s.start("1ms"), s.start("1ms")
	now := seconds(time.Now())
	var want []string
	for i := range 50 {
		to := fmt.Sprintf("due-%d@x", i)
		want = append(want, to)
		set := []string{"retry", "schedule"}[i%2]
		require.NoError(t, s.rdb.ZAdd(bg, set, redis.Z{Score: now - 1 + float64(i)/50, Member: s.mail("default", to)}).Err())
	}
	later := s.mail("default", "later@x")
	require.NoError(t, s.rdb.ZAdd(bg, "schedule", redis.Z{Score: now + 3600, Member: later}, redis.Z{Score: 1, Member: "{no job"}).Err())
	fleet.Eventually(t, "all are sent", func() bool { return len(s.sent()) >= len(want) && s.rdb.ZCard(bg, "dead").Val() == 1 })
	a.Terminate()
	b.Terminate()
	assert.ElementsMatch(t, want, s.sent(), "once each")
	assert.Equal(t, map[string]float64{later: now + 3600}, s.set("schedule"))
	assert.Contains(t, s.set("dead"), "{no job")
	assert.Empty(t, s.set("retry"))
	assert.Contains(t, s.rdb.SMembers(bg, "queues").Val(), "default")
	s.nothingLeft()
}

// A job that kills its workers, and what is no job at all, are for a person to look at, on Sidekiq's pages.
func TestSidekiq_dead(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	killer := s.mail("default", "killer@x")
	s.push("default", killer)
	for range 2 {
		s.killBusy(1, "-recoveries", "1")
	}
	s.push("low", "{no job")
	p := s.start("1ms", "-recoveries", "1")
	letters := func() int64 { return s.rdb.ZCard(bg, "recovery:1:"+namespace+":{dead}:index").Val() }
	fleet.Eventually(t, "both are where Sidekiq shows them", func() bool { return len(s.set("dead")) == 2 && letters() == 0 })
	p.Terminate()
	assert.Contains(t, s.set("dead"), "{no job")
	for text := range s.set("dead") {
		if text == "{no job" {
			continue
		}
		j, err := parseJob([]byte(text))
		require.NoError(t, err)
		assert.JSONEq(t, `["killer@x","hello"]`, string(j["args"]))
		assert.Equal(t, "recovery.DeadLetter", j.text("error_class"))
		assert.NotEmpty(t, j.text("error_message"))
		assert.WithinDuration(t, time.Now(), j.time("failed_at"), time.Minute)
	}
	assert.Empty(t, s.sent())
	s.nothingLeft()
}

// nothingLeft checks that no job is in a queue, in the records of a worker, or among the library's dead letters.
func (s *site) nothingLeft() {
	s.t.Helper()
	keys, err := s.rdb.Keys(bg, "*").Result()
	require.NoError(s.t, err)
	for _, key := range keys {
		for _, end := range []string{":jobs", ":inflight", ":claims", ":list"} {
			assert.False(s.t, strings.HasPrefix(key, "queue:") || strings.HasSuffix(key, end), "%s is left", key)
		}
	}
}
