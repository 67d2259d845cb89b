"""Answer the attention calls of one forward: each layer's KV to its slots, then attention along that layer's list.

Knows layers and their order. Does not know how a list came about, nor whether it is for now or for a recording.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from radixkv.models.backends import Attending
from radixkv.models.hook import AttentionCall
from radixkv.models.loaded import LayerSpec


class Step:
    """Answers in order: the n-th call is layer n, whatever the module says about itself."""

    def __init__(self, backend: Attending, layers: Sequence[LayerSpec], slots: Tensor, lists: Sequence[Any]) -> None:
        """`lists` has what `backend` follows in each layer, `slots` [T] where new KV goes."""
        self._backend, self._layers, self._slots, self._lists = backend, layers, slots, lists
        self._next = 0

    def attend(self, call: AttentionCall) -> Tensor:
        """Store the layer's new keys and values, then attend."""
        layer, self._next = self._next, self._next + 1
        self._backend.write(layer, self._slots, call.key[0], call.value[0])
        return self._backend.attend(
            layer,
            call.query[0],
            self._lists[layer],
            scale=call.scale,
            softcap=self._layers[layer].softcap,
            sinks=call.sinks,
        )

    def finish(self) -> None:
        """The forward called each layer once, as in the probe."""
        assert self._next == len(self._layers), f"{self._next} attention calls, {len(self._layers)} in the probe"
