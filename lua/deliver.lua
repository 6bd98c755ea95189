-- deliver: pushes the jobs of some leases into lists, and forgets the leases, in one step: each is handed back exactly once.
-- KEYS[1] inflight ZSET
-- KEYS[2] jobs     HASH
-- KEYS[3] claims   ZSET
-- KEYS[4] handed   SET
-- KEYS[5...] lists to push to
-- ARGV[1] retention of the proof, ms
-- ARGV[2] 1: the caller is the live worker that holds the leases, and gives back what nobody has claimed
-- ARGV[3...] five values a lease: member; position of its list, from 1; LPUSH or RPUSH; what the next is: "at" the position in the
--         record at which the element begins, "is" the element, "lost" the element of a lease that Redis may have lost; that value
-- Returns for each lease 1 pushed now; 2 it was handed back before; 0 there is no such lease; or why it could not be pushed.
-- Atomic: push and removal are one step. That is what makes it exactly once.
-- Twice: a lease that was pushed is in handed.
local inflight, jobs, claims, handed = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local tombstone, own = ARGV[1], ARGV[2] == "1"

redis.call("HDEL", jobs, "") -- lets the push through when Redis is out of memory: see claim.lua

-- Every key is read before anything is pushed: one of the wrong type must not end the script half-way.
local function outcome(id, how)
  local claimed, held = redis.call("ZSCORE", claims, id), redis.call("ZSCORE", inflight, id)
  if redis.call("SISMEMBER", handed, id) == 1 then
    return 2
  end
  return (claimed or own and held or how == "lost") and 1 or 0
end

local answer = {}
for i = 3, #ARGV, 5 do
  local id, list, push, how, value = ARGV[i], KEYS[4 + ARGV[i + 1]], ARGV[i + 2], ARGV[i + 3], ARGV[i + 4]
  local verdict = outcome(id, how)
  if verdict == 1 then
    local element = value
    if how == "at" then
      element = redis.call("HGET", jobs, id)
      element = element and string.sub(element, tonumber(value))
    end
    local pushed = element and redis.pcall(push, list, element) or {err = "the record is missing"}
    if type(pushed) == "table" then
      verdict = pushed.err
    else
      redis.call("ZREM", claims, id)
      redis.call("ZREM", inflight, id)
      redis.call("HDEL", jobs, id, id .. ".cp", id .. ".cpn", id .. ".claim")
      redis.call("SADD", handed, id)
      redis.call("PEXPIRE", handed, tombstone)
    end
  end
  answer[#answer + 1] = verdict
end
return answer
