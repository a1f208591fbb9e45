-- Branches: the lists that name them, then head and line of each. ARGV: a space and the field that names its branches; for all, ''
-- as the field.
local names = ARGV[2] == '' and rolls() or get(ARGV[2]) or ''
local found = { names }
for space, name in string.gmatch(names, '([^%z]*)%z([^%z]*)%z') do
  if ARGV[2] == '' or space == ARGV[1] then
    local at = space .. '\0' .. name
    local f = redis.call('HMGET', key, 'b:' .. at, 'l:' .. at)
    found[#found + 1] = f[1]
    found[#found + 1] = f[2]
  end
end
return found
