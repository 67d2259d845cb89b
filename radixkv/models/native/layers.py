"""A decoder in one class of layer: norms, rotary attention and a gated MLP, with transformers' names of weights.

A layer computes with `Operators`: plain torch, compiled products or fused kernels. Plain torch is the forward of each
module. It computes as transformers' layers do, operator by operator, so that both round alike. Inside of a forward of
radixkv, attention is answered by the handler of this thread, as for transformers' models. Outside of one, the model
computes by itself in plain torch. So its own forward checks pool and operators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from radixkv.models.attention_interface import NO_HANDLER, attention, current
from radixkv.models.identity import Piece
from radixkv.models.native.rotary import Rotation
from radixkv.models.native.switches import Switches

Angles = tuple[Tensor, Tensor] | None  # cosines and sines [T, dim]
Attend = Callable[..., tuple[Tensor, Any]]


class Operators(Protocol):
    """The parts of a layer, over rows [T, width]; a module has the weights and the options of its part."""

    def norm(self, module: Any, hidden: Tensor, residual: Tensor | None, /) -> tuple[Tensor, Tensor]:
        """Return the norm of the sum of `hidden` and `residual`, and the sum."""
        ...

    def attention(self, module: Any, normed: Tensor, angles: Angles, /) -> Tensor:
        """Return the output of an attention [T, hidden]."""
        ...

    def mlp(self, module: Any, normed: Tensor, /) -> Tensor:
        """Return the output of an MLP [T, hidden]."""
        ...

    def refresh(self, model: nn.Module, /) -> None:
        """Take the present weights of the model, after a reload."""
        ...


class NativeModel(nn.Module):
    """A decoder with a head; called as transformers' models, with one row of tokens."""

    base_model_prefix = "model"

    def __init__(self, config: Mapping[str, Any], switches: Switches) -> None:
        """Make the modules, on the device of the context; `config` is as in `config.json`, with all its fields."""
        super().__init__()
        self.config, self.switches = Config.of(config, switches), switches
        self.generation_config: Any = SimpleNamespace()
        self.operators: Operators = TORCH
        self.sources: tuple[Piece, ...] = ()  # the places of its weights in files, if their tests may be recorded
        self.model = Decoder(switches)
        self.lm_head = _linear(switches.hidden, switches.vocabulary, False)
        if switches.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        logits_to_keep: Tensor | None = None,
        use_cache: bool = False,
    ) -> Any:
        """Return logits [1, rows, vocab] as `.logits`, for the rows `logits_to_keep` of tokens [1, T], or for all."""
        tokens, switches, decoder = input_ids[0], self.switches, self.model
        positions = torch.arange(len(tokens), device=tokens.device) if position_ids is None else position_ids[0]
        operators = ALONE if current.handler is NO_HANDLER else self.operators
        hidden: Tensor = decoder.embed_tokens(tokens)
        if switches.embedding_scale != 1.0:
            scale = switches.embedding_scale
            if switches.norm_offset:  # Gemma rounds it to the dtype of the weights, Granite does not
                scale = torch.tensor(scale, dtype=hidden.dtype, device="cpu").item()
            hidden = hidden * scale
        angles = [each(positions, hidden.dtype) for each in decoder.rotations.values()]
        norms: list[Any] = [*(each.input_layernorm for each in decoder.layers), decoder.norm]
        hidden, residual = operators.norm(norms[0], hidden, None)
        for layer, following, number in zip(decoder.layers, norms[1:], switches.rotation_of, strict=True):
            rotation = None if number is None else angles[number]
            hidden, residual = layer(hidden, residual, following, rotation, operators)
        if logits_to_keep is not None:
            hidden = hidden[logits_to_keep]
        logits = self.lm_head(hidden[None])
        if switches.logits_divisor != 1.0:
            logits = logits / switches.logits_divisor
        if switches.logits_softcap is not None:
            logits = torch.tanh(logits / switches.logits_softcap) * switches.logits_softcap
        return SimpleNamespace(logits=logits)

    @property
    def kind(self) -> str:
        """The class of transformers that computes the same."""
        return str(next(iter(getattr(self.config, "architectures", None) or ()), self.config.model_type))

    @property
    def frozen(self) -> list[str]:
        """The names of the modules whose frequencies transformers would choose again for each batch."""
        return [f"model.rotations.{at}" for at, each in enumerate(self.switches.rotations) if each.kind == "longrope"]

    @property
    def base_model(self) -> Decoder:
        """The model without its head."""
        return self.model

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return self.model.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.model.norm.weight.device

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding."""
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        """Return the head."""
        return self.lm_head

    def set_attn_implementation(self, implementation: str) -> None:
        """Record a name, which changes nothing: a forward attends by its handler if there is one."""
        vars(self.config).update(_attn_implementation=implementation)


class Config(SimpleNamespace):
    """The fields of a `config.json` as attributes."""

    @classmethod
    def of(cls, fields: Mapping[str, Any], switches: Switches) -> Config:
        """Take all fields; the kinds and windows of the layers are those that the switches have."""
        kinds = ["full_attention" if each is None else "sliding_attention" for each in switches.windows]
        window = next((each for each in switches.windows if each is not None), None)
        own = {"layer_types": kinds, "sliding_window": window, "attn_logit_softcapping": switches.softcap}
        return cls(**{**fields, **own, "_attn_implementation": "eager"})

    def get_text_config(self) -> Config:
        """Return this object, as there are no parts for images."""
        return self


class Decoder(nn.Module):
    """The embedding, the layers and the last norm; the model's forward calls them."""

    def __init__(self, switches: Switches) -> None:
        super().__init__()
        weight = torch.empty(switches.vocabulary, switches.hidden)
        self.embed_tokens = nn.Embedding(switches.vocabulary, switches.hidden, _weight=weight)
        self.layers = nn.ModuleList(Layer(switches, window) for window in switches.windows)
        self.norm = Norm(switches.hidden, switches)
        self.rotations = nn.ModuleDict({str(at): Rotary(each) for at, each in enumerate(switches.rotations)})


class Layer(nn.Module):
    """Attention and MLP, each after a norm and with a residual around it."""

    def __init__(self, switches: Switches, window: int | None) -> None:
        super().__init__()
        self._scale, self._sandwich = switches.residual_scale, switches.sandwich
        self.self_attn = Attention(switches, window)
        self.mlp = MLP(switches)
        self.input_layernorm = Norm(switches.hidden, switches)
        self.post_attention_layernorm = Norm(switches.hidden, switches)
        if switches.sandwich:
            self.pre_feedforward_layernorm = Norm(switches.hidden, switches)
            self.post_feedforward_layernorm = Norm(switches.hidden, switches)

    def forward(
        self, normed: Tensor, residual: Tensor, following: Norm, angles: Angles, operators: Operators
    ) -> tuple[Tensor, Tensor]:
        """Return the norm of the output [T, hidden] by `following`, the norm of the next layer, and the output.

        `normed` is the norm of the input `residual`. So each norm takes the sum before it, and all layers are alike.
        """
        hidden = operators.attention(self.self_attn, normed, angles)
        before_mlp = self.post_attention_layernorm
        if self._sandwich:
            hidden, before_mlp = operators.norm(before_mlp, hidden, None)[0], self.pre_feedforward_layernorm
        if self._scale != 1.0:
            hidden = hidden * self._scale
        normed, residual = operators.norm(before_mlp, hidden, residual)
        hidden = operators.mlp(self.mlp, normed)
        if self._sandwich:
            hidden = operators.norm(self.post_feedforward_layernorm, hidden, None)[0]
        if self._scale != 1.0:
            hidden = hidden * self._scale
        return operators.norm(following, hidden, residual)


class Attention(nn.Module):
    """The projections of an attention, and norms of its heads."""

    is_causal = True

    def __init__(self, switches: Switches, window: int | None) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = switches.heads, switches.kv_heads, switches.head_dim
        self.scale, self.window, self.softcap = switches.scale, window, switches.softcap
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        widths = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        self.inputs = _inputs(self, switches, widths, "qkv_proj", switches.qkv_bias)
        self.o_proj = _linear(queries, switches.hidden, switches.out_bias)
        self.has_norms = switches.head_norms
        if switches.head_norms:
            self.q_norm, self.k_norm = Norm(self.head_dim, switches), Norm(self.head_dim, switches)

    def forward(self, normed: Tensor, angles: Angles, attend: Attend = attention) -> Tensor:
        """Project, normalise and rotate heads, attend as transformers calls its attention functions, and project."""
        parts = [getattr(self, name)(normed).view(len(normed), -1, self.head_dim) for name in self.inputs]
        if len(parts) == 1:
            parts = parts[0].split([self.heads, self.kv_heads, self.kv_heads], 1)
        if self.has_norms:
            parts = [self.q_norm(parts[0])[0], self.k_norm(parts[1])[0], parts[2]]
        query, key, value = (each.transpose(0, 1)[None] for each in parts)
        if angles is not None:
            query, key = rotated(query, *angles), rotated(key, *angles)
        options = {"scaling": self.scale, "sliding_window": self.window, "softcap": self.softcap}
        attended, _ = attend(self, query, key, value, None, **options)
        output: Tensor = self.o_proj(attended.reshape(len(normed), -1))
        return output


class MLP(nn.Module):
    """Down projection of activation(gate) * up."""

    def __init__(self, switches: Switches) -> None:
        super().__init__()
        self.activation, width = switches.activation, switches.intermediate
        widths = {"gate_proj": width, "up_proj": width}
        self.inputs = _inputs(self, switches, widths, "gate_up_proj", switches.mlp_bias)
        self.down_proj = _linear(width, switches.hidden, switches.mlp_bias)

    def forward(self, normed: Tensor) -> Tensor:
        """Apply SiLU, or GELU by tanh, to the gate."""
        parts = [getattr(self, name)(normed) for name in self.inputs]
        gate, up = parts if len(parts) == 2 else parts[0].chunk(2, dim=-1)
        gate = functional.silu(gate) if self.activation == "silu" else functional.gelu(gate, approximate="tanh")
        output: Tensor = self.down_proj(gate * up)
        return output


class Norm(nn.Module):
    """An RMS norm; it scales by `offset` more than its weight."""

    def __init__(self, width: int, switches: Switches) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.epsilon, self.offset = switches.epsilon, float(switches.norm_offset)

    def forward(self, hidden: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Normalise the sum [..., width] in float32; a norm with an offset is also scaled there."""
        total = hidden if residual is None else residual + hidden
        wide = total.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        if self.offset:
            return (wide * (self.offset + self.weight.float())).to(total.dtype), total
        return self.weight * wide.to(total.dtype), total


class Rotary(nn.Module):
    """The frequencies of one rotation."""

    frequencies: Tensor

    def __init__(self, rotation: Rotation) -> None:
        super().__init__()
        self.rotation = rotation
        frequencies, self.factor = rotation.frequencies()
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [T, dim] in `dtype` for positions [T]."""
        angles = positions[:, None].float() * self.frequencies.to(torch.float)
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * self.factor).to(dtype), (angles.sin() * self.factor).to(dtype)


def rotated(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate the first numbers of heads [1, heads, T, head_dim]."""
    dim = cosines.shape[-1]
    turned, rest = (heads, None) if dim == heads.shape[-1] else (heads[..., :dim], heads[..., dim:])
    low, high = turned.chunk(2, dim=-1)
    turned = turned * cosines + torch.cat((-high, low), dim=-1) * sines
    return turned if rest is None else torch.cat((turned, rest), dim=-1)


def _inputs(module: nn.Module, switches: Switches, widths: dict[str, int], stacked: str, bias: bool) -> list[str]:
    """Add layers whose outputs of these widths lie side by side, or one for all if they are stacked; return names."""
    widths = {stacked: sum(widths.values())} if switches.stacked else widths
    for name, width in widths.items():
        module.add_module(name, _linear(switches.hidden, width, bias))
    return [*widths]


def _linear(inputs: int, outputs: int, bias: bool) -> nn.Linear:
    """Return a layer with weights of no value: torch's initialisation, on the meta device, imports a compiler."""
    layer = nn.Linear.__new__(nn.Linear)
    nn.Module.__init__(layer)
    layer.in_features, layer.out_features = inputs, outputs
    layer.weight = nn.Parameter(torch.empty(outputs, inputs))
    layer.register_parameter("bias", nn.Parameter(torch.empty(outputs)) if bias else None)
    return layer


def _attend_alone(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: None,
    *,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
) -> tuple[Tensor, None]:
    """Attend without a pool: query [1, heads, T, dim], and [1, T, heads, dim] comes back. Costs T * T scores."""
    group, at = query.shape[1] // key.shape[1], torch.arange(query.shape[2], device=query.device)
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    distance = at[:, None] - at
    hidden = (distance < 0) | (distance >= (sliding_window or len(at)))
    weights = functional.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1, dtype=torch.float32)
    return torch.matmul(weights.to(query.dtype), value).transpose(1, 2), None


class TorchOperators:
    """The forwards of the modules."""

    norm, mlp = staticmethod(Norm.forward), staticmethod(MLP.forward)

    def __init__(self, attention: Callable[..., Tensor]) -> None:
        self.attention = attention

    def refresh(self, model: nn.Module) -> None:
        """Do nothing: the weights are read in each call."""


TORCH = TorchOperators(Attention.forward)
"""In a forward of radixkv: its handler attends."""
ALONE = TorchOperators(partial(Attention.forward, attend=_attend_alone))
"""Without a pool."""
