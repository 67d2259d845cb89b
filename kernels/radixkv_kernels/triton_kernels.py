"""The Triton kernels: attention of tiles, the merge of partials, writes of new KV, and copies of blocks.

`attention` and `blocks` launch them. Scores are in base 2, because exp2 is one instruction. A head of 80, 96 or 192
numbers is read as a power of two and a rest, so that nothing is computed on padding.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# ruff: noqa: N803  (compile-time arguments are upper case, as in every Triton kernel)

import triton
import triton.language as tl

from radixkv_kernels.tiles import FIELDS, HEADER

MASKED_ROWS = 16
"""Tiles of at most so many stacked rows have one loop over keys; taller tiles have one more, without masks."""

_LARGEST_ROTATION = 128  # as in `kv_formats`
_FIELDS = tl.constexpr(FIELDS)
_HEADER = tl.constexpr(HEADER)
_LOG2_E = tl.constexpr(1.4426950408889634)
_MASKED_ROWS = tl.constexpr(MASKED_ROWS)
_NEAREST = tl.constexpr(1.5 * 2.0**23)  # added to a small number, its last byte is the nearest integer
_NEVER = tl.constexpr((1 << 31) - 1)  # a slot after every row


@triton.constexpr_function
def _rotation_bits(dim):
    """Return the binary logarithm of the numbers that are rotated together: of a power of two that divides `dim`."""
    return min(dim & -dim, _LARGEST_ROTATION).bit_length() - 1


@triton.jit
def _part(pointers, first, inside, MASKED: tl.constexpr, FROM: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr):
    """Load columns FROM + [0, WIDTH) of rows at `pointers + first` [n]; zero from DIM on and outside of `inside`."""
    column = FROM + tl.arange(0, WIDTH)[None, :]
    place = pointers + first[:, None] + column
    if FROM + WIDTH > DIM:
        if MASKED:
            return tl.load(place, mask=inside[:, None] & (column < DIM), other=0.0)
        return tl.load(place, mask=column < DIM, other=0.0)
    if MASKED:
        return tl.load(place, mask=inside[:, None], other=0.0)
    return tl.load(place)


@triton.jit
def _cast(numbers, dtype: tl.constexpr, UPCAST: tl.constexpr):
    """Return numbers or codes in another dtype."""
    if UPCAST:  # the interpreter takes the bits of an integer for a bfloat16
        numbers = numbers.to(tl.float32)
    return numbers.to(dtype)


@triton.jit
def _product(a, b, total, UPCAST: tl.constexpr):
    """Return `total` + a @ b in float32."""
    if UPCAST:  # the interpreter multiplies bfloat16 as if its bits were integers
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def spread(numbers, DIM: tl.constexpr):
    """Multiply the groups of heads of DIM numbers, float32 [rows, width], by the normalised Hadamard matrix.

    A stage adds and subtracts the halves of each group, and shuffles the results, so that all stages are alike.
    """
    bits: tl.constexpr = _rotation_bits(DIM)
    rows: tl.constexpr = numbers.shape[0]
    width: tl.constexpr = numbers.shape[1]
    groups: tl.constexpr = (rows * width) >> bits
    for _ in tl.static_range(bits):
        low, high = tl.split(tl.permute(tl.reshape(numbers, [groups, 2, 1 << (bits - 1)]), (0, 2, 1)))
        numbers = tl.join(low + high, low - high)
    return tl.reshape(numbers, [rows, width]) * (2.0 ** (-0.5 * bits))


@triton.jit
def encoded(numbers, DIM: tl.constexpr):
    """Return codes and float16 scales of heads [n, width] in float32: rotated, and rounded as `kv_formats.Int8` does.

    A head with a NaN gets an infinite scale.
    """
    numbers = spread(numbers, DIM)
    exact = tl.max(tl.where(numbers == numbers, tl.abs(numbers), float("inf")), 1) / 127.0
    scale = exact.to(tl.float16)
    below = (scale.to(tl.float32) < exact).to(tl.int16)
    scale = (scale.to(tl.int16, bitcast=True) + below).to(tl.float16, bitcast=True)
    divisor = scale.to(tl.float32)[:, None]
    steps = tl.where((divisor > 0.0) & (divisor < float("inf")), numbers / divisor, 0.0)
    return (steps + _NEAREST).to(tl.int32, bitcast=True).to(tl.int8), scale


@triton.jit
def _add_pairs(even, odd, weights, pairs, fade, UPCAST: tl.constexpr):
    """Add weighted codes to the faded sums of the even and of the odd columns; `pairs` int16 [n, columns] has both."""
    even = _product(weights, _cast(pairs.to(tl.int8), weights.dtype, UPCAST), even * fade[:, None], UPCAST)
    odd = _product(weights, _cast((pairs >> 8).to(tl.int8), weights.dtype, UPCAST), odd * fade[:, None], UPCAST)
    return even, odd


@triton.jit
def _scales(scales, start, inside, MASKED: tl.constexpr, DIM: tl.constexpr):
    """Load the scale of each head that starts at `start` [n] in its pool; scales are in the order of the heads."""
    if MASKED:
        return tl.load(scales + start // DIM, mask=inside, other=0.0).to(tl.float32)
    return tl.load(scales + start // DIM).to(tl.float32)


@triton.jit
def _fold(
    highest,
    weight,
    sum0,
    sum1,
    odd0,
    odd1,
    query0,
    query1,
    key_pool,
    value_pool,
    key_scales,
    value_scales,
    key_start,  # [n] where each key starts in its pool
    value_start,
    inside,  # [n] is there a key?
    visible,  # [rows, n] does the row see it?
    score_scale,
    cap_scale,
    MASKED: tl.constexpr,
    CAPPED: tl.constexpr,
    SCALED: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DK0: tl.constexpr,
    DK1: tl.constexpr,
    DV0: tl.constexpr,
    DV1: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Add a run of n keys to each row's running maximum and sum of weights, and to its weighted values."""
    dtype: tl.constexpr = query0.dtype
    if SCALED:
        key_scale = _scales(key_scales, key_start, inside, MASKED, DK)
        value_scale = _scales(value_scales, value_start, inside, MASKED, DV)
    key0 = _cast(_part(key_pool, key_start, inside, MASKED, 0, DK0, DK), dtype, UPCAST)
    scores = tl.zeros([query0.shape[0], key_start.shape[0]], tl.float32)
    scores = _product(query0, tl.trans(key0), scores, UPCAST)
    if DK1 > 0:
        key1 = _cast(_part(key_pool, key_start, inside, MASKED, DK0, DK1, DK), dtype, UPCAST)
        scores = _product(query1, tl.trans(key1), scores, UPCAST)
    if SCALED:
        scores *= (key_scale * score_scale)[None, :]
    else:
        scores *= score_scale
    if CAPPED:
        scores = cap_scale - 2.0 * cap_scale / (tl.exp2(scores) + 1.0)  # cap * tanh(score / cap)
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    higher = tl.maximum(highest, tl.max(scores, 1))
    if MASKED:
        origin = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen nothing yet
    else:
        origin = higher
    fade = tl.exp2(highest - origin)
    weights = tl.exp2(scores - origin[:, None])
    weight = weight * fade + tl.sum(weights, 1)
    if SCALED:
        # Shared memory can be read by columns in 16 bits, but not in 8.
        pairs = value_pool.to(tl.pointer_type(tl.int16), bitcast=True)
        scaled = (weights * value_scale[None, :]).to(tl.bfloat16 if dtype == tl.float16 else dtype)
        value0 = _part(pairs, value_start // 2, inside, MASKED, 0, DV0 // 2, DV // 2)
        sum0, odd0 = _add_pairs(sum0, odd0, scaled, value0, fade, UPCAST)
        if DV1 > 0:
            value1 = _part(pairs, value_start // 2, inside, MASKED, DV0 // 2, DV1 // 2, DV // 2)
            sum1, odd1 = _add_pairs(sum1, odd1, scaled, value1, fade, UPCAST)
    else:
        weights = weights.to(dtype)
        value0 = _cast(_part(value_pool, value_start, inside, MASKED, 0, DV0, DV), dtype, UPCAST)
        sum0 = _product(weights, value0, sum0 * fade[:, None], UPCAST)
        if DV1 > 0:
            value1 = _cast(_part(value_pool, value_start, inside, MASKED, DV0, DV1, DV), dtype, UPCAST)
            sum1 = _product(weights, value1, sum1 * fade[:, None], UPCAST)
    return higher, weight, sum0, sum1, odd0, odd1


@triton.jit
def _starts(head, block, slot, head_stride, block_stride, token_stride, BLOCK_SIZE: tl.constexpr, WIDE: tl.constexpr):
    """Return the offset of each slot's key or value in its pool."""
    if WIDE:
        block = block.to(tl.int64)
        head = head.to(tl.int64)
    return head * head_stride + block * block_stride + (slot % BLOCK_SIZE) * token_stride


@triton.jit
def _store(target, first, numbers, inside, FROM: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr):
    """Store columns FROM + [0, WIDTH) of the rows at `target + first` [n]."""
    column = FROM + tl.arange(0, WIDTH)[None, :]
    numbers = numbers.to(target.dtype.element_ty)
    tl.store(target + first[:, None] + column, numbers, mask=inside[:, None] & (column < DIM))


@triton.jit
def attend_tiles(
    query,  # [heads, T, DK], any strides of heads and rows
    key_pool,  # [kv_heads, blocks, BLOCK_SIZE, DK], any strides but of the last
    value_pool,  # [kv_heads, blocks, BLOCK_SIZE, DV]
    key_scales,  # [kv_heads, blocks, BLOCK_SIZE, 1], if SCALED: the pools hold codes of rotated heads
    value_scales,
    tiles,  # int32 [HEADER + tiles * FIELDS] number of tiles, then the tiles
    block_ids,  # int32
    row_ids,  # int32, the tiles' rows
    positions,  # int32 [T]
    sinks,  # [heads], if SINKS
    output,  # [T, heads, DV], any strides but of the last
    partial,  # float32 [partials, heads, DV]
    lse,  # float32 [partials, heads] base-2 log-sum-exp
    score_scale,
    cap_scale,
    window,
    query_head,
    query_row,
    key_head,
    key_block,
    key_token,
    value_head,
    value_block,
    value_token,
    output_row,
    output_head,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per kv head
    DK: tl.constexpr,
    DV: tl.constexpr,
    DK0: tl.constexpr,
    DK1: tl.constexpr,
    DV0: tl.constexpr,
    DV1: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,  # stacked query rows of a tile: its rows, each with its GROUP heads
    KEYS: tl.constexpr,  # keys per iteration
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    SCALED: tl.constexpr,
    WIDE: tl.constexpr,  # whether offsets into the pools need 64 bits
    UPCAST: tl.constexpr,
):
    """Attend tiles of query rows to runs of keys: a fixed number of programs takes (tile, kv head) pairs in turn.

    The longest tiles come first, and every second turn reverses the order of programs. A tile's keys are read in
    iterations of KEYS slots. In tall tiles, iterations that all rows see whole need no mask and run first, in a loop of
    their own. Tiles of few rows mask every iteration: a mask costs them little, and a second loop would start with an
    empty pipeline. Block ids are loaded one iteration ahead, so that loads of keys never wait for them. A row with a
    single tile is finished here; every other row leaves partials for `merge_partials`.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    total = tl.load(tiles) * KV_HEADS
    stacked = tl.arange(0, ROWS)
    slot_in_run = tl.arange(0, KEYS)
    # Registers are scarce: disable_licm keeps the compiler from holding precomputed values over the loops.
    for turn in tl.range(0, tl.cdiv(total, programs), disable_licm=True):
        place = tl.where(turn % 2 == 0, program, programs - 1 - program)
        work = turn * programs + place
        if work < total:
            tile = tiles + _HEADER + (work // KV_HEADS).to(tl.int64) * _FIELDS
            kv_head = work % KV_HEADS
            block_offset, position = tl.load(tile + 0), tl.load(tile + 1)
            first, stop = tl.load(tile + 2), tl.load(tile + 3)
            row_offset, rows = tl.load(tile + 4), tl.load(tile + 5)
            clear_from, clear_to = tl.load(tile + 6), tl.load(tile + 7)
            partial_offset = tl.load(tile + 8)

            row_in_tile = stacked // GROUP
            taken = row_in_tile < rows
            head = kv_head * GROUP + stacked % GROUP
            row = tl.load(row_ids + row_offset + row_in_tile, mask=taken, other=0).to(tl.int64)
            query_start = head.to(tl.int64) * query_head + row * query_row
            query0 = _part(query, query_start, taken, True, 0, DK0, DK)
            query1 = query0
            if DK1 > 0:
                query1 = _part(query, query_start, taken, True, DK0, DK1, DK)
            highest = tl.full([ROWS], float("-inf"), tl.float32)
            weight = tl.zeros([ROWS], tl.float32)
            # Of scaled values, the even columns are summed apart from the odd ones.
            sum0 = tl.zeros([ROWS, DV0 // 2 if SCALED else DV0], tl.float32)
            sum1, odd0, odd1 = weight, weight, weight
            if DV1 > 0:
                sum1 = tl.zeros([ROWS, DV1 // 2 if SCALED else DV1], tl.float32)
            if SCALED:
                odd0, odd1 = sum0, sum1
            ids = block_ids + block_offset

            whole = 0  # iterations without a mask
            if ROWS > _MASKED_ROWS:
                whole = clear_to - clear_from
                at = clear_from * KEYS
                block = tl.load(ids + (at + slot_in_run) // BLOCK_SIZE)
                for _ in tl.range(clear_from, clear_to, disable_licm=True):
                    slot = at + slot_in_run
                    key_start = _starts(kv_head, block, slot, key_head, key_block, key_token, BLOCK_SIZE, WIDE)
                    value_start = _starts(kv_head, block, slot, value_head, value_block, value_token, BLOCK_SIZE, WIDE)
                    at += KEYS
                    block = tl.load(ids + (at + slot_in_run) // BLOCK_SIZE)
                    highest, weight, sum0, sum1, odd0, odd1 = _fold(
                        highest, weight, sum0, sum1, odd0, odd1, query0, query1, key_pool, value_pool,
                        key_scales, value_scales, key_start, value_start, taken, taken, score_scale, cap_scale,
                        False, CAPPED, SCALED, DK, DV, DK0, DK1, DV0, DV1, UPCAST,
                    )  # fmt: skip

            row_slot = tl.load(positions + row, mask=taken, other=0) - position
            last = tl.minimum(row_slot, stop - 1)
            at = tl.where(clear_from > 0, 0, whole) * KEYS
            block = tl.load(ids + (at + slot_in_run) // BLOCK_SIZE)
            for step in tl.range(0, tl.cdiv(stop, KEYS) - whole, disable_licm=True):
                slot = at + slot_in_run
                inside = (slot >= first) & (slot < stop)
                key_start = _starts(kv_head, block, slot, key_head, key_block, key_token, BLOCK_SIZE, WIDE)
                value_start = _starts(kv_head, block, slot, value_head, value_block, value_token, BLOCK_SIZE, WIDE)
                visible = tl.where(slot >= first, slot, _NEVER)[None, :] <= last[:, None]
                if WINDOWED:
                    visible &= slot[None, :] > (row_slot - window)[:, None]
                at += tl.where(step + 1 == clear_from, whole + 1, 1) * KEYS
                block = tl.load(ids + (at + slot_in_run) // BLOCK_SIZE)
                highest, weight, sum0, sum1, odd0, odd1 = _fold(
                    highest, weight, sum0, sum1, odd0, odd1, query0, query1, key_pool, value_pool,
                    key_scales, value_scales, key_start, value_start, inside, visible, score_scale, cap_scale,
                    True, CAPPED, SCALED, DK, DV, DK0, DK1, DV0, DV1, UPCAST,
                )  # fmt: skip

            if SCALED:
                sum0 = tl.reshape(tl.join(sum0, odd0), [ROWS, DV0])
                if DV1 > 0:
                    sum1 = tl.reshape(tl.join(sum1, odd1), [ROWS, DV1])
            if partial_offset < 0:
                if ROWS >= 128:  # registers are scarcest here: these are read again from the L1 cache, not kept
                    taken = row_in_tile < tl.load(tile + 5, cache_modifier=".ca")
                    row = tl.load(row_ids + row_offset + row_in_tile, mask=taken, other=0, cache_modifier=".ca")
                    row = row.to(tl.int64)
                if SINKS:
                    sink = tl.load(sinks + head, mask=taken, other=0.0).to(tl.float32) * _LOG2_E
                    weight += tl.exp2(sink - highest)
                share = 1.0 / tl.where(taken, weight, 1.0)
                start = row * output_row + head.to(tl.int64) * output_head
                _store(output, start, sum0 * share[:, None], taken, 0, DV0, DV)
                if DV1 > 0:
                    _store(output, start, sum1 * share[:, None], taken, DV0, DV1, DV)
            else:
                share = 1.0 / tl.where(weight == 0.0, 1.0, weight)
                number = (partial_offset + row_in_tile).to(tl.int64) * (KV_HEADS * GROUP) + head
                _store(partial, number * DV, sum0 * share[:, None], taken, 0, DV0, DV)
                if DV1 > 0:
                    _store(partial, number * DV, sum1 * share[:, None], taken, DV0, DV1, DV)
                tl.store(lse + number, highest + tl.log2(weight), mask=taken)


@triton.jit
def merge_partials(
    partial,  # float32 [partials, HEADS, DV]
    lse,  # float32 [partials, HEADS] base 2
    rows,  # int32 [HEADER + rows] number of rows to merge, then the rows
    offsets,  # int32 [rows + 1]
    partial_ids,  # int32, each row's partials in the order of their keys
    sinks,  # [HEADS], if SINKS
    output,  # [T, HEADS, DV], any strides but of the last
    output_row,
    output_head,
    HEADS: tl.constexpr,
    DV: tl.constexpr,
    DV_PADDED: tl.constexpr,
    AT_ONCE: tl.constexpr,  # partials of one iteration
    SINKS: tl.constexpr,
):
    """Merge rows' partials: weigh them by their log-sum-exps, in the order of keys.

    A fixed number of programs takes (row, head) pairs in turn. Sinks take weight and add no value. A row without
    partials gets zeros. The order of additions depends on the row's partials alone.
    """
    pair, pairs = tl.program_id(0), tl.load(rows) * HEADS
    while pair < pairs:
        index, head = pair // HEADS, pair % HEADS
        row = tl.load(rows + _HEADER + index).to(tl.int64)
        begin, end = tl.load(offsets + index), tl.load(offsets + index + 1)
        column = tl.arange(0, DV_PADDED)
        highest, weight = float("-inf"), 0.0
        if SINKS:
            highest, weight = tl.load(sinks + head).to(tl.float32) * _LOG2_E, 1.0
        total = tl.zeros([DV_PADDED], tl.float32)
        for start in tl.range(begin, end, AT_ONCE):
            ordinal = start + tl.arange(0, AT_ONCE)
            there = ordinal < end
            number = tl.load(partial_ids + ordinal, mask=there, other=0).to(tl.int64) * HEADS + head
            logs = tl.load(lse + number, mask=there, other=float("-inf"))
            higher = tl.maximum(highest, tl.max(logs, 0))
            origin = tl.where(higher == float("-inf"), 0.0, higher)
            fade, shares = tl.exp2(highest - origin), tl.exp2(logs - origin)
            inside = there[:, None] & (column < DV)[None, :]
            parts = tl.load(partial + number[:, None] * DV + column[None, :], mask=inside, other=0.0)
            total = total * fade + tl.sum(parts * shares[:, None], 0)
            weight = weight * fade + tl.sum(shares, 0)
            highest = higher
        result = total / tl.where(weight == 0.0, 1.0, weight)
        place = output + row * output_row + head.to(tl.int64) * output_head + column
        tl.store(place, result.to(output.dtype.element_ty), mask=column < DV)
        pair += tl.num_programs(0)


@triton.jit(do_not_specialize=["heads"])
def spread_heads(
    source,  # [heads of all tokens, DIM] by token and head
    target,  # the same
    heads,
    source_token,
    source_head,
    target_token,
    target_head,
    HEADS: tl.constexpr,  # of a token
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    AT_ONCE: tl.constexpr,  # heads of one program
    FACTOR: tl.constexpr,
):
    """Rotate some heads, as they are rotated before they are stored in 8 bits, and multiply them by FACTOR."""
    item = tl.program_id(0).to(tl.int64) * AT_ONCE + tl.arange(0, AT_ONCE)[:, None]
    token, head, inside = item // HEADS, item % HEADS, item < heads
    numbers = _rows(source, token, head, inside, source_token, source_head, DIM, DIM_PADDED)
    column = tl.arange(0, DIM_PADDED)[None, :]
    place = target + token * target_token + head * target_head + column
    found = spread(numbers.to(tl.float32), DIM) * FACTOR
    tl.store(place, found.to(target.dtype.element_ty), mask=inside & (column < DIM))


@triton.jit
def _rows(source, token, head, inside, token_stride, head_stride, DIM: tl.constexpr, DIM_PADDED: tl.constexpr):
    """Load the numbers of (token, head) pairs [n, 1] -> [n, DIM_PADDED], where `inside` [n, 1] is true."""
    column = tl.arange(0, DIM_PADDED)[None, :]
    return tl.load(source + token * token_stride + head * head_stride + column, mask=inside & (column < DIM), other=0.0)


@triton.jit
def kept(numbers, dtype: tl.constexpr, stored: tl.constexpr):
    """Return numbers of a model in `dtype` as a pool in `stored` holds them; in fewer bits, infinity becomes NaN."""
    found = numbers.to(stored)
    if stored != dtype:
        found = tl.where(tl.abs(found) == float("inf"), float("nan"), found)
    return found


@triton.jit
def _store_slots(pool, scales, numbers, slot, head, inside, block_stride, slot_stride, head_stride,
                 DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, SCALED: tl.constexpr):  # fmt: skip
    """Store numbers [n, DIM_PADDED] at (slot, head) pairs [n, 1] of a pool, where `inside` [n, 1] is true."""
    column = tl.arange(0, numbers.shape[1])[None, :]
    place = (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * slot_stride + head * head_stride
    if SCALED:
        stored, scale = encoded(numbers.to(tl.float32), DIM)
        tl.store(scales + place // DIM, scale[:, None], mask=inside)
    else:
        stored = kept(numbers, numbers.dtype, pool.dtype.element_ty)
    tl.store(pool + place + column, stored, mask=inside & (column < DIM))


@triton.jit(do_not_specialize=["tokens"])
def write_slots(
    key,  # [kv_heads, T, DK], any strides of heads and tokens
    value,  # [kv_heads, T, DV]
    key_pool,  # [kv_heads, blocks, BLOCK_SIZE, DK], any strides but of the last
    value_pool,  # [kv_heads, blocks, BLOCK_SIZE, DV]
    key_scales,  # [kv_heads, blocks, BLOCK_SIZE, 1], if SCALED
    value_scales,
    slots,  # int64 [T], -1: a padded row
    tokens,  # T
    key_head, key_token, value_head, value_token,
    key_pool_head, key_pool_block, key_pool_token, value_pool_head, value_pool_block, value_pool_token,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    DK: tl.constexpr,
    DK_PADDED: tl.constexpr,
    DV: tl.constexpr,
    DV_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,  # tokens of one program
    SCALED: tl.constexpr,  # as codes of rotated heads
):  # fmt: skip
    """Write all heads of some tokens' keys and values to their slots."""
    pair = tl.arange(0, TOKENS * HEADS_PADDED)[:, None]
    token = tl.program_id(0).to(tl.int64) * TOKENS + pair // HEADS_PADDED
    slot = tl.load(slots + token, mask=token < tokens, other=-1)
    head = (pair % HEADS_PADDED).to(tl.int64)
    inside = (slot >= 0) & (head < HEADS)
    keys = _rows(key, token, head, inside, key_token, key_head, DK, DK_PADDED)
    values = _rows(value, token, head, inside, value_token, value_head, DV, DV_PADDED)
    _store_slots(
        key_pool, key_scales, keys, slot, head, inside, key_pool_block, key_pool_token, key_pool_head,
        DK, BLOCK_SIZE, SCALED,
    )  # fmt: skip
    _store_slots(
        value_pool, value_scales, values, slot, head, inside, value_pool_block, value_pool_token, value_pool_head,
        DV, BLOCK_SIZE, SCALED,
    )  # fmt: skip


@triton.jit
def copy_regions(
    addresses,  # int64 [regions] where block 0 of each region starts
    strides,  # int64 [regions] words from one block of a region to the next
    pairs,  # int64 [pairs, 2] source and destination block; -1: a padded pair
    WORDS: tl.constexpr,  # int32 words that a block has in each region
    SPAN: tl.constexpr,  # words that one program copies
    ALIGNMENT: tl.constexpr,  # words that divide WORDS, every stride and every address
):
    """Copy some words of one block from the source to the destination, in program (pair, region, span)."""
    source = tl.load(pairs + 2 * tl.program_id(0))
    destination = tl.load(pairs + 2 * tl.program_id(0) + 1)
    if destination >= 0:
        region = tl.program_id(1)
        start = tl.load(addresses + region).to(tl.pointer_type(tl.int32))
        start = tl.multiple_of(start, 4 * ALIGNMENT)
        stride = tl.multiple_of(tl.load(strides + region), ALIGNMENT)
        word = tl.program_id(2) * SPAN + tl.arange(0, SPAN)
        words = tl.load(start + source * stride + word, mask=word < WORDS)
        tl.store(start + destination * stride + word, words, mask=word < WORDS)
