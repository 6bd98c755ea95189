-- fetch: takes jobs from lists and tracks them, in one step.
-- KEYS[1] session  HASH
-- KEYS[2] inflight ZSET
-- KEYS[3] jobs     HASH
-- KEYS[4...] two for each queue, in their order: its arrivals LIST, the queue LIST
-- ARGV[1] number of this call; grows
-- ARGV[2] the leases are named by the numbers that follow this one
-- ARGV[3] at most this many leases; 0 only asks what an earlier copy took, and makes sure that no later one takes anything
-- ARGV[4] stop after this many bytes
-- ARGV[5...] two for each queue: its consumers' end, LEFT or RIGHT; what a record of its elements begins with
-- Returns {state, start, last, record...}
--   state 1 live; 0 fenced; -1 absent. Unless live, nothing was taken.
--   start us, of these leases
--   last  number of the call before this one
--   record of each lease, in the order of their names; nil for one that is not there any more
-- Atomic: an element is in its list or in the records, never in neither.
-- Twice: the session keeps the number of the last call, and how many leases it took. A copy answers those again; a copy of an older call
-- answers none, and its caller has long been told.
local session, inflight, jobs = KEYS[1], KEYS[2], KEYS[3]
local number, base, most, most_bytes = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])

local function int(n) return string.format("%.0f", n) end

local s = redis.call("HMGET", session, "state", "fetch", "fetched", "start")
if s[1] ~= "live" then
  return {s[1] and 0 or -1, 0, 0}
end
local last = tonumber(s[2] or 0)
local answer = {1, "0", last}
if number <= last then
  for i = 1, number == last and tonumber(s[3] or 0) or 0 do
    local member = int(base + i)
    local start, record = redis.call("ZSCORE", inflight, member), redis.call("HGET", jobs, member)
    answer[3 + i] = start and record
    if start and record then
      answer[2] = int(tonumber(start))
    end
  end
  return answer
end

-- Every key is touched before anything is taken: one of the wrong type must not end the script half-way. HDEL is also a write that frees:
-- it lets the others through when Redis is out of memory, see claim.lua.
redis.call("ZCARD", inflight)
redis.call("HDEL", jobs, "")

local t = redis.call("TIME")
local start = int(math.max(t[1] * 1000000 + t[2], tonumber(s[4] or 0) + 1))
answer[2] = start
local taken, bytes, failed = 0, 0, nil
local name = base + most < 1e14 and tostring or int -- which is slower than anything else here; the other is exact up to 14 digits
for q = 4, #KEYS, 2 do
  local arrived, queue, side, header = KEYS[q], KEYS[q + 1], ARGV[q + 1], ARGV[q + 2]
  -- What was moved to wake somebody is first in line again. Bounded: one a waiting worker.
  for _ = 1, 1000 do
    local moved = redis.pcall("LMOVE", arrived, queue, "LEFT", side)
    if type(moved) == "table" then failed = failed or moved end
    if type(moved) ~= "string" then break end
  end
  local pop, page = side == "LEFT" and "LPOP" or "RPOP", 1
  while taken < most and bytes < most_bytes do
    local elements = redis.pcall(pop, queue, math.min(page, most - taken))
    if type(elements) == "table" and elements.err then failed = failed or elements end
    if type(elements) ~= "table" or elements.err or #elements == 0 then break end
    local records, index, size = {}, {}, 1
    for i, element in ipairs(elements) do
      taken = taken + 1
      size = math.max(size, #element)
      bytes = bytes + #element
      local member, record = name(base + taken), header .. element
      records[2 * i - 1], records[2 * i] = member, record
      index[2 * i - 1], index[2 * i] = start, member
      answer[3 + taken] = record
    end
    redis.call("HSET", jobs, unpack(records))
    redis.call("ZADD", inflight, unpack(index))
    -- The next page as large as the bytes allow, if its elements are like those of this one.
    page = math.max(1, math.min(200, math.floor((most_bytes - bytes) / size)))
  end
end
-- Always: a copy that comes late must find that its number is past, also where there was nothing to take.
redis.call("HSET", session, "fetch", number, "fetched", taken, "start", start)
if failed and taken == 0 then
  return failed
end
return answer
