-- What adapters recorded. ARGV: how many of the rows to pass by; bytes after which it is enough; the write counter that the task must still
-- have, or ''; NUL and writer, or '' for all of them; space and NUL, or '' for all of them; how many shelves to look through; then
-- with shelves ids of checkpoints, or none for all of them, and without shelves space, NUL and id of each checkpoint.
-- Answers: the write counter, how many rows to pass by next (0: this was all, -1: another counter), then fields and rows: '' for
-- one that is named and not there.
local skip, enough, same, writer, space = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3], ARGV[4], ARGV[5]
local w = get('w') or '0'
if same ~= '' and w ~= same then
  return { w, -1 }
end
local shelves = tonumber(ARGV[6])
local lists, ids = {}, nil
for i = 7, #ARGV do
  if shelves == 0 then
    lists[#lists + 1] = ARGV[i]
  else
    ids = ids or {}
    ids[ARGV[i]] = true
  end
end
for k = 0, shelves - 1, 500 do
  local names = {}
  for j = k, math.min(k + 499, shelves - 1) do
    names[#names + 1] = 'e:' .. j
  end
  for _, named in ipairs(redis.call('HMGET', key, unpack(names))) do
    for place, id in string.gmatch(named or '', '([^%z]*%z([^%z]*))%z') do
      if string.sub(place, 1, #space) == space and (not ids or ids[id]) then
        lists[#lists + 1] = place
      end
    end
  end
end
local found, seen, bytes, fields = { w, 0 }, 0, 0, {}
local function fetch()
  if #fields == 0 then
    return
  end
  for j, value in ipairs(redis.call('HMGET', key, unpack(fields))) do
    found[#found + 1], found[#found + 2] = fields[j], value or ''
    bytes = bytes + #(value or '')
  end
  fields = {}
end
for _, place in ipairs(lists) do
  local entries = listed(place)
  if entries == false or entries == nil and shelves > 0 then
    found[#found + 1], found[#found + 2] = 'v:' .. place, ''
  end
  for entry in string.gmatch(entries or '', '([^%z]*%z[^%z]*)%z') do
    seen = seen + 1
    if seen > skip and (writer == '' or string.sub(entry, -#writer) == writer) then
      fields[#fields + 1] = 'w:' .. place .. '\0' .. entry
      if #fields >= 100 then
        fetch()
        if bytes > enough then
          found[2] = seen
          return found
        end
      end
    end
  end
end
fetch()
return found
