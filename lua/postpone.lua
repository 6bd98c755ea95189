-- postpone: sets when claimed leases are due again, and how often handing them back was tried.
-- KEYS[1] jobs   HASH
-- KEYS[2] claims ZSET
-- ARGV[1] ms, when the caller's claims end
-- ARGV[2...] three values a lease: member, delay ms, what its claim field shall say ("start attempts reason flags error")
-- Returns the number of leases that were still the caller's: one whose claim ran out may be another sweeper's by now.
-- Atomic: the attempts must not be written for a lease that was forgotten in between.
-- Twice: finds that they are nobody's any more.
local jobs, claims = KEYS[1], KEYS[2]
local t = redis.call("TIME")
local now = t[1] * 1000 + math.floor(t[2] / 1000)

redis.call("HDEL", jobs, "") -- lets the writes through when Redis is out of memory: see claim.lua
local found = 0
for i = 2, #ARGV, 3 do
  local id, delay, meta = ARGV[i], tonumber(ARGV[i + 1]), ARGV[i + 2]
  if string.format("%.0f", tonumber(redis.call("ZSCORE", claims, id) or 0)) == ARGV[1] then
    redis.call("ZADD", claims, string.format("%.0f", now + delay), id)
    redis.call("HSET", jobs, id .. ".claim", meta)
    found = found + 1
  end
end
return found
