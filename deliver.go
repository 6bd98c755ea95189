package recovery

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"

	"github.com/redis/go-redis/v9"
)

// Handing back into a list. Where the list lies in the slot of the dead worker, one script pushes the job and forgets the lease, so that
// there is no moment at which a sweeper could die between the two: exactly once. Elsewhere it is pushed first and forgotten after, as by any
// Enqueuer.

// parcel is a job on its way into a list.
type parcel struct {
	to      *ListQueue // what is known of list
	list    string
	push    string // LPUSH or RPUSH
	element []byte
	at      int  // > 0: the element is the record from here on, counted from 1, and Redis has it
	lost    bool // Redis may have lost the lease; element is the only copy
}

// deliver brings orphans into their lists, and decides on their fate.
func (r *Recoverer) deliver(ctx context.Context, c *claim, ready []*orphan) {
	ready = slices.DeleteFunc(slices.Clone(ready), func(o *orphan) bool { return !r.loadPayload(o) })
	parcels := make([]parcel, 0, len(ready))
	ready = slices.DeleteFunc(ready, func(o *orphan) bool {
		o.lease.waited = true
		p, err := r.pack(o)
		if err != nil {
			r.judge(o, err)
			return true
		}
		parcels = append(parcels, p)
		return false
	})
	if len(ready) == 0 {
		return
	}
	ctx, cancel := r.limit(context.WithoutCancel(ctx)) // a step that was begun is taken to its end
	defer cancel()
	for same := range runs(parcels) {
		r.deliverRun(ctx, c, ready[same.from:same.to], parcels[same.from:same.to])
	}
}

// deliverRun is deliver for one list.
func (r *Recoverer) deliverRun(ctx context.Context, c *claim, orphans []*orphan, parcels []parcel) {
	if err := parcels[0].to.announce(ctx, r.rdb); err != nil {
		for _, o := range orphans {
			r.judge(o, err)
		}
		return
	}
	for _, o := range orphans {
		o.sent = true
	}
	if list := parcels[0].list; r.together(list) {
		err := r.deliverAtOnce(ctx, c, orphans, parcels)
		if !redis.HasErrorPrefix(err, "CROSSSLOT") {
			return
		}
		r.tellApart(list)
	}
	for i, err := range pushEach(ctx, r.rdb, parcels, make([]error, len(parcels))) {
		r.judge(orphans[i], err)
	}
}

// pack says where an orphan goes, and as what.
func (r *Recoverer) pack(o *orphan) (parcel, error) {
	if o.element.queue != "" { // as it was found, and where that queue wants it
		q := r.list
		if known := r.knownList(o.element.queue); known != nil {
			q = known
		}
		p := parcel{to: q, list: o.element.queue, push: q.pushTo(o.element.side), element: o.element.bytes, at: o.element.at + 1}
		if o.Checkpoint == nil {
			return p, nil
		}
		var err error
		p.at = 0
		p.element, err = q.encode(o.Orphan) // the format may have a place for it
		return p, err
	}
	p := parcel{to: r.list, list: r.list.key, push: r.list.pushTo(r.list.side)}
	var err error
	if p.element, err = r.list.encode(o.Orphan); err != nil {
		return p, err
	}
	// The default format writes the payload, which is the end of the record: no need to send it.
	if _, plain := r.list.format.(payloadFormat); plain && !o.stored && o.lease.record[1]&flagSealed == 0 {
		p.at = len(o.lease.record) - len(p.element) + 1
	}
	return p, nil
}

// deliverAtOnce runs the script.
func (r *Recoverer) deliverAtOnce(ctx context.Context, c *claim, orphans []*orphan, parcels []parcel) error {
	members := make([]string, len(orphans))
	for i, o := range orphans {
		members[i] = o.lease.member
		parcels[i].lost = o.lease.homeless
	}
	outcomes, err := r.runDeliver(ctx, c.keys, false, members, parcels)
	if redis.HasErrorPrefix(errors.Unwrap(err), "CROSSSLOT") {
		return errors.Unwrap(err)
	}
	for i, o := range orphans {
		switch {
		case err != nil:
			r.judge(o, err) // perhaps unknown. Tried again later; if it was pushed, that finds nothing to do
		case outcomes[i] == deliveredNever:
			r.judge(o, errors.New("the record is missing"))
		case outcomes[i] == deliveredByNobody:
			o.fate = fateNothing // somebody saw to it
		default:
			o.fate = fateDelivered
		}
	}
	return nil
}

// stretch is a part of a slice.
type stretch struct{ from, to int }

// runs are the stretches of parcels that go to the same end of the same list, none longer than a script can take.
func runs(parcels []parcel) iter.Seq[stretch] {
	return func(yield func(stretch) bool) {
		for from := 0; from < len(parcels); {
			to := from + 1
			for to < len(parcels) && to-from < claimLeases && parcels[to].list == parcels[from].list && parcels[to].push == parcels[from].push {
				to++
			}
			if !yield(stretch{from, to}) {
				return
			}
			from = to
		}
	}
}

// What deliver.lua answers for a lease.
const (
	deliveredByNobody = 0 // there is no such lease
	deliveredNow      = 1
	deliveredBefore   = 2
	deliveredNever    = 3 // it has no record
)

// runDeliver runs deliver.lua for parcels of one list. own is for leases that this worker holds.
func (r *Recoverer) runDeliver(ctx context.Context, k workerKeys, own bool, members []string, parcels []parcel) ([]int64, error) {
	flag := 0
	if own {
		flag = 1
	}
	keys := []string{k.inflight, k.jobs, k.claims, k.handed, parcels[0].list}
	args := make([]any, 0, 3+3*len(parcels))
	args = append(args, ms(r.tm.tombstone), flag, parcels[0].push)
	for n := range slices.Backward(parcels) { // the first shall be the last one pushed, and the next one taken
		args = append(args, members[n])
		switch p := parcels[n]; {
		case p.lost:
			args = append(args, "lost", p.element)
		case p.at > 0:
			args = append(args, "at", p.at)
		default:
			args = append(args, "is", p.element)
		}
	}
	answer, err := bounded(ctx, r.group, r.tm.call, func(ctx context.Context) ([]int64, error) {
		cmd, err := r.runReplicated(ctx, deliverScript, keys, args...)
		if err != nil {
			return nil, err
		}
		return cmd.Int64Slice()
	})
	if err == nil && len(answer) != len(parcels) {
		err = fmt.Errorf("script answered %d values, not %d", len(answer), len(parcels))
	}
	if err != nil {
		return nil, fmt.Errorf("push to list %q: %w", parcels[0].list, err)
	}
	slices.Reverse(answer)
	return answer, nil
}

// together reports whether a list lies in the slot of every worker, so that one script can see both.
func (r *Recoverer) together(list string) bool {
	if _, apart := r.apart.Load(list); apart {
		return false
	}
	if _, cluster := r.rdb.(*redis.ClusterClient); !cluster {
		return true
	}
	return r.cfg.HashTag != "" && hashTagOf(list) == r.cfg.HashTag
}

// tellApart says, once, that hand-back into a list is not atomic.
func (r *Recoverer) tellApart(list string) {
	if _, told := r.apart.Swap(list, true); told {
		return
	}
	r.log.Warn("recovery: the list is not in the workers' slot: jobs are handed back at least once, not exactly once, and Fetch and Work refuse it; "+
		"give the list's key a hash tag, and set Config.HashTag to it", "list", list, "hash_tag", r.cfg.HashTag)
}

// unfetch puts fetched jobs that nobody has begun back to where they were, first in line. What can't be put back now is given up, and
// handed back like anything that this worker gives up.
func (r *Recoverer) unfetch(ctx context.Context, leases []*Lease) {
	var given []giveUp
	for _, l := range leases {
		if g, ok := r.giveUp(l, Released, false); ok {
			given = append(given, g)
		}
	}
	byHome := map[*incarnation][]giveUp{}
	for _, g := range given {
		byHome[g.lease.home] = append(byHome[g.lease.home], g)
	}
	for home, page := range byHome {
		if err := r.putBack(ctx, home, page); err != nil {
			r.log.Error("recovery: could not put fetched jobs back, will try again", "worker", home.id, "jobs", len(page),
				"first", page[0].lease.ID(), "last", page[len(page)-1].lease.ID(), "err", err)
		}
	}
}

// putBack runs the script for leases of one incarnation.
func (r *Recoverer) putBack(ctx context.Context, home *incarnation, given []giveUp) error {
	members, parcels := make([]string, len(given)), make([]parcel, len(given))
	for i, g := range given {
		e, err := parseElement(g.lease.record)
		if err != nil {
			return err
		}
		members[i] = g.lease.member
		parcels[i] = parcel{list: e.queue, push: (&ListQueue{}).pushTo(e.side), at: e.at + 1}
	}
	var errs []error
	for _, same := range slices.Backward(slices.Collect(runs(parcels))) { // the first shall be the last one pushed
		outcomes, err := r.runDeliver(context.WithoutCancel(ctx), home.keys, true, members[same.from:same.to], parcels[same.from:same.to])
		errs = append(errs, err)
		for i, g := range given[same.from:same.to] {
			if err == nil && (outcomes[i] == deliveredNow || outcomes[i] == deliveredBefore) {
				r.settled(g)
			}
		}
	}
	return errors.Join(errs...)
}
