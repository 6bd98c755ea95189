package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/crashsafe/recovery"
)

// A saga is a row of steps, each of which can be undone. How far it got is its State, which is kept by Lease.Checkpoint after every step and
// comes back with the job after a crash:
//
//	forward  ->  all steps applied: done
//	         ->  undoing  ->  all steps undone: done
//	                      ->  stuck: a dead letter, until a person sends it back to undoing
//
// The store is told first and the checkpoint after, so a crash in between repeats one step: steps act once for each saga and step,
// however often they are called. README.md has every point at which a run can end.
type State struct {
	Phase   Phase
	Next    int    // forward: the step to apply next; otherwise the one to undo next, -1 if none is left
	Attempt int    // runs that began, this one included
	Why     string `json:",omitempty"` // it is undone
	Stuck   string `json:",omitempty"` // why it can't be
}

// Phase is which way a saga goes.
type Phase string

const (
	forward Phase = "forward"
	undoing Phase = "undoing"
	stuck   Phase = "stuck"
)

// Run is what a step learns about the run that it is part of.
type Run struct {
	Saga     string
	Attempt  int   // as State
	Recovery int   // crashes that the library has counted, as of the last hand-back
	Fence    int64 // grows with every run: the store refuses smaller ones
}

// Step is one step. Both funcs must act once for each saga, and take a Run's Fence to the store. Undo is also called for a step whose Apply
// failed: it may have acted all the same. After Undo, Apply must be refused.
type Step struct {
	Name        string
	Apply, Undo func(context.Context, Run, Order) error
}

var (
	errRefused = errors.New("refused") // by a step, and asking again won't help
	errStale   = errors.New("stale")   // a later run of this saga has been at the store
	errStuck   = errors.New("stuck")
)

// Points of a run, in their order. Those of steps have the step's name behind a colon.
const (
	fetched    = "fetched" // before the first checkpoint of this run
	begun      = "begun"
	applying   = "applying"
	applied    = "applied" // and not checkpointed
	saved      = "saved"   // and checkpointed
	decided    = "decided" // to undo, and checkpointed
	clearing   = "clearing"
	cleared    = "cleared" // undone, and not checkpointed
	resaved    = "resaved" // undone, and checkpointed
	gaveUp     = "gave up" // undoing, and checkpointed
	completed  = "completed"
	rolledBack = "rolled back"
)

// saga is one run.
type saga struct {
	steps []Step
	order Order
	run   Run
	lease *recovery.Lease
	tries int           // of a step that fails, in one run
	pause time.Duration // between them
	at    func(point string)

	state State
}

// play runs the saga from where it is to one of its ends: nil, if everything is applied or everything is undone; errStuck; or an error
// after which this run has no say any more.
func (s *saga) play(ctx context.Context) error {
	s.at(fetched)
	s.state.Attempt++
	s.run.Attempt = s.state.Attempt
	if err := s.save(ctx); err != nil {
		return err
	}
	s.at(begun)
	if s.state.Phase == forward {
		if err := s.apply(ctx); err != nil {
			return err
		}
	}
	switch s.state.Phase {
	case forward:
		s.at(completed)
		return nil
	case undoing:
		return s.undo(ctx)
	}
	return errStuck
}

// apply goes forward. Afterwards the phase says whether it came to the end.
func (s *saga) apply(ctx context.Context) error {
	for s.state.Next < len(s.steps) {
		step := s.steps[s.state.Next]
		s.at(applying + ":" + step.Name)
		err := s.try(ctx, step.Apply)
		if gone(ctx, err) {
			return err
		}
		if err != nil {
			// Before anything is undone this must be in Redis. A run that went forward again, because nothing told it not to, might find
			// the step willing, and end with the steps before it undone.
			s.state.Phase, s.state.Why = undoing, fmt.Sprintf("%s: %v", step.Name, err)
			if err := s.save(ctx); err != nil {
				return err
			}
			s.at(decided)
			return nil
		}
		s.at(applied + ":" + step.Name)
		s.state.Next++
		if err := s.save(ctx); err != nil {
			return err
		}
		s.at(saved + ":" + step.Name)
	}
	return nil
}

// undo goes back, beginning with the step that failed.
func (s *saga) undo(ctx context.Context) error {
	for s.state.Next >= 0 {
		step := s.steps[s.state.Next]
		s.at(clearing + ":" + step.Name)
		err := s.try(ctx, step.Undo)
		if gone(ctx, err) {
			return err
		}
		if err != nil {
			s.state.Phase, s.state.Stuck = stuck, fmt.Sprintf("undo %s: %v", step.Name, err)
			if err := s.save(ctx); err != nil {
				return err
			}
			s.at(gaveUp)
			return errStuck
		}
		s.at(cleared + ":" + step.Name)
		s.state.Next--
		if err := s.save(ctx); err != nil {
			return err
		}
		s.at(resaved + ":" + step.Name)
	}
	s.at(rolledBack)
	return nil
}

// try calls f until it succeeds, some times. A refusal to apply is an answer; one to undo may not be the last word.
func (s *saga) try(ctx context.Context, f func(context.Context, Run, Order) error) error {
	for n := 1; ; n++ {
		err := f(ctx, s.run, s.order)
		if err == nil || gone(ctx, err) || n >= s.tries || s.state.Phase == forward && errors.Is(err, errRefused) {
			return err
		}
		if !wait(ctx, s.pause) {
			return context.Cause(ctx)
		}
	}
}

// save makes the state what the next run begins with. It returns an error only when the saga is no longer ours: while Redis does not answer
// it is not known which checkpoint it has, and to go on would be to guess.
func (s *saga) save(ctx context.Context) error {
	text, err := json.Marshal(s.state)
	if err != nil {
		return err
	}
	for {
		err := s.lease.Checkpoint(ctx, text)
		if err == nil || gone(ctx, err) {
			return err
		}
		if !wait(ctx, s.pause) {
			return context.Cause(ctx)
		}
	}
}

// gone reports that this run has no say any more.
func gone(ctx context.Context, err error) bool {
	return err != nil && (ctx.Err() != nil || errors.Is(err, errStale) || errors.Is(err, recovery.ErrLost))
}

func wait(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-ctx.Done():
		return false
	}
}
