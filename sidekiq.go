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

// sidekiqJob is a job's JSON. A map, because encoding/json does not mind the case of a struct's names, and Sidekiq does.
type sidekiqJob map[string]json.RawMessage

// lacks reports that there is no such member, or that it is null.
func (j sidekiqJob) lacks(name string) bool { return len(j[name]) == 0 || string(j[name]) == "null" }

func (f sidekiqFormat) parse(text []byte) (job sidekiqJob, err error) {
	if err = json.Unmarshal(text, &job); err == nil && job.lacks("class") {
		err = errors.New("there is no class")
	}
	if err != nil {
		return job, fmt.Errorf("not a job of Sidekiq: %w", err)
	}
	return job, nil
}

func (f sidekiqFormat) Decode(element []byte) (Job, error) {
	job, err := f.parse(element)
	if err != nil {
		return Job{}, err
	}
	var jid string
	if err := json.Unmarshal(job["jid"], &jid); err != nil || jid == "" {
		return Job{}, errors.New("not a job of Sidekiq: there is no jid")
	}
	return Job{ID: jid, Queue: f.name, Payload: element}, nil
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
	add(job.lacks("jid"), "jid", o.ID)
	add(job.lacks("queue"), "queue", f.name)
	add(job.lacks("created_at"), "created_at", now)
	add(job.lacks("enqueued_at"), "enqueued_at", now)
	if len(more) == 0 {
		return o.Payload, nil
	}
	object := bytes.TrimRight(o.Payload, " \t\r\n")
	return append(append(bytes.Clone(object[:len(object)-1]), more...), '}'), nil // it has a class: there is something before the comma
}
