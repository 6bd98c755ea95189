package recovery

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

// DeadLetter is a job that could not, or must not, be handed back. It waits for a person: see Inspector.Requeue and Inspector.Discard.
type DeadLetter struct {
	Orphan              // what is known of the job. Payload is nil if it lies in a PayloadStore
	Buried    time.Time // Redis' clock
	Cause     string    // why it is here
	LastError string    // of the Enqueuer, or why the record can't be read
	Crashes   []Crash   // oldest first
	Record    []byte    // as it was found, untouched; nil if there was none
	Err       error     // why Record can't be read by this Inspector, or nil
}

// Crash is one entry in the history of a job.
type Crash struct {
	Worker, Lease string
	At            time.Time // when it was noticed: Redis' clock, or for a timeout or a panic its worker's
}

// ErrNoLetter means that there is no dead letter with that Key.
var ErrNoLetter = errors.New("recovery: no such dead letter")

// InspectStore is for a fleet with Config.PayloadStore; Requeue needs it for jobs whose payload lies there.
func InspectStore(s PayloadStore) InspectorOption { return func(i *Inspector) { i.store = s } }

// DeadLetters returns a page of the dead letters, oldest first: at most limit, after skipping offset. An empty page is the end.
func (i *Inspector) DeadLetters(ctx context.Context, offset, limit int) ([]DeadLetter, error) {
	if err := i.problem(); err != nil {
		return nil, err
	}
	if offset < 0 || limit < 1 {
		return nil, fmt.Errorf("recovery: page of dead letters: offset is %d, at least 0; limit is %d, at least 1", offset, limit)
	}
	entries, err := i.rdb.ZRangeWithScores(ctx, i.keys.deadIndex(), int64(offset), int64(offset)+int64(limit)-1).Result()
	if err != nil {
		return nil, fmt.Errorf("recovery: read dead letters: %w", err)
	}
	letters := make([]DeadLetter, 0, len(entries))
	for _, z := range entries {
		key, _ := z.Member.(string)
		l, err := i.read(ctx, key, z.Score)
		if errors.Is(err, ErrNoLetter) {
			continue // removed since
		}
		if err != nil {
			return letters, err
		}
		letters = append(letters, *l)
	}
	return letters, nil
}

// DeadLetter returns one letter by its Key, or ErrNoLetter.
func (i *Inspector) DeadLetter(ctx context.Context, key string) (*DeadLetter, error) {
	if err := i.problem(); err != nil {
		return nil, err
	}
	at, err := i.rdb.ZScore(ctx, i.keys.deadIndex(), key).Result()
	if errors.Is(err, redis.Nil) {
		return nil, fmt.Errorf("%w: %q", ErrNoLetter, key)
	}
	if err != nil {
		return nil, fmt.Errorf("recovery: read dead letter %q: %w", key, err)
	}
	return i.read(ctx, key, at)
}

func (i *Inspector) read(ctx context.Context, key string, at float64) (*DeadLetter, error) {
	values, err := i.rdb.HMGet(ctx, i.keys.deadJobs(), key, key+".rec", key+".cp").Result()
	if err != nil {
		return nil, fmt.Errorf("recovery: read dead letter %q: %w", key, err)
	}
	text, ok := values[0].(string)
	if !ok {
		return nil, fmt.Errorf("%w: %q", ErrNoLetter, key)
	}
	var kept letter
	err = json.Unmarshal([]byte(text), &kept)
	d := &DeadLetter{Buried: time.UnixMilli(int64(at)), Cause: kept.Grave, LastError: kept.Err, Err: err}
	d.Job = Job{ID: kept.Job, Queue: kept.Queue}
	d.Key, d.Worker, d.Recovery, d.Reason = key, kept.Worker, kept.Recovery, parseReason(kept.Reason)
	if kept.TrackedUS > 0 {
		d.TrackedAt = time.UnixMicro(kept.TrackedUS)
	}
	for _, c := range kept.Crashes {
		d.Crashes = append(d.Crashes, Crash{Worker: workerOf(c.Lease), Lease: c.Lease, At: time.UnixMilli(c.MS)})
	}
	i.open(d, values[1], values[2])
	return d, nil
}

// open reads what was kept of the job, as far as this Inspector can.
func (i *Inspector) open(d *DeadLetter, record, checkpoint any) {
	raw, ok := record.(string)
	if !ok {
		d.Err = errors.Join(d.Err, errors.New("there is no record"))
		return
	}
	d.Record = []byte(raw)
	job, err := decodeRecord(d.Record, d.Key, i.codec)
	if job.ID != "" {
		if isElement(d.Record) && d.ID != "" { // by the format of its list, which an Inspector does not know
			job.ID, job.Queue = d.ID, d.Queue
		}
		d.Job = job
	}
	d.Err = errors.Join(d.Err, err)
	d.Orphan.Checkpoint = job.Checkpoint
	if cp, ok := checkpoint.(string); ok {
		d.Orphan.Checkpoint, err = openCheckpoint([]byte(cp), d.Key, i.codec)
		d.Err = errors.Join(d.Err, err)
	}
	d.Job.Checkpoint = d.Orphan.Checkpoint
	if isStored(d.Record) {
		d.Payload = nil
	}
}

// Requeue gives a dead letter's job to enq, with Reason as it was, and forgets its crashes: it has all its recoveries again. The letter is
// removed only after Enqueue returned nil; dying in between, or an error of the removal, leaves it, and a second Requeue repeats the
// call with the same Key. A letter that can't be read is refused, with the reason. With a ListQueue it goes into that list, wherever it was taken from.
func (i *Inspector) Requeue(ctx context.Context, key string, enq Enqueuer) error {
	if isNil(enq) {
		return fmt.Errorf("recovery: requeue dead letter %q: %w: enq is nil", key, ErrInvalidConfig)
	}
	d, err := i.DeadLetter(ctx, key)
	if err != nil {
		return err
	}
	if d.Err != nil {
		return fmt.Errorf("recovery: requeue dead letter %q: %w", key, d.Err)
	}
	if isStored(d.Record) {
		if d.Payload, err = getPayload(ctx, i.store, i.codec, key); err != nil {
			return fmt.Errorf("recovery: requeue dead letter %q: %w", key, err)
		}
	}
	perr := guard(func() { err = i.giveBack(ctx, d, enq) })
	if err = errors.Join(err, perr); err != nil {
		return fmt.Errorf("recovery: requeue dead letter %q: %w", key, err)
	}
	// The count first: were the letter gone and the count not, the job would be back here after its next crash.
	if err := i.rdb.Del(ctx, i.keys.crashes(d.ID)).Err(); err != nil {
		return fmt.Errorf("recovery: requeue dead letter %q: enqueued, but its crashes could not be forgotten: %w", key, err)
	}
	return i.remove(ctx, d)
}

// giveBack offers the letter's job. What came from a list goes into the list that is named here as the element that it was, or with its checkpoint.
func (i *Inspector) giveBack(ctx context.Context, d *DeadLetter, enq Enqueuer) error {
	q, ok := enq.(*ListQueue)
	if !ok || !isElement(d.Record) {
		if ok {
			q.rdb.CompareAndSwap(nil, &i.rdb)
		}
		return enq.Enqueue(ctx, d.Orphan)
	}
	e, err := parseElement(d.Record)
	if err = errors.Join(err, q.announce(ctx, i.rdb)); err != nil {
		return err
	}
	p := parcel{list: q.key, push: q.pushTo(q.side), element: e.bytes}
	if o := d.Orphan; o.Checkpoint != nil { // the format may have a place for it
		id, queue := o.ID, o.Queue
		if o.Job, err = q.format.Decode(slices.Clone(e.bytes)); err != nil {
			return err
		}
		o.ID, o.Queue, o.Job.Checkpoint = id, queue, o.Checkpoint
		if p.element, err = q.encode(o); err != nil {
			return err
		}
	}
	return pushEach(ctx, i.rdb, []parcel{p}, make([]error, 1))[0]
}

// Discard removes a dead letter for good, and its payload where that lies outside of Redis. ErrNoLetter if there is none.
func (i *Inspector) Discard(ctx context.Context, key string) error {
	d, err := i.DeadLetter(ctx, key)
	if err != nil {
		return err
	}
	return i.remove(ctx, d)
}

func (i *Inspector) remove(ctx context.Context, d *DeadLetter) error {
	if err := i.forgetClaim(ctx, d); err != nil {
		return fmt.Errorf("recovery: remove dead letter %q: %w", d.Key, err)
	}
	if err := exhumeScript.Run(ctx, i.rdb, []string{i.keys.deadIndex(), i.keys.deadJobs()}, d.Key).Err(); err != nil {
		return fmt.Errorf("recovery: remove dead letter %q: %w", d.Key, err)
	}
	if i.store != nil && isStored(d.Record) {
		if err := i.store.Delete(ctx, d.Key); err != nil {
			return fmt.Errorf("recovery: remove payload of dead letter %q: %w", d.Key, err)
		}
	}
	return nil
}

// forgetClaim removes what a sweeper that died right after it wrote the letter left in its claims: the letter would come back from there.
func (i *Inspector) forgetClaim(ctx context.Context, d *DeadLetter) error {
	k := i.keys.worker(d.Worker)
	member := strings.TrimPrefix(d.Key, d.Worker+"/")
	err := i.rdb.ZScore(ctx, k.claims, member).Err()
	if errors.Is(err, redis.Nil) {
		return nil
	}
	if err != nil {
		return err
	}
	return forgetScript.Run(ctx, i.rdb, []string{k.jobs, k.claims, k.handed}, ms(defaultInflightTTL), member).Err()
}
