-- Delete checkpoints with the calls and pauses that stand on them and with what was recorded against them, after a look whether they may go still.
-- KEYS: task, floor.
-- ARGV: w, and token of that moment; the last call and pause that are known; fence of the live run that is known or '', and of one that is known to
-- be dead; the server that answered w, or '' if it is that of the token's moment; how many lines have calls that are kept, and each with
-- its step; then of each checkpoint: seq, field of its id, field that names its list of writes, block and power of its bit; how many calls, and of each: number, version, block and power; how many pauses, and the same of each.
local at = redis.call('HMGET', key, 'w', 'sweeps', 't:id', 'n', 't:branch', 'f:fence', 'f:state', 'f:gone')
if not at[3] or not string.find(at[2] or '', ';' .. ARGV[2], 1, true) then return {'another'} end

-- The first elements of a row, as far as they are no bytes, which cmsgpack does not know; or all of a short array.
local function row(field, from, count)
  local value = redis.call('HGET', key, field)
  if not value then return nil end
  local found = {pcall(cmsgpack.unpack_limit, value, count, from)}
  return found[1] and {unpack(found, 3, 2 + count)} or nil
end

local lines, next = {}, 9
for _ = 1, tonumber(ARGV[8]) do
  lines[ARGV[next]] = tonumber(ARGV[next + 1])
  next = next + 2
end

local here = server()
local keep, same = {}, (at[1] or '') == ARGV[1] and (ARGV[7] == '' or ARGV[7] == here) and '1' or '0'
if same == '0' then
  -- Something was written since: look at all that could need one of these now.
  if at[7] == 'held' and at[8] ~= '1' and at[6] ~= ARGV[5] and at[6] ~= ARGV[6] then return {'changed'} end
  local heads, own = {}, {}
  for name in string.gmatch(rolls(), '([^%z]*%z[^%z]*)%z') do
    local head, fixed = row('b:' .. name, 1, 2), row('l:' .. name, 1, 2)
    local top = head and row('h:' .. text(head[1]), 3, 7)
    if not (head and fixed and top) then return {'damaged', 'b:' .. name} end
    local current = name == '\0' .. (at[5] or '')
    heads[#heads + 1] = {text(fixed[1]), top[7], current}
    if current then own[text(fixed[1])] = true end
    keep[text(head[1])] = true
    if fixed[2] then keep[text(fixed[2])] = true end
  end
  for _, head in ipairs(heads) do
    if (head[3] or not own[head[1]]) and not (lines[head[1]] and head[2] >= lines[head[1]]) then return {'changed'} end
  end
  local _, call, pause = string.match(at[4] or '', '^(%d+) (%d+) (%d+)')
  if not call or call - ARGV[3] + pause - ARGV[4] > 500 then return {'changed'} end
  for no = ARGV[3] + 1, tonumber(call) do
    local found = row('c:' .. text(no), 3, 4)
    if found then keep[text(found[4])] = true end
  end
  for no = ARGV[4] + 1, tonumber(pause) do
    local found = row('p:' .. text(no), 3, 9)
    if found then keep[text(found[9])] = true end
  end
end

local fields, bits, shelves, seqs, calls, bytes = {}, {}, {}, {}, 0, 0
local function takes(kind, more, powers)
  -- Whether all of them are as they were; their fields come into `more`.
  local whole = true
  for _ = 1, tonumber(ARGV[next - 1]) do
    local value = redis.call('HGET', key, kind .. ARGV[next])
    local version = ARGV[next + 1]
    if value then
      whole = whole and string.sub(value, 4, 3 + #version) == version
      more[#more + 1] = kind .. ARGV[next]
      powers[#powers + 1] = {ARGV[next + 2], ARGV[next + 3]}
    end
    next = next + 4
  end
  return whole
end
while next <= #ARGV do
  local seq, id, shelf, block, power = unpack(ARGV, next, next + 4)
  local header = redis.call('HGET', key, 'h:' .. seq)
  local more, powers = {'h:' .. seq, 'r:' .. seq, id}, {{block, power}}
  next = next + 6
  local unchanged = takes('c:', more, powers)
  local of_calls = #more - 3
  next = next + 1
  unchanged = takes('p:', more, powers) and unchanged
  if header and unchanged and not keep[seq] and string.byte(header, 4) == 0xc2 then
    seqs[#seqs + 1] = seq
    calls = calls + of_calls
    for i, field in ipairs(more) do
      fields[#fields + 1] = field
      if i ~= 3 and i <= 3 + of_calls then bytes = bytes + redis.call('HSTRLEN', key, field) end
    end
    for _, bit in ipairs(powers) do bits[#bits + 1] = bit end
    -- Whatever was recorded until now, also since it was looked at.
    local place = string.sub(id, 3)
    local entries, lists = listed(place)
    if entries == false then return {'damaged', 'v:' .. place} end
    if entries then
      for entry in string.gmatch(entries, '([^%z]*%z[^%z]*)%z') do
        local field = 'w:' .. place .. '\0' .. entry
        fields[#fields + 1] = field
        bytes = bytes + redis.call('HSTRLEN', key, field)
      end
      for _, field in ipairs(lists) do fields[#fields + 1] = field end
      shelves[shelf] = shelves[shelf] or {}
      shelves[shelf][place] = true
    end
  end
end
for i = 1, #fields, 1000 do redis.call('HDEL', key, unpack(fields, i, math.min(i + 999, #fields))) end
for shelf, gone in pairs(shelves) do
  local names = string.gsub(redis.call('HGET', key, shelf) or '', '([^%z]*%z[^%z]*)%z', function(place)
    return gone[place] and '' or nil
  end)
  if names == '' then redis.call('HDEL', key, shelf) else redis.call('HSET', key, shelf, names) end
end
for _, bit in ipairs(bits) do redis.call('HINCRBY', key, bit[1], bit[2]) end
if #seqs == 0 then return {'done', same, here, at[1] or '', 0, 0} end
redis.call('HINCRBY', key, 'count', -#seqs)
return {'done', same, here, text(redis.call('HINCRBY', key, 'w', 1)), calls, bytes, unpack(seqs)}
