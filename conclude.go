package recovery

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/redis/go-redis/v9"
)

// conclude writes down what became of orphans, and tells it.
func (r *Recoverer) conclude(ctx context.Context, c *claim, orphans []*orphan, h *handed) error {
	// The Enqueuer has answered: that is written down even if the sweep is being stopped.
	ctx, cancel := r.limit(context.WithoutCancel(ctx))
	defer cancel()
	var forget, fields, later []any
	var errs []error
	for _, o := range orphans {
		if o.fate == fateBury {
			errs = append(errs, r.bury(ctx, o))
		}
		switch o.fate {
		case fateForget, fateBury:
			forget = append(forget, o.lease.member)
			fields = append(fields, o.lease.fields()...)
		case fateLater:
			later = append(later, o.lease.member, ms(o.delay), o.lease.format())
		}
	}
	if len(forget) > 0 {
		err := r.forget(ctx, c.keys, forget, fields)
		r.accepted.note(orphans, err != nil)
		if err == nil {
			r.dropPayloads(ctx, orphans)
		}
		errs = append(errs, err)
	}
	if len(later) > 0 {
		errs = append(errs, r.postpone(ctx, c, later))
	}
	for _, o := range orphans {
		if o.fate == fateDelivered && o.stored {
			r.deletePayload(ctx, o.Key)
		}
		r.tellFate(c, o, h)
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("conclude hand-back of worker %q: %w", c.worker, err)
	}
	return nil
}

// forget drops leases that somebody else has now; that they were handed on is remembered, in the same step, so that their old holder always
// finds proof. Plain commands, because Lua would cost twice as much; the script does the same where Redis is out of memory and refuses them.
func (r *Recoverer) forget(ctx context.Context, k workerKeys, members, fields []any) error {
	_, err := r.rdb.TxPipelined(ctx, func(p redis.Pipeliner) error {
		p.SAdd(ctx, k.handed, members...)
		p.PExpire(ctx, k.handed, r.tm.tombstone)
		p.Do(ctx, append([]any{"zrem", k.claims}, members...)...)
		p.Do(ctx, append([]any{"hdel", k.jobs}, fields...)...)
		return nil
	})
	if isOOM(err) || redis.HasErrorPrefix(err, "EXECABORT") {
		err = forgetScript.Run(ctx, r.rdb, []string{k.jobs, k.claims, k.handed}, append([]any{ms(r.tm.tombstone)}, members...)...).Err()
	}
	return err
}

func (r *Recoverer) tellFate(c *claim, o *orphan, h *handed) {
	if o.told {
		h.forgotten++
		return
	}
	var age time.Duration
	if o.lease.start > 0 {
		age = max(0, time.UnixMilli(c.now).Sub(o.TrackedAt)) // c.now is in whole milliseconds
	}
	by := r.WorkerID()
	log := func(level slog.Level, msg string, more ...any) {
		if r.log.Enabled(context.Background(), level) { // a thousand orphans are a thousand lines
			r.log.Log(context.Background(), level, msg, append([]any{"worker", o.Worker, "job", o.ID, "lease", o.Key, "queue", o.Queue,
				"reason", o.Reason.String(), "recovery", o.Recovery, "age", age, "by", by}, more...)...)
		}
	}
	switch o.fate {
	case fateForget, fateDelivered:
		h.handedBack++
		r.counts.handedBack.Add(1)
		log(slog.LevelInfo, "recovery: job handed back")
		emit(r.log, r.cfg.Events.HandedBack, HandedBackInfo{Orphan: o.Orphan, By: by, Age: age, Took: o.took})
	case fateBury:
		h.buried++
		r.counts.buried.Add(1)
		log(slog.LevelError, "recovery: job put into the dead letters", "grave", o.grave, "err", o.err)
		emit(r.log, r.cfg.Events.Buried, BuriedInfo{Orphan: o.Orphan, By: by, Reason: o.grave, Err: o.err})
	case fateLater:
		h.postponed++
		if o.err == nil {
			return
		}
		r.counts.handBackFailed.Add(1)
		log(slog.LevelError, "recovery: hand-back failed, the job is kept", "attempt", o.lease.attempts, "retry", o.delay, "err", o.err)
		emit(r.log, r.cfg.Events.HandBackFailed, HandBackFailedInfo{Orphan: o.Orphan, By: by, Attempt: o.lease.attempts, Retry: o.delay, Err: o.err})
	}
}
