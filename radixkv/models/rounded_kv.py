"""Test at load that a pool in 16 or 8 bits holds a model's keys and values.

The self-test compares attention over a pool of the model's own numbers. A format that rounds fails it, so here the
logits over the pool must equal those of one forward of the whole prompt whose keys and values are rounded alike.
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from radixkv.attention.kv_store import kv_format
from radixkv.errors import InvalidInput, UnsupportedModel
from radixkv.models.architecture import kind_of, short_error
from radixkv.models.attention_interface import AttentionCall, ForwardSignature, handled_by
from radixkv.models.loaded import LoadedModel
from radixkv.models.selftest import judged
from radixkv.models.selftest_cases import SHORTEST, RecurrentSelfTestCases, SelfTestCases, own_logits
from radixkv_kernels import reference

_log = logging.getLogger(__name__)
LENGTH = 48
ALLOWED, ALLOWED_IN_16_BITS = 1e-1, 2e-1
"""Allowed error relative to the logits' spread, in float32: the two ways round some numbers to neighbouring codes.
That gives 2e-2 in 30 layers; wrong attention is off by 1 or more."""
MUCH_MOVED, MOST_MOVED = 0.1, 0.5
"""Moves by the format that are warned of, and refused, in the middle row. SmolLM2 has 1e-2, random layers 4e-1."""


def format_test(loaded: LoadedModel) -> float:
    """Return the largest relative error over the pool of a model that has passed `self_test`; 0 for KV as computed.

    Raises InvalidInput if keys or values are too large or too small for the format, and UnsupportedModel for logits
    other than those of rounded KV. Costs ten forwards of up to 50 tokens. A model with its own attention is compared
    with its own forward alone.
    """
    if loaded.kv_dtype == "auto":
        return 0.0
    kind, length, plain = kind_of(loaded.model), max(SHORTEST, min(LENGTH, loaded.max_length)), list[Tensor]()
    cases = RecurrentSelfTestCases if loaded.state else SelfTestCases

    def expected(tokens: Tensor, rows: Tensor) -> Tensor:
        plain.extend(own := own_logits(loaded, tokens, rows))
        return own if loaded.attention == "fallback" else rounded_logits(loaded, tokens, rows)

    try:
        results = (prompts := cases(loaded, length, expected)).results()
    except Exception as error:
        raise UnsupportedModel(f"{kind} failed with {loaded.kv_dtype} KV: {short_error(error)}") from error
    if not math.isfinite(prompts.largest()):
        (plainly := cases(replace(loaded, kv_dtype="auto"), length)).results()
        most = kv_format(loaded.kv_dtype, loaded.dtype).largest
        raise InvalidInput(
            f"kv_dtype={loaded.kv_dtype!r} holds numbers up to {most:,.0f}, and {loaded.name} has a key or value of "
            f"{plainly.largest():,.0f}; 'auto' stores it"
        )
    found, name = judged(results, middle=loaded.num_experts > 1)
    allowed = ALLOWED if loaded.dtype.itemsize >= 4 else ALLOWED_IN_16_BITS
    if loaded.attention != "fallback" and not found <= allowed:
        raise UnsupportedModel(
            f"{kind} does not compute the same over {loaded.kv_dtype} KV: {name} differs from a forward with rounded "
            f"keys and values by {found:.1e} of the logits' spread"
        )
    moved, _ = judged([(name, each[1], own) for each, own in zip(results, plain, strict=True)], middle=True)
    said = f"kv_dtype={loaded.kv_dtype!r} moves the logits of {loaded.name} by {moved:.1e} of their spread"
    if not moved <= MOST_MOVED:
        raise InvalidInput(f"{said}: its keys or values may be too small; 'auto' stores them")
    _log.log(logging.INFO if moved <= MUCH_MOVED else logging.WARNING, said)
    return found


@torch.inference_mode()
def rounded_logits(loaded: LoadedModel, tokens: Tensor, rows: Tensor) -> Tensor:
    """Return logits [len(rows), vocab] of one forward of tokens [T], with keys and values rounded as in the pool."""
    positions = torch.arange(len(tokens), device=tokens.device)
    with handled_by(RoundedAttention(loaded)):
        found: Tensor = ForwardSignature.of(loaded.model).logits(
            loaded.model, tokens, rows, positions=positions, use_cache=False
        )
    return found


class RoundedAttention:
    """Answers the attention calls of one forward of a whole prompt by the reference over rounded keys and values."""

    def __init__(self, loaded: LoadedModel) -> None:
        """Serve the layers of `loaded`."""
        self._layers = iter(loaded.layers)
        self._format = kv_format(loaded.kv_dtype, loaded.dtype)

    def attend(self, call: AttentionCall) -> Tensor:
        """Return the attention output [T, heads, dv]."""
        layer, tokens = next(self._layers), call.query.shape[2]
        size = layer.chunk or tokens
        starts = range(0, tokens, size)
        lengths = [min(size, tokens - start) for start in starts]
        key, value = (self._rounded(each[0], size) for each in (call.key, call.value))
        output = reference.attend(
            call.query[0].to(key.dtype),
            key,
            value,
            [[block] for block in range(len(starts))],
            lengths,
            lengths,
            scale=call.scale,
            window=layer.window,
            softcap=layer.softcap,
            sinks=call.sinks,
        )
        return output.to(call.query.dtype)

    def _rounded(self, new: Tensor, size: int) -> Tensor:
        """Return rounded [kv_heads, T, dim] in blocks of `size` tokens."""
        kept = self._format.restored(self._format.decode(self._format.encode(new)))
        padded = nn.functional.pad(kept, (0, 0, 0, -kept.shape[1] % size))
        return padded.view(len(kept), -1, size, kept.shape[2])
