-- Index of tasks: a task is about to be created.
redis.call('HSET', key, ARGV[1], redis.call('TIME')[1])
return 1
