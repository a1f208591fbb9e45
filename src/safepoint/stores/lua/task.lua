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
  local good, _, seq = pcall(cmsgpack.unpack_limit, head, 1, 1)
  f[18] = good and type(seq) == 'number' and get('h:' .. text(seq))
end
return f
