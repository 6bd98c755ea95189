package recovery

import (
	"context"
	"fmt"
	"log/slog"
	"time"
)

// Everything of the user's that a Recoverer may call, each with a step before and after it. A process that is killed there has half done
// whatever it called it for.

// dress gives cfg all of them. What is stored lies in dir, which the processes of a scene share.
func dress(cfg Config, k *killer, dir string) (Config, error) {
	store, err := NewDirStore(dir)
	if err != nil {
		return cfg, err
	}
	cfg.Codec = steppedCodec{k, AESGCM([]byte("0123456789abcdef"))}
	cfg.PayloadStore, cfg.PayloadThreshold = steppedStore{k, store}, 1
	cfg.Backoff = func(int) (wait time.Duration) {
		_ = k.callback("backoff", func() error { wait = 20 * time.Millisecond; return nil })
		return wait
	}
	cfg.Logger = slog.New(steppedLog{slog.DiscardHandler, k})
	cfg.Events = Events{
		Started: stepped[StartedInfo](k, "started"), Stopped: stepped[StoppedInfo](k, "stopped"), Beat: stepped[BeatInfo](k, "beaten"),
		Suspected: stepped[SuspectedInfo](k, "suspected"), Fenced: stepped[FencedInfo](k, "fenced"), Rejoined: stepped[RejoinedInfo](k, "rejoined"),
		Lost: stepped[LostInfo](k, "lost"), Repaired: stepped[RepairedInfo](k, "repaired"), HandedBack: stepped[HandedBackInfo](k, "handedback"),
		HandBackFailed: stepped[HandBackFailedInfo](k, "failed"), Buried: stepped[BuriedInfo](k, "buried"), Dropped: stepped[DroppedInfo](k, "dropped"),
		Swept: stepped[SweepReport](k, "swept"),
	}
	return cfg, nil
}

// stepsOfCallbacks are those that a process comes by which tracks, and sweeps another; stepsOfFormats those where a list is the Enqueuer.
var stepsOfCallbacks = []string{"seal", "open", "put", "payload", "delete", "backoff", "log", "enqueueall", "started", "stopped", "beaten", "lost", "handedback",
	"failed", "buried", "swept"}
var stepsOfFormats = []string{"decode", "encode", "seal", "open"}

func stepped[T any](k *killer, name string) func(T) {
	return func(T) { _ = k.callback(name, func() error { return nil }) }
}

type steppedCodec struct {
	k *killer
	Codec
}

func (c steppedCodec) Seal(plain, lease []byte) (sealed []byte, err error) {
	err = c.k.callback("seal", func() (err error) { sealed, err = c.Codec.Seal(plain, lease); return err })
	return sealed, err
}

func (c steppedCodec) Open(sealed, lease []byte) (plain []byte, err error) {
	err = c.k.callback("open", func() (err error) { plain, err = c.Codec.Open(sealed, lease); return err })
	return plain, err
}

type steppedStore struct {
	k *killer
	PayloadStore
}

func (s steppedStore) Put(ctx context.Context, key string, payload []byte) error {
	return s.k.callback("put", func() error { return s.PayloadStore.Put(ctx, key, payload) })
}

func (s steppedStore) Get(ctx context.Context, key string) (payload []byte, err error) {
	err = s.k.callback("payload", func() (err error) { payload, err = s.PayloadStore.Get(ctx, key); return err })
	return payload, err
}

func (s steppedStore) Delete(ctx context.Context, key string) error {
	return s.k.callback("delete", func() error { return s.PayloadStore.Delete(ctx, key) })
}

type steppedLog struct {
	slog.Handler
	k *killer
}

func (l steppedLog) Enabled(context.Context, slog.Level) bool { return true }

func (l steppedLog) Handle(context.Context, slog.Record) error {
	return l.k.callback("log", func() error { return nil })
}

func (l steppedLog) WithAttrs([]slog.Attr) slog.Handler { return l }
func (l steppedLog) WithGroup(string) slog.Handler      { return l }

// steppedFormat is the one of elements that name themselves.
type steppedFormat struct{ k *killer }

func (f steppedFormat) Decode(element []byte) (job Job, err error) {
	err = f.k.callback("decode", func() error { job = Job{ID: string(element), Payload: element}; return nil })
	return job, err
}

func (f steppedFormat) Encode(o Orphan) (element []byte, err error) {
	err = f.k.callback("encode", func() error { element = o.Payload; return nil })
	return element, err
}

// steppedBatch takes a page at a time, and looks whether what was stored and sealed is what it was.
type steppedBatch struct {
	k    *killer
	take EnqueuerFunc
}

func (b steppedBatch) Enqueue(ctx context.Context, o Orphan) error {
	return b.k.callback("enqueue", func() error {
		if string(o.Payload) != o.ID {
			return Permanent(fmt.Errorf("job %q has the payload %q", o.ID, o.Payload))
		}
		return b.take(ctx, o)
	})
}

func (b steppedBatch) EnqueueAll(ctx context.Context, os []Orphan) []error {
	errs := make([]error, len(os))
	_ = b.k.callback("enqueueall", func() error {
		for i, o := range os {
			errs[i] = b.Enqueue(ctx, o)
		}
		return nil
	})
	return errs
}
