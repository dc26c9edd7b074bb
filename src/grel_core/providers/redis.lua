-- The rules of `lease/rules.py` in the dialect of the server; `tests/conformance/test_model.py` holds them equal.
--
-- KEYS: the record (a hash), and its shared holders (a sorted set, token by expiry, touched only while there are any).
-- ARGV: verb, retention, 1 if PUBLISH counts every receiver, token or mark, duration or least, and for take:
--       head start, and where any of these is not empty: shared, place in line, channel, meta.
-- Fields: v format, f fence, s state (held, free or lapsed), h holder, u until, e ended, t transitions, r when the last
--       shared lease runs out, w the line of waiters, d duration, b since, n renewed if later than b, m meta, k mark.
-- Numbers are whole microseconds, which a double holds exactly. They go to Redis as they are: it writes all 16 digits,
-- where Lua would write 1.79e+15. Few functions, since each of them is made anew at every call.

local VERSION = 1

local verb, token = ARGV[1], ARGV[4] or ''
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]

-- Changes nothing, but only a primary allows it: a replica never answers from what it has, and a full server, once it
-- has allowed one write, allows the others: a release is never refused.
redis.call('HDEL', KEYS[1], '')

local stored = redis.call('HMGET', KEYS[1], 'v', 'f', 's', 'h', 'u', 'e', 't', 'r', 'w')
if stored[1] and tonumber(stored[1]) > VERSION then
  return redis.error_reply('GRELFORMAT ' .. stored[1])
end
local fence, state, holder = tonumber(stored[2] or 0), stored[3] or 'free', stored[4]
local ends, ended, transitions = tonumber(stored[5] or 0), tonumber(stored[6] or 0), tonumber(stored[7] or 0)
local latest = tonumber(stored[8] or 0)
-- Who waits: {token, until, shared, channel, called}.
local line = stored[9] and stored[9] ~= '' and cjson.decode(stored[9]) or {}

-- Ends the exclusive claim: readers that waited for it get their turn.
local function vacate(into, at)
  state, ended = into, at
  for _, waiter in ipairs(line) do waiter[5] = waiter[3] end
end

-- Who in line may come in: the readers whose turn it is, else the first writer, else all.
local function heirs()
  local found, called, writer = {}, false, nil
  if state == 'held' then return found end
  for _, waiter in ipairs(line) do
    called = called or waiter[5] == 1
    writer = writer or waiter[3] == 0 and waiter
  end
  for _, waiter in ipairs(line) do
    local first = not called and (not writer or waiter == writer and latest == 0)
    if waiter[5] == 1 or first then found[waiter[1]] = true end
  end
  return found
end

-- What ran out is gone.
if state == 'held' and ends <= now then vacate('lapsed', ends) end
if latest > 0 and latest <= now then
  ended, latest = math.max(ended, latest), 0
end
local place, before = nil, {} -- of `token` in line; who may come in already
if line[1] then
  for i = #line, 1, -1 do
    if tonumber(line[i][2]) <= now then table.remove(line, i) end
  end
  for i, waiter in ipairs(line) do
    if waiter[1] == token then place = i end
  end
  before = heirs()
end
local held = state == 'held' and holder == token
local reads = latest > 0 and tonumber(redis.call('ZSCORE', KEYS[2], token) or 0) > now

if verb == 'peek' then
  local rest = redis.call('HMGET', KEYS[1], 'd', 'b', 'n', 'm', 'k')
  local found = latest > 0 and redis.call('ZRANGEBYSCORE', KEYS[2], now + 1, '+inf', 'WITHSCORES') or {}
  local readers = {}
  for i = 1, #found, 2 do table.insert(readers, {found[i], string.format('%.0f', found[i + 1])}) end
  -- What may be absent goes out as text: RESP would cut a table at its first nil.
  return {now, fence, state, holder or '', ends, ended, transitions, cjson.encode(readers), cjson.encode(line),
    rest[1] or 0, rest[2] or 0, rest[3] or 0, rest[4] or '', rest[5] or ''}
end

-- Each verb returns when it changes nothing; else it leaves here what to answer, which further fields to write,
-- and until when `token` shares from now on (0: no longer).
local answer, fields, shares = nil, {}, nil

if verb == 'release' then
  if not (held or reads or place) then return 0 end
  answer = (held or reads) and 1 or 0
  if place then table.remove(line, place) end
  local stay = held and tonumber(ARGV[5]) > 0 and tonumber(redis.call('HGET', KEYS[1], 'b')) + tonumber(ARGV[5]) or 0
  if stay > now then
    ends = stay
    fields = {'u', ends}
  elseif held then
    vacate('free', now)
  elseif reads then
    shares, ended = 0, now
  end
elseif verb == 'advance' then
  local mark = redis.call('HGET', KEYS[1], 'k')
  if mark and tonumber(token) <= tonumber(mark) then return 0 end
  answer, ended, fields = 1, now, {'k', token}
elseif verb == 'downgrade' then
  if not held then return false end
  vacate('free', now)
  answer, shares = {1, fence, 0, transitions}, now + tonumber(ARGV[5])
elseif held then
  ends = now + tonumber(ARGV[5])
  answer, fields = {1, fence, 0, transitions}, {'u', ends, 'd', ARGV[5], 'n', now}
elseif reads then
  answer, shares = {1, fence, 0, transitions}, now + tonumber(ARGV[5])
elseif verb == 'renew' then
  return false
else
  local shared, remaining = ARGV[7] == '1', nil
  if state == 'held' then
    remaining = ends - now
  elseif shared and not before[token] then
    for _, waiter in ipairs(line) do
      if waiter[3] == 0 then remaining = math.max(remaining or 0, tonumber(waiter[2]) - now) end
    end
  elseif not shared and latest > 0 then
    remaining = latest - now
  elseif not shared and next(before) and not before[token] and now < ended + tonumber(ARGV[6]) then
    remaining = ended + tonumber(ARGV[6]) - now
  end
  if remaining then
    answer = {0, remaining}
    if (ARGV[8] or '0') == '0' then return answer end
    place = place or #line + 1
    line[place] = line[place] or {token, '', shared and 1 or 0, ARGV[9], 0}
    line[place][2] = string.format('%.0f', now + tonumber(ARGV[8]))
  else
    if place then table.remove(line, place) end
    if shared then
      answer, shares = {1, fence, 0, transitions}, now + tonumber(ARGV[5])
    else
      local lapsed = state == 'lapsed' and 1 or 0
      for _, waiter in ipairs(line) do waiter[5] = 0 end -- who missed the turn waits for the next one
      transitions = fence > 0 and transitions + 1 or 0
      fence, state, ends = math.max(fence + 1, now), 'held', now + tonumber(ARGV[5])
      answer = {1, fence, lapsed, transitions}
      fields = {'f', fence, 'h', token, 'u', ends, 't', transitions, 'd', ARGV[5], 'b', now, 'm', ARGV[10] or ''}
    end
  end
end

if shares then
  redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
  if shares > 0 then redis.call('ZADD', KEYS[2], shares, token) else redis.call('ZREM', KEYS[2], token) end
  latest = tonumber(redis.call('ZREVRANGE', KEYS[2], 0, 0, 'WITHSCORES')[2] or 0)
end

if line[1] then
  -- Tells the new heirs. A process that does not hear is gone, and loses its places. One without a channel polls.
  local told = {}
  local function tell()
    local may = heirs()
    for _, waiter in ipairs(line) do
      local channel = waiter[4]
      if may[waiter[1]] and not before[waiter[1]] and channel ~= '' and not told[channel] then
        told[channel] = true
        if redis.pcall('PUBLISH', channel, KEYS[1]) == 0 and ARGV[3] == '1' then
          for i = #line, 1, -1 do
            if line[i][4] == channel then table.remove(line, i) end
          end
          return true
        end
      end
    end
  end
  while tell() do end
end

local last = math.max(ended, latest)
if state == 'held' then last = math.max(last, ends) end
redis.call('HSET', KEYS[1], 'v', VERSION, 's', state, 'e', ended, unpack(fields))
if line[1] or stored[9] or latest > 0 or stored[8] then
  redis.call('HSET', KEYS[1], 'r', latest, 'w', line[1] and cjson.encode(line) or '')
  for _, waiter in ipairs(line) do last = math.max(last, tonumber(waiter[2])) end
end
local forget = math.ceil((last + tonumber(ARGV[2])) / 1000)
redis.call('PEXPIREAT', KEYS[1], forget)
if latest > 0 then redis.call('PEXPIREAT', KEYS[2], forget) end
return answer
