"""Compressed prefixes: entries of the cache that a call asks for, and that only requests with their handle read.

An entry's text is made of ids that no vocabulary has, so no other prompt can match it, and nothing computes it. Its KV
is a part of the KV of a frozen prefix: in each layer and head `slots` of its `tokens`.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np

from radixkv.cache.tokens import FIRST_PSEUDO
from radixkv.engine.request import TokenIds


@dataclass(frozen=True, eq=False)
class CompressedPrefix:
    """The handle of a compressed prefix: `slots` of the KV of its `tokens`, in `bytes`, chosen by `method` for `keep`.

    `ids` int32 [slots] are its text in the cache, and `text` int32 [tokens] the exact prefix. `source` has the chat
    messages of which it was made, or a chat's state; None for a text and for token ids.
    """

    name: str
    tokens: int
    slots: int
    bytes: int
    method: str
    keep: float
    ids: TokenIds = field(repr=False)
    text: TokenIds = field(repr=False)
    namespace: Hashable = None
    source: Any = field(default=None, repr=False)

    @property
    def gone(self) -> str:
        """The message of PrefixGone, which says how to make the prefix again."""
        again = f"engine.compress(..., keep={self.keep}, method={self.method!r})"
        return f"the compressed prefix {self.name} was released or dropped: make it again by {again}"


def pseudo_ids(text: TokenIds, method: str, keep: float, slots: int) -> TokenIds:
    """Return the ids that stand for a compressed prefix: int32 [slots], words of 30 bits of a digest."""
    digest = blake2b(text.astype("<i4").tobytes() + f"{method} {keep!r}".encode())
    words = b"".join(blake2b(digest.digest() + number.to_bytes(8)).digest() for number in range(-(-slots // 16)))
    return (np.frombuffer(words, "<u4")[:slots] % FIRST_PSEUDO + FIRST_PSEUDO).astype(np.int32)
