-- count: enters one crash in the history of its job. Plain commands do the same, cheaper; this is for a Redis that is out of memory and
-- refuses them.
-- KEYS[1] crashes SET PX
-- ARGV[1] lease
-- ARGV[2] window, ms
-- Returns the number of crashes.
-- Atomic: only so that its first write lets the second through: see claim.lua.
-- Twice: adds the same again.
local crashes, lease, window = KEYS[1], ARGV[1], ARGV[2]

redis.call("SREM", crashes, "")
redis.call("SADD", crashes, lease)
redis.call("PEXPIRE", crashes, window)
return redis.call("SCARD", crashes)
