package main

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

// defaultRetries is Sidekiq's.
const defaultRetries = 25

// verdict is where a job goes: the sorted set retry or dead with a score, or nowhere if set is "".
type verdict struct {
	set string
	at  time.Time
	job job
}

// judge decides about a job that failed, by the rules of Sidekiq's JobRetry, and notes the failure in the job. random(n) is below n.
func judge(j job, queue string, failure error, now time.Time, random func(n int) int) verdict {
	limit, ok := j.retries()
	if !ok {
		return verdict{} // retry: false. Sidekiq forgets such a job, too
	}
	if q := j.text("retry_queue"); q != "" {
		queue = q
	}
	j.set("queue", queue)
	j.blame(failure)
	count := 0
	if j.has("retry_count") {
		count = int(j.number("retry_count")) + 1
		j.stamp("retried_at", now)
	} else {
		j.stamp("failed_at", now)
	}
	j.set("retry_count", count)
	exhausted := count >= limit
	if j.has("retry_for") { // instead of a number of times
		exhausted = j.time("failed_at").Add(time.Duration(j.number("retry_for") * float64(time.Second))).Before(now)
	}
	switch {
	case !exhausted:
		wait := math.Pow(float64(count), 4) + 15 + float64(random(10*(count+1)))
		return verdict{"retry", now.Add(time.Duration(wait * float64(time.Second))), j}
	case string(j["dead"]) == "false":
		return verdict{}
	default:
		return verdict{"dead", now, j}
	}
}

// retries is how often the job may be tried again; ok is false if it shall not be, and not be kept either.
func (j job) retries() (limit int, ok bool) {
	if n, err := strconv.Atoi(string(j["retry"])); err == nil {
		return n, true
	}
	return defaultRetries, string(j["retry"]) != "false"
}

// blame notes the error. The class is the type of the Go error.
func (j job) blame(failure error) {
	const most = 10_000
	message := []rune(strings.ToValidUTF8(failure.Error(), "\uFFFD"))
	j.set("error_message", string(message[:min(len(message), most)]))
	j.set("error_class", strings.TrimPrefix(fmt.Sprintf("%T", failure), "*"))
}
