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
  local to = math.min(from + chunk - 1, #ARGV)
  local fields, n = {}, 0
  for i = from, to do
    local id = ARGV[i]
    fields[n + 1], fields[n + 2], fields[n + 3], fields[n + 4] = id, id .. ".claim", id .. ".cp", id .. ".cpn"
    n = n + 4
  end
  found = found + redis.call("ZREM", claims, unpack(ARGV, from, to))
  redis.call("HDEL", jobs, unpack(fields))
  redis.call("SADD", handed, unpack(ARGV, from, to))
end
redis.call("PEXPIRE", handed, tombstone)
return found
