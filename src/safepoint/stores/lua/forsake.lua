-- Nobody is behind this lease any more: the row stays as a death would leave it. ARGV: ttl, fence, token.
local f = redis.call('HMGET', key, 'f:state', 'f:fence', 'f:token', 'f:gone')
if f[1] ~= 'held' or f[2] ~= ARGV[2] or f[3] ~= ARGV[3] or f[4] == '1' then
  return 0
end
without_memory()
redis.call('HSET', key, 'f:gone', '1', 'w', next_write())
touch(ARGV[1])
return 1
