"""A sequence whose next tokens may be resident on the host: it can load them in place of a forward."""

from __future__ import annotations

import numpy as np

from radixkv.cache.sequence import Sequence
from radixkv.cache.tokens import Tokens, as_bytes, refuse_negative
from radixkv.cache.types import Load
from radixkv.errors import InvalidInput


class HostSequence(Sequence):
    """A sequence that can load KV from the host. Made by HostPrefixCache.open and by fork."""

    __slots__ = ()

    def loadable(self, tokens: Tokens) -> int:
        """Count the leading `tokens`, which would follow the committed ones, whose KV could be loaded from the host.

        0 while a plan is pending or tokens are unpublished. O(tokens compared) + O(nodes).
        """
        self._refuse_closed()
        refuse_negative(as_bytes(tokens))
        return 0

    def load(self, tokens: Tokens) -> Load:
        """Plan to copy the KV of exactly these tokens from the host; then run it, and `commit`. O(tokens).

        InvalidInput: they are not all loadable. OutOfBlocks and PlanPending as `extend`. All leave everything as it
        was.
        """
        self._refuse_pending()
        found = self.loadable(tokens)
        if found < len(tokens):
            raise InvalidInput(
                f"load of {len(tokens)} tokens: {found} of them are resident on the host, see loadable()"
            )
        return Load(self.extend(tokens), np.empty(0, np.int64))
