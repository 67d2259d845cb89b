"""Prove at load that a model over the paged pool computes what it computes on its own.

The prompts run in chunks, behind a shared prefix, over scattered and copied blocks, decodes beside prefills; the logits
must be those of the model's own one-shot forward. Knows the runner; does not know why a model might fail.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixkv.errors import UnsupportedModel
from radixkv.models.forward import Forward
from radixkv.models.hook import own_attention
from radixkv.models.limits import experts, unsaid_reach
from radixkv.models.loaded import LoadedModel
from radixkv.models.refusals import short
from radixkv.models.rounding import TOLERANCE, relative_error
from radixkv.models.runner import Chunk, Runner

_BLOCK = 4  # small blocks: more of them are shared, copied and part-filled in a short prompt
_SHORTEST, _USUAL = 8, 48
_BEYOND_WINDOW = 16
# Work that loading may spend: prompt tokens * weights. A tiny model gets some 600 tokens, a 7B model the usual 48.
_TOKEN_WEIGHTS = {"cpu": 1e9, "cuda": 4e12}
_WEIGHTS_TO_WIDEN = 1_000_000_000
_ROUTED = 0.5  # of the logits' spread; what has nothing to do with them is 1.4 away
_PLACES = {  # where it computes otherwise than alone, and what may be the reason
    "pool": (
        "a paged pool",
        "attention, or changes it in a way that transformers' attention interface does not show",
    ),
    "fallback": ("a cache filled from a pool", "keys and values, or attends to later tokens"),
}


def self_test(loaded: LoadedModel) -> float:
    """Return the largest relative error of the paged logits; raises UnsupportedModel if it is not mere rounding.

    A model in 16 bits of up to a billion weights is also tested in float32: rounding could hide a small fault. Windows
    longer than the prompt are beyond this test (the prompt is as long as the budget allows): the probe has compared
    them with the configuration; one that only the configuration names must not be longer. Costs about five forwards of
    some 50 tokens, or of 16 more than the longest window, or than the chunk that it attends in.
    """
    length = _prompt_length(loaded)
    proven = loaded.dtype.itemsize < 4 and _weights(loaded) <= _WEIGHTS_TO_WIDEN
    if proven:
        with _widened(loaded) as exact:
            _compare(exact, length)
    return _compare(loaded, length, proven=proven)


def _compare(loaded: LoadedModel, length: int, *, proven: bool = False) -> float:
    """The relative error of the scenario; raises UnsupportedModel if it is too large, or if anything fails.

    It is that of the worst row. In 16 bits it is that of the middle row, if the algorithm is `proven` in float32, or if
    rounding may send a token to another expert, which shows in some rows; with both, it may be large.
    """
    routed = loaded.dtype.itemsize < 4 and experts(loaded.config.get_text_config()) > 1
    allowed = _ROUTED if routed and proven else TOLERANCE.get(loaded.dtype, 1e-1)
    try:
        results = _Scenario(loaded, length).results()
    except Exception as error:
        raise UnsupportedModel(f"{_kind(loaded)} failed in its self-test: {short(error)}") from error
    errors = [(relative_error(ours, own), name) for name, ours, own in results]
    errors.sort(key=lambda pair: (math.isnan(pair[0]), pair[0]))
    worst, name = errors[len(errors) // 2 if (routed or proven) and not math.isnan(errors[-1][0]) else -1]
    if not worst <= allowed:  # "not <=" also catches NaN
        where, why = _PLACES["fallback" if loaded.attention == "fallback" else "pool"]
        raise UnsupportedModel(
            f"{_kind(loaded)} does not compute the same over {where}: {name} differs from the model's own forward "
            f"by {worst:.1e} of the logits' spread ({loaded.dtype}). It keeps state outside of its {why}"
        )
    return worst


def _kind(loaded: LoadedModel) -> str:
    """The architecture's name, for messages."""
    return type(loaded.model).__name__


def _weights(loaded: LoadedModel) -> int:
    """How many weights the model has."""
    return sum(parameter.numel() for parameter in loaded.model.parameters())


@contextmanager
def _widened(loaded: LoadedModel) -> Iterator[LoadedModel]:
    """The same model with its weights in float32 while this is open; there and back again loses nothing."""
    narrow = [p for p in loaded.model.parameters() if p.dtype == loaded.dtype]
    try:
        for parameter in narrow:
            parameter.data = parameter.data.float()
        yield replace(loaded, dtype=torch.float32)
    finally:
        for parameter in narrow:
            parameter.data = parameter.data.to(loaded.dtype)


def _prompt_length(loaded: LoadedModel) -> int:
    """Longer than the longest window if the budget allows it, never longer than the context."""
    if loaded.max_length < _SHORTEST:
        raise UnsupportedModel(f"a context of {loaded.max_length} tokens is too short to be tested")
    budget = int(_TOKEN_WEIGHTS.get(loaded.device.type, 1e9) / max(_weights(loaded), 1))
    told = {limit for layer in loaded.layers for limit in layer.reach if limit is not None}
    unsaid = unsaid_reach(loaded.config.get_text_config(), told)
    wanted = [limit + _BEYOND_WINDOW for limit in (*told, unsaid) if limit is not None]
    length = min(max([_USUAL, *(each for each in wanted if each <= budget)]), loaded.max_length)
    if unsaid is not None and length <= unsaid < loaded.max_length and loaded.attention != "fallback":
        raise UnsupportedModel(
            f"{_kind(loaded)} is configured with a window of {unsaid} tokens that it does not pass to attention, and "
            "that is too long to be tested"
        )
    return length


@dataclass
class _Prompt:
    """One sequence of the scenario: its tokens, its blocks, and what came out after which of its tokens."""

    tokens: NDArray[np.int32]
    table: NDArray[np.int32]
    computed: dict[int, tuple[str, Tensor]] = field(default_factory=dict)

    def chunk(self, start: int, end: int) -> Chunk:
        positions = np.arange(start, end)
        slots = self.table[positions // _BLOCK].astype(np.int64) * _BLOCK + positions % _BLOCK
        return Chunk(self.tokens[start:end], start, slots, self.table[: -(-end // _BLOCK)])


class _Scenario:
    """Three prompts over one scattered pool: a whole one, one that branches off inside a block, a short late one.

    What an architecture keeps elsewhere than in its keys and values shows in one of these: the prompts take turns, each
    is cut where the others are not, and one starts behind what another has computed.
    """

    def __init__(self, loaded: LoadedModel, length: int) -> None:
        self._loaded = loaded
        self._branch = length // 2 | 1  # odd: inside a block, so that the branch copies it
        random = np.random.default_rng(20)
        tokens = self._tokens(random, length)
        blocks = -(-length // _BLOCK)
        tables = random.permutation(3 * blocks).astype(np.int32).reshape(3, blocks)
        shared = self._branch // _BLOCK
        tokens[1, : self._branch], tables[1, :shared] = tokens[0, : self._branch], tables[0, :shared]
        self._whole, self._other = _Prompt(tokens[0], tables[0]), _Prompt(tokens[1], tables[1])
        self._late = _Prompt(tokens[2, :_SHORTEST], tables[2])
        self._copy = (int(tables[0, shared]), int(tables[1, shared]))
        self._runner = Runner(loaded, 3 * blocks, _BLOCK)

    def _tokens(self, random: np.random.Generator, length: int) -> NDArray[np.int32]:
        """Three prompts. A model that counts positions by itself may leave out what pads: then it shows here.

        One that is told positions is told those of all tokens, also of those that its own forward would not count.
        """
        tokens = random.integers(0, self._loaded.vocab_size, (3, length), dtype=np.int32)
        padding = getattr(self._loaded.config.get_text_config(), "pad_token_id", None)
        if isinstance(padding, int) and 0 <= padding < self._loaded.vocab_size:
            tokens[tokens == padding] = (padding + 1) % self._loaded.vocab_size
            if not Forward.of(self._loaded.model).positions:
                tokens[:, 2] = padding
        return tokens

    def results(self) -> list[tuple[str, Tensor, Tensor]]:
        """Run it; return (what was done, our logits, the model's own logits) of every chunk."""
        end, branch = len(self._whole.tokens), self._branch
        self._step("a first chunk", [(self._whole, 0, branch)])
        self._step("a second chunk", [(self._whole, branch, end - 2)])
        self._step(
            "a prefill behind a shared prefix and a copied block, beside a decode",
            [(self._whole, end - 2, end - 1), (self._other, branch, end - 1), (self._late, 0, 1)],
            [self._copy],
        )
        self._step(
            "two decodes beside a chunk behind a single token",
            [(self._other, end - 1, end), (self._late, 1, len(self._late.tokens)), (self._whole, end - 1, end)],
        )
        prompts = (self._whole, self._other, self._late)
        return [result for prompt in prompts for result in self._compared(prompt)]

    def _step(
        self, name: str, parts: Sequence[tuple[_Prompt, int, int]], copies: Sequence[tuple[int, int]] = ()
    ) -> None:
        logits = self._runner.run([prompt.chunk(start, end) for prompt, start, end in parts], copies)
        for (prompt, _, end), row in zip(parts, logits, strict=True):
            prompt.computed[end - 1] = (name, row)

    @torch.inference_mode()
    def _compared(self, prompt: _Prompt) -> list[tuple[str, Tensor, Tensor]]:
        """Beside each of our logits, those of one forward of the whole prompt by the model alone."""
        rows = torch.tensor(sorted(prompt.computed), device=self._loaded.device)
        tokens = torch.from_numpy(prompt.tokens.astype(np.int64)).to(self._loaded.device)
        with own_attention(self._loaded.model):
            own = Forward.of(self._loaded.model).logits(self._loaded.model, tokens, rows, use_cache=False)
        return [(*prompt.computed[int(row)], logits) for row, logits in zip(rows, own, strict=True)]
