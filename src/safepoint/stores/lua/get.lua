-- Fields: ARGV the write counter that the task must still have (or ''), then their names. Answers the counter, then the values.
local w = get('w') or '0'
local found = { w }
if ARGV[1] ~= '' and w ~= ARGV[1] then
  return found
end
for i = 2, #ARGV, 1000 do
  for _, value in ipairs(redis.call('HMGET', key, unpack(ARGV, i, math.min(i + 999, #ARGV)))) do
    found[#found + 1] = value
  end
end
return found
