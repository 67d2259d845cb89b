"""Valid checkpoints load with every weight of the files: shards, tied heads, stop tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from radixkv.chat import Engine
from radixkv.errors import InvalidInput, UnsupportedModel
from radixkv.models import adapter, checkpoint
from radixkv.sampling.params import SamplingParams
from tests.chat.worlds import byte_tokenizer
from tests.models.checkpoints.files import edit, read, rewrite, same
from tests.models.conftest import FAMILIES, GROUPED, make

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
TIED = {**GROUPED, "tie_word_embeddings": True}


# ---- checkpoints that must load


def test_every_weight_of_every_shard_is_there(saved: Path) -> None:
    assert len(list((saved / "many").glob("*.safetensors"))) == 12
    assert same(read(saved / "many")[0], make(FAMILIES["llama"]()))
    assert checkpoint.examine(saved / "many").tensors == checkpoint.examine(saved / "one").tensors


@pytest.mark.parametrize("config", [GROUPED, TIED], ids=["head of its own", "tied"])
def test_a_checkpoint_answers_as_transformers_does(config: dict[str, Any], tmp_path: Path) -> None:
    model = make(transformers.LlamaConfig(**config), torch.float64)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    prompt = list(range(3, 40))
    wanted = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None)
    with Engine.load(str(tmp_path), dtype="float64", num_blocks=40, monitor=False) as engine:
        for _ in range(2):  # the second time from the cache
            assert engine.generate([prompt], GREEDY)[0].token_ids == tuple(wanted[0, len(prompt) :].tolist())
        assert engine.stats().cache.hit_tokens > 30


def test_a_tied_head_is_the_embedding_and_not_in_the_files(tmp_path: Path) -> None:
    made = make(transformers.LlamaConfig(**TIED))
    made.save_pretrained(tmp_path)
    assert "lm_head.weight" not in checkpoint.examine(tmp_path).tensors
    model, _ = read(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert same(model, made)


def test_the_files_of_a_model_without_a_head_suffice_if_it_is_tied(tmp_path: Path) -> None:
    made = make(transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=97, n_positions=64))
    made.transformer.save_pretrained(tmp_path)
    assert "h.0.attn.c_attn.weight" in checkpoint.examine(tmp_path).tensors
    mask = {"h.0.attn.bias": torch.ones(1, 1, 64, 64), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    edit(tmp_path, lambda weights: weights.update(mask))  # as older files have it
    assert same(read(tmp_path)[0], made)
    edit(tmp_path, lambda weights: weights.update({"h.2.mlp.c_fc.weight": torch.ones(3)}))
    with pytest.raises(UnsupportedModel, match=r"no place for h\.2\.mlp"):
        read(tmp_path)


# ---- generation_config.json


@pytest.mark.parametrize(
    ("ids", "stops"), [(7, {7}), ([2, 9], {2, 9}), ([9, 9, 4000], {9}), (None, set()), ([], set())]
)
def test_stop_tokens_come_from_all_files(one: Path, ids: Any, stops: set[int]) -> None:
    rewrite(one / "config.json", eos_token_id=11)
    rewrite(one / "generation_config.json", eos_token_id=ids)
    assert adapter.load(str(one)).stop_token_ids == stops | {11}


def test_the_stop_token_of_a_class_counts_only_where_no_file_names_one(one: Path) -> None:
    """LlamaConfig's is 2, also for a model whose token 2 is a letter."""
    config = json.loads((one / "config.json").read_text())
    del config["eos_token_id"]
    (one / "config.json").write_text(json.dumps(config))
    rewrite(one / "generation_config.json", eos_token_id=7)
    assert adapter.load(str(one)).stop_token_ids == {7}
    (one / "generation_config.json").write_text("{}")
    assert adapter.load(str(one)).stop_token_ids == {2}
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = "5"
    tokenizer.save_pretrained(one)
    assert adapter.load(str(one)).stop_token_ids == {tokenizer.convert_tokens_to_ids("5")}


def test_a_stop_token_that_the_model_has_not_gets_a_warning(one: Path, caplog: pytest.LogCaptureFixture) -> None:
    read(one)
    assert not caplog.records
    rewrite(one / "generation_config.json", eos_token_id=[7, 5000, 4000])
    assert adapter.load(str(one)).stop_token_ids == {2, 7}
    said = "its generation settings end replies at token 4000, and it has 97 tokens: they may be another model's"
    assert [each.getMessage() for each in caplog.records] == [f"{one}: {said}"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot be read: Expecting"),
        ("[]", "must hold a JSON object, not a list"),
        ('{"eos_token_id": "<end>"}', "eos_token_id must be a token id or a list of them, not '<end>'"),
        ('{"eos_token_id": [2, true]}', "eos_token_id must be"),
        ('{"eos_token_id": [2.0]}', "eos_token_id must be"),
    ],
)
def test_stop_tokens_are_never_lost_without_a_word(one: Path, text: str, said: str) -> None:
    (one / "generation_config.json").write_text(text)
    with pytest.raises(InvalidInput, match=rf"generation_config\.json.*{said}"):
        read(one)
