"""Measure how long a device idles between two steps, with and without overlap, without a device.

    python benchmarks/overlap.py [--steps 200] [--sequences 64] [--device-ms 1 4 9]

64 greedy streams that share a prefix of 128 tokens decode on a fake device: each forward takes a fixed time of a
virtual clock. The clock advances by the CPU time of the main thread, and by the time for which the host waits for the
device. So it is the wall time of an idle machine, and other processes do not count.

Both engines run in turn, a slice of ten steps each. For each step:

- host: the CPU time of `Core.step`. It plans, commits, publishes and decodes text. It excludes the host's part of the
  forward and of the sampler, which are fakes.
- idle: from the moment when the results of a step are ready to the launch of the next one, while the device has nothing
  to do.

The last line is one JSON object with the medians. The exit code is 1 if the overlapped engine leaves the device idle
for more than 20 us a step though a step of the device takes longer than a step of the host.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers
from cpu_decode import cpu_name
from torch import Tensor

from radixkv.cache import PrefixCache
from radixkv.config import EngineConfig
from radixkv.engine.core import Core
from radixkv.engine.overlap import OverlappedCore
from radixkv.engine.request import Request
from radixkv.models import adapter
from radixkv.models.loaded import LoadedModel, SequenceInput
from radixkv.sampling.params import SampleRow, SamplingParams
from radixkv.sampling.sampler import Sampled
from radixkv.sampling.token_mask import TokenMask

SHARED, PRIVATE, WARM_UP, SLICE, BAR_US = 128, 32, 8, 10, 20.0


class FakeDevice:
    """Runs forwards one after the other, each in `seconds` of a virtual clock; returns fixed tokens.

    With `relays` it only launches; else it also waits, as an engine does that needs the logits at once.
    """

    def __init__(self, seconds: float, vocab: int, *, relays: bool) -> None:
        self.seconds, self.relays = seconds, relays
        self.waited = 0.0  # virtual seconds for which the host has waited
        self.free_at = 0.0  # when the last forward ends
        self.idle: list[float] = []  # before each forward
        self._logits = torch.zeros((256, 8))
        self._tokens = np.random.default_rng(0).integers(3, vocab, 4096).tolist()
        self._step = 0

    def now(self) -> float:
        return time.thread_time() + self.waited

    def wait_until(self, moment: float) -> None:
        self.waited += max(moment - self.now(), 0.0)

    def run(
        self, chunks: Sequence[SequenceInput], copies: Sequence[tuple[int, int]], sampled: Tensor | None = None
    ) -> Tensor:
        now = self.now()
        self.idle.append(max(now - self.free_at, 0.0))
        self.free_at = max(now, self.free_at) + self.seconds
        if not self.relays:
            self.wait_until(self.free_at)
        return self._logits[: len(chunks)]

    def begin(
        self,
        logits: Tensor,
        rows: Sequence[SampleRow],
        sources: Sequence[int] | None = None,
        mask: TokenMask | None = None,
    ) -> FakePending:
        self._step += 1
        at = self._step * 7 % (len(self._tokens) - len(rows))
        return FakePending(self, self._tokens[at : at + len(rows)], len(logits))


class FakePending:
    """Draws that are done with the last forward."""

    def __init__(self, device: FakeDevice, tokens: list[int], rows: int) -> None:
        self._device, self._tokens, self._rows, self._done_at = device, tokens, rows, device.free_at
        self.tokens: Any = self  # the device reads it

    def finite(self) -> list[bool]:
        self._device.wait_until(self._done_at)
        return [True] * self._rows

    def result(self) -> Sampled:
        self._device.wait_until(self._done_at)
        return Sampled(self._tokens, None)


class Measured:
    """One engine and the times of its steps."""

    def __init__(self, kind: type[Core], seconds: float, loaded: LoadedModel, count: int, steps: int) -> None:
        self.device = FakeDevice(seconds, loaded.vocab_size, relays=kind is OverlappedCore)
        self.core = kind(PrefixCache(16_384, 16), self.device, EngineConfig(max_sequences=count))
        self.core.sampler = self.device
        self.host: list[float] = []
        self.idle: list[float] = []
        random = np.random.default_rng(6)
        prompts = random.integers(3, loaded.vocab_size, (count, SHARED + PRIVATE)).astype(np.int32)
        prompts[:, :SHARED] = prompts[0, :SHARED]
        most = steps + 100
        params = SamplingParams(max_tokens=most, temperature=0, ignore_eos=True)
        for prompt in prompts:
            self.core.add(Request(prompt, params, most, frozenset(), 0, loaded.tokenizer))
        while sum(not s.prefilling for r in self.core.scheduler.running for s in r.live) < count:
            self.core.step()
        for _ in range(WARM_UP):
            self.core.step()

    def run(self, steps: int) -> None:
        before = len(self.device.idle)
        for _ in range(steps):
            start = time.thread_time()
            self.core.step()
            self.host.append(time.thread_time() - start)
        self.idle += self.device.idle[before + 1 :]  # the first one includes the other engine's slice

    def medians(self) -> dict[str, float]:
        host, idle = statistics.median(self.host), statistics.median(self.idle)
        return {"host_us": round(host * 1e6, 1), "idle_us": round(idle * 1e6, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--device-ms", type=float, nargs="+", default=[1.0, 4.0, 9.0])
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    loaded = adapter.load("tiny")
    result: dict[str, Any] = {}
    missed = False
    for milliseconds in options.device_ms:
        kinds = {"synchronous": Core, "overlapped": OverlappedCore}
        engines = {
            name: Measured(kind, milliseconds / 1e3, loaded, options.sequences, options.steps)
            for name, kind in kinds.items()
        }
        for _ in range(options.steps // SLICE):
            for engine in engines.values():
                engine.run(SLICE)
        found = {name: engine.medians() for name, engine in engines.items()}
        late = found["overlapped"]
        missed |= late["idle_us"] > BAR_US and late["host_us"] < milliseconds * 1e3
        for name, numbers in found.items():
            busy = milliseconds * 1e3 / (milliseconds * 1e3 + numbers["idle_us"])
            print(
                f"{milliseconds:4.1f} ms a forward, {name:11}: host {numbers['host_us']:7.1f} us a step, "
                f"device idle {numbers['idle_us']:7.1f} us a step, busy {busy:.1%}"
            )
        result[f"{milliseconds:g} ms"] = found
    facts = {"sequences": options.sequences, "steps": options.steps, "clock": "CPU time", "cpu": cpu_name()}
    print(json.dumps({"benchmark": "overlap", **result, **facts, "torch": torch.__version__}))
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
