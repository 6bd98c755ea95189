-- postpone: sets when claimed leases are due again, and how often handing them back was tried.
-- KEYS[1] jobs   HASH
-- KEYS[2] claims ZSET
-- ARGV[1...] three values a lease: member, delay ms, what its claim field shall say ("start attempts reason flags error")
-- Returns the number of leases that were still claimed.
-- Atomic: the attempts must not be written for a lease that was forgotten in between.
-- Twice: sets the same again, a moment later.
local jobs, claims = KEYS[1], KEYS[2]
local t = redis.call("TIME")
local now = t[1] * 1000 + math.floor(t[2] / 1000)

redis.call("HDEL", jobs, "") -- lets the writes through when Redis is out of memory: see claim.lua
local found = 0
for i = 1, #ARGV, 3 do
  local id, delay, meta = ARGV[i], tonumber(ARGV[i + 1]), ARGV[i + 2]
  if redis.call("ZSCORE", claims, id) then
    redis.call("ZADD", claims, string.format("%.0f", now + delay), id)
    redis.call("HSET", jobs, id .. ".claim", meta)
    found = found + 1
  end
end
return found
