-- Some of the fields of a task, with the lengths of their values. ARGV: cursor, bytes after which it is enough.
-- Answers which server this is, as a cursor means nothing to another, the next cursor, and those.
local cursor, bytes, found, count = ARGV[1], 0, {}, 2
repeat
  local before = bytes
  local page = redis.call('HSCAN', key, cursor, 'COUNT', count)
  cursor = page[1]
  for i = 1, #page[2], 2 do
    found[#found + 1] = page[2][i]
    found[#found + 1] = #page[2][i + 1]
    bytes = bytes + #page[2][i + 1]
  end
  -- Values come here whole, so few at a time where they are large.
  count = bytes - before > 65536 and 2 or math.min(count * 2, 32)
until cursor == '0' or bytes > tonumber(ARGV[2]) or #found >= 1000
return { server(), cursor, found }
