-- One commit: compared in the order of Store.commit, then written. See stores/redis/commit.py for the arguments.
local ttl, id_field, announced, fence, token, anyway, dead = unpack(ARGV, 1, 7)
local recent, recorded, branch, expect, at_head, on, on_field, on_id = unpack(ARGV, 8, 15)
local stage, batches, expected, following, seq, line_of, name, at, id = unpack(ARGV, 16, 24)
local checks, opens, asks, counts, objects = unpack(ARGV, 25, 29)
local first = 30

local task, numbers, current = unpack(redis.call('HMGET', key, 't:id', 'n', 't:branch'))
local n = numbers or '0 0 0 0 0'

if task and seq ~= '' then
  local there = get(id_field)
  if there then
    return { 'existed', n, there, get('h:' .. there), get(branch) or '' }
  end
end
if not task and (seq == '' or fence ~= '') then
  return { 'absent', n }
end
if fence ~= '' then
  local f = redis.call('HMGET', key, 'f:state', 'f:fence', 'f:token')
  if f[1] ~= 'held' or f[2] ~= fence or f[3] ~= token then
    return { 'lost', n, f[1] == 'held' and f[2] or '' }
  end
elseif anyway == '0' then
  local held = live(dead, 'held', n)
  if held then
    return held
  end
end
if recent ~= '' then
  local last = redis.call('HMGET', key, 'q:0', 'q:1', 'q:2', 'q:3', 'q:4', 'q:5', 'q:6', 'q:7', 'q:8', 'q:9', 'q:10', 'q:11',
    'q:12', 'q:13', 'q:14', 'q:15')
  for _, entry in ipairs(last) do
    if entry and string.sub(entry, 2, 1 + #recent) == recent then
      return { 'recent', n, entry }
    end
  end
end
if seq ~= '' then
  local head = get(branch) or ''
  if head ~= expect then
    return { 'moved', n, head }
  end
end
if at_head == '1' then
  local head = get('b:\0' .. (current or 'main')) or ''
  if head ~= on then
    return { 'away', n, current or 'main', head }
  end
end
if on_field ~= '' then
  local base = get(on_field)
  if not base or string.sub(base, 5, 4 + #on_id) ~= on_id then
    return { 'gone', n }
  end
end
local i = first
for _ = 1, tonumber(checks) do
  local row = get(ARGV[i])
  if not row or string.sub(row, 4, 3 + #ARGV[i + 1]) ~= ARGV[i + 1] then
    return { 'changed', n, ARGV[i], row or '' }
  end
  i = i + 2
end
if not task and announced == '0' then
  return { 'announce', n }
end
local stages = stage ~= '' and get('stages') or ''
if stage ~= '' and not string.find(stages, ';' .. stage .. '/' .. batches .. '/', 1, true) then
  return { 'unstaged', n }
end
if n ~= expected then
  return { 'numbers', n }
end

-- From here on nothing is refused.
local w = next_write()
if not task then
  begin(id, at)
end
redis.call('HSET', key, 'n', following, 'w', w, 't:updated', at)
for _, list in ipairs({ { 'open', opens }, { 'asks', asks } }) do
  if list[2] ~= '0' then
    local had = get(list[1]) or ''
    local has = had
    for _ = 1, tonumber(list[2]) do
      has = string.gsub(has, ';%a' .. ARGV[i] .. '/%d+/%d+', '') .. ARGV[i + 1]
      i = i + 2
    end
    if has ~= had then
      redis.call('HSET', key, list[1], has)
    end
  end
end
for _ = 1, tonumber(counts) do
  redis.call('HINCRBY', key, ARGV[i], ARGV[i + 1])
  i = i + 2
end
if line_of ~= '' then
  local branches = get('branches') or ''
  -- A task's first branch is its current one: of space '', whose entries begin with the NUL that ends it.
  if name ~= '' and string.sub(branches, 1, 1) ~= '\0' and not string.find(branches, '\0\0', 1, true) then
    redis.call('HSET', key, 't:branch', name)
  end
  redis.call('HSET', key, 'branches', branches .. line_of)
end
local body = i + 2 * tonumber(objects)
put(i, body - 1, string.format('%012x', tonumber(w)))
put(body, #ARGV)
if recent ~= '' then
  local count = tonumber(get('q') or '0')
  redis.call('HSET', key, 'q:' .. count % 16, recorded, 'q', text(count + 1))
end
if stage ~= '' then
  redis.call('HSET', key, 'stages', (string.gsub(stages, ';' .. stage .. '/%d+/%d+', '')))
  for k = 1, tonumber(batches) do
    redis.call('HDEL', key, 's:' .. stage .. '/' .. k)
  end
end
touch(ttl)
return { 'done', following }
