-- Set or take the mark that keeps a checkpoint. KEYS: task, floor. ARGV: seq, space, 1 or 0, ttl.
local field = 'h:' .. ARGV[1]
local value = redis.call('HGET', key, field)
if not value then return 0 end
local whole, _, _, _, _, space = pcall(cmsgpack.unpack_limit, value, 4, 3)
if not whole or space ~= ARGV[2] then return 0 end
local mark = ARGV[3] == '1' and '\195' or '\194'
if string.sub(value, 4, 4) ~= mark then
  redis.call('HSET', key, field, string.sub(value, 1, 3) .. mark .. string.sub(value, 5))
  redis.call('HINCRBY', key, 'w', 1)
end
touch(ARGV[4])
return 1
