package main

import (
	"fmt"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/crashsafe/recovery"
)

// Where the probes are.
const (
	livePath  = "/livez"
	readyPath = "/readyz"
)

// health answers the probes. It asks nobody: a probe that waits for Redis is a probe that fails with Redis.
type health struct {
	threshold time.Duration             // the Recoverer's OrphanThreshold
	tried     atomic.Pointer[time.Time] // when the last heartbeat was tried; nil before the first
}

func newHealth(threshold time.Duration) *health { return &health{threshold: threshold} }

// beat is an Events.Beat. Whether Redis heard the beat does not matter here.
func (h *health) beat(recovery.BeatInfo) {
	now := time.Now()
	h.tried.Store(&now)
}

// live fails if this process is stuck, and a restart would mend that. It must not fail because Redis is away: all workers would be
// restarted, the jobs that they run would be cut off, and Redis would be no better for it.
func (h *health) live() error {
	tried := h.tried.Load()
	if tried == nil {
		return nil // Start waits for Redis
	}
	if silent, limit := time.Since(*tried), 3*h.threshold; silent > limit {
		return fmt.Errorf("no heartbeat was tried for %v, limit is %v: this process is stuck", silent.Round(time.Millisecond), limit)
	}
	return nil
}

// ready fails before Start, while draining, and while nobody can vouch for this worker's jobs.
func (h *health) ready(r *recovery.Recoverer) error {
	if s := r.State(); s != recovery.StateRunning {
		return fmt.Errorf("state is %v", s)
	}
	return r.Check()
}

func (h *health) handler(r *recovery.Recoverer) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+livePath, answer(h.live))
	mux.HandleFunc("GET "+readyPath, answer(func() error { return h.ready(r) }))
	return mux
}

// answer is 200, or 503 with the reason, which kubectl describe shows.
func answer(check func() error) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		if err := check(); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	}
}
