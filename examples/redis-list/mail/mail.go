// Package mail stands for what your worker does with a job.
package mail

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"os"
	"time"
)

// Sender sends mails. To send one is to write a line to a file, after a while.
type Sender struct {
	outbox string
	takes  time.Duration
}

// Flags returns a Sender that is set by flags of the program.
func Flags() *Sender {
	s := &Sender{}
	flag.StringVar(&s.outbox, "outbox", "outbox.txt", "`file` that mails are sent to")
	flag.DurationVar(&s.takes, "takes", time.Second, "`time` that it takes to send one")
	return s
}

// Send sends one mail. It gives up, and has sent nothing, when ctx ends.
func (s *Sender) Send(ctx context.Context, mail []byte) error {
	log.Printf("sending %s", mail)
	select {
	case <-time.After(s.takes):
	case <-ctx.Done():
		return fmt.Errorf("send %q: %w", mail, context.Cause(ctx))
	}
	f, err := os.OpenFile(s.outbox, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return fmt.Errorf("send %q: %w", mail, err)
	}
	_, err = fmt.Fprintf(f, "%d %s\n", os.Getpid(), mail) // one write: a kill leaves a whole line or none
	return errors.Join(err, f.Close())
}
