"""Weights that do not fit into memory are refused before they are read, or at the latest when it runs out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from radixkv.errors import InvalidInput
from radixkv.models import checkpoint, loader
from radixkv.sizing.kv_size import size_text
from tests.models.checkpoints.files import read
from tests.models.conftest import FAMILIES, make


def test_weights_that_do_not_fit_are_not_begun_with(one: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = sum(each.numel() for each in make(FAMILIES["llama"]()).state_dict().values())
    monkeypatch.setattr(loader, "free_memory", lambda: 4 * numbers)
    assert read(one)[0].dtype == torch.float32
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("read"))
    monkeypatch.setattr(loader, "free_memory", lambda: 4 * numbers - 1)
    needed, free = size_text(4 * numbers), size_text(4 * numbers - 1)
    said = f"take {needed} as float32, and {free} are free on cpu; with dtype='bfloat16' they "
    with pytest.raises(InvalidInput, match=f"{said}take {size_text(2 * numbers)}$"):
        read(one)
    with pytest.raises(InvalidInput, match=f"take {size_text(8 * numbers)} as float64"):
        read(one, torch.float64)
    monkeypatch.setattr(loader, "free_memory", lambda: 2 * numbers - 1)
    with pytest.raises(InvalidInput, match=r"are free on cpu$"):
        read(one, torch.bfloat16)


def test_a_card_is_asked_for_its_memory_too(one: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000, 2000))
    saved = checkpoint.examine(one).bytes_in(None)
    with pytest.raises(InvalidInput, match=r"as they are saved, and 1000 B are free on cuda:1$"):
        loader._Wanted("it", "auto", torch.device("cuda:1"), "float32").check_memory(saved, saved // 2)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("no"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
        OSError(12, "Cannot allocate memory"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_running_out_of_memory_says_so(one: Path, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    places = (
        (checkpoint, "safe_open"),  # maps the whole file
        (transformers.AutoModelForCausalLM, "from_pretrained"),
        (transformers.LlamaForCausalLM, "to"),
    )
    for owner, name in places[isinstance(error, OSError) :]:  # whose message says that a file cannot be read
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            with pytest.raises(InvalidInput, match="no memory is left for the weights of") as raised:
                read(one)
            assert "cannot find" not in str(raised.value)
