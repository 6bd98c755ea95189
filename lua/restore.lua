-- restore: puts arrivals back at the head of their queue, in their order.
-- KEYS[1] arrivals LIST
-- KEYS[2] queue    LIST
-- ARGV[1] the queue's consumers' end, LEFT or RIGHT
-- Returns how many.
-- Atomic: so that the first write lets the others through when Redis is out of memory: see claim.lua.
-- Twice: finds nothing.
local arrived, queue, side = KEYS[1], KEYS[2], ARGV[1]

redis.call("LTRIM", arrived, 0, -1) -- keeps everything
for n = 0, 999 do
  if not redis.call("LMOVE", arrived, queue, "LEFT", side) then
    return n
  end
end
return 1000
