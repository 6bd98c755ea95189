package main

import (
	"context"
	"errors"
	"log/slog"
	"strconv"
	"sync"
	"time"

	"github.com/crashsafe/recovery"
	"github.com/jackc/pgx/v5/pgxpool"
)

// worker takes blocks of rows, runs them, and writes their results.
type worker struct {
	db    *pgxpool.Pool
	rec   *recovery.Recoverer
	block int           // rows that are taken, and run, at a time
	poll  time.Duration // wait between looks at a table without pending rows
	pay   func(context.Context, transfer) error
	log   *slog.Logger
	at    func(point string) // called between the steps, for tests that die there
}

// run is one run of one row.
type run struct {
	transfer
	lease *recovery.Lease
	fence int64 // the row's number of this run
}

// work goes on until ctx ends, and returns when the rows that it has taken have ended, too.
func (w *worker) work(ctx context.Context) {
	for ctx.Err() == nil {
		runs, err := w.take(ctx)
		if err != nil && ctx.Err() == nil {
			w.log.Error("take rows", "err", err)
		}
		var running sync.WaitGroup
		for _, r := range runs {
			running.Go(func() { w.do(r) })
		}
		running.Wait()
		if len(runs) == 0 {
			select {
			case <-ctx.Done():
			case <-time.After(w.poll):
			}
		}
	}
}

// take marks a block of rows as this worker's: lock, track, mark, commit, in this order.
//
// A row is never marked with a lease that Redis does not have, so there is no mark that nobody would ever put back. The other
// way round there is a lease without a mark, if the worker dies before its commit: PostgreSQL rolls back, the row is pending, and
// handing it back changes nothing.
func (w *worker) take(ctx context.Context) ([]run, error) {
	tx, err := w.db.Begin(ctx)
	if err != nil {
		return nil, err
	}
	// Not under ctx from here on: what has begun may end when the worker is asked to leave. PostgreSQL itself ends a transaction that
	// waits for too long, see connect.
	ctx = context.WithoutCancel(ctx)
	defer func() { _ = tx.Rollback(ctx) }() // after Commit it does nothing
	rows, err := lock(ctx, tx, w.block)
	if err != nil || len(rows) == 0 {
		return nil, err
	}
	w.at("locked")

	ids, jobs := make([]int64, len(rows)), make([]recovery.Job, len(rows))
	for i, t := range rows {
		// The row is the payload. Redis has no more of it than its id.
		ids[i], jobs[i] = t.ID, recovery.Job{ID: strconv.FormatInt(t.ID, 10), Queue: "transfers"}
	}
	leases, err := w.rec.TrackAll(ctx, jobs...)
	if err != nil {
		return nil, err
	}
	w.at("tracked")

	names := make([]string, len(leases))
	for i, l := range leases {
		names[i] = l.ID()
	}
	fences, err := mark(ctx, tx, ids, names, leases[0].Fence())
	if err == nil {
		w.at("marked")
		err = tx.Commit(ctx)
	}
	if err != nil {
		// Marked or not: who knows, if the answer to COMMIT was lost. Putting back is right in both cases. It waits for the rows' locks,
		// so those of this transaction go first.
		_ = tx.Rollback(ctx)
		for _, l := range leases {
			go w.giveBack(l)
		}
		return nil, err
	}
	w.at("committed")

	runs := make([]run, len(rows))
	for i, t := range rows {
		runs[i] = run{transfer: t, lease: leases[i], fence: fences[t.ID]}
	}
	return runs, nil
}

// do runs one row.
func (w *worker) do(r run) {
	w.at("working")
	failure := w.pay(r.lease.Context(), r.transfer)
	if failure != nil && r.lease.Context().Err() != nil {
		return // broken off: a peer has the row, or puts it back
	}
	w.at("worked")

	// Not under the lease's context: whether this run may still write is the row's to say, and it says so in the same moment.
	written, err := finish(context.Background(), w.db, r.transfer, r.fence, failure)
	switch {
	case err != nil: // written or not, if the answer was lost: what is written stays, what is not is put back
		w.log.Error("write result", "id", r.ID, "err", err)
		w.giveBack(r.lease)
		return
	case !written:
		w.log.Warn("result refused", "id", r.ID, "fence", r.fence)
	default:
		w.at("written")
	}
	// ErrLost is nothing to worry about: a peer puts the row back, and finds it done. Another error is repeated by the library.
	if err := r.lease.Done(); err != nil && !errors.Is(err, recovery.ErrLost) {
		w.log.Error("done", "id", r.ID, "err", err)
	}
}

// giveBack has the row put back by the library, through handBack. As long as PostgreSQL can't be reached the lease stays ours, and it
// would stay so for ever: it is tried again until it is somebody else's, by Stop at the latest.
func (w *worker) giveBack(l *recovery.Lease) {
	for {
		err := l.Release()
		if err == nil || errors.Is(err, recovery.ErrLost) {
			return
		}
		w.log.Error("give back", "id", l.Job().ID, "err", err)
		time.Sleep(w.poll)
	}
}
