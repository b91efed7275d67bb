-- The queue of the reward service in Redis, as one script, so that each change of a job is atomic.
--
-- KEYS[1], P below, is the prefix of every key; ARGV[1] is the name of the operation, and its arguments follow.
--   P:job:ID           hash: the fields of a job
--   P:key:SHA256       the id of the job with that content; equal jobs share its result while its revision is served
--   P:classes:REWARD   sorted set of the priorities of jobs that wait or run; each has a stream
--   P:queue:REWARD:N   the stream: undelivered entries are jobs that wait, pending ones run
--   P:waiting          hash: items and bytes that wait, of all rewards; jobs and bytes by reward
--   P:taken:TOKEN      the jobs that one `take` returned, for a retry after a lost response
--   P:pace:MINUTE      items done in that minute
--   P:record:NAME      a protocol's record of a request
--   P:hosts, P:beats   the health of each process's workers, and when it expires
-- A job that is queued again has its priority plus a half, so that it comes before others.
-- Channels: P:come carries the name of a reward that has a new job, P:over the id of a finished job.

local P, operation = KEYS[1], ARGV[1]
local GROUP = 'workers'
local FIELDS = {'state', 'reward', 'stream', 'entry', 'items', 'bytes', 'cost', 'priority', 'attempts', 'deadline',
  'key', 'asked', 'shared'}

local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
local minute = math.floor(now / 60)

local function job_key(id) return P .. ':job:' .. id end

local function read(id)
  local values = redis.call('HMGET', job_key(id), unpack(FIELDS))
  local job = {id = id}
  for n, name in ipairs(FIELDS) do job[name] = values[n] end
  return job
end

local function is_over(job) return job.state ~= 'queued' and job.state ~= 'running' end

-- Return whether an equal job, of a reward that is served in these revisions, can share the result of `job`.
local function is_shared(job, revisions)
  if not is_over(job) then return true end
  for revision in string.gmatch(revisions, '%S+') do
    if revision == job.shared then return true end
  end
  return false
end

local function count(job, sign)
  redis.call('HINCRBY', P .. ':waiting', 'items', sign * job.items)
  redis.call('HINCRBY', P .. ':waiting', 'bytes', sign * job.bytes)
  redis.call('HINCRBY', P .. ':waiting', 'jobs:' .. job.reward, sign)
  redis.call('HINCRBY', P .. ':waiting', 'bytes:' .. job.reward, sign * job.bytes)
end

local function enqueue(job, class)
  local stream = P .. ':queue:' .. job.reward .. ':' .. class
  if redis.call('EXISTS', stream) == 0 then redis.call('XGROUP', 'CREATE', stream, GROUP, '0', 'MKSTREAM') end
  redis.call('ZADD', P .. ':classes:' .. job.reward, class, class)
  local entry = redis.call('XADD', stream, '*', 'job', job.id)
  redis.call('HSET', job_key(job.id), 'state', 'queued', 'stream', stream, 'entry', entry)
  count(job, 1)
  redis.call('PUBLISH', P .. ':come', job.reward)
end

-- Remove a job from its stream. Ending or returning a job begins with it: at its limit of memory Redis refuses a script
-- whose first write takes memory, and lets one finish that began with another.
local function remove(job)
  redis.call('XACK', job.stream, GROUP, job.entry)
  redis.call('XDEL', job.stream, job.entry)
  if redis.call('XLEN', job.stream) == 0 then
    redis.call('DEL', job.stream)
    local class = string.sub(job.stream, #(P .. ':queue:' .. job.reward .. ':') + 1)
    redis.call('ZREM', P .. ':classes:' .. job.reward, class)
  end
end

local function close(job, ttl, state, ...)
  remove(job)
  if job.state == 'queued' then count(job, -1) end
  redis.call('DEL', job_key(job.id))  -- only the result is kept
  redis.call('HSET', job_key(job.id), 'state', state, ...)
  redis.call('PEXPIRE', job_key(job.id), ttl)
  local key = P .. ':key:' .. job.key
  if redis.call('GET', key) == job.id then
    if state == 'done' then redis.call('PEXPIRE', key, ttl) else redis.call('DEL', key) end
  end
  redis.call('PUBLISH', P .. ':over', job.id)
end

local function give_back(job, blame, most, again, ttl)
  if blame ~= '' then job.attempts = job.attempts + 1 end
  if tonumber(job.attempts) >= tonumber(most) then
    close(job, ttl, 'failed', 'error', blame .. ', ' .. again)
  else
    remove(job)
    redis.call('HSET', job_key(job.id), 'attempts', job.attempts)
    enqueue(job, tostring(job.priority + 0.5))
  end
end

-- Deliver the next jobs within the budget to `consumer`, and return the id and the entry of each.
local function due(reward, budget, consumer, ttl, expired)
  local taken, total = {}, 0
  for _, class in ipairs(redis.call('ZREVRANGE', P .. ':classes:' .. reward, 0, -1)) do
    local stream = P .. ':queue:' .. reward .. ':' .. class
    local group = redis.call('XINFO', 'GROUPS', stream)[1]
    local last
    for n = 1, #group, 2 do if group[n] == 'last-delivered-id' then last = group[n + 1] end end
    while true do
      local next = redis.call('XRANGE', stream, '(' .. last, '+', 'COUNT', 1)[1]
      if not next then break end
      local job = read(next[2][2])
      local alone = tonumber(job.attempts) > 0
      if #taken > 0 and (total + job.cost > budget or alone) then return taken end
      redis.call('XREADGROUP', 'GROUP', GROUP, consumer, 'COUNT', 1, 'STREAMS', stream, '>')
      last = next[1]
      if job.deadline ~= '' and tonumber(job.deadline) < now then
        close(job, ttl, 'failed', 'error', expired)
      else
        count(job, -1)
        redis.call('HSET', job_key(job.id), 'state', 'running')
        total = total + job.cost
        taken[#taken + 1] = {job.id, job.entry}
        if alone then return taken end
      end
    end
  end
  return taken
end

local operations = {}

function operations.put(id, key, reward, packed, items, cost, priority, remaining, max_items, max_bytes, ttl,
    revisions, prefixes, client, request, wanted, trace)
  if redis.call('EXISTS', job_key(id)) == 1 then return {1, id} end  -- a retry after a lost response
  local deadline = remaining ~= '' and string.format('%.6f', now + remaining) or ''
  local equal = redis.call('GET', P .. ':key:' .. key)
  local job = equal and redis.call('EXISTS', job_key(equal)) == 1 and read(equal)
  if job and is_shared(job, revisions) then
    if is_over(job) then  -- its result is kept for another ttl
      redis.call('PEXPIRE', job_key(equal), ttl)
      redis.call('PEXPIRE', P .. ':key:' .. key, ttl)
    else
      redis.call('HINCRBY', job_key(equal), 'asked', 1)
    end
    local ends = job.state == 'queued' and job.deadline ~= ''
    if ends and (deadline == '' or tonumber(deadline) > tonumber(job.deadline)) then
      redis.call('HSET', job_key(equal), 'deadline', deadline)
    end
    return {1, equal}
  end
  local waiting = redis.call('HMGET', P .. ':waiting', 'items', 'bytes')
  local has_items, has_bytes = tonumber(waiting[1] or 0), tonumber(waiting[2] or 0)
  if has_items + items > tonumber(max_items) or has_bytes + #packed > tonumber(max_bytes) then
    local done = redis.call('MGET', P .. ':pace:' .. minute, P .. ':pace:' .. minute - 1)
    local pace = ((done[1] or 0) + (done[2] or 0)) / (60 + now - 60 * minute)
    return {0, has_items, has_bytes, tostring(pace)}
  end
  job = {id = id, reward = reward, items = items, bytes = #packed}
  redis.call('HSET', job_key(id), 'reward', reward, 'key', key, 'packed', packed, 'items', items, 'bytes', #packed,
    'cost', cost, 'priority', priority, 'deadline', deadline, 'attempts', 0, 'asked', 1,
    'prefixes', prefixes, 'client', client, 'request', request, 'wanted', wanted, 'trace', trace, 'created', string.format('%.6f', now))
  redis.call('SET', P .. ':key:' .. key, id)
  enqueue(job, priority)
  return {1, id}
end

function operations.take(reward, budget, consumer, token, ttl, expired)
  local receipt = P .. ':taken:' .. token
  local taken = {}
  for _, pair in ipairs(redis.call('LRANGE', receipt, 0, -1)) do taken[#taken + 1] = cjson.decode(pair) end
  if #taken == 0 then
    taken = due(reward, tonumber(budget), consumer, ttl, expired)
    for _, pair in ipairs(taken) do redis.call('RPUSH', receipt, cjson.encode(pair)) end
    redis.call('EXPIRE', receipt, 60)
  end
  local jobs = {}
  for _, pair in ipairs(taken) do
    local job = redis.call('HMGET', job_key(pair[1]),
      'stream', 'entry', 'packed', 'cost', 'priority', 'attempts', 'created', 'prefixes', 'client', 'request', 'wanted', 'trace')
    if job[2] == pair[2] then jobs[#jobs + 1] = {pair[1], unpack(job)} end
  end
  return jobs
end

-- A result counts even where the job was given to another process meanwhile: it is the same result.
-- `shared` is the revision for which equal jobs share it; '' for a result with errors, which may be transient.
function operations.finish(id, outcomes, seconds, revision, shared, ttl)
  local job = read(id)
  if is_over(job) then return 0 end
  close(job, ttl, 'done', 'outcomes', outcomes, 'seconds', seconds, 'revision', revision, 'shared', shared)
  redis.call('INCRBY', P .. ':pace:' .. minute, job.items)
  redis.call('EXPIRE', P .. ':pace:' .. minute, 180)
  return 1
end

function operations.fail(id, entry, error, ttl)
  local job = read(id)
  if is_over(job) or job.entry ~= entry then return 0 end
  close(job, ttl, 'failed', 'error', error)
  return 1
end

function operations.give_back(id, entry, blame, most, again, ttl)
  local job = read(id)
  if is_over(job) or job.entry ~= entry then return 0 end
  give_back(job, blame, most, again, ttl)
  return 1
end

-- Renew the claim of a consumer on a job. A job that was given to another consumer has another entry.
function operations.renew(consumer, stream, entry)
  if redis.call('EXISTS', stream) == 1 then redis.call('XCLAIM', stream, GROUP, consumer, 0, entry, 'JUSTID') end
end

-- Queue again the jobs of consumers that were silent for so many milliseconds, and return their number.
function operations.reclaim(reward, consumer, silence, blame, most, again, ttl)
  local claimed = 0
  for _, class in ipairs(redis.call('ZREVRANGE', P .. ':classes:' .. reward, 0, -1)) do
    local stream = P .. ':queue:' .. reward .. ':' .. class
    local entries = redis.call('XAUTOCLAIM', stream, GROUP, consumer, silence, '0-0', 'COUNT', 100, 'JUSTID')[2]
    for _, entry in ipairs(entries) do
      local id = redis.call('XRANGE', stream, entry, entry)[1][2][2]
      give_back(read(id), blame, most, again, ttl)
      claimed = claimed + 1
    end
  end
  return claimed
end

function operations.cancel(id, cancelled, ttl)
  local job = read(id)
  if job.state ~= 'queued' then return 0 end
  if redis.call('HINCRBY', job_key(id), 'asked', -1) > 0 then return 0 end
  close(job, ttl, 'cancelled', 'error', cancelled)
  return 1
end

function operations.keep(name, record, ttl) redis.call('SET', P .. ':record:' .. name, record, 'PX', ttl) end

function operations.kept(name) return redis.call('GET', P .. ':record:' .. name) end

function operations.announce(process, health, ttl)
  redis.call('HSET', P .. ':hosts', process, health)
  redis.call('ZADD', P .. ':beats', now + ttl, process)
end

function operations.announced()
  for _, process in ipairs(redis.call('ZRANGEBYSCORE', P .. ':beats', '-inf', now)) do
    redis.call('HDEL', P .. ':hosts', process)
    redis.call('ZREM', P .. ':beats', process)
  end
  return redis.call('HGETALL', P .. ':hosts')
end

return operations[operation](unpack(ARGV, 2))
