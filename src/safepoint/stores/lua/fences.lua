-- The highest fence that a deleted task had, whatever its name: ARGV is another one.
if tonumber(ARGV[1]) > tonumber(redis.call('GET', key) or '0') then
  redis.call('PERSIST', key) -- takes no memory, and comes first: see without_memory
  redis.call('SET', key, ARGV[1])
end
return 1
