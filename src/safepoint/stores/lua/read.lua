-- One checkpoint. ARGV: which ('seq', 'id', 'branch' or 'current'), and its number, the field of the id, the branch's space and
-- name, or the space.
local seq
if ARGV[1] == 'seq' then
  seq = ARGV[2]
elseif ARGV[1] == 'id' then
  seq = get(ARGV[2])
else
  local at = ARGV[2]
  if ARGV[1] == 'current' then
    at = at .. (get('t:branch') or 'main')
  end
  local head = get('b:' .. at)
  if head then
    local _, number = cmsgpack.unpack_limit(head, 1, 1)
    seq = text(number)
  end
end
if not seq then
  return {}
end
local f = redis.call('HMGET', key, 'h:' .. seq, 'r:' .. seq)
return { seq, f[1], f[2] }
