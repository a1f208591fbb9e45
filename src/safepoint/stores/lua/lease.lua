-- The lease and the server's time.
local f = redis.call('HMGET', key, 't:id', 'f:fence', 'f:token', 'f:state', 'f:until', 'f:gone', 'f:process', 'f:holder',
  'f:at', 'f:presumed')
f[11] = text(now())
return f
