-- leave: a worker fences its own session. From now on it tracks nothing, and peers need not wait.
-- KEYS[1] session  HASH
-- KEYS[2] beat     STRING PX
-- KEYS[3] suspect  STRING PX
-- ARGV[1] retention of the fenced session, ms
-- Returns 1.
-- Atomic: a beat must not outlive the fence.
-- Twice: sets the same again.
local session, beat, suspect = KEYS[1], KEYS[2], KEYS[3]

redis.call("DEL", beat, suspect) -- first: it lets the HSET through when Redis is out of memory, see claim.lua
redis.call("HSET", session, "state", "fenced")
redis.call("PEXPIRE", session, ARGV[1])
return 1
