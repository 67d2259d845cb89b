"""Part 5, the same decode by other engines' kernels, in the same run: FlashInfer, vLLM's and SGLang's Triton kernels.

Each gets KV in its own layout. FlashInfer has to be installed; vLLM's and SGLang's kernels come as plain files from the
folder that `--peers` names, which holds `vllm/` and `sglang/` in the layout of their wheels. Each is checked by the
reference before it is timed. `ratio` is its time over ours: above 1, ours is faster.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import itertools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import torch
import triton
from torch import Tensor

from . import foreign
from .decode import fitting
from .pools import Attention, Pools, copies_for, error
from .result import Bench, Row, Skipped, why
from .shapes import BLOCK, Batch, HeadShape, private, shared, two_level
from .timing import Timing, measure

Calls = list[Callable[[], Tensor]]


class Peer(Protocol):
    """A kernel of another engine: made once, given cases."""

    name: str

    def calls(self, pools: Pools, batch: Batch, query: Tensor) -> Calls:
        """One call for each pool -> [rows, heads, dim]; raises Skipped for cases that it cannot compute."""
        ...


def run(bench: Bench) -> Iterator[Row]:
    """Every case by us and by every peer that is there."""
    peers: list[Peer] = []
    for name, make in MAKERS.items():
        try:
            peers.append(make(bench))
        except Exception as reason:  # an engine's file may fail in any way when its versions do not match
            yield {"case": "all", "peer": name, **why(reason)}
    compiled = [peer for peer in peers if peer.name.startswith("FlashInfer")]  # at its first use, for minutes
    rounds = [[peer for peer in peers if peer not in compiled], *([compiled] if compiled else [])]
    for some, batch, shape in itertools.product(rounds, batches(bench), bench.sizes.shapes):
        yield from bench.case(batch.name, lambda s=shape, b=batch, p=some: _case(bench, s, b, p), shape=shape.name)


def batches(bench: Bench) -> list[Batch]:
    """Decodes that share nothing, and trees."""
    sizes = bench.sizes
    return [
        *(private(*each) for each in sizes.peers),
        shared(*sizes.trees[0]),
        two_level(*sizes.agents[0]),
    ]


def _case(bench: Bench, shape: HeadShape, batch: Batch, peers: list[Peer]) -> Iterator[Row]:
    copies = copies_for(shape, batch.unique_tokens, bench.sizes.rotate, bench.sizes.copies)
    pools = fitting(bench, shape, batch, copies)
    query = pools.query(batch.rows)
    kind = "tree" if batch.levels else "decode"
    ours = Attention(pools, batch, query)
    ours.error()
    own = measure(ours.calls(), bench.device, bench.sizes.seconds)
    for peer in peers:
        row: Row = {"peer": peer.name, "kind": kind, "ours_us": round(own.us, 2)}
        try:
            off, theirs = _timed(bench, peer, pools, batch, query)
        except Exception as reason:
            yield row | why(reason)
            continue
        yield row | theirs.row() | {"ratio": round(theirs.us / own.us, 4), "error": round(off, 5)}
    again = measure(ours.calls(), bench.device, bench.sizes.seconds)
    yield {"peer": "radixkv", "kind": kind, "spread": round(again.us / own.us, 4)} | again.row()


def _timed(bench: Bench, peer: Peer, pools: Pools, batch: Batch, query: Tensor) -> tuple[float, Timing]:
    calls = peer.calls(pools, batch, query)
    off = error(calls[0], pools, batch, query)
    return off, measure(calls, bench.device, bench.sizes.seconds)


def token_major(pools: Pools) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of every pool as [blocks, BLOCK, kv_heads, dim], in this order of memory."""
    return [tuple(pool.permute(1, 2, 0, 3).contiguous() for pool in pools.of(i)) for i in range(len(pools))]


def _int32(values: Any, device: torch.device) -> Tensor:
    return torch.as_tensor(np.asarray(values), dtype=torch.int32).to(device)


# ---- vLLM


class VllmTriton:
    """vLLM's unified Triton attention, over its own layout, with segments as its backend sets them."""

    name = "vLLM Triton"
    module = "vllm.v1.attention.ops.triton_unified_attention"
    segments = 16
    least_grid = 128

    def __init__(self, folder: Path) -> None:
        self._attend = foreign.load(self.module, folder, _vllm_stubs()).unified_attention

    def calls(self, pools: Pools, batch: Batch, query: Tensor) -> Calls:
        """Decodes only: it reads every sequence alone."""
        shape, place = pools.shape, query.device
        rows, width = batch.rows, triton.next_power_of_2(shape.dim)
        asked = query.transpose(0, 1).contiguous()
        lengths = _int32(batch.kv, place)
        starts = _int32(range(rows + 1), place)
        table = np.zeros((rows, max(map(len, batch.tables))), dtype=np.int32)
        for row, blocks in zip(table, batch.tables, strict=True):
            row[: len(blocks)] = blocks
        tables = _int32(table, place)
        partial = torch.empty(rows, shape.heads, self.segments, width, dtype=torch.float32, device=place)
        highest, total = (torch.empty(partial.shape[:3], dtype=torch.float32, device=place) for _ in range(2))

        def call(key: Tensor, value: Tensor) -> Tensor:
            output = torch.empty_like(asked)
            self._attend(
                q=asked,
                k=key,
                v=value,
                out=output,
                cu_seqlens_q=starts,
                max_seqlen_q=1,
                seqused_k=lengths,
                max_seqlen_k=max(batch.kv),
                softmax_scale=shape.scale,
                causal=True,
                window_size=(-1, -1),
                block_table=tables,
                softcap=0.0,
                q_descale=None,
                k_descale=None,
                v_descale=None,
                seq_threshold_3D=self.least_grid // shape.kv_heads,
                num_par_softmax_segments=self.segments,
                softmax_segm_output=partial,
                softmax_segm_max=highest,
                softmax_segm_expsum=total,
            )
            return output

        return [lambda k=key, v=value: call(k, v) for key, value in token_major(pools)]


class _KVQuantMode(enum.IntEnum):
    """The kinds of quantized KV in vLLM's kernel; only the first is used here."""

    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3
    INT4_PER_TOKEN_HEAD = 4
    INT2_PER_TOKEN_HEAD = 5


class _Platform:
    """The properties of the platform that vLLM's kernel reads."""

    @staticmethod
    def fp8_dtype() -> torch.dtype:
        return torch.float8_e4m3fn

    @staticmethod
    def is_device_capability_family(_: int) -> bool:
        return False  # asked for heads of 256 only


def _vllm_stubs() -> foreign.Stubs:
    return {
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.platforms": {"current_platform": _Platform()},
        "vllm.triton_utils": {"triton": triton, "tl": importlib.import_module("triton.language")},
        "vllm.v1.kv_cache_interface": {"KVQuantMode": _KVQuantMode},
    }


# ---- SGLang


class SglangTriton:
    """SGLang's Triton decode, over its own layout of single slots, with splits as its backend counts them."""

    name = "SGLang Triton"
    modules = (
        ("sglang.kernels.ops.attention.decode_attention", "sglang.kernels.ops.attention.metadata"),
        ("sglang.srt.layers.attention.triton_ops.decode_attention", "sglang.srt.layers.attention.triton_ops.metadata"),
    )
    most_splits = 8  # the default of its server

    def __init__(self, folder: Path, processors: int, *, early: bool) -> None:
        """`early` lets its second launch begin before the first has ended, as its backend does from Hopper on."""
        self._processors, self._early = processors, early
        there = [pair for pair in self.modules if folder.joinpath(*pair[0].split(".")).with_suffix(".py").is_file()]
        if not there:
            raise ImportError(f"{folder} has no {self.modules[0][0].replace('.', '/')}.py")
        self._attend, self._splits = (foreign.load(name, folder, _sglang_stubs(processors)) for name in there[0])

    def calls(self, pools: Pools, batch: Batch, query: Tensor) -> Calls:
        """Decodes only: it reads every sequence alone."""
        shape, place, rows = pools.shape, query.device, batch.rows
        asked = query.transpose(0, 1).contiguous()
        slots = [(t[:, None].astype(np.int64) * BLOCK + np.arange(BLOCK)).ravel()[:n] for t, n in _sequences(batch)]
        indices = torch.from_numpy(np.concatenate(slots)).to(place)
        starts = _int32(np.concatenate([[0], np.cumsum(batch.kv)]), place)
        splits = self._num_splits(_int32(batch.kv, place), shape)
        partial = torch.empty(rows, shape.heads, self.most_splits, shape.dim, dtype=torch.float32, device=place)
        known = inspect.signature(self._attend.decode_attention_fwd).parameters
        options = {"use_pdl": True} if self._early and "use_pdl" in known else {}
        lse = torch.empty(partial.shape[:3], dtype=torch.float32, device=place)

        def call(key: Tensor, value: Tensor) -> Tensor:
            output = torch.empty_like(asked)
            self._attend.decode_attention_fwd(
                asked,
                key,
                value,
                output,
                starts,
                indices,
                partial,
                lse,
                splits,
                self.most_splits,
                shape.scale,
                1.0,
                1.0,
                **options,
            )
            return output

        flat = [(key.flatten(0, 1), value.flatten(0, 1)) for key, value in token_major(pools)]
        return [lambda k=key, v=value: call(k, v) for key, value in flat]

    def _num_splits(self, lengths: Tensor, shape: HeadShape) -> Tensor:
        """As its backend counts them: by its own kernel."""
        splits = torch.empty_like(lengths)
        self._splits.get_num_kv_splits_triton[(1,)](
            splits,
            lengths,
            len(lengths),
            1,
            shape.heads,
            shape.kv_heads,
            self.most_splits,
            self._processors,
            MAX_NUM_SEQ=max(256, triton.next_power_of_2(len(lengths))),
        )
        return splits


def _sequences(batch: Batch) -> Iterator[tuple[Any, int]]:
    return zip(batch.tables, batch.kv, strict=True)


class _Unset:
    """An environment of which nothing is set."""

    def __getattr__(self, name: str) -> Any:
        return type("Variable", (), {"get": staticmethod(lambda: False)})


def _sglang_stubs(processors: int) -> foreign.Stubs:
    no = {name: lambda: False for name in ("is_hip", "is_gfx95_supported", "is_gfx1250_supported", "is_cuda")}
    return {
        "sglang.srt.environ": {"envs": _Unset()},
        "sglang.srt.utils": no | {"get_device_core_count": lambda *_: processors},
    }


# ---- FlashInfer


class FlashInferDecode:
    """FlashInfer's batch decode over pages, heads before tokens as our blocks are; with or without tensor cores.

    It compiles at its first use, for a minute without tensor cores and for five with them: let it, before the run.
    """

    def __init__(self, *, tensor_cores: bool) -> None:
        self.name = "FlashInfer decode" + (", tensor cores" if tensor_cores else "")
        self._flashinfer, self._tensor_cores = _flashinfer(), tensor_cores

    def calls(self, pools: Pools, batch: Batch, query: Tensor) -> Calls:
        """Reads every sequence alone."""
        shape = pools.shape
        wrapper = self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            _workspace(query.device), "HND", use_tensor_cores=self._tensor_cores
        )
        starts, indices, last = pages([(1, table) for table in batch.tables], batch.kv)
        wrapper.plan(
            *(part.to(query.device) for part in (starts, indices, last)),
            shape.heads,
            shape.kv_heads,
            shape.dim,
            BLOCK,
            q_data_type=query.dtype,
            kv_data_type=query.dtype,
            sm_scale=shape.scale,
        )
        return _wrapped(wrapper, pools, query)


class FlashInferCascade:
    """FlashInfer's multi-level cascade over the tree's levels."""

    name = "FlashInfer cascade"

    def __init__(self) -> None:
        self._flashinfer = _flashinfer()

    def calls(self, pools: Pools, batch: Batch, query: Tensor) -> Calls:
        """Trees only."""
        if not batch.levels:
            raise Skipped("nothing is shared")
        shape, place = pools.shape, query.device
        wrapper = self._flashinfer.MultiLevelCascadeAttentionWrapper(len(batch.levels), _workspace(place), "HND")
        levels = cascade(batch)
        wrapper.plan(
            *([part.to(place) for part in parts] for parts in zip(*levels, strict=True)),
            shape.heads,
            shape.kv_heads,
            shape.dim,
            BLOCK,
            causal=False,
            q_data_type=query.dtype,
            sm_scale=shape.scale,
        )
        return _wrapped(wrapper, pools, query)


def pages(runs: list[tuple[int, Any]], lengths: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Runs of blocks as FlashInfer takes them: where each starts, all block ids, the tokens in each last block."""
    counts = [-(-length // BLOCK) for length in lengths]
    starts = np.concatenate([[0], np.cumsum(counts)])
    indices = np.concatenate([table[:count] for (_, table), count in zip(runs, counts, strict=True)])
    last = [length - (count - 1) * BLOCK for length, count in zip(lengths, counts, strict=True)]
    return tuple(torch.tensor(np.asarray(part), dtype=torch.int32) for part in (starts, indices, last))


def cascade(batch: Batch) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """For each level: where each run's rows start, then its pages. Runs above the last level are whole blocks."""
    above = np.zeros(len(batch.tables), dtype=np.int64)
    levels = []
    for depth, runs in enumerate(batch.levels):
        edges = np.concatenate([[0], np.cumsum([members for members, _ in runs])])
        if depth == len(batch.levels) - 1:
            lengths = [batch.kv[int(edge)] - int(above[int(edge)]) for edge in edges[:-1]]
        else:
            lengths = [len(table) * BLOCK for _, table in runs]
            above += np.repeat(lengths, np.diff(edges))
        levels.append((torch.tensor(edges, dtype=torch.int32), *pages(list(runs), lengths)))
    return levels


def _flashinfer() -> ModuleType:
    try:
        return importlib.import_module("flashinfer")
    except ImportError as error:
        raise Skipped(f"FlashInfer is not installed ({error})") from error


def _workspace(device: torch.device) -> Tensor:
    return torch.zeros(128 << 20, dtype=torch.uint8, device=device)


def _wrapped(wrapper: Any, pools: Pools, query: Tensor) -> Calls:
    """A planned wrapper's calls; its pages are [blocks, kv_heads, BLOCK, dim], which is how our pools lie."""
    asked = query.transpose(0, 1).contiguous()
    laid = [tuple(pool.transpose(0, 1) for pool in pools.of(copy)) for copy in range(len(pools))]
    return [lambda kv=kv: wrapper.run(asked, kv) for kv in laid]


def _folder(bench: Bench) -> Path:
    if bench.peers is None:
        raise Skipped("no folder of kernels: name one by --peers")
    return bench.peers


MAKERS: dict[str, Callable[[Bench], Peer]] = {
    VllmTriton.name: lambda bench: VllmTriton(_folder(bench)),
    SglangTriton.name: lambda bench: SglangTriton(
        _folder(bench), bench.device.processors, early=bench.device.generation >= 9 and not bench.device.interpreted
    ),
    "FlashInfer decode": lambda _: FlashInferDecode(tensor_cores=False),
    "FlashInfer decode, tensor cores": lambda _: FlashInferDecode(tensor_cores=True),
    FlashInferCascade.name: lambda _: FlashInferCascade(),
}
"""The peers' constructors; those that compile for long come last."""
