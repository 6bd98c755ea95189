// Package recovery brings back the jobs of worker processes that died.
//
// It does not promise that a job runs once. A worker that is slow, paused or cut off looks like a dead one, so its jobs may
// run again elsewhere while it is still busy with them. It is told as soon as it can be told, but nothing outside of Redis
// is undone: make jobs idempotent, or refuse stale writes with the number of [Lease.Fence]. Nor does it keep jobs that
// Redis loses together with the worker, and it knows no order. It is not a queue: jobs come from, and go back to, whatever
// the caller uses.
//
// # Overview
//
// A worker process has one [Recoverer]. It records each job in Redis before it begins and removes the record when it ends:
//
//	r, err := recovery.New(rdb, enqueuer, recovery.Config{Namespace: "mail"})
//	err = r.Start(ctx)
//	err = r.Do(ctx, recovery.Job{ID: id, Payload: payload}, func(ctx context.Context) error { … })
//	err = r.Stop(ctx)
//
// While it runs, the Recoverer sends heartbeats. All workers with the same Config.Namespace are a fleet, and watch each
// other. When one falls silent, a peer declares it dead, takes its records, and offers each job to the [Enqueuer]: code of
// the caller that puts the job back where jobs come from. A record is dropped only after the Enqueuer said yes.
//
// [Recoverer.Track] returns a [Lease], which is the proof that this process runs the job. A lease ends with [Lease.Done],
// whether the job went well or badly: what failed is the caller's to retry. [Recoverer.Do] is Track, a call, and Done; it
// does not show the lease.
//
// The gap between taking a job from its queue and Track is the caller's. Acknowledge a job to its source after Done, or
// move it aside in one step until Track has returned. For Redis lists there is no gap.
//
// # Redis lists
//
// [NewListQueue] makes a plain list the place that jobs come from and go back to. As the Enqueuer it hands back exactly once:
// one script pushes the job and forgets the lease. [Recoverer.Fetch] pops and tracks in one script, and waits without
// polling; [InOrder] is for several lists. [Recoverer.Work] is the whole loop:
//
//	queue := recovery.NewListQueue("jobs")
//	r, err := recovery.New(rdb, queue, recovery.Config{Namespace: "mail"})
//	err = r.Start(ctx)
//	go r.Work(ctx, queue, 16, func(ctx context.Context, l *recovery.Lease) error { … })
//	<-ctx.Done()          // SIGTERM
//	err = r.Stop(limited) // what has not ended by limited's deadline goes back to the list
//
// On a Cluster that needs a list whose key has Config.HashTag as its tag. [Sidekiq] and [ElementFormat] are for elements that
// are more than a payload.
//
// # Liveness
//
// A worker is dead when Redis has not heard from it for Config.OrphanThreshold, by Redis' clock. Half of that is the TTL of
// its beat. When a sweep finds the beat missing, it notes a suspicion and takes nothing; when the suspicion is as old as
// the other half and there is still no beat, the worker is fenced. So after an outage in which all beats expired, every
// live worker has time to beat again, and nobody is declared dead by mistake.
//
//	from last beat to Enqueue  <=  OrphanThreshold + SweepInterval      by default 20s + 5s
//
// and the time of the pass itself. OrphanThreshold is the usual case. SweepInterval is added when the worker that sweeps
// dies too; its successors come up to an eighth of SweepInterval apart, and after Config.GCLockTTL, if that is longer.
//
// An incarnation is one life of a worker in Redis: its name and random text, never used again. Fencing is final for an
// incarnation. A worker that was fenced and turns out to live loses its leases and goes on as a new incarnation, by itself.
//
// All workers of a fleet should have the same OrphanThreshold: a beat's TTL is set by the worker, the confirmation by
// whoever sweeps.
//
// # Guarantees
//
//   - Once Track has returned nil, the job ends in one of: Done; accepted by the Enqueuer; the dead letters. A worker that
//     is killed, paused or cut off at any moment does not change that, nor a sweeper that dies, nor an Enqueuer that fails,
//     panics or hangs.
//   - If a job was handed back, its former holder is told: the context of its lease is cancelled with [ErrLost], and Done
//     returns ErrLost, never nil. Once the context was cancelled with ErrLost, Done leaves the record to the peers.
//   - A job that is handed back again because a sweeper died half-way has the same Orphan.Key.
//   - A job that keeps killing its workers goes to the dead letters, after Config.MaxRecoveries within
//     Config.RecoveryWindow. A crash counts once, however often its hand-back is repeated.
//   - A checkpoint that was confirmed comes back with the job, unless a later one took its place.
//   - A heartbeat costs the same with one job in flight and with a hundred thousand, and the whole fleet makes one sweep
//     per SweepInterval. Neither uses SCAN over the keyspace.
//   - A record that can't be read, a job that the Enqueuer refuses, or a hand-back that takes long does not keep other jobs
//     from being recovered. A sweep waits for hand-backs for SweepInterval at most; they go on behind it.
//
// # Non-guarantees
//
//   - Exactly-once execution. The Enqueuer is called at least once per orphan; a job may run while its former holder still
//     does.
//   - Anything about side effects outside of Redis. Lease.Fence and [Lease.Confirm] are there to build that with.
//   - Survival of Redis. If Redis loses its data, live workers record their running jobs again within one heartbeat, and
//     hand back from memory what they had given up. The jobs of workers that were dead by then, jobs that a sweeper had
//     claimed, and dead letters are gone. A failover may lose the last writes, see Config.WaitReplicas.
//   - Recovery while no worker runs. The next one that starts does it, if that is within Config.InflightTTL.
//   - Order, priorities, schedules, retries of jobs that failed, and results.
//   - A [Lease.Fence] that grows in any case. It is the microsecond of Track by Redis' clock, and grows with every write of
//     an incarnation; jobs that were tracked or fetched together share one. From one worker to the next it is as good as the clock: one that goes back, or those of two Cluster
//     nodes, can make a later run's number smaller.
//   - Dead letters for ever: beyond Config.MaxDead the oldest are dropped, and announced by Events.Dropped.
//   - The end of a func that ignores its context. A job that timed out, or was lost, may run twice for a while.
//
// # Rules for jobs
//
// [Lease.Checkpoint] notes how far a run got. The last one comes back in Orphan.Checkpoint, and in Orphan.Job: tracking that
// Job again hands it on, until the new run makes one of its own. An Enqueuer that rebuilds jobs has to carry it along.
//
// Config.JobTimeout and Job.Timeout make the worker itself give up a job that runs for too long, with Reason [TimedOut];
// [NoTimeout] exempts a job. A panic in Do does the same, with [Panicked]. Both count as crashes. [Lease.Release] gives a
// job back on purpose, with [Released], which does not; if the Enqueuer refuses, the lease is as it was.
//
// Config.Backoff, such as [Exponential], puts a recovery off. Released jobs do not wait.
//
// Config.Codec seals headers, payloads and checkpoints: [AESGCM]. IDs, queues and error texts stay readable. A worker buries
// what it can't open, so all of a fleet need the same keys. Config.PayloadStore keeps large payloads outside of Redis, see
// [DirStore]; Config.MaxPayload limits those, too.
//
// # Dead letters
//
// A job goes there instead of to the Enqueuer after too many recoveries, after a [Permanent] error, and if its record,
// checkpoint or payload can't be read. [Inspector.DeadLetters] finds them, with the last error and the history of crashes.
// [Inspector.Requeue] gives one to an Enqueuer, forgets its crashes and removes it; [Inspector.Discard] only removes it.
//
// # Redis keys
//
// All keys begin with recovery:1:<namespace>: and those of one incarnation W lie in one slot of a Cluster.
//
//	workers                    the registry: incarnations that may hold jobs
//	gc                         the sweep lock; it saves work, and nothing rests on it
//	queues                     lists from which somebody fetches
//	{list}:arrived:list:list   an element that was moved to wake a worker; part of the queue
//	{W}:session                live or fenced; last batch of each lane, start and claim; host, pid, …
//	{W}:beat, {W}:suspect      the heartbeat; when a sweep first missed it
//	{W}:inflight, {W}:jobs     leases with their start; their records and checkpoints
//	{W}:claims, {W}:handed     leases on their way back; leases that were handed back
//	{W}:damaged                a key of W that had a wrong type, put aside
//	crashes:{job}              the crashes of a job, with their time
//	{dead}:index, {dead}:jobs  the dead letters
//
// With Config.HashTag all of them share that tag and one slot. docs/redis-keys.md has types, TTLs and commands for people.
// Redis must not evict: set maxmemory-policy to noeviction.
//
// # Shutdown
//
// [Recoverer.Stop] refuses new jobs, waits for the running ones until its context ends, cancels what is left with ErrLost,
// fences its own session and hands those jobs back itself, with Reason [Released]. The heart beats until the end. What it
// has no time for, peers take at once: a worker that fenced itself needs no threshold. Stop may take 5 seconds longer than
// its context to do this.
//
// Do not run jobs under the context that SIGTERM ends. A func that returns early because of it makes Do call Done, and the
// job is neither finished nor handed back. Give jobs a context of their own, and let Stop cancel what takes too long.
//
// [Recoverer.Run] does Start, waiting and Stop for a main func. A process that dies without Stop is what this package is
// for; it costs OrphanThreshold.
//
// # Failures
//
// Redis can't be reached. Track fails, and the caller still has the job. Done returns an error other than ErrLost; it is
// kept, and repeated with every heartbeat. Running jobs go on, because nobody can take them while Redis is away. With
// Config.SelfFence they are cancelled instead when this worker can't be sure any more, before a peer could take them.
// [Recoverer.Check] fails from that moment on, with or without it.
//
// Redis answered, but the answer was lost. Every write may be repeated, and is known as a copy when it is. A Track of
// unknown outcome is an error, and its record is removed as soon as Redis can be reached; if the process dies first, the
// job is handed back although Track had failed.
//
// Redis lost its data. Live workers notice with their next heartbeat, fence what may be left of their session, ask where
// their leases are, and join again. Leases that Redis does not know are recorded again and go on. If only the session was
// lost, those that it has are lost, as if the worker had been declared dead. A registry that a failover lost heals with the
// next beats; [Inspector.Doctor] finds dead workers that are missing in it.
//
// Redis is out of memory. Track, Checkpoint, Start and new dead letters fail with OOM. Done, beats, sweeps, Release and
// Fetch go on: their scripts begin with a harmless write, after which Redis lets a script finish.
//
// The worker was declared dead. Its leases are lost: contexts are cancelled, Done returns ErrLost. Do not acknowledge these
// jobs to their source.
//
// The Enqueuer fails. The job is kept and offered again, from SweepInterval up to 5 minutes later. A call that takes longer
// than Config.EnqueueTimeout counts as failed, although it may still succeed: return when the context ends, and dedupe by
// Orphan.Key, never by job ID. The message that the job came from may still be unacknowledged under that ID, and the job
// would be swallowed.
//
// All of this is logged, counted by [Recoverer.Stats], and told to [Events].
package recovery
