-- claim: decides whether an incarnation is dead, and if so takes some of its leases to hand them back.
-- KEYS[1] session  HASH
-- KEYS[2] beat     STRING PX
-- KEYS[3] suspect  STRING PX
-- KEYS[4] inflight ZSET
-- KEYS[5] jobs     HASH
-- KEYS[6] claims   ZSET
-- KEYS[7] handed   SET
-- KEYS[8] damaged  any type
-- ARGV[1] confirmation, ms: how long a suspicion must last
-- ARGV[2] suspicion's TTL, ms
-- ARGV[3] claim's time, ms
-- ARGV[4] at most this many leases
-- ARGV[5] retention of records, ms; 0 for ever
-- ARGV[6] retention of the fenced session, ms
-- ARGV[7] 1: the caller is this incarnation itself and lives; only claims of its own that are due are taken
-- ARGV[8] name of this call, the same in every copy of it
-- Returns {verdict, wait, now, news, damaged}, and if it is dead {..., until, lease...}
--   verdict 0 alive; 1 suspect; 2 dead, leases follow; 3 dead, none due now; 4 dead and empty: may be retired
--   wait    ms until there is something to do: the beat runs out, the suspicion is confirmed, the next claim is due; -1 nothing
--   now     ms
--   news    1 if this call made the suspicion, or the fence
--   damaged number of keys that had the wrong type and were put aside
--   until   ms, when the claims of these leases end: no other claim has the same, so that it tells whose they are
--   lease   two values each: member, and what its claim field says ("start attempts reason flags error"). The caller reads the record itself:
--           Lua would copy it twice, while everybody waits
-- Atomic: a beat that arrives before this script saves the worker, one that arrives after it finds a fence; there is no between.
-- Twice: the session keeps the name of the last call that took leases, and when their claims end. A copy of it answers those again,
-- so that a lost reply costs a round trip and not a claim's time.
local session, beat, suspect = KEYS[1], KEYS[2], KEYS[3]
local inflight, jobs, claims, handed, damaged = KEYS[4], KEYS[5], KEYS[6], KEYS[7], KEYS[8]
local confirm, suspect_ttl, claim_ttl = tonumber(ARGV[1]), ARGV[2], tonumber(ARGV[3])
local most, retention, tombstone, own, call = tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6], ARGV[7] == "1", ARGV[8]
local t = redis.call("TIME")
local now = t[1] * 1000 + math.floor(t[2] / 1000)

local function ms(n) return string.format("%.0f", n) end

-- A key of the wrong type can't be read, but it is not ours to destroy: it is put aside for a person to see.
local put_aside = 0
for key, want in pairs({[session] = "hash", [inflight] = "zset", [jobs] = "hash", [claims] = "zset", [handed] = "set"}) do
  local is = redis.call("TYPE", key).ok
  if is ~= "none" and is ~= want then
    redis.call("RENAME", key, damaged)
    redis.call("PEXPIRE", damaged, tombstone)
    put_aside = put_aside + 1
  end
end

-- When Redis is out of memory it refuses a script's writes only until the script has written something, and this is a write that frees:
-- it removes nothing, and lets the rest through. What a sweep hands back makes room.
redis.call("HDEL", jobs, "")

local s = redis.call("HMGET", session, "state", "claim")
local state, fenced = s[1], 0
local taken_before = string.match(s[2] or "", "^" .. call .. " (%d+)$")
if own then
  if state ~= "live" then
    return {0, -1, now, 0, put_aside}
  end
elseif state ~= "fenced" then
  if state == "live" then
    local left = redis.call("PTTL", beat)
    if left >= 0 then -- a beat without TTL is nobody's: the next real one replaces it
      return {0, left, now, 0, put_aside}
    end
    local since = redis.pcall("GET", suspect)
    since = type(since) == "string" and tonumber(since)
    if not since or since > now then
      redis.call("SET", suspect, ms(now), "PX", suspect_ttl)
      redis.call("DEL", beat) -- one without TTL would hide the suspicion from a light beat
      return {1, confirm, now, 1, put_aside}
    end
    if now - since < confirm then
      return {1, since + confirm - now, now, 0, put_aside}
    end
  end
  -- Absent sessions are fenced too: a join or a Track that is still under way must not find the door open.
  redis.call("HSET", session, "state", "fenced")
  redis.call("DEL", beat, suspect)
  fenced = 1
end

-- Later than that of any call before: the end of their claims is how a copy finds its leases.
local until_ms = ms(math.max(now + claim_ttl, tonumber(string.match(s[2] or "", " (%d+)$") or 0) + 1))
local answer, taken = {2, -1, now, fenced, put_aside, until_ms}, 0

-- take answers some leases and renews their claims. starts, us, are for those that come from the index, and have no claim's field yet. Few
-- tables and few strings: it is the longest script.
local function take(ids, starts)
  local n, fields, claimed, metas = #ids, {}, {}, {}
  for i = 1, n do
    fields[i], claimed[i * 2 - 1], claimed[i * 2] = ids[i] .. ".claim", until_ms, ids[i]
  end
  local known = starts and {} or redis.call("HMGET", jobs, unpack(fields))
  local last, written = #answer, 0
  for i = 1, n do
    local meta = known[i]
    if not meta then
      meta = (starts and starts[i] or "0") .. " 0 crashed -"
      metas[written + 1], metas[written + 2] = fields[i], meta
      written = written + 2
    end
    answer[last + 1], answer[last + 2] = ids[i], meta
    last = last + 2
  end
  if written > 0 then
    redis.call("HSET", jobs, unpack(metas))
  end
  redis.call("ZADD", claims, unpack(claimed))
  taken = taken + n
end

if taken_before then
  until_ms, answer[6] = taken_before, taken_before
  local ids = redis.call("ZRANGEBYSCORE", claims, until_ms, until_ms, "LIMIT", 0, most)
  if #ids > 0 then
    take(ids)
  end
  return answer
end
local due = redis.call("ZRANGEBYSCORE", claims, "-inf", ms(now), "LIMIT", 0, most)
if #due > 0 then
  take(due)
end
if not own then
  local found = taken < most and redis.call("ZRANGE", inflight, 0, most - taken - 1, "WITHSCORES") or {}
  if #found > 0 then
    local ids, starts = {}, {}
    for i = 1, #found / 2 do
      local start = found[i * 2]
      ids[i], starts[i] = found[i * 2 - 1], string.find(start, "%D") and ms(tonumber(start)) or start
    end
    redis.call("ZREMRANGEBYRANK", inflight, 0, #ids - 1)
    take(ids, starts)
  end
  -- Records without an index: only damage, or a death inside of a retried Track, leaves them. Understood, so handed back.
  if taken == 0 and redis.call("ZCARD", inflight) == 0 and redis.call("HLEN", jobs) > 0 then
    -- At random: fields of claims that are not due must not hide the others for ever.
    for _, field in ipairs(redis.call("HRANDFIELD", jobs, most)) do
      local member = string.match(field, "^(.*)%.claim$") or string.match(field, "^(.*)%.cpn?$")
      if member then
        if redis.call("HEXISTS", jobs, member) == 0 and not redis.call("ZSCORE", claims, member) then
          redis.call("HDEL", jobs, field)
        end
      elseif not redis.call("ZSCORE", claims, field) then
        take({field})
      end
    end
  end
  -- As long as anybody looks after them, records do not expire.
  if retention > 0 then
    for _, key in ipairs({inflight, jobs, claims}) do
      redis.call("PEXPIRE", key, retention)
    end
  end
  redis.call("PEXPIRE", session, tombstone)
  redis.call("PEXPIRE", handed, tombstone)
end

if taken > 0 then
  redis.call("HSET", session, "claim", call .. " " .. until_ms)
else
  local next_due = redis.call("ZRANGE", claims, 0, 0, "WITHSCORES")
  if next_due[2] then
    answer[1], answer[2] = 3, math.max(0, tonumber(next_due[2]) - now)
  elseif redis.call("ZCARD", inflight) == 0 and redis.call("HLEN", jobs) == 0 then
    answer[1] = 4
  else
    answer[1] = 3
  end
end
return answer
