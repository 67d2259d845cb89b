"""Fixtures: small random models of the supported families, with weights large enough that attention matters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers

from radixkv.errors import UnsupportedModel
from radixkv.models import adapter

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 97,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}

FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**GROUPED),
    "qwen3": lambda: transformers.Qwen3Config(**GROUPED, head_dim=16),
    "gemma2": lambda: transformers.Gemma2Config(
        **GROUPED, head_dim=16, sliding_window=21, attn_logit_softcapping=3.0, query_pre_attn_scalar=16
    ),
    "mistral": lambda: transformers.MistralConfig(**GROUPED, sliding_window=21),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**SIZES),
    "phi3": lambda: transformers.Phi3Config(**GROUPED, sliding_window=37),
}


def make(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Return a random decoder; the same configuration gives the same weights."""
    torch.manual_seed(11)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, 0.2)
    return model.to(dtype)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def build() -> Callable[..., Any]:
    """build("llama", torch.float64) or build(config): a new random model each time, the same weights each time."""

    def built(kind: Any, dtype: torch.dtype = torch.float32) -> Any:
        return make(FAMILIES[kind]() if isinstance(kind, str) else kind, dtype)

    return built


@pytest.fixture
def exact_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the reference exact: transformers' eager attention always computes its softmax in float32."""
    softmax = torch.nn.functional.softmax
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda x, dim=-1, dtype=None: softmax(x, dim=dim))


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse every model over the pool."""

    def refuse(model: Any) -> None:
        raise UnsupportedModel("told so")

    monkeypatch.setattr(adapter, "probe", refuse)
