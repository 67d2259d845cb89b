"""The cases of the self-test: prompts in the pieces of an engine, over a pool and by the model alone.

Models with recurrent state have cases of their own: chunks, decodes in a row, snapshots and copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixkv.models.attention_interface import ForwardSignature, own_attention
from radixkv.models.loaded import LoadedModel, SequenceInput
from radixkv.models.runner import Runner
from radixkv.sizing.recurrent_state import EMPTY, StateRow, StateSnapshot, StateStep

BLOCK = 4  # small blocks: more of them are shared, copied and part-filled in a short prompt
SHORTEST = 8
OwnLogits = Callable[[Tensor, Tensor], Tensor]  # of one forward of tokens [T]: the logits of some rows


@dataclass
class Prompt:
    """One sequence: its tokens, its blocks, and the name and logits of the step that computed each token."""

    tokens: NDArray[np.int32]
    table: NDArray[np.int32]
    computed: dict[int, tuple[str, Tensor]] = field(default_factory=dict)


class SelfTestCases:
    """Three prompts over one scattered pool: a whole one, one that branches off inside a block, a short late one.

    The prompts take turns, each is cut at different positions, and one starts after tokens that another has computed.
    State that an architecture keeps outside of its keys and values therefore changes some of their logits.
    """

    state_slots = 0

    def __init__(self, loaded: LoadedModel, length: int, own: OwnLogits | None = None) -> None:
        self._loaded = loaded
        self._own = own or partial(own_logits, loaded)
        self._branch = length // 2 | 1  # odd: inside a block, so that the branch copies it
        random = np.random.default_rng(20)
        tokens = self._tokens(random, length)
        blocks = -(-length // BLOCK)
        tables = random.permutation(3 * blocks).astype(np.int32).reshape(3, blocks)
        shared = self._branch // BLOCK
        tokens[1, : self._branch], tables[1, :shared] = tokens[0, : self._branch], tables[0, :shared]
        late = Prompt(tokens[2, :SHORTEST], tables[2])
        self._prompts = (Prompt(tokens[0], tables[0]), Prompt(tokens[1], tables[1]), late)
        self._copy = (int(tables[0, shared]), int(tables[1, shared]))
        self._runner = Runner(loaded, 3 * blocks, BLOCK, state_slots=self.state_slots)

    def _tokens(self, random: np.random.Generator, length: int) -> NDArray[np.int32]:
        """Draw three prompts, with a padding token in each if the model counts positions by itself.

        Such a model may not count padding, which would change its logits. A model that takes positions gets the
        positions of all tokens, so its prompts have no padding token.
        """
        tokens = random.integers(0, self._loaded.vocab_size, (3, length), dtype=np.int32)
        padding = getattr(self._loaded.config.get_text_config(), "pad_token_id", None)
        if isinstance(padding, int) and 0 <= padding < self._loaded.vocab_size:
            tokens[tokens == padding] = (padding + 1) % self._loaded.vocab_size
            if not ForwardSignature.of(self._loaded.model).positions:
                tokens[:, 2] = padding
        return tokens

    def results(self) -> list[tuple[str, Tensor, Tensor]]:
        """Run all cases; return (name of the step, our logits, the model's own logits) of every input."""
        whole, other, late = self._prompts
        end, branch = len(whole.tokens), self._branch
        self._step("a first chunk", [(whole, 0, branch)])
        self._step("a second chunk", [(whole, branch, end - 2)])
        self._step(
            "a prefill after a shared prefix and a copied block, with a decode",
            [(whole, end - 2, end - 1), (other, branch, end - 1), (late, 0, 1)],
            [self._copy],
        )
        self._step(
            "two decodes with a chunk after a single token",
            [(other, end - 1, end), (late, 1, len(late.tokens)), (whole, end - 1, end)],
        )
        return self._all_compared()

    def brief_results(self) -> list[tuple[str, Tensor, Tensor]]:
        """Run a chunk and a decode only; return the same as `results`."""
        whole, end = self._prompts[0], len(self._prompts[0].tokens)
        self._step("a chunk", [(whole, 0, end - 1)])
        self._step("a decode", [(whole, end - 1, end)])
        return self._compared(whole)

    def _all_compared(self) -> list[tuple[str, Tensor, Tensor]]:
        """Pair the logits of all steps with the model's own."""
        return [result for prompt in self._prompts for result in self._compared(prompt)]

    def _step(
        self, name: str, parts: Sequence[tuple[Prompt, int, int]], copies: Sequence[tuple[int, int]] = ()
    ) -> None:
        logits = self._runner.run([self._input(*part) for part in parts], copies)
        for (prompt, _, end), row in zip(parts, logits, strict=True):
            prompt.computed[end - 1] = (name, row)

    def _input(self, prompt: Prompt, start: int, end: int) -> SequenceInput:
        """Return the tokens [start, end) of a prompt as an input of a step."""
        positions = np.arange(start, end)
        slots = prompt.table[positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK
        return SequenceInput(prompt.tokens[start:end], start, slots, prompt.table[: -(-end // BLOCK)])

    def largest(self) -> float:
        """Return the largest key or value in the pool, without its sign; NaN if one is."""
        largest = [float(each.abs().max()) for each in self._runner.store.tensors]
        return float(torch.tensor([0.0, *largest]).max())

    def _compared(self, prompt: Prompt) -> list[tuple[str, Tensor, Tensor]]:
        """Pair each of our logits with the logits of one forward of the whole prompt by the model alone."""
        rows = torch.tensor(sorted(prompt.computed), device=self._loaded.device)
        tokens = torch.from_numpy(prompt.tokens.astype(np.int64)).to(self._loaded.device)
        own = self._own(tokens, rows)
        return [(*prompt.computed[int(row)], logits) for row, logits in zip(rows, own, strict=True)]


@torch.inference_mode()
def own_logits(loaded: LoadedModel, tokens: Tensor, rows: Tensor) -> Tensor:
    """Return logits [len(rows), vocab] of one forward of tokens [T] by the model alone."""
    with own_attention(loaded.model):
        found: Tensor = ForwardSignature.of(loaded.model).logits(loaded.model, tokens, rows, use_cache=False)
    return found


# ---- with recurrent state


_SLOTS = 4  # a row for each prompt, and a snapshot
_SNAPSHOT = 3


class RecurrentSelfTestCases(SelfTestCases):
    """The three prompts with a row each; the second one begins with a snapshot from inside a chunk of the first.

    The first prompt decodes three times in a row, alone with a prompt in a row further on, with both, and after its
    state was copied away and back. A scan that drops its state between two chunks changes the logits of the second.
    """

    state_slots = _SLOTS

    def __init__(self, loaded: LoadedModel, length: int, own: OwnLogits | None = None) -> None:
        super().__init__(loaded, length, own)
        self._rows = {id(prompt): StateRow(row) for row, prompt in enumerate(self._prompts)}

    def results(self) -> list[tuple[str, Tensor, Tensor]]:
        """Run all cases; return (name of the step, our logits, the model's own logits) of every input."""
        whole, other, late = self._prompts
        end, branch = len(whole.tokens), self._branch
        self._step("a first chunk", [(whole, 0, branch // 2)])
        self._step("a second chunk", [(whole, branch // 2, end - 3)])
        self._copy_states([(_SNAPSHOT, 1), (EMPTY, 2)])
        self._step(
            "a prefill from a state inside a chunk, with two decodes",
            [(whole, end - 3, end - 2), (other, branch, end - 2), (late, 0, 1)],
            [self._copy],
        )
        parts = [(whole, end - 2, end - 1), (other, end - 2, end - 1), (late, 1, 2)]
        self._step("three decodes", parts)
        self._copy_states([(0, _SNAPSHOT), (EMPTY, 0), (_SNAPSHOT, 0)])
        parts = [(whole, end - 1, end), (late, 2, len(late.tokens)), (other, end - 1, end)]
        self._step("two decodes from states that were copied, with a chunk", parts)
        return self._all_compared()

    def _copy_states(self, copies: Sequence[tuple[int, int]]) -> None:
        states = self._runner.states
        assert states is not None
        states.run(copies)

    def _input(self, prompt: Prompt, start: int, end: int) -> SequenceInput:
        inside = prompt is self._prompts[0] and start < self._branch <= end
        taken = (StateSnapshot(self._branch - start, _SNAPSHOT),) if inside else ()
        return super()._input(prompt, start, end)._replace(state=StateStep(self._rows[id(prompt)], taken))
