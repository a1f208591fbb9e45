-- Remove a task. KEYS: task, floor. ARGV: ttl, token of a process proven dead, created, born.
-- The last two say which task was meant: heard a second time, late, this must not remove another one of that name.
local ttl, dead, created, born = unpack(ARGV, 1, 4)
local at = redis.call('HMGET', key, 't:id', 't:created', 'born', 'f:fence')
if not at[1] or (at[2] or '') ~= created or (at[3] or '') ~= born then
  return { 'absent' }
end
local held = live(dead, 'held', '')
if held then
  return held
end
without_memory()
if at[4] and tonumber(at[4]) > tonumber(redis.call('GET', floor) or '0') then
  redis.call('SET', floor, at[4])
end
if ttl ~= '0' then
  redis.call('EXPIRE', floor, tonumber(ttl) + 2592000)
end
redis.call('UNLINK', key)
return { 'done', at[4] or '0' }
