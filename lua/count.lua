-- count: enters one crash in the history of its job. A first crash is entered by a plain SET NX, which is cheaper; this is for those that find
-- a history there, for looking at one, and for a Redis that is out of memory and refuses a plain SET.
-- KEYS[1] crashes STRING PX  a line for each crash: when it was noticed, ms, and the lease
-- ARGV[1] lease; empty: only count
-- ARGV[2] now, ms
-- ARGV[3] window, ms
-- ARGV[4] keep at most this many lines
-- Returns the number of crashes within the window. What is no history counts as one, and is left alone.
-- Atomic: two who count crashes of one job must not overwrite each other.
-- Twice: a lease that has a line gets no second one.
local crashes, lease, now, window, most = KEYS[1], ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])

local history = redis.call("GET", crashes) or ""
if history ~= "" and not string.match(history, "^%d+ [^\n]") then
  return 1
end
local lines, known = {}, false
for at, who in string.gmatch(history, "(%d+) ([^\n]+)") do
  if now - at < tonumber(window) then
    lines[#lines + 1] = at .. " " .. who
    known = known or who == lease
  end
end
if lease ~= "" and not known then
  lines[#lines + 1] = now .. " " .. lease
  redis.call("PEXPIRE", crashes, window) -- lets the SET through when Redis is out of memory: see claim.lua
  redis.call("SET", crashes, table.concat(lines, "\n", math.max(1, #lines - most + 1)), "PX", window)
end
return math.min(#lines, most)
