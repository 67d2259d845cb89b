"""Find the GPU to measure, or the reason why there is none."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.util import find_spec

import torch

INTERPRETED_L2 = 1 << 16
"""Bytes of cache that the interpreter pretends to have, so that the case that fits into it also runs."""


@dataclass(frozen=True)
class Device:
    """Where a part runs. `interpreted`: on a CPU, to execute the code once; its times mean nothing."""

    torch: torch.device
    name: str
    processors: int
    generation: int
    memory: int
    l2: int
    interpreted: bool
    shared: int = 0  # bytes of shared memory that a processor has; 0: not known

    @property
    def slug(self) -> str:
        """The name as part of a file's name.

        >>> Device(torch.device("cuda"), "NVIDIA H200", 132, 9, 0, 0, False).slug
        'h200'
        """
        words = [word for word in re.findall(r"[a-z0-9]+", self.name.lower()) if word not in ("nvidia", "amd")]
        return "-".join(words) or "gpu"

    @property
    def dtype(self) -> torch.dtype:
        """The measured dtype: bfloat16, or float16 in the interpreter, which multiplies bfloat16 wrongly."""
        return torch.float16 if self.interpreted else torch.bfloat16

    def synchronize(self) -> None:
        """Wait for all launches."""
        if self.torch.type == "cuda":
            torch.cuda.synchronize(self.torch)

    def free(self) -> int:
        """Bytes that may still be taken."""
        if self.torch.type != "cuda":
            return 1 << 30
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self.torch)[0])


def find(smoke: bool) -> Device | str:
    """Return the device, or the reason why there is none; `smoke` asks for the interpreter on the CPU instead."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    import triton

    if smoke:
        if not triton.knobs.runtime.interpret:
            return "--smoke needs a process with TRITON_INTERPRET=1"
        return Device(torch.device("cpu"), "interpreter", 2, 9, 0, INTERPRETED_L2, True)
    if not torch.cuda.is_available():
        return "torch sees no GPU here"
    if triton.knobs.runtime.interpret:
        return "TRITON_INTERPRET is set: kernels would run on the CPU"
    place = torch.device("cuda", torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(place)
    return Device(
        torch=place,
        name=properties.name,
        processors=properties.multi_processor_count,
        generation=8 if torch.version.hip else properties.major,
        memory=properties.total_memory,
        l2=getattr(properties, "L2_cache_size", 0) or 0,
        interpreted=False,
        shared=getattr(properties, "shared_memory_per_multiprocessor", 0),
    )
