-- The rules of `lease/rules.py` in the dialect that runs on the server; `tests/conformance/test_model.py` holds them equal.
--
-- KEYS: the record (a hash) and its shared holders (a sorted set, token by expiry, touched only while there are any).
-- ARGV: verb, retention, 1 if PUBLISH counts every receiver, token or mark,
--       and for the verbs that grant: duration, shared, place in line, channel, head start, meta.
-- Every number is whole microseconds. A double holds them exactly; `text` keeps Lua from writing 1.79e+15.

local VERSION = 1
local FIELDS = {'v', 'f', 's', 'h', 'u', 'e', 't', 'r', 'w'}

local verb, token, duration = ARGV[1], ARGV[4], tonumber(ARGV[5])
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]

-- Changes nothing; only a primary allows it. So a replica never answers from what it has, and a full one still releases.
redis.call('HDEL', KEYS[1], '')
local stored = redis.call('HMGET', KEYS[1], unpack(FIELDS))
if tonumber(stored[1] or VERSION) > VERSION then
  return redis.error_reply('GRELFORMAT ' .. stored[1])
end
local fence = tonumber(stored[2] or 0)
local state = stored[3] or 'free' -- or 'held', or 'lapsed': the last exclusive lease ran out
local holder, ends = stored[4] or '', tonumber(stored[5] or 0)
local ended, transitions = tonumber(stored[6] or 0), tonumber(stored[7] or 0)
local latest = tonumber(stored[8] or 0) -- when the last shared lease runs out; 0 when there is none
local line = stored[9] and stored[9] ~= '' and cjson.decode(stored[9]) or {} -- of {token, until, shared, channel}

local function text(number)
  return string.format('%.0f', number)
end

local function heir()
  return state ~= 'held' and latest == 0 and line[1] and line[1][1]
end

local function settle()
  if state == 'held' and ends <= now then
    state, ended = 'lapsed', ends
  end
  if latest > 0 and latest <= now then
    ended, latest = math.max(ended, latest), 0
  end
  for i = #line, 1, -1 do
    if tonumber(line[i][2]) <= now then table.remove(line, i) end
  end
end

settle()
local before = heir()

-- A process that does not hear is gone, and the next in line is asked. One without a channel asks by itself.
local function wake()
  while heir() and heir() ~= before and line[1][4] ~= '' do
    if redis.pcall('PUBLISH', line[1][4], KEYS[1]) ~= 0 or ARGV[3] ~= '1' then return end
    table.remove(line, 1)
  end
end

local function save(...)
  wake()
  redis.call('HSET', KEYS[1], 'v', VERSION, 'f', text(fence), 's', state, 'h', holder, 'u', text(ends), 'e', text(ended),
    't', text(transitions), 'r', text(latest), 'w', #line > 0 and cjson.encode(line) or '', ...)
  local last = math.max(ended, state == 'held' and ends or 0, latest)
  for _, waiter in ipairs(line) do last = math.max(last, tonumber(waiter[2])) end
  local forget = text(math.ceil((last + tonumber(ARGV[2])) / 1000))
  redis.call('PEXPIREAT', KEYS[1], forget)
  if latest > 0 then
    redis.call('PEXPIREAT', KEYS[2], forget)
  elseif stored[8] and stored[8] ~= '0' then
    redis.call('DEL', KEYS[2])
  end
end

local function holds()
  return state == 'held' and holder == token
end

local function reads()
  return latest > 0 and tonumber(redis.call('ZSCORE', KEYS[2], token) or 0) > now
end

-- Gives `token` a shared lease, or takes it away, and finds out anew when the last one runs out.
local function share(till)
  redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', text(now))
  if till then redis.call('ZADD', KEYS[2], text(till), token) else redis.call('ZREM', KEYS[2], token) end
  latest = tonumber(redis.call('ZREVRANGE', KEYS[2], 0, 0, 'WITHSCORES')[2] or 0)
end

local function leave()
  for i, waiter in ipairs(line) do
    if waiter[1] == token then return table.remove(line, i) end
  end
end

local function grant()
  return {1, fence, 0, transitions}
end

-- For how long someone else keeps `token` out; nil when it may come in.
local function blocked(shared)
  if state == 'held' then return ends - now end
  if shared then
    local writers = 0
    for _, waiter in ipairs(line) do
      if waiter[3] == 0 then writers = math.max(writers, tonumber(waiter[2])) end
    end
    return writers > 0 and writers - now or nil
  end
  if latest > 0 then return latest - now end
  local start = ended + tonumber(ARGV[9])
  if line[1] and line[1][1] ~= token and now < start then return start - now end
end

local function enqueue(waiter)
  for i, known in ipairs(line) do
    if known[1] == token then
      line[i] = waiter
      return
    end
  end
  table.insert(line, waiter)
end

local verbs = {}

function verbs.renew()
  if holds() then
    ends = now + duration
    save('d', text(duration), 'n', text(now))
    return grant()
  end
  if reads() then
    share(now + duration)
    save()
    return grant()
  end
  return false
end

function verbs.take()
  local renewed = verbs.renew()
  if renewed then return renewed end
  local shared, place = ARGV[6] == '1', tonumber(ARGV[7])
  local remaining = blocked(shared)
  if remaining then
    if place > 0 then
      enqueue({token, text(now + place), shared and 1 or 0, ARGV[8]})
      save()
    end
    return {0, remaining}
  end
  leave()
  if shared then
    share(now + duration)
    save()
    return grant()
  end
  local lapsed = state == 'lapsed' and 1 or 0
  transitions = fence > 0 and transitions + 1 or 0
  fence, state, holder, ends = math.max(fence + 1, now), 'held', token, now + duration
  save('d', text(duration), 'b', text(now), 'n', text(now), 'm', ARGV[10])
  return {1, fence, lapsed, transitions}
end

function verbs.release()
  local left, held, read = leave(), holds(), reads()
  if held then state = 'free' end
  if read then share(nil) end
  if held or read then ended = now end
  if left or held or read then save() end
  return (held or read) and 1 or 0
end

function verbs.downgrade()
  if not holds() then return false end
  state, ended = 'free', now
  share(now + duration)
  save()
  return grant()
end

function verbs.advance()
  local mark = redis.call('HGET', KEYS[1], 'k')
  if mark and tonumber(token) <= tonumber(mark) then return 0 end
  ended = now
  save('k', token)
  return 1
end

-- What may be absent goes out as text: RESP would cut a table at its first nil.
function verbs.peek()
  local rest = redis.call('HMGET', KEYS[1], 'd', 'b', 'n', 'm', 'k')
  local readers, found = {}, latest > 0 and redis.call('ZRANGEBYSCORE', KEYS[2], text(now + 1), '+inf', 'WITHSCORES') or {}
  for i = 1, #found, 2 do table.insert(readers, {found[i], text(found[i + 1])}) end
  return {now, fence, state, holder, ends, ended, transitions, cjson.encode(readers), cjson.encode(line),
    rest[1] or 0, rest[2] or 0, rest[3] or 0, rest[4] or '', rest[5] or ''}
end

return verbs[verb]()
