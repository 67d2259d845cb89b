"""Part 4, chunks after cached tokens over paged KV, against torch's own attention over contiguous KV.

The fastest backend of `scaled_dot_product_attention` that gives the reference's numbers is the peer, with its name.
Operations of masked pairs are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .decode import fitting
from .pools import Attention, Pools, copies_for, error
from .result import Bench, Row
from .shapes import Batch, HeadShape, chunk, flops, tflop_s
from .timing import Timing, measure

BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
OTHERS = (SDPBackend.MATH,)
"""Backends for devices on which no other runs, such as a CPU."""


def run(bench: Bench) -> Iterator[Row]:
    """Every length of chunk over every length of cache, for the first head shape."""
    shape = bench.sizes.shapes[0]
    for cached in bench.sizes.cached:
        for new in bench.sizes.new:
            batch = chunk(new, cached)
            known = {"shape": shape.name, "new": new, "cached": cached}
            yield from bench.case(batch.name, lambda b=batch: _case(bench, shape, b), **known)


def _case(bench: Bench, shape: HeadShape, batch: Batch) -> Row:
    copies = copies_for(shape, batch.unique_tokens, bench.sizes.rotate, bench.sizes.copies)
    pools = fitting(bench, shape, batch, copies)
    query = pools.query(batch.rows)
    ours = Attention(pools, batch, query)
    off = ours.error()
    timing = measure(ours.calls(), bench.device, bench.sizes.seconds)
    operations = flops(shape, batch)
    rate = tflop_s(operations, timing.us)
    row: Row = {**timing.row(), "tflop_s": round(rate, 3), "error": round(off, 5), "tiles": list(ours.step.counts)}
    peer, tried = best_peer(bench, pools, batch, query)
    if peer is not None:
        name, time = peer
        row |= {"sdpa_backend": name, "sdpa_us": round(time.us, 2), "sdpa_how": time.how}
        row |= {"sdpa_tflop_s": round(tflop_s(operations, time.us), 3), "of_sdpa": round(time.us / timing.us, 4)}
    return row | {"sdpa_tried": tried}


def best_peer(
    bench: Bench, pools: Pools, batch: Batch, query: Tensor
) -> tuple[tuple[str, Timing] | None, dict[str, str]]:
    """Return torch's fastest backend that computes the same, and the time of each, or why it has none."""
    keys = [tuple(_contiguous(pool, batch) for pool in pools.of(copy)) for copy in range(len(pools))]
    best, tried = None, {}
    for backends in (BACKENDS, OTHERS):
        for name, calls in _ways(query, keys, pools.shape, backends):
            try:
                error(lambda calls=calls: calls[0]().transpose(0, 1), pools, batch, query)
                timing = measure(calls, bench.device, bench.sizes.seconds)
            except Exception as reason:  # backends that cannot do this raise many exceptions
                tried[name] = f"{type(reason).__name__}: {reason}".splitlines()[0][:200]
                continue
            tried[name] = f"{timing.us:.1f} us"
            if best is None or timing.us < best[1].us:
                best = name, timing
        if best is not None:
            break
    return best, tried


def _contiguous(pool: Tensor, batch: Batch) -> Tensor:
    """The batch's only sequence as [1, kv_heads, length, dim] in one piece."""
    table = torch.from_numpy(batch.tables[0]).long().to(pool.device)
    return pool[:, table].flatten(1, 2)[None, :, : batch.kv[0]].contiguous()


def _ways(
    query: Tensor, keys: list[tuple[Tensor, ...]], shape: HeadShape, backends: tuple[SDPBackend, ...]
) -> Iterator[tuple[str, list[Callable[[], Tensor]]]]:
    """Each backend, and one call for each copy of KV -> [heads, rows, dim]."""
    rows, length = query.shape[1], keys[0][0].shape[2]
    asked = query[None].contiguous()
    from torch.nn.attention.bias import causal_lower_right  # imports torch._dynamo, which takes seconds

    mask = {"is_causal": True} if rows == length else {"attn_mask": causal_lower_right(rows, length)}
    for backend in backends:

        def call(key: Tensor, value: Tensor, backend: SDPBackend = backend) -> Tensor:
            with sdpa_kernel([backend]):
                return F.scaled_dot_product_attention(asked, key, value, scale=shape.scale, enable_gqa=True, **mask)[0]

        yield backend.name, [lambda k=key, v=value, call=call: call(k, v) for key, value in keys]
