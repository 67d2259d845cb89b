"""Small random hybrid models, and a driver that runs many sequences over rows and snapshots of one arena."""

from __future__ import annotations

import importlib
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from radixkv.models.attention_interface import own_attention
from radixkv.models.loaded import LoadedModel, SequenceInput
from radixkv.models.runner import Runner
from radixkv.sizing.recurrent_state import EMPTY, StateRow, StateSnapshot, StateStep

sys.path.append(str(Path(__file__).parents[3] / "scripts"))
recipes = importlib.import_module("model_parts.recipes")

HYBRIDS = {
    "qwen3_5": "Qwen3_5ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "lfm3": "Lfm3ForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "bamba": "BambaForCausalLM",
    "zamba2": "Zamba2ForCausalLM",
    "olmo_hybrid": "OlmoHybridForCausalLM",
    "kimi_linear": "KimiLinearForCausalLM",
    "bailing_hybrid": "BailingHybridForCausalLM",
    "zaya": "ZayaForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
}
CLASSES = recipes.classes()
BLOCK = 4


def hybrid(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """Return a random model of this kind, the same each time."""
    name = HYBRIDS.get(kind, kind)
    return recipes.build(name, CLASSES[name]).to(dtype)


class Row:
    """One sequence: its tokens so far, its blocks, and the row of its state."""

    def __init__(self, number: int, table: NDArray[np.int32]) -> None:
        self.state, self.table = StateRow(number), table
        self.tokens: list[int] = []
        self.snapshots: dict[int, int] = {}  # length -> slot

    def chunk(self, new: list[int], cuts: list[tuple[int, int]]) -> SequenceInput:
        """Append tokens; `cuts` are (tokens of the chunk, slot) of snapshots."""
        start = len(self.tokens)
        self.tokens += new
        places = np.arange(start, len(self.tokens))
        slots = self.table[places // BLOCK].astype(np.int64) * BLOCK + places % BLOCK
        taken = tuple(StateSnapshot(*cut) for cut in sorted(cuts))
        self.snapshots |= {start + tokens: slot for tokens, slot in cuts}
        state = StateStep(self.state, taken)
        return SequenceInput(np.array(new, np.int32), start, slots, self.table, state=state)


class Steps:
    """Runs random steps of sequences that begin, decode together, take snapshots, return to them, fork and end."""

    def __init__(self, loaded: LoadedModel, seed: int, *, rows: int = 4, tokens: int = 120) -> None:
        self.rng = random.Random(seed)
        blocks = -(-tokens // BLOCK)
        self.runner = Runner(loaded, rows * blocks, BLOCK, state_slots=2 * rows)
        self.free = list(np.random.default_rng(seed).permutation(rows * blocks).astype(np.int32).reshape(rows, blocks))
        self.rows: list[Row] = []
        self.max_rows, self.max_tokens, self.vocab = rows, tokens, loaded.vocab_size
        self.queue: list[tuple[int, int]] = []
        self.joint = self.restored = 0

    def step(self) -> list[tuple[list[int], torch.Tensor]]:
        """Change some sequences, run a chunk of each, and return (history, logits) of each."""
        rng = self.rng
        if len(self.rows) < self.max_rows and (not self.rows or rng.random() < 0.6):
            self.queue.append((EMPTY, len(self.rows)))
            self.rows.append(Row(len(self.rows), self.free.pop()))
        for row in list(self.rows):
            if row.tokens and rng.random() < 0.15:
                self._restore(row)
            elif rng.random() < 0.05 or len(row.tokens) > self.max_tokens - 25:
                self._end(row)
        inputs, rows = [], rng.sample(self.rows, len(self.rows))
        for row in rows:
            count = rng.choice([1, 1, 1, 3, 9, 20])
            cuts = [(rng.randrange(1, count + 1), self.max_rows + row.state.number)] if rng.random() < 0.3 else []
            inputs.append(row.chunk([rng.randrange(3, self.vocab) for _ in range(count)], cuts))
        if not inputs:
            return []
        self.joint += sum(len(each.tokens) == 1 for each in inputs) > 1
        states, copies, self.queue = self.runner.states, self.queue, []
        assert states is not None
        states.run(copies)
        logits = self.runner.run(inputs)
        return [(list(row.tokens), found) for row, found in zip(rows, logits, strict=True)]

    def _restore(self, row: Row) -> None:
        """Go back to the last snapshot of a sequence, or to its beginning."""
        length = max(row.snapshots, default=0)
        slot = row.snapshots.get(length, EMPTY)
        self.queue.append((slot, row.state.number))
        del row.tokens[length:]
        self.restored += slot != EMPTY

    def _end(self, row: Row) -> None:
        """End a sequence; the last row fills the gap."""
        last = self.rows[-1]
        if last is not row:
            self.queue.append((last.state.number, row.state.number))
            last.state.number = row.state.number
            self.rows[self.rows.index(row)] = last
            last.snapshots.clear()  # its slot is that of the row that it leaves
        self.rows.pop()
        self.free.append(row.table)


@torch.inference_mode()
def own_rows(loaded: LoadedModel, texts: list[list[int]]) -> list[torch.Tensor]:
    """Return the model's own logits after each text, by one forward for all texts that begin another one."""
    forwards: list[tuple[list[int], torch.Tensor]] = []
    for text in sorted(texts, key=len, reverse=True):
        if not any(longer[: len(text)] == text for longer, _ in forwards):
            with own_attention(loaded.model):
                forwards.append((text, loaded.model(input_ids=torch.tensor([text]), use_cache=False).logits[0]))
    return [next(found[len(text) - 1] for longer, found in forwards if longer[: len(text)] == text) for text in texts]


def worst(loaded: LoadedModel, rows: list[tuple[list[int], torch.Tensor]]) -> float:
    """Return the largest difference of a logit from the model's own forward, in spreads of its row."""
    errors = []
    for own, (_, logits) in zip(own_rows(loaded, [tokens for tokens, _ in rows]), rows, strict=True):
        expected = own.double()
        errors.append(float((logits.double() - expected).abs().max() / expected.std()))
    return max(errors)
