package recovery

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"slices"
)

// element is what Fetch took from a list: see record.go for how it is kept.
type element struct {
	queue string // the list's key
	side  string // left or right: the end from which it is consumed
	bytes []byte
	at    int // where bytes begin in the record
}

const (
	left  = "LEFT"
	right = "RIGHT"
)

// elementHeader is what the record of every element of a list begins with.
func elementHeader(queue, side string) []byte {
	return append(appendString([]byte{recordVersion, flagElement}, queue), side[0])
}

// isElement reports whether a record is an element of a list, as it was found there.
func isElement(raw []byte) bool {
	return len(raw) >= 2 && raw[0] == recordVersion && raw[1] == flagElement
}

// parseElement reads the record of an element, whose bytes are part of raw.
func parseElement(raw []byte) (element, error) {
	if !isElement(raw) {
		return element{}, errTruncated
	}
	d := decoder{rest: raw[2:]}
	e := element{queue: d.string()}
	if d.err != nil || len(d.rest) == 0 {
		return element{}, errTruncated
	}
	switch d.rest[0] {
	case left[0]:
		e.side = left
	case right[0]:
		e.side = right
	default:
		return element{}, fmt.Errorf("record has an unknown end of a list, %q", d.rest[0])
	}
	e.at = len(raw) - len(d.rest) + 1
	e.bytes = raw[e.at:]
	return e, nil
}

// job is an element without a format: the payload itself, named by its contents.
func (e *element) job() Job {
	if e.queue == "" {
		return Job{}
	}
	return Job{ID: contentID(e.bytes), Queue: e.queue, Payload: append([]byte{}, e.bytes...)}
}

// contentID names a job that has no name of its own: equal payloads, equal names. Its leases still differ.
func contentID(payload []byte) string {
	sum := sha256.Sum256(payload)
	return "sha256:" + hex.EncodeToString(sum[:16])
}

// decodeElement reads a fetched record by the format of its list, if this worker knows it. nameless: the element has no name of its own, and
// job.ID may be empty. It is then contentID of the element, which whoever needs it makes: a hash of each payload is what Fetch would spend most
// on.
func (r *Recoverer) decodeElement(raw []byte) (job Job, e element, nameless bool, err error) {
	if e, err = parseElement(raw); err != nil {
		return Job{}, e, false, err
	}
	e.bytes = append([]byte{}, e.bytes...) // its holder may work in place, and the record stays as it is
	plain := Job{Queue: e.queue, Payload: e.bytes}
	q := r.knownList(e.queue)
	if q == nil || q.isPlain() {
		return plain, e, true, nil
	}
	own := slices.Clone(e.bytes) // a format, too, and the element goes back as it was
	perr := guard(func() { job, err = q.format.Decode(own) })
	if err = errors.Join(err, perr); err != nil {
		return plain, e, true, fmt.Errorf("element of %q can't be decoded: %w", e.queue, err)
	}
	if job.Queue == "" {
		job.Queue = e.queue
	}
	if nameless = job.ID == ""; nameless {
		job.ID = contentID(e.bytes)
	}
	if err = job.validate(math.MaxInt); err != nil { // however large, it is in Redis already
		return plain, e, true, fmt.Errorf("element of %q is not a job: %w", e.queue, err)
	}
	return job, e, nameless, nil
}
