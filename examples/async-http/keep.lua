-- Keeps the result of a request, unless a later run has written one.
--
-- KEYS[1]  results (hash)
-- KEYS[2]  their fences (hash)
-- KEYS[3]  calls (list)
-- ARGV[1]  request
-- ARGV[2]  fence of the run
-- ARGV[3]  result
--
-- Returns 1: kept; 0: refused. Atomic, so that no write comes between the look at the fence and the result. A second call with the same
-- fence writes the same.
local results, fences, calls = KEYS[1], KEYS[2], KEYS[3]
local request, fence, result = ARGV[1], ARGV[2], ARGV[3]

redis.call("RPUSH", calls, result)
local seen = redis.call("HGET", fences, request)
if seen and tonumber(seen) > tonumber(fence) then
  return 0
end
redis.call("HSET", fences, request, fence)
redis.call("HSET", results, request, result)
return 1
