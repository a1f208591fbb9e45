-- Delete objects that nothing reached at a moment of the task: those that a write has sent since then stay.
-- KEYS: task, floor. ARGV: created, born, the moment as objects are stamped with it, names.
local at = redis.call('HMGET', key, 't:created', 'born')
if (at[1] or '') ~= ARGV[1] or (at[2] or '') ~= ARGV[2] then return {'another'} end
local gone, bytes = {}, 0
for i = 4, #ARGV do
  local field = 'o:' .. ARGV[i]
  local value = redis.call('HGET', key, field)
  if value and string.sub(value, -12) <= ARGV[3] then
    gone[#gone + 1] = field
    bytes = bytes + #value
  end
end
for i = 1, #gone, 1000 do redis.call('HDEL', key, unpack(gone, i, math.min(i + 999, #gone))) end
if #gone > 0 then redis.call('HINCRBY', key, 'w', 1) end
return {'done', #gone, bytes}
