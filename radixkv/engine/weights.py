"""Let the weights of a running engine's model change: the seam between the engine and the owner of the weights.

By default weights are fixed. `radixkv.models.weight_reload.ModelWeights` watches those of a real model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from radixkv.engine.core import Core
from radixkv.errors import InvalidInput, WeightsChanged

if TYPE_CHECKING:
    from torch import Tensor

State: TypeAlias = "Mapping[str, Tensor]"


class Weights(Protocol):
    """The weights of an engine's model."""

    def check(self) -> None:
        """Raise WeightsChanged if the weights are no longer those of the cached KV. Any thread may call."""
        ...

    def checked(self, state: State | None) -> State | None:
        """Return a complete state; raises InvalidInput, with nothing changed, if it does not fit. Any thread may call.

        Without a state, return None.
        """
        ...

    def reload(self, state: State | None) -> Any:
        """Make the present weights count, or those of a checked state. Only between two steps; raises RadixKVError."""
        ...


class FixedWeights:
    """Weights that never change, such as those of a model that is not torch's."""

    def check(self) -> None:
        """Accept every request."""

    def checked(self, state: State | None) -> State | None:
        """Refuse all new weights with InvalidInput."""
        raise InvalidInput("this engine's model cannot take other weights: it was not made by Engine.load")

    def reload(self, state: State | None) -> None:
        """Refuse as `checked`."""
        self.checked(state)


FIXED_WEIGHTS: Weights = FixedWeights()


def reload_weights(core: Core, weights: Weights, state: State | None) -> None:
    """Drop the KV of the old weights, with the requests that use it, and take the new ones; on the engine's thread."""
    core.forget(WeightsChanged("the weights were reloaded while the request ran: send it again"))
    weights.reload(state)
