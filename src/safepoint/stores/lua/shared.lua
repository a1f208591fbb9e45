-- What the scripts of a task share; it stands before each of them. How a task lies in its hash: stores/redis/layout.py.
-- A script checks all that it can refuse before its first write: what was written before an error stays.
local key, floor = KEYS[1], KEYS[2]

local function get(field)
  return redis.call('HGET', key, field)
end

-- HSET of pairs ARGV[first..last]; a stamp is added to each value. Not more than 500 pairs a command.
local function put(first, last, stamp)
  for i = first, last, 1000 do
    local pairs_ = {}
    for j = i, math.min(i + 999, last), 2 do
      pairs_[#pairs_ + 1] = ARGV[j]
      pairs_[#pairs_ + 1] = stamp and ARGV[j + 1] .. stamp or ARGV[j + 1]
    end
    redis.call('HSET', key, unpack(pairs_))
  end
end

local function now()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000000 + tonumber(time[2])
end

local function text(number)
  return string.format('%.0f', number)
end

-- Which server this is. After a restart or a failover it is another one, which may have gone back: what was seen on the last
-- one need never have been there, and writes are counted up to the same numbers a second time.
local function server()
  return string.match(redis.call('INFO', 'server'), 'run_id:(%x+)') or ''
end

-- The write counter, as it is after this write.
local function next_write()
  return text(tonumber(get('w') or '0') + 1)
end

-- Whether somebody holds the task, other than the one whose token is that of a process proven dead: nil, or an answer
-- that says who.
local function live(dead, answer, n)
  local f = redis.call('HMGET', key, 'f:state', 'f:gone', 'f:until', 'f:token', 'f:process', 'f:holder', 'f:at')
  if f[1] ~= 'held' or f[2] == '1' or f[4] == dead or tonumber(f[3]) <= now() then
    return nil
  end
  return { answer, n, f[4], f[5], f[6], f[7] }
end

-- What frees memory or ends a hold must be done when there is no memory left, too. The server asks for it before the first
-- command that writes; this one takes none, and does nothing, as no field has an empty name.
local function without_memory()
  redis.call('HDEL', key, '')
end

-- The end of each write: when the task expires. Not while anything of it is open.
local function expire(ttl, held, open_, asks)
  if ttl == '0' then
    redis.call('PERSIST', key)
  elseif held or open_ ~= '' or string.find(asks, ';o', 1, true) then
    redis.call('PERSIST', key)
    redis.call('PERSIST', floor)
  else
    redis.call('EXPIRE', key, ttl)
    -- A receiver that refuses stale fences knows the task for longer than it is here. Who held it may have had no ttl, and set no
    -- floor. Nothing here may fail, as all is written by now.
    local fence = tonumber(get('f:fence')) or 0
    if fence > (tonumber(redis.pcall('GET', floor)) or 0) then
      redis.call('SET', floor, text(fence))
    end
    redis.call('EXPIRE', floor, tonumber(ttl) + 2592000)
  end
end

local function touch(ttl)
  local f = redis.call('HMGET', key, 'f:state', 'f:gone', 'open', 'asks')
  expire(ttl, f[1] == 'held' and f[2] ~= '1', f[3] or '', f[4] or '')
end

-- Fields of a task that begins.
local function begin(id, at)
  redis.call('HSET', key, 't:id', id, 't:status', 'idle', 't:branch', 'main', 't:attempts', '0', 't:created', at,
    'n', '0 0 0 0 0', 'count', '0')
end

-- The names of the branches of all spaces.
local function rolls()
  local fields = { 'branches' }
  for k = 0, 127 do
    fields[k + 2] = 'd:' .. k
  end
  local found = redis.call('HMGET', key, unpack(fields))
  for k = 1, #fields do
    found[k] = found[k] or ''
  end
  return table.concat(found)
end

-- The list of what was recorded against a checkpoint (space, NUL, id): its entries, and the fields that they stand in; nil for none,
-- false for one that is damaged.
local function listed(place)
  local top = get('v:' .. place)
  if not top then
    return nil
  end
  local count, rest = string.match(top, '^(%d+);(.*)$')
  if not count then
    return false
  end
  local all, fields = {}, { 'v:' .. place }
  for k = 0, tonumber(count) - 1 do
    fields[#fields + 1] = fields[1] .. '\0' .. k
    all[#all + 1] = get(fields[#fields]) or ''
  end
  all[#all + 1] = rest
  return table.concat(all), fields
end
