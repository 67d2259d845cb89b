"""Probe the states of a model's mixers with one token: their shapes and dtypes."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional

from radixkv.errors import UnsupportedModel
from radixkv.models.loaded import StateKey, StateSpec
from radixkv.models.recurrent.mixers import Mixer


class StateProbe:
    """Answers the calls of mixers in a forward of one token, and records the states that they leave."""

    def __init__(self) -> None:
        self._found: dict[StateKey, StateSpec] = {}
        self._inside: str | None = None

    @property
    def specs(self) -> tuple[StateSpec, ...]:
        """The recorded states, in the order of the forward."""
        return tuple(self._found.values())

    def mix(self, mixer: Mixer, arguments: dict[str, Any]) -> Any:
        """Run the mixer on a cache that records; raises UnsupportedModel if it is not of one sequence by itself."""
        kind = type(mixer.module).__name__
        if self._inside is not None:
            raise UnsupportedModel(f"{self._inside} keeps state around the state of {kind}")
        tensors = sorted(name for name in mixer.others if _has_tensors(arguments.get(name)))
        if tensors:
            raise UnsupportedModel(f"{kind} takes {', '.join(tensors)}, which cannot be cut by sequence")
        view = _RecordingView()
        self._inside = kind
        output = mixer.compute(arguments | {mixer.cache: view})
        self._inside = None
        repeated = view.found.keys() & self._found.keys()
        if repeated:
            raise UnsupportedModel(f"{kind} updates the state of layer {min(repeated).layer} a second time")
        self._found |= view.found
        _check_output(kind, output)
        return output


def _has_tensors(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, tuple | list) and any(map(_has_tensors, value)))


def _check_output(kind: str, output: Any) -> None:
    """Refuse outputs that cannot be put together again from several calls."""
    parts = output if isinstance(output, tuple) else (output,)
    if not all(isinstance(part, Tensor) and part.ndim >= 3 and part.shape[:2] == (1, 1) for part in parts):
        raise UnsupportedModel(f"{kind} returns something else than one row for each token")


class _RecordingView:
    """A fresh cache of one mixer; it records each state that is stored."""

    def __init__(self) -> None:
        self.found: dict[StateKey, StateSpec] = {}

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return None: nothing was computed before."""

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return None: nothing was computed before."""

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> Tensor:
        """Record the columns [1, channels, T] of a convolution; return them after columns of zeros."""
        width = conv_kernel_size or conv_states.shape[-1]
        padded = functional.pad(conv_states, (max(width - conv_states.shape[-1], 0), 0))
        self._record(StateKey(layer_idx, "conv", state_idx), padded[..., -width:])
        return padded

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Record and return a state [1, ...]."""
        self._record(StateKey(layer_idx, "recurrent", state_idx), recurrent_states)
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return False: no state is rolled back."""
        return False

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return False: nothing was computed before."""
        return False

    def _record(self, key: StateKey, state: Tensor) -> None:
        self.found[key] = StateSpec(key, tuple(state.shape[1:]), state.dtype)
