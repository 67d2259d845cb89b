"""The transport of tensor-parallel ranks: rank 0 loads, builds and runs what all ranks do together."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixkv import model_path
from radixkv.attention.host_store import HostCosts, HostLoad, HostStore
from radixkv.device import GPU, gpu_count
from radixkv.errors import DeviceLost, InvalidInput
from radixkv.models import step_costs
from radixkv.models.kv_recompute import Recheck
from radixkv.models.loaded import LoadedModel, SequenceInput
from radixkv.models.ranks import group, sharding
from radixkv.models.ranks.messages import Pairs, RankLoad, Step, encode
from radixkv.models.ranks.processes import Processes
from radixkv.models.runner import Runner
from radixkv.models.step_memory import step_memory
from radixkv.models.weights.fixed import State, Weights
from radixkv.models.weights.reload import ModelWeights, weights_of

_WATCH_SECONDS, _DIGEST_SECONDS = 1.0, 0.1  # between two looks


class Ranks:
    """Runs each forward on `size` ranks: this process is rank 0, and starts the others."""

    def __init__(self, size: int, timeout: float, device: torch.device) -> None:
        """Start nothing yet.

        Raises InvalidInput for more ranks than GPUs, and for ranks on the CPU of a machine with GPUs.
        """
        gpus = gpu_count()
        if device.type == GPU and (gpus < size or device.index):
            raise InvalidInput(
                f"tensor_parallel={size} takes the first {size} GPUs, and {gpus} are here: device='cuda'"
            )
        if device.type == "cpu" and gpus:  # transformers would place the model there
            raise InvalidInput(f"tensor_parallel={size} on a CPU needs a machine without GPUs: hide them")
        self._size, self._timeout, self._device = size, timeout, device.type
        self._threads = torch.get_num_threads()
        self.processes: Processes | None = None  # from `load` on

    def load(self, model: Any, *, compile: bool | str, deterministic: bool, **settings: Any) -> LoadedModel:
        """Start the other ranks, and load a part on each."""
        if not isinstance(model, str | os.PathLike):
            raise InvalidInput(f"tensor_parallel={self._size} loads a model from its files: pass its folder or name")
        if compile is True:
            raise InvalidInput(f"tensor_parallel={self._size}: compile=True is not possible: layers are divided")
        settings = {**settings, "model_code": "transformers", "verify": "always"}
        name = model_path.name_of(model)
        shape = sharding.shape_of(name, settings["revision"], self._size, settings)
        self.processes = Processes(self._size, self._timeout)
        threads = max(1, self._threads // self._size) if self._device == "cpu" else self._threads
        torch.set_num_threads(threads)
        theirs = {**settings, "tokenizer": None}
        own = partial(sharding.load, name, 0, self._device, settings)
        loaded, _ = self.processes.call("load", name, self._device, threads, theirs, own=own)
        sharding.check_divided(loaded, shape, self._size)
        return loaded

    def step_memory(self, loaded: LoadedModel, **sizes: int) -> int:
        """Return the largest of all ranks."""
        own, others = self._running.call("step_memory", sizes, own=lambda: step_memory(loaded, **sizes))
        largest: int = max([own, *others])
        return largest

    def held_bytes(self, loaded: LoadedModel) -> list[int]:
        """Return the bytes of the weights of each rank."""
        own, others = self._running.call("held_bytes", own=partial(sharding.held_bytes, loaded))
        return [own, *others]

    def build(self, loaded: LoadedModel, recorded: object, **options: Any) -> tuple[Any, Weights]:
        """Allocate the same blocks on all ranks; nothing is compiled or recorded."""
        runner, _ = self._running.call("build", options, own=lambda: Runner(loaded, **options))
        weights = weights_of(runner, None)
        self._running.loaded()
        return RankedRunner(runner, self._running), RankedWeights(weights, self._running)

    def tasks(self) -> list[Any]:
        """Return the task that ends the engine with a rank, and the ranks with the engine."""
        return [RankWatch(self)]

    def ended(self) -> str:
        """Return why no step can be computed any more; "" as long as all ranks run."""
        return self._running.ended()

    def close(self) -> None:
        """End the other ranks."""
        torch.set_num_threads(self._threads)
        if self.processes is not None:
            self.processes.close()

    @property
    def _running(self) -> Processes:
        assert self.processes is not None
        return self.processes


class RankWatch:
    """A background task that looks every second whether all ranks run, for an engine without requests, too."""

    def __init__(self, ranks: Ranks) -> None:
        """Look now for the first time."""
        self._ranks, self._next = ranks, 0.0

    def due_in(self, *, busy: bool) -> float:
        """Return the seconds until the next look."""
        return max(0.0, self._next - time.monotonic())

    def step(self, *, busy: bool) -> None:
        """Raise DeviceLost if a rank has ended."""
        self._next = time.monotonic() + _WATCH_SECONDS
        if reason := self._ranks.ended():
            raise DeviceLost(reason)

    def close(self) -> None:
        """End the other ranks."""
        self._ranks.close()


class RankedRunner:
    """The runner of all ranks, as the engine sees it: `own` is the runner of rank 0."""

    states = None  # hybrid models are refused
    compression_obstacle = "it runs on several ranks"

    def __init__(self, own: Runner, processes: Processes) -> None:
        """Run each step on `own` and the other ranks."""
        self.own, self.processes = own, processes
        self.host = None if own.host is None else RankedHost(own.host, processes)
        self.row_dependent, self.recheck_tokens = own.row_dependent, own.recheck_tokens
        self.recheck_obstacle, self.block_size, self.room = own.recheck_obstacle, own.block_size, own.room
        self.stats, self.compression = own.stats, own.compression

    def run(self, inputs: Sequence[SequenceInput], copies: Pairs = (), sampled: Tensor | None = None) -> Tensor:
        """Compute a step as `Runner.run` does; rank 0 has the logits."""

        def own() -> Tensor:
            if sampled is not None:
                group.share(sampled)
            return self.own.run(inputs, copies, sampled)

        step = Step(copies=copies, inputs=inputs, sampled=0 if sampled is None else len(sampled))
        return self.processes.step(encode(step), own)

    def recheck(self, tokens: NDArray[np.int32], start: int, block_table: NDArray[np.int32]) -> Recheck:
        """Compute cached KV again on all ranks: a token differs if it does on one of them."""
        own = partial(self.own.recheck, tokens, start, block_table)
        first, others = self.processes.call("runner.recheck", tokens, start, block_table, own=own)
        found: list[Recheck] = [first, *others]
        differs = next((each for each in found if each.positions), first)
        positions = tuple(sorted({position for each in found for position in each.positions}))
        return replace(differs, positions=positions, worst=max(each.worst for each in found))

    @property
    def image_bytes(self) -> int:
        """Bytes of the images of a block on all ranks."""
        return self.own.image_bytes * self.processes.size

    def read_images(self, blocks: Sequence[int], tokens: int) -> NDArray[np.uint8]:
        """Copy blocks as `Runner.read_images` does: the images of the ranks side by side."""
        own, others = self.processes.call(
            "runner.read_images", blocks, tokens, own=partial(self.own.read_images, blocks, tokens)
        )
        return np.concatenate([own, *others], axis=1)

    def load_images(self, load: HostLoad, images: NDArray[np.uint8]) -> None:
        """Load images as `Runner.load_images` does."""
        sent = RankLoad(load.plan.slots, load.plan.copies, load.sources)
        parts = np.split(images, self.processes.size, axis=1)
        self.processes.call("load_images", sent, parts, own=partial(self.own.load_images, load, parts[0]))

    def host_costs(self, chunk: int) -> HostCosts:
        """Measure loads and prefills: see `step_costs.host_costs`."""
        return step_costs.host_costs(self, chunk)

    def row_costs(self) -> tuple[tuple[int, float], ...]:
        """Measure forwards of a few rows: see `step_costs.row_costs`."""
        return step_costs.row_costs(self)


class RankedHost:
    """The host memory of all ranks. The image of a block is the images of the ranks, one after the other."""

    def __init__(self, own: HostStore, processes: Processes) -> None:
        """Copy in `own` and on the other ranks."""
        self._own, self._processes = own, processes
        self.block_size, self.num_blocks = own.block_size, own.num_blocks
        self.bytes_per_block = own.bytes_per_block * processes.size

    def offload(self, moves: Pairs) -> None:
        """Copy whole blocks to the host, as `HostStore.offload` does."""
        self._processes.step(encode(Step(moves=moves)), partial(self._own.offload, moves))

    def load(self, loads: Sequence[HostLoad]) -> None:
        """Copy cached runs to slots, as `HostStore.load` does."""
        self._processes.step(encode(Step(loads=loads)), partial(self._own.load, loads))

    def image(self, block: int) -> NDArray[np.uint8]:
        """Return a copy of the images of all ranks."""
        own, others = self._processes.call("runner.host.image", block, own=partial(self._own.image, block))
        return np.concatenate([own, *others])

    def put_image(self, block: int, image: NDArray[np.uint8]) -> None:
        """Set the images of all ranks. Any thread may call."""
        parts = np.split(image, self._processes.size)
        self._processes.call("put_image", block, parts, own=partial(self._own.put_image, block, parts[0]))

    def measure(self) -> float:
        """Return the bytes per second of a load, over all ranks."""
        return self._own.measure() * self._processes.size


class RankedWeights:
    """The weights of all ranks; an update reaches the other ranks by `reload` only."""

    def __init__(self, own: ModelWeights, processes: Processes) -> None:
        """Hold the weights of rank 0."""
        self._own, self._processes = own, processes

    def checked(self, state: State | None) -> State | None:
        """Return a complete state of whole weights. Raises InvalidInput if it does not fit, or is missing."""
        if state is None:
            raise InvalidInput("the weights are divided between ranks: pass all of them, reload_weights(state)")
        return self._own.checked(state)

    def reload(self, state: State | None) -> float:
        """Take new weights on all ranks."""
        assert state is not None
        with self._processes.without_timeout(), TemporaryDirectory(prefix="radixkv-weights-") as folder:
            file = sharding.write_state(state, folder)
            return self._processes.call("reload", file, own=partial(self._own.reload, state))[0]

    def digest(self) -> str:
        """Return a digest of the weights of all ranks, each of which computes its own meanwhile."""
        own, others = "", list[Any]([None])
        while None in others:
            others = self._processes.call("digest", own=lambda: None)[1]
            own = own or self._own.digest()
            time.sleep(_DIGEST_SECONDS * (None in others))
        return hashlib.sha256("".join([own, *others]).encode()).hexdigest()
