"""Engines whose model draws at random, with the vocabulary of the bundled one."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Unpack

import numpy as np
import transformers

import radixkv
from radixkv.chat import Engine
from radixkv.config import EngineConfigFields
from radixkv.models.loaded import SequenceInput
from tests.engine.fakes import FakeModel, FakeRunner, make_engine

TINY = f"{next(iter(radixkv.__path__))}/assets/tiny"
STOP = 2


@lru_cache
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(TINY)


@lru_cache
def closing() -> np.ndarray:
    """Return a bias for tokens that close something, so that random texts end soon."""
    texts = [tokenizer().decode([token]) for token in range(len(tokenizer()))]
    bias = np.array([6.0 if any(sign in text for sign in '"}]') else 0.0 for text in texts], np.float32)
    bias[STOP] = 6.0
    return bias


class RandomRunner(FakeRunner):
    """Logits that depend on the whole history, read back through the block table."""

    def _logits(self, chunk: SequenceInput, end: int) -> np.ndarray:
        return super()._logits(chunk, end) + closing()


def random_engine(num_blocks: int = 400, **settings: Unpack[EngineConfigFields]) -> Engine:
    """Return an engine of a random model: at temperature 1, it draws any token that a constraint allows."""
    model = FakeModel(tokenizer=tokenizer(), vocab_size=len(tokenizer()), stop_token_ids=frozenset({STOP}))
    engine, _ = make_engine(num_blocks, model=model, runner_class=RandomRunner, **settings)
    return engine
