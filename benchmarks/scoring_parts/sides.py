"""Score the items in four ways, each in processes of its own.

    SCORE    radixkv's `engine.score`, one call an item
    ALONE    the same without the prefix cache: nothing is shared
    SERVED   lm-evaluation-harness' `local-completions` with `radixkv serve`
    HF       lm-evaluation-harness' `hf`: transformers' own forward of each prompt and choice

All read the same GGUF file and compute in float32. A result is kept as a JSON file in the folder of the run.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from http_load_parts.server import cpu_seconds, metrics, served
from scoring_parts import items
from scoring_parts.items import Item

SCORE, ALONE, SERVED, HF = "score", "score-without-cache", "serve", "hf"
NEEDS_HARNESS = (SERVED, HF)
HERE = Path(__file__).parent
MODEL_NAME = "scored-model"
BLOCKS = 2048  # of 16 tokens, which are 755 MB of float32 KV of SmolLM2-135M
ENGINE = {"weights": "float32", "dtype": "float32", "num_blocks": BLOCKS, "seed": 0}
SERVER = ("--weights", "float32", "--dtype", "float32", "--kv-memory", "755MB", "--model-name", MODEL_NAME)


class SideError(Exception):
    """A process failed; the message has the end of its log."""


@dataclass(frozen=True)
class Measured:
    """The scores of one side, [items][choices] of (log-likelihood, whether it is the greedy continuation).

    `computed` counts the tokens that ran through the model. CPU seconds are those of all processes of the side.
    `asked` is a digest of the prompts and choices.
    """

    scores: list[list[tuple[float, bool]]]
    computed: int
    wall_s: float
    cpu_s: float
    versions: dict[str, str]
    details: dict[str, float]
    asked: str

    @property
    def choices(self) -> list[int]:
        """The likeliest choice of each item, the first of equals."""
        return [max(range(len(each)), key=lambda at: each[at][0]) for each in self.scores]


@dataclass(frozen=True)
class Run:
    """Everything that a side needs: the model, the items, the shots, and a folder for files and results."""

    model: Path
    asked: Sequence[Item]
    shots: Sequence[Item]
    folder: Path
    threads: int
    harness: Path | None  # a Python that has lm_eval
    concurrent: int = 8  # requests of the harness at once

    @property
    def prompts(self) -> list[str]:
        return [items.prompt(item, self.shots) for item in self.asked]

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps([self.model.name, self.prompts, self.continuations]).encode()).hexdigest()

    @property
    def continuations(self) -> list[list[str]]:
        return [items.continuations(item) for item in self.asked]


def measured(side: str, run: Run, resume: bool) -> Measured:
    """Measure a side, or take the result that the folder keeps of the same prompts. Raises SideError."""
    file, asked = run.folder / f"{side}-{len(run.asked)}.json", run.digest
    if resume and file.exists():
        kept = Measured(**json.loads(file.read_text()))
        if kept.asked == asked:
            return replace(kept, details=kept.details | {"earlier_run": 1.0})
    found = WAYS[side](run)
    file.write_text(json.dumps(asdict(found)))
    return found


def by_score(run: Run) -> Measured:
    """Measure `engine.score`."""
    return _scored(run, SCORE)


def by_score_alone(run: Run) -> Measured:
    """Measure `engine.score` without the prefix cache."""
    return _scored(run, ALONE, prefix_cache=False)


def by_server(run: Run) -> Measured:
    """Measure `local-completions` with a server of its own."""
    arguments = {
        "model": MODEL_NAME,
        "tokenizer": str(_tokenizer(run)),
        "tokenizer_backend": "huggingface",
        "tokenized_requests": True,
        "num_concurrent": run.concurrent,
        "max_retries": 1,
        "timeout": 3600,
    }
    with served(run.threads, str(run.model), *SERVER) as (pid, url):
        before, counts = cpu_seconds(pid), asyncio.run(metrics(url))
        arguments["base_url"] = f"{url}/v1/completions"
        found = _harness(run, SERVED, "local-completions", arguments)
        server_s = cpu_seconds(pid) - before
        after = asyncio.run(metrics(url))
    names = ("computed_tokens", "steps", "scored_tokens", "reused_scores")
    grown = {name: _metric(after, name) - _metric(counts, name) for name in names}
    details = {"server_cpu_s": server_s, "client_cpu_s": found["cpu_s"], **grown}
    spent = {"cpu_s": found["cpu_s"] + server_s, "computed": int(grown["computed_tokens"])}
    return _measured(run, found | spent, details)


def by_hf(run: Run) -> Measured:
    """Measure the `hf` backend."""
    arguments = {
        "pretrained": str(run.model.parent),
        "gguf_file": run.model.name,
        "dtype": "float32",
        "device": "cpu",
        "batch_size": 1,
    }
    return _measured(run, _harness(run, HF, "hf", arguments))


WAYS = {SCORE: by_score, ALONE: by_score_alone, SERVED: by_server, HF: by_hf}


# ---- processes


def _scored(run: Run, side: str, **fields: Any) -> Measured:
    given = {"model": str(run.model), "prompts": run.prompts, "continuations": run.continuations}
    found = _ran(run, side, [sys.executable, str(HERE / "ours.py")], json.dumps(given | {"fields": ENGINE | fields}))
    return _measured(run, found, {"steps": found["steps"]})


def _harness(run: Run, side: str, backend: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Run the harness on the items, and check that it asked exactly the prompts that `items` renders."""
    task = items.write_task(run.folder / f"task-{backend}", run.asked, run.shots)
    command = [str(run.harness), str(HERE / "harness.py"), str(task.parent), items.TASK, backend, json.dumps(arguments)]
    found = _ran(run, side, command)
    if (found.pop("prompts"), found.pop("continuations")) != (run.prompts, run.continuations):
        raise SideError(f"{side}: the harness rendered other prompts than scoring_parts/items.py")
    return found


def _ran(run: Run, side: str, command: list[str], given: str = "") -> dict[str, Any]:
    """Run a process that ends in one JSON line; its log is a file of the run's folder."""
    log = run.folder / f"{side}.log"
    environment = os.environ | {"OMP_NUM_THREADS": str(run.threads), "MKL_NUM_THREADS": str(run.threads)}
    with log.open("w") as errors:
        done = subprocess.run(command, input=given, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
    if done.returncode:
        raise SideError(f"{side} failed with status {done.returncode}; {log} ends with:\n{log.read_text()[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _tokenizer(run: Run) -> Path:
    """Save the tokenizer of the GGUF file in a folder, from which the harness can load it."""
    folder = run.folder / "tokenizer"
    if not folder.exists():
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(run.model.parent, gguf_file=run.model.name, local_files_only=True)
        tokenizer.save_pretrained(folder)
    return folder


def _measured(run: Run, found: dict[str, Any], details: dict[str, float] | None = None) -> Measured:
    names = ("scores", "computed", "wall_s", "cpu_s", "versions")
    return Measured(**{name: found[name] for name in names}, details=details or {}, asked=run.digest)


def _metric(counts: dict[str, float], name: str) -> float:
    """The sum of a counter over its labels; 0 without it."""
    return sum(value for key, value in counts.items() if key.partition("{")[0] == f"radixkv:{name}_total")
