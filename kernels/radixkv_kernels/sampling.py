"""Draw the random tokens of a batch in one launch, with a program for each row.

A program never sorts its row. It searches the threshold of top-k, and then the threshold of top-p, by bisection over
the bits of the scaled logits, which are ordered like their magnitudes. Each pass over the row tests three thresholds,
so 16 passes find one of the 2**31. All passes but the first read the row from the L2 cache.

The draw is an exponential race: the token with the largest ratio of its weight and a random number of its own wins.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
# ruff: noqa: N803  (compile-time arguments are upper case, as in every Triton kernel)

import torch
import triton
import triton.language as tl
from torch import Tensor

from radixkv_kernels.launches import Launcher

PAGE = 256
"""Tokens whose weights are summed together in rows without a filter."""

TILE, WARPS = 4096, 16  # tokens and warps of an iteration

_GREEDY, _PLAIN = tl.constexpr(0), tl.constexpr(1)
_INFINITE = tl.constexpr(0x7F800000)  # bits of the largest magnitude
# The constants of SplitMix64 (Steele, Lea, Flood 2014), as signed integers.
_STEP, _FIRST, _SECOND = (
    tl.constexpr(number - 2**64) for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def draw(
    logits: Tensor,
    best: Tensor,
    kinds: Tensor,
    keys: Tensor,
    top_k: Tensor,
    temperature: Tensor,
    top_p: Tensor,
    least: Tensor,
    *,
    tile: int = TILE,
) -> Tensor:
    """Sample logits [rows, vocab] with maxima [rows]: int64 [rows], undefined tokens for greedy rows.

    The other tensors have one number for each row: see `draw_rows`. Rows of NaN get a token below `vocab`. `tile` is a
    power of two, at least PAGE. Costs one launch. A filtered row is read 17 times, with both top-k and top-p 33 times,
    a row without a filter once.
    """
    if logits.dtype != torch.float32:
        logits, best = (logits - best[:, None]).float(), torch.zeros_like(best, dtype=torch.float32)
    count, vocab = logits.shape
    tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
    if count:
        tensors = logits, tokens, best, kinds, keys, top_k, temperature, top_p, least
        numbers = vocab, logits.stride(0)
        DRAW_ROWS(count, tensors, (), numbers, {"TILE": tile, "PAGE": PAGE}, num_warps=WARPS)
    return tokens


@triton.jit
def draw_rows(
    logits,  # float32 [rows, vocab], any stride of rows
    tokens,  # int64 [rows] the result
    best,  # float32 [rows] their maxima
    kinds,  # int64 [rows] 0 greedy, 1 without a filter, 2 filtered
    keys,  # int64 [rows] of the random numbers
    top_k,  # int64 [rows] 0 for none
    temperature,  # float32 [rows]
    top_p,  # float64 [rows] 1 for none
    least,  # float32 [rows] smallest scaled logit that min_p keeps
    vocab,
    row_stride,
    TILE: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Sample one row."""
    row = tl.program_id(0)
    kind = tl.load(kinds + row)
    line = logits + row.to(tl.int64) * row_stride
    highest, heat, key = tl.load(best + row), tl.load(temperature + row), tl.load(keys + row)
    token = tl.full([], 0, tl.int32)
    if kind == _PLAIN:
        page = _drawn_page(line, highest, heat, key, vocab, TILE, PAGE)
        ids = page * PAGE + tl.arange(0, PAGE)
        weights = tl.exp(_scaled(line, ids, ids < vocab, highest, heat)).to(tl.float64)
        ratio = weights / _exponential(key, ids)
        token = _winner(tl.where(ratio >= 0, ratio, -1.0), ids)  # NaN loses
    elif kind != _GREEDY:
        kept = tl.load(top_k + row)
        limit = tl.full([], _INFINITE, tl.int32)
        if kept > 0:
            limit = _search(line, highest, heat, vocab, limit, kept.to(tl.float64), False, TILE)
        share = tl.load(top_p + row)
        if share < 1.0:
            total = _measure(line, highest, heat, vocab, limit, True, TILE)
            limit = _search(line, highest, heat, vocab, limit, share * total, True, TILE)
        token = _drawn_token(line, highest, heat, key, vocab, limit, tl.load(least + row), TILE)
    tl.store(tokens + row, tl.minimum(token, vocab - 1))


@triton.jit
def _scaled(line, ids, inside, highest, heat):
    """Return logits over temperature, shifted so that the maximum is 0; -inf outside of the vocabulary."""
    return tl.div_rn(tl.load(line + ids, mask=inside, other=float("-inf")) - highest, heat)


@triton.jit
def _magnitude(scaled):
    """Return the bits of the magnitudes of scaled logits, which are ordered like the magnitudes."""
    return tl.abs(scaled).to(tl.int32, bitcast=True)


@triton.jit
def _exponential(key, ids):
    """Return the exponentially distributed float64 of (key, id)."""
    bits = key + ids.to(tl.int64) * _STEP
    bits = (bits ^ ((bits >> 30) & 0x3FFFFFFFF)) * _FIRST  # the masks turn arithmetic shifts into logical ones
    bits = (bits ^ ((bits >> 27) & 0x1FFFFFFFFF)) * _SECOND
    bits = bits ^ ((bits >> 31) & 0x1FFFFFFFF)
    uniform = (((bits >> 12) & 0xFFFFFFFFFFFFF).to(tl.float64) + 0.5) * 2.220446049250313e-16
    return -tl.log(uniform)


@triton.jit
def _amounts(scaled, inside, MASS: tl.constexpr):
    """Return how much each token counts: its weight, or 1."""
    if MASS:
        return tl.where(inside, tl.exp(scaled), 0.0)
    return tl.where(inside, 1.0, 0.0)


@triton.jit
def _measure(line, highest, heat, vocab, limit, MASS: tl.constexpr, TILE: tl.constexpr):
    """Return the weight, or the number, of tokens with magnitudes up to `limit`."""
    total = tl.zeros([TILE], tl.float32)
    for start in tl.range(0, vocab, TILE):
        ids = start + tl.arange(0, TILE)
        scaled = _scaled(line, ids, ids < vocab, highest, heat)
        total += _amounts(scaled, (ids < vocab) & (_magnitude(scaled) <= limit), MASS)
    return tl.sum(total.to(tl.float64), axis=0)


@triton.jit
def _search(line, highest, heat, vocab, limit, target, MASS: tl.constexpr, TILE: tl.constexpr):
    """Return the smallest magnitude, at most `limit`, up to which tokens have `target` weight, or number, together."""
    low = tl.full([], -1, tl.int32)  # too small
    high = limit
    while high - low > 1:
        step = tl.maximum((high - low) // 4, 1)
        first, second, third = low + step, tl.minimum(low + 2 * step, high), tl.minimum(low + 3 * step, high)
        total1 = tl.zeros([TILE], tl.float32)
        total2 = tl.zeros([TILE], tl.float32)
        total3 = tl.zeros([TILE], tl.float32)
        for start in tl.range(0, vocab, TILE):
            ids = start + tl.arange(0, TILE)
            scaled = _scaled(line, ids, ids < vocab, highest, heat)
            magnitude = _magnitude(scaled)
            amounts = _amounts(scaled, ids < vocab, MASS)
            total1 += tl.where(magnitude <= first, amounts, 0.0)
            total2 += tl.where(magnitude <= second, amounts, 0.0)
            total3 += tl.where(magnitude <= third, amounts, 0.0)
        enough1 = tl.sum(total1.to(tl.float64), axis=0) >= target
        enough2 = tl.sum(total2.to(tl.float64), axis=0) >= target
        enough3 = tl.sum(total3.to(tl.float64), axis=0) >= target
        low = tl.where(enough1, low, tl.where(enough2, first, tl.where(enough3, second, third)))
        high = tl.where(enough1, first, tl.where(enough2, second, tl.where(enough3, third, high)))
    return high


@triton.jit
def _drawn_page(line, highest, heat, key, vocab, TILE: tl.constexpr, PAGE: tl.constexpr):
    """Return the number of the page that wins by the sums of its weights."""
    most = tl.full([TILE // PAGE], -1.0, tl.float64)
    winner = tl.zeros([TILE // PAGE], tl.int32)
    for start in tl.range(0, vocab, TILE):
        ids = start + tl.arange(0, TILE)
        scaled = _scaled(line, ids, ids < vocab, highest, heat)
        weights = tl.exp(scaled).to(tl.float64)
        page = start // PAGE + tl.arange(0, TILE // PAGE)
        ratio = tl.sum(tl.reshape(weights, [TILE // PAGE, PAGE]), axis=1) / _exponential(key, -1 - page)
        winner = tl.where(ratio > most, page, winner)
        most = tl.maximum(most, ratio)
    return _winner(most, winner)


@triton.jit
def _drawn_token(line, highest, heat, key, vocab, limit, least, TILE: tl.constexpr):
    """Return the token that wins among those with magnitudes up to `limit` and scaled logits from `least` on."""
    most = tl.full([TILE], -1.0, tl.float64)
    winner = tl.zeros([TILE], tl.int32)
    for start in tl.range(0, vocab, TILE):
        ids = start + tl.arange(0, TILE)
        scaled = _scaled(line, ids, ids < vocab, highest, heat)
        kept = (ids < vocab) & (_magnitude(scaled) <= limit) & (scaled >= least)
        if tl.max(kept.to(tl.int32), axis=0) > 0:  # double precision is slow, and most tiles keep nothing
            ratio = tl.where(kept, tl.exp(scaled.to(tl.float64)) / _exponential(key, ids), -1.0)
            winner = tl.where(ratio > most, ids, winner)
            most = tl.maximum(most, ratio)
    return _winner(most, winner)


@triton.jit
def _winner(most, winner):
    """Return the smallest winner with the largest ratio."""
    return tl.min(tl.where(most == tl.max(most, axis=0), winner, 0x7FFFFFFF), axis=0)


DRAW_ROWS = Launcher(draw_rows)
