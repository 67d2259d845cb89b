"""Take new weights into a model that an engine runs, without loading it again.

`ModelWeights` writes new values into the weights, and computes the copies again that radixkv made of them: packed and
quantised layers, and factors of norms of our own layers. Nothing looks for updates of the weights between two reloads.
"""

from __future__ import annotations

import logging
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from radixkv.errors import InvalidInput, WeightsChanged
from radixkv.models.cuda_graphs import ReplayedForward
from radixkv.models.identity import digest_of_tensors, local_part
from radixkv.models.loaded import LoadedModel
from radixkv.models.native.layers import NativeModel
from radixkv.models.packed import PackedLinear
from radixkv.models.quantized.kernels import QuantizedWeights
from radixkv.models.quantized.layers import QuantizedEmbedding, QuantizedLinear, requantized
from radixkv.models.rounded_kv import format_test
from radixkv.models.runner import Runner
from radixkv.models.selftest import self_test

State = Mapping[str, Tensor]
Slots = dict[str, tuple[torch.Size, torch.dtype]]  # shape and dtype of each weight
_log = logging.getLogger(__name__)


def weights_of(runner: Runner, source: Any | None) -> ModelWeights:
    """Return the weights of a runner that is ready to run; `source` is the model that its caller passed, if any."""
    forward = runner.forward
    record_again = forward.record_again if isinstance(forward, ReplayedForward) else None
    return ModelWeights(runner.loaded, source, record_again)


class ModelWeights:
    """The weights of one loaded model: `reload` makes present or given values count.

    `source` is the caller's model from which `loaded` was made; None for a model from files. It is held weakly: if the
    caller drops it, its packed weights are freed, and the weights of `loaded` alone count. `on_moved` is called
    after a reload from other memory.
    """

    def __init__(
        self, loaded: LoadedModel, source: nn.Module | None = None, on_moved: Callable[[], None] | None = None
    ) -> None:
        """Record the present modules, and shapes, dtypes and addresses of the weights."""
        self._loaded, self._on_moved = loaded, on_moved
        models = [loaded.model] if source is None else [source, loaded.model]
        self._at_load = [(weakref.ref(model), _kinds(model), _slots(model)) for model in models]
        self._recorded = _addresses(loaded.model)  # that recorded steps read

    @property
    def _owner(self) -> tuple[nn.Module, dict[str, type[nn.Module]], Slots]:
        """The model whose parameters the caller may update, and its modules and weights at load."""
        return next((model, kinds, slots) for held, kinds, slots in self._at_load if (model := held()) is not None)

    def digest(self) -> str:
        """Return a digest of all bytes of the weights, packed and quantised ones included."""
        return digest_of_tensors(self._loaded.model)

    # ---- new weights

    def checked(self, state: State | None) -> State | None:
        """Return a state with a value for each weight; raises InvalidInput, with nothing changed, if it does not fit.

        Of the names of a tied weight, one is enough.
        """
        owner, kinds, slots = self._owner
        if kinds != _kinds(owner):
            raise InvalidInput(
                f"{self._loaded.name} has other modules than when it was loaded: merge and remove adapters, or load "
                "another engine"
            )
        if state is None:
            return None
        if not isinstance(state, Mapping) or not all(isinstance(each, Tensor) for each in state.values()):
            raise InvalidInput(f"state maps names to tensors, as model.state_dict() does; got a {type(state).__name__}")
        full = {**state}
        for names, same in _tied(owner):
            given = [name for name in names if name in full]
            if same and not all(torch.equal(full[given[0]], full[name]) for name in given[1:]):
                raise InvalidInput(f"state has two values for one tied weight, {given[0]} and {given[1]}")
            full.update({name: full[given[0]] for name in names if given and name not in full})
        _check_state(full, slots, {name for name, _ in owner.named_buffers()})
        return full

    def reload(self, state: State | None = None) -> float:
        """Use the present weights, or the weights of a `checked` state, from now on; return the error of the self-test.

        Writes the values of a state into the caller's model, if there is one. Nothing else may compute with the model
        meanwhile. Costs a copy of the weights, the packing of linear layers one by one, and a self-test. Raises
        InvalidInput or UnsupportedModel by the self-test, WeightsChanged if an update comes meanwhile. After an error
        the model computes nothing of use until a reload succeeds.
        """
        error = self._reload(state)
        if self._on_moved is not None and (addresses := _addresses(self._loaded.model)) != self._recorded:
            self._on_moved()
            self._recorded = addresses
        _log.info("%s: weights reloaded, self-test error %.1e", self._loaded.name, error)
        return error

    def _reload(self, state: State | None) -> float:
        (owner, _, slots), own = self._owner, self._loaded.model
        if state is not None:
            _write(owner, state)
        _check_dtypes(self._loaded.name, slots, _slots(owner))
        if owner is not own:
            _share_tensors(own, owner)
        self._refresh()  # moves weights that were replaced, and not overwritten
        before = _versions(owner)  # before anything is read
        _copy_again(own, owner, state)
        self._refresh()
        error = max(self_test(self._loaded), format_test(self._loaded))
        for name, version in _versions(owner).items():
            if version != before.get(name):
                raise WeightsChanged(f"{name} changed meanwhile")
        return error

    def _refresh(self) -> None:
        """Let the operators of layers of our own take the present weights."""
        model = self._loaded.model
        if isinstance(model, NativeModel):
            model.operators.refresh(model)


# ---- weights by name


def weight_places(model: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield name, dictionary and key of each parameter and saved buffer; those that share a tensor all count."""
    for prefix, module in model.named_modules():
        unsaved = module._non_persistent_buffers_set
        for owner in (module._parameters, module._buffers):
            for key, tensor in owner.items():
                if tensor is not None and not (owner is module._buffers and key in unsaved):
                    yield f"{prefix}.{key}" if prefix else key, owner, key


def _addresses(model: nn.Module) -> list[int]:
    """Return the address of each parameter and buffer."""
    return [local_part(tensor).data_ptr() for tensor in (*model.parameters(), *model.buffers())]


def _versions(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Return the address of each weight, and how many updates torch has counted: none of tensors of inference mode."""
    found = {}
    for name, owner, key in weight_places(model):
        tensor = local_part(owner[key])
        found[name] = tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version
    return found


def _kinds(model: nn.Module) -> dict[str, type[nn.Module]]:
    """Return the class of each module by name."""
    return {name: type(module) for name, module in model.named_modules()}


def _copied(model: nn.Module) -> Iterator[tuple[str, PackedLinear | QuantizedLinear | QuantizedEmbedding]]:
    """Yield the layers whose weight is no parameter, with the weight's name."""
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear | QuantizedLinear | QuantizedEmbedding):
            yield f"{name}.weight", module


def _slots(model: nn.Module) -> Slots:
    """Return shape and dtype of each weight by name, all names of tied weights and the packed weights included."""
    found = {name: (owner[key].shape, owner[key].dtype) for name, owner, key in weight_places(model)}
    for name, module in _copied(model):
        if isinstance(module, QuantizedEmbedding):
            shape = module.num_embeddings, module.embedding_dim
        else:
            shape = module.out_features, module.in_features
        found[name] = torch.Size(shape), torch.float32
    return found


def _tied(model: Any) -> list[tuple[list[str], bool]]:
    """Return the names of each weight that has several, and whether they have one value.

    A packed head has values of its own, also if it was packed from the embedding.
    """
    users: dict[int, list[str]] = defaultdict(list)
    for name, owner, key in weight_places(model):
        users[id(owner[key])].append(name)
    for name, module in _copied(model):
        users[id(module if isinstance(module, PackedLinear) else module.quantized)].append(name)
    found = [(names, True) for names in users.values() if len(names) > 1]
    names = {id(module): f"{name}.weight" for name, module in model.named_modules()}
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if isinstance(head, PackedLinear) and getattr(model.config.get_text_config(), "tie_word_embeddings", False):
        found.append(([names[id(embedding)], names[id(head)]], False))
    return found


def _check_state(state: State, slots: Slots, buffers: set[str]) -> None:
    """Raise InvalidInput unless the state has each parameter in its shape, and no other names."""
    unknown = sorted(set(state) - set(slots) - buffers)
    missing = sorted(set(slots) - set(state) - buffers)
    if unknown or missing:
        kinds = [(missing, "missing"), (unknown, "unknown")]
        found = " and ".join(f"{len(names)} {kind} ({names[0]})" for names, kind in kinds if names)
        raise InvalidInput(f"state has other names than model.state_dict(): {found}")
    for name, (shape, _) in slots.items():
        if name in state and (state[name].shape != shape or state[name].is_meta):
            raise InvalidInput(f"state has {name} of shape {[*state[name].shape]}, and the model has {[*shape]}")


def _check_dtypes(name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise InvalidInput if a weight has another shape or dtype than at load."""
    for weight, (shape, dtype) in now.items():
        if before.get(weight) != (shape, dtype):
            raise InvalidInput(
                f"{name}: {weight} is {[*shape]} in {dtype} now, and was {before.get(weight)} when it was loaded: "
                "convert it back, or load another engine"
            )


# ---- values


@torch.inference_mode()
def _write(model: nn.Module, state: State) -> None:
    """Copy the values of a state into parameters and saved buffers of a model."""
    for name, owner, key in weight_places(model):
        if name in state:
            local_part(owner[key]).copy_(_part_of(state[name], owner[key]))


def _part_of(value: Tensor, place: Any) -> Tensor:
    """Return the part of a whole value for a tensor that ranks may divide."""
    if not hasattr(place, "placements"):
        return value
    from torch.distributed.tensor import distribute_tensor

    value = value.to(place.device, place.dtype)
    return local_part(distribute_tensor(value, place.device_mesh, place.placements, src_data_rank=None))


def _share_tensors(own: nn.Module, source: nn.Module) -> None:
    """Give the modules of `own` the parameters and buffers of the modules of `source`, from which they were copied."""
    parts = dict(source.named_modules())
    for name, module in own.named_modules():
        if (theirs := parts.get(name)) is None:  # rotations of layers of our own
            continue
        for mine, those in ((module._parameters, theirs._parameters), (module._buffers, theirs._buffers)):
            mine.update({key: those[key] for key in mine if key in those})


@torch.inference_mode()
def _copy_again(own: nn.Module, source: nn.Module, state: State | None) -> None:
    """Compute packed, quantised and fused weights from the weights of `source`, or of the state if there is no source.

    Without both, packed layers stay as they are.
    """
    again: dict[int, tuple[QuantizedWeights, QuantizedWeights]] = {}  # old and new by the id of the old
    for name, layer in _copied(own):
        if source is own and state is None:
            break
        weight: Any = state[name] if source is own and state is not None else source.get_parameter(name)
        if isinstance(layer, PackedLinear):
            layer.repack(weight)
            continue
        old = layer.quantized
        if id(old) not in again:
            again[id(old)] = old, requantized(old, weight)
        layer.quantized = again[id(old)][1]
