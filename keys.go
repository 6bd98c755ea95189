package recovery

import "strings"

// schema is the version in every key. Records have a version of their own.
const schema = "recovery:1:"

// keyspace spells every key that we use; no other file does. docs/redis-keys.md is the same for people.
//
//	key           type        written by           expires            deleted by
//	workers       SET         join, every beat     never              retire (entry by entry)
//	workers-damaged any       a beat               never              nobody: it is evidence
//	gc            STRING      whoever sweeps       GCLockTTL          Stop of the holder
//	queues        ZSET        Fetch, every beat    never              a sweep, when nobody has waited for InflightTTL
//	arrived:list  LIST        a waiting Fetch      never              empties itself
//	W:session     HASH        join, commit, claim  InflightTTL        nobody: it must outlive a zombie
//	W:beat        STRING      join, beat           OrphanThreshold/2  leave
//	W:suspect     STRING      claim                a few looks        beat, leave
//	W:inflight    ZSET        commit               InflightTTL        empties itself
//	W:jobs        HASH        commit               InflightTTL        empties itself
//	W:claims      ZSET        claim, take          InflightTTL        empties itself
//	W:handed      SET         forget               InflightTTL        Stop, if nobody can ask any more
//	W:damaged     any         claim                InflightTTL        nobody: it is evidence
//	crashes:job   STRING      count                RecoveryWindow     a person who requeues the job
//	dead:index    ZSET        bury                 never              a person, or MaxDead
//	dead:jobs     HASH        bury                 never              as dead:index
//
// All keys of one incarnation W lie in one slot: scripts decide about them in one step.
type keyspace struct {
	prefix string
	tag    string // Config.HashTag, or "" for a slot of its own for each worker
}

func newKeyspace(namespace, tag string) keyspace {
	return keyspace{prefix: schema + namespace + ":", tag: tag}
}

// under builds prefix{slot}:name, or prefix{HashTag}:slot:name.
func (k keyspace) under(slot, name string) string {
	if k.tag == "" {
		return k.prefix + "{" + slot + "}:" + name
	}
	return k.prefix + "{" + k.tag + "}:" + slot + ":" + name
}

func (k keyspace) alone(name string) string {
	if k.tag == "" {
		return k.prefix + name
	}
	return k.prefix + "{" + k.tag + "}:" + name
}

func (k keyspace) workers() string   { return k.alone("workers") }
func (k keyspace) aside() string     { return k.alone("workers-damaged") }
func (k keyspace) gc() string        { return k.alone("gc") }
func (k keyspace) queues() string    { return k.alone("queues") }
func (k keyspace) deadIndex() string { return k.under("dead", "index") }
func (k keyspace) deadJobs() string  { return k.under("dead", "jobs") }

func (k keyspace) crashes(jobID string) string {
	if k.tag == "" {
		return k.prefix + "crashes:{" + jobID + "}"
	}
	return k.prefix + "{" + k.tag + "}:crashes:" + jobID
}

// arrived is the list into which an element is moved to wake a waiting Fetch. It lies in the queue's slot, and is part of the queue.
func (k keyspace) arrived(queue string) string {
	return k.prefix + "{" + hashTagOf(queue) + "}:arrived:" + queue + ":list" // so that it does not end like a key of a worker
}

// hashTagOf is the part of a key that decides on its slot.
func hashTagOf(key string) string {
	if _, rest, ok := strings.Cut(key, "{"); ok {
		if tag, _, ok := strings.Cut(rest, "}"); ok && tag != "" {
			return tag
		}
	}
	return key
}

// workerKeys are the keys of one incarnation.
type workerKeys struct {
	session, beat, suspect, inflight, jobs, claims, handed, damaged string
}

func (k keyspace) beat(id string) string { return k.under(id, "beat") }

func (k keyspace) worker(id string) workerKeys {
	return workerKeys{
		session:  k.under(id, "session"),
		beat:     k.beat(id),
		suspect:  k.under(id, "suspect"),
		inflight: k.under(id, "inflight"),
		jobs:     k.under(id, "jobs"),
		claims:   k.under(id, "claims"),
		handed:   k.under(id, "handed"),
		damaged:  k.under(id, "damaged"),
	}
}

// parseWorker reads what worker spells: the incarnation, and the name of its key.
func (k keyspace) parseWorker(key string) (id, name string, ok bool) {
	rest, ok := strings.CutPrefix(key, k.prefix+"{")
	if !ok {
		return "", "", false
	}
	if k.tag != "" {
		if rest, ok = strings.CutPrefix(rest, k.tag+"}:"); !ok {
			return "", "", false
		}
		i := strings.LastIndex(rest, ":") // ids may contain colons, names of keys do not
		if i < 0 {
			return "", "", false
		}
		id, name = rest[:i], rest[i+1:]
	} else if id, name, ok = strings.Cut(rest, "}:"); !ok {
		return "", "", false
	}
	// The dead letters have keys of the same form; and with a tag a job's ID may make one look like it.
	if id == "dead" || k.tag != "" && strings.HasPrefix(id, "crashes:") {
		return "", "", false
	}
	return id, name, true
}

// A lease is named twice. Inside of its worker's keys it is a short member ("17"), to save memory; to the world it is
// worker/member ("web-1:42-k3f9…/17"). A lease that was tracked again by a later incarnation keeps its name, so there
// the member is the whole name.

func leaseID(worker, member string) string {
	if strings.Contains(member, "/") {
		return member
	}
	return worker + "/" + member
}

// Fields of W:jobs beside a lease's record, which has the bare member as its name. Members end in a digit.
const (
	checkpointField = ".cp"    // the last checkpoint
	numberField     = ".cpn"   // its number
	claimField      = ".claim" // start us, attempts to hand back, reason, flags, last error: written when the lease leaves inflight
)
