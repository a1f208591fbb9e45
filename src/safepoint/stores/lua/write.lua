-- A whole task, which lies ready under another key, takes its place, or that of what was seen there.
-- KEYS: task, floor, where it lies. ARGV: ttl, token of a process proven dead, then w of what was seen and the token of that moment
-- ('' each: no task), born of the new one, its fence.
local ttl, dead, w, token, mine, fence = unpack(ARGV, 1, 6)
local at = redis.call('HMGET', key, 't:id', 'w', 'sweeps', 'born', 'n', 'f:state', 'f:gone', 'f:until', 'f:token', 'f:process',
  'f:holder', 'f:at', 'f:fence', 'f:presumed', 'f:previous')
if at[4] == mine then
  return { 'done' } -- this very request was heard before
end
if not redis.call('HGET', KEYS[3], 'n') then
  return { 'lost' }
end
if at[1] then
  if token == '' or (at[2] or '') ~= w or not string.find(at[3] or '', ';' .. token, 1, true) then
    return { 'changed' }
  end
  local held = live(dead, 'held', '')
  if held then
    return held
  end
  local numbers, given = {}, {}
  for number in string.gmatch(at[5] or '', '%d+') do
    given[#given + 1] = tonumber(number)
  end
  for number in string.gmatch(redis.call('HGET', KEYS[3], 'n'), '%d+') do
    numbers[#numbers + 1] = text(math.max(tonumber(number), given[#numbers + 1] or 0))
  end
  redis.call('HSET', KEYS[3], 'n', table.concat(numbers, ' '), 'w', next_write())
  if at[13] and tonumber(fence) > tonumber(at[13]) then
    at[13] = fence -- receivers have seen those of what is written, too
  end
  for i, name in ipairs({ 'state', 'gone', 'until', 'token', 'process', 'holder', 'at', 'fence', 'presumed', 'previous' }) do
    if at[5 + i] then
      redis.call('HSET', KEYS[3], 'f:' .. name, at[5 + i])
    end
  end
else
  if token ~= '' then
    return { 'changed' }
  end
  redis.call('HSET', KEYS[3], 'w', next_write())
end
if tonumber(fence) > tonumber(redis.call('GET', floor) or '0') then
  redis.call('SET', floor, fence)
end
redis.call('UNLINK', key) -- RENAME itself would free it here and now
redis.call('RENAME', KEYS[3], key)
touch(ttl)
return { 'done' }
