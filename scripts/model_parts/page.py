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

"Calls" has the [formats of tool calls](chats.md#formats-of-tool-calls) of well-known chat models with these classes.
A model's chat template decides, and without one of these formats, calls stay text.

A model type stands in parentheses if the name of the class does not show it. Some results depend on the configuration:
such variants have a "with" after the name of the class, and the counts leave them out.

## The trial

Each model has the kinds of layers that are typical of its architecture. Windows are shorter than the prompts, and sinks
and softcaps are large enough to change the scores. Blocks have 4 tokens, and chunks have 17. Each engine runs a prompt;
then, at the same time, prompts that diverge inside a block, continue a reply, or fork; then hits of both, up to the end
of the context.

Every row of logits is compared with `model(input_ids)` over the same tokens, without a cache, and every greedy token
must be that forward's choice. Where transformers computes in float32, both sides are kept in float64. The error of all
logits is below 1e-12 unless a row gives another bound. An error above 1e-9 is a failure (1e-4 if a row says float32).
longrope's frequencies are fixed to those for the longest context, so prompts within the original context differ from
`model(input_ids)` on purpose.
"""

_MEANINGS = {
    "paged": """\
radixkv computes the attention of the model over the pool, for all sequences of a step in one forward. Windows, chunks,
softcaps and sinks cost no extra time. The pool keeps all keys and values, even outside of a window, so that a prefix
stays a hit. Latent attention (MLA) is stored decompressed, as keys and values of every head; `radixkv plan` counts
this. Layers that read the KV of an earlier layer store none ("shared KV"). Layers with recurrent state compute on the
rows of a [state arena](architectures.md#recurrent-state).""",
    "fallback": """\
The model bypasses transformers' attention interface, or changes attention in a way that the interface does not show. It
runs by its own attention, over a cache that is filled from the pool. Hits and answers are the same, but each sequence
takes a [forward of its own](architectures.md#the-fallback). A warning at load gives the reason.""",
    "refused": "Loading raises `UnsupportedModel` with the reason.",
    "cannot be built": "transformers cannot create a model of the class in this environment.",
}

_LEAST = 1e-12  # no error is stored as less


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
    head = _HEAD.format(
        transformers=run.transformers, torch=run.torch.partition("+")[0], date=run.date, total=len(classes),
        counts=_counts(classes), faults=_faults(run.verdicts),
    )  # fmt: skip
    return "\n".join([head, *(line for result in RESULTS for line in _section(result, run.verdicts))])


def _counts(verdicts: Sequence[Verdict]) -> str:
    counts = {result: sum(each.result == result for each in verdicts) for result in RESULTS}
    return "\n".join([*_row("result", "classes"), *(_line(name, str(n)) for name, n in counts.items() if n)])


def _faults(verdicts: Sequence[Verdict]) -> str:
    bad = [each.name for each in verdicts if each.result in AT_FAULT]
    return f"At fault: {', '.join(bad)}.\n\n" if bad else ""


def _section(result: str, verdicts: Sequence[Verdict]) -> list[str]:
    """Return the verdicts with a result, a row for all that differ in their names only."""
    rows: dict[str, list[str]] = {}
    for each in sorted(verdicts, key=lambda each: " with " in each.name):
        if each.result == result:
            rows.setdefault(_found(each), []).append(_named(each))
    if not rows:
        return []
    title = "attention" if result == "paged" else "reason"
    titles = [title, "architectures", *(["calls"] if result in ("paged", "fallback") else [])]
    lines = (_line(*(found, ", ".join(names), _calls(names))[: len(titles)]) for found, names in sorted(rows.items()))
    return [f"## {result.capitalize()}", "", _MEANINGS.get(result, ""), "", *_row(*titles), *lines, ""]


# The beginning of a class's name, and the formats of calls of the chat models that have this class.
CALLS = {
    "Apertus": "apertus", "Cohere": "cohere", "Deepseek": "deepseek-v3, deepseek-v3.1, deepseek-v3.2",
    "Gemma4": "gemma4", "Glm4Moe": "glm", "GptOss": "gpt-oss", "Granite": "granite, hermes", "HYV3": "hunyuan",
    "Laguna": "glm", "Lfm2": "lfm2", "Llama4": "llama4", "Llama": "llama, hermes", "MiniMaxM2": "minimax-m2",
    "Ministral3": "mistral", "Mistral": "mistral", "Mixtral": "mistral", "NemotronH": "nemotron, qwen3-coder",
    "Olmo3": "olmo3", "Phi3": "phi-4-mini", "Qwen2": "hermes", "Qwen3Next": "hermes, qwen3-coder",
    "Qwen3_5": "qwen3-coder", "Qwen3": "hermes, qwen3-coder", "SeedOss": "seed-oss", "SmolLM3": "hermes",
    "SolarOpen": "solar",
}  # fmt: skip


def _calls(names: Iterable[str]) -> str:
    """Return the formats of calls of some classes, each once."""
    found = (next((CALLS[each] for each in CALLS if name.startswith(each)), "") for name in names)
    return ", ".join(dict.fromkeys(form for forms in found for form in forms.split(", ") if form))


def _found(each: Verdict) -> str:
    """Return attention, reason, note and a large error; the reason without the class's name in front."""
    name = class_of(each.name)
    reason = each.reason.removeprefix(f"{name} ").removeprefix(f"{name}: ")
    error = f"error < {each.error:.0e}".replace("e-0", "e-") if (each.error or 0) > _LEAST else ""
    parts = [*reason.split("; "), *each.note.split("; "), error]
    return "; ".join(filter(None, [each.attention * (each.result == "paged"), *map(_short, parts)]))


def _named(each: Verdict) -> str:
    """Return the name, and the model types that it does not show."""
    letters = each.name.lower()
    hidden = [kind for kind in each.kinds if kind.replace("_", "").replace("-", "") not in letters.replace("_", "")]
    return each.name + f" ({', '.join(hidden)})" * (bool(hidden) and class_of(each.name) == each.name)


def _rounded(error: float | None) -> float | None:
    """Round up to a power of ten, at least 1e-12: further digits differ between runs."""
    return None if error is None else 10.0 ** max(-12, math.ceil(math.log10(max(error, 1e-300)) - 1e-9))


def _short(text: str, most: int = 125) -> str:
    return text if len(text) <= most else text[: most - 3].rsplit(" ", 1)[0] + " ..."


def _row(*titles: str) -> list[str]:
    return [_line(*titles), _line(*("---" for _ in titles))]


def _line(*cells: str) -> str:
    clean = [" ".join(cell.split()).replace("|", "\\|") for cell in cells]
    return f"| {' | '.join(clean)} |"
