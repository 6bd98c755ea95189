package recovery

import (
	"context"
	"log/slog"
	"runtime/debug"
	"sync/atomic"
	"time"
)

// Events are optional hooks, for metrics and alerts. They are called from the Recoverer's own goroutines, some of them concurrently, and
// delay them: return quickly. A panic in one is caught and logged. They may call Stats, State, Check and WorkerID, but not Stop.
type Events struct {
	Started        func(StartedInfo)        // joined, and able to track
	Stopped        func(StoppedInfo)        // Stop has ended
	Beat           func(BeatInfo)           // every beat, good or failed
	Suspected      func(SuspectedInfo)      // a peer's beat is missing
	Fenced         func(FencedInfo)         // this worker was declared dead; its leases are lost
	Rejoined       func(RejoinedInfo)       // this worker has a new incarnation
	Lost           func(LostInfo)           // a lease of this worker was lost
	Repaired       func(RepairedInfo)       // the audit found and mended a difference between this worker and Redis
	HandedBack     func(HandedBackInfo)     // an orphan was accepted by the Enqueuer
	HandBackFailed func(HandBackFailedInfo) // an orphan was refused; it is kept and tried again
	Buried         func(BuriedInfo)         // an orphan went to the dead letters
	Dropped        func(DroppedInfo)        // a dead letter had to make room for newer ones
	Swept          func(SweepReport)        // a pass has ended
}

// StartedInfo tells that a worker joined.
type StartedInfo struct{ Worker string }

// StoppedInfo tells how a worker left.
type StoppedInfo struct {
	Worker     string
	HandedBack int // jobs that were still running and went back through the Enqueuer
	Err        error
}

// BeatInfo tells of one heartbeat.
type BeatInfo struct {
	Worker   string
	Duration time.Duration
	Err      error
}

// SuspectedInfo tells of a peer whose beat is missing.
type SuspectedInfo struct {
	Worker string
	Wait   time.Duration // until it will be declared dead, if it stays silent
}

// FencedInfo tells that this worker was declared dead.
type FencedInfo struct {
	Worker string
	Reason string
	Lost   int // leases that were cancelled
}

// RejoinedInfo tells of a new incarnation.
type RejoinedInfo struct {
	Worker, Old string
	Carried     int // running jobs that Redis had lost and that are tracked again
}

// LostInfo tells of one lease that this worker lost.
type LostInfo struct {
	Worker, Lease, Job, Queue string
	Reason                    string // for people: "declared dead", "timed-out", "released", "stopping"
}

// RepairedInfo tells what an audit mended.
type RepairedInfo struct {
	Worker  string
	Tracked int // running jobs that Redis did not have
	Removed int // records of jobs that this worker does not run
	Lost    int // running jobs that somebody else has taken
}

// HandedBackInfo tells of an orphan that the Enqueuer accepted.
type HandedBackInfo struct {
	Orphan Orphan
	By     string        // the worker that handed it back
	Age    time.Duration // since it was tracked
	Took   time.Duration // the Enqueuer's call
}

// HandBackFailedInfo tells of an orphan that the Enqueuer did not accept.
type HandBackFailedInfo struct {
	Orphan  Orphan
	By      string
	Attempt int           // from 1
	Retry   time.Duration // when it is tried again
	Err     error
}

// BuriedInfo tells of a new dead letter.
type BuriedInfo struct {
	Orphan Orphan // what could be read of it
	By     string
	Reason string
	Err    error
}

// DroppedInfo tells of a dead letter that was dropped, because there were more than Config.MaxDead.
type DroppedInfo struct {
	Key, Job, Queue string
	Reason          string // why it had been buried
}

// Stats counts what a Recoverer did since New. Counters only grow.
type Stats struct {
	Inflight int // jobs tracked now

	Tracked, Done, Lost    uint64 // leases: begun; ended well or badly; taken by others
	Beats, BeatsFailed     uint64
	Rejoins                uint64 // new incarnations after the first
	Repaired               uint64 // differences mended by the audit
	Sweeps                 uint64 // passes made by this worker
	Suspected, FencedPeers uint64
	HandedBack             uint64 // orphans accepted by the Enqueuer
	HandBackFailed         uint64 // calls of the Enqueuer that failed
	Buried                 uint64 // orphans put into the dead letters by this worker
	Dropped                uint64 // dead letters dropped because of Config.MaxDead

	LastBeat     time.Time // start of the last good beat, on this machine's clock
	TrustedUntil time.Time // until then nobody can have taken this worker's jobs
}

// counters are the atomics behind Stats.
type counters struct {
	tracked, done, lost, beats, beatsFailed, rejoins, repaired, sweeps, suspected,
	fencedPeers, handedBack, handBackFailed, buried, dropped atomic.Uint64
}

func (c *counters) snapshot() Stats {
	return Stats{
		Tracked: c.tracked.Load(), Done: c.done.Load(), Lost: c.lost.Load(),
		Beats: c.beats.Load(), BeatsFailed: c.beatsFailed.Load(), Rejoins: c.rejoins.Load(),
		Repaired: c.repaired.Load(), Sweeps: c.sweeps.Load(), Suspected: c.suspected.Load(),
		FencedPeers: c.fencedPeers.Load(), HandedBack: c.handedBack.Load(),
		HandBackFailed: c.handBackFailed.Load(), Buried: c.buried.Load(), Dropped: c.dropped.Load(),
	}
}

// emit calls one hook, if it is set, and survives it.
func emit[T any](log *slog.Logger, hook func(T), info T) {
	if hook == nil {
		return
	}
	if err := guard(func() { hook(info) }); err != nil {
		logPanic(log, "recovery: an Events func panicked", err)
	}
}

// guard turns a panic of the caller's code into an error.
func guard(f func()) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = &panicError{value: p, stack: debug.Stack()}
		}
	}()
	f()
	return nil
}

func logPanic(log *slog.Logger, msg string, err error, attrs ...any) {
	attrs = append(attrs, "err", err)
	if p, ok := err.(*panicError); ok {
		attrs = append(attrs, "stack", string(p.stack))
	}
	log.Log(context.Background(), slog.LevelError, msg, attrs...)
}
