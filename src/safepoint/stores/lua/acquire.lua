-- Take the lease. ARGV: ttl, token, holder, process, microseconds of the lease, steal, token of a process proven dead, token
-- of one that was asked about and is not proven dead, now, id, announced, the highest fence of deleted tasks ('': not read).
local ttl, token, holder, process, lease, steal, dead, asked, at, id, announced, deleted = unpack(ARGV, 1, 12)
local f = redis.call('HMGET', key, 'f:state', 'f:gone', 'f:until', 'f:token', 'f:process', 'f:holder', 'f:at', 'f:fence',
  'f:presumed', 'f:previous')
local task, attempts, numbers = unpack(redis.call('HMGET', key, 't:id', 't:attempts', 'n'))
local n = numbers or '0 0 0 0 0'
if f[4] == token then
  return { 'granted', n, f[8], f[10], f[9] } -- this very request was heard before
end
local previous, fence, presumed = '', tonumber(f[8] or redis.call('GET', floor) or '0'), f[9] or '0'
if not f[8] then
  if deleted == '' then
    return { 'floor', n }
  end
  fence = math.max(fence, tonumber(deleted))
end
if f[1] == 'released' then
  previous = 'released'
elseif f[1] == 'held' then
  if f[2] == '1' or f[4] == dead then
    previous = 'dead'
  elseif f[4] ~= asked then
    return { 'ask', n, f[4], f[5], f[6], f[7] }
  elseif steal == '1' or tonumber(f[3]) <= now() then
    previous, presumed = 'presumed_dead', f[8]
  else
    return { 'held', n, f[4], f[5], f[6], f[7] }
  end
end
if not task then
  if announced == '0' then
    return { 'announce', n }
  end
  begin(id, at)
end
local mine = text(fence + 1)
redis.call('HSET', key, 'f:state', 'held', 'f:gone', '0', 'f:until', text(now() + tonumber(lease)), 'f:token', token,
  'f:process', process, 'f:holder', holder, 'f:at', at, 'f:fence', mine, 'f:presumed', presumed, 'f:previous', previous,
  't:status', 'running', 't:attempts', text(tonumber(attempts or '0') + 1), 't:updated', at, 'w', next_write())
if ttl ~= '0' then
  redis.call('SET', floor, mine) -- the task may expire, and its fences go on
end
touch(ttl)
return { 'granted', n, mine, previous, presumed }
