"""Weights that do not match the configuration are refused by name: none is random, and none is left out."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
import transformers

from radixkv.errors import InvalidInput, UnsupportedModel
from radixkv.models import adapter, checkpoint, loader
from tests.models.checkpoints.files import edit, read, rewrite, same
from tests.models.conftest import FAMILIES, GROUPED, make

# ---- weights that do not match

PLACELESS = [
    "model.layers.0.self_attn.q_proj.bias",
    "model.layers.1.self_attn.q_norm.weight",
    "model.layers.2.self_attn.q_proj.weight",
    "model.layers.0.self_attn.q_proj.lora_A.weight",
    "model.norm.bias",
    "lm_head.bias",
    "logit_scale",
    "model.embed_layernorm.weight",
    "model.embed_positions.weight",
    "model.project_out.weight",
    "model.norm.more.weight",
]


@pytest.mark.parametrize("key", PLACELESS)
def test_weights_that_the_model_has_no_place_for_are_not_dropped(one: Path, key: str) -> None:
    edit(one, lambda weights: weights.update({key: torch.ones(32)}))
    with pytest.raises(UnsupportedModel, match=f"no place for {key}, and would answer otherwise"):
        adapter.load(str(one))


def test_a_configuration_with_fewer_layers_than_the_files_is_refused(one: Path) -> None:
    rewrite(one / "config.json", num_hidden_layers=1)
    with pytest.raises(UnsupportedModel, match=r"no place for model\.layers\.1\.input_layernorm.* \(and 8 more\)"):
        adapter.load(str(one))


def test_a_layer_that_guesses_ahead_is_left_out(one: Path, caplog: pytest.LogCaptureFixture) -> None:
    rewrite(one / "config.json", num_nextn_predict_layers=1)
    edit(one, lambda weights: weights.update({"model.layers.2.eh_proj.weight": torch.ones(32)}))
    assert same(read(one)[0], make(FAMILIES["llama"]()))
    assert "1 weights are of parts that it runs without, model.layers.2.eh_proj.weight among them" in caplog.text
    edit(one, lambda weights: weights.update({"model.layers.3.eh_proj.weight": torch.ones(32)}))
    with pytest.raises(UnsupportedModel, match=r"no place for model\.layers\.3"):
        read(one)


@pytest.mark.parametrize(
    "key",
    [
        "vision_tower.patch.weight",
        "model.visual.blocks.0.weight",
        "model.multi_modal_projector.weight",
        "model.mtp_layers.0.norm.weight",
        "score.weight",
        "lm_head.more.weight",
    ],
)
def test_weights_of_other_parts_get_one_warning(one: Path, key: str, caplog: pytest.LogCaptureFixture) -> None:
    edit(one, lambda weights: weights.update({key: torch.ones(3)}))
    assert same(read(one)[0], make(FAMILIES["llama"]()))
    [said] = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert said.getMessage() == f"{one}: 1 weights are of parts that it runs without, {key} among them"


OLDER = {
    "model.layers.0.self_attn.rotary_emb.inv_freq": torch.float32,
    "model.layers.0.self_attn.k_scale": torch.float32,
    "model.layers.0.mask": torch.bool,
    "model.layers.0.positions": torch.int64,
}


@pytest.mark.parametrize("key", OLDER)
def test_what_older_files_have_besides_weights_is_no_weight(
    one: Path, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    edit(one, lambda weights: weights.update({key: torch.ones(4, dtype=OLDER[key])}))
    assert same(read(one)[0], make(FAMILIES["llama"]()))
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


def test_a_wrong_shape_is_named_with_both(one: Path, capfd: pytest.CaptureFixture[str]) -> None:
    edit(one, lambda weights: weights.update({"model.norm.weight": torch.ones(7)}))
    said = r"model\.norm\.weight has the shape \[7\] in the files, and the configuration asks for \[32\]: the two do"
    with pytest.raises(InvalidInput, match=said):
        adapter.load(str(one))
    rewrite(one / "config.json", intermediate_size=50)
    with pytest.raises(InvalidInput, match=r"\[32, 48\] in the files, .* \[32, 50\] \(and 6 more\)"):
        adapter.load(str(one))
    assert "LOAD REPORT" not in capfd.readouterr().err  # transformers' table is less clear


def test_only_the_table_that_we_say_better_is_kept_back() -> None:
    log, heard = logging.getLogger("transformers.modeling_utils"), logging.Handler()
    said: list[str] = []
    heard.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign] # a class for one line
    log.addHandler(heard)
    try:
        with loader._own_reports(silent=False):
            log.warning("Llama LOAD REPORT: x is MISSING")
            log.warning("Llama LOAD REPORT: x has a CONVERSION error")
            log.warning("something else")
        log.warning("Llama LOAD REPORT behind it")
    finally:
        log.removeHandler(heard)
    assert [each.rpartition(" ")[2] for each in said] == ["error", "else", "it"]


def test_integers_are_not_taken_for_weights(one: Path) -> None:
    key = "model.layers.1.mlp.up_proj.weight"
    edit(one, lambda weights: weights.update({key: (100 * weights[key]).to(torch.int8)}))
    with pytest.raises(UnsupportedModel, match=f"{key} is stored as I8, and no quantization_config"):
        adapter.load(str(one))
    rewrite(one / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    assert checkpoint.examine(one).tensors[key].dtype == "I8"


def test_an_unknown_way_to_quantize_is_refused(one: Path) -> None:
    """transformers logs that the method is unknown, and uses the integers as weights."""
    key = "model.layers.1.mlp.up_proj.weight"
    edit(one, lambda weights: weights.update({key: (100 * weights[key]).to(torch.int8)}))
    rewrite(one / "config.json", quantization_config={"quant_method": "foo"})
    with pytest.raises(UnsupportedModel, match="is quantized by 'foo', which transformers does not know: what is"):
        adapter.load(str(one))


def test_a_gap_in_the_experts_is_not_closed(tmp_path: Path) -> None:
    make(transformers.MixtralConfig(**GROUPED, num_local_experts=4)).save_pretrained(tmp_path)
    read(tmp_path)

    def rename(weights: dict[str, torch.Tensor]) -> None:
        for key in [key for key in weights if ".layers.1." in key and ".experts.2." in key]:
            weights[key.replace(".experts.2.", ".experts.7.")] = weights.pop(key)

    edit(tmp_path, rename)
    with pytest.raises(InvalidInput, match=r"lacks model\.layers\.1\.\w+\.experts\.2, and has 7: fetch it again"):
        read(tmp_path)


def test_a_package_that_is_missing_is_named(one: Path) -> None:
    rewrite(one / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(UnsupportedModel, match=r"needs a package that is not here: .*GPTQ"):
        adapter.load(str(one))


def test_what_is_no_decoder(one: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers would name the 200 decoder classes, and import them all to do so."""
    rewrite(one / "config.json", model_type="clip")
    monkeypatch.setattr("transformers.models.auto.auto_factory._LazyAutoMapping.keys", list)
    with pytest.raises(UnsupportedModel, match="is no decoder: transformers has none of model_type 'clip'"):
        adapter.load(str(one))


# ---- code that comes with a model

CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path({mark!r}).touch()
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_code_that_comes_with_a_model_runs_only_if_asked(
    one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "mark"
    (one / "own.py").write_text(CODE.format(mark=str(mark)))
    config = json.loads((one / "config.json").read_text())
    del config["model_type"]  # the code says it
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (one / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    with pytest.raises(UnsupportedModel, match="it brings its own code; pass trust_remote_code=True if you have read"):
        adapter.load(str(one))
    assert not mark.exists()
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    loaded = adapter.load(str(one), trust_remote_code=True)
    assert (type(loaded.model).__name__, mark.exists()) == ("OwnModel", True)
