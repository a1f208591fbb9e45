-- Index of tasks: ARGV are names whose tasks were seen to be absent. They are removed, but for those that were announced
-- less than an hour ago, as somebody may be about to create them.
local oldest = tonumber(redis.call('TIME')[1]) - 3600
local gone = 0
for _, id in ipairs(ARGV) do
  local at = redis.call('HGET', key, id)
  if at and tonumber(at) < oldest then
    gone = gone + redis.call('HDEL', key, id)
  end
end
return gone
