"""A configuration that does not fit its weight files is refused before a model is built; see `config_fuzz`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from radixkv.errors import InvalidInput
from radixkv.models import adapter, checkpoint
from tests.models.checkpoints.files import rewrite
from tests.models.conftest import FAMILIES, GROUPED, make

FUZZED: dict[str, Any] = {
    "llama": FAMILIES["llama"],
    "gemma2": FAMILIES["gemma2"],
    "gpt2": lambda: transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=97, n_positions=256, bos_token_id=1, eos_token_id=2
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **GROUPED, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24
    ),
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 10**7}, r"num_hidden_layers is 10000000, and the files have 21 weights"),
        ({"num_hidden_layers": -1}, r"num_hidden_layers is -1, and must be at least 0"),
        ({"vocab_size": 10**9}, r"vocab_size is 1000000000, .* dimensions of up to 97"),
        ({"hidden_size": 10**9}, r"hidden_size is 1000000000, .* dimensions of up to 97"),
        ({"head_dim": 5000}, r"head_dim is 5000, .* dimensions of up to 97"),
        ({"text_config": {"num_layers": 10**7}}, r"text_config\.num_layers is 10000000"),
        ({"num_experts": 10**7}, r"num_experts is 10000000"),
        ({"max_position_embeddings": 0}, r"max_position_embeddings is 0, and must be at least 1"),
        ({"max_position_embeddings": -5}, r"max_position_embeddings is -5, and must be at least 1"),
    ],
)
def test_sizes_beyond_the_files_are_refused_by_their_headers(one: Path, changes: dict[str, Any], message: str) -> None:
    rewrite(one / "config.json", **changes)
    with pytest.raises(InvalidInput, match=rf"config\.json: {message}"):
        checkpoint.examine(one)


def test_a_model_of_many_more_weights_is_not_begun(one: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*arguments: Any, **options: Any) -> None:
        raise AssertionError("the weights were read")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", read)
    rewrite(one / "config.json", intermediate_size=10**7)
    with pytest.raises(InvalidInput, match=r"a model of 1,920,\d+,\d+ weights, and the files have 21,\d+"):
        adapter.load(str(one))


def test_frequencies_that_are_no_numbers_are_named(one: Path) -> None:
    rewrite(one / "config.json", rope_parameters={"rope_theta": 0.0, "rope_type": "default"})
    with pytest.raises(InvalidInput, match="frequencies that are not finite: correct rope_theta"):
        adapter.load(str(one))


@pytest.mark.long
def test_each_configuration_is_refused_or_right(tmp_path: Path) -> None:
    """Every 17th case: all take one to three minutes a family, with over 300 loads, each in a limited process."""
    for family in FUZZED:
        make(FUZZED[family]()).save_pretrained(tmp_path / family)
    places = [f"{tmp_path / 'llama'}:num_key_value_heads", *(str(tmp_path / family) for family in FUZZED)]
    command = [sys.executable, "-m", "tests.models.checkpoints.config_fuzz", *places]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert not [line for line in lines if "FAULT" in line], done.stdout
    assert all(sum(line.startswith(f"{place} ") for line in lines) >= 12 for place in places), done.stdout
    assert done.returncode == 0, done.stderr
