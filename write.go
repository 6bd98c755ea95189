package recovery

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

// written is Redis' answer to a batch.
type written struct {
	start   int64 // of the tracked leases; or what track.lua answers where it refuses
	missing []int // positions, from 0, of done leases that were not there
}

// commands are the beginnings of an incarnation's writes. They are made once: a batch only adds its arguments.
type commands struct{ hset, track, done []any }

func newCommands(k workerKeys) commands {
	return commands{
		hset:  []any{"hset", k.jobs},
		track: []any{"evalsha", trackScript.Hash(), "3", k.session, k.inflight, k.jobs},
		done:  []any{"evalsha", doneScript.Hash(), "2", k.inflight, k.jobs},
	}
}

// write sends a batch: the records by a plain HSET and the rest by scripts, in one MULTI. What only removes is one command.
func (r *Recoverer) write(ctx context.Context, inc *incarnation, lane string, number uint64, scored bool, w *writing) (written, error) {
	var hset, track, done *redis.Cmd
	if number > 0 {
		flag := "0"
		if scored {
			flag = "1"
		}
		track = command(ctx, 3, inc.cmds.track, []any{lane, strconv.FormatUint(number, 10), flag}, w.track)
	}
	if len(w.records) > 0 {
		hset = command(ctx, 1, inc.cmds.hset, nil, w.records)
	}
	if w.dones > 0 {
		done = command(ctx, 3, inc.cmds.done, []any{strconv.Itoa(w.dones)}, w.done)
	}
	err := r.send(ctx, inc, hset, track, done)
	if isNoScript(err) {
		// The HSET was executed, a script was not. The same batch again, with the scripts' texts.
		spellOut(track, "track")
		spellOut(done, "done")
		err = r.send(ctx, inc, hset, track, done)
	}
	if err != nil {
		return written{}, err
	}
	return readWritten(track, done)
}

// command puts a command together.
func command(ctx context.Context, key int8, parts ...[]any) *redis.Cmd {
	n := 0
	for _, p := range parts {
		n += len(p)
	}
	args := make([]any, 0, n)
	for _, p := range parts {
		args = append(args, p...)
	}
	cmd := redis.NewCmd(ctx, args...)
	cmd.SetFirstKeyPos(key)
	return cmd
}

// spellOut makes an EVALSHA an EVAL.
func spellOut(cmd *redis.Cmd, stem string) {
	if cmd != nil {
		cmd.SetErr(nil)
		cmd.Args()[0], cmd.Args()[1] = "eval", luaSource(stem)
	}
}

// send makes one attempt.
func (r *Recoverer) send(ctx context.Context, inc *incarnation, hset, track, done *redis.Cmd) error {
	if r.cfg.WaitReplicas > 0 && hset != nil { // what only removes, or only counts, does not wait
		return r.sendReplicated(ctx, inc.keys.jobs, hset, track, done)
	}
	if hset == nil && (track == nil || done == nil) {
		cmd := track
		if cmd == nil {
			cmd = done
		}
		return r.rdb.Process(ctx, cmd)
	}
	fill := func(p redis.Pipeliner) error {
		for _, cmd := range []*redis.Cmd{hset, track, done} {
			if cmd != nil {
				_ = p.Process(ctx, cmd)
			}
		}
		return nil
	}
	if hset == nil { // nothing to be written together; and a full Redis refuses any MULTI
		_, err := r.rdb.Pipelined(ctx, fill)
		return err
	}
	_, err := r.rdb.TxPipelined(ctx, fill)
	if redis.HasErrorPrefix(err, "EXECABORT") && hset.Err() != nil {
		err = fmt.Errorf("%w: %w", hset.Err(), err) // OOM, say: why it was aborted
	}
	return err
}

func readWritten(track, done *redis.Cmd) (w written, err error) {
	if track != nil {
		if w.start, err = track.Int64(); err != nil {
			return w, fmt.Errorf("track script: %w", err)
		}
	}
	if done == nil {
		return w, nil
	}
	switch v := done.Val().(type) {
	case int64:
	case []any:
		for _, p := range v {
			n, ok := p.(int64)
			if !ok || n < 1 {
				return w, fmt.Errorf("done script answered a position %v", p)
			}
			w.missing = append(w.missing, int(n)-1)
		}
	default:
		return w, fmt.Errorf("done script answered %T", v)
	}
	return w, nil
}

func answerOf(cmd *redis.Cmd) (*replies, error) {
	a := readReplies(cmd)
	return a, a.err
}

// Config.WaitReplicas: a write counts only when that many replicas have it. WAIT speaks of the connection that it is sent on, so
// the write and WAIT go in one pipeline; and on a cluster to the node that has the key, by name, because WAIT has no
// key to be routed by.

// errTooFewReplicas means that the write was executed, but could be lost by a failover.
var errTooFewReplicas = errors.New("too few replicas confirmed the write")

// runReplicated runs a script and, if so configured, waits for replicas.
func (r *Recoverer) runReplicated(ctx context.Context, s *redis.Script, keys []string, args ...any) (*redis.Cmd, error) {
	if r.cfg.WaitReplicas == 0 {
		cmd := s.Run(ctx, r.rdb, keys, args...)
		return cmd, cmd.Err()
	}
	return r.onNode(ctx, keys[0], func(p redis.Pipeliner, text bool) *redis.Cmd {
		if text {
			return s.Eval(ctx, p, keys, args...)
		}
		return s.EvalSha(ctx, p, keys, args...)
	})
}

// sendReplicated is send with WAIT. The MULTI is spelled out, because WAIT inside of one does not wait.
func (r *Recoverer) sendReplicated(ctx context.Context, jobs string, hset, track, done *redis.Cmd) error {
	var sent []*redis.Cmd
	exec, err := r.onNode(ctx, jobs, func(p redis.Pipeliner, text bool) *redis.Cmd {
		if text {
			spellOut(track, "track")
			spellOut(done, "done")
		}
		sent = nil
		p.Do(ctx, "MULTI")
		for _, cmd := range []*redis.Cmd{hset, track, done} {
			if cmd != nil {
				p.Do(ctx, cmd.Args()...)
				sent = append(sent, cmd)
			}
		}
		return p.Do(ctx, "EXEC")
	})
	if err != nil {
		return err
	}
	results, err := exec.Slice()
	if err == nil && len(results) != len(sent) {
		err = fmt.Errorf("EXEC answered %d values, not %d", len(results), len(sent))
	}
	for i, cmd := range sent {
		if err == nil {
			cmd.SetVal(results[i])
		}
	}
	return err
}

// onNode sends what fill queues, and WAIT, in one pipeline to the node of key. fill returns the command whose answer counts.
func (r *Recoverer) onNode(ctx context.Context, key string, fill func(p redis.Pipeliner, text bool) *redis.Cmd) (*redis.Cmd, error) {
	text, asking := false, false
	var node redis.Cmdable // where we were told to go, or nil
	for attempt := 0; ; attempt++ {
		if node == nil {
			var err error
			if node, err = r.nodeOf(ctx, key); err != nil {
				return nil, err
			}
		}
		var cmd *redis.Cmd
		var wait *redis.Cmd
		_, err := node.Pipelined(ctx, func(p redis.Pipeliner) error {
			if asking {
				p.Do(ctx, "ASKING")
			}
			cmd = fill(p, text)
			wait = p.Do(ctx, "WAIT", r.cfg.WaitReplicas, ms(r.tm.call/2))
			return nil
		})
		err = firstError(err, cmd)
		switch {
		case err == nil:
			n, err := wait.Int()
			if err != nil {
				return nil, fmt.Errorf("%w: %w", errTooFewReplicas, err)
			}
			if n < r.cfg.WaitReplicas {
				return nil, fmt.Errorf("%w: %d of %d", errTooFewReplicas, n, r.cfg.WaitReplicas)
			}
			return cmd, nil
		case isNoScript(err) && !text:
			text = true
		case (redis.HasErrorPrefix(err, "MOVED") || redis.HasErrorPrefix(err, "ASK")) && attempt < 5:
			asking = redis.HasErrorPrefix(err, "ASK")
			node = r.nodeAt(ctx, err.Error()[strings.LastIndexByte(err.Error(), ' ')+1:])
		default:
			return nil, err
		}
	}
}

// firstError finds the error of an answer, also one inside of EXEC's list.
func firstError(err error, cmd *redis.Cmd) error {
	if list, e := cmd.Slice(); e == nil {
		for _, v := range list {
			if e, ok := v.(error); ok && e != redis.Nil {
				return e
			}
		}
	}
	return err
}

// nodeOf returns the client to talk to the master of key.
func (r *Recoverer) nodeOf(ctx context.Context, key string) (redis.Cmdable, error) {
	if cluster, ok := r.rdb.(*redis.ClusterClient); ok {
		return cluster.MasterForKey(ctx, key)
	}
	return r.rdb, nil
}

// nodeAt returns the client of the master that a redirection names; nil, after a moment, if it is not known yet.
func (r *Recoverer) nodeAt(ctx context.Context, addr string) (found redis.Cmdable) {
	cluster, ok := r.rdb.(*redis.ClusterClient)
	if !ok {
		return nil
	}
	cluster.ReloadState(ctx)
	var mu sync.Mutex
	_ = cluster.ForEachMaster(ctx, func(_ context.Context, c *redis.Client) error {
		mu.Lock()
		defer mu.Unlock()
		if c.Options().Addr == addr {
			found = c
		}
		return nil
	})
	if found == nil {
		sleep(ctx, 100*time.Millisecond)
	}
	return found
}
