-- checkpoint: keeps how far a run got, beside its record.
-- KEYS[1] session  HASH
-- KEYS[2] inflight ZSET
-- KEYS[3] jobs     HASH
-- KEYS[4] claims   ZSET
-- KEYS[5] handed   SET
-- ARGV[1] lease
-- ARGV[2] number of the checkpoint; grows
-- ARGV[3] checkpoint; empty with ARGV[4] 1: none any more
-- ARGV[4] 1 to remove it
-- Returns 1 kept, or a later one is; 0 lost; -1 Redis does not know the lease.
-- Atomic: a zombie's checkpoint must not reach a record that somebody else has.
-- Twice: the number tells an old copy, which must not replace what came after it.
local session, inflight, jobs, claims, handed = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local id, number, data, remove = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4] == "1"

if redis.call("HGET", session, "state") ~= "live" or not redis.call("ZSCORE", inflight, id) then
  if redis.call("ZSCORE", claims, id) or redis.call("SISMEMBER", handed, id) == 1 or redis.call("ZSCORE", inflight, id) then
    return 0
  end
  return -1
end
if tonumber(redis.call("HGET", jobs, id .. ".cpn") or 0) >= number then
  return 1
end
redis.call("HSET", jobs, id .. ".cpn", number)
if remove then
  redis.call("HDEL", jobs, id .. ".cp")
else
  redis.call("HSET", jobs, id .. ".cp", data)
end
return 1
