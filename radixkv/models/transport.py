"""Where the forwards of an engine run: in this process, or on tensor-parallel ranks (`radixkv.models.ranks`)."""

from __future__ import annotations

import os
from typing import Any, Protocol

import torch

from radixkv.models import adapter
from radixkv.models.cuda_graphs import record_graphs
from radixkv.models.fusion import fuse, wanted
from radixkv.models.loaded import LoadedModel
from radixkv.models.runner import Runner
from radixkv.models.step_memory import step_memory
from radixkv.models.weights.fixed import Weights
from radixkv.models.weights.reload import weights_of


class Transport(Protocol):
    """Loads a model, and builds the runner that computes its steps."""

    def load(self, model: Any, *, compile: bool | str, deterministic: bool, **settings: Any) -> LoadedModel:
        """Return the model, or the part of it that this process computes: settings as in `adapter.load`."""
        ...

    def step_memory(self, loaded: LoadedModel, **sizes: int) -> int:
        """Return the bytes to keep free for the tensors of steps, as `step_memory.step_memory` does."""
        ...

    def build(self, loaded: LoadedModel, recorded: tuple[int, int], **options: Any) -> tuple[Any, Weights]:
        """Return a runner that is ready for steps, and the weights of its model; options as in `Runner`.

        `recorded` are the sequences and tokens of the largest steps that may be recorded.
        """
        ...

    def tasks(self) -> list[Any]:
        """Return the engine's background tasks that watch the transport, and close it with the engine."""
        ...

    def close(self) -> None:
        """End the processes of the transport."""
        ...


class InProcess:
    """Runs all forwards in this process."""

    def __init__(self, device: torch.device) -> None:
        """Start nothing."""
        self._device = device
        self._fused, self._source = False, None

    def load(self, model: Any, *, compile: bool | str, deterministic: bool, **settings: Any) -> LoadedModel:
        """Return the whole model."""
        self._fused = wanted(compile, self._device, deterministic=deterministic)
        self._source = None if isinstance(model, str | os.PathLike) else model
        return adapter.load(model, device=self._device, fuse=compile is not False, **settings)

    def step_memory(self, loaded: LoadedModel, **sizes: int) -> int:
        """Measure it."""
        return step_memory(loaded, **sizes)

    def build(self, loaded: LoadedModel, recorded: tuple[int, int], **options: Any) -> tuple[Any, Weights]:
        """Compile the model and record its steps, where that is possible."""
        runner = Runner(loaded, **options)
        if self._fused:
            fuse(runner)
        record_graphs(runner, *recorded)
        return runner, weights_of(runner, self._source)

    def tasks(self) -> list[Any]:
        """Return none."""
        return []

    def close(self) -> None:
        """Do nothing."""


def transport_of(ranks: int, timeout: float, device: torch.device) -> Transport:
    """Return the transport for `ranks` ranks; a call fails if one does not answer for `timeout` seconds."""
    if ranks == 1:
        return InProcess(device)
    from radixkv.models.ranks.rank_zero import Ranks

    return Ranks(ranks, timeout, device)
