"""Replace the forwards of a model's layers by `GpuLayer`, where that computes the same.

A layer qualifies by its parts, and by the numbers that `proof` compares: not by its model's name. Either all layers of
a model are replaced or none.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import torch
from torch import nn

from radixkv.device import device_of
from radixkv.models.gpu_layers.layer import NORMS, GpuLastNorm, GpuLayer, replaced_forward
from radixkv.models.gpu_layers.proof import Unlike, norm_agrees, proven
from radixkv.models.loaded import LayerSpec, LoadedModel
from radixkv.models.observed import Use, epsilon_of, is_plain, observed
from radixkv.models.weights.watch import weight_places

_log = logging.getLogger(__name__)
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_GATED = ("gate_proj", "up_proj", "down_proj")
_HEAD_NORMS = ("q_norm", "k_norm")


def should_fuse(loaded: LoadedModel) -> bool:
    """Return whether layers should be fused: on a GPU, around attention in Triton."""
    return loaded.attention == "triton" and device_of(loaded.device).is_gpu


@torch.no_grad()
def fuse_layers(loaded: LoadedModel) -> bool:
    """Replace the forwards of a model's layers in place, and return whether all were proven.

    A model of other parts is left as written, without a warning; one whose layers compute something else, with one.
    The weights of its projections are moved into stacks, one layer after the other, and stay the weights of their
    modules. Costs two forwards of a few tokens, and float32 copies of one layer's weights at a time.
    """
    model: Any = loaded.model
    restore_layers(model)
    try:
        layers = _candidates(model, loaded.layers)
    except Unlike as reason:
        _log.info("%s: its layers run as written: %s", loaded.name, reason)
        return False
    try:
        with device_of(loaded.device).current():
            _fuse(loaded, layers)
    except Exception as error:  # of a model that fails on observed inputs, or of memory for the copies
        restore_layers(model)
        kind = "" if isinstance(error, Unlike) else f"{type(error).__name__}: "
        _log.warning("%s: its layers run as written: %s%s", loaded.name, kind, error)
        return False
    return True


def _fuse(loaded: LoadedModel, layers: list[Any]) -> None:
    """Prove and install all layers. Raises the reason, perhaps with some of them installed."""
    last = _norms_after(loaded.model, layers)
    parts = [part for layer in layers for part in (layer, layer.self_attn, layer.mlp)]
    seen = observed(loaded.model, [*parts, *last], loaded.max_length, loaded.device)
    for number, layer in enumerate(layers):
        try:
            fused = proven(layer, seen, loaded.dtype)
        except Unlike as reason:
            raise Unlike(f"of layer {number}, {reason}") from None
        layer.forward = fused
    norm = next((each for each in last if _follows(seen[id(each)], seen[id(layers[-1])])), None)
    if norm is None or not norm_agrees(norm, seen[id(layers[-1])][0].output[0], loaded.dtype):
        fused.completes = True
    else:
        norm.forward = GpuLastNorm(norm)


def restore_layers(model: nn.Module) -> None:
    """Remove all replaced forwards. The weights stay views of their stacks."""
    for module in model.modules():
        if replaced_forward(module) is not None:
            del module.forward


def is_fused(model: nn.Module) -> bool:
    """Return whether the layers of a model are fused."""
    return any(replaced_forward(module) is not None for module in model.modules())


def restack(model: nn.Module) -> None:
    """Move weights into the stacks of their layers again, if they have left them."""
    for module in model.modules():
        if isinstance(forward := replaced_forward(module), GpuLayer):
            for each in forward.stacks:
                if not each.stacked:
                    each.stack()


# ---- structure


def _candidates(model: nn.Module, specs: tuple[LayerSpec, ...]) -> list[Any]:
    """Return a model's layers. Raises `Unlike` unless all have the parts of a Llama layer."""
    every = [each for each in model.modules() if isinstance(each, nn.ModuleList)]
    lists = [each for each in every if len(each) and hasattr(each[0], "self_attn")]
    if len(lists) != 1 or len(lists[0]) != len(specs):
        raise Unlike("it has no single list of layers with attention")
    users = Counter(id(owner[key]) for _, owner, key in weight_places(model))
    for number, (layer, spec) in enumerate(zip(lists[0], specs, strict=True)):
        if (reason := _other_parts(layer, spec, users)) is not None:
            raise Unlike(f"of layer {number}, {reason}")
    return list(lists[0])


def _other_parts(layer: Any, spec: LayerSpec, users: Counter[int]) -> str | None:
    """Return the reason why a layer does not have the parts of a Llama layer; None if it does."""
    from radixkv_kernels.layers import WIDEST  # needs Triton

    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    if attention is None or mlp is None or any(not is_plain(each) for each in (layer, attention, mlp)):
        return "attention or MLP has hooks or another name"
    if {*dict(layer.named_children())} != {"self_attn", "mlp", *NORMS}:
        return f"the parts are {', '.join(dict(layer.named_children()))}"
    linears: list[Any] = [getattr(attention, name, None) for name in _PROJECTIONS]
    linears += [getattr(mlp, name, None) for name in _GATED]
    if any(type(each) is not nn.Linear or not is_plain(each) for each in linears):
        return "the projections are no linear layers of torch"
    if any(users[id(each)] > 1 for linear in linears for each in linear.parameters()):
        return "a projection shares its weights"
    if any(len({each.bias is None for each in part}) > 1 for part in (linears[:3], linears[4:6])):
        return "some of the stacked projections have biases"
    norms = [getattr(layer, name) for name in NORMS]
    heads: list[Any] = [getattr(attention, name, None) for name in _HEAD_NORMS]
    if heads != [None, None]:
        if None in heads or epsilon_of(heads[0]) != epsilon_of(heads[1]):
            return "queries and keys are normalised in different ways"
        norms += heads
    if not all(map(_is_norm, norms)) or norms[0].weight.numel() > WIDEST:
        return "the norms are no RMS norms"
    if heads[0] is not None and heads[0].weight.numel() != spec.key_dim:
        return "a norm spans several heads"
    if len({each.dtype for each in layer.parameters()}) > 1:
        return "the weights have several dtypes"
    if spec.key_dim != spec.value_dim or spec.key_dim % 2 or spec.sinks or spec.source is not None:
        return "attention has sinks, KV of another layer, or keys and values of different or odd sizes"
    return None


def _is_norm(module: Any) -> bool:
    """Return whether a module has the parts of an RMS norm: a weight and an epsilon."""
    if [name for name, _ in module.named_parameters()] != ["weight"] or module.weight.ndim != 1:
        return False
    return isinstance(epsilon_of(module), float) and is_plain(module)


def _norms_after(model: nn.Module, layers: list[Any]) -> list[Any]:
    """Return the norms outside of layers, of their width."""
    inside = {id(part) for layer in layers for part in layer.modules()}
    width = len(layers[0].input_layernorm.weight)
    outside: list[Any] = [each for each in model.modules() if id(each) not in inside and _is_norm(each)]
    return [each for each in outside if len(each.weight) == width]


def _follows(uses: list[Use], before: list[Use]) -> bool:
    """Return whether the uses of a norm take the outputs of the module before."""
    return len(uses) == len(before) and all(
        len(use.args) == 1 and not use.named and use.args[0] is other.output
        for use, other in zip(uses, before, strict=True)
    )
