package recovery

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"
)

// Sidekiq is for lists that Sidekiq's clients push to: the key is queue:NAME (or PREFIX:queue:NAME), an element is a job as JSON, and the
// queue is entered into the set of queues that Sidekiq's pages show. The Job's ID is the jid, its Queue is NAME, its Payload the whole JSON: read
// class and args from there.
//
// A fetched job is handed back as it was. To one that was tracked by other means, whose payload must be such a JSON, what is missing is added: jid,
// queue, and created_at and enqueued_at as Sidekiq 8 writes them, in whole milliseconds.
func Sidekiq() ListOption {
	return func(q *ListQueue) {
		prefix, name, ok := strings.Cut(":"+q.key, ":queue:")
		if !ok || name == "" {
			q.err = fmt.Errorf("ListQueue: key %q is not a queue of Sidekiq: queue:NAME or PREFIX:queue:NAME", q.key)
			return
		}
		q.index, q.name = strings.TrimPrefix(prefix+":queues", ":"), name
		q.format = sidekiqFormat{name: name}
	}
}

type sidekiqFormat struct{ name string }

// sidekiqJob is what we need to know of a job; the rest is the handler's.
type sidekiqJob struct {
	JID        string          `json:"jid"`
	Class      json.RawMessage `json:"class"`
	Queue      json.RawMessage `json:"queue"`
	CreatedAt  json.RawMessage `json:"created_at"`
	EnqueuedAt json.RawMessage `json:"enqueued_at"`
}

func (f sidekiqFormat) parse(text []byte) (job sidekiqJob, err error) {
	if err = json.Unmarshal(text, &job); err == nil && len(job.Class) == 0 {
		err = errors.New("there is no class")
	}
	if err != nil {
		return job, fmt.Errorf("not a job of Sidekiq: %w", err)
	}
	return job, nil
}

func (f sidekiqFormat) Decode(element []byte) (Job, error) {
	job, err := f.parse(element)
	if err == nil && job.JID == "" {
		err = errors.New("not a job of Sidekiq: there is no jid")
	}
	return Job{ID: job.JID, Queue: f.name, Payload: element}, err
}

// Encode adds what is missing and leaves every other byte alone: a number in args may have more digits than a float64.
func (f sidekiqFormat) Encode(o Orphan) ([]byte, error) {
	job, err := f.parse(o.Payload)
	if err != nil {
		return nil, Permanent(err)
	}
	now := time.Now().UnixMilli()
	more := []byte{}
	add := func(missing bool, name string, value any) {
		if text, err := json.Marshal(value); missing && err == nil {
			more = fmt.Appendf(more, `,%q:%s`, name, text)
		}
	}
	add(job.JID == "", "jid", o.ID)
	add(len(job.Queue) == 0, "queue", f.name)
	add(len(job.CreatedAt) == 0, "created_at", now)
	add(len(job.EnqueuedAt) == 0, "enqueued_at", now)
	if len(more) == 0 {
		return o.Payload, nil
	}
	object := bytes.TrimRight(o.Payload, " \t\r\n")
	return append(append(bytes.Clone(object[:len(object)-1]), more...), '}'), nil // it has a class: there is something before the comma
}
