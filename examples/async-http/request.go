package main

import (
	"bytes"
	"context"
	"encoding/gob"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/crashsafe/recovery"
)

// Request is an HTTP request that can wait in a list, and be sent by any process.
type Request struct {
	ID      string // the caller's name for it; not empty
	Method  string
	URL     string
	Header  http.Header
	Body    []byte
	Timeout time.Duration // for the whole exchange; 0 is the pool's
}

// http makes the request that goes out. Nothing is added or changed, but what net/http does by itself: it brings names of headers into their usual
// case, and adds Host, Content-Length and a User-Agent where there is none.
func (r Request) http(ctx context.Context) (*http.Request, error) {
	out, err := http.NewRequestWithContext(ctx, r.Method, r.URL, bytes.NewReader(r.Body))
	if err != nil {
		return nil, err
	}
	if r.Header != nil {
		out.Header = r.Header.Clone()
	}
	if host := out.Header.Get("Host"); host != "" {
		out.Host = host // net/http ignores the header
	}
	return out, nil
}

// validate refuses what can never be sent, before it is in a queue.
func (r Request) validate() error {
	var errs []error
	if r.ID == "" {
		errs = append(errs, errors.New("ID is empty"))
	}
	if r.Timeout < 0 {
		errs = append(errs, fmt.Errorf("Timeout is %v, must not be negative", r.Timeout))
	}
	out, err := r.http(context.Background())
	if err != nil {
		errs = append(errs, err)
	} else if s := out.URL.Scheme; s != "http" && s != "https" {
		errs = append(errs, fmt.Errorf("URL is %q, must begin with http:// or https://", r.URL))
	}
	if len(errs) > 0 {
		return fmt.Errorf("request %q: %w", r.ID, errors.Join(errs...))
	}
	return nil
}

// encode writes a request as it lies in the list and in the records. It is gob and not JSON because JSON can't carry every byte that a header
// may have: it would replace those of ISO 8859-1.
func (r Request) encode() ([]byte, error) {
	var b bytes.Buffer
	err := gob.NewEncoder(&b).Encode(r)
	return b.Bytes(), err
}

func decode(raw []byte) (r Request, err error) {
	if err = gob.NewDecoder(bytes.NewReader(raw)).Decode(&r); err != nil {
		return r, fmt.Errorf("request can't be read: %w", err)
	}
	return r, r.validate()
}

// job is the request as the library tracks it. The payload is all of it, so that what is handed back is what was tracked.
func (r Request) job() (recovery.Job, error) {
	if err := r.validate(); err != nil {
		return recovery.Job{}, err
	}
	payload, err := r.encode()
	return recovery.Job{ID: r.ID, Payload: payload}, err
}

// format is how requests lie in the list: an element is a payload that has a name of its own.
type format struct{}

func (format) Decode(element []byte) (recovery.Job, error) {
	r, err := decode(element)
	return recovery.Job{ID: r.ID, Payload: element}, err
}

func (format) Encode(o recovery.Orphan) ([]byte, error) { return o.Payload, nil }
