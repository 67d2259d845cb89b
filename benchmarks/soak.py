"""Send mixed requests with random cancels to the engine's real threads: look for leaks and wrong answers.

    python benchmarks/soak.py [--requests 10000] [--clients 16] [--model memory|tiny] [--order longest-prefix] [--short]

Callers on 16 threads share a pool that is far too small for them: prompts with common beginnings, conversations,
forked and sampled streams, priorities, namespaces, timeouts. Some read slowly, some cancel (before or while they read),
some drop their handles; some pin, demote and clear the cache. In the default model each slot holds a digest of its
history, as in `tests/simulation`; every stream must follow from its history and seed, and one forward in 500 raises.
With `--model tiny` (the bundled model, greedy), the model's own forward checks one answer in ten after the run: each
token must be its likeliest, to 1e-3.

With `--short`, prompts have up to 18 tokens and answers up to 4, so that 200,000 requests take ten minutes
(`make soak`).

Memory is limited to two arenas of malloc, as `radixkv serve` does: with one for each of 17 threads, the resident memory
grew by 0.2 MB per thousand requests while the allocated bytes stayed the same. `--arenas 0` leaves malloc alone.

Reported: requests and tokens per second, how the requests ended, preemptions, and the resident memory after each
twentieth of the requests (garbage collected). The exit code is 1 if an answer is wrong, a request is lost, a block is
held at the end, `check()` fails, the objects of a request stay alive, or memory grew by more than 8 MB since the first
tenth. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for the tests' model and oracle

from radixkv.engine import Completion, RequestEngine
from radixkv.engine.request import Request, Stream
from radixkv.models.attention_interface import own_attention
from radixkv.models.loaded import LoadedModel
from radixkv.sampling.params import SamplingParams
from radixkv.sizing.memory import limit_arenas
from tests.simulation.traffic import Ids, Mixture, Tally, Traffic, is_expected, leaked, memory_engine

LIMITS: dict[str, Any] = {"max_sequences": 16, "max_batch_tokens": 64, "prefill_chunk": 32}
MEMORY = Mixture()
SHORT = Mixture(longest_prompt=12, most_new=4, streams=(1,), ways=("wait", "wait", "read", "cancel"))
TINY = Mixture(vocab=500, longest_prompt=120, most_new=32, sampled=0.0, timeouts=(0.05, 0.5, 5.0))
MOST_GROWTH = 8 << 20  # bytes
TOLERANCE = 1e-3


@dataclass
class Memory:
    """Resident bytes, sampled each time that a twentieth of the requests has ended."""

    requests: int
    sizes: list[int] = field(default_factory=list)

    def sample(self, ended: int) -> None:
        if ended % max(self.requests // 20, 1) == 0:
            gc.collect()
            self.sizes.append(resident())

    @property
    def growth(self) -> int:
        """From a tenth of the requests to the end."""
        return self.sizes[-1] - self.sizes[1]


@dataclass
class OwnForward:
    """Keeps one answer in ten, and asks the model itself about them once the engine is closed."""

    kept: list[tuple[Ids, Completion]] = field(default_factory=list)
    seen: int = 0

    def keep(self, prompt: Ids, params: SamplingParams, answer: Completion) -> bool:
        self.seen += 1
        if self.seen % 10 == 0:
            self.kept.append((prompt, answer))
        return True

    @torch.inference_mode()
    def wrong(self, model: LoadedModel) -> list[str]:
        with own_attention(model.model):
            return [
                f"{prompt}: {answer.token_ids}" for prompt, answer in self.kept if not _likeliest(model, prompt, answer)
            ]


def _likeliest(model: LoadedModel, prompt: Ids, answer: Completion) -> bool:
    """Whether each token of a greedy answer is the model's likeliest, or as good as that."""
    ids = torch.tensor([[*prompt, *answer.token_ids]], device=model.device)
    logits = model.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    said = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
    return bool((said >= logits.max(dim=1).values - TOLERANCE).all())


def resident() -> int:
    """Resident bytes of this process; its largest so far where there is no /proc."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    except OSError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def alive() -> int:
    """Requests and streams that something still holds on to."""
    gc.collect()
    return sum(type(each) in (Request, Stream) for each in gc.get_objects())


@contextmanager
def engine_of(chosen: argparse.Namespace) -> Iterator[RequestEngine]:
    if chosen.model == "memory":
        with memory_engine(faults=0.002, order=chosen.order, **LIMITS) as engine:
            yield engine
    else:
        with RequestEngine.load("tiny", num_blocks=96, block_size=4, order=chosen.order, **LIMITS) as engine:
            yield engine


def soak(chosen: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Run all requests; return the figures and the faults."""
    own, memory = OwnForward(), Memory(chosen.requests)
    with engine_of(chosen) as engine:
        judge, mixture = (is_expected, MEMORY) if chosen.model == "memory" else (own.keep, TINY)
        traffic = Traffic(engine, judge, SHORT if chosen.short else mixture, chosen.seed, after=memory.sample)
        began = time.perf_counter()
        tally = traffic.run(chosen.requests, chosen.clients)
        seconds = time.perf_counter() - began
        stats, model = engine.stats(), engine.model
        engine.generate([[1]], SamplingParams(max_tokens=1))  # the last request is dropped at the next step
        figures = {
            "model": chosen.model,
            "short": chosen.short,
            "order": chosen.order,
            "requests": chosen.requests,
            "requests_per_s": round(chosen.requests / seconds, 1),
            "tokens_per_s": round(tally.tokens / seconds),
            "seconds": round(seconds, 1),
            "ends": dict(sorted(tally.ends.items())),
            "preemptions": stats.preemptions,
            "recomputed_tokens": stats.recomputed_tokens,
            "coalesced_tokens": stats.coalesced_tokens,
            "hit_rate": round(stats.hit_rate, 3),
            "evicted_blocks": stats.cache.evicted_blocks,
            "leaked_blocks": leaked(engine),
            "objects_alive": alive(),
            "rss_mb": round(resident() / 2**20),
            "rss_growth_mb": round(memory.growth / 2**20, 1),
            "rss_mb_by_twentieths": [round(size / 2**20, 1) for size in memory.sizes],
        }
    wrong = _verdict(tally, figures, memory)
    return figures, wrong if chosen.model == "memory" else wrong + own.wrong(model)


def _verdict(tally: Tally, figures: dict[str, Any], memory: Memory) -> list[str]:
    wrong = list(tally.wrong)
    if figures["leaked_blocks"]:
        wrong.append(f"{figures['leaked_blocks']} blocks leaked")
    if figures["objects_alive"]:
        wrong.append(f"{figures['objects_alive']} requests and streams are still held")
    if memory.growth > MOST_GROWTH:
        wrong.append(f"memory grew by {memory.growth >> 20} MB: {[size >> 20 for size in memory.sizes]}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--model", choices=("memory", "tiny"), default="memory")
    parser.add_argument("--order", choices=("fcfs", "longest-prefix"), default="fcfs")
    parser.add_argument("--short", action="store_true", help="short prompts and answers")
    parser.add_argument("--arenas", type=int, default=2, help="arenas of malloc; 0 for malloc's own number")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    if chosen.arenas:
        limit_arenas(chosen.arenas)
    logging.disable(logging.CRITICAL)  # the engine logs every injected fault
    torch.set_num_threads(1)
    figures, wrong = soak(chosen)
    for name, value in figures.items():
        print(f"{name:20} {value}")
    for text in wrong[:20]:
        print(f"WRONG: {text}")
    print(json.dumps({"benchmark": "soak", **figures, "wrong": len(wrong), "python": platform.python_version()}))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
