"""Detect that the weights of a loaded model have changed.

Packed layers are copies of the weights, and cached KV was computed with them. An update of the weights leaves both as
they were, so that the next answer would mix two models.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from radixkv.device import device_of, refuse_fatal
from radixkv.errors import WeightsChanged
from radixkv.models.identity import local_part
from radixkv.models.loaded import SequenceInput

_ADVICE = (
    "call engine.reload_weights() after each update, or load the engine with a copy of the model (copy.deepcopy) if "
    "updates are not for it"
)
_SAMPLES = 4  # numbers of each weight
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # compared as bits: NaN equals itself


class WeightWatch:
    """The weights of a model as they were at one moment: its parameters, saved buffers, frequencies and scales.

    `moved` costs about 0.4 microseconds per tensor, `changed` about 3. Both find replaced tensors, moved memory and
    all updates that torch counts (`Tensor._version`). torch counts neither updates through `.data` nor updates by its
    fused optimizers. `changed` finds these by four numbers of each weight, unless all sampled numbers stayed equal.
    It also finds replaced modules, such as the layers of an adapter.

    On a GPU the numbers are read in a stream of its own, which does not wait for a step that is running. An update that
    torch does not count and that the GPU has not done yet is found by a later call.
    """

    def __init__(self, model: nn.Module, running: nn.Module | None = None) -> None:
        """Record the present weights; holds their tensors and the modules.

        Frequencies and scales are those of `running`, by default `model`: the model of a caller may change its own.
        """
        places = [*weight_places(model), *_unsaved(model if running is None else running)]
        self._names = [name for name, _, _ in places]
        self._owners = [(owner, key) for _, owner, key in places]
        self._users: list[Tensor] = [owner[key] for _, owner, key in places]
        self._held = [local_part(tensor) for tensor in self._users]
        self._tensors = list({id(tensor): tensor for tensor in self._held}.values())
        self._counted = [tensor for tensor in self._tensors if not tensor.is_inference()]  # the others have no version
        self._versions = [tensor._version for tensor in self._counted]
        self._pointers = [tensor.data_ptr() for tensor in self._tensors]
        parts = [(each._modules, key, child) for each in model.modules() for key, child in each._modules.items()]
        self._parents, self._children = [(owner, key) for owner, key, _ in parts], [child for _, _, child in parts]
        self._views = _views(self._tensors)
        self._samples = [torch.cat(views) for views in self._views]
        self._devices = [device_of(sample.device) for sample in self._samples]
        self._streams = [device.stream() for device in self._devices]
        for device, stream in zip(self._devices, self._streams, strict=True):
            stream.wait_stream(device.current_stream())

    @property
    def pointers(self) -> list[int]:
        """The addresses of the weights, each once."""
        return list(self._pointers)

    def moved(self) -> bool:
        """Return whether a weight was replaced or updated, as far as torch counts updates."""
        return not (
            [tensor._version for tensor in self._counted] == self._versions
            and [tensor.data_ptr() for tensor in self._tensors] == self._pointers
            and all(map(is_, [owner.get(key) for owner, key in self._owners], self._users))
        )

    @torch.inference_mode()
    def changed(self) -> bool:
        """Return whether `moved`, or a module or sampled number differs; waits for reads of these numbers alone."""
        replaced = not all(map(is_, [owner.get(key) for owner, key in self._parents], self._children))
        if replaced or self.moved():
            return True
        groups = zip(self._devices, self._streams, self._views, self._samples, strict=True)
        return any(device.differ(stream, now, old) for device, stream, now, old in groups)

    def first_change(self) -> str:
        """Return the name of the first weight that is seen to have changed, for messages. O(weights)."""
        versions = dict(zip(map(id, self._counted), self._versions, strict=True))
        pointers = dict(zip(map(id, self._tensors), self._pointers, strict=True))
        for name, (owner, key), user, tensor in zip(self._names, self._owners, self._users, self._held, strict=True):
            if owner.get(key) is not user or tensor.data_ptr() != pointers[id(tensor)]:
                return name
            if id(tensor) in versions and tensor._version != versions[id(tensor)]:
                return name
        return next((key for owner, key in self._parents if owner.get(key) not in self._children), "a weight")


def weight_places(model: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield name, dictionary and key of each parameter and saved buffer; those that share a tensor all count."""
    for prefix, module in model.named_modules():
        unsaved = module._non_persistent_buffers_set
        for owner in (module._parameters, module._buffers):
            for key, tensor in owner.items():
                if tensor is not None and not (owner is module._buffers and key in unsaved):
                    yield f"{prefix}.{key}" if prefix else key, owner, key


def _unsaved(model: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield unsaved buffers as `weight_places` does: single numbers and rows, as models may extend their tables."""
    for prefix, module in model.named_modules():
        for key in module._non_persistent_buffers_set:
            if (tensor := module._buffers.get(key)) is not None and tensor.is_floating_point() and tensor.ndim <= 1:
                yield f"{prefix}.{key}", module._buffers, key


def _views(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return views of a few numbers of each contiguous tensor as integers, in groups that can be concatenated."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        bits = _INTEGERS.get(tensor.element_size())
        if bits is not None and tensor.numel() and tensor.is_contiguous() and tensor.layout is torch.strided:
            numbers = tensor.detach().view(bits).view(-1)
            step = max(len(numbers) // _SAMPLES, 1)
            groups[tensor.device, bits].append(numbers[step // 2 :: step][:_SAMPLES])
    return list(groups.values())


class WeightGuard:
    """Refuses requests and steps while a model's weights are not as `watch` recorded them, or there is a `problem`."""

    def __init__(self, name: str, model: nn.Module, running: nn.Module | None = None) -> None:
        """Record the present weights as `WeightWatch` does; `name` is for messages."""
        self.watch = WeightWatch(model, running)
        self.problem = ""  # why there are no weights at all
        self.reloading = False
        self._name = name

    def check(self) -> None:
        """Raise WeightsChanged if the cached KV was computed with other weights; see `WeightWatch.changed`.

        Raises DeviceLost if the device computes nothing more. A GPU without memory for a few numbers does not compare
        them this time.
        """
        if self.reloading:  # a request that is sent during a reload runs after it
            return
        try:
            changed = self.watch.changed()
        except torch.OutOfMemoryError:
            changed = self.watch.moved()
        except RuntimeError as error:
            refuse_fatal(error)
            raise
        if changed or self.problem:
            raise self._refusal()

    def check_step(self) -> None:
        """Raise WeightsChanged after an update that torch counts; see `WeightWatch.moved`."""
        if self.watch.moved() or self.problem:
            raise self._refusal()

    def _refusal(self) -> WeightsChanged:
        return WeightsChanged(
            self.problem
            or f"the weights of {self._name} changed after they were loaded ({self.watch.first_change()}), and cached "
            f"KV is of the old ones: {_ADVICE}"
        )


class WatchedForward:
    """Computes steps by another forward, and refuses their logits if the weights changed meanwhile or before."""

    def __init__(self, forward: Any, check: Callable[[], None]) -> None:
        """`check` raises if the cached KV was computed with other weights."""
        self.forward, self._check = forward, check

    def run(self, inputs: Sequence[SequenceInput], sampled: Tensor | None = None) -> Tensor:
        """Return logits as `Runner.run` does; raises the error of `check` even if the forward raised another one."""
        try:
            logits: Tensor = self.forward.run(inputs, sampled)
        finally:
            self._check()
        return logits
