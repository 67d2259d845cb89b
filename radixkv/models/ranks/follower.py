"""A rank other than 0: execute the calls of rank 0, one after the other, until its pipe ends."""

from __future__ import annotations

import logging
import os
import pickle
import select
import shutil
import signal
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import numpy as np
import torch

from radixkv.models.loaded import LoadedModel
from radixkv.models.ranks import group, sharding
from radixkv.models.ranks.messages import LoadedRun, decode
from radixkv.models.ranks.processes import CALL
from radixkv.models.runner import Runner
from radixkv.models.step_memory import step_memory
from radixkv.models.weights.reload import ModelWeights, watch_weights


class Follower:
    """The model, pool and host memory of one rank. Its public methods are the calls of rank 0."""

    loaded: LoadedModel
    runner: Runner
    weights: ModelWeights

    def __init__(self, rank: int) -> None:
        """Begin without a model."""
        self._rank = rank

    def started(self) -> None:
        """Answer that this process takes calls."""

    def open(self, size: int, folder: str, seconds: float) -> None:
        """Join the world of ranks."""
        group.open_world(self._rank, size, folder, seconds)

    def connect(self, number: int, seconds: float) -> None:
        """Connect again."""
        group.connect(number, seconds)

    def load(self, model: str, device: str, threads: int, settings: dict[str, Any]) -> None:
        """Load this rank's part of a model."""
        torch.set_num_threads(threads)
        self.loaded = sharding.load(model, self._rank, device, settings)

    def step_memory(self, sizes: dict[str, int]) -> int:
        """Measure the memory of steps."""
        return step_memory(self.loaded, **sizes)

    def build(self, options: dict[str, Any]) -> None:
        """Allocate the pool and the host memory."""
        self.runner = Runner(self.loaded, **options)
        self.weights = watch_weights(self.runner, None)

    def step(self, buffer: bytes) -> None:
        """Execute a step."""
        step = decode(np.frombuffer(buffer, np.int64))
        if self.runner.host is not None:
            self.runner.host.offload(step.moves)
            self.runner.host.load(step.loads)
        if step.inputs:
            sampled = None
            if step.sampled:
                sampled = torch.empty(step.sampled, dtype=torch.int64, device=self.loaded.device)
                group.share(sampled)
            self.runner.run(step.inputs, step.copies, sampled)

    def recheck(self, *arguments: Any) -> Any:
        """Compute cached KV again, and compare this rank's heads."""
        return self.runner.recheck(*arguments)

    def read_images(self, blocks: Sequence[int], tokens: int) -> Any:
        """Return this rank's images of blocks of the pool."""
        return self.runner.read_images(blocks, tokens)

    def load_images(self, load: LoadedRun, images: list[Any]) -> None:
        """Load this rank's images: one of all ranks' parts."""
        self.runner.load_images(load, images[self._rank])

    def image(self, block: int) -> Any:
        """Return this rank's image of a host block."""
        assert self.runner.host is not None
        return self.runner.host.image(block)

    def put_image(self, block: int, images: list[Any]) -> None:
        """Set this rank's image of a host block: one of all ranks' images."""
        assert self.runner.host is not None
        self.runner.host.put_image(block, images[self._rank])

    def reload(self, file: str) -> float:
        """Take this rank's part of new weights, which rank 0 has written to a file."""
        return self.weights.reload(sharding.read_state(file))

    def held_bytes(self) -> int:
        """Return the bytes of this rank's weights."""
        return sharding.held_bytes(self.loaded)

    def digest(self) -> str:
        """Return a digest of this rank's weights."""
        return self.weights.digest()

    # ---- the pipe

    def serve(self, pipe: Connection) -> None:
        """Answer each message with (whether it succeeded, result or error); returns when rank 0 has ended."""
        while True:
            try:
                message = pipe.recv_bytes()
                answer = self._answer(message)
                pipe.send(answer)
            except (EOFError, OSError):
                return

    def _answer(self, message: bytes) -> tuple[bool, Any]:
        try:
            name, arguments = pickle.loads(message[1:]) if message[:1] == CALL else ("step", (message[1:],))
            return True, getattr(self, name)(*arguments)
        except Exception as error:
            group.disconnect()  # so that the collectives of the others end, too
            return False, f"{type(error).__name__}: {error}"


def _end_with_rank_0(pipe: int, folder: str) -> None:
    """End this process when rank 0 has ended, whatever it computes or waits for, and remove the ranks' folder."""
    poll = select.poll()
    poll.register(pipe, 0)  # which reports the end of the other side only
    poll.poll()
    _end(folder)


def _end(folder: str) -> NoReturn:
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)  # without waiting for libraries' threads


def main() -> None:
    """Run a rank whose pipe and folder the command names."""
    pipe = int(sys.argv[1])
    threading.Thread(target=_end_with_rank_0, args=[pipe, sys.argv[2]], daemon=True).start()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # rank 0 ends this process by closing the pipe
    logging.basicConfig(level=logging.ERROR)  # rank 0 has the same warnings
    try:
        Follower(int(os.environ["LOCAL_RANK"])).serve(Connection(pipe))
    finally:
        _end(sys.argv[2])


if __name__ == "__main__":
    main()
