package recovery

import (
	"context"
	"errors"
	"fmt"

	"github.com/redis/go-redis/v9"
)

// write sends a batch: the records by a plain HSET and the rest by the script, in one MULTI.
func (r *Recoverer) write(ctx context.Context, inc *incarnation, records, args []any) (*replies, error) {
	keys := []string{inc.keys.session, inc.keys.inflight, inc.keys.jobs, inc.keys.claims, inc.keys.handed}
	if len(records) == 0 {
		return answerOf(commitScript.Run(ctx, r.rdb, keys, args...))
	}
	if r.cfg.WaitReplicas > 0 {
		return r.writeReplicated(ctx, inc.keys.jobs, records, keys, args)
	}
	cmd, err := r.writeTx(ctx, inc.keys.jobs, records, func(p redis.Pipeliner) *redis.Cmd {
		return commitScript.EvalSha(ctx, p, keys, args...)
	})
	if isNoScript(err) {
		// The HSET was executed, the script was not. The same batch again, with the script's text.
		cmd, err = r.writeTx(ctx, inc.keys.jobs, records, func(p redis.Pipeliner) *redis.Cmd {
			return commitScript.Eval(ctx, p, keys, args...)
		})
	}
	if err != nil {
		return nil, err
	}
	return answerOf(cmd)
}

func (r *Recoverer) writeTx(ctx context.Context, jobs string, records []any, script func(redis.Pipeliner) *redis.Cmd) (cmd *redis.Cmd, err error) {
	var hset *redis.IntCmd
	_, err = r.rdb.TxPipelined(ctx, func(p redis.Pipeliner) error {
		hset = p.HSet(ctx, jobs, records...)
		cmd = script(p)
		return nil
	})
	if redis.HasErrorPrefix(err, "EXECABORT") && hset.Err() != nil {
		err = fmt.Errorf("%w: %w", hset.Err(), err) // OOM, say: why it was aborted
	}
	return cmd, err
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

// writeReplicated is write with WAIT. The MULTI is spelled out, because WAIT inside of one does not wait.
func (r *Recoverer) writeReplicated(ctx context.Context, jobs string, records []any, keys []string, args []any) (*replies, error) {
	exec, err := r.onNode(ctx, jobs, func(p redis.Pipeliner, text bool) *redis.Cmd {
		p.Do(ctx, "MULTI")
		p.Do(ctx, append([]any{"HSET", jobs}, records...)...)
		script := []any{"EVALSHA", commitScript.Hash()}
		if text {
			script = []any{"EVAL", luaSource("commit")}
		}
		script = append(script, len(keys))
		for _, k := range keys {
			script = append(script, k)
		}
		p.Do(ctx, append(script, args...)...)
		return p.Do(ctx, "EXEC")
	})
	if err != nil {
		return nil, err
	}
	results := readReplies(exec) // of HSET and of the script
	results.next()
	values, ok := results.next().([]any)
	if results.err != nil {
		return nil, results.err
	}
	if !ok {
		return nil, errors.New("commit script answered no list")
	}
	return &replies{values: values}, nil
}

// onNode sends what fill queues, and WAIT, in one pipeline to the node of key. fill returns the command whose answer counts.
func (r *Recoverer) onNode(ctx context.Context, key string, fill func(p redis.Pipeliner, text bool) *redis.Cmd) (*redis.Cmd, error) {
	text := false
	for attempt := 0; ; attempt++ {
		node, err := r.nodeOf(ctx, key)
		if err != nil {
			return nil, err
		}
		var cmd *redis.Cmd
		var wait *redis.Cmd
		_, err = node.Pipelined(ctx, func(p redis.Pipeliner) error {
			cmd = fill(p, text)
			wait = p.Do(ctx, "WAIT", r.cfg.WaitReplicas, ms(r.tm.call/2))
			return nil
		})
		err = firstError(err, cmd)
		switch {
		case err == nil:
			if n, err := wait.Int(); err != nil || n < r.cfg.WaitReplicas {
				return nil, fmt.Errorf("%w: %d of %d: %w", errTooFewReplicas, n, r.cfg.WaitReplicas, errors.Join(err))
			}
			return cmd, nil
		case isNoScript(err) && !text:
			text = true
		case redis.HasErrorPrefix(err, "MOVED") && attempt < 3:
			r.reload(ctx)
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

func (r *Recoverer) reload(ctx context.Context) {
	if cluster, ok := r.rdb.(*redis.ClusterClient); ok {
		cluster.ReloadState(ctx)
	}
}
