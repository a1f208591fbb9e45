-- The commit did not land: the objects of this stage are garbage, for the next sweep.
local stages = get('stages') or ''
local batches = string.match(stages, ';' .. ARGV[1] .. '/(%d+)/')
if batches then
  without_memory()
  redis.call('HSET', key, 'stages', (string.gsub(stages, ';' .. ARGV[1] .. '/%d+/%d+', '')))
  for k = 1, tonumber(batches) do
    redis.call('HDEL', key, 's:' .. ARGV[1] .. '/' .. k)
  end
end
return 1
