-- Some of the fields of a task, with the lengths of their values. ARGV: cursor, bytes after which it is enough.
local cursor, bytes, found = ARGV[1], 0, {}
repeat
  local page = redis.call('HSCAN', key, cursor, 'COUNT', 16)
  cursor = page[1]
  for i = 1, #page[2], 2 do
    found[#found + 1] = page[2][i]
    found[#found + 1] = #page[2][i + 1]
    bytes = bytes + #page[2][i + 1]
  end
until cursor == '0' or bytes > tonumber(ARGV[2]) or #found >= 4000
return { cursor, found }
