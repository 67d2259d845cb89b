"""Run radixkv in a process of its own for benchmarks/llama_cpp.py.

It reads commands as JSON lines and writes a reply for each; `worker.py` lists them. The engine has the settings that
`Engine.load` chooses, except for the form of its weights and its number of blocks, so that both engines have room for
equally many tokens. The radix tree is the prompt cache.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

BLOCK = 16
MARK = "\N{LATIN SMALL LETTER O WITH STROKE}reply"
"""Stands for a reply while a conversation is rendered; no template contains or changes it."""


class Ours:
    """The commands; `load` comes first."""

    def load(self, model: str, threads: int, streams: int, context: int, settings: Any) -> dict[str, Any]:
        """Load a model with room for `streams` times `context` tokens; `settings` are fields of EngineConfig."""
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        import torch

        from radixkv import Engine, __version__

        torch.set_num_threads(threads)
        self.engine = Engine.load(
            model, num_blocks=streams * context // BLOCK, block_size=BLOCK, monitor=False, **settings
        )
        versions = {"radixkv": __version__, "torch": torch.__version__, "transformers": version("transformers")}
        return {"versions": versions}

    def tokenize(self, texts: list[str]) -> dict[str, Any]:
        """Token ids of each text, whose control tokens count as such; no token is added."""
        return {"ids": [self.engine.model.codec.encode(text, add_special_tokens=False) for text in texts]}

    def render(self, questions: list[str]) -> dict[str, Any]:
        """Text that each turn of a chat adds to the history, from the end of the reply before to the next reply."""
        from radixkv.engine.chat_prompts import rendered, today

        messages: list[dict[str, str]] = []
        for question in questions:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": MARK}]
        prompt = rendered(self.engine.model.codec, messages[:-1], today(), reply=True)
        return {"texts": prompt.split(MARK)}

    def generate(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        """Generate `tokens` greedy tokens after each prompt, all at once."""
        from radixkv import SamplingParams

        params, clock = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True), clock_from_now()

        def stream(handle: Any) -> tuple[dict[str, float], Any]:
            chunks = iter(handle)
            next(chunks)
            first = clock()
            return first, handle.result()

        with ThreadPoolExecutor(len(prompts)) as pool:
            ended = list(pool.map(stream, [self.engine.submit(prompt, params) for prompt in prompts]))
        total = clock()
        return {
            "replies": [list(completion.token_ids) for _, completion in ended],
            "first": [first for first, _ in ended],
            "total": total,
            "computed": sum(completion.usage.computed_tokens for _, completion in ended),
        }

    def usage(self) -> dict[str, float]:
        """CPU seconds of this process, and the most memory that it had resident."""
        return {"cpu_s": time.process_time(), "peak_mb": peak_bytes() / 1e6}


def clock_from_now() -> Callable[[], dict[str, float]]:
    """A clock of milliseconds since now, CPU time of all threads and wall time."""
    cpu, wall = time.process_time(), time.perf_counter()
    return lambda: {"cpu_ms": (time.process_time() - cpu) * 1e3, "wall_ms": (time.perf_counter() - wall) * 1e3}


def peak_bytes() -> int:
    """The peak of resident memory. `ru_maxrss` of a child includes its parent's on Linux, so it comes second."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main() -> None:
    """Answer commands until the input ends. What libraries print goes to the standard error."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    ours = Ours()
    for line in sys.stdin:
        command = json.loads(line)
        try:
            reply = getattr(ours, command.pop("command"))(**command)
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
