package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"time"
)

// exporter stands for what your jobs do: here they write a line to a file, after a while.
type exporter struct {
	out   string
	takes time.Duration
}

// export runs one job. It gives up, and has written nothing, when ctx ends.
func (e exporter) export(ctx context.Context, job []byte) error {
	log.Printf("exporting %s", job)
	select {
	case <-time.After(e.takes):
	case <-ctx.Done():
		return fmt.Errorf("export %q: %w", job, context.Cause(ctx))
	}
	f, err := os.OpenFile(e.out, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return fmt.Errorf("export %q: %w", job, err)
	}
	_, err = fmt.Fprintf(f, "%d %s\n", os.Getpid(), job) // one write: a kill leaves a whole line or none
	return errors.Join(err, f.Close())
}
