-- take: a live worker gives up some of its own leases, to hand them back itself.
-- KEYS[1] inflight ZSET
-- KEYS[2] jobs     HASH
-- KEYS[3] claims   ZSET
-- ARGV[1] claim's time, ms
-- ARGV[2] reason
-- ARGV[3...] leases
-- Returns now, ms; until when they are claimed, ms; then for each lease its start, us, or false: it is not ours to give (a sweeper has it, or it is done).
-- Atomic: from the index into the claims in one step, so that a crash leaves it in exactly one.
-- Twice: the claim's field tells until when this call took it. As long as the claim says the same, nobody else has it, and a copy answers as the
-- first call did.
local inflight, jobs, claims = KEYS[1], KEYS[2], KEYS[3]
local claim_ttl, reason = tonumber(ARGV[1]), ARGV[2]
local t = redis.call("TIME")
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local until_ms = string.format("%.0f", now + claim_ttl)

redis.call("HDEL", jobs, "") -- lets the writes through when Redis is out of memory: see claim.lua
local answer = {now, until_ms}
for i = 3, #ARGV do
  local id = ARGV[i]
  local start = redis.call("ZSCORE", inflight, id)
  if start then
    start = string.format("%.0f", tonumber(start))
    redis.call("ZREM", inflight, id)
  else
    local claimed = redis.call("ZSCORE", claims, id)
    local meta = claimed and redis.call("HGET", jobs, id .. ".claim")
    local at, why, before = string.match(meta or "", "^(%d+) 0 (%S+) t(%d+)$")
    start = why == reason and before == string.format("%.0f", tonumber(claimed)) and at
  end
  if start then
    redis.call("ZADD", claims, until_ms, id)
    redis.call("HSET", jobs, id .. ".claim", start .. " 0 " .. reason .. " t" .. until_ms)
  end
  answer[#answer + 1] = start or false
end
return answer
