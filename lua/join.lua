-- join: opens the session of a new incarnation.
-- KEYS[1] session  HASH
-- KEYS[2] beat     STRING PX
-- ARGV[1] info, JSON
-- ARGV[2] beat TTL, ms
-- ARGV[3] retention, ms; 0 for ever
-- Returns 1 joined; 0 refused: the session was fenced, take a new id.
-- Atomic: between the check and the write a sweeper could fence what is not there yet.
-- Twice: ids are random and never reused, so a live session can only be an earlier copy of this very call.
local session, beat = KEYS[1], KEYS[2]
local info, beat_ttl, retention = ARGV[1], ARGV[2], tonumber(ARGV[3])

local state = redis.call("HGET", session, "state")
if state then
  return state == "live" and 1 or 0
end
redis.call("HSET", session, "state", "live", "info", info, "fetch", 0)
redis.call("SET", beat, "running", "PX", beat_ttl)
if retention > 0 then
  redis.call("PEXPIRE", session, retention)
end
return 1
