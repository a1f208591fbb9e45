-- The checkpoints after a number, all of them in one moment, if they are few. ARGV: number, how many numbers are few.
-- Answers nothing if they are more; else flat: number, root with refs ('' if it is gone while its header is there).
local last = tonumber(string.match(get('n') or '0', '^%d+'))
if last - tonumber(ARGV[1]) > tonumber(ARGV[2]) then
  return false
end
local found = {}
for seq = tonumber(ARGV[1]) + 1, last do
  local value = get('r:' .. text(seq))
  if value or redis.call('HEXISTS', key, 'h:' .. text(seq)) == 1 then
    found[#found + 1], found[#found + 2] = text(seq), value or ''
  end
end
return found
