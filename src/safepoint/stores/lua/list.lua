-- Rows by falling number. ARGV: kind of the blocks (k, g, j), prefix of the rows, which of the numbers counts them (1 to 3), only
-- below this number (or ''), how many at most, line and least step (or ''), the write counter that the task must still have (or
-- ''), prefix of what is wanted beside each row (or ''), bytes after which it is enough.
-- Answers: the write counter, below which number to go on (0: nowhere), then number and row, and what is beside it ('': nothing).
local kind, prefix, which, below, limit, line, step, same, beside, enough = unpack(ARGV, 1, 10)
limit = tonumber(limit)
local w, numbers = unpack(redis.call('HMGET', key, 'w', 'n'))
w = w or '0'
if same ~= '' and w ~= same then
  return { w, -1 }
end
local last = {}
for number in string.gmatch(numbers or '0 0 0 0 0', '%d+') do
  last[#last + 1] = tonumber(number)
end
local next_ = last[tonumber(which)] + 1
if below ~= '' and tonumber(below) < next_ then
  next_ = tonumber(below)
end
local found, rows, fields, bytes = { w, 0 }, 0, {}, 0
enough = limit < 2 ^ 53 and tonumber(enough) or 2 ^ 53 -- who asks for all at once gets it
local most = beside == '' and 500 or 20
line, step = tonumber(line), tonumber(step)

local function fetch()
  if #fields == 0 then
    return
  end
  local values = redis.call('HMGET', key, unpack(fields))
  for j, value in ipairs(values) do
    local fits = value
    if value and (line or step) then
      local good, _, _, its_line, its_step = pcall(cmsgpack.unpack_limit, value, 3, 3)
      -- One that cannot be told is shown: that it is damaged, the reader sees.
      fits = not good or ((not line or its_line == line) and (not step or type(its_step) ~= 'number' or its_step >= step))
    end
    if fits then
      local no = string.sub(fields[j], #prefix + 1)
      local other = beside ~= '' and get(beside .. no) or ''
      found[#found + 1], found[#found + 2], found[#found + 3] = no, value, other
      rows, bytes = rows + 1, bytes + #value + #other
    end
  end
  fields = {}
end

local at, looked = math.floor((next_ - 1) / 50), 0
while at >= 0 do
  local names = {}
  for b = at, math.max(0, at - 199), -1 do
    names[#names + 1] = kind .. ':' .. b
  end
  local blocks = redis.call('HMGET', key, unpack(names))
  for j, bits in ipairs(blocks) do
    local b = at - j + 1
    bits = tonumber(bits or '0')
    if bits > 0 then
      for i = 49, 0, -1 do
        local power = 2 ^ i
        if bits >= power then
          bits = bits - power
          local number = b * 50 + i
          if number < next_ then
            fields[#fields + 1] = prefix .. text(number)
            next_ = number
            -- Not more at a time than can still be wanted.
            if #fields >= most or rows + #fields >= limit then
              fetch()
              if rows >= limit or bytes > enough then
                found[2] = next_
                return found
              end
            end
          end
        end
      end
    end
  end
  looked = looked + #names
  at = at - #names
  if looked >= 4000 and at >= 0 and limit < 2 ^ 53 then -- who asks for all at once gets it
    fetch()
    found[2] = (at + 1) * 50
    return found
  end
end
fetch()
return found
