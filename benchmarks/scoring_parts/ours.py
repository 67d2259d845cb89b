"""Score items by `engine.score` in a process of its own, and print the results as one JSON line.

It reads {"model": FILE, "prompts": [...], "continuations": [[...], ...], "fields": {field of EngineConfig: value}} from
the standard input. Its clocks leave out the imports and loading the model.
"""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from radixkv import Engine


def main() -> None:
    import torch
    import transformers

    from radixkv import Engine, __version__

    transformers.utils.logging.set_verbosity_error()
    given = json.load(sys.stdin)
    with Engine.load(given["model"], monitor=False, **given["fields"]) as engine:
        result = score(engine, given["prompts"], given["continuations"])
    versions = {"radixkv": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps(result | {"versions": versions}))


def score(engine: Engine, prompts: list[str], continuations: list[list[str]]) -> dict[str, Any]:
    """Score the items one after another: (log-likelihood, greedy) of each choice, tokens, forwards and times."""
    before = engine.stats()
    wall, cpu = time.perf_counter(), time.process_time()
    found = [engine.score(prompt, choices) for prompt, choices in zip(prompts, continuations, strict=True)]
    wall_s, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
    after = engine.stats()
    return {
        "scores": [[(each.logprob, each.greedy) for each in scores] for scores in found],
        "computed": after.computed_tokens - before.computed_tokens,
        "steps": after.steps - before.steps,
        "wall_s": wall_s,
        "cpu_s": cpu_s,
    }


if __name__ == "__main__":
    main()
