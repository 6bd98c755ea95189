-- beat: says that a live incarnation lives, and answers what the worker needs to audit itself.
-- KEYS[1] session  HASH
-- KEYS[2] beat     STRING PX
-- KEYS[3] suspect  STRING PX
-- KEYS[4] inflight ZSET
-- KEYS[5] jobs     HASH
-- ARGV[1] beat TTL, ms
-- ARGV[2] retention, ms; 0 for ever
-- ARGV[3] running or draining, for people
-- ARGV[4] number of lanes
-- Returns {1, leases in the index, fields in jobs, last batch of lane 0, 1, ..., last fetch}; {0} fenced; {-1} session absent.
-- Atomic: a beat must never be set, nor a suspicion cleared, for a session that was just fenced.
-- Twice: sets the same again.
local session, beat, suspect, inflight, jobs = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local beat_ttl, retention, phase, lanes = ARGV[1], tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4])

local fields = {"state"}
for lane = 0, lanes - 1 do
  fields[#fields + 1] = "lane" .. lane
end
fields[#fields + 1] = "fetch"
local s = redis.call("HMGET", session, unpack(fields))
if s[1] ~= "live" then
  return {s[1] and 0 or -1}
end
local leases, records = redis.call("ZCARD", inflight), redis.call("HLEN", jobs)
redis.call("DEL", suspect) -- first: it lets the SET through when Redis is out of memory, see claim.lua
redis.call("SET", beat, phase, "PX", beat_ttl)
if retention > 0 then
  redis.call("PEXPIRE", session, retention)
  redis.call("PEXPIRE", inflight, retention)
  redis.call("PEXPIRE", jobs, retention)
end
local answer = {1, leases, records}
for lane = 1, lanes + 1 do
  answer[#answer + 1] = tonumber(s[lane + 1] or 0)
end
return answer
