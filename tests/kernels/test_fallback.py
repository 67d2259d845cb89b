"""The choice of a backend; if Triton is missing or cannot run, torch attends, with one warning."""

from __future__ import annotations

import re
import shutil
import sysconfig
from pathlib import Path

import pytest
import torch

from radixkv import Engine
from radixkv.attention import plan, triton_backend
from radixkv.attention.kv_store import KVStore, LayerShape
from radixkv.errors import InvalidInput, UnsupportedModel
from radixkv.models import adapter, attention_interface
from radixkv.models.loaded import LayerSpec, LoadedModel
from radixkv.models.selftest import self_test
from tests.attention.batches import random_batch


@pytest.fixture(autouse=True)
def _nothing_was_said() -> None:
    triton_backend._warn.cache_clear()


def test_without_triton_torch_attends_writes_and_copies(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(triton_backend, "TRITON", False)
    case = random_batch(3, block_size=4, shape=LayerShape(2, 8, 8), group=2, sequences=4, decode=True, adjacent=True)
    work = plan.build(case.tables, case.kv_lengths, case.query_lengths, block_size=4)
    for _ in range(3):
        output = triton_backend.attend(case.store, 0, case.query, work, scale=0.4)
    torch.testing.assert_close(output, case.expected_output(scale=0.4), rtol=0, atol=1e-12)
    store = KVStore([LayerShape(1, 2, 2)], 2, 4)
    triton_backend.write(store, 0, torch.tensor([1]), torch.ones(1, 1, 2), torch.ones(1, 1, 2))
    triton_backend.copy(store, [(0, 1)])
    assert store.keys[0][0, 1, 1].tolist() == [1, 1]
    assert caplog.messages == ["attention runs in torch, not in Triton: Triton is not installed"]


def test_a_cpu_is_no_place_for_triton() -> None:
    pytest.importorskip("triton")
    assert triton_backend.layer_obstacle(KVStore([LayerShape(1, 2, 2)], 2, 4), 1) == "Triton does not run on cpu"


CUDA = torch.device("cuda")
LAYERS = [LayerSpec(4, 2, 64, 64), LayerSpec(8, 2, 64, 64)]


@pytest.fixture
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(triton_backend, "_device", lambda device: (132, 9, 0))


@pytest.mark.usefixtures("_gpu")
def test_auto_is_triton_on_cuda_where_it_serves_every_layer(caplog: pytest.LogCaptureFixture) -> None:
    assert attention_interface.choose_backend("auto", LAYERS, torch.bfloat16, CUDA) == "triton"
    assert attention_interface.choose_backend("auto", LAYERS, torch.bfloat16, torch.device("cpu")) == "torch"
    assert attention_interface.choose_backend("torch", LAYERS, torch.bfloat16, CUDA) == "torch"
    assert not caplog.messages
    wide = [*LAYERS, LayerSpec(256, 1, 64, 64)]
    assert attention_interface.choose_backend("auto", wide, torch.bfloat16, CUDA) == "torch"
    assert caplog.messages == [
        "attention runs in torch, not in Triton: 256 query heads share a kv head, at most 128 fit into a tile"
    ]


@pytest.mark.usefixtures("_gpu")
@pytest.mark.parametrize("dims", [(257, 64), (64, 512)])
def test_heads_that_outgrow_the_tiles_are_left_to_torch(dims: tuple[int, int]) -> None:
    shape = LayerShape(1, *dims)
    expected = f"heads of {max(dims)} numbers do not fit into a tile, at most 256 do"
    assert triton_backend.shape_obstacle(shape, 1, torch.bfloat16, CUDA) == expected
    assert triton_backend.shape_obstacle(LayerShape(1, 256, 256), 1, torch.bfloat16, CUDA) is None


@pytest.fixture
def slim(_gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A GPU in an image without compiler and headers; returns the folder of Triton's cache."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(sysconfig, "get_path", lambda name, scheme: str(tmp_path))
    return tmp_path / "cache"


def test_a_missing_compiler_is_named_before_a_kernel_runs(slim: Path, caplog: pytest.LogCaptureFixture) -> None:
    reason = "Triton cannot compile its launches: install a C compiler (gcc or clang) and the headers of Python (python"
    assert attention_interface.choose_backend("auto", LAYERS, torch.bfloat16, CUDA) == "torch"
    assert [said.startswith(f"attention runs in torch, not in Triton: {reason}") for said in caplog.messages] == [True]
    with pytest.raises(InvalidInput, match=re.escape(reason)):
        attention_interface.check_backend("triton", CUDA)


def test_each_missing_part_is_named_alone(slim: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (slim.parent / "Python.h").touch()
    monkeypatch.setenv("CC", "icx")
    assert triton_backend.missing_compiler().endswith("install a C compiler (icx)")
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    assert triton_backend.missing_compiler() == ""
    (slim.parent / "Python.h").unlink()
    assert "install the headers of Python" in triton_backend.missing_compiler()
    (slim / "KEY").mkdir(parents=True)
    (slim / "KEY" / "cuda_utils.so").touch()
    assert triton_backend.missing_compiler() == ""


@pytest.mark.usefixtures("_gpu")
def test_triton_where_it_cannot_run_is_refused_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInput, match=r"attention='triton' cannot run here: Triton does not run on cpu"):
        Engine.load("/no/such/folder", attention="triton", device="cpu")
    with pytest.raises(InvalidInput, match=r"do not store torch\.float64"):
        attention_interface.choose_backend("triton", LAYERS, torch.float64, CUDA)
    with pytest.raises(InvalidInput, match="attention='cuda': allowed are 'auto', 'torch', 'triton'"):
        Engine.load("/no/such/folder", attention="cuda")
    monkeypatch.setattr(triton_backend, "TRITON", False)
    with pytest.raises(InvalidInput, match="Triton is not installed"):
        Engine.load("/no/such/folder", attention="triton")


@pytest.mark.parametrize("asked", ["auto", "triton"])
def test_a_model_that_fails_with_triton_runs_in_torch_unless_triton_was_asked_for(
    asked: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(loaded: LoadedModel) -> float:
        if loaded.attention == "triton":
            raise UnsupportedModel("it differs")
        return self_test(loaded)

    monkeypatch.setattr(adapter, "tested", failing)
    monkeypatch.setattr(attention_interface, "check_backend", lambda asked, device: None)
    monkeypatch.setattr(attention_interface, "choose_backend", lambda *args: "triton")
    if asked == "triton":
        with pytest.raises(UnsupportedModel, match="it differs"):
            adapter.load("tiny", attention=asked)
    else:
        assert adapter.load("tiny", attention=asked).attention == "torch"
        assert caplog.messages == ["tiny: attention runs in torch: with Triton, it differs"]
