"""SGLang 0.5.23's UnifiedRadixCache (its default Rust core) with the verbs of `engines.py`, from its own wheel.

The wheel is unpacked into an ignored folder of the checkout, never committed (see `HOW`). The GPU libraries and web
servers that its import needs are stubbed; its cache is untouched. Its page allocator is replaced by one that
counts, and slots are numbered upwards, both outside the clock: the row times the tree and nothing else. Ids come as
the array("q") that SGLang keeps, converted outside the clock (`as_lists`: inside). With lengths that are no multiple
of the page, SGLang matches and inserts whole pages, and the caller takes the slots of the last, part-filled page
back.
"""

from __future__ import annotations

import logging
import sys
import warnings
from array import array
from pathlib import Path
from typing import Any

import numpy as np
from engines import Ids, Slots

PEERS = Path(__file__).resolve().parents[2] / ".peers"
WHEEL, LIBRARIES = PEERS / "sglang-0.5.23", PEERS / "deps"
HOW = """To compare with SGLang's Rust core, unpack its wheel (CPython 3.11, Linux x86-64) from the repository's root:
    .venv/bin/python -m pip download --no-deps --dest .peers sglang==0.5.23
    .venv/bin/python -m zipfile -e .peers/sglang-0.5.23-*.whl .peers/sglang-0.5.23
    .venv/bin/python -m pip install --target .peers/deps msgspec orjson psutil pybase64 requests pillow dill openai"""

# Imported along the way, never called by the cache.
STUBS = frozenset(
    {
        *("IPython", "aiohttp", "compressed_tensors", "cutlass", "decord", "deep_gemm", "flash_attn", "flashinfer"),
        *("gguf", "outlines", "partial_json_parser", "quack", "sentencepiece", "sgl_kernel", "soundfile", "starlette"),
        *("tilelang", "torch_memory_saver", "torchao", "torchaudio", "torchcodec", "torchvision", "tvm_ffi", "zmq"),
    }
)


def available() -> bool:
    """Whether the wheel was unpacked."""
    return (WHEEL / "sglang").is_dir() and LIBRARIES.is_dir()


def load() -> Any:
    """Import the wheel; slow (seconds)."""
    sys.path.insert(0, str(WHEEL))
    sys.path.append(str(LIBRARIES))
    import import_stubs
    import transformers.utils.import_utils as installed

    warnings.filterwarnings("ignore")
    for name in ("torchvision", "torchvision_v2", "torchaudio", "decord", "soundfile"):
        getattr(installed, f"is_{name}_available", bool)()  # cached now, so that no stub passes for the package
    import_stubs.install(STUBS)
    from sglang.srt.mem_cache import base_prefix_cache, cache_init_params, radix_cache, unified_radix_cache
    from sglang.srt.mem_cache.unified_cache import components

    logging.disable(logging.INFO)
    return base_prefix_cache, cache_init_params, radix_cache, unified_radix_cache, components


class CountingAllocator:
    """Takes slots back and counts them."""

    device = "cpu"

    def __init__(self, page: int) -> None:
        self.page_size = page
        self.freed = 0

    def free_segment(self, slots: Any, start_pos: int = 0) -> None:
        self.freed += len(slots)

    def free(self, slots: Any) -> None:
        self.freed += len(slots)

    def available_size(self) -> int:
        return 0

    def mamba_full_cache_donor(self) -> None:
        return None


class Ticket:
    __slots__ = ("full", "hit", "indices", "lock", "node", "reserved", "values", "whole")

    def __init__(self, hit: int, node: Any, indices: Any, lock: Any) -> None:
        self.hit, self.node, self.indices, self.lock = hit, node, indices, lock
        self.full: Any
        self.whole: Any
        self.values: Any
        self.reserved: int


class SGLang:
    """`as_lists` converts plain lists of ints inside the clock."""

    def __init__(self, page: int, capacity: int, *, as_lists: bool = False) -> None:
        base, init, radix, unified, components = load()
        self._key, self._match = radix.RadixKey, base.MatchPrefixParams
        self._insert, self._evict = base.InsertParams, base.EvictParams
        self.allocator = CountingAllocator(page)
        self.cache = unified.UnifiedRadixCache(
            init.CacheInitParams(
                disable=False,
                req_to_token_pool=None,
                token_to_kv_pool_allocator=self.allocator,
                page_size=page,
                tree_components=(components.ComponentType.FULL,),
                tree_core_backend="rust",
            )
        )
        assert self.cache._tree_core_backend == "rust"
        self.page, self.capacity, self.free = page, capacity, capacity // page * page
        self.as_lists = as_lists
        self.next_slot = 0
        self.freed_by_eviction = 0

    def key(self, ids: Ids) -> Any:
        return ids.tolist() if self.as_lists else array("q", ids.astype(np.int64).tobytes())

    def _native(self, key: Any) -> Any:
        return array("q", key) if self.as_lists else key

    def open(self, prompt: Any) -> Ticket:
        hit, node, indices = self.match(prompt)
        return Ticket(hit, node, indices, self.cache.lock(node))

    def reserve(self, ticket: Ticket, full: Any) -> None:
        ticket.full = full = self._native(full)
        ticket.reserved = need = -(-(len(full) - ticket.hit) // self.page) * self.page
        if need > self.free:
            before = self.allocator.freed
            self.cache.evict(self._evict(num_tokens=need - self.free))
            freed = self.allocator.freed - before
            self.free += freed
            self.freed_by_eviction += freed
        self.free -= need

    def prepare(self, ticket: Ticket) -> tuple[int, Slots, list[tuple[Slots, Slots]]]:
        import torch

        assert self.free >= 0, "evicted less than was asked for"
        count = len(ticket.full) - ticket.hit
        slots = np.arange(self.next_slot, self.next_slot + count, dtype=np.int64)
        self.next_slot += ticket.reserved
        pages = len(ticket.full) // self.page * self.page
        ticket.whole = ticket.full[:pages]
        ticket.values = torch.cat([ticket.indices.to(torch.int64), torch.from_numpy(slots)])[:pages]
        return ticket.hit, slots, []

    def publish(self, ticket: Ticket) -> None:
        before = self.allocator.freed
        key = self._key(ticket.whole)
        self.cache.insert(self._insert(key=key, value=ticket.values, prev_prefix_len=ticket.hit))
        self.free += self.allocator.freed - before
        if len(ticket.full) % self.page:
            self.free += self.page

    def release(self, ticket: Ticket) -> None:
        self.cache.unlock(ticket.lock)

    def match(self, key: Any) -> tuple[int, Any, Any]:
        result = self.cache.match_prefix(self._match(key=self._key(self._native(key))))
        node = result.last_device_node
        return result.device_prefix_len, node, self.cache.path_device_indices(node)

    def found(self, match: tuple[int, Any, Any]) -> tuple[int, Slots]:
        return match[0], np.asarray(match[2], np.int64)

    def held(self, ticket: Ticket) -> Slots:
        return np.asarray(ticket.indices, np.int64)

    def check(self) -> None:
        resident = self.cache.full_evictable_size() + self.cache.full_protected_size()
        assert not self.cache.full_protected_size(), "a lock is still held"
        assert self.free + resident == self.capacity // self.page * self.page, (self.free, resident, self.capacity)
