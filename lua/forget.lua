-- forget: claimed leases that were handed back, or buried, leave the records; that they were is remembered.
-- KEYS[1] jobs   HASH
-- KEYS[2] claims ZSET
-- KEYS[3] handed SET
-- ARGV[1] retention of the proof, ms
-- ARGV[2...] leases
-- Returns the number of leases that were still claimed.
-- Atomic: out of the claims and into handed in one step, so that their old holder always finds proof.
-- Twice: removes and adds the same again.
local jobs, claims, handed = KEYS[1], KEYS[2], KEYS[3]
local tombstone = ARGV[1]
local chunk = 300

local found = 0
for from = 2, #ARGV, chunk do
  local ids = {unpack(ARGV, from, math.min(from + chunk - 1, #ARGV))}
  local fields = {}
  for _, id in ipairs(ids) do
    fields[#fields + 1] = id
    fields[#fields + 1] = id .. ".cp"
    fields[#fields + 1] = id .. ".cpn"
    fields[#fields + 1] = id .. ".claim"
  end
  found = found + redis.call("ZREM", claims, unpack(ids))
  redis.call("HDEL", jobs, unpack(fields))
  redis.call("SADD", handed, unpack(ids))
end
redis.call("PEXPIRE", handed, tombstone)
return found
