-- track: one numbered batch of new leases. Their records are not here: a plain HSET directly before this script, in the same MULTI, wrote
-- them, because bytes that pass through Lua are slow.
-- KEYS[1] session  HASH
-- KEYS[2] inflight ZSET
-- KEYS[3] jobs     HASH
-- ARGV[1] lane, a field of the session
-- ARGV[2] number of the batch in its lane; grows
-- ARGV[3] 1 if each lease comes with its start, us (tracked again); 0 if they start now
-- ARGV[4...] leases (with their starts). None: only the number counts
-- Returns start, us, of the leases tracked now; grows with every batch, also within one microsecond
--   0 fenced, -1 absent: nothing was tracked; -2 not live any more, but a copy of this batch was tracked while it was
-- Atomic: the session's state must not change between the check and the writes.
-- Twice: the lane's number tells a copy, even one that arrives when its leases are long done; it tracks nothing.
local session, inflight, jobs = KEYS[1], KEYS[2], KEYS[3]
local lane, number, scored = ARGV[1], tonumber(ARGV[2]), ARGV[3] == "1"
local s = redis.call("HMGET", session, "state", lane, "start")
local fresh = number > tonumber(s[2] or 0)

if s[1] == "live" and fresh then
  local t = redis.call("TIME")
  local start = t[1] * 1000000 + t[2]
  local last = tonumber(s[3] or 0)
  if start <= last then
    start = last + 1
  end
  local score = string.format("%.0f", start)
  redis.call("HSET", session, lane, number, "start", score)
  if #ARGV == 4 then -- one lease, most often
    redis.call("ZADD", inflight, score, ARGV[4])
    return start
  end
  local members = {}
  for i = 4, #ARGV, scored and 2 or 1 do
    members[#members + 1] = scored and ARGV[i + 1] or score
    members[#members + 1] = ARGV[i]
    if #members >= 1000 then -- unpack is limited: 7,999 values on Redis, 5,113 on miniredis
      redis.call("ZADD", inflight, unpack(members))
      members = {}
    end
  end
  if #members > 0 then
    redis.call("ZADD", inflight, unpack(members))
  end
  return start
end

-- Refused, or a copy. Drop the records that the HSET before us wrote, except of leases that exist: those were tracked by the first copy,
-- and their records are the same bytes. One that is claimed has its claim's field beside it.
local start = 1
for i = 4, #ARGV, scored and 2 or 1 do
  local id = ARGV[i]
  local score = redis.call("ZSCORE", inflight, id)
  if score then
    start = tonumber(score)
  elseif redis.call("HEXISTS", jobs, id .. ".claim") == 0 then
    redis.call("HDEL", jobs, id, id .. ".cp", id .. ".cpn")
  end
end
if s[1] == "live" then
  return start
elseif not fresh then
  return -2
end
return s[1] and 0 or -1
