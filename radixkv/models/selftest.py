"""Prove at load that a model over the paged pool computes what it computes on its own.

The prompts run in chunks, behind a shared prefix, over scattered and copied blocks, decodes beside prefills; the logits
must be those of the model's own one-shot forward. Knows how long a test may take and how far apart rounding carries;
does not know what is run (`scenario`), nor why a model might fail.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from radixkv.errors import InvalidInput, UnsupportedModel
from radixkv.models.architecture import num_experts, short_error, unlisted_window
from radixkv.models.loaded import LoadedModel
from radixkv.models.rounding import TOLERANCE, relative_error
from radixkv.models.selftest_cases import SHORTEST, SelfTestCases

_USUAL = 48
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
    them with the configuration. One that only the configuration names must not be longer, nor one that only attention
    is told, nor one of an architecture that is not transformers' own and attends by itself. Costs about five forwards
    of some 50 tokens, or of 16 more than the longest window, or than the chunk that it attends in.
    """
    length = _prompt_length(loaded)
    proven = loaded.dtype.itemsize < 4 and _weights(loaded) <= _WEIGHTS_TO_WIDEN
    if proven:
        with _widened(loaded) as exact:
            _compare(exact, length)
    return _compare(loaded, length, proven=proven)


def _compare(loaded: LoadedModel, length: int, *, proven: bool = False) -> float:
    """The relative error of the scenario; raises UnsupportedModel if it is too large, or if anything fails.

    Raises InvalidInput if the model's own logits are no numbers: no other way to attend would help.

    It is that of the worst row. Only where rounding may send a token to another expert, in 16 bits, it is that of the
    middle row, as a detour shows in some rows; it may be large if the algorithm is `proven` in float32.
    """
    routed = loaded.dtype.itemsize < 4 and num_experts(loaded.config.get_text_config()) > 1
    allowed = _ROUTED if routed and proven else TOLERANCE.get(loaded.dtype, 1e-1)
    try:
        results = SelfTestCases(loaded, length).results()
    except Exception as error:
        raise UnsupportedModel(f"{_kind(loaded)} failed in its self-test: {short_error(error)}") from error
    if not all(own.isfinite().all() for _, _, own in results):
        raise InvalidInput(
            f"{_kind(loaded)} gives nan or infinity by its own forward: its weights are damaged, or too large for "
            f"{loaded.dtype}"
        )
    found, name = _judged(results, middle=routed)
    if not found <= allowed:  # "not <=" also catches NaN
        where, why = _PLACES["fallback" if loaded.attention == "fallback" else "pool"]
        raise UnsupportedModel(
            f"{_kind(loaded)} does not compute the same over {where}: {name} differs from the model's own forward "
            f"by {found:.1e} of the logits' spread ({loaded.dtype}). It keeps state outside of its {why}"
        )
    return found


def _judged(results: list[tuple[str, Tensor, Tensor]], *, middle: bool) -> tuple[float, str]:
    """Error and name of the row that counts: the worst, or the `middle` one if none has a NaN."""
    errors = [(relative_error(ours, own), name) for name, ours, own in results]
    errors.sort(key=lambda pair: (math.isnan(pair[0]), pair[0]))
    return errors[len(errors) // 2 if middle and not math.isnan(errors[-1][0]) else -1]


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
    if loaded.max_length < SHORTEST:
        raise UnsupportedModel(f"a context of {loaded.max_length} tokens is too short to be tested")
    budget = int(_TOKEN_WEIGHTS.get(loaded.device.type, 1e9) / max(_weights(loaded), 1))
    told = {limit for layer in loaded.layers for limit in layer.attention_window if limit is not None}
    unsaid = unlisted_window(loaded.config.get_text_config(), told)
    limits = [*told] if unsaid is None else [*told, unsaid]
    wanted = [limit + _BEYOND_WINDOW for limit in limits]
    length = min(max([_USUAL, *(each for each in wanted if each <= budget)]), loaded.max_length)
    _refuse_unseen(loaded, [limit for limit in limits if length <= limit < loaded.max_length], unsaid)
    return length


def _refuse_unseen(loaded: LoadedModel, unseen: list[int], unsaid: int | None) -> None:
    """Raise UnsupportedModel if a window that a test does not reach is one that nobody else answers for."""
    foreign = not type(loaded.model).__module__.startswith("transformers.")
    if loaded.attention == "fallback" and foreign and unseen:
        raise UnsupportedModel(f"{_kind(loaded)} has a window of {unseen[0]} tokens, which is too long to be tested")
    told = [layer.window for layer in loaded.layers if layer.window in unseen]
    if loaded.attention != "fallback" and told and not _masks_windows(loaded):
        raise UnsupportedModel(
            f"{_kind(loaded)} passes a window of {told[0]} tokens to attention that its own mask does not "
            "seem to have, and that is too long to be tested"
        )
    if loaded.attention != "fallback" and unsaid in unseen:
        raise UnsupportedModel(
            f"{_kind(loaded)} is configured with a window of {unsaid} tokens that it does not pass to attention, and "
            "that is too long to be tested"
        )


def _masks_windows(loaded: LoadedModel) -> bool:
    """Whether a file that the model is made of knows transformers' masks with windows: without, its mask has none."""
    files = {type(part).__module__ for part in loaded.model.modules()}
    return any(hasattr(sys.modules.get(file), "create_sliding_window_causal_mask") for file in files)
