package main

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestJudge(t *testing.T) {
	t.Parallel()
	now := time.UnixMilli(1_700_000_100_000)
	for name, test := range map[string]struct {
		job  string
		set  string
		wait time.Duration
		want string // members that were written
	}{
		"first failure": {
			`{"retry":true}`, "retry", 15*time.Second + 9*time.Second,
			`{"retry_count":0,"failed_at":1700000100000}`,
		},
		"third failure": {
			`{"retry":true,"retry_count":1,"failed_at":5}`, "retry", (16 + 15 + 29) * time.Second,
			`{"retry_count":2,"failed_at":5,"retried_at":1700000100000}`,
		},
		"no word about retries":   {`{}`, "retry", 24 * time.Second, `{"retry_count":0}`},
		"the last of 25":          {`{"retry":true,"retry_count":23}`, "retry", (331776 + 15 + 249) * time.Second, `{"retry_count":24}`},
		"no more of 25":           {`{"retry":true,"retry_count":24}`, "dead", 0, `{"retry_count":25}`},
		"no more of 3":            {`{"retry":3,"retry_count":2}`, "dead", 0, `{"retry_count":3}`},
		"one more of 3":           {`{"retry":3,"retry_count":1}`, "retry", 60 * time.Second, `{"retry_count":2}`},
		"zero":                    {`{"retry":0}`, "dead", 0, `{"retry_count":0,"failed_at":1700000100000}`},
		"not to be kept":          {`{"retry":0,"dead":false}`, "", 0, ""},
		"not to be retried":       {`{"retry":false}`, "", 0, ""},
		"null is no count":        {`{"retry":true,"retry_count":null}`, "retry", 24 * time.Second, `{"retry_count":0}`},
		"another queue":           {`{"retry_queue":"slow","queue":"default"}`, "retry", 24 * time.Second, `{"queue":"slow"}`},
		"time left":               {`{"retry_for":100,"retry_count":99,"failed_at":1700000000000}`, "retry", (1e8 + 15 + 1009) * time.Second, ""},
		"no time left":            {`{"retry_for":99,"retry_count":0,"failed_at":1700000000000}`, "dead", 0, `{"retry_count":1}`},
		"no time left, Sidekiq 7": {`{"retry_for":99,"retry_count":0,"failed_at":1700000000.25,"created_at":1.5}`, "dead", 0, `{"retried_at":1700000100.000000}`},
		"Sidekiq 7":               {`{"created_at":1700000000.123}`, "retry", 24 * time.Second, `{"failed_at":1700000100.000000}`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			j, err := parseJob([]byte(test.job))
			require.NoError(t, err)
			got := judge(j, "default", errors.New("no"), now, func(n int) int { return n - 1 })
			require.Equal(t, test.set, got.set)
			if test.set == "" {
				return
			}
			assert.Equal(t, test.wait, got.at.Sub(now))
			var want job
			if test.want != "" {
				want, err = parseJob([]byte(test.want))
				require.NoError(t, err)
			}
			for name, value := range want {
				assert.Equal(t, string(value), string(got.job[name]), name)
			}
			assert.Equal(t, "no", got.job.text("error_message"))
			assert.Equal(t, "errors.errorString", got.job.text("error_class"))
		})
	}
}

func TestJob_encode(t *testing.T) {
	t.Parallel()
	j, err := parseJob([]byte(`{"class":"A","args":[12345678901234567890123,"<&>",1.0]}`))
	require.NoError(t, err)
	text, err := j.encode()
	require.NoError(t, err)
	assert.Equal(t, `{"args":[12345678901234567890123,"<&>",1.0],"class":"A"}`, string(text))
	j.blame(errors.New("\xff" + strings.Repeat("é", 20_000)))
	assert.Len(t, []rune(j.text("error_message")), 10_000)
}

func TestWorker_perform(t *testing.T) {
	t.Parallel()
	w := worker{classes: map[string]performer{
		"Panics": func(context.Context, []json.RawMessage) error { panic("ouch") },
	}}
	assert.Equal(t, panicked{"ouch"}, w.perform(t.Context(), job{"class": []byte(`"Panics"`), "args": []byte(`[]`)}))
	assert.Equal(t, unknownClass("Other"), w.perform(t.Context(), job{"class": []byte(`"Other"`)}))
	assert.ErrorContains(t, w.perform(t.Context(), job{"class": []byte(`"Panics"`), "args": []byte(`7`)}), "args of Panics")
}
