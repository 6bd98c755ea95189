package main

import (
	"context"
	_ "embed"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

//go:embed schema.sql
var schema string

// connect opens a pool. idle is how long a transaction may stay open without a word from its client: the marking one keeps its
// rows locked while it talks to Redis, and a worker that is frozen then, or whose machine is gone, must not keep them for ever.
func connect(ctx context.Context, dsn string, idle time.Duration) (*pgxpool.Pool, error) {
	cfg, err := pgxpool.ParseConfig(dsn)
	if err != nil {
		return nil, err
	}
	cfg.ConnConfig.RuntimeParams["idle_in_transaction_session_timeout"] = fmt.Sprint(idle.Milliseconds())
	return pgxpool.NewWithConfig(ctx, cfg)
}

// transfer is a row, as a worker needs it.
type transfer struct {
	ID      int64
	Account string
	Amount  int64
}

// lock finds rows that wait, and keeps others from them for as long as tx is open.
func lock(ctx context.Context, tx pgx.Tx, limit int) ([]transfer, error) {
	rows, err := tx.Query(ctx, `
		SELECT id, account, amount FROM transfers
		WHERE status = 'pending' ORDER BY id LIMIT $1
		FOR UPDATE SKIP LOCKED`, limit)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByPos[transfer])
}

// mark notes in rows that are locked whose they are: row ids[i] belongs to leases[i]. It answers the number of the run for each id.
//
// fence is Redis' clock, and a clock may be set back. The row itself makes the number grow in any case.
func mark(ctx context.Context, tx pgx.Tx, ids []int64, leases []string, fence int64) (map[int64]int64, error) {
	rows, err := tx.Query(ctx, `
		UPDATE transfers t
		SET status = 'inprog', lease = m.lease, fence = greatest(t.fence + 1, $3), marked_at = now()
		FROM unnest($1::bigint[], $2::text[]) AS m(id, lease)
		WHERE t.id = m.id
		RETURNING t.id, t.fence`, ids, leases, fence)
	if err != nil {
		return nil, err
	}
	fences := make(map[int64]int64, len(ids))
	var id, number int64
	_, err = pgx.ForEachRow(rows, []any{&id, &number}, func() error {
		fences[id] = number
		return nil
	})
	return fences, err
}

// finish writes the result of run fence, and what it did, in one transaction. It answers false, and nothing is written, if the
// row is not this run's any more: put back, or marked again by somebody else, which has a higher number.
func finish(ctx context.Context, db *pgxpool.Pool, t transfer, fence int64, failure error) (written bool, err error) {
	err = pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		status, note := "done", (*string)(nil)
		if failure != nil {
			text := failure.Error()
			status, note = "failed", &text
		}
		tag, err := tx.Exec(ctx, `
			UPDATE transfers SET status = $3, note = $4, lease = NULL
			WHERE id = $1 AND status = 'inprog' AND fence = $2`, t.ID, fence, status, note)
		written = err == nil && tag.RowsAffected() == 1
		if !written || failure != nil {
			return err
		}
		_, err = tx.Exec(ctx, `INSERT INTO payments (transfer, fence, account, amount) VALUES ($1, $2, $3, $4)`,
			t.ID, fence, t.Account, t.Amount)
		return err
	})
	return written && err == nil, err
}
