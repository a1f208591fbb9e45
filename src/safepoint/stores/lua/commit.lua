-- One commit: compared in the order of Store.commit, then written. See stores/redis/commit.py for the arguments.
local ttl, id_field, announced, fence, token, anyway, dead = unpack(ARGV, 1, 7)
local recent, recorded, branch, expect, at_head, on, on_field, on_id = unpack(ARGV, 8, 15)
local stage, batches, expected, following, seq, line_of, roll, name, at, id = unpack(ARGV, 16, 25)
local checks, moves, opens, asks = tonumber(ARGV[26]), tonumber(ARGV[27]), tonumber(ARGV[28]), tonumber(ARGV[29])
local counts, lists, objects, patched = tonumber(ARGV[30]), tonumber(ARGV[31]), tonumber(ARGV[32]), ARGV[33]
local first = 34

-- All that a commit always looks at in one command, since each costs a microsecond: then what it counts up.
local look = { 't:id', 'n', 't:branch', 'w', 'open', 'asks', 'f:state', 'f:gone', 'f:fence', 'f:token' }
local fixed = #look
local rows = first + 3 * checks + 7 * moves + 2 * (opens + asks)
for j = rows, rows + 2 * counts - 1, 2 do
  look[#look + 1] = ARGV[j]
end
local counted = #look
if seq ~= '' then
  look[#look + 1] = id_field
  look[#look + 1] = branch
end
local had = redis.call('HMGET', key, unpack(look))
local task, current, state, gone = had[1], had[3] or 'main', had[7], had[8]
local n, there, head = had[2] or '0 0 0 0 0', had[counted + 1], had[counted + 2] or ''

if task and there then
  return { 'existed', n, there, get('h:' .. there), head }
end
if not task and (seq == '' and lists == 0 or fence ~= '') then
  return { 'absent', n }
end
if fence ~= '' then
  if state ~= 'held' or had[9] ~= fence or had[10] ~= token then
    return { 'lost', n, state == 'held' and had[9] or '', had[10] or '' }
  end
elseif anyway == '0' and state == 'held' and gone ~= '1' then
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
if seq ~= '' and head ~= expect then
  return { 'moved', n, head }
end
if at_head == '1' then
  local stands = get('b:\0' .. current) or ''
  if stands ~= on then
    return { 'away', n, current, stands }
  end
end
if on_field ~= '' then
  local base = get(on_field)
  if not base or string.sub(base, 5, 4 + #on_id) ~= on_id then
    return { 'gone', n }
  end
end
local i = first
for _ = 1, checks do
  local row = get(ARGV[i])
  -- Numbers and versions come a second time after a failover; what is told apart by ARGV[i + 2] does not.
  if not row or string.sub(row, 4, 3 + #ARGV[i + 1]) ~= ARGV[i + 1] or not string.find(row, ARGV[i + 2], 1, true) then
    return { 'changed', n, ARGV[i], row or '' }
  end
  i = i + 3
end
local set, dropped, fields, thinned = {}, {}, {}, {}
for k = 0, moves - 1 do
  local space, at_name, from, to, base_field, base_id, its_roll = unpack(ARGV, i, i + 6)
  local place = space .. '\0' .. at_name
  local stands = get('b:' .. place) or ''
  if stands ~= from then
    return { 'astray', n, k, stands }
  end
  if to == '' then
    dropped[place] = true
    thinned[its_roll] = ''
    fields[#fields + 1], fields[#fields + 2] = 'b:' .. place, 'l:' .. place
  else
    local base = get(base_field) or ''
    local whole, _, _, _, _, its_space = pcall(cmsgpack.unpack_limit, base, 4, 3)
    if string.sub(base, 5, 4 + #base_id) ~= base_id or not whole or its_space ~= space then
      return { 'nowhere', n, k }
    end
    set[#set + 1], set[#set + 2] = 'b:' .. place, to
  end
  i = i + 7
end
for its_roll in pairs(thinned) do
  thinned[its_roll] = string.gsub(get(its_roll) or '', '([^%z]*%z[^%z]*)%z', function(place)
    return dropped[place] and '' or nil
  end)
end
local then_current = patched ~= '' and patched or current
if dropped['\0' .. then_current] and thinned['branches'] ~= '' then
  return { 'others', n, then_current }
end
if not task and announced == '0' then
  return { 'announce', n }
end
local stages = stage ~= '' and get('stages') or ''
if stage ~= '' and not string.find(stages, ';' .. stage .. '/' .. batches .. '/', 1, true) then
  return { 'unstaged', n }
end
if expected == '' then
  following = n -- it draws none
elseif n ~= expected then
  return { 'numbers', n }
end

-- From here on nothing is refused.
local w = text(tonumber(had[4] or '0') + 1)
if not task then
  begin(id, at)
end
local function flush()
  for j = 1, #set, 1000 do
    redis.call('HSET', key, unpack(set, j, math.min(j + 999, #set)))
  end
  set = {}
end
set[#set + 1], set[#set + 2], set[#set + 3], set[#set + 4] = 'n', following, 'w', w
set[#set + 1], set[#set + 2] = 't:updated', at
local open_ = { had[5] or '', had[6] or '' }
for kind, many in ipairs({ opens, asks }) do
  for _ = 1, many do
    open_[kind] = string.gsub(open_[kind], ';%a' .. ARGV[i] .. '/%d+/%d+', '') .. ARGV[i + 1]
    i = i + 2
  end
  if open_[kind] ~= (had[4 + kind] or '') then
    set[#set + 1] = kind == 1 and 'open' or 'asks'
    set[#set + 1] = open_[kind]
  end
end
for j = fixed + 1, counted do
  set[#set + 1] = ARGV[i]
  set[#set + 1] = text(tonumber(had[j] or '0') + tonumber(ARGV[i + 1]))
  i = i + 2
end
if line_of ~= '' then
  local names = thinned[roll] or get(roll) or ''
  -- A task's first branch is its current one. (A patch comes later.)
  if roll == 'branches' and names == '' then
    set[#set + 1] = 't:branch'
    set[#set + 1] = name
  end
  thinned[roll] = names .. line_of
end
for its_roll, names in pairs(thinned) do
  if names ~= '' then
    set[#set + 1], set[#set + 2] = its_roll, names
  else
    fields[#fields + 1] = its_roll
  end
end
if recent ~= '' then
  local count = tonumber(get('q') or '0')
  set[#set + 1] = 'q:' .. count % 16
  set[#set + 1] = recorded
  set[#set + 1] = 'q'
  set[#set + 1] = text(count + 1)
end
local left_out = 0
for _ = 1, lists do
  local shelf, place, many = unpack(ARGV, i, i + 2)
  i = i + 3
  local top = get('v:' .. place)
  local all = { top or '0;' }
  for _ = 1, tonumber(many) do
    local entry, value = ARGV[i], ARGV[i + 1]
    local field = 'w:' .. place .. '\0' .. string.sub(entry, 1, -2)
    local there = redis.call('HEXISTS', key, field) == 1
    if there and string.sub(entry, 1, 1) ~= '-' then
      left_out = left_out + #value
    else
      set[#set + 1], set[#set + 2] = field, value
    end
    if not there then
      all[#all + 1] = entry
    end
    i = i + 2
  end
  if #all > 1 then
    local longer = table.concat(all)
    local page = #longer > 3000 and string.match(longer, '^(%d+);')
    if page then
      set[#set + 1], set[#set + 2] = 'v:' .. place .. '\0' .. page, string.sub(longer, #page + 2)
      longer = text(tonumber(page) + 1) .. ';'
    end
    set[#set + 1], set[#set + 2] = 'v:' .. place, longer
  end
  if not top then
    redis.call('HSET', key, shelf, (get(shelf) or '') .. place .. '\0')
  end
end
local body, stamp = i + 2 * objects, string.format('%012x', tonumber(w))
for j = i, #ARGV, 2 do
  if #set >= 1000 then
    flush()
  end
  set[#set + 1] = ARGV[j]
  set[#set + 1] = j < body and ARGV[j + 1] .. stamp or ARGV[j + 1]
end
flush()
for j = 1, #fields, 1000 do
  redis.call('HDEL', key, unpack(fields, j, math.min(j + 999, #fields)))
end
if stage ~= '' then
  redis.call('HSET', key, 'stages', (string.gsub(stages, ';' .. stage .. '/%d+/%d+', '')))
  for k = 1, tonumber(batches) do
    redis.call('HDEL', key, 's:' .. stage .. '/' .. k)
  end
end
expire(ttl, state == 'held' and gone ~= '1', open_[1], open_[2])
return { 'done', following, left_out }
