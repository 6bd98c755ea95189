-- Applies or undoes one step of a saga.
--
-- KEYS[1]  marks of the saga (hash)
-- KEYS[2]  account (number)
-- KEYS[3]  ledger (list)
-- KEYS[4]  doors that are shut (set)
-- ARGV[1]  fence of the run
-- ARGV[2]  step
-- ARGV[3]  apply | undo
-- ARGV[4]  amount
-- ARGV[5]  line for the ledger, a JSON object whose What is empty
--
-- Returns ok; again: it had been done; stale: a later run was here; or why it is refused.
-- Atomic, so that effect, mark and ledger never differ. A second call finds the mark.
local marks, account, ledger, closed = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local fence, step, verb, amount, line = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5]

local seen = redis.call("HGET", marks, "fence")
if seen and tonumber(seen) > tonumber(fence) then
  return "stale"
end
redis.call("HSET", marks, "fence", fence)

local function note(what)
  redis.call("RPUSH", ledger, (string.gsub(line, '"What":""', '"What":"' .. what .. '"', 1)))
end

local mark = redis.call("HGET", marks, step)
if verb == "apply" then
  if mark == "applied" then
    return "again"
  elseif mark == "undone" then
    return "it was undone"
  elseif redis.call("SISMEMBER", closed, verb .. ":" .. step) == 1 then
    return "closed"
  elseif tonumber(redis.call("GET", account) or "0") < amount then
    return "not enough"
  end
  redis.call("DECRBY", account, amount)
  redis.call("HSET", marks, step, "applied")
  note("apply")
  return "ok"
end

if mark == "undone" then
  return "again"
elseif redis.call("SISMEMBER", closed, verb .. ":" .. step) == 1 then
  return "closed"
end
-- A step that was never applied is marked, too: should it arrive late, it must not act.
redis.call("HSET", marks, step, "undone")
if mark == "applied" then
  redis.call("INCRBY", account, amount)
  note("undo")
else
  note("void")
end
return "ok"
