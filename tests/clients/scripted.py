"""A random model of 32k positions whose samples follow a script, in a real engine.

Every token is computed by the real forward over the pool. In addition, a FakeRunner stores the token history of each
slot and checks it at each read. Its logits, which follow the script, replace the random ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from radixkv import Engine
from radixkv.cache import PrefixCache
from radixkv.config import EngineConfig
from radixkv.engine.audit import piece_tokens
from radixkv.models import adapter
from radixkv.models.kv_recompute import Recheck
from radixkv.models.loaded import LoadedModel, SequenceInput
from radixkv.models.runner import Runner
from tests.chat.worlds import Script
from tests.engine.fakes import FakeRunner
from tests.serve.served import tokenizer

POSITIONS = 32_768
BLOCK_SIZE = 16
NUM_BLOCKS = 8_000  # 128,000 tokens, which take 64 MB


class ScriptedRunner(Runner):
    """A runner that computes all KV, checks the history of each input, and returns the logits of a script."""

    def __init__(self, loaded: LoadedModel, script: Script) -> None:
        super().__init__(loaded, NUM_BLOCKS, BLOCK_SIZE, recheck_tokens=piece_tokens(BLOCK_SIZE))
        self.histories = FakeRunner(NUM_BLOCKS, BLOCK_SIZE, loaded.vocab_size, script)
        self._rechecks = False

    def run(self, inputs: Sequence[SequenceInput], copies: Sequence[tuple[int, int]] = ()) -> Tensor:
        logits = super().run(inputs, copies)
        return logits if self._rechecks else self.histories.run(inputs, copies)

    def recheck(self, tokens: NDArray[Any], start: int, block_table: NDArray[Any]) -> Recheck:
        self._rechecks = True  # writes to spare blocks, which have no history
        try:
            return super().recheck(tokens, start, block_table)
        finally:
            self._rechecks = False


def scripted_engine(replies: Mapping[str, str], positions: int = POSITIONS) -> tuple[Engine, ScriptedRunner]:
    """Return an engine that replies by the first key that the last message contains."""
    config = LlamaConfig(
        vocab_size=len(tokenizer()),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=positions,
        bos_token_id=0,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    loaded = adapter.load(LlamaForCausalLM(config), tokenizer=tokenizer())

    def reply(message: str) -> str:
        return next((text for key, text in replies.items() if key in message), "I have nothing to add.")

    runner = ScriptedRunner(loaded, Script(tokenizer(), reply))
    cache = PrefixCache(NUM_BLOCKS, BLOCK_SIZE)
    return Engine(loaded, runner, cache, EngineConfig(monitor=False)), runner


def call(name: str, /, **arguments: Any) -> str:
    """Return a tool call in the format of the bundled model's chat template."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
