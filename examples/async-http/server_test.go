//go:build unix

package main

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// target is the server that requests go to. It keeps every request as it came in. A request to /hang/… is not answered until it is let go, or its client
// has gone.
type target struct {
	t   *testing.T
	url string

	mu      sync.Mutex // guards what follows
	seen    map[string][]received
	gates   map[string]chan struct{}
	now     int // requests that are being answered
	highest int
}

// received is a request as it came in.
type received struct {
	method, uri, host string
	header            http.Header
	body              []byte
}

func newTarget(t *testing.T) *target {
	t.Helper()
	s := &target{t: t, seen: map[string][]received{}, gates: map[string]chan struct{}{}}
	h := httptest.NewServer(s)
	t.Cleanup(func() { h.CloseClientConnections(); h.Close() })
	s.url = h.URL
	return s
}

func (s *target) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return // the client was killed
	}
	id := r.Header.Get("Idempotency-Key")
	s.mu.Lock()
	s.seen[id] = append(s.seen[id], received{r.Method, r.RequestURI, r.Host, r.Header, body})
	s.now++
	s.highest = max(s.highest, s.now)
	gate := s.gate(id)
	s.mu.Unlock()
	if strings.HasPrefix(r.URL.Path, "/hang") {
		select {
		case <-gate:
		case <-r.Context().Done():
		}
	}
	s.mu.Lock()
	s.now--
	s.mu.Unlock()
	w.Header().Set("Content-Type", "text/plain")
	_, _ = io.WriteString(w, "answer to "+id)
}

// gate is what a request to /hang waits for. mu is held.
func (s *target) gate(id string) chan struct{} {
	if s.gates[id] == nil {
		s.gates[id] = make(chan struct{})
	}
	return s.gates[id]
}

// letGo answers requests of that ID, those that hang and those that come.
func (s *target) letGo(ids ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, id := range ids {
		close(s.gate(id))
	}
}

// hits counts the requests of that ID that came in.
func (s *target) hits(id string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.seen[id])
}

// request makes one with all that is hard to carry: a path and a query that must not be tidied up, several values of one header, bytes that are no UTF-8.
func (s *target) request(path, id string) Request {
	body := make([]byte, 256)
	for i := range body {
		body[i] = byte(i)
	}
	return Request{ID: id, Method: "PATCH", URL: s.url + path + "/a%2Fb//c;d?z=1&a=%20+%zz&a=", Body: append(body, id...), Header: http.Header{
		"Idempotency-Key": {id}, "X-Many": {"two", "one", ""}, "X-Latin": {"caf\xe9 \xff"}, "User-Agent": {"test"}, "Host": {"example.test"},
		"Authorization": {"Bearer " + id}}}
}

// requireExact checks that a request came in exactly as often, byte for byte each time.
func (s *target) requireExact(r Request, times int) {
	s.t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	require.Len(s.t, s.seen[r.ID], times, r.ID)
	for _, got := range s.seen[r.ID] {
		assert.Equal(s.t, r.Method, got.method)
		assert.Equal(s.t, strings.TrimPrefix(r.URL, s.url), got.uri)
		assert.Equal(s.t, r.Header.Get("Host"), got.host)
		assert.Equal(s.t, r.Body, got.body)
		want, header := r.Header.Clone(), got.header.Clone()
		want.Del("Host")
		header.Del("Content-Length")
		assert.Equal(s.t, want, header)
	}
}
