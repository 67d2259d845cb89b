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
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Connection
from operator import attrgetter
from typing import Any, NoReturn

import numpy as np
import torch

from radixkv.models.loaded import LoadedModel
from radixkv.models.ranks import group, sharding
from radixkv.models.ranks.messages import RankLoad, decode
from radixkv.models.ranks.processes import HEAD, STEP, Answer
from radixkv.models.runner import Runner
from radixkv.models.step_memory import step_memory
from radixkv.models.weights.reload import ModelWeights, weights_of


class RankProcess:
    """The model, pool and host memory of one rank. Rank 0 calls its methods, and methods of its parts, by name."""

    _digest: Future[str] | None
    loaded: LoadedModel
    runner: Runner
    weights: ModelWeights

    def __init__(self, rank: int) -> None:
        """Begin without a model."""
        self._rank, self._digest = rank, None

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
        self.weights = weights_of(self.runner, None)

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

    def load_images(self, load: RankLoad, images: list[Any]) -> None:
        """Load this rank's images: one of all ranks' parts."""
        self.runner.load_images(load, images[self._rank])

    def put_image(self, block: int, images: list[Any]) -> None:
        """Set this rank's image of a host block: one of all ranks' images."""
        assert self.runner.host is not None
        self.runner.host.put_image(block, images[self._rank])

    def reload(self, file: str) -> float:
        """Take this rank's part of new weights, which rank 0 has written to a file."""
        self._digest = None
        return self.weights.reload(sharding.read_state(file))

    def held_bytes(self) -> int:
        """Return the bytes of this rank's weights."""
        return sharding.held_bytes(self.loaded)

    def digest(self) -> str | None:
        """Begin to compute a digest of this rank's weights; return it once it is known."""
        if self._digest is None:
            self._digest = Future()
            threading.Thread(target=_settle, args=[self._digest, self.weights.digest], daemon=True).start()
        return self._digest.result() if self._digest.done() else None

    # ---- the pipe

    def serve(self, pipe: Connection) -> None:
        """Answer each message with its number, success, and result or error; return when rank 0 has ended."""
        while True:
            try:
                message = pipe.recv_bytes()
                answer = self._answer(message)
                pipe.send(answer)
            except (EOFError, OSError):
                return

    def _answer(self, message: bytes) -> Answer:
        kind, number = HEAD.unpack_from(message)
        try:
            body = message[HEAD.size :]
            name, arguments = ("step", (body,)) if kind == STEP else pickle.loads(body)
            return Answer(number, True, attrgetter(name)(self)(*arguments))
        except Exception as error:
            group.disconnect()  # so that the collectives of the others end, too
            return Answer(number, False, f"{type(error).__name__}: {error}")


def _settle(future: Future[str], call: Callable[[], str]) -> None:
    try:
        future.set_result(call())
    except Exception as error:
        future.set_exception(error)


def _end_with_rank_0(pipe: int, folder: str, parent: int) -> None:
    """End this process when rank 0 has ended, whatever it computes or waits for, and remove the ranks' folder."""
    poll = select.poll()
    poll.register(pipe, 0)  # which reports the end of the other side only
    while not poll.poll(1000) and os.getppid() == parent:  # a child of rank 0 may hold the other side
        pass
    _end(folder)


def _end(folder: str) -> NoReturn:
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)  # without waiting for libraries' threads


def main() -> None:
    """Run a rank; the command names its pipe, the folder of the ranks, and the process of rank 0."""
    pipe, folder, parent = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    threading.Thread(target=_end_with_rank_0, args=[pipe, folder, parent], daemon=True).start()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # rank 0 ends this process by closing the pipe
    logging.basicConfig(level=logging.ERROR)  # rank 0 has the same warnings
    try:
        RankProcess(int(os.environ["LOCAL_RANK"])).serve(Connection(pipe))
    finally:
        _end(folder)


if __name__ == "__main__":
    main()
