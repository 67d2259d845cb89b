"""Render docs/models.md from the verdicts in docs/results/models.json."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace

from model_parts.recipes import class_of
from model_parts.verdict import AT_FAULT, RESULTS, Verdict

_HEAD = """\
# Which models run

<!-- Written by `make models`; edit scripts/model_parts/page.py instead. -->

transformers {transformers} maps AutoModelForCausalLM to {total} classes. `make models` builds each of them small,
with random weights in float64, and loads it into a real engine. On {date}, with torch {torch}:

{counts}

{faults}Each model is also tested when it is loaded, and that test decides. `radixkv doctor MODEL` shows its result for
your model.

## The results

**paged**: the model's attention reads and writes the pool through block tables. One forward computes all sequences of
a step, prefills and decodes together, and shared prefixes are read once. Windows, chunks, softcaps and sinks cost
nothing in addition. All keys and values are kept in spite of windows, so that a prefix stays a hit. MLA is stored
decompressed: as keys and values of every head, which takes more memory than its latent vector would. `radixkv plan`
counts them so.

**fallback**: the model bypasses transformers' attention interface, or changes attention in a way that the interface
does not show (ALiBi, masks of its own). It runs by its own attention, over a cache that is filled from the pool. Hits,
forks and answers are the same, but each sequence takes a forward of its own in each step, and each layer copies the
sequence's whole context out of the pool for it. A warning at load gives the reason;
[architectures.md](architectures.md) has the costs.

**refused**: loading raises `UnsupportedModel` with the reason. The model keeps state other than keys and values of each
token (recurrent and convolutional state, an index of keys to attend to), or needs another model's output, or its
answers over the pool differed from its own.

**cannot be built**: transformers itself makes no model of the class here, for the reason in the table.

## The trial

Each model has the kinds of layers that are typical of its architecture: a window that is shorter than the prompts and
longer than the self-test's unless a layer names it, routed experts, sinks and softcaps that change the scores, rotary
dims that differ from the head's. The engine is asked for a prompt; then at once for one that leaves it inside a
block, a short one, a single token, one that continues its reply, and three sampled streams that fork after a common
prefix; then for the first two again, and for one that continues to the end of the context. Blocks have 4 tokens,
chunks 17. Every row of logits that the engine computed is compared with the model's own forward over the same tokens,
called without a cache, and every greedy token with the forward's choice. Where transformers narrows to float32
(softmax, norms, routers), both sides are kept in float64. Errors are then those of adding numbers in another order, and
more than 1e-9 is wrong (1e-4 if a note says float32). *error* bounds the difference of any logit.

The reference is the model's own forward, `model(input_ids)`. If transformers' `generate` disagrees with that forward, a
note says so. (RoBERTa and similar models count positions from the padding id on; `generate` counts from 0.) The padding
token is not text here, and never sampled. longrope's frequencies are fixed to those for the longest context, so prompts
within the original context differ from `model(input_ids)` on purpose: they are compared with themselves, once alone and
once in a batch with long ones.
"""


@dataclass(frozen=True)
class Run:
    """All verdicts of one run, and the versions that it used."""

    transformers: str
    torch: str
    date: str
    verdicts: tuple[Verdict, ...]


def sorted_by_name(verdicts: Iterable[Verdict]) -> tuple[Verdict, ...]:
    """Return the verdicts in the order of the page."""
    return tuple(sorted(verdicts, key=lambda each: each.name.lower()))


def to_json(run: Run) -> str:
    """Return a run as text, with a line for each verdict, so that changes can be read."""
    versions = {"transformers": run.transformers, "torch": run.torch, "date": run.date}
    verdicts = [replace(each, error=_rounded(each.error), seconds=0.0) for each in run.verdicts]
    rows = ",\n  ".join(json.dumps(asdict(each)) for each in verdicts)
    return f'{{"found with": {json.dumps(versions)},\n "verdicts": [\n  {rows}\n ]}}\n'


def from_json(text: str) -> Run:
    """Return the run that `to_json` wrote."""
    data = json.loads(text)
    verdicts = tuple(Verdict(**{**row, "kinds": tuple(row["kinds"])}) for row in data["verdicts"])
    return Run(**data["found with"], verdicts=verdicts)


def render(run: Run) -> str:
    """Return the page as Markdown."""
    classes = [each for each in run.verdicts if class_of(each.name) == each.name]
    variants = [each for each in run.verdicts if class_of(each.name) != each.name]
    head = _HEAD.format(
        transformers=run.transformers, torch=run.torch.partition("+")[0], date=run.date, total=len(classes),
        counts=_counts(classes), faults=_faults(run.verdicts),
    )  # fmt: skip
    parts = [head, *_loaded(classes), "", *_others(classes), "", *_variants(variants)]
    return "\n".join(parts) + "\n"


def _counts(verdicts: Sequence[Verdict]) -> str:
    counts = {result: sum(each.result == result for each in verdicts) for result in RESULTS}
    return "\n".join([*_row("result", "classes"), *(_line(name, str(n)) for name, n in counts.items() if n)])


def _faults(verdicts: Sequence[Verdict]) -> str:
    bad = [each.name for each in verdicts if each.result in AT_FAULT]
    return f"At fault: {', '.join(bad)}.\n\n" if bad else ""


def _loaded(verdicts: Sequence[Verdict]) -> list[str]:
    rows = [
        _line(_named(each), each.result, each.attention, _error(each.error), _short(_because(each)))
        for each in verdicts
        if each.error is not None
    ]
    return ["## Models that load", "", *_row("architecture", "result", "attention", "error", "note"), *rows]


def _others(verdicts: Sequence[Verdict]) -> list[str]:
    rows = [_line(_named(each), each.result, _short(_because(each))) for each in verdicts if each.error is None]
    return ["## Models that do not load", "", *_row("architecture", "result", "reason"), *rows]


def _variants(verdicts: Sequence[Verdict]) -> list[str]:
    text = "Some results depend on the configuration. These variants are not counted above."
    rows = [
        _line(each.name, each.result, each.attention, _error(each.error), _short(_because(each))) for each in verdicts
    ]
    return ["## Variants", "", text, "", *_row("architecture", "result", "attention", "error", "note or reason"), *rows]


def _because(each: Verdict) -> str:
    """Return reason and note; the reason without the class's name in front, which is in another column."""
    name, reason = class_of(each.name), each.reason
    return "; ".join(filter(None, [reason.removeprefix(f"{name} ").removeprefix(f"{name}: "), each.note]))


def _named(each: Verdict) -> str:
    return f"{each.name} ({', '.join(each.kinds)})"


def _error(error: float | None) -> str:
    return "" if error is None else f"< {error:.0e}".replace("e-0", "e-")


def _rounded(error: float | None) -> float | None:
    """Round up to a power of ten, at least 1e-12: further digits differ between runs."""
    return None if error is None else 10.0 ** max(-12, math.ceil(math.log10(max(error, 1e-300)) - 1e-9))


def _short(text: str, most: int = 240) -> str:
    return text if len(text) <= most else text[: most - 3].rsplit(" ", 1)[0] + " ..."


def _row(*titles: str) -> list[str]:
    return [_line(*titles), _line(*("---" for _ in titles))]


def _line(*cells: str) -> str:
    clean = [" ".join(cell.split()).replace("|", "\\|") for cell in cells]
    return f"| {' | '.join(clean)} |"
