-- Mend a task in place. KEYS: task, floor, quarantine.
-- ARGV: ttl, token of a process proven dead, w as it was seen, token of that moment, born of the mended task, under what name things are set aside, what is
-- to be said of them; how many fields are set aside, and these; how many are only removed, and these; then pairs that are written.
local ttl, dead, w, token, mine, name, said = unpack(ARGV, 1, 7)
local at = redis.call('HMGET', key, 't:id', 'w', 'born', 'sweeps')
if at[3] == mine then
  return { 'done' } -- this very request was heard before
end
if not at[1] then
  return { 'absent' }
end
local held = live(dead, 'held', '')
if held then
  return held
end
if (at[2] or '') ~= w or not string.find(at[4] or '', ';' .. token, 1, true) then
  return { 'changed' }
end
local after = next_write()
local i = 9
redis.call('HSET', KEYS[3], name, said)
for _ = 1, tonumber(ARGV[8]) do
  local value = redis.call('HGET', key, ARGV[i])
  if value then
    redis.call('HSET', KEYS[3], name .. ' ' .. ARGV[i], value)
    redis.call('HDEL', key, ARGV[i])
  end
  i = i + 1
end
local count = tonumber(ARGV[i])
for j = i + 1, i + count, 1000 do
  redis.call('HDEL', key, unpack(ARGV, j, math.min(j + 999, i + count)))
end
put(i + 1 + count, #ARGV)
redis.call('HSET', key, 'w', after, 'born', mine)
redis.call('HDEL', key, 'sweeps') -- rows of old numbers have come: a sweep under way looks anew
touch(ttl)
return { 'done' }
