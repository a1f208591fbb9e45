-- Some of the objects of a task, with what they refer to: no more than takes a millisecond or two.
-- KEYS: task, floor. ARGV: cursor, bytes after which it is enough.
-- Answers which server this is, as a cursor means nothing to another, the next cursor, then flat: name, refs and length of each
-- object; the fields of those that cannot be read; and those of checkpoints, calls and writes, so that none is missed that no mark tells of.
local cursor, bytes, count = ARGV[1], 0, 0
local objects, bad, rows = {}, {}, {}
local page = 2
repeat
  local before = bytes
  local found = redis.call('HSCAN', key, cursor, 'COUNT', page)
  cursor = found[1]
  for i = 1, #found[2], 2 do
    local field, value = found[2][i], found[2][i + 1]
    bytes, count = bytes + #value, count + 1
    if string.sub(field, 1, 2) == 'o:' then
      local length = #value
      if length >= 4 then
        local a, b, c, d = string.byte(value, 1, 4)
        length = ((a * 256 + b) * 256 + c) * 256 + d
      end
      if length + 4 <= #value then
        objects[#objects + 1], objects[#objects + 2] = string.sub(field, 3), string.sub(value, 5, 4 + length)
        objects[#objects + 1] = #value
      else
        bad[#bad + 1] = field
      end
    elseif string.find(field, '^[hcw]:') then
      rows[#rows + 1] = field
    end
  end
  -- Values come here whole, so few at a time where they are large.
  page = bytes - before > 65536 and 2 or math.min(page * 2, 32)
until cursor == '0' or bytes > tonumber(ARGV[2]) or count >= 500
return {server(), cursor, objects, bad, rows}
