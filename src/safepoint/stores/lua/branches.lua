-- All branches: the list of their names, then head and line of each.
local names = get('branches') or ''
local found = { names }
for space, name in string.gmatch(names, '([^%z]*)%z([^%z]*)%z') do
  local at = space .. '\0' .. name
  local f = redis.call('HMGET', key, 'b:' .. at, 'l:' .. at)
  found[#found + 1] = f[1]
  found[#found + 1] = f[2]
end
return found
