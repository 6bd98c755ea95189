package main

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"time"

	"github.com/crashsafe/recovery"
)

const (
	queue    = "webhooks" // asynq's queue
	maxBody  = 1 << 20
	idHeader = "X-Delivery" // the sender's name for a delivery
)

// handler does what a webhook asks for. It runs in the receiver, and for jobs that were handed over in an asynq worker.
type handler func(ctx context.Context, payload []byte) error

// receiver takes webhooks and runs them itself, behind the answer.
type receiver struct {
	rec    *recovery.Recoverer
	handle handler
	log    *slog.Logger
}

// ServeHTTP answers 202 when the job is in Redis. Before that the sender still has it, and repeats it if there is no answer.
func (rc *receiver) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	id := r.Header.Get(idHeader)
	if id == "" {
		http.Error(w, idHeader+" is missing", http.StatusBadRequest)
		return
	}
	payload, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	// Not under the request's context: the lease's descends from it, and the job outlives the request.
	lease, err := rc.rec.Track(context.WithoutCancel(r.Context()), recovery.Job{ID: id, Queue: queue, Payload: payload})
	switch {
	case errors.Is(err, recovery.ErrLost):
		w.WriteHeader(http.StatusAccepted) // recorded, and on its way to asynq
	case errors.Is(err, recovery.ErrInvalidJob):
		http.Error(w, err.Error(), http.StatusBadRequest)
	case err != nil:
		rc.log.Error("track", "id", id, "err", err)
		http.Error(w, "try again", http.StatusServiceUnavailable)
	default:
		w.WriteHeader(http.StatusAccepted)
		go rc.run(lease)
	}
}

// run runs a job. What fails here goes to asynq, which is good at trying again later.
//
// A panic ends the process, as in any goroutine, and its peers hand over all that it ran.
func (rc *receiver) run(l *recovery.Lease) {
	err := rc.handle(l.Context(), l.Payload())
	if err == nil {
		if err = l.Done(); err != nil {
			rc.log.Warn("done, and may run again", "id", l.Job().ID, "err", err) // unless Done is repeated in time, by the library
		}
		return
	}
	rc.log.Warn("failed, asynq shall try", "id", l.Job().ID, "err", err)
	for {
		err := l.Release()
		if err == nil || errors.Is(err, recovery.ErrLost) { // lost: somebody else hands it over
			return
		}
		rc.log.Error("hand over", "id", l.Job().ID, "err", err)
		time.Sleep(time.Second)
	}
}
