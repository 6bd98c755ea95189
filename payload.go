package recovery

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
)

// Payloads outside of Redis. A stored payload is written before its record and removed after it, so that it lives at least as long: a crash
// in between leaves a payload without a record, never a record without its payload.

// payloadContext binds a sealed payload to its lease, and tells it from the record's own body.
func payloadContext(lease string) []byte { return []byte(lease + " payload") }

// checkpointContext does the same for checkpoints.
func checkpointContext(lease string) []byte { return []byte(lease + " checkpoint") }

// stores reports whether job's payload goes to the PayloadStore.
func (r *Recoverer) stores(job *Job) bool {
	return r.cfg.PayloadStore != nil && len(job.Payload) >= r.cfg.PayloadThreshold
}

// putPayload stores job's payload, sealed like the rest of the record.
func (r *Recoverer) putPayload(ctx context.Context, job *Job, lease string) (err error) {
	payload := job.Payload
	if r.cfg.Codec != nil {
		if payload, err = seal(payload, payloadContext(lease), r.cfg.Codec); err != nil {
			return err
		}
	}
	perr := guard(func() { err = r.cfg.PayloadStore.Put(ctx, lease, payload) })
	if err = errors.Join(err, perr); err != nil {
		return fmt.Errorf("store payload: %w", err)
	}
	return nil
}

// loadPayload completes an orphan whose payload lies outside. It reports false, and has decided the orphan's fate, if that failed.
func (r *Recoverer) loadPayload(o *orphan) bool {
	if !o.stored {
		return true
	}
	ctx, cancel := context.WithTimeout(r.hard, r.cfg.EnqueueTimeout)
	defer cancel()
	payload, err := getPayload(ctx, r.cfg.PayloadStore, r.cfg.Codec, o.Key)
	if err == nil {
		o.Payload = payload
		return true
	}
	switch {
	// It will not come back: handing the job on without it, or trying for ever, would be worse.
	case errors.Is(err, fs.ErrNotExist):
		o.fate, o.grave, o.err = fateBury, "payload missing", err
	case isPermanent(err):
		o.fate, o.grave, o.err = fateBury, "payload unreadable", err
	default:
		o.fail(err, r.cfg.SweepInterval)
	}
	return false
}

func getPayload(ctx context.Context, store PayloadStore, codec Codec, lease string) (payload []byte, err error) {
	if store == nil {
		return nil, errors.New("the payload lies in a PayloadStore, and there is none")
	}
	perr := guard(func() { payload, err = store.Get(ctx, lease) })
	if err = errors.Join(err, perr); err != nil {
		return nil, fmt.Errorf("load payload: %w", err)
	}
	if codec == nil {
		return payload, nil
	}
	if payload, err = openSealed(payload, payloadContext(lease), codec); err != nil {
		return nil, Permanent(err)
	}
	return payload, nil
}

// dropPayloads removes the payloads of orphans that the Enqueuer took.
func (r *Recoverer) dropPayloads(ctx context.Context, orphans []*orphan) {
	for _, o := range orphans {
		if o.stored && o.fate == fateForget {
			r.deletePayload(ctx, o.Key)
		}
	}
}

// deletePayload is best effort: what stays costs room, nothing else.
func (r *Recoverer) deletePayload(ctx context.Context, lease string) {
	if r.cfg.PayloadStore == nil {
		return
	}
	var err error
	perr := guard(func() { err = r.cfg.PayloadStore.Delete(ctx, lease) })
	if err = errors.Join(err, perr); err != nil {
		r.log.Warn("recovery: payload could not be deleted", "lease", lease, "err", err)
	}
}

// openCheckpoint reads a checkpoint as Redis has it.
func openCheckpoint(raw []byte, lease string, codec Codec) ([]byte, error) {
	if codec == nil {
		return raw, nil
	}
	return openSealed(raw, checkpointContext(lease), codec)
}
