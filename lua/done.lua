-- done: leases that have ended leave the records, also where the session is fenced by now: the work is done.
-- KEYS[1] inflight ZSET
-- KEYS[2] jobs     HASH
-- ARGV[1] number of leases
-- ARGV[2...] leases, then further fields of jobs to drop with them
-- Returns 0: all were there. Else the positions, from 1, of those that were not: claimed, handed back, or removed by an earlier copy of
-- this call. where.lua tells which.
-- Atomic: a lease that is claimed must keep its record.
-- Twice: removal by names that are never used again.
local inflight, jobs, n = KEYS[1], KEYS[2], tonumber(ARGV[1])
local chunk = 1000 -- unpack is limited: 7,999 values on Redis, 5,113 on miniredis

local removed = 0
for from = 2, n + 1, chunk do
  removed = removed + redis.call("ZREM", inflight, unpack(ARGV, from, math.min(from + chunk - 1, n + 1)))
end
if removed == n then
  for from = 2, #ARGV, chunk do
    redis.call("HDEL", jobs, unpack(ARGV, from, math.min(from + chunk - 1, #ARGV)))
  end
  return 0
end

-- Some were not in the index. One that was just taken out of it has its record; one that is claimed has its claim's field, too.
local missing = {}
for i = 1, n do
  local id = ARGV[i + 1]
  if redis.call("HEXISTS", jobs, id .. ".claim") == 1 or redis.call("HDEL", jobs, id) == 0 then
    missing[#missing + 1] = i
  else
    redis.call("HDEL", jobs, id .. ".cp", id .. ".cpn")
  end
end
return missing
