"""Count the launches of a batch's sampling, and measure its host time: the device's sampler and the loop over rows.

Each case samples 64 rows of a reply of 256 tokens after a prompt of 1,024:

  greedy     temperature 0
  penalties  greedy, with a repetition, a presence and a frequency penalty
  top-p      temperature 1, top_p 0.9
  mixed      a third of each, and log probabilities
  bad words  greedy, with 16 words of one or two tokens
  beams      16 beam searches of 4 beams, which need the 5 most likely tokens of each row

Three variants take turns:

  rows    `sample`, the sampler of the host: it groups rows, and adjusts logits row by row
  torch   `DeviceSampler` with torch's operators for the draws
  kernel  `DeviceSampler` with the draws in one launch; a conversion of 64 numbers stands for the Triton kernel

Launches, copies and waits of the host are those of the tests' simulated GPU. Times are thread CPU time on tensors of
the host with 32 tokens, so that computing takes next to nothing: they are the costs of calling torch, and not those of
a GPU, which adds some microseconds to each launch. Medians. Run it in the root of the repository as

    PYTHONPATH=. python benchmarks/sampling.py [--steps 100]

The last line is one JSON object. No bar: figures of a GPU are in `benchmarks/gpu`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from array import array
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor

from radixkv.device import device_of
from radixkv.sampling.batch_draw import DrawRows, draw
from radixkv.sampling.device_sampler import DeviceSampler
from radixkv.sampling.params import SampleRow, SamplingParams
from radixkv.sampling.sampler import HostSampler, Sampler
from tests.virtual_gpu import VirtualGpu, installed

ROWS, PROMPT, REPLY, VOCAB = 64, 1024, 256, 32
GREEDY = SamplingParams(temperature=0)
PENALTIES = SamplingParams(temperature=0, repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.2)
TOP_P = SamplingParams(top_p=0.9)
CASES = {
    "greedy": [GREEDY],
    "penalties": [PENALTIES],
    "top-p": [TOP_P],
    "mixed": [each.but(logprobs=5) for each in (GREEDY, PENALTIES, TOP_P)],
    "bad words": [GREEDY.but(bad_words=["word"])],
    "beams": [SamplingParams(beam_width=4)],
}
WORDS = tuple((token,) if token % 2 else (token, token + 1) for token in range(16))


def one_launch(logits: Tensor, best: Tensor, rows: DrawRows) -> Tensor:
    """Stand for the kernel."""
    return best.long()


VARIANTS: dict[str, Callable[[torch.device], Sampler]] = {
    "rows": lambda place: HostSampler(),
    "torch": lambda place: DeviceSampler(place, draw),
    "kernel": lambda place: DeviceSampler(place, one_launch),
}


class Streams:
    """The rows of a batch, which grow by the tokens that are sampled."""

    def __init__(self, case: str, place: torch.device, sampler: Sampler) -> None:
        """Begin with full histories."""
        self.params = (CASES[case] * ROWS)[:ROWS]
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(VOCAB, (ROWS, PROMPT + REPLY), generator=generator, dtype=torch.int32)
        self.histories = [array("i", row.numpy().tobytes()) for row in tokens]
        self.logits = device_of(place).upload(torch.randn(ROWS, VOCAB, generator=generator))
        self.sampler = sampler

    def step(self) -> float:
        """Sample a token for each row; return the seconds of host time."""
        rows = [
            SampleRow(
                params,
                number,
                len(history),
                history,
                PROMPT,
                stream=number,
                candidates=5 if params.beam_width > 1 else 0,
                bad_words=WORDS if params.bad_words else (),
            )
            for number, (params, history) in enumerate(zip(self.params, self.histories, strict=True))
        ]
        start = time.thread_time()
        found = self.sampler.begin(self.logits, rows).result()
        seconds = time.thread_time() - start
        for history, token in zip(self.histories, found.tokens, strict=True):
            history.append(token)
        return seconds


def counted(case: str, variant: str) -> dict[str, int]:
    """Return the launches, copies and waits of a step on a simulated GPU, after one that fills the histories."""
    with installed(VirtualGpu()) as gpu, torch.inference_mode():
        streams = Streams(case, gpu.place, VARIANTS[variant](gpu.place))
        streams.step()
        before = gpu.counts.copy()
        streams.step()
        names = ("launch", "copy", "synchronisation", "event wait")
        launches, copies, *waits = [gpu.counts[name] - before[name] for name in names]
        return {"launches": launches, "copies": copies, "waits": sum(waits)}


def measured(case: str, steps: int) -> dict[str, float]:
    """Return the median microseconds of a step by variant."""
    place = torch.device("cpu")
    streams = {name: Streams(case, place, made(place)) for name, made in VARIANTS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in streams}
    with torch.inference_mode():
        for number in range(-3, steps):  # the first three warm up
            for name, each in streams.items():
                spent = each.step()
                if number >= 0:
                    seconds[name].append(spent)
    return {name: round(statistics.median(each) * 1e6, 1) for name, each in seconds.items()}


def main() -> int:
    """Print a table, and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    print("case       variant  launches  copies   waits   host us")
    for case in CASES:
        times = measured(case, options.steps)
        found[case] = {name: {**counted(case, name), "host_us": times[name]} for name in VARIANTS}
        for name, row in found[case].items():
            print(f"{case:10} {name:8} {row['launches']:8} {row['copies']:7} {row['waits']:7} {row['host_us']:9.1f}")
    print(json.dumps({"benchmark": "sampling", "torch": torch.__version__, "rows": ROWS, "cases": found}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
