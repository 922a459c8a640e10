#!lua name=kvroute_2
-- The radix index inside Redis. Library name = layout version: two versions live side by side.
--
-- Every key of an index starts with one hash tag, `P`, so it lies in one slot:
--   P n<8 bytes>    a node, named by the hash of its first unit
--   P m             hash: `units`, `nodes`, `hid` (last holder id), `seq` (last change), `gen`,
--                   `dead` (holders to sweep out), `cursor` (of the sweep)
--   P h             hash: live holder id (4 bytes) -> its record: u16 unit (+ 0x8000: a part),
--                   u16 length, tier (and class, `groups.py`), source
--   P s<source>     hash: `tok` fencing token, `w` last write, `ep` epoch, `h:<tier>` holder id
--   P l<source>     the lease: its owner
--   P c             stream of changes, ids 1-0, 2-0, ... without a hole
--
-- A node is a run of at most 64 units of one chain, as one string:
--   u8 units, u8 0, u16 holders, u32 children, 8 bytes parent node (zeros at the root)
--   holders x (u32 holder id, 8 bytes mask: bit i of it = unit i)
--   units x 8 bytes hash
-- A chain that leaves a run in its middle, or overflows it, goes on in a node of its own, found by
-- the hash of its first unit: nodes are never split, so a (node, position) stays true until the
-- node is deleted, and only leaves are.

local HEAD, ENTRY, RUN = 16, 12, 64
local ZERO8 = '\0\0\0\0\0\0\0\0'

-- Some servers offer the libraries only to calls, not while this file is loaded.
local byte, sub, char, find, format, concat, floor, min, max
local band, bor, bnot, lshift, pack, unpack_
local function ready()
  if byte then return end
  byte, sub, char, find = string.byte, string.sub, string.char, string.find
  format, concat = string.format, table.concat
  floor, min, max = math.floor, math.min, math.max
  band, bor, bnot, lshift = bit.band, bit.bor, bit.bnot, bit.lshift
  pack, unpack_ = struct.pack, struct.unpack
end

-- ---------------------------------------------------------------- nodes

local function parse(id, value)
  local n, _, holders, children = unpack_('<BBI2I4', value)
  local run_at = HEAD + holders * ENTRY
  return {
    id = id, n = n, children = children, parent = sub(value, 9, 16),
    holders = sub(value, HEAD + 1, run_at), run = sub(value, run_at + 1),
  }
end

local function load(ctx, id)
  local node = ctx.nodes[id]
  if node ~= nil then return node end
  local value = redis.call('GET', ctx.prefix .. 'n' .. id)
  node = value and parse(id, value) or false
  ctx.nodes[id] = node
  return node
end

local function touch(ctx, node)
  if not node.dirty then
    node.dirty = true
    node.old_n = node.n
    ctx.dirty[#ctx.dirty + 1] = node
  end
end

local function create(ctx, id, parent)
  local node = {
    id = id, n = 0, children = 0, parent = parent and parent.id or ZERO8, holders = '', run = '',
  }
  ctx.nodes[id] = node
  touch(ctx, node)
  ctx.new_nodes = ctx.new_nodes + 1
  if parent then
    touch(ctx, parent)
    parent.children = parent.children + 1
  end
  return node
end

local function holder_at(node, holder)
  local from = 1
  while true do
    local at = find(node.holders, holder, from, true)
    if not at then return nil end
    if (at - 1) % ENTRY == 0 then return at end
    from = at + 1
  end
end

local function mask_with(mask, first, last)
  local b = { byte(mask, 1, 8) }
  for i = 1, 8 do
    local low, high = first - (i - 1) * 8, last - (i - 1) * 8
    if low < 0 then low = 0 end
    if high > 7 then high = 7 end
    if low <= high then b[i] = bor(b[i], lshift(1, high + 1) - lshift(1, low)) end
  end
  return char(b[1], b[2], b[3], b[4], b[5], b[6], b[7], b[8])
end

local function mask_without(mask, position)
  local i = floor(position / 8)
  local b = band(byte(mask, i + 1), bnot(lshift(1, position % 8)))
  return sub(mask, 1, i) .. char(b) .. sub(mask, i + 2)
end

local function changed(node, holder, mask)
  if not node.changes then node.changes = {} end
  node.changes[holder] = mask
end

local function set_bits(ctx, node, holder, first, last)
  touch(ctx, node)
  local at = holder_at(node, holder)
  local mask = mask_with(at and sub(node.holders, at + 4, at + 11) or ZERO8, first, last)
  if at then
    node.holders = sub(node.holders, 1, at + 3) .. mask .. sub(node.holders, at + 12)
  else
    node.holders = node.holders .. holder .. mask
  end
  changed(node, holder, mask)
end

local function drop_if_empty(ctx, node)
  while node and node.n > 0 and not node.gone and node.children == 0 and node.holders == '' do
    touch(ctx, node)
    node.gone = true
    ctx.nodes[node.id] = false
    ctx.new_units = ctx.new_units - node.n
    ctx.new_nodes = ctx.new_nodes - 1
    local parent = node.parent ~= ZERO8 and load(ctx, node.parent)
    if parent then
      touch(ctx, parent)
      parent.children = parent.children - 1
    end
    node = parent
  end
end

local function clear_bit(ctx, id, position, hash, holder)
  local node = load(ctx, id)
  if not node or position >= node.n then return end
  if sub(node.run, position * 8 + 1, position * 8 + 8) ~= hash then return end
  local at = holder_at(node, holder)
  if not at then return end
  touch(ctx, node)
  local mask = mask_without(sub(node.holders, at + 4, at + 11), position)
  if mask == ZERO8 then
    node.holders = sub(node.holders, 1, at - 1) .. sub(node.holders, at + 12)
    changed(node, holder, mask)
    drop_if_empty(ctx, node)
  else
    node.holders = sub(node.holders, 1, at + 3) .. mask .. sub(node.holders, at + 12)
    changed(node, holder, mask)
  end
end

-- Units that `run` from `start` and `hashes` from unit `i` have in common.
local function common(run, start, hashes, i, count)
  local n = #run / 8 - start
  if count - i < n then n = count - i end
  if sub(run, start * 8 + 1, (start + n) * 8) == sub(hashes, i * 8 + 1, (i + n) * 8) then
    return n
  end
  local low, high = 0, n
  while low + 1 < high do
    local mid = floor((low + high) / 2)
    if sub(run, start * 8 + 1, (start + mid) * 8) == sub(hashes, i * 8 + 1, (i + mid) * 8) then
      low = mid
    else
      high = mid
    end
  end
  return low
end

-- Store a chain below `node`/`position` (nil = at the root). The first `skip` units only lead to
-- the rest: they are not held. Returns the places of the units, one string per piece; of fewer units
-- than asked for where the index is full.
local function store(ctx, node, position, hashes, skip, holder)
  local count, i, places = #hashes / 8, 0, {}
  while i < count do
    local left = ctx.max_units - ctx.units - ctx.new_units
    local start = node and position + 1 or 0
    local matched = 0
    if node and start < node.n then matched = common(node.run, start, hashes, i, count) end
    if matched == 0 and not (node and start == node.n and start < RUN) then
      local id = sub(hashes, i * 8 + 1, i * 8 + 8)
      local following = load(ctx, id)
      if not following then
        if left <= 0 then break end
        following = create(ctx, id, node)
      end
      node = following
      start = 0
      if node.n > 0 then matched = common(node.run, 0, hashes, i, count) end
    end
    local taken = matched
    if start + matched == node.n and node.n < RUN and i + matched < count then
      local room = min(RUN - node.n, count - i - matched, left)
      if room <= 0 and matched == 0 then break end
      room = max(room, 0)
      touch(ctx, node)
      node.run = node.run .. sub(hashes, (i + matched) * 8 + 1, (i + matched + room) * 8)
      node.n = node.n + room
      ctx.new_units = ctx.new_units + room
      taken = matched + room
    end
    local first_held = max(skip - i, 0)
    if first_held < taken then
      set_bits(ctx, node, holder, start + first_held, start + taken - 1)
    end
    places[#places + 1] = node.id .. char(start, taken)
    position = start + taken - 1
    i = i + taken
  end
  return places
end

-- ---------------------------------------------------------------- changes

local function emit(ctx, record)
  ctx.changes[#ctx.changes + 1] = record
end

local function flush_node(ctx, node)
  local key = ctx.prefix .. 'n' .. node.id
  if node.gone then
    if node.old_n > 0 then
      redis.call('DEL', key)
      emit(ctx, 'X' .. node.id)
    end
    return
  end
  redis.call('SET', key, pack('<BBI2I4', node.n, 0, #node.holders / ENTRY, node.children)
    .. node.parent .. node.holders .. node.run)
  if node.n > node.old_n then
    emit(ctx, 'U' .. node.id .. char(node.old_n, node.n - node.old_n)
      .. sub(node.run, node.old_n * 8 + 1))
  end
  for holder, mask in pairs(node.changes or {}) do
    emit(ctx, 'B' .. node.id .. holder .. mask)
  end
end

local function flush(ctx)
  for _, node in ipairs(ctx.dirty) do flush_node(ctx, node) end
  local meta = ctx.prefix .. 'm'
  if ctx.new_units ~= 0 then redis.call('HINCRBY', meta, 'units', ctx.new_units) end
  if ctx.new_nodes ~= 0 then redis.call('HINCRBY', meta, 'nodes', ctx.new_nodes) end
  if #ctx.changes > 0 then
    local seq = redis.call('HINCRBY', meta, 'seq', 1)
    redis.call('XADD', ctx.prefix .. 'c', 'MAXLEN', '~', ctx.stream_length,
      format('%d-0', seq), 'd', concat(ctx.changes))
  end
end

local function context(prefix, stream_length)
  return {
    prefix = prefix, stream_length = stream_length, nodes = {}, dirty = {}, changes = {},
    new_units = 0, new_nodes = 0,
  }
end

-- ---------------------------------------------------------------- leases and epochs

local function now_ms()
  local t = redis.call('TIME')
  return tonumber(t[1]) * 1000 + floor(tonumber(t[2]) / 1000)
end

local function number(key, field)
  return tonumber(redis.call('HGET', key, field) or '0') or 0
end

-- keys: slot, lease; args: prefix, owner, ttl ms, slot ttl ms, generation
-- Returns {token, epoch} for the holder of the lease, {0, ms left} for anybody else.
local function acquire(keys, args)
  local slot, lease = keys[1], keys[2]
  local owner = redis.call('GET', lease)
  if owner and owner ~= args[2] then return { 0, redis.call('PTTL', lease) } end
  redis.call('SET', lease, args[2], 'PX', args[3])
  local token = max(number(slot, 'tok') + 1, now_ms())
  redis.call('HSET', slot, 'tok', format('%.0f', token), 'w', '0')
  redis.call('PEXPIRE', slot, args[4])
  redis.call('HSETNX', args[1] .. 'm', 'gen', args[5])
  return { token, number(slot, 'ep') }
end

-- keys: slot, lease; args: prefix, owner, ttl ms, slot ttl ms, token. 1 while the lease is ours.
local function renew(keys, args)
  local slot, lease = keys[1], keys[2]
  local owner = redis.call('GET', lease)
  if owner and owner ~= args[2] then return 0 end
  if number(slot, 'tok') ~= tonumber(args[5]) then return 0 end
  redis.call('SET', lease, args[2], 'PX', args[3])
  redis.call('PEXPIRE', slot, args[4])
  return 1
end

-- keys: slot, lease; args: prefix, owner
local function release(keys, args)
  if redis.call('GET', keys[2]) == args[2] then return redis.call('DEL', keys[2]) end
  return 0
end

local function retire(ctx, slot)
  local fields = redis.call('HGETALL', slot)
  for i = 1, #fields, 2 do
    if sub(fields[i], 1, 2) == 'h:' then
      redis.call('HDEL', slot, fields[i])
      if redis.call('HDEL', ctx.prefix .. 'h', fields[i + 1]) == 1 then
        redis.call('HINCRBY', ctx.prefix .. 'm', 'dead', 1)
        emit(ctx, 'D' .. fields[i + 1])
      end
    end
  end
end

local function new_epoch(ctx, slot)
  retire(ctx, slot)
  redis.call('HSET', slot, 'ep',
    format('%.0f', max(number(slot, 'ep') + 1, now_ms())))
end

local function holder_id(ctx, slot, tier, unit, source)
  local id = redis.call('HGET', slot, 'h:' .. tier)
  if id then return id end
  id = pack('<I4', redis.call('HINCRBY', ctx.prefix .. 'm', 'hid', 1))
  local record = pack('<I2', unit) .. pack('<I2', #tier) .. tier .. source
  redis.call('HSET', slot, 'h:' .. tier, id)
  redis.call('HSET', ctx.prefix .. 'h', id, record)
  emit(ctx, 'H' .. id .. pack('<I2', #record) .. record)
  return id
end

-- ---------------------------------------------------------------- apply

local MISSED, REFUSED = 0, 65535

local function apply_store(ctx, ops, at, holder)
  local anchored, skip, count = unpack_('<BI2I2', ops, at)
  at = at + 5
  local node, position
  local missed = false
  if anchored == 1 then
    local id, hash = sub(ops, at, at + 7), sub(ops, at + 9, at + 16)
    position = byte(ops, at + 8)
    at = at + 17
    node = load(ctx, id)
    missed = not node or position >= node.n
      or sub(node.run, position * 8 + 1, position * 8 + 8) ~= hash
  end
  local hashes = sub(ops, at, at + count * 8 - 1)
  at = at + count * 8
  if missed then return at, pack('<I2', MISSED) end
  local places = store(ctx, node, position, hashes, skip, holder)
  if #places == 0 then return at, pack('<I2', REFUSED) end
  return at, pack('<I2', #places) .. concat(places)
end

-- keys: slot, meta; args: prefix, source, token, write number, max units, stream length, ops
-- Returns {status, detail}: ok = the places of what was stored; dup; fenced.
--   E                                          a new epoch: all holders of this source are void
--   T u16 unit, u8 length, tier                what follows is about this tier (+ 0x8000: a part)
--   S u8 anchored, u16 skip, u16 count, [8 node, u8 position, 8 hash], count x 8 hash
--   R 8 node, u8 position, 8 hash              no longer held
local function apply(keys, args)
  local slot, ops = keys[1], args[7]
  if number(slot, 'tok') ~= tonumber(args[3]) then return { 'fenced', '' } end
  local write = tonumber(args[4])
  if write <= number(slot, 'w') then return { 'dup', '' } end
  local ctx = context(args[1], args[6])
  ctx.units = number(keys[2], 'units')
  ctx.max_units = tonumber(args[5])
  local holder, replies, at = nil, {}, 1
  while at <= #ops do
    local op = sub(ops, at, at)
    at = at + 1
    if op == 'R' then
      clear_bit(ctx, sub(ops, at, at + 7), byte(ops, at + 8), sub(ops, at + 9, at + 16), holder)
      at = at + 17
    elseif op == 'S' then
      local reply
      at, reply = apply_store(ctx, ops, at, holder)
      replies[#replies + 1] = reply
    elseif op == 'T' then
      local unit, length = unpack_('<I2B', ops, at)
      holder = holder_id(ctx, slot, sub(ops, at + 3, at + 2 + length), unit, args[2])
      at = at + 3 + length
    else
      new_epoch(ctx, slot)
    end
  end
  redis.call('HSET', slot, 'w', args[4])
  flush(ctx)
  return { 'ok', concat(replies) }
end

-- keys: slot, lease; args: prefix, owner, token, stream length. The source is gone for good.
local function forget(keys, args)
  if number(keys[1], 'tok') ~= tonumber(args[3]) then return 0 end
  local ctx = context(args[1], args[4])
  retire(ctx, keys[1])
  redis.call('DEL', keys[1])
  if redis.call('GET', keys[2]) == args[2] then redis.call('DEL', keys[2]) end
  flush(ctx)
  return 1
end

-- ---------------------------------------------------------------- match

-- Leading ones of a mask's first `n` bits.
local function leading(mask, n)
  local p = 0
  while p < n do
    local b = byte(mask, floor(p / 8) + 1)
    if b == 255 and p % 8 == 0 and p + 8 <= n then
      p = p + 8
    elseif band(b, lshift(1, p % 8)) ~= 0 then
      p = p + 1
    else
      return p
    end
  end
  return n
end

-- Whether a record is of a part: another cache group of a hybrid model, which leads no match.
local function is_part(record)
  return byte(record, 2) >= 128
end

-- keys: meta; args: prefix, packed hashes. Returns {record, units, pieces, ...} for each holder met:
-- the units that it has from the start, or, for a part, what it has along the way:
-- pieces x (u16 first unit, u16 units, 8 bytes mask).
local function match(keys, args)
  local prefix, hashes = args[1], args[2]
  local count, i = #hashes / 8, 0
  local ctx, alive, ended = context(prefix, 0), nil, {}
  local records, pieces = {}, {}
  while i < count do
    local node = load(ctx, sub(hashes, i * 8 + 1, i * 8 + 8))
    if not node then break end
    local n = common(node.run, 0, hashes, i, count)
    local still = {}
    local any = false
    for at = 1, #node.holders, ENTRY do
      local holder = sub(node.holders, at, at + 3)
      if records[holder] == nil then
        records[holder] = redis.call('HGET', prefix .. 'h', holder)
      end
      local record = records[holder]
      if record and is_part(record) then
        pieces[holder] = (pieces[holder] or '') .. pack('<I2I2', i, n)
          .. sub(node.holders, at + 4, at + 11)
      elseif record and (not alive or alive[holder]) then
        local held = leading(sub(node.holders, at + 4, at + 11), n)
        if held == n then
          still[holder] = true
          any = true
        end
        if held > 0 then ended[holder] = i + held end
      end
    end
    alive = still
    i = i + n
    if not any then break end
  end
  local answer = {}
  local function add(holder, units, masks)
    answer[#answer + 1] = records[holder]
    answer[#answer + 1] = units
    answer[#answer + 1] = masks
  end
  for holder, units in pairs(ended) do add(holder, units, '') end
  for holder, masks in pairs(pieces) do add(holder, 0, masks) end
  return answer
end

-- ---------------------------------------------------------------- sweep

-- keys: meta; args: prefix, scan count, stream length
-- One bounded step: take dead holders out of some nodes and delete the leaves nobody holds.
-- Returns {nodes seen, nodes left, 1 if a whole round has ended}.
local function sweep(keys, args)
  local prefix, meta = args[1], keys[1]
  local ctx = context(prefix, args[3])
  if number(meta, 'dead') == 0 and redis.call('HEXISTS', meta, 'cursor') == 0 then
    return { 0, number(meta, 'nodes'), 1 }
  end
  local cursor = redis.call('HGET', meta, 'cursor')
  if not cursor then
    cursor = '0'
    redis.call('HSET', meta, 'dead', '0')
  end
  local glob = string.gsub(prefix, '[%[%]%*%?\\]', '\\%0') .. 'n*'
  local page = redis.call('SCAN', cursor, 'MATCH', glob, 'COUNT', args[2])
  local live = {}
  for _, key in ipairs(page[2]) do
    local node = load(ctx, sub(key, #prefix + 2))
    if node then
      local kept = {}
      for at = 1, #node.holders, ENTRY do
        local id = sub(node.holders, at, at + 3)
        if live[id] == nil then live[id] = redis.call('HEXISTS', prefix .. 'h', id) == 1 end
        if live[id] then kept[#kept + 1] = sub(node.holders, at, at + ENTRY - 1) end
      end
      local holders = concat(kept)
      if holders ~= node.holders then
        touch(ctx, node)
        node.holders = holders
      end
      drop_if_empty(ctx, node)
    end
  end
  flush(ctx)
  if page[1] == '0' then
    redis.call('HDEL', meta, 'cursor')
  else
    redis.call('HSET', meta, 'cursor', page[1])
  end
  return { #page[2], number(meta, 'nodes'), page[1] == '0' and 1 or 0 }
end

local function entry(work)
  return function(keys, args)
    ready()
    return work(keys, args)
  end
end

-- `allow-oom`: what keeps or frees must work when Redis is full.
local function register(name, work, flag)
  redis.register_function{
    function_name = 'kvroute_2_' .. name, callback = entry(work), flags = flag and { flag } or {},
  }
end

register('acquire', acquire, 'allow-oom')
register('renew', renew, 'allow-oom')
register('release', release, 'allow-oom')
register('forget', forget, 'allow-oom')
register('sweep', sweep, 'allow-oom')
register('match', match, 'no-writes')
register('apply', apply)
