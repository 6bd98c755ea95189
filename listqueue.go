package recovery

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/redis/go-redis/v9"
)

// ListQueue is a plain Redis list as the place that jobs come from and go back to. It is an Enqueuer for New, and a Source for Fetch and
// Work.
//
// As the Enqueuer of a Recoverer it hands back exactly once: one script pushes the job and forgets the lease. That needs both in one
// slot: always so on a single node or behind Sentinel; on a Cluster with Config.HashTag as the tag of the list's key ("{mail}:jobs"). Else it
// pushes and then forgets, at least once, and Start says so.
//
// Producers need to know nothing of this library: they LPUSH. Everything else that pops from the list may go on doing so.
type ListQueue struct {
	// Fixed after NewListQueue.
	key    string
	side   string // the consumers' end
	last   bool   // recovered jobs go to the producers' end
	format ListFormat
	index  string // Sidekiq's set of queues, or ""
	name   string // of this queue in index
	err    error  // of an option

	rdb atomic.Pointer[redis.UniversalClient] // for Enqueue; set by ListClient, or by the first Recoverer that has the queue
}

// ListFormat says how a job is written as an element of a list. Both methods must be safe for concurrent use.
type ListFormat interface {
	// Decode reads an element that Fetch found. A Job without an ID gets one made of the element's bytes, one without a Queue the list's key. On
	// an error the element goes to the dead letters, as it is. A job that was fetched is handed back as the element it was, byte for byte,
	// without a call of Encode, unless it made a checkpoint.
	Decode(element []byte) (Job, error)
	// Encode writes a job that was tracked by other means than Fetch, or that has a checkpoint. A format with a place for o.Checkpoint writes it
	// there, and has Decode return it as Job.Checkpoint; the payload alone, and Sidekiq's JSON, have none, and there it is lost.
	Encode(o Orphan) ([]byte, error)
}

// ListOption is an option of NewListQueue.
type ListOption func(*ListQueue)

// ElementFormat is for lists whose elements are not simply the payload.
func ElementFormat(f ListFormat) ListOption { return func(q *ListQueue) { q.format = f } }

// ConsumeLeft is for lists that producers RPUSH to and consumers take from the left, by BLPOP. Without it they LPUSH and BRPOP.
func ConsumeLeft() ListOption { return func(q *ListQueue) { q.side = left } }

// RecoveredLast puts recovered jobs behind all that wait. Without it they are the next to be run: they have waited before.
func RecoveredLast() ListOption { return func(q *ListQueue) { q.last = true } }

// ListClient is what Enqueue uses. It is needed only where a ListQueue is not itself given to New, but wrapped in an Enqueuer of yours.
func ListClient(rdb redis.UniversalClient) ListOption {
	return func(q *ListQueue) { q.rdb.Store(&rdb) }
}

// NewListQueue returns the queue in the list key. It does not talk to Redis. Without options an element is the payload itself, as any program
// with LPUSH and BRPOP writes and reads it.
func NewListQueue(key string, opts ...ListOption) *ListQueue {
	q := &ListQueue{key: key, side: right, format: payloadFormat{}}
	for _, o := range opts {
		o(q)
	}
	return q
}

// Key returns the list's key.
func (q *ListQueue) Key() string { return q.key }

// payloadFormat is the default: the element is the payload.
type payloadFormat struct{}

func (payloadFormat) Decode(element []byte) (Job, error) { return Job{Payload: element}, nil }
func (payloadFormat) Encode(o Orphan) ([]byte, error)    { return o.Payload, nil }

func (q *ListQueue) isPlain() bool {
	_, plain := q.format.(payloadFormat)
	return plain
}

// Source is what Fetch and Work take jobs from: a ListQueue, or several InOrder.
type Source interface{ lists() []*ListQueue }

func (q *ListQueue) lists() []*ListQueue {
	if q == nil {
		return nil
	}
	return []*ListQueue{q}
}

type inOrder []*ListQueue

func (s inOrder) lists() []*ListQueue { return s }

// InOrder is a Source of several queues, in strict order: nothing is taken from one as long as there is something in those before it.
func InOrder(queues ...*ListQueue) Source {
	var s inOrder
	for _, q := range queues {
		if q != nil && !slices.ContainsFunc(s, func(o *ListQueue) bool { return o.key == q.key }) {
			s = append(s, q)
		}
	}
	return s
}

// Enqueue pushes one job. A Recoverer that has q as its Enqueuer does not call it: it pushes and forgets in one step.
func (q *ListQueue) Enqueue(ctx context.Context, o Orphan) error {
	return q.EnqueueAll(ctx, []Orphan{o})[0]
}

// EnqueueAll pushes several jobs in one pipeline.
func (q *ListQueue) EnqueueAll(ctx context.Context, os []Orphan) []error {
	errs := make([]error, len(os))
	parcels := make([]parcel, len(os))
	for i := range os {
		parcels[i] = parcel{list: q.key, push: q.pushTo(q.side)}
		parcels[i].element, errs[i] = q.encode(os[i])
	}
	rdb := q.rdb.Load()
	if rdb == nil {
		err := fmt.Errorf("recovery: ListQueue %q has no client: give it to New, or use ListClient", q.key)
		for i := range errs {
			errs[i] = errors.Join(errs[i], err)
		}
		return errs
	}
	if err := q.announce(ctx, *rdb); err != nil {
		for i := range errs {
			errs[i] = errors.Join(errs[i], err)
		}
		return errs
	}
	return pushEach(ctx, *rdb, parcels, errs)
}

func (q *ListQueue) encode(o Orphan) (element []byte, err error) {
	perr := guard(func() { element, err = q.format.Encode(o) })
	if err = errors.Join(err, perr); err != nil {
		return nil, fmt.Errorf("encode job %q for list %q: %w", o.ID, q.key, err)
	}
	return element, nil
}

// pushTo is the command that puts a recovered job into its place in a list that is consumed from side.
func (q *ListQueue) pushTo(side string) string {
	if (side == right) != q.last {
		return "RPUSH"
	}
	return "LPUSH"
}

// announce enters the queue where Sidekiq looks for queues. It may be done again and again.
func (q *ListQueue) announce(ctx context.Context, rdb redis.Cmdable) error {
	if q.index == "" {
		return nil
	}
	if err := rdb.SAdd(ctx, q.index, q.name).Err(); err != nil {
		return fmt.Errorf("enter queue %q into %q: %w", q.name, q.index, err)
	}
	return nil
}

// like reports that o is the same list, used in the same way.
func (q *ListQueue) like(o *ListQueue) bool {
	return q == o || q.side == o.side && reflect.TypeOf(q.format) == reflect.TypeOf(o.format)
}

// problem says why q can't be used, or nil.
func (q *ListQueue) problem() error {
	switch {
	case q.err != nil:
		return q.err
	case q.key == "":
		return errors.New("ListQueue: key is empty")
	case strings.HasPrefix(q.key, schema):
		return fmt.Errorf("ListQueue: key %q begins with %q, which is reserved", q.key, schema)
	case isNil(q.format):
		return fmt.Errorf("ListQueue %q: ElementFormat is nil", q.key)
	}
	return nil
}

// pushEach pushes the parcels whose errs are nil, and fills in the others' errors.
func pushEach(ctx context.Context, rdb redis.Cmdable, parcels []parcel, errs []error) []error {
	cmds := make([]*redis.Cmd, len(parcels))
	_, _ = rdb.Pipelined(ctx, func(p redis.Pipeliner) error {
		for i := len(parcels) - 1; i >= 0; i-- { // the first shall be the last one pushed
			if errs[i] == nil {
				cmds[i] = p.Do(ctx, parcels[i].push, parcels[i].list, parcels[i].element)
			}
		}
		return nil
	}) // each command has its own error
	for i, cmd := range cmds {
		if cmd != nil && cmd.Err() != nil {
			errs[i] = fmt.Errorf("push to list %q: %w", parcels[i].list, cmd.Err())
		}
	}
	return errs
}
