"""A decoder in one class of layer: norms, rotary attention and a gated MLP, with transformers' names of weights.

A layer computes with `operators`: plain torch, compiled products or fused kernels. Inside of a forward of radixkv,
attention is answered by the handler of this thread, as for transformers' models. Outside of one, the model computes by
itself in plain torch. So its own forward checks pool and operators.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from radixkv.models.attention_interface import handler_or_none
from radixkv.models.identity import Piece
from radixkv.models.native.operators import ALONE, TORCH, Operators
from radixkv.models.native.rotary import Rotation
from radixkv.models.native.switches import Switches

Angles = list[tuple[Tensor, Tensor]]


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
        tokens, switches = input_ids[0], self.switches
        positions = torch.arange(len(tokens), device=tokens.device) if position_ids is None else position_ids[0]
        handler = handler_or_none()
        hidden = self.model(tokens, positions, ALONE if handler is None else self.operators.serving(handler))
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
    """The embedding, the layers and the last norm."""

    def __init__(self, switches: Switches) -> None:
        super().__init__()
        self._scale = switches.embedding_scale
        weight = torch.empty(switches.vocabulary, switches.hidden)
        self.embed_tokens = nn.Embedding(switches.vocabulary, switches.hidden, _weight=weight)
        self.layers = nn.ModuleList(Layer(switches, number) for number in range(len(switches.windows)))
        self.norm = Norm(switches.hidden, switches)
        self.rotations = nn.ModuleList(Rotary(each) for each in switches.rotations)

    def forward(self, tokens: Tensor, position_ids: Tensor, operators: Operators) -> Tensor:
        """Return normalised hidden states [T, hidden] of tokens [T] at positions [T]."""
        hidden: Tensor = self.embed_tokens(tokens)
        if self._scale != 1.0:
            hidden = hidden * torch.tensor(self._scale, device="cpu").to(hidden.dtype)
        angles: Angles = [each(position_ids, hidden.dtype) for each in self.rotations]
        residual: Tensor | None = None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, angles, operators)
        return operators.norm(self.norm, hidden, residual)[0]


class Layer(nn.Module):
    """Attention and MLP, each after a norm and with a residual around it."""

    def __init__(self, switches: Switches, number: int) -> None:
        super().__init__()
        self._scale, self._rotation = switches.residual_scale, switches.rotation_of[number]
        self.self_attn = Attention(switches, switches.windows[number])
        self.mlp = MLP(switches)
        self.input_layernorm = Norm(switches.hidden, switches)
        self.post_attention_layernorm = Norm(switches.hidden, switches)
        self._sandwich = switches.sandwich
        if switches.sandwich:
            self.pre_feedforward_layernorm = Norm(switches.hidden, switches)
            self.post_feedforward_layernorm = Norm(switches.hidden, switches)

    def forward(
        self, hidden: Tensor, residual: Tensor | None, angles: Angles, operators: Operators
    ) -> tuple[Tensor, Tensor]:
        """Return hidden states [T, hidden] and the residual, which the next norm adds."""
        normed, residual = operators.norm(self.input_layernorm, hidden, residual)
        rotation = None if self._rotation is None else angles[self._rotation]
        hidden = operators.attention(self.self_attn, normed, rotation)
        before_mlp = self.post_attention_layernorm
        if self._sandwich:
            hidden, before_mlp = operators.norm(before_mlp, hidden, None)[0], self.pre_feedforward_layernorm
        normed, residual = operators.norm(before_mlp, self._scaled(hidden), residual)
        hidden = operators.mlp(self.mlp, normed)
        if self._sandwich:
            hidden = operators.norm(self.post_feedforward_layernorm, hidden, None)[0]
        return self._scaled(hidden), residual

    def _scaled(self, hidden: Tensor) -> Tensor:
        return hidden if self._scale == 1.0 else hidden * self._scale


class Attention(nn.Module):
    """The projections of an attention, and norms of its heads."""

    is_causal = True

    def __init__(self, switches: Switches, window: int | None) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = switches.heads, switches.kv_heads, switches.head_dim
        self.scale, self.window, self.softcap = switches.scale, window, switches.softcap
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        if switches.stacked:
            self.qkv_proj = _linear(switches.hidden, queries + 2 * keys, switches.qkv_bias)
        else:
            self.q_proj = _linear(switches.hidden, queries, switches.qkv_bias)
            self.k_proj = _linear(switches.hidden, keys, switches.qkv_bias)
            self.v_proj = _linear(switches.hidden, keys, switches.qkv_bias)
        self.o_proj = _linear(queries, switches.hidden, switches.out_bias)
        self.has_norms = switches.head_norms
        if switches.head_norms:
            self.q_norm, self.k_norm = Norm(self.head_dim, switches), Norm(self.head_dim, switches)

    @property
    def projections(self) -> list[Any]:
        """The layers whose outputs, side by side, are queries, keys and values."""
        modules = self._modules
        return [modules["qkv_proj"]] if "qkv_proj" in modules else [modules[name] for name in _PROJECTIONS]


_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


class MLP(nn.Module):
    """Down projection of activation(gate) * up."""

    def __init__(self, switches: Switches) -> None:
        super().__init__()
        hidden, width, bias = switches.hidden, switches.intermediate, switches.mlp_bias
        self.activation, self.stacked = switches.activation, switches.stacked
        if switches.stacked:
            self.gate_up_proj = _linear(hidden, 2 * width, bias)
        else:
            self.gate_proj, self.up_proj = _linear(hidden, width, bias), _linear(hidden, width, bias)
        self.down_proj = _linear(width, hidden, bias)

    @property
    def gate_and_up(self) -> list[Any]:
        """The layers whose outputs, side by side, are gate and up."""
        modules = self._modules
        return [modules["gate_up_proj"]] if self.stacked else [modules["gate_proj"], modules["up_proj"]]


class Norm(nn.Module):
    """The weight of an RMS norm; it scales by `offset` more."""

    def __init__(self, width: int, switches: Switches) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.epsilon, self.offset = switches.epsilon, float(switches.norm_offset)


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


def _linear(inputs: int, outputs: int, bias: bool) -> nn.Linear:
    """Return a layer with weights of no value: torch's initialisation, on the meta device, imports a compiler."""
    layer = nn.Linear.__new__(nn.Linear)
    nn.Module.__init__(layer)
    layer.in_features, layer.out_features = inputs, outputs
    layer.weight = nn.Parameter(torch.empty(outputs, inputs))
    layer.register_parameter("bias", nn.Parameter(torch.empty(outputs)) if bias else None)
    return layer
