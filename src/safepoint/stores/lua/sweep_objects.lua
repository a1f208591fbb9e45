-- Delete objects that nothing reached at a moment of the task: those that a write has sent since then stay.
-- KEYS: task, floor. ARGV: token of that moment, the moment as objects are stamped with it, the server that was looked at, names.
if not string.find(get('sweeps') or '', ';' .. ARGV[1], 1, true) or server() ~= ARGV[3] then return {'another'} end
local gone, bytes = {}, 0
for i = 4, #ARGV do
  local field = 'o:' .. ARGV[i]
  local value = redis.call('HGET', key, field)
  if value and string.sub(value, -12) <= ARGV[2] then
    gone[#gone + 1] = field
    bytes = bytes + #value
  end
end
for i = 1, #gone, 1000 do redis.call('HDEL', key, unpack(gone, i, math.min(i + 999, #gone))) end
if #gone > 0 then redis.call('HINCRBY', key, 'w', 1) end
return {'done', #gone, bytes}
