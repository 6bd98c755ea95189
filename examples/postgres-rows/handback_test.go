package main

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/crashsafe/recovery"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// markAs marks a row as take does.
func (b *bank) markAs(id int64, lease string, fence int64) map[int64]int64 {
	b.t.Helper()
	ctx := context.Background()
	tx, err := b.db.Begin(ctx)
	require.NoError(b.t, err)
	defer func() { _ = tx.Rollback(ctx) }()
	fences, err := mark(ctx, tx, []int64{id}, []string{lease}, fence)
	require.NoError(b.t, err)
	require.NoError(b.t, tx.Commit(ctx))
	return fences
}

func (b *bank) state(id int64) (state string) {
	b.t.Helper()
	err := b.db.QueryRow(context.Background(), "SELECT concat_ws(' ', status, lease) FROM transfers WHERE id = $1", id).Scan(&state)
	require.NoError(b.t, err)
	return state
}

func orphan(id any, lease string) recovery.Orphan {
	return recovery.Orphan{Job: recovery.Job{ID: fmt.Sprint(id)}, Key: lease}
}

func (b *bank) handBack() handBack { return handBack{b.db, func(string) {}} }

func TestHandBack(t *testing.T) {
	t.Parallel()
	b := newBank(t, 5)
	b.markAs(1, "a", 1)
	b.markAs(2, "b", 1)
	b.markAs(3, "c", 1)
	done := b.markAs(4, "d", 1)
	written, err := finish(t.Context(), b.db, transfer{4, "account", 4}, done[4], nil)
	require.NoError(t, err)
	require.True(t, written)

	errs := b.handBack().EnqueueAll(t.Context(), []recovery.Orphan{orphan(1, "b"), orphan(2, "a"), orphan(5, "a")})
	assert.Equal(t, []error{nil, nil, nil}, errs)
	assert.Equal(t, "inprog a", b.state(1), "another run's lease, although it is in the batch")
	assert.Equal(t, "inprog b", b.state(2))

	for range 2 { // the second time changes nothing
		errs = b.handBack().EnqueueAll(t.Context(), []recovery.Orphan{orphan(1, "a"), orphan("x", "x"), orphan(2, "b"), orphan(4, "d"), orphan(99, "gone")})
		assert.Equal(t, 5, len(errs))
		assert.ErrorContains(t, errs[1], `job "x" is not a row's id`)
		assert.NoError(t, errors.Join(errs[0], errs[2], errs[3], errs[4]))
		assert.Equal(t, []string{"pending", "pending", "inprog c", "done", "pending"},
			[]string{b.state(1), b.state(2), b.state(3), b.state(4), b.state(5)})
	}
	b.markAs(1, "z", 2)
	require.NoError(t, b.handBack().Enqueue(t.Context(), orphan(1, "a")))
	assert.Equal(t, "inprog z", b.state(1), "a repetition that comes late does not take it from the next run")
}

// The marking transaction is open when its row is handed back: the answer comes after its end.
func TestHandBack_waitsForMark(t *testing.T) {
	for _, end := range []string{"commit", "rollback"} {
		t.Run(end, func(t *testing.T) {
			t.Parallel()
			b := newBank(t, 1)
			tx, err := b.db.Begin(t.Context())
			require.NoError(t, err)
			defer func() { _ = tx.Rollback(context.Background()) }()
			_, err = lock(t.Context(), tx, 1)
			require.NoError(t, err)
			returned := make(chan error, 1)
			go func() { returned <- b.handBack().Enqueue(context.Background(), orphan(1, "a")) }()
			b.eventually("it waits", func() bool {
				return b.count(`SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'`) == 1
			})
			_, err = mark(t.Context(), tx, []int64{1}, []string{"a"}, 1)
			require.NoError(t, err)
			require.Empty(t, returned)
			if end == "commit" {
				require.NoError(t, tx.Commit(t.Context()))
			} else {
				require.NoError(t, tx.Rollback(t.Context()))
			}
			require.NoError(t, <-returned)
			assert.Equal(t, "pending", b.state(1))
		})
	}
}

func TestFinish(t *testing.T) {
	t.Parallel()
	b := newBank(t, 2)
	row := transfer{1, "account-1", 1}
	first := b.markAs(1, "a", 1000)[1]
	require.NoError(t, b.handBack().Enqueue(t.Context(), orphan(1, "a")))
	written, err := finish(t.Context(), b.db, row, first, nil)
	require.NoError(t, err)
	assert.False(t, written, "put back")

	second := b.markAs(1, "b", 10)[1]
	assert.Greater(t, second, first, "although Redis' clock was set back")
	written, err = finish(t.Context(), b.db, row, first, nil)
	require.NoError(t, err)
	assert.False(t, written, "marked again")
	for _, want := range []bool{true, false} {
		written, err = finish(t.Context(), b.db, row, second, nil)
		require.NoError(t, err)
		assert.Equal(t, want, written, "once")
	}
	assert.Equal(t, 1, b.count("SELECT count(*) FROM payments"))

	third := b.markAs(2, "c", 1)[2]
	written, err = finish(t.Context(), b.db, transfer{2, "account-2", 2}, third, errors.New("no such account"))
	require.NoError(t, err)
	assert.True(t, written)
	assert.Equal(t, "failed", b.state(2))
	assert.Equal(t, 1, b.count("SELECT count(*) FROM payments"), "what failed pays nothing")
}
