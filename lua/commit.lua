-- commit: one numbered batch of a worker's Track and Done. The records of the tracked leases are not here: a plain HSET
-- directly before this script, in the same MULTI, wrote them, because bytes that pass through Lua are slow.
-- KEYS[1] session  HASH
-- KEYS[2] inflight ZSET
-- KEYS[3] jobs     HASH
-- KEYS[4] claims   ZSET
-- KEYS[5] handed   SET
-- ARGV[1] lane, a field of the session
-- ARGV[2] number of the batch in its lane; grows. 0 for a batch that only removes: that needs no number, and writing none it
--         works when Redis is out of memory
-- ARGV[3] number of leases to track
-- ARGV[4] 1 if each of those comes with its start, us (tracked again); 0 if they start now
-- ARGV[5] number of leases that are done
-- ARGV[6...] leases to track (with their starts), leases done, then further fields of jobs to drop with them
-- Returns {state, fresh, start, lost...}
--   state  1 live; 0 fenced; -1 absent. Unless live, nothing was tracked by this call.
--   fresh  1 if no copy of this batch ran before; 0 if one did. Not live and not fresh: tracked before, and lost since.
--   start  us, of the leases tracked now; grows with every batch, also within one microsecond
--   lost   positions, from 1, of done leases that somebody else has taken
-- Atomic: the session's state must not change between the check and the writes.
-- Twice: the lane's number tells a copy, even one that arrives when its leases are long done; it tracks nothing. Done is
-- removal by a name that is never used again.
local session, inflight, jobs, claims, handed = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local lane, number = ARGV[1], tonumber(ARGV[2])
local tracks, scored, dones = tonumber(ARGV[3]), ARGV[4] == "1", tonumber(ARGV[5])
local chunk = 1000 -- unpack is limited: 7,999 values on Redis, 5,113 on miniredis

local function us(n) return string.format("%.0f", n) end

local s = redis.call("HMGET", session, "state", lane, "start")
local state = s[1] == "live" and 1 or (s[1] and 0 or -1)
local fresh = number == 0 and tracks == 0 or number > tonumber(s[2] or 0)
local t = redis.call("TIME")
local start = us(math.max(t[1] * 1000000 + t[2], tonumber(s[3] or 0) + 1))
local width = scored and 2 or 1
local pos = 6

if tracks > 0 then
  if state == 1 and fresh then
    local members = {}
    for i = 1, tracks do
      members[#members + 1] = scored and ARGV[pos + 1] or start
      members[#members + 1] = ARGV[pos]
      pos = pos + width
      if #members >= chunk or i == tracks then
        redis.call("ZADD", inflight, unpack(members))
        members = {}
      end
    end
  else
    -- Refused, or a copy. Drop the records that the HSET before us wrote, except of leases that exist: those were
    -- tracked by the first copy, and their records are the same bytes.
    start = us(tonumber(redis.call("ZSCORE", inflight, ARGV[pos]) or start))
    for i = 1, tracks do
      local id = ARGV[pos]
      if redis.call("ZSCORE", inflight, id) or redis.call("ZSCORE", claims, id) then
        fresh = false -- there is proof, also where the session that kept the number is gone
      else
        redis.call("HDEL", jobs, id, id .. ".cp", id .. ".cpn")
        fresh = fresh and redis.call("SISMEMBER", handed, id) == 0
      end
      pos = pos + width
    end
  end
end
if state == 1 and fresh and number > 0 then
  redis.call("HSET", session, lane, number, "start", start)
end

local answer = {state, fresh and 1 or 0, start}
if dones > 0 then
  local first, last = pos, pos + dones - 1
  local removed = 0
  for from = first, last, chunk do
    removed = removed + redis.call("ZREM", inflight, unpack(ARGV, from, math.min(from + chunk - 1, last)))
  end
  if removed == dones then
    for from = first, #ARGV, chunk do
      redis.call("HDEL", jobs, unpack(ARGV, from, math.min(from + chunk - 1, #ARGV)))
    end
  else
    -- What was not in the index is lost only if there is proof; else an earlier copy of this Done removed it.
    for i = first, last do
      local id = ARGV[i]
      if redis.call("ZSCORE", claims, id) or redis.call("SISMEMBER", handed, id) == 1 then
        answer[#answer + 1] = i - first + 1
      else
        redis.call("HDEL", jobs, id, id .. ".cp", id .. ".cpn")
      end
    end
  end
end
return answer
