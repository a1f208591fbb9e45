-- What a removal stands on, as of one moment. Stages that have expired are no more then, so that whoever commits one later is told.
-- KEYS: task, floor. ARGV: a token, which the task has from now on, until eight others have come. Where it is missing later, this is
-- another task, or the server has gone back to before this moment, as after a failover: `w` may then come a second time.
-- Answers nothing if there is no task.
local moment = now() / 1000000
local stages = redis.call('HGET', key, 'stages') or ''
local live, names, expired = {}, {}, {}
for entry, stage, batches, till in string.gmatch(stages, '(;([^;/]+)/(%d+)/(%d+))') do
  if tonumber(till) < moment then
    for k = 1, tonumber(batches) do expired[#expired + 1] = 's:' .. stage .. '/' .. k end
  else
    live[#live + 1] = entry
    for k = 1, tonumber(batches) do names[#names + 1] = redis.call('HGET', key, 's:' .. stage .. '/' .. k) or '' end
  end
end
if redis.call('HEXISTS', key, 't:id') == 0 then
  -- A first save on its way, which expires by itself; or a task that has lost its name.
  local left = redis.call('HMGET', key, 'n', 'count', 'branches', 't:created')
  return (left[1] or left[2] or left[3] or left[4]) and {'damaged'} or false
end
without_memory()
if table.concat(live) ~= stages then
  for i = 1, #expired, 1000 do redis.call('HDEL', key, unpack(expired, i, math.min(i + 999, #expired))) end
  if #live == 0 then redis.call('HDEL', key, 'stages') else redis.call('HSET', key, 'stages', table.concat(live)) end
  redis.call('HINCRBY', key, 'w', 1)
end
local sweeps = get('sweeps') or ''
if #sweeps >= 8 * (#ARGV[1] + 1) then sweeps = string.sub(sweeps, #ARGV[1] + 2) end
redis.call('HSET', key, 'sweeps', sweeps .. ';' .. ARGV[1])
local at = redis.call(
  'HMGET', key, 'w', 't:created', 'born', 'n', 't:branch', 'f:fence', 'f:token', 'f:state', 'f:gone', 'f:process')
for i = 1, #at do at[i] = at[i] or '' end
table.insert(at, 5, rolls())
at[#at + 1] = table.concat(names)
return at
