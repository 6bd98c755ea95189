package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"github.com/crashsafe/recovery"
	"github.com/redis/go-redis/v9"
)

// recovered is what it cost to hand back the jobs of a dead worker.
type recovered struct {
	rate          float64       // orphans a second
	client, redis time.Duration // CPU, an orphan
	command       time.Duration // the longest that Redis was at one command
	stall         time.Duration // the longest that another client had to wait meanwhile
	wire          float64       // bytes, an orphan
}

// pusher is a BatchEnqueuer as one would write it for a list.
type pusher struct {
	rdb *redis.Client
	n   atomic.Int64
}

func (p *pusher) Enqueue(ctx context.Context, o recovery.Orphan) error {
	p.n.Add(1)
	return p.rdb.RPush(ctx, "queue", o.Payload).Err()
}

func (p *pusher) EnqueueAll(ctx context.Context, os []recovery.Orphan) []error {
	values := make([]any, len(os))
	for i := range os {
		values[i] = os[i].Payload
	}
	p.n.Add(int64(len(os)))
	if err := p.rdb.RPush(ctx, "queue", values...).Err(); err != nil {
		errs := make([]error, len(os))
		for i := range errs {
			errs[i] = err
		}
		return errs
	}
	return nil
}

// orphans lets a worker die with n jobs, and measures the pass that hands them back. list: through a ListQueue; fetched: they were fetched, too;
// watched: by another client, whose commands cost something as well.
func (e env) orphans(n int, list, fetched, watched bool) (res recovered, err error) {
	if err := e.srv.admin.FlushAll(bg).Err(); err != nil {
		return res, err
	}
	rdb := e.srv.client()
	defer rdb.Close()
	queue := recovery.NewListQueue("queue")
	push := &pusher{rdb: rdb}
	var enq recovery.Enqueuer = push
	if list {
		enq = queue
	}
	// The dead one must not wake up, nor the other one sweep, before they are told to.
	cfg := recovery.Config{Logger: quiet, HeartbeatInterval: time.Hour, SweepInterval: 24 * time.Hour}
	dead, err := recovery.New(rdb, enq, cfg)
	if err == nil {
		err = dead.Start(bg)
	}
	if err != nil {
		return res, err
	}
	if _, err := e.fill(dead, rdb, queue, n, fetched); err != nil {
		return res, err
	}
	keys := "recovery:1:default:{" + dead.WorkerID() + "}:"
	if err := errors.Join(rdb.HSet(bg, keys+"session", "state", "fenced").Err(), rdb.Del(bg, keys+"beat").Err()); err != nil {
		return res, err
	}
	sweeper, err := recovery.New(rdb, enq, cfg)
	if err != nil {
		return res, err
	}
	stalled := make(chan time.Duration, 1)
	stop := make(chan struct{})
	if watched {
		go func() { stalled <- e.ping(stop) }()
	} else {
		stalled <- 0
	}
	before, err := snap(e.srv)
	if err == nil {
		err = e.srv.admin.Do(bg, "SLOWLOG", "RESET").Err()
	}
	if err != nil {
		return res, err
	}
	report, err := sweeper.Sweep(bg)
	if err != nil {
		return res, err
	}
	after, err := snap(e.srv)
	close(stop)
	res.stall = <-stalled
	if err != nil {
		return res, err
	}
	slow, err := e.srv.admin.SlowLogGet(bg, -1).Result()
	if err != nil {
		return res, err
	}
	for _, command := range slow {
		res.command = max(res.command, command.Duration)
	}
	if report.HandedBack != n || rdb.LLen(bg, "queue").Val() != int64(n) {
		return res, fmt.Errorf("%d handed back, %d in the queue, not %d", report.HandedBack, rdb.LLen(bg, "queue").Val(), n)
	}
	// The dead one has an hour until its next beat; it must not outlive this.
	halt, cancel := context.WithCancel(bg)
	cancel()
	_ = dead.Stop(halt)
	s := after.minus(before)
	res.rate, res.wire = float64(n)/s.wall.Seconds(), float64(s.wire)/float64(n)
	res.client, res.redis = s.cpu/time.Duration(n), s.redis/time.Duration(n)
	return res, nil
}

// fill gives a worker n jobs.
func (e env) fill(r *recovery.Recoverer, rdb *redis.Client, q *recovery.ListQueue, n int, fetched bool) (all []*recovery.Lease, err error) {
	for done := 0; done < n; {
		page := min(1000, n-done)
		if !fetched {
			jobs := make([]recovery.Job, page)
			for i := range jobs {
				jobs[i] = recovery.Job{ID: fmt.Sprint("job-", done+i), Payload: e.payload}
			}
			leases, err := r.TrackAll(bg, jobs...)
			if err != nil {
				return nil, err
			}
			all = append(all, leases...)
			done += page
			continue
		}
		values := make([]any, page)
		for i := range values {
			values[i] = fmt.Sprintf("%08d%s", done+i, e.payload[8:])
		}
		if err := rdb.LPush(bg, q.Key(), values...).Err(); err != nil {
			return nil, err
		}
		for got := 0; got < page; {
			leases, err := r.Fetch(bg, q, page-got)
			if err != nil {
				return nil, err
			}
			all = append(all, leases...)
			got += len(leases)
		}
		done += page
	}
	return all, nil
}

// ping asks again and again, and answers the longest wait.
func (e env) ping(stop <-chan struct{}) (longest time.Duration) {
	rdb := e.srv.client()
	defer rdb.Close()
	_ = rdb.Ping(bg).Err()
	for {
		select {
		case <-stop:
			return longest
		default:
		}
		began := time.Now()
		_ = rdb.Ping(bg).Err()
		longest = max(longest, time.Since(began))
		time.Sleep(100 * time.Microsecond)
	}
}

// pass is one look at a fleet.
type pass struct {
	wall, redis time.Duration
	commands    int64
}

// livePass measures a sweep over n workers that are all alive.
func (e env) livePass(n int) (p pass, err error) {
	if err := e.srv.admin.FlushAll(bg).Err(); err != nil {
		return p, err
	}
	rdb := e.srv.client()
	defer rdb.Close()
	for from := 0; from < n; from += 1000 {
		_, err := rdb.Pipelined(bg, func(pipe redis.Pipeliner) error {
			for i := from; i < min(from+1000, n); i++ {
				id := fmt.Sprintf("worker-%05d-abcdefghijklmnop", i)
				pipe.SAdd(bg, "recovery:1:default:workers", id)
				pipe.HSet(bg, "recovery:1:default:{"+id+"}:session", "state", "live", "info", "{}")
				pipe.Set(bg, "recovery:1:default:{"+id+"}:beat", "running", time.Hour)
			}
			return nil
		})
		if err != nil {
			return p, err
		}
	}
	r, err := recovery.New(rdb, recovery.EnqueuerFunc(func(context.Context, recovery.Orphan) error { return nil }), recovery.Config{Logger: quiet})
	if err != nil {
		return p, err
	}
	if _, err := r.Sweep(bg); err != nil { // connections, scripts
		return p, err
	}
	before, err := snap(e.srv)
	if err != nil {
		return p, err
	}
	report, err := r.Sweep(bg)
	if err != nil {
		return p, err
	}
	after, err := snap(e.srv)
	if err == nil && report.Alive != n {
		err = fmt.Errorf("%d of %d workers are alive", report.Alive, n)
	}
	s := after.minus(before)
	return pass{wall: s.wall, redis: s.redis}, err
}

// beats measures one heartbeat of a worker with n jobs in flight, and one SET PX, in Redis CPU by its own count of commands.
func (e env) beats(n int) (beat, setPX time.Duration, err error) {
	if err := e.srv.admin.FlushAll(bg).Err(); err != nil {
		return 0, 0, err
	}
	rdb := e.srv.client()
	defer rdb.Close()
	cfg := recovery.Config{Logger: quiet, HeartbeatInterval: 10 * time.Millisecond, OrphanThreshold: time.Hour, InflightTTL: 100 * time.Hour, SweepInterval: 24 * time.Hour, GCLockTTL: 24 * time.Hour}
	r, err := recovery.New(rdb, recovery.EnqueuerFunc(func(context.Context, recovery.Orphan) error { return nil }), cfg)
	if err == nil {
		err = r.Start(bg)
	}
	var leases []*recovery.Lease
	if err == nil {
		leases, err = e.fill(r, rdb, nil, n, false)
	}
	if err != nil {
		return 0, 0, err
	}
	time.Sleep(500 * time.Millisecond)
	if err := e.srv.admin.ConfigResetStat(bg).Err(); err != nil {
		return 0, 0, err
	}
	began := r.Stats().Beats
	time.Sleep(2 * time.Second)
	beats := r.Stats().Beats - began
	text, err := e.srv.admin.Info(bg, "commandstats").Result()
	if err != nil {
		return 0, 0, err
	}
	all := 0.0
	for _, name := range []string{"evalsha", "set", "hmget", "zcard", "hlen", "sadd", "pexpire"} {
		all += usec(text, name)
	}
	beat = time.Duration(all * float64(time.Microsecond) / float64(beats))
	if err := errors.Join(finish(leases), r.Stop(bg)); err != nil {
		return 0, 0, err
	}
	if err := e.srv.admin.ConfigResetStat(bg).Err(); err != nil {
		return 0, 0, err
	}
	const sets = 200
	for range sets {
		if err := rdb.Set(bg, "recovery:1:default:{host:12345-abcdefghijklmnop}:beat", "running", time.Minute).Err(); err != nil {
			return 0, 0, err
		}
		time.Sleep(9 * time.Millisecond) // as often as the beats
	}
	text, err = e.srv.admin.Info(bg, "commandstats").Result()
	return beat, time.Duration(usec(text, "set") * float64(time.Microsecond) / sets), err
}

// usec is the time that a command took in all.
func usec(commandstats, name string) float64 {
	_, value, _ := strings.Cut(field(commandstats, "cmdstat_"+name), "usec=")
	value, _, _ = strings.Cut(value, ",")
	var v float64
	_, _ = fmt.Sscan(value, &v)
	return v
}

// memory measures what a job in flight takes beyond its payload.
func (e env) memory(n int) (float64, error) {
	if err := e.srv.admin.FlushAll(bg).Err(); err != nil {
		return 0, err
	}
	rdb := e.srv.client()
	defer rdb.Close()
	r, err := recovery.New(rdb, recovery.EnqueuerFunc(func(context.Context, recovery.Orphan) error { return nil }), recovery.Config{Logger: quiet, HeartbeatInterval: time.Hour})
	if err == nil {
		err = r.Start(bg)
	}
	var first, leases []*recovery.Lease
	if err == nil {
		first, err = e.fill(r, rdb, nil, 1000, false) // connections' buffers
	}
	if err != nil {
		return 0, err
	}
	before, err := e.srv.memory()
	if err == nil {
		leases, err = e.fill(r, rdb, nil, n, false)
	}
	if err != nil {
		return 0, err
	}
	after, err := e.srv.memory()
	err = errors.Join(err, finish(append(first, leases...)), r.Stop(bg))
	return float64(after-before)/float64(n) - float64(len(e.payload)), err
}
