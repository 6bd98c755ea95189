-- count: enters one crash in the history of its job. Plain commands do the same, cheaper; this is for a Redis that is out of memory and
-- refuses them.
-- KEYS[1] crashes ZSET PX  lease -> when, ms
-- ARGV[1] lease
-- ARGV[2] now, ms
-- ARGV[3] window, ms
-- Returns the number of crashes within the window.
-- Atomic: only so that its first write lets the second through: see claim.lua.
-- Twice: adds the same again.
local crashes, lease, now, window = KEYS[1], ARGV[1], ARGV[2], ARGV[3]

redis.call("ZREM", crashes, "")
redis.call("ZADD", crashes, "NX", now, lease)
redis.call("PEXPIRE", crashes, window)
return redis.call("ZCOUNT", crashes, "(" .. string.format("%.0f", now - window), "+inf")
