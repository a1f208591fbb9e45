-- Give the lease back. ARGV: ttl, fence, token, now, then pairs of fields that are set in the same step.
local ttl, fence, token, at = unpack(ARGV, 1, 4)
local f = redis.call('HMGET', key, 'f:state', 'f:fence', 'f:token', 'f:gone')
if f[1] ~= 'held' or f[2] ~= fence or f[3] ~= token or f[4] == '1' then
  return 0
end
without_memory()
redis.call('HSET', key, 'f:state', 'released', 't:updated', at, 'w', next_write())
put(5, #ARGV)
touch(ttl)
return 1
