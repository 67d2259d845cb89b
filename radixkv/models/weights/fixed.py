"""The weights of an engine's model, by default fixed: `radixkv.models.weights.reload.ModelWeights` can change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from radixkv.errors import EngineClosed, InvalidInput, RadixKVError

if TYPE_CHECKING:
    from torch import Tensor

State: TypeAlias = "Mapping[str, Tensor]"


class Weights(Protocol):
    """The weights of an engine's model, which may change."""

    def checked(self, state: State | None) -> State | None:
        """Return a complete state; raises InvalidInput, with nothing changed, if it does not fit. Any thread may call.

        Without a state, return None.
        """
        ...

    def reload(self, state: State | None) -> Any:
        """Make the present weights count, or the weights of a checked state. Only between two steps; raises
        RadixKVError."""
        ...

    def digest(self) -> str:
        """Return a digest of all bytes of the weights, of all ranks. Any thread may call; it reads all of them."""
        ...


class FixedWeights:
    """Weights that never change, as in a model that is not torch's."""

    def __init__(self, error: type[RadixKVError], message: str) -> None:
        """Refuse all new weights with such an error."""
        self._error, self._message = error, message

    def checked(self, state: State | None) -> State | None:
        """Refuse all new weights."""
        raise self._error(self._message)

    def reload(self, state: State | None) -> None:
        """Refuse as `checked`."""
        self.checked(state)

    def digest(self) -> str:
        """Refuse, too: nothing identifies the KV of such a model."""
        raise self._error(self._message)


FIXED_WEIGHTS: Weights = FixedWeights(
    InvalidInput, "this engine's model cannot take other weights: it was not made by Engine.load"
)
NO_WEIGHTS: Weights = FixedWeights(EngineClosed, "the engine was closed: load a new one")
"""The weights of a closed engine."""
