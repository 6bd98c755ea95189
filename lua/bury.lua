-- bury: adds one dead letter.
-- KEYS[1] index ZSET  lease -> when, ms
-- KEYS[2] jobs  HASH  lease -> letter, JSON; lease.rec -> record as it was; lease.cp -> checkpoint as it was
-- ARGV[1] lease
-- ARGV[2] letter
-- ARGV[3] 1 if there is a record, then ARGV[4] is it
-- ARGV[5] 1 if there is a checkpoint, then ARGV[6] is it
-- Returns 1 if it is new, 0 if it was there.
-- Atomic: index and letter belong together.
-- Twice: the lease is the name, so that a letter is never there twice.
local index, jobs = KEYS[1], KEYS[2]
local lease, letter = ARGV[1], ARGV[2]
local t = redis.call("TIME")

local new = redis.call("ZADD", index, "NX", string.format("%.0f", t[1] * 1000 + math.floor(t[2] / 1000)), lease)
if new == 1 then
  redis.call("HSET", jobs, lease, letter)
  if ARGV[3] == "1" then
    redis.call("HSET", jobs, lease .. ".rec", ARGV[4])
  end
  if ARGV[5] == "1" then
    redis.call("HSET", jobs, lease .. ".cp", ARGV[6])
  end
end
return new
