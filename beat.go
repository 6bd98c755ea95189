package recovery

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"
)

// send makes one beat, and beside it enters the registry again: a registry that was lost heals within one interval.
func (h *heartbeater) send(ctx context.Context, inc *incarnation) (pulse, error) {
	exact, renew := h.exact, !time.Now().Before(h.nextRenewal)
	p, err := bounded(ctx, h.r.group, h.limit(), func(ctx context.Context) (pulse, error) {
		if exact {
			// While a Cluster moves the worker's slot, Redis refuses scripts that name keys which do not exist, and the client tries again for a while.
			short, cancel := context.WithTimeout(ctx, h.limit()/2)
			defer cancel()
			p, err := h.fullBeat(short, inc)
			if !redis.HasErrorPrefix(err, "TRYAGAIN") && !errors.Is(err, context.DeadlineExceeded) {
				return p, err
			}
		}
		p, ok, err := h.lightBeat(ctx, inc, renew)
		if ok || err != nil {
			return p, err
		}
		return h.fullBeat(ctx, inc)
	})
	if err == nil && !p.light {
		h.exact = false
	}
	if err == nil && (renew || !p.light) {
		h.nextRenewal = time.Now().Add(h.r.tm.renewal)
	}
	return p, err
}

// lightBeat renews the key by plain commands, which cost Redis a fraction of the script. SET XX succeeds only if the key is there; and it is
// there only as long as nobody has fenced the session, or missed a beat. In any other case, not ok, the script decides; an error is that
// Redis was not heard. renew: also the TTLs of session and records.
func (h *heartbeater) lightBeat(ctx context.Context, inc *incarnation, renew bool) (p pulse, ok bool, err error) {
	r := h.r
	var set *redis.BoolCmd
	var session *redis.SliceCmd
	var leases, records, entry *redis.IntCmd
	var ttls []*redis.BoolCmd
	_, _ = r.rdb.Pipelined(ctx, func(p redis.Pipeliner) error {
		set = p.SetXX(ctx, inc.keys.beat, r.State().String(), r.tm.beatTTL)
		session = p.HMGet(ctx, inc.keys.session, sessionFields...)
		leases = p.ZCard(ctx, inc.keys.inflight)
		records = p.HLen(ctx, inc.keys.jobs)
		if renew && r.tm.retention > 0 {
			for _, key := range []string{inc.keys.session, inc.keys.inflight, inc.keys.jobs} {
				ttls = append(ttls, p.PExpire(ctx, key, r.tm.retention))
			}
		}
		entry = h.register(ctx, p, inc)
		return nil
	}) // each command has its own error
	renewed, err := set.Result()
	if err != nil && !isAnswer(err) {
		return pulse{}, false, err
	}
	values := session.Val()
	for _, ttl := range ttls {
		err = errors.Join(err, ttl.Err())
	}
	if err != nil || !renewed || leases.Err() != nil || records.Err() != nil || session.Err() != nil || len(values) != len(sessionFields) || values[0] != "live" {
		return pulse{}, false, nil
	}
	h.registered(ctx, inc, entry)
	p = pulse{state: sessionLive, leases: leases.Val(), records: records.Val(), light: true}
	for i := range p.lanes {
		p.lanes[i] = toInt(values[1+i])
	}
	p.fetch = toInt(values[1+laneCount])
	return p, true, nil
}

// sessionFields are what a beat reads of the session.
var sessionFields = func() []string {
	fields := []string{"state"}
	for i := range laneCount {
		fields = append(fields, "lane"+strconv.Itoa(i))
	}
	return append(fields, "fetch")
}()

func toInt(v any) int64 {
	s, _ := v.(string)
	n, _ := strconv.ParseInt(s, 10, 64)
	return n
}

// fullBeat runs the script, which also renews the TTLs of the records and counts them.
func (h *heartbeater) fullBeat(ctx context.Context, inc *incarnation) (pulse, error) {
	r := h.r
	keys := []string{inc.keys.session, inc.keys.beat, inc.keys.suspect, inc.keys.inflight, inc.keys.jobs}
	args := []any{ms(r.tm.beatTTL), ms(r.tm.retention), r.State().String(), laneCount}
	var beat *redis.Cmd
	var entry *redis.IntCmd
	_, _ = r.rdb.Pipelined(ctx, func(p redis.Pipeliner) error {
		beat = beatScript.EvalSha(ctx, p, keys, args...)
		entry = h.register(ctx, p, inc)
		return nil
	}) // each command has its own error
	if isNoScript(beat.Err()) {
		beat = beatScript.Eval(ctx, r.rdb, keys, args...)
	}
	answer, err := beat.Int64Slice()
	if err != nil {
		return pulse{}, err
	}
	if len(answer) == 0 || answer[0] == sessionLive && len(answer) != 3+laneCount+1 {
		return pulse{}, fmt.Errorf("script answered %d values", len(answer))
	}
	h.registered(ctx, inc, entry)
	p := pulse{state: answer[0]}
	if p.state == sessionLive {
		p.leases, p.records, p.fetch = answer[1], answer[2], answer[3+laneCount]
		copy(p.lanes[:], answer[3:])
	}
	return p, nil
}

// pulse is what a beat brings back.
type pulse struct {
	state           int64
	leases, records int64 // in the index; fields beside it
	lanes           [laneCount]int64
	fetch           int64
	light           bool // without the script
}

// register enters the registry again, in the pipeline of the beat; unless that is on another node, which may be away and must not fail the
// beat: then it goes its own way, and the answer is nil.
func (h *heartbeater) register(ctx context.Context, p redis.Pipeliner, inc *incarnation) *redis.IntCmd {
	if _, cluster := h.r.rdb.(*redis.ClusterClient); !cluster || h.r.cfg.HashTag != "" {
		return h.enter(ctx, p, inc)
	}
	if h.r.life.Err() != nil || !h.entering.CompareAndSwap(false, true) {
		return nil // this worker leaves, or the last one has not been answered
	}
	h.r.group.spawn(func() {
		defer h.entering.Store(false)
		ctx, cancel := h.r.limit(h.r.hard)
		defer cancel()
		var entry *redis.IntCmd
		_, _ = h.r.rdb.Pipelined(ctx, func(p redis.Pipeliner) error {
			entry = h.enter(ctx, p, inc)
			return nil
		})
		h.registered(ctx, inc, entry)
	})
	return nil
}

func (h *heartbeater) enter(ctx context.Context, p redis.Pipeliner, inc *incarnation) *redis.IntCmd {
	entry := p.SAdd(ctx, h.r.keys.workers(), inc.id)
	if waited := h.r.waits.lists(); len(waited) > 0 {
		p.ZAdd(ctx, h.r.keys.queues(), queueEntries(waited)...)
	}
	return entry
}

// registered looks whether a worker that is live is registered, too.
func (h *heartbeater) registered(ctx context.Context, inc *incarnation, entry *redis.IntCmd) {
	if entry == nil {
		return
	}
	if err := entry.Err(); err != nil && h.r.life.Err() == nil {
		h.r.log.Warn("recovery: could not renew the registry entry", "worker", inc.id, "err", err)
		h.r.healRegistry(ctx, inc, err)
	}
}
