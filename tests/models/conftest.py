"""Fixtures: small random models of the supported families, with weights large enough that attention matters."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from radixkv.errors import UnsupportedModel
from radixkv.models import adapter, verdicts
from radixkv.models.architecture import is_plain
from radixkv.models.loaded import LoadedModel
from radixkv.models.packed import PackedLinear
from radixkv.models.quantized.layers import QuantizedLayer

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


PASSED: dict[str, float] = {}
"""The errors of self-tests that this process has run, by all that they depend on."""


def tested_once(loaded: LoadedModel) -> float:
    """Run the self-test of a model unless an equal one has passed it: the same modules, weights and settings."""
    model: Any = loaded.model
    if any(isinstance(part, PackedLinear | QuantizedLayer) or not is_plain(part) for part in model.modules()):
        return verdicts.tested(loaded)
    settings = replace(loaded, model=None, codec=None, config=repr(loaded.config))  # type: ignore[arg-type]
    operators = type(getattr(model, "operators", None)), torch.get_float32_matmul_precision()
    digest = hashlib.sha256(repr((settings, operators, verdicts.module_kinds(model))).encode())
    for tensor in (*model.parameters(), *model.buffers()):
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    key = digest.hexdigest()
    if key not in PASSED:
        PASSED[key] = verdicts.tested(loaded)
    return PASSED[key]


@pytest.fixture
def each_load_tested() -> None:
    """Run the self-test at each load of this test."""


@pytest.fixture(autouse=True)
def _tested_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "each_load_tested" not in request.fixturenames:
        monkeypatch.setattr(adapter, "tested", tested_once)


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
