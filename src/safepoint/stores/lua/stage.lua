-- A batch of objects of a big commit that is still to come: ARGV stage, number of the batch, seconds that it is kept, names,
-- then pairs of fields and values. Sent twice, it is there once.
local stage, k, kept, names = unpack(ARGV, 1, 4)
local stages = get('stages') or ''
local before = tonumber(string.match(stages, ';' .. stage .. '/(%d+)/') or '0')
if before < tonumber(k) - 1 then
  return 0 -- those that came before were swept
end
local w = next_write()
local expires = tonumber(redis.call('TIME')[1]) + tonumber(kept)
local rest = string.gsub(stages, ';' .. stage .. '/%d+/%d+', '')
redis.call('HSET', key, 'w', w, 'stages', rest .. ';' .. stage .. '/' .. math.max(before, tonumber(k)) .. '/' .. text(expires),
  's:' .. stage .. '/' .. k, names)
put(5, #ARGV, string.format('%012x', tonumber(w)))
if not get('t:id') then
  -- No task yet, and none may come.
  redis.call('EXPIRE', key, kept)
end
return 1
