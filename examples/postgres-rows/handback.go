package main

import (
	"context"
	"fmt"
	"strconv"

	"github.com/crashsafe/recovery"
	"github.com/jackc/pgx/v5/pgxpool"
)

// handBack puts rows of dead workers back. It is a BatchEnqueuer: one statement for many orphans.
type handBack struct {
	db *pgxpool.Pool
	at func(point string) // see worker
}

// putBack changes only a row that is marked with the very lease that is handed back: id i with lease i, which is why the two arrays
// are joined pair by pair. So it may be repeated, and it leaves alone what is done and what another run has marked since.
//
// status = 'pending' is there to wait. A worker marks its rows after it has tracked them; if it was declared dead in between, its
// transaction may still be open, and the row, as this statement sees it, is still pending. To answer "nothing to do" then would be
// wrong: the mark could be committed a moment later, with a lease that nobody will hand back again. The worker has the row locked
// from before Track until its transaction ends. A statement that wants to change the row has to wait for that end, and
// PostgreSQL (READ COMMITTED, the default) then applies the condition to the row as it has become.
const putBack = `
	UPDATE transfers t SET status = 'pending', lease = NULL, marked_at = NULL
	FROM unnest($1::bigint[], $2::text[]) AS o(id, lease)
	WHERE t.id = o.id AND (t.status = 'pending' OR t.status = 'inprog' AND t.lease = o.lease)`

// Enqueue implements recovery.Enqueuer.
func (h handBack) Enqueue(ctx context.Context, o recovery.Orphan) error {
	if errs := h.EnqueueAll(ctx, []recovery.Orphan{o}); errs != nil {
		return errs[0]
	}
	return nil
}

// EnqueueAll implements recovery.BatchEnqueuer. It does not matter which rows were changed: of the others the row says why not.
func (h handBack) EnqueueAll(ctx context.Context, os []recovery.Orphan) []error {
	errs := make([]error, len(os))
	var ids []int64
	var leases []string
	for i, o := range os {
		id, err := strconv.ParseInt(o.ID, 10, 64)
		if err != nil {
			errs[i] = recovery.Permanent(fmt.Errorf("job %q is not a row's id: %w", o.ID, err))
			continue
		}
		ids, leases = append(ids, id), append(leases, o.Key)
	}
	if _, err := h.db.Exec(ctx, putBack, ids, leases); err != nil {
		for i := range errs {
			if errs[i] == nil {
				errs[i] = fmt.Errorf("put back %d rows: %w", len(ids), err)
			}
		}
	}
	h.at("putback")
	return errs
}
