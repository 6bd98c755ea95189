-- deliver: pushes the jobs of some leases into a list, and forgets the leases, in one step: each is handed back exactly once.
-- KEYS[1] inflight ZSET
-- KEYS[2] jobs     HASH
-- KEYS[3] claims   ZSET
-- KEYS[4] handed   SET
-- KEYS[5] list to push to
-- ARGV[1] retention of the proof, ms
-- ARGV[2] 1: the caller is the live worker that holds the leases, and gives back what nobody has claimed
-- ARGV[3] LPUSH or RPUSH
-- ARGV[4...] three values a lease, at most 500 leases: member; what the next is: "at" the position in the record at which the element begins, "is"
--         the element, "lost" the element of a lease that Redis may have lost; that value
-- Returns for each lease 1 pushed now; 2 it was handed back before; 0 there is no such lease; 3 it has no record. An error of the push, and then
-- nothing was done.
-- Atomic: push and removal are one step. That is what makes it exactly once.
-- Twice: a lease that was pushed is in handed.
local inflight, jobs, claims, handed, list = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local tombstone, own, push = ARGV[1], ARGV[2] == "1", ARGV[3]

redis.call("HDEL", jobs, "") -- lets the push through when Redis is out of memory: see claim.lua

local ids = {}
for i = 4, #ARGV, 3 do
  ids[(i - 1) / 3] = ARGV[i]
end
-- Every key is read before anything is pushed: one of the wrong type must not end the script half-way.
local index, other = claims, inflight -- where its holder has it, and where it should not be
if own then
  index, other = inflight, claims
end
redis.call("ZCARD", other)
local held, records = redis.call("ZMSCORE", index, unpack(ids)), redis.call("HMGET", jobs, unpack(ids))
local before = redis.call("SMISMEMBER", handed, unpack(ids))

local answer, elements, leases, fields, n = {}, {}, {}, {}, 0
for i = 1, #ids do
  local id, how, value = ids[i], ARGV[i * 3 + 2], ARGV[i * 3 + 3]
  if before[i] == 1 then
    answer[i] = 2
  elseif not held[i] and how ~= "lost" then
    answer[i] = 0
  elseif how == "at" and not records[i] then
    answer[i] = 3
  else
    answer[i] = 1
    elements[n + 1], leases[n + 1] = how == "at" and string.sub(records[i], tonumber(value)) or value, id
    local f = n * 4
    fields[f + 1], fields[f + 2], fields[f + 3], fields[f + 4] = id, id .. ".cp", id .. ".cpn", id .. ".claim"
    n = n + 1
  end
end
if n > 0 then
  local pushed = redis.pcall(push, list, unpack(elements))
  if type(pushed) == "table" then
    return pushed
  end
  redis.call("ZREM", claims, unpack(leases))
  redis.call("ZREM", inflight, unpack(leases))
  redis.call("HDEL", jobs, unpack(fields))
  redis.call("SADD", handed, unpack(leases))
  redis.call("PEXPIRE", handed, tombstone)
end
return answer
