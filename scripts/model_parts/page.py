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

In transformers {transformers}, AutoModelForCausalLM has {total} classes. `make models` builds a small model of each
class, with random weights in float64, and loads it into a real engine. These are the results of {date}, with torch
{torch}:

{counts}

{faults}Each model is also tested when you load it, and that test decides whether it runs. `radixkv doctor MODEL` shows
the result for your model.

## The results

**paged**: radixkv computes the attention of the model over the pool, for all sequences of a step in one forward.
Windows, chunks, softcaps and sinks cost no extra time. The pool keeps all keys and values, even outside of a window, so
that a prefix stays a hit. Latent attention (MLA) is stored decompressed, as keys and values of every head;
`radixkv plan` counts this. Layers that read the KV of an earlier layer store none ("shared KV"). Layers with recurrent
state compute on the rows of a state arena ([architectures.md](architectures.md)).

**fallback**: the model bypasses transformers' attention interface, or changes attention in a way that the interface
does not show. It runs by its own attention, over a cache that is filled from the pool. Hits and answers are the same,
but each sequence takes a forward of its own, and each layer copies its context
([costs](architectures.md)). A warning at load gives the reason.

**refused**: loading raises `UnsupportedModel` with the reason.

**cannot be built**: transformers cannot create a model of the class in this environment.

## The trial

Each model has the kinds of layers that are typical of its architecture. Windows are shorter than the prompts, and sinks
and softcaps are large enough to change the scores. Blocks have 4 tokens, and chunks have 17. Each engine runs a prompt;
then, at the same time, prompts that diverge inside a block, continue a reply, or fork; then hits of both, up to the end
of the context.

Every row of logits is compared with the model's own forward over the same tokens, `model(input_ids)`, without a cache,
and every greedy token must be the forward's choice. Where transformers computes in float32, both sides are kept in
float64. An error above 1e-9 is a failure (1e-4 if a note says float32). The column *error* is an upper bound for all
logits. A note says if `generate` disagrees with that forward. longrope's frequencies are fixed to those for the longest
context, so prompts within the original context differ from `model(input_ids)` on purpose.

Classes with the same results share a row.
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
    titles = ("architectures", "result", "attention", "error", "note")
    rows = [(_named(each), *_found(each)) for each in verdicts if each.error is not None]
    return ["## Models that load", "", *_row(*titles), *_merged(rows)]


def _others(verdicts: Sequence[Verdict]) -> list[str]:
    rows = [(_named(each), each.result, _short(_because(each))) for each in verdicts if each.error is None]
    return ["## Models that do not load", "", *_row("architectures", "result", "reason"), *_merged(rows)]


def _variants(verdicts: Sequence[Verdict]) -> list[str]:
    text = "Some results depend on the configuration. The counts above do not include these variants."
    titles = ("architectures", "result", "attention", "error", "note or reason")
    return ["## Variants", "", text, "", *_row(*titles), *_merged([(each.name, *_found(each)) for each in verdicts])]


def _found(each: Verdict) -> tuple[str, ...]:
    return each.result, each.attention, _error(each.error), _short(_because(each))


def _merged(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return a line for each group of rows that differ in their names only, in the order of the first names."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, *cells in rows:
        groups.setdefault(tuple(cells), []).append(name)
    return [_line(", ".join(names), *cells) for cells, names in groups.items()]


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
