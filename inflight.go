package recovery

import (
	"strconv"
	"sync"
	"sync/atomic"
)

// incarnation is one life of a worker in Redis, and the leases of that life.
//
// It owns W:inflight and W:jobs, and keeps this invariant for as long as the session is live: a lease whose Track has returned
// and whose Done was not called is in both. A worker that was fenced, or whose data Redis lost, goes on as a new
// incarnation with a new id; an id is never used again, so no late write of an old life can touch a new one.
type incarnation struct {
	// Fixed after newIncarnation.
	id       string
	keys     workerKeys
	replaced chan struct{} // closed when the next incarnation is there
	ended    chan struct{} // closed when no lease can become active any more
	*committer

	fetches   fetches
	abandoned atomic.Bool // given up by this worker itself: it must not beat again
	away      atomic.Bool // out of touch for so long that Redis may have forgotten what became of its leases

	mu     sync.Mutex // guards what follows; no call to Redis is made under it
	leases map[string]*Lease
	lastID uint64
	over   error // why no lease can become active any more: ErrLost (fenced) or a notLiveError (Redis lost the session)
	tally  tally
}

// tally bounds how many leases Redis must have of this incarnation, without stopping anybody. They only grow, except that sent is corrected
// when a Fetch that might have taken many has taken few.
type tally struct {
	sent, acked         int64 // leases of Track and Fetch: perhaps in Redis, certainly in Redis
	doneSent, doneAcked int64 // leases that leave the index
}

// plausible reports whether count, read between the two moments at which a and b were taken, fits what was under way.
func plausible(a, b tally, count int64) bool {
	return count >= a.acked-b.doneSent && count <= b.sent-a.doneAcked
}

func newIncarnation(r *Recoverer, id string) *incarnation {
	inc := &incarnation{
		id: id, keys: r.keys.worker(id),
		replaced: make(chan struct{}),
		ended:    make(chan struct{}),
		fetches:  fetches{turn: make(chan struct{}, 1)},
		leases:   make(map[string]*Lease),
	}
	inc.committer = newCommitter(r, inc)
	return inc
}

// admit gives a new lease its name here and enters it, so that an audit knows it before Redis does.
func (i *incarnation) admit(l *Lease) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.lastID++
	l.home = i
	l.name = strconv.FormatUint(i.lastID, 10)
	l.born = i.id
	l.call(l.name)
	i.leases[l.member] = l
}

// adopt enters a running lease of an earlier incarnation under its old name. It reports false if the lease ended meanwhile.
func (i *incarnation) adopt(l *Lease) bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.state != leaseActive {
		return false
	}
	l.home, l.again, l.lane, l.fetch = i, nil, nil, 0
	l.call(l.ID())
	i.leases[l.member] = l
	i.tally.sent++
	i.tally.acked++
	return true
}

// confirm turns leases that Redis has recorded into active ones, or says why they can't be: the incarnation ended while the
// answer was on its way, and whoever ended it could not yet see them.
func (i *incarnation) confirm(leases []*Lease, start int64) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.tally.acked += int64(len(leases))
	if i.over != nil {
		return i.over
	}
	for _, l := range leases {
		l.activate(start)
	}
	return nil
}

// reactivate gives a lease back to its holder, who could not release it. It reports false if the incarnation has ended.
func (i *incarnation) reactivate(l *Lease) bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.over != nil {
		return false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.state, l.taken, l.handed = leaseActive, false, false
	return true
}

// close ends the incarnation for new leases and returns those that it has. It may be called again.
func (i *incarnation) close(why error) []*Lease {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.over == nil {
		i.over = why
		close(i.ended)
	}
	return i.list((*Lease).isHeld)
}

// closed reports whether new leases are refused.
func (i *incarnation) closed() bool {
	select {
	case <-i.ended:
		return true
	default:
		return false
	}
}

// active returns the leases whose jobs run and for which nothing is under way.
func (i *incarnation) active() []*Lease {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.list((*Lease).isSettled)
}

func (i *incarnation) list(want func(*Lease) bool) []*Lease {
	found := make([]*Lease, 0, len(i.leases))
	for _, l := range i.leases {
		if want(l) {
			found = append(found, l)
		}
	}
	return found
}

// quiet reports that no lease is left and nothing is under way: nobody can ask for proof of anything any more.
func (i *incarnation) quiet() bool {
	i.mu.Lock()
	empty := len(i.leases) == 0
	i.mu.Unlock()
	return empty && i.idle()
}

func (i *incarnation) knows(member string) bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	_, ok := i.leases[member]
	return ok
}

func (i *incarnation) drop(members ...string) {
	i.mu.Lock()
	defer i.mu.Unlock()
	for _, m := range members {
		delete(i.leases, m)
	}
}

// onTheWay counts leases that are being written.
func (i *incarnation) onTheWay(sent, doneSent int64) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.tally.sent += sent
	i.tally.doneSent += doneSent
}

func (i *incarnation) count(f func(t *tally)) tally {
	i.mu.Lock()
	defer i.mu.Unlock()
	if f != nil {
		f(&i.tally)
	}
	return i.tally
}
