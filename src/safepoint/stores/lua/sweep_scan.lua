-- Some of what reaches objects, and of the objects what they reach: no more than takes a few milliseconds.
-- KEYS: task, floor. ARGV: cursor, bytes after which it is enough.
-- Answers the next cursor, then flat: objects (name, refs, length), checkpoints (seq, refs), calls (no, row), headers (seq),
-- and what of these cannot be read.
local cursor, bytes, count = ARGV[1], 0, 0
local objects, roots, calls, headers, bad = {}, {}, {}, {}, {}
local function refs_in(value)
  if #value < 4 then return nil end
  local a, b, c, d = string.byte(value, 1, 4)
  local length = ((a * 256 + b) * 256 + c) * 256 + d
  return length + 4 <= #value and string.sub(value, 5, 4 + length) or nil
end
local page = 2
repeat
  local before = bytes
  local found = redis.call('HSCAN', key, cursor, 'COUNT', page)
  cursor = found[1]
  for i = 1, #found[2], 2 do
    local field, value = found[2][i], found[2][i + 1]
    local kind, name = string.sub(field, 1, 2), string.sub(field, 3)
    bytes, count = bytes + #value, count + 1
    if kind == 'o:' then
      -- A damaged one is reached or not like any other: what it reached is not known, so nothing may be called garbage.
      local refs = refs_in(value)
      if refs then
        objects[#objects + 1], objects[#objects + 2], objects[#objects + 3] = name, refs, #value
      else
        bad[#bad + 1] = field
      end
    elseif kind == 'r:' then
      local refs = refs_in(value)
      if refs then roots[#roots + 1], roots[#roots + 2] = name, refs else bad[#bad + 1] = field end
    elseif kind == 'h:' then
      headers[#headers + 1] = name
    elseif kind == 'c:' then
      calls[#calls + 1], calls[#calls + 2] = name, value
    end
  end
  -- Values come here whole, so few at a time where they are large.
  page = bytes - before > 65536 and 2 or math.min(page * 2, 32)
until cursor == '0' or bytes > tonumber(ARGV[2]) or count >= 500
return {cursor, objects, roots, calls, headers, bad}
