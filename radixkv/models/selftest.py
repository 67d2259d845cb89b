"""Test at load that a model computes the same over the paged pool as on its own.

`selftest_cases` computes prompts in chunks, after a shared prefix, over scattered and copied blocks, decodes together
with prefills. The logits must equal the logits of the model's own forward of the whole prompt, up to rounding.
"""

from __future__ import annotations

import logging
import math
import sys
from dataclasses import replace

import torch
from torch import Tensor

from radixkv.device import device_of
from radixkv.errors import InvalidInput, UnsupportedModel
from radixkv.models.architecture import kind_of, short_error, unlisted_window
from radixkv.models.attention_interface import ForwardSignature, own_attention
from radixkv.models.loaded import LoadedModel
from radixkv.models.native.layers import NativeModel
from radixkv.models.rounding import TOLERANCE, full_precision, relative_error, widened, widened_by_layers
from radixkv.models.selftest_cases import SHORTEST, RecurrentSelfTestCases, SelfTestCases

_log = logging.getLogger(__name__)

_USUAL = 48
_BEYOND_WINDOW = 16
# Work that loading may spend: prompt tokens * weights. A tiny model gets about 600 tokens, a 7B model the usual 48.
_TOKEN_WEIGHTS, _TOKEN_WEIGHTS_ON_GPU = 1e9, 4e12
_WEIGHTS_TO_WIDEN = 1_000_000_000
_ROUTED = 0.5  # relative to the logits' spread; unrelated logits differ by 1.4
_PLACES = {  # how the model was run, and the probable reason for a difference
    "pool": (
        "a paged pool",
        "attention, or changes it in a way that transformers' attention interface does not show",
    ),
    "recurrent": (
        "a paged pool and recurrent states",
        "cache, or starts the scan of a second chunk from zero, as Mamba-1 in torch does",
    ),
    "fallback": ("a cache filled from a pool", "keys and values, or attends to later tokens"),
}


def self_test(loaded: LoadedModel) -> float:
    """Return the largest relative error of the paged logits; raises UnsupportedModel if it exceeds rounding.

    A model in 16 bits of up to a billion weights is also tested in float32, because rounding could hide a small error.
    So is a larger one with experts, layer by layer.
    Windows longer than the prompt are not tested (the budget limits the prompt), as the probe has compared them with
    the configuration. Windows that the probe could not compare must be shorter than the prompt: those that only the
    configuration or only the attention call names, and the windows of foreign architectures that attend by themselves.
    Costs about five forwards of 50 tokens, or of 16 tokens more than the longest window or chunk.
    """
    length = _prompt_length(loaded)
    proven = loaded.dtype.itemsize < 4 and _prove(loaded, length)
    return _compare(loaded, length, proven=proven)


def brief_test(loaded: LoadedModel) -> float:
    """Return the error of one chunk and one decode of a few tokens, for a model that has passed `self_test` before.

    Raises as `self_test`. Costs three forwards of ten tokens.
    """
    return _compare(loaded, min(SHORTEST + 2, loaded.max_length), brief=True)


def _prove(loaded: LoadedModel, length: int) -> bool:
    """Compare in float32, by the worst row; return False if the model is too large or cannot be widened by layers."""
    if _weights(loaded) <= _WEIGHTS_TO_WIDEN:
        with widened(each for each in loaded.model.parameters() if each.dtype == loaded.dtype):
            _compare(_as_float32(loaded), length)
        return True
    if loaded.num_experts <= 1:
        return False
    with widened_by_layers(loaded.model, loaded.dtype):
        if not _runs(loaded):
            _log.info("%s is not tested in float32: it reads weights outside of their layers", kind_of(loaded.model))
            return False
        _compare(_as_float32(loaded), length)
    return True


@torch.inference_mode()
def _runs(loaded: LoadedModel) -> bool:
    """Return whether the model's own forward of a token raises nothing."""
    first = torch.zeros(1, dtype=torch.long, device=loaded.device)
    try:
        with own_attention(loaded.model):
            ForwardSignature.of(loaded.model).logits(loaded.model, first, first, use_cache=False)
    except Exception:  # of mixed dtypes, for example
        return False
    return True


def _as_float32(loaded: LoadedModel) -> LoadedModel:
    """Return the same model, whose weights are in float32 meanwhile."""
    state = tuple(replace(each, dtype=torch.float32) if each.dtype == loaded.dtype else each for each in loaded.state)
    return replace(loaded, dtype=torch.float32, state=state)


def _compare(loaded: LoadedModel, length: int, *, proven: bool = False, brief: bool = False) -> float:
    """Return the relative error of the worst row; raises UnsupportedModel if it is too large, or if anything fails.

    In 16 bits, rounding may send a token to another expert, which shows in some rows. For such models the middle row
    counts, and its error may be large if the algorithm is `proven` in float32. Raises InvalidInput if the model's own
    logits are not finite: another attention would not help.
    """
    kind = kind_of(loaded.model)
    routed = loaded.dtype.itemsize < 4 and loaded.num_experts > 1
    allowed = _ROUTED if routed and proven else TOLERANCE.get(loaded.dtype, 1e-1)
    try:
        cases = RecurrentSelfTestCases if loaded.state else SelfTestCases
        prompts = cases(replace(loaded, kv_dtype="auto"), length)  # `rounded_kv` tests the pool's format
        with full_precision():
            results = prompts.brief_results() if brief else prompts.results()
    except Exception as error:
        raise UnsupportedModel(f"{kind} failed in its self-test: {short_error(error)}") from error
    if not all(own.isfinite().all() for _, _, own in results):
        raise InvalidInput(
            f"{kind} gives nan or infinity by its own forward: its weights are damaged, or too large for {loaded.dtype}"
        )
    found, name = judged(results, middle=routed)
    if not found <= allowed:  # "not <=" also catches NaN
        where, why = _PLACES["fallback" if loaded.attention == "fallback" else "recurrent" if loaded.state else "pool"]
        raise UnsupportedModel(
            f"{kind} does not compute the same over {where}: {name} differs from the model's own forward "
            f"by {found:.1e} of the logits' spread ({loaded.dtype}). It keeps state outside of its {why}"
        )
    return found


def judged(results: list[tuple[str, Tensor, Tensor]], *, middle: bool) -> tuple[float, str]:
    """Return error and name of the row that counts: the worst, or the `middle` one if none has a NaN."""
    errors = [(relative_error(ours, own), name) for name, ours, own in results]
    errors.sort(key=lambda pair: (math.isnan(pair[0]), pair[0]))
    return errors[len(errors) // 2 if middle and not math.isnan(errors[-1][0]) else -1]


def _weights(loaded: LoadedModel) -> int:
    """Return the number of the model's weights."""
    return sum(parameter.numel() for parameter in loaded.model.parameters())


def _prompt_length(loaded: LoadedModel) -> int:
    """Return a length beyond the longest window if the budget allows it, but within the context."""
    if loaded.max_length < SHORTEST:
        raise UnsupportedModel(
            f"{kind_of(loaded.model)} has a context of {loaded.max_length} tokens, too short to be tested"
        )
    spent = _TOKEN_WEIGHTS_ON_GPU if device_of(loaded.device).is_gpu else _TOKEN_WEIGHTS
    budget = int(spent / max(_weights(loaded), 1))
    passed = {limit for layer in loaded.layers for limit in layer.attention_window if limit is not None}
    unlisted = unlisted_window(loaded.config.get_text_config(), passed)
    limits = [*passed] if unlisted is None else [*passed, unlisted]
    wanted = [limit + _BEYOND_WINDOW for limit in limits]
    length = min(max([_USUAL, *(each for each in wanted if each <= budget)]), loaded.max_length)
    _refuse_unseen(loaded, [limit for limit in limits if length <= limit < loaded.max_length], unlisted)
    return length


def _refuse_unseen(loaded: LoadedModel, unseen: list[int], unlisted: int | None) -> None:
    """Raise UnsupportedModel if a window is neither tested nor compared with the configuration."""
    kind = kind_of(loaded.model)
    foreign = not type(loaded.model).__module__.startswith("transformers.")
    if loaded.attention == "fallback" and foreign and unseen:
        raise UnsupportedModel(f"{kind} has a window of {unseen[0]} tokens, which is too long to be tested")
    passed = [layer.window for layer in loaded.layers if layer.window in unseen]
    if loaded.attention != "fallback" and passed and not _masks_windows(loaded):
        raise UnsupportedModel(
            f"{kind} passes a window of {passed[0]} tokens to attention that its own mask does not "
            "seem to have, and that is too long to be tested"
        )
    if loaded.attention != "fallback" and unlisted in unseen:
        raise UnsupportedModel(
            f"{kind} is configured with a window of {unlisted} tokens that it does not pass to attention, and "
            "that is too long to be tested"
        )


def _masks_windows(loaded: LoadedModel) -> bool:
    """Return whether a file of the model imports transformers' masks with windows; without, its mask has no window.

    The masks of layers of our own have them.
    """
    if isinstance(loaded.model, NativeModel):
        return True
    files = {type(part).__module__ for part in loaded.model.modules()}
    return any(hasattr(sys.modules.get(file), "create_sliding_window_causal_mask") for file in files)
