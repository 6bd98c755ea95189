-- unlock: the holder of the sweep lock rests (the lock stays until its TTL) or gives it up.
-- KEYS[1] gc STRING PX
-- ARGV[1] token
-- ARGV[2] rest or release
-- Returns 1 if the lock was ours, else 0.
-- Atomic: compare and set. A blind DEL would delete the lock of whoever took it after ours ran out.
-- Twice: rests again, or finds nothing of ours.
local gc, token, how = KEYS[1], ARGV[1], ARGV[2]

local held = redis.pcall("GET", gc)
if type(held) ~= "string" or string.sub(held, 2) ~= token then
  return 0
end
if how == "rest" then
  redis.call("PEXPIRE", gc, redis.call("PTTL", gc)) -- lets the next write through when Redis is out of memory: see claim.lua
  redis.call("SETRANGE", gc, 0, "-")
else
  redis.call("DEL", gc)
end
return 1
