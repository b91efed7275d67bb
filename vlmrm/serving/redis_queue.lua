-- The queue of the reward service in Redis, as one script, so that each change of a job is atomic.
--
-- KEYS[1], P below, is the prefix of every key; ARGV[1] is the name of the operation, and its arguments follow.
--   P:job:ID           hash: the fields of a job; `receipt` names its delivery, and `line` where it waits
--   P:key:SHA256       the id of the job with that content; equal jobs share its result while its revision is served
-- A reward has two QUEUEs: one of its own name, and one of what is `slow` to prepare.
--   P:returned:QUEUE   sorted set: the jobs that were given back, by age, which come before others
--   P:classes:QUEUE    sorted set of the priorities of other jobs that wait; each has
--     P:line:CLASS:CLIENT   sorted set: the jobs of a client, by age
--     P:clients:CLASS       sorted set of clients by the virtual time at which they are served next
--     P:shares:CLASS        the same of clients that have no job, as long as they are ahead of the others
--     P:mates:CLASS:PREFIX  sorted set: the jobs with that prefix, by age
--     P:turn:CLASS          hash: the virtual `clock`, and `since` when it waits for a turn
--   P:running:QUEUE    sorted set: jobs that run, by the last sign of life of who has them
--   P:waiting          hash: items, bytes and jobs that wait by reward, and the bytes of all; a counter
--   P:taken:TOKEN      the jobs that one `take` returned, for a retry after a lost response
--   P:counted:TOKEN    that who shares a job, or leaves it, has been counted, for the same
--   P:record:NAME      a protocol's record of a request
--   P:hosts, P:beats   the health of each process's workers, and when it expires
-- Channels: P:come carries the name of a queue that has a new job, P:over the id of a finished job.
-- `memory_backend.py` is the same order in the memory of a process.

local P, operation = KEYS[1], ARGV[1]
local FIELDS = {'state', 'reward', 'line', 'receipt', 'items', 'bytes', 'cost', 'prefixes', 'priority', 'client',
  'attempts', 'deadline', 'key', 'asked', 'shared', 'created', 'slow', 'weight'}

local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6

local function job_key(id) return P .. ':job:' .. id end

local function read(id)
  local values = redis.call('HMGET', job_key(id), unpack(FIELDS))
  local job = {id = id}
  for n, name in ipairs(FIELDS) do job[name] = values[n] end
  job.queue = (job.reward or '') .. (job.slow or '')
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
  local waiting = P .. ':waiting'
  redis.call('HINCRBY', waiting, 'bytes', sign * job.bytes)
  redis.call('HINCRBY', waiting, 'items:' .. job.reward, sign * job.items)
  redis.call('HINCRBY', waiting, 'jobs:' .. job.reward, sign)
  redis.call('HINCRBY', waiting, 'bytes:' .. job.reward, sign * job.bytes)
end

-- A queue's name may have colons, and a client's: its length makes keys differ.
local function class_key(kind, job)
  return table.concat({P, kind, job.priority, #job.queue, job.queue}, ':')
end

local function mates_key(job, prefix) return class_key('mates', job) .. ':' .. prefix end

local function returned_key(queue) return P .. ':returned:' .. queue end

-- Return the virtual time at which a client of the job's class is served next.
local function tag_of(job)
  local clock = tonumber(redis.call('HGET', class_key('turn', job), 'clock') or 0)
  local tag = redis.call('ZSCORE', class_key('clients', job), job.client)
    or redis.call('ZSCORE', class_key('shares', job), job.client) or 0
  return math.max(clock, tonumber(tag))
end

-- Change how many want a job, once for each token, however often its caller tries; return how many do.
local function ask(id, change, token)
  if redis.call('SET', P .. ':counted:' .. token, 1, 'NX', 'EX', 60) then redis.call('HINCRBY', job_key(id), 'asked', change) end
  return tonumber(redis.call('HGET', job_key(id), 'asked'))
end

local function enqueue(job, returned)
  local order = redis.call('HINCRBY', P .. ':waiting', 'order', 1)
  job.line = returned and returned_key(job.queue) or class_key('line', job) .. ':' .. job.client
  if not returned then
    if redis.call('ZADD', P .. ':classes:' .. job.queue, job.priority, job.priority) == 1 then
      redis.call('HSET', class_key('turn', job), 'since', string.format('%.6f', now))
    end
    redis.call('ZADD', class_key('clients', job), 'NX', tag_of(job), job.client)
    for _, pair in ipairs(cjson.decode(job.prefixes)) do redis.call('ZADD', mates_key(job, pair[1]), order, job.id) end
  end
  redis.call('ZADD', job.line, returned and job.created or order, job.id)
  redis.call('HSET', job_key(job.id), 'state', 'queued', 'line', job.line)
  count(job, 1)
  redis.call('PUBLISH', P .. ':come', job.queue)
end

-- Remove a job from what waits or runs. Taking, ending and returning a job begins with it: at its limit of memory Redis
-- refuses a script whose first write takes memory, and lets one finish that began with another.
local function remove(job)
  redis.call('ZREM', job.line, job.id)
  if job.state ~= 'queued' then return end
  count(job, -1)
  if job.line == returned_key(job.queue) then return end
  for _, pair in ipairs(cjson.decode(job.prefixes)) do redis.call('ZREM', mates_key(job, pair[1]), job.id) end
  if redis.call('EXISTS', job.line) == 1 then return end
  redis.call('ZADD', class_key('shares', job), redis.call('ZSCORE', class_key('clients', job), job.client), job.client)
  redis.call('ZREM', class_key('clients', job), job.client)
  if redis.call('EXISTS', class_key('clients', job)) == 1 then return end
  redis.call('DEL', class_key('shares', job), class_key('turn', job))
  redis.call('ZREM', P .. ':classes:' .. job.queue, job.priority)
end

local function close(job, ttl, state, ...)
  remove(job)
  redis.call('DEL', job_key(job.id))  -- only the result is kept
  redis.call('HSET', job_key(job.id), 'state', state, ...)
  redis.call('PEXPIRE', job_key(job.id), ttl)
  local key = P .. ':key:' .. job.key
  if redis.call('GET', key) == job.id then
    if state == 'done' then redis.call('PEXPIRE', key, ttl) else redis.call('DEL', key) end
  end
  redis.call('PUBLISH', P .. ':over', job.id)
end

local function give_back(job, blame, most, again, cancelled, ttl)
  if blame ~= '' then job.attempts = job.attempts + 1 end
  if tonumber(job.asked) <= 0 then
    close(job, ttl, 'cancelled', 'error', cancelled)
  elseif tonumber(job.attempts) >= tonumber(most) then
    close(job, ttl, 'failed', 'error', blame .. ', ' .. again)
  else
    remove(job)
    redis.call('HSET', job_key(job.id), 'attempts', job.attempts)
    enqueue(job, true)
  end
end

-- Return the priority that a batch begins with: the highest, or now and then the one that waits longest.
local function first_priority(queue, aging)
  local classes = redis.call('ZREVRANGE', P .. ':classes:' .. queue, 0, -1)
  if now - (redis.call('HGET', P .. ':waiting', 'aged:' .. queue) or 0) < aging then return classes[1] end
  local longest, least
  for _, class in ipairs(classes) do
    local since = tonumber(redis.call('HGET', class_key('turn', {queue = queue, priority = class}), 'since'))
    if not least or since < least then longest, least = class, since end
  end
  if least and now - least >= aging then return longest, true end
  return classes[1]
end

-- Return the job whose turn it is, of the priority `first` while that has any, and the virtual time of its client.
local function next_job(queue, first)
  local id = redis.call('ZRANGE', returned_key(queue), 0, 0)[1]
  if id then return read(id) end
  local classes = P .. ':classes:' .. queue
  local priority = first and redis.call('ZSCORE', classes, first) and first or redis.call('ZREVRANGE', classes, 0, 0)[1]
  if not priority then return nil end
  local class = {queue = queue, priority = priority}
  local head = redis.call('ZRANGE', class_key('clients', class), 0, 0, 'WITHSCORES')
  id = redis.call('ZRANGE', class_key('line', class) .. ':' .. head[1], 0, 0)[1]
  return read(id), tonumber(head[2])
end

-- Return the tokens by which a batch that holds these prefixes grows with a job.
local function tokens_of(job, held)
  local tokens = tonumber(job.cost)
  for _, pair in ipairs(cjson.decode(job.prefixes)) do if held[pair[1]] then tokens = tokens - pair[2] end end
  return tokens
end

-- Move a job into the batch, on its client's account; return false where it has no room there.
local function move(job, batch, clock)
  local tokens = tokens_of(job, batch.held)
  local alone = tonumber(job.attempts) > 0
  if #batch.jobs > 0 and (alone or tokens > batch.room) then return false end
  local late = job.deadline ~= '' and tonumber(job.deadline) < now
  local paid = job.line == returned_key(job.queue)
  local tag = not paid and math.max(tag_of(job), clock or 0)
  if late then
    close(job, batch.ttl, 'failed', 'error', batch.expired)
    return true
  end
  remove(job)
  if not paid and redis.call('EXISTS', class_key('turn', job)) == 1 then
    redis.call('HSET', class_key('turn', job), 'since', string.format('%.6f', now))
    if clock then
      redis.call('HSET', class_key('turn', job), 'clock', string.format('%.17g', clock))
      redis.call('ZREMRANGEBYSCORE', class_key('shares', job), '-inf', clock)
    end
    local waits = redis.call('EXISTS', job.line) == 1
    redis.call('ZADD', class_key(waits and 'clients' or 'shares', job), tag + tokens / job.weight, job.client)
  end
  local receipt = redis.call('HINCRBY', P .. ':waiting', 'order', 1)
  local running = P .. ':running:' .. job.queue
  redis.call('ZADD', running, now, job.id)
  redis.call('HSET', job_key(job.id), 'state', 'running', 'line', running, 'receipt', receipt)
  batch.jobs[#batch.jobs + 1] = {job.id, tostring(receipt)}
  batch.room = batch.room - tokens
  batch.closed = alone
  for _, pair in ipairs(cjson.decode(job.prefixes)) do batch.held[pair[1]] = true end
  return true
end

local function take_batch(queue, budget, aging, cached, ttl, expired)
  local batch = {jobs = {}, held = {}, room = budget, closed = false, ttl = ttl, expired = expired}
  local first, aged = first_priority(queue, aging)
  while not batch.closed do
    local job, clock = next_job(queue, first)
    if not job or not move(job, batch, clock) then break end
    if aged then redis.call('HSET', P .. ':waiting', 'aged:' .. queue, string.format('%.6f', now)) end
    local prefixes = {}
    for _, pair in ipairs(cjson.decode(job.prefixes)) do prefixes[#prefixes + 1] = pair[1] end
    for _, prefix in ipairs(cached) do prefixes[#prefixes + 1] = prefix end
    for _, prefix in ipairs(batch.closed and {} or prefixes) do
      local mate
      repeat
        mate = redis.call('ZRANGE', mates_key(job, prefix), 0, 0)[1]
      until not mate or not move(read(mate), batch)
    end
    cached = {}  -- all of them have come along, or there is no room
  end
  return batch.jobs
end

-- Why no stream of Redis: XADD, XREADGROUP, XACK and XAUTOCLAIM could deliver a job, claim it, end it, and take it from a
-- silent process, each by itself. A stream has one order, by arrival: no priority, no shares of clients by tokens, no mates
-- of a prefix, no job alone. It does not bound what waits, share the result of equal jobs, nor cancel what waits. All of
-- these change together with a delivery or not at all, so the script would remain, with the stream beside it.
--
-- Each operation, and a test that fails without it, of tests/serving/test_backends.py or, with *, test_redis.py:
--   put        test_an_equal_job_shares_results_unless_it_failed, test_the_queue_is_bounded_in_items_and_bytes
--   take       test_clients_share_tokens_by_weight, test_mates_of_a_prompt_come_along, test_one_job_is_taken_by_one_process*
--   finish     test_a_job_goes_from_queued_to_done, test_an_answer_that_is_lost_loses_no_job*
--   fail       test_jobs_of_a_silent_process_go_to_others*, as renew and reclaim
--   give_back  test_a_worker_killing_job_retries_alone_then_fails
--   cancel     test_cancel_ends_what_waits_once_nobody_wants_it
--   keep, kept            test_a_record_is_kept_for_its_time
--   announce, announced   test_a_silent_host_is_forgotten*
local operations = {}

function operations.put(id, key, reward, packed, items, cost, priority, remaining, max_items, max_bytes,
    max_total, ttl, revisions, prefixes, client, request, wanted, slow, weight)
  if redis.call('EXISTS', job_key(id)) == 1 then return {1, id} end  -- a retry after a lost response
  local deadline = remaining ~= '' and string.format('%.6f', now + remaining) or ''
  local equal = redis.call('GET', P .. ':key:' .. key)
  local job = equal and redis.call('EXISTS', job_key(equal)) == 1 and read(equal)
  if job and is_shared(job, revisions) then
    if is_over(job) then  -- its result is kept for another ttl
      redis.call('PEXPIRE', job_key(equal), ttl)
      redis.call('PEXPIRE', P .. ':key:' .. key, ttl)
    else
      ask(equal, 1, id)
    end
    local ends = job.state == 'queued' and job.deadline ~= ''
    if ends and (deadline == '' or tonumber(deadline) > tonumber(job.deadline)) then
      redis.call('HSET', job_key(equal), 'deadline', deadline)
    end
    return {1, equal}
  end
  local waiting = redis.call('HMGET', P .. ':waiting', 'items:' .. reward, 'bytes:' .. reward, 'bytes')
  local has_items, has_bytes, total = tonumber(waiting[1] or 0), tonumber(waiting[2] or 0), tonumber(waiting[3] or 0)
  if has_items + items > tonumber(max_items) or has_bytes + #packed > tonumber(max_bytes)
      or total + #packed > tonumber(max_total) then
    return {0, has_items, has_bytes, total}
  end
  redis.call('HSET', job_key(id), 'reward', reward, 'key', key, 'packed', packed, 'items', items, 'bytes', #packed,
    'cost', cost, 'priority', priority, 'deadline', deadline, 'attempts', 0, 'asked', 1,
    'prefixes', prefixes, 'client', client, 'request', request, 'wanted', wanted, 'slow', slow,
    'weight', weight, 'created', string.format('%.6f', now))
  redis.call('SET', P .. ':key:' .. key, id)
  enqueue(read(id))
  return {1, id}
end

function operations.take(queue, budget, token, ttl, expired, aging, cached)
  local receipt = P .. ':taken:' .. token
  local taken = {}
  for _, pair in ipairs(redis.call('LRANGE', receipt, 0, -1)) do taken[#taken + 1] = cjson.decode(pair) end
  if #taken == 0 then
    taken = take_batch(queue, tonumber(budget), tonumber(aging), cjson.decode(cached), ttl, expired)
    for _, pair in ipairs(taken) do redis.call('RPUSH', receipt, cjson.encode(pair)) end
    redis.call('EXPIRE', receipt, 60)
  end
  local jobs = {}
  for _, pair in ipairs(taken) do
    local job = redis.call('HMGET', job_key(pair[1]),
      'receipt', 'packed', 'items', 'cost', 'priority', 'attempts', 'created', 'prefixes', 'client', 'request', 'wanted')
    if job[1] == pair[2] then jobs[#jobs + 1] = {pair[1], unpack(job)} end
  end
  return jobs
end

-- A result counts even where the job was given to another process meanwhile: it is the same result.
-- `shared` is the revision for which equal jobs share it; '' for a result with errors, which may be transient.
function operations.finish(id, outcomes, seconds, revision, shared, ttl)
  local job = read(id)
  if is_over(job) then return 0 end
  close(job, ttl, 'done', 'outcomes', outcomes, 'seconds', seconds, 'revision', revision, 'shared', shared)
  return 1
end

function operations.fail(id, receipt, error, ttl)
  local job = read(id)
  if job.state ~= 'running' or job.receipt ~= receipt then return 0 end
  close(job, ttl, 'failed', 'error', error)
  return 1
end

function operations.give_back(id, receipt, blame, ...)
  local job = read(id)
  if job.state ~= 'running' or job.receipt ~= receipt then return 0 end
  give_back(job, blame, ...)
  return 1
end

-- Say that who was given a job is alive. A job that was given to another has another receipt.
function operations.renew(id, receipt)
  local job = read(id)
  if job.state == 'running' and job.receipt == receipt then redis.call('ZADD', job.line, now, id) end
end

-- Queue again the jobs of processes that were silent for so many seconds, and return their number.
function operations.reclaim(queue, silence, ...)
  local silent = redis.call('ZRANGEBYSCORE', P .. ':running:' .. queue, '-inf', now - silence, 'LIMIT', 0, 100)
  for _, id in ipairs(silent) do give_back(read(id), ...) end
  return #silent
end

function operations.cancel(id, token, cancelled, ttl)
  local job = read(id)
  if not job.state or is_over(job) then return 0 end
  if ask(id, -1, token) > 0 or job.state == 'running' then return 0 end
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
