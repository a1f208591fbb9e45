-- ARGV: fence, token, microseconds from now. Whether the lease is still theirs.
local f = redis.call('HMGET', key, 'f:state', 'f:fence', 'f:token', 'f:gone')
if f[1] ~= 'held' or f[2] ~= ARGV[1] or f[3] ~= ARGV[2] or f[4] == '1' then
  return 0
end
without_memory()
redis.call('HSET', key, 'f:until', text(now() + tonumber(ARGV[3])))
return 1
