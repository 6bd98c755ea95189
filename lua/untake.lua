-- untake: a live worker takes back a lease that it could not hand over.
-- KEYS[1] session  HASH
-- KEYS[2] inflight ZSET
-- KEYS[3] jobs     HASH
-- KEYS[4] claims   ZSET
-- ARGV[1] lease
-- ARGV[2] its start, us
-- Returns 1 it is ours again; 0 it is not: the session is fenced, or somebody handed the lease back.
-- Atomic: from the claims into the index in one step, and only under a live session: behind a fence nobody may run it.
-- Twice: finds it in the index already.
local session, inflight, jobs, claims = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local id, start = ARGV[1], ARGV[2]

if redis.call("HGET", session, "state") ~= "live" then
  return 0
end
if redis.call("ZREM", claims, id) == 1 then
  redis.call("ZADD", inflight, start, id)
  redis.call("HDEL", jobs, id .. ".claim")
end
return redis.call("ZSCORE", inflight, id) and 1 or 0
