"""Read the metadata that describe a model's arithmetic, and refuse the keys that no caller has read.

Such keys begin with the name of the architecture: `llama.block_count`, `llama.rope.freq_base`. A key that is ignored
could change the answers without a word, so every key is read, has a value without effect, or is an error.
"""

from __future__ import annotations

import math
from struct import Struct
from typing import Any, TypeVar, overload

from radixkv.errors import InvalidInput, UnsupportedModel
from radixkv.gguf.header import GGUFHeader, typed

T = TypeVar("T", int, float, bool, str)
_F32 = Struct("<f")

# Values with which a key changes no logits. None: no value changes them.
_WITHOUT_EFFECT: dict[str, tuple[Any, ...] | None] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.sliding_window": (0,),
    "attn_logit_softcapping": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "expert_count": (0,),
    "expert_gating_func": (0, 1),  # not stated, or softmax
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_used_count": (0,),
    "expert_weights_scale": (0.0, 1.0),
    "final_logit_softcapping": (0.0,),
    "leading_dense_block_count": (0,),
    "logit_scale": (0.0, 1.0),
    "nextn_predict_layers": (0,),
    "pooling_type": (0,),
    "residual_scale": (0.0, 1.0),
    "rope.scaling.finetuned": None,
    "rope.scaling.original_context_length": None,  # of a scaling, which has a type
    "tensor_data_layout": None,
    "vocab_size": None,  # the embedding has the true number of rows
}


class ModelKeys:
    """The keys of one header that begin with its architecture's name; methods take a key without that prefix."""

    def __init__(self, header: GGUFHeader) -> None:
        self.header = header
        self._prefix = f"{header.architecture}."
        self._read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return self._prefix + key in self.header.metadata

    @overload
    def value(self, key: str, kind: type[T]) -> T: ...
    @overload
    def value(self, key: str, kind: type[T], default: T) -> T: ...
    def value(self, key: str, kind: type[T], default: T | None = None) -> T:
        """Return the value of a key, or `default`; a float as the shortest decimal number that is stored alike.

        An array with the same value for every layer counts as this value. Raises InvalidInput for a missing key, one of
        another type, or a float that is negative or not finite; UnsupportedModel for an array of different values.
        """
        self._read.add(key)
        name, metadata = self._prefix + key, self.header.metadata
        stored = metadata.get(name)
        if isinstance(stored, list) and stored:
            if any(each != stored[0] for each in stored):
                raise self.unsupported(f"{name} differs between layers")
            metadata = {name: stored[0]}
        found = typed(self.header.path, metadata, name, kind)
        if found is None:
            if default is None:
                raise InvalidInput(
                    f"{self.header.path}: its metadata has no {name}: fetch it again, or convert it again"
                )
            return default
        if not isinstance(found, float):
            return found
        if not 0.0 <= found < math.inf:
            raise InvalidInput(f"{self.header.path}: {name} is {found}: fetch or copy it again")
        return shortest(found)  # type: ignore[return-value]

    def size(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """Return a whole number of at least `least` and below 2**31. Raises InvalidInput for anything else."""
        found = self.value(key, int) if default is None else self.value(key, int, default)
        if not least <= found < 2**31:
            raise InvalidInput(f"{self.header.path}: {self._prefix}{key} is {found}: fetch or copy it again")
        return found

    def require(self, key: str, wanted: float) -> None:
        """Raise UnsupportedModel if the key is there and has another value than `wanted`."""
        if key in self and (found := self.value(key, type(wanted))) != wanted:
            raise self.unsupported(f"{self._prefix}{key} is {found}, and the model of transformers has {wanted}")

    def unsupported(self, reason: str) -> UnsupportedModel:
        """Return the error for a whole file that radixkv would compute otherwise than it is meant."""
        return UnsupportedModel(
            f"{self.header.path} ({self.header.architecture}): {reason}: radixkv does not compute this. Load the "
            "safetensors that the file was made from"
        )

    def check_read(self) -> None:
        """Raise UnsupportedModel for a key that was not read and may change the logits."""
        for name, found in self.header.metadata.items():
            key = name.removeprefix(self._prefix)
            if key == name or key in self._read:
                continue
            harmless = _WITHOUT_EFFECT.get(key, ())
            if harmless is not None and found not in harmless:
                raise self.unsupported(f"{name} is {repr(found)[:80]}")


def shortest(stored: float) -> float:
    """Return the shortest decimal number that has the same value as `stored` in 32 bits; others unchanged.

    >>> shortest(9.999999747378752e-06)
    1e-05
    """
    texts = (f"{stored:.{digits}g}" for digits in range(1, 10))  # nine digits distinguish all numbers of 32 bits
    return next((float(text) for text in texts if _narrow(float(text)) == stored), stored)


def _narrow(number: float) -> float | None:
    """Return a number rounded to 32 bits; None if it is too large for them."""
    try:
        return float(_F32.unpack(_F32.pack(number))[0])
    except OverflowError:
        return None
