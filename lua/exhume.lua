-- exhume: removes one dead letter.
-- KEYS[1] index ZSET
-- KEYS[2] jobs  HASH
-- ARGV[1] lease
-- Returns 1 if it was there, else 0.
-- Atomic: index and letter belong together.
-- Twice: finds nothing.
local index, jobs, lease = KEYS[1], KEYS[2], ARGV[1]

redis.call("HDEL", jobs, lease, lease .. ".rec", lease .. ".cp")
return redis.call("ZREM", index, lease)
