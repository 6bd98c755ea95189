package recovery

import (
	"errors"
	"fmt"
)

var (
	// ErrLost means that the job is no longer this caller's: it was, or is about to be, handed to somebody else.
	// Throw the result away where you can, and do not acknowledge the job to its source.
	ErrLost = errors.New("recovery: job lost to another worker")

	// ErrNotRunning is returned by Track before Start, while draining and after Stop. The job was not recorded:
	// leave it where it came from.
	ErrNotRunning = errors.New("recovery: not running")

	// ErrAtCapacity is returned by Track when Config.MaxInflight jobs are in flight. The job was not recorded.
	ErrAtCapacity = errors.New("recovery: at capacity")

	// ErrInvalidConfig is what New returns, joined with one error for each field that is wrong.
	ErrInvalidConfig = errors.New("recovery: invalid config")

	// ErrInvalidJob is returned by Track for a job that can't be recorded; trying again won't help.
	ErrInvalidJob = errors.New("recovery: invalid job")

	// ErrPayloadTooLarge is returned by Track for a payload beyond Config.MaxPayload. The job was not recorded.
	ErrPayloadTooLarge = errors.New("recovery: payload too large")
)

// Permanent marks an Enqueuer's error as final: the orphan is not offered again and goes to the dead letters.
// Permanent(nil) is nil.
func Permanent(err error) error {
	if err == nil {
		return nil
	}
	return &permanentError{err}
}

type permanentError struct{ err error }

func (e *permanentError) Error() string { return e.err.Error() }
func (e *permanentError) Unwrap() error { return e.err }

func isPermanent(err error) bool {
	var p *permanentError
	return errors.As(err, &p)
}

// panicError is a panic of the caller's code, caught so that a background loop survives it.
type panicError struct {
	value any
	stack []byte
}

func (e *panicError) Error() string { return fmt.Sprintf("panic: %v", e.value) }

// isNotLive reports that err is, or wraps, a notLiveError.
func isNotLive(err error) bool {
	if err == nil {
		return false
	}
	var over *notLiveError
	return errors.As(err, &over)
}

// notLiveError is Redis' answer that a session can't take new jobs. It is certain that nothing was written.
type notLiveError struct{ absent bool }

func (e *notLiveError) Error() string {
	if e.absent {
		return "session is gone from Redis"
	}
	return "session is fenced"
}
