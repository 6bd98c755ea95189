package recovery

import (
	"context"
	"crypto/rand"
	"fmt"
	"strings"
	"time"
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
	until   time.Time // local; when the claim runs out
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
			claimLeases, claimBytes, ms(r.tm.retention), ms(r.tm.tombstone), flag, call)
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
	for a.more() {
		l := claimedLease{member: a.string()}
		l.parse(a.string())
		l.record, l.checkpoint = a.bytes(), a.bytes()
		c.leases = append(c.leases, l)
	}
	if a.err != nil {
		return nil, fmt.Errorf("claim leases of worker %q: %w", id, a.err)
	}
	return c, nil
}

// parse reads a claim field: "start attempts reason flags error". What can't be read is taken as unknown: a damaged note must not keep a
// job from being handed back.
func (l *claimedLease) parse(s string) {
	var word, flags string
	_, _ = fmt.Sscanf(s, "%d %d %s %s", &l.start, &l.attempts, &word, &flags)
	l.reason, l.waited = parseReason(word), flags == "w"
	if parts := strings.SplitN(s, " ", 5); len(parts) == 5 {
		l.lastErr = parts[4]
	}
}

func (l *claimedLease) format() string {
	flags := "-"
	if l.waited {
		flags = "w"
	}
	return fmt.Sprintf("%d %d %s %s %.500s", l.start, l.attempts, l.reason, flags, l.lastErr)
}
