"""The cases of the self-test for models with recurrent state: chunks, decodes in a row, snapshots and copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from radixkv.models.loaded import LoadedModel, SequenceInput
from radixkv.models.selftest_cases import Prompt, SelfTestCases
from radixkv.sizing.recurrent_state import EMPTY, StateRow, StateSnapshot, StateStep

_SLOTS = 4  # a row for each prompt, and a snapshot
_SNAPSHOT = 3


class RecurrentSelfTestCases(SelfTestCases):
    """The three prompts with a row each; the second one begins with a snapshot from inside a chunk of the first.

    The first prompt decodes three times in a row, alone with a prompt in a row further on, with both, and after its
    state was copied away and back. A scan that drops its state between two chunks changes the logits of the second.
    """

    state_slots = _SLOTS

    def __init__(self, loaded: LoadedModel, length: int) -> None:
        super().__init__(loaded, length)
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
        return replace(super()._input(prompt, start, end), state=StateStep(self._rows[id(prompt)], taken))
