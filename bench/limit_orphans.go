package main

import (
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"
)

// The limit of handing back: the same 10,000 records, moved by the least that could be called a hand-back. No crash is counted, nobody is asked whether
// the session is fenced, no proof is left for a holder that lives, and a copy of a call is not told from the call.

const limitClaim = `
local ids = redis.call("ZRANGE", KEYS[1], 0, 249)
if #ids == 0 then return {} end
redis.call("ZREMRANGEBYRANK", KEYS[1], 0, #ids - 1)
local claims = {}
for i = 1, #ids do claims[i * 2 - 1], claims[i * 2] = ARGV[1], ids[i] end
redis.call("ZADD", KEYS[3], unpack(claims))
return {ids, redis.call("HMGET", KEYS[2], unpack(ids))}`

const limitMove = `
local ids = redis.call("ZRANGE", KEYS[1], 0, 249)
if #ids == 0 then return 0 end
redis.call("RPUSH", KEYS[3], unpack(redis.call("HMGET", KEYS[2], unpack(ids))))
redis.call("ZREMRANGEBYRANK", KEYS[1], 0, #ids - 1)
redis.call("HDEL", KEYS[2], unpack(ids))
return #ids`

// fillBare writes n records and their index.
func (e env) fillBare(rdb *redis.Client, n int) error {
	if err := e.srv.admin.FlushAll(bg).Err(); err != nil {
		return err
	}
	_, err := rdb.Pipelined(bg, func(p redis.Pipeliner) error {
		for i := range n {
			id := strconv.Itoa(i)
			p.ZAdd(bg, "{w}:inflight", redis.Z{Score: float64(1763000000000000 + i), Member: id})
			p.HSet(bg, "{w}:jobs", id, e.payload)
		}
		return nil
	})
	return err
}

// bareHandBack measures claim, RPUSH and forget; or, in one script, push and forget.
func (e env) bareHandBack(n int, oneScript bool) (res recovered, err error) {
	rdb := e.srv.client()
	defer rdb.Close()
	if err := e.fillBare(rdb, n); err != nil {
		return res, err
	}
	claim, move := redis.NewScript(limitClaim), redis.NewScript(limitMove)
	before, err := snap(e.srv)
	if err != nil {
		return res, err
	}
	for moved := 0; moved < n; {
		if oneScript {
			k, err := move.Run(bg, rdb, []string{"{w}:inflight", "{w}:jobs", "{w}:queue"}).Int()
			if err != nil {
				return res, err
			}
			moved += k
			continue
		}
		answer, err := claim.Run(bg, rdb, []string{"{w}:inflight", "{w}:jobs", "{w}:claims"}, time.Now().UnixMilli()).Slice()
		if err != nil {
			return res, err
		}
		ids, records := answer[0].([]any), answer[1].([]any)
		if err := rdb.RPush(bg, "queue", records...).Err(); err != nil {
			return res, err
		}
		if _, err := rdb.Pipelined(bg, func(p redis.Pipeliner) error {
			p.ZRem(bg, "{w}:claims", ids...)
			p.Do(bg, append([]any{"HDEL", "{w}:jobs"}, ids...)...)
			return nil
		}); err != nil {
			return res, err
		}
		moved += len(ids)
	}
	after, err := snap(e.srv)
	if err != nil {
		return res, err
	}
	s := after.minus(before)
	res.rate, res.wire = float64(n)/s.wall.Seconds(), float64(s.wire)/float64(n)
	res.client, res.redis = s.cpu/time.Duration(n), s.redis/time.Duration(n)
	return res, nil
}
