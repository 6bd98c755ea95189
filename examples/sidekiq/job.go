package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

// job is a job as Sidekiq writes it. It keeps what this program knows nothing of, and numbers with more digits than a float64 has.
type job map[string]json.RawMessage

func parseJob(text []byte) (j job, err error) {
	if err := json.Unmarshal(text, &j); err != nil {
		return nil, fmt.Errorf("not a job of Sidekiq: %w", err)
	}
	return j, nil
}

// encode returns the job as JSON, as Ruby would: without \u003c and the like.
func (j job) encode() ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	err := e.Encode(j)
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), err
}

// has reports that there is such a member, other than null.
func (j job) has(name string) bool { return len(j[name]) > 0 && string(j[name]) != "null" }

// text returns a member that is a string, or "".
func (j job) text(name string) (s string) {
	_ = json.Unmarshal(j[name], &s)
	return s
}

// number returns a member that is a number, or 0.
func (j job) number(name string) (n float64) {
	_ = json.Unmarshal(j[name], &n)
	return n
}

func (j job) set(name string, value any) {
	text, err := json.Marshal(value)
	if err != nil {
		panic(err) // strings and numbers only
	}
	j[name] = text
}

// stamp writes a time as whoever made the job does: Sidekiq 8 in whole milliseconds, those before it in seconds with a fraction.
func (j job) stamp(name string, t time.Time) {
	if strings.Contains(string(j["created_at"]), ".") {
		j[name] = json.RawMessage(strconv.FormatFloat(seconds(t), 'f', 6, 64))
		return
	}
	j.set(name, t.UnixMilli())
}

// time reads what either of them wrote.
func (j job) time(name string) time.Time {
	n := j.number(name)
	if strings.Contains(string(j[name]), ".") {
		n *= 1000
	}
	return time.UnixMilli(int64(math.Round(n)))
}

// seconds is a time as the score of a sorted set.
func seconds(t time.Time) float64 { return float64(t.UnixMicro()) / 1e6 }
