package recovery

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

// Limits of one claim, so that no script holds Redis up for long.
const (
	claimLeases = 250
	claimBytes  = 1 << 20
)

// verdict is claim.lua's decision about a worker.
type verdict int64

const (
	verdictAlive verdict = iota
	verdictSuspect
	verdictDead  // leases were claimed
	verdictIdle  // dead, and no lease is due now
	verdictEmpty // dead, and nothing is left
)

// claim is what claim.lua answered.
type claim struct {
	worker  string
	keys    workerKeys
	verdict verdict
	wait    time.Duration // until there is something to do; negative: never
	now     int64         // ms, Redis' clock
	news    bool          // this call made the suspicion, or the fence
	damaged int
	leases  []claimedLease
	orphans []*orphan // the same, read and counted; see readClaim
	until   time.Time // local; when the claim runs out
	mark    string    // the same in Redis, by its clock; it tells this claim from others
}

// claimedLease is one lease of a dead worker. Nobody else hands it back before the claim runs out.
type claimedLease struct {
	member     string
	start      int64 // us; 0 if it is not known
	attempts   int
	reason     Reason
	waited     bool   // Backoff has had its say
	homeless   bool   // Redis lost it; this process has the only copy
	lastErr    string // of the Enqueuer
	record     []byte
	checkpoint []byte
	unread     error // why the record is not here
}

// claim decides about a worker and takes some of its leases. own is for this worker's own claims that are due.
func (r *Recoverer) claim(ctx context.Context, id string, own bool) (*claim, error) {
	k := r.keys.worker(id)
	c := &claim{worker: id, keys: k, until: time.Now().Add(r.tm.claimTTL)}
	keys := []string{k.session, k.beat, k.suspect, k.inflight, k.jobs, k.claims, k.handed, k.damaged}
	flag := 0
	if own {
		flag = 1
	}
	call := rand.Text()
	a, err := bounded(ctx, r.group, r.tm.call, func(ctx context.Context) (*replies, error) {
		cmd, err := r.runReplicated(ctx, claimScript, keys, ms(r.tm.confirm), ms(r.tm.suspectTTL), ms(r.tm.claimTTL),
			claimLeases, ms(r.tm.retention), ms(r.tm.tombstone), flag, call)
		if err != nil {
			return nil, err
		}
		return answerOf(cmd)
	})
	if err != nil {
		return nil, fmt.Errorf("claim leases of worker %q: %w", id, err)
	}
	c.verdict = verdict(a.int())
	if wait := a.int(); wait < 0 {
		c.wait = -1
	} else {
		c.wait = time.Duration(wait) * time.Millisecond
	}
	c.now, c.news, c.damaged = a.int(), a.int() == 1, int(a.int())
	if a.more() {
		c.mark = a.string()
	}
	for a.more() {
		l := claimedLease{member: a.string()}
		l.parse(a.string())
		c.leases = append(c.leases, l)
	}
	if a.err != nil {
		return nil, fmt.Errorf("claim leases of worker %q: %w", id, a.err)
	}
	if err := r.loadRecords(ctx, c); err != nil {
		return nil, fmt.Errorf("read claimed leases of worker %q: %w", id, errors.Join(err, r.unclaim(ctx, c)))
	}
	return c, nil
}

// loadRecords reads the records of what was claimed. What would be too much for now is given back to the fleet, at once; and one that can't be
// read does not keep the others.
func (r *Recoverer) loadRecords(ctx context.Context, c *claim) error {
	loaded, bytes, largest, failed := 0, 0, 1, 0
	for page := 1; loaded < len(c.leases) && bytes < claimBytes; {
		leases := c.leases[loaded:min(loaded+page, len(c.leases))]
		err := r.loadPage(ctx, c, leases)
		if !time.Now().Before(c.until) {
			return errors.Join(err, errors.New("the claim has run out meanwhile"))
		}
		if err != nil {
			if failed++; failed > 3 || ctx.Err() != nil {
				return err // it is not about one record
			}
			if len(leases) > 1 {
				page = 1
				continue
			}
			leases[0].unread = err
		}
		for _, l := range leases {
			largest = max(largest, len(l.record)+len(l.checkpoint))
			bytes += len(l.record) + len(l.checkpoint)
		}
		loaded += len(leases)
		page = min(4*page, max(1, (claimBytes-bytes)/largest))
	}
	if rest := c.leases[loaded:]; len(rest) > 0 {
		if err := r.unclaim(ctx, &claim{keys: c.keys, mark: c.mark, leases: rest}); err != nil {
			return err
		}
	}
	c.leases = c.leases[:loaded]
	return r.dropTaken(ctx, c)
}

// loadPage is one read. It has a quarter of the claim's time, so that others can be made after one that fails.
func (r *Recoverer) loadPage(ctx context.Context, c *claim, leases []claimedLease) error {
	fields := make([]string, 0, 2*len(leases))
	for _, l := range leases {
		fields = append(fields, l.member, l.member+".cp")
	}
	values, err := bounded(ctx, r.group, min(r.tm.call, r.tm.claimTTL/4), func(ctx context.Context) ([]any, error) {
		rdb, err := r.master(ctx, c.keys.jobs)
		if err != nil {
			return nil, err
		}
		return rdb.HMGet(ctx, c.keys.jobs, fields...).Result()
	})
	a := &replies{values: values, err: err}
	for i := range leases {
		l := &leases[i]
		l.record, l.checkpoint = a.bytes(), a.bytes()
	}
	return a.err
}

// unclaim makes the leases of a claim due at once, for whoever comes next.
func (r *Recoverer) unclaim(ctx context.Context, c *claim) error {
	var leases []any
	for _, l := range c.leases {
		leases = append(leases, l.member, 0, l.format())
	}
	ctx, cancel := r.limit(context.WithoutCancel(ctx))
	defer cancel()
	return r.postpone(ctx, c, leases)
}

// dropTaken looks again at leases without a record. If they are not claimed any more, another sweeper has handed them back since, because Redis'
// clock made the claim run out early. Record and claim go in one step, so what is claimed has really no record.
func (r *Recoverer) dropTaken(ctx context.Context, c *claim) error {
	gone := func(l claimedLease) bool { return l.record == nil && l.unread == nil }
	if !slices.ContainsFunc(c.leases, gone) {
		return nil
	}
	ctx, cancel := r.limit(ctx)
	defer cancel()
	rdb, err := r.master(ctx, c.keys.claims)
	if err != nil {
		return err
	}
	c.leases = slices.DeleteFunc(c.leases, func(l claimedLease) bool {
		if !gone(l) || err != nil {
			return false
		}
		e := rdb.ZScore(ctx, c.keys.claims, l.member).Err()
		if !errors.Is(e, redis.Nil) {
			err = e
		}
		return errors.Is(e, redis.Nil)
	})
	return err
}

// master is for reads that must not come from a replica, which may not have a record yet: the Cluster client can be set up to prefer those.
func (r *Recoverer) master(ctx context.Context, key string) (redis.Cmdable, error) {
	if cluster, ok := r.rdb.(*redis.ClusterClient); ok && cluster.Options().ReadOnly {
		return cluster.MasterForKey(ctx, key)
	}
	return r.rdb, nil
}

// postpone sets when leases of a claim are due again, as long as they are its own: member, delay in ms, claim field.
func (r *Recoverer) postpone(ctx context.Context, c *claim, leases []any) error {
	return postponeScript.Run(ctx, r.rdb, []string{c.keys.jobs, c.keys.claims}, append([]any{c.mark}, leases...)...).Err()
}

// parse reads a claim field: "start attempts reason flags error". flags: w, Backoff has had its say; t and a time, take.lua's own; else -. What can't be read is taken as unknown: a damaged note must not keep a
// job from being handed back.
func (l *claimedLease) parse(s string) {
	start, s, _ := strings.Cut(s, " ")
	attempts, s, _ := strings.Cut(s, " ")
	reason, s, _ := strings.Cut(s, " ")
	flags, s, _ := strings.Cut(s, " ")
	l.start, _ = strconv.ParseInt(start, 10, 64)
	l.attempts, _ = strconv.Atoi(attempts)
	l.reason, l.waited, l.lastErr = parseReason(reason), flags == "w", s
}

// fields are what the hash of jobs has of the lease.
func (l *claimedLease) fields() []any {
	return []any{l.member, l.member + ".claim", l.member + ".cp", l.member + ".cpn"}
}

func (l *claimedLease) format() string {
	flags := "-"
	if l.waited {
		flags = "w"
	}
	return fmt.Sprintf("%d %d %s %s %.500s", l.start, l.attempts, l.reason, flags, l.lastErr)
}
