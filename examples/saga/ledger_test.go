//go:build unix

package main

import (
	"context"
	"strings"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// What the accounts hold at first. Nothing is ever in those that are not here: orders that name them fail at that step.
var funds = map[string]int{"stock:book": 100_000, "balance:ann": 100_000_000, "places:north": 100_000}

const price = 7

// fine is an order that goes through; failing one that is refused at a step.
func fine(id string) Order {
	return Order{ID: id, Item: "book", Customer: "ann", Price: price, Route: "north"}
}

func failing(id, step string) Order {
	o := fine(id)
	switch step {
	case "reserve":
		o.Item = "none"
	case "charge":
		o.Customer = "poor"
	case "ship":
		o.Route = "nowhere"
	}
	return o
}

// fund fills the accounts.
func (f *firm) fund() {
	f.t.Helper()
	for account, amount := range funds {
		require.NoError(f.t, f.desk.rdb.IncrBy(context.Background(), f.store.account(account), int64(amount)).Err())
	}
}

// judge is called when all workers have left. It rests on the store's ledger and accounts and on what the workers said before they died, not on
// anything that the library keeps. Every order must have ended as it had to, once in effect; none may wait for a person.
func (f *firm) judge(orders ...Order) {
	f.t.Helper()
	ctx := context.Background()
	entries, err := f.store.entries(ctx)
	require.NoError(f.t, err)
	of := map[string][]entry{}
	balance := map[string]int{}
	for account, amount := range funds {
		balance[account] = amount
	}
	for _, e := range entries {
		of[e.Saga] = append(of[e.Saga], e)
		switch e.What {
		case "apply":
			balance[e.Account] -= e.Amount
		case "undo":
			balance[e.Account] += e.Amount
		}
	}
	for _, o := range orders {
		assert.Equal(f.t, wanted(o), told(of[o.ID]), "order %+v: %+v", o, of[o.ID])
		for i, e := range of[o.ID][1:] {
			before := of[o.ID][i]
			assert.LessOrEqual(f.t, before.Fence, e.Fence, "a stale run acted: %+v after %+v", e, before)
			assert.LessOrEqual(f.t, before.Attempt, e.Attempt, "%+v after %+v", e, before)
		}
	}
	assert.Len(f.t, of, len(orders), "sagas in the ledger")
	for account, amount := range balance {
		got, err := f.desk.rdb.Get(ctx, f.store.account(account)).Int()
		if amount != 0 || err == nil {
			assert.Equal(f.t, amount, got, "account %s", account)
		}
	}
	f.judgeRuns()
	assert.Empty(f.t, f.letters())
	left, err := f.desk.rdb.LLen(ctx, f.desk.list()).Result()
	require.NoError(f.t, err)
	assert.Zero(f.t, left, "in the queue")
	workers, err := f.insp.Workers(ctx)
	require.NoError(f.t, err)
	assert.Empty(f.t, workers, "in the registry")
}

// wanted is an order's way through the ledger: all steps; or those before the one that fails, and all of it back in reverse.
func wanted(o Order) string {
	switch {
	case o.Item == "none":
		return "void:reserve"
	case o.Customer == "poor":
		return "apply:reserve void:charge undo:reserve"
	case o.Route == "nowhere":
		return "apply:reserve apply:charge void:ship undo:charge undo:reserve"
	}
	return "apply:reserve apply:charge apply:ship"
}

func told(entries []entry) string {
	var words []string
	for _, e := range entries {
		words = append(words, e.What+":"+e.Step)
	}
	return strings.Join(words, " ")
}

// judgeRuns looks for runs that did again what an earlier one had checkpointed.
func (f *firm) judgeRuns() {
	f.t.Helper()
	kept := map[string]int{} // saga and point -> the attempt that has checkpointed it
	for _, s := range f.said.All() {
		point, step, _ := strings.Cut(s.Said.Point, ":")
		key := func(point, step string) string { return s.Said.Run.Saga + " " + point + ":" + step }
		switch point {
		case saved, resaved, decided:
			kept[key(point, step)] = s.Said.Run.Attempt
		case applying:
			_, again := kept[key(saved, step)]
			assert.False(f.t, again, "%+v: the step was checkpointed by attempt %d", s, kept[key(saved, step)])
			_, back := kept[key(decided, "")]
			assert.False(f.t, back, "%+v: goes forward, attempt %d had decided to undo", s, kept[key(decided, "")])
		case clearing:
			_, again := kept[key(resaved, step)]
			assert.False(f.t, again, "%+v: the undoing was checkpointed by attempt %d", s, kept[key(resaved, step)])
		}
	}
}
