-- bury: adds one dead letter, and drops the oldest ones if there are too many.
-- KEYS[1] index ZSET  lease -> when, ms
-- KEYS[2] jobs  HASH  lease -> letter, JSON; lease.rec -> record as it was; lease.cp -> checkpoint as it was
-- ARGV[1] lease
-- ARGV[2] letter
-- ARGV[3] 1 if there is a record, then ARGV[4] is it
-- ARGV[5] 1 if there is a checkpoint, then ARGV[6] is it
-- ARGV[7] at most so many letters
-- Returns {new, dropped...}: new 1 if it was not there; two values for each letter that was dropped: lease, letter.
-- Atomic: index and letter belong together.
-- Twice: the lease is the name, so that a letter is never there twice.
local index, jobs = KEYS[1], KEYS[2]
local lease, letter, most = ARGV[1], ARGV[2], tonumber(ARGV[7])
local t = redis.call("TIME")

local answer = {redis.call("ZADD", index, "NX", string.format("%.0f", t[1] * 1000 + math.floor(t[2] / 1000)), lease)}
if answer[1] == 1 then
  redis.call("HSET", jobs, lease, letter)
  if ARGV[3] == "1" then
    redis.call("HSET", jobs, lease .. ".rec", ARGV[4])
  end
  if ARGV[5] == "1" then
    redis.call("HSET", jobs, lease .. ".cp", ARGV[6])
  end
end
local excess = math.min(redis.call("ZCARD", index) - most, 100)
if excess > 0 then
  for _, old in ipairs(redis.call("ZRANGE", index, 0, excess - 1)) do
    if old ~= lease then -- of the same millisecond, it may sort first
      answer[#answer + 1] = old
      answer[#answer + 1] = redis.call("HGET", jobs, old) or ""
      redis.call("ZREM", index, old)
      redis.call("HDEL", jobs, old, old .. ".rec", old .. ".cp")
    end
  end
end
return answer
