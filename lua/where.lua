-- where: what Redis knows of some leases of one incarnation. Reads only.
-- KEYS[1] session  HASH
-- KEYS[2] inflight ZSET
-- KEYS[3] jobs     HASH
-- KEYS[4] claims   ZSET
-- KEYS[5] handed   SET
-- ARGV    leases
-- Returns {state, fetch, place...}: state 1 live, 0 fenced, -1 absent; fetch the number of the last fetch, -1 if that is not known; place of each lease 1 tracked, 2 claimed, 3 handed back,
-- 4 tracked but without a record, 5 a record without an index, 0 unknown.
-- Atomic: a lease moves from place to place; read one by one it could seem to be nowhere.
-- Twice: writes nothing.
local session, inflight, jobs, claims, handed = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]

local s = redis.call("HMGET", session, "state", "fetch")
local state = s[1]
local answer = {state == "live" and 1 or (state and 0 or -1), tonumber(s[2] or -1)}
for _, id in ipairs(ARGV) do
  local place = 0
  if redis.call("ZSCORE", inflight, id) then
    place = redis.call("HEXISTS", jobs, id) == 1 and 1 or 4
  elseif redis.call("ZSCORE", claims, id) then
    place = 2
  elseif redis.call("SISMEMBER", handed, id) == 1 then
    place = 3
  elseif redis.call("HEXISTS", jobs, id) == 1 then
    place = 5
  end
  answer[#answer + 1] = place
end
return answer
