-- The row of a task, and of its current branch: line, head and the head's header.
local f = redis.call('HMGET', key, 't:id', 't:status', 't:branch', 't:agent', 't:input', 't:reason', 't:raised', 't:parent',
  't:attempts', 't:created', 't:updated', 'n', 'count', 'open', 'asks')
if not f[1] then
  return {}
end
local at = '\0' .. (f[3] or '')
local head, line = unpack(redis.call('HMGET', key, 'b:' .. at, 'l:' .. at))
f[16], f[17] = head, line
if head then
  local good, value = pcall(cmsgpack.unpack, head)
  f[18] = good and type(value) == 'table' and type(value[1]) == 'number' and get('h:' .. text(value[1]))
end
return f
