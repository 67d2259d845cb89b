"""How much memory the KV pool gets.

Knows: bytes, and shares of what is free. Knows no cache and no model.
"""

from __future__ import annotations

from radixkv.config import parse_bytes
from radixkv.errors import InvalidInput
from radixkv.memory import free_memory

_CPU_SHARE = 4
_CPU_MOST = 4 * 2**30
_GPU_SHARE = 0.9


def blocks_for(kv_memory: str | int, bytes_per_block: int, device: str) -> int:
    """How many blocks of `bytes_per_block` fit; raises InvalidInput when not even one does."""
    memory = _automatic(device) if kv_memory == "auto" else parse_bytes(kv_memory)
    if memory < bytes_per_block:
        raise InvalidInput(
            f"kv_memory of {memory} bytes holds no block: one block of this model takes {bytes_per_block} bytes"
        )
    return memory // bytes_per_block


def check_free(memory: int, device: str) -> None:
    """Raise InvalidInput if a pool of `memory` bytes is more than a CPU has free; a GPU says so itself."""
    if device == "cpu" and memory > (free := free_memory()):
        raise InvalidInput(f"a KV pool of {memory} bytes does not fit: {free} bytes are free here")


def _automatic(device: str) -> int:
    """On a CPU a quarter of the free memory, at most 4 GiB; on a GPU what is left at 90% of the card."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.empty_cache()  # what torch keeps of a pool that was freed is free for this one
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(free - (1 - _GPU_SHARE) * total))
    return min(free_memory() // _CPU_SHARE, _CPU_MOST)
