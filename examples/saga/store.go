package main

import (
	"context"
	_ "embed"
	"encoding/json"
	"fmt"

	"github.com/redis/go-redis/v9"
)

// store is what the steps act on: accounts, which are numbers that must not fall below zero. It lies in Redis, but has nothing to do with the
// library: it might as well be the services of three other teams. What it owes to the sagas is in act.lua, in one atomic step: it acts
// once for each saga and step, it refuses a run that is older than one it has seen, and it refuses to apply what was undone.
//
//	<prefix>account:<name>   number
//	<prefix>marks:<saga>     hash: step -> applied | undone; fence -> the largest seen
//	<prefix>ledger           list of entries, one for each effect
//	<prefix>closed           set of "undo:charge" and the like: doors that are shut, by a person
type store struct {
	rdb    redis.UniversalClient
	prefix string
	worker string
}

//go:embed act.lua
var actText string

var actScript = redis.NewScript(actText)

// entry is a line of the ledger.
type entry struct {
	What     string // apply, undo, or void: undone before it was ever applied
	Saga     string
	Step     string
	Account  string
	Amount   int
	Attempt  int
	Recovery int
	Fence    int64
	Worker   string
}

const (
	applyVerb = "apply"
	undoVerb  = "undo"
)

// act applies or undoes a step: takes amount from account, or puts it back.
func (s *store) act(ctx context.Context, verb string, run Run, step, account string, amount int) error {
	line, err := json.Marshal(entry{Saga: run.Saga, Step: step, Account: account, Amount: amount,
		Attempt: run.Attempt, Recovery: run.Recovery, Fence: run.Fence, Worker: s.worker})
	if err != nil {
		return err
	}
	keys := []string{s.marks(run.Saga), s.account(account), s.ledger(), s.closed()}
	answer, err := actScript.Run(ctx, s.rdb, keys, run.Fence, step, verb, amount, line).Text()
	if err != nil {
		return fmt.Errorf("%s %s of %s: %w", verb, step, run.Saga, err)
	}
	switch answer {
	case "ok", "again":
		return nil
	case "stale":
		return fmt.Errorf("%s %s of %s with fence %d: %w", verb, step, run.Saga, run.Fence, errStale)
	}
	return fmt.Errorf("%w: %s", errRefused, answer)
}

func (s *store) account(name string) string { return s.prefix + "account:" + name }
func (s *store) marks(saga string) string   { return s.prefix + "marks:" + saga }
func (s *store) ledger() string             { return s.prefix + "ledger" }
func (s *store) closed() string             { return s.prefix + "closed" }

// entries reads the ledger.
func (s *store) entries(ctx context.Context) ([]entry, error) {
	lines, err := s.rdb.LRange(ctx, s.ledger(), 0, -1).Result()
	if err != nil {
		return nil, err
	}
	entries := make([]entry, len(lines))
	for i, line := range lines {
		if err := json.Unmarshal([]byte(line), &entries[i]); err != nil {
			return nil, fmt.Errorf("line %d of the ledger, %q: %w", i, line, err)
		}
	}
	return entries, nil
}
