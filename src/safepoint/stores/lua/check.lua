-- Whether a script can write here at all: something that is gone in a minute, if nobody removes it before. ARGV: a word.
redis.call('HSET', key, 'word', ARGV[1])
redis.call('EXPIRE', key, 60)
return 1
