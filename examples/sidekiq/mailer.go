package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"os"
	"strings"
	"time"
)

// mailer stands for what your jobs do. To send a mail is to write a line to a file, after a while.
type mailer struct {
	outbox string
	takes  time.Duration
}

// badAddress is an error of a job's own.
type badAddress string

func (a badAddress) Error() string { return fmt.Sprintf("address %q has no @", string(a)) }

// perform is MailJob's: perform(to, subject).
func (m mailer) perform(ctx context.Context, args []json.RawMessage) error {
	var to, subject string
	if len(args) != 2 {
		return fmt.Errorf("MailJob has %d arguments, 2 are expected", len(args))
	}
	if err := errors.Join(json.Unmarshal(args[0], &to), json.Unmarshal(args[1], &subject)); err != nil {
		return fmt.Errorf("arguments of MailJob: %w", err)
	}
	if !strings.Contains(to, "@") {
		return badAddress(to)
	}
	log.Printf("sending %q to %s", subject, to)
	select {
	case <-time.After(m.takes):
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	f, err := os.OpenFile(m.outbox, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(f, "%d %s\n", os.Getpid(), to) // one write: a kill leaves a whole line or none
	return errors.Join(err, f.Close())
}
