"""Small models in files, engines with two ranks over them, and the processes of the ranks."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import transformers

import radixkv
from radixkv import Engine, SamplingParams
from tests.models.conftest import GROUPED, make
from tests.models.ranks.faulty_rank import FIRST

LOAD: dict[str, Any] = {"device": "cpu", "num_blocks": 64, "block_size": 8, "monitor": False, "seed": 5}
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


def llama(folder: Path, **sizes: int) -> str:
    """Write a model with the tokenizer of "tiny"; it never generates the token of an order."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(Path(radixkv.__file__).parent / "assets" / "tiny" / name, folder)
    model = make(transformers.LlamaConfig(**{**GROUPED, "vocab_size": 1536, **sizes}))
    model.lm_head.weight.data[FIRST : FIRST + 18] = 0
    model.save_pretrained(folder)
    return str(folder)


def tokens(engine: Engine, prompts: Sequence[Sequence[int]], params: Any = GREEDY) -> list[list[tuple[int, ...]]]:
    """Return the tokens of all answers."""
    found = engine.generate(prompts, params)
    return [[each.token_ids for each in (first, *first.alternatives)] for first in found]


@contextmanager
def ranked(folder: str, **options: Any) -> Iterator[Engine]:
    """Load a model on two ranks; check that no process is left afterwards."""
    with Engine.load(folder, **{**LOAD, "tensor_parallel": 2, **options}) as engine:
        yield engine
    assert not others()


def others(parent: int | None = None) -> list[psutil.Process]:
    """Return the running ranks that a process, or this one, has started."""
    children = [each for each in psutil.Process(parent).children(recursive=True) if runs(each)]
    return [each for each in children if any("rank" in part for part in each.cmdline())]


def runs(process: psutil.Process) -> bool:
    return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait for a condition."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "this takes too long"
        time.sleep(0.05)
