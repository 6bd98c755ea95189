-- lock: takes or extends the sweep lock. Its value is a sign and the holder's token: + sweeping, - resting until the TTL ends,
-- which is what paces the fleet.
-- KEYS[1] gc STRING PX
-- ARGV[1] token
-- ARGV[2] TTL, ms
-- ARGV[3] 1: a lock whose holder only rests may be taken (a sweep on demand)
-- Returns {1, TTL ms} ours; {0, ms until it ends} somebody else's.
-- Atomic: compare and set.
-- Twice: ours already is ours again. A plain SET NX whose reply was lost would look like somebody else's lock.
local gc, token, ttl, barge = KEYS[1], ARGV[1], ARGV[2], ARGV[3] == "1"

local held, left = redis.pcall("GET", gc), redis.call("PTTL", gc)
-- A key of the wrong type, or one without an end, must not stop the fleet's sweeps for ever.
local free = type(held) ~= "string" or left < 0
if free then
  redis.call("DEL", gc) -- also so that the SET below is allowed when Redis is out of memory: see claim.lua
else
  redis.call("PEXPIRE", gc, left)
end
if free or string.sub(held, 2) == token or (barge and string.sub(held, 1, 1) == "-") then
  redis.call("SET", gc, "+" .. token, "PX", ttl)
  return {1, tonumber(ttl)}
end
return {0, left}
