"""Bound launches pass the driver exactly what Triton would pass: the same compiled kernel, grid, stream and arguments.

Triton specialises and launches as on a GPU. Its compiler is replaced: what it is asked to compile stands for the code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("triton")

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

from radixkv.attention import plan
from radixkv_kernels import attention, blocks, launches, layers, sampling
from radixkv_kernels.attention import Kind

KINDS = (Kind(16, 16, 4, 2, 2), Kind(64, 16, 4, 2, 1))
BLOCK = 16


@dataclass
class Code:
    """What Triton was asked to compile, in place of the code."""

    asked: tuple[Any, ...]
    gpu: Gpu
    function: int = 7
    packed_metadata: tuple[int, ...] = (4, 1, 0)

    def launch_metadata(self, *_: Any) -> None:
        """Return no metadata."""

    def run(self, x: int, y: int, z: int, stream: int, function: int, packed: Any, *rest: Any) -> None:
        """Note a launch; `rest` has metadata, two hooks, and the arguments."""
        assert (function, packed, rest[0]) == (self.function, self.packed_metadata, None)
        values = [each.data_ptr() if isinstance(each, Tensor) else each for each in rest[3:]]
        self.gpu.launched.append((self.asked, (x, y, z), stream, values))


@dataclass
class Gpu:
    """A Triton driver whose launches are noted."""

    number: int
    stream: int = 0
    launched: list[tuple[Any, ...]] = field(default_factory=list)
    inspected: int = 0  # launches whose arguments Triton inspected

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return self.number

    def get_current_stream(self, device: int) -> int:
        return self.stream

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@pytest.fixture(scope="module")
def gpu() -> Iterator[Gpu]:
    """Let Triton launch on a GPU whose number no other test uses."""
    made = Gpu(1 << 20)

    def compiled(self: Any, key: Any, signature: Any, device: Any, constants: Any, options: Any, *_: Any) -> Code:
        code = Code((self.fn.__name__, str(key)), made)
        self.device_caches[device][0][key] = code
        return code

    def run(self: Any, *args: Any, **named: Any) -> Any:
        made.inspected += 1
        return original(self, *args, **named)

    original = jit.JITFunction.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "_active", made)
        patch.setattr(jit.JITFunction, "_do_compile", compiled)
        patch.setattr(jit.JITFunction, "run", run)
        yield made


@pytest.fixture(autouse=True)
def _fresh(gpu: Gpu) -> Iterator[None]:
    yield
    attention._BOUND.clear()
    fused = layers.ADD_NORM_ROWS, layers.ROTATE_AND_WRITE_ROWS, layers.SILU_MULTIPLY_ROWS
    for launcher in (blocks.WRITE_SLOTS, *fused, sampling.DRAW_ROWS):
        launcher.forget()


def launches_of(gpu: Gpu, call: Any, *, bound: bool) -> list[tuple[Any, ...]]:
    """Return the launches of a call, by Triton itself unless `bound`."""
    gpu.launched.clear()
    with mock.patch.object(launches, "device", launches.device if bound else lambda: None):
        call()
    return list(gpu.launched)


BF16, FP32 = torch.bfloat16, torch.float32


def rows(layout: str, heads: int, tokens: int, dim: int, dtype: torch.dtype = BF16, offset: int = 0) -> Tensor:
    """Return [heads, tokens, dim] at `offset` numbers from a boundary of 64 bytes."""
    width = heads + 3 if layout == "part of a product" else heads
    flat = torch.empty(offset + tokens * width * dim, dtype=dtype)[offset:]
    if layout == "heads first":
        return flat.view(heads, tokens, dim)
    return flat.view(tokens, width, dim)[:, :heads].transpose(0, 1)


def pool(layout: str, heads: int, dim: int, dtype: torch.dtype = BF16, block_size: int = BLOCK) -> Tensor:
    if layout == "heads first":
        return torch.empty(heads, 3, block_size, dim, dtype=dtype)
    return torch.empty(3, heads, block_size, dim, dtype=dtype).transpose(0, 1)


ATTENTION = {
    "lengths": ([1, 30], [1], [7], [1, 1]),
    "split": (16, None),
    "window": (None, 1, 16, 30),
    "kv_heads": (2, 1),
    "group": (2, 1),
    "dim": (16, 24),
    "block_size": (16, 32),
    "query": ("tokens first", "heads first", "part of a product"),
    "query_dtype": (BF16, FP32),
    "query_offset": (0, 1, 8),
    "key_pool": ("blocks first", "heads first"),
    "value_pool": ("blocks first", "heads first"),
    "key_dtype": (BF16, FP32),
    "value_dtype": (BF16, FP32),
    "output": ("tokens first", "heads first", "part of a product"),
    "output_dtype": (BF16, FP32),
    "output_offset": (0, 1),
    "plan_offset": (0, 1),
    "sinks": (None, BF16, FP32),
    "sinks_offset": (0, 1),
    "scale": (0.1, 1.0),
    "softcap": (None, 5.0, 6.0),
}
"""The properties of a call: the first value is the usual one."""


def attending(lengths: list[int], kv_heads: int, dim: int, **of: Any) -> Any:
    """Return a call of `attention.attend` with these properties."""
    tokens, heads, device = sum(lengths), kv_heads * of["group"], torch.device("cpu")
    work = plan.build([[0, 1]] * len(lengths), [32] * len(lengths), lengths, of["window"], block_size=of["block_size"])
    step = attention.plan(
        work, heads=heads, kv_heads=kv_heads, chosen=KINDS, device=device, processors=4, split=of["split"]
    )
    if of["plan_offset"]:
        step = dataclasses.replace(step, rows=tuple(torch.cat([each[:1], each])[1:] for each in step.rows))
    query = rows(of["query"], heads, tokens, dim, of["query_dtype"], of["query_offset"])
    output = rows(of["output"], heads, tokens, dim, of["output_dtype"], of["output_offset"]).transpose(0, 1)
    sinks = of["sinks"] and torch.empty(heads + 1, dtype=of["sinks"])[of["sinks_offset"] :]
    pools = [pool(of[f"{one}_pool"], kv_heads, dim, of[f"{one}_dtype"], of["block_size"]) for one in ("key", "value")]
    options = {"scale": of["scale"], "softcap": of["softcap"], "sinks": sinks, "output": output}
    return lambda: attention.attend(query, *pools, step, **options)


WRITE = {
    "tokens": (3, 1, 16, 33),
    "heads": (8, 1, 3),
    "key_dim": (16, 1, 80),
    "value_dim": (16, 1, 80),
    "block_size": (16, 32),
    "key": ("tokens first", "heads first", "part of a product"),
    "value": ("tokens first", "heads first", "part of a product"),
    "key_dtype": (BF16, FP32),
    "value_dtype": (BF16, FP32),
    "key_offset": (0, 1, 8),
    "value_offset": (0, 1, 8),
    "key_pool": ("blocks first", "heads first"),
    "value_pool": ("blocks first", "heads first"),
    "key_stored": (BF16, FP32),
    "value_stored": (BF16, FP32),
    "slots_offset": (0, 1, 2),
    "scaled": (False, True),
}


def writing(tokens: int, heads: int, block_size: int, **of: Any) -> Any:
    """Return a call of `blocks.write` with these properties."""
    new, pools, scales = [], [], []
    for one in ("key", "value"):
        dim = of[f"{one}_dim"]
        new.append(rows(of[one], heads, tokens, dim, of[f"{one}_dtype"], of[f"{one}_offset"]))
        stored = torch.int8 if of["scaled"] else of[f"{one}_stored"]
        pools.append(pool(of[f"{one}_pool"], heads, dim, stored, block_size))
        scales.append(pool(of[f"{one}_pool"], heads, 1, torch.float16, block_size))
    slots = torch.empty(tokens + 2, dtype=torch.int64)[of["slots_offset"] :][:tokens]
    return lambda: blocks.write(*new, *pools, slots, scales if of["scaled"] else ())


ROTATION = {
    "tokens": (3, 1, 16),
    "heads": (2, 4),
    "kv_heads": (1, 2),
    "dim": (16, 32),
    "block_size": (16, 32),
    "dtype": (BF16, FP32),
    "rows_offset": (0, 1, 8),
    "rows_padding": (0, 1, 8),
    "rotated": (True, False),
    "angles_stride": (1, 0),
    "angles_offset": (0, 1),
    "normed": (False, True),
    "weight_offset": (0, 1),
    "epsilon": (1e-6, 1e-5),
    "key_pool": ("blocks first", "heads first"),
    "value_pool": ("blocks first", "heads first"),
    "slots_offset": (0, 1, 2),
    "scaled": (False, True),
}


def rotating(tokens: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, **of: Any) -> Any:
    """Return a call of `layers.rotate_and_write` with these properties."""
    width = (heads + 2 * kv_heads) * dim
    stride = width + of["rows_padding"]
    product = torch.empty(tokens * stride + 8, dtype=dtype)[of["rows_offset"] :][: tokens * stride]
    angles = torch.empty(tokens * dim + 1, dtype=dtype)[of["angles_offset"] :]
    angles = angles.as_strided((tokens, dim), (of["angles_stride"] * dim, 1), angles.storage_offset())
    weight = torch.empty(dim + 1, dtype=dtype)[of["weight_offset"] :][:dim]
    layouts, stored = (of["key_pool"], of["value_pool"]), torch.int8 if of["scaled"] else dtype
    pools = [pool(layout, kv_heads, dim, stored, of["block_size"]) for layout in layouts]
    scales = [pool(layout, kv_heads, 1, torch.float16, of["block_size"]) for layout in layouts if of["scaled"]]
    slots = torch.empty(tokens + 2, dtype=torch.int64)[of["slots_offset"] :][:tokens]
    options = {"cosines": angles, "sines": angles} if of["rotated"] else {}
    options |= {"query_weight": weight, "key_weight": weight} if of["normed"] else {}
    rows = product.view(tokens, stride)[:, :width]
    return lambda: layers.rotate_and_write(rows, heads, *pools, slots, scales, epsilon=of["epsilon"], **options)


ROWS = {
    "tokens": (3, 1, 16),
    "width": (64, 24, 2048),
    "dtype": (BF16, FP32),
    "offset": (0, 1, 8),
    "weight_offset": (0, 1),
    "residual_offset": (0, 1),
    "residual": (True, False),
    "epsilon": (1e-6, 1e-5),
}


def norming(tokens: int, width: int, dtype: torch.dtype, **of: Any) -> Any:
    """Return a call of `layers.add_norm`, whose result is not compared: it is allocated in each call."""
    hidden, residual, weight = (
        torch.empty(tokens * width + 8, dtype=dtype)[of[offset] :][: tokens * width]
        for offset in ("offset", "residual_offset", "weight_offset")
    )
    options = {"residual": residual.view(tokens, width)} if of["residual"] else {}
    return lambda: layers.add_norm(hidden.view(tokens, width), weight[:width], of["epsilon"], **options)


def multiplying(tokens: int, width: int, dtype: torch.dtype, **of: Any) -> Any:
    """Return a call of `layers.silu_multiply`."""
    pairs = torch.empty(2 * tokens * width + 8, dtype=dtype)[of["offset"] :][: 2 * tokens * width]
    return lambda: layers.silu_multiply(pairs.view(tokens, 2 * width))


DRAW = {"count": (3, 8), "vocab": (160, 161), "offset": (0, 1)}


def drawing(count: int, vocab: int = 160, offset: int = 0) -> Any:
    """Return a draw of `count` rows with logits at `offset` numbers from a boundary."""
    logits = torch.empty(offset + count * vocab)[offset:].view(count, vocab)
    kinds, keys, top_k, top_p = (torch.empty(count, dtype=torch.int64) for _ in range(4))
    temperature, least, best = (torch.empty(count) for _ in range(3))
    return lambda: sampling.draw(logits, best, kinds, keys, top_k, temperature, top_p.view(torch.float64), least)


def changed(values: dict[str, tuple[Any, ...]], base: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the usual properties, with those of `base`, with one of them changed."""
    usual = {name: some[0] for name, some in values.items()} | base
    for name, some in values.items():
        yield from ({**usual, name: value} for value in some if value != usual[name])


@pytest.mark.parametrize("base", [{}, {"sinks": BF16, "window": 30, "softcap": 5.0}], ids=["plain", "all features"])
def test_attention_launches_what_triton_would(gpu: Gpu, base: dict[str, Any]) -> None:
    """A call is launched twice, then one that differs in one property, twice, and then the first one again."""
    usual = attending(**{name: some[0] for name, some in ATTENTION.items()} | base)
    for properties in changed(ATTENTION, base):
        other = attending(**properties)
        for call in (usual, usual, other, other, usual):
            expected, found = (launches_of(gpu, call, bound=bound) for bound in (False, True))
            assert expected and list(map(comparable, expected)) == list(map(comparable, found)), properties


def comparable(launch: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a launch without the address of its partials, which are allocated in each call.

    A merge without sinks reads no address for them.
    """
    (name, _), _, _, values = launch
    partials = 0 if name.endswith("merge_partials") else 11
    found = [*values[:partials], values[partials + 1] - values[partials], *values[partials + 2 :]]
    if partials == 0 and not values[-1]:
        found[4] = None
    return (*launch[:3], found)


@pytest.mark.parametrize(
    ("call_of", "values", "base", "made"),
    [
        (writing, WRITE, {}, None),
        (rotating, ROTATION, {}, None),
        (rotating, ROTATION, {"normed": True}, None),
        (norming, ROWS, {}, 3),
        (multiplying, ROWS, {}, 1),
        (drawing, DRAW, {}, 1),
    ],
)
def test_other_kernels_launch_what_triton_would(
    gpu: Gpu, call_of: Any, values: dict[str, tuple[Any, ...]], base: dict[str, Any], made: int | None
) -> None:
    """The address `made` is that of a new tensor, and is not compared."""
    usual = call_of(**{name: some[0] for name, some in values.items()} | base)
    for properties in changed(values, base):
        other = call_of(**properties)
        for call in (usual, usual, other, other, usual):
            expected, found = (launches_of(gpu, call, bound=bound) for bound in (False, True))
            assert len(expected) == len(found) == 1, properties
            if made is not None:
                expected[0][3][made] = found[0][3][made] = None
            assert expected == found, properties


def layer(tokens: int = 3, offset: int = 0, heads: str = "tokens first") -> Any:
    """Return a call of one layer: it writes KV and attends, with new tensors."""
    query = rows(heads, 4, tokens, 16, offset=offset)
    pools = [pool("blocks first", 2, 16) for _ in range(2)]
    work = plan.build([[0, 1]], [32], [tokens], block_size=BLOCK)
    step = attention.plan(work, heads=4, kv_heads=2, chosen=KINDS, device=torch.device("cpu"), processors=4, split=16)

    def call() -> None:
        blocks.write(query[:2], query[2:], *pools, torch.arange(tokens))
        attention.attend(query, *pools, step, scale=0.1)

    return call


def inspected(gpu: Gpu, call: Any) -> int:
    """Return the launches of a call whose arguments Triton inspects, of three: the write, the tiles, and the merge."""
    before = gpu.inspected
    assert len(launches_of(gpu, call, bound=True)) == 3
    return gpu.inspected - before


def test_triton_inspects_only_the_first_launch_of_a_kind(gpu: Gpu) -> None:
    assert inspected(gpu, layer()) == 3
    assert [inspected(gpu, layer(tokens)) for tokens in (3, 1, 7)] == [0, 0, 0]


def test_an_address_that_is_not_aligned_is_left_to_triton(gpu: Gpu) -> None:
    inspected(gpu, layer())
    assert inspected(gpu, layer(offset=1)) == 3
    assert inspected(gpu, layer(offset=1)) == 3
    assert inspected(gpu, layer()) == 0


def test_each_gpu_has_its_own_kernels_and_launches_follow_the_stream(gpu: Gpu) -> None:
    inspected(gpu, layer())
    with mock.patch.object(gpu, "number", gpu.number + 1):
        assert inspected(gpu, layer()) == 3
    with mock.patch.object(gpu, "stream", 5):
        assert inspected(gpu, layer()) == 0
    assert [stream for _, _, stream, _ in gpu.launched] == [5, 5, 5]


def test_a_profiler_sees_every_launch(gpu: Gpu) -> None:
    inspected(gpu, layer())
    with mock.patch.object(triton.knobs.runtime, "launch_enter_hook", print):
        assert inspected(gpu, layer()) == 3
    assert inspected(gpu, layer()) == 0


def test_strides_that_depend_on_the_tokens_do_not_fill_the_memory(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "MOST", 4)
    for tokens in range(1, 12):
        call = layer(tokens, heads="heads first")
        assert inspected(gpu, call) == 3 and inspected(gpu, call) == 0
        assert max(len(attention._BOUND), len(blocks.WRITE_SLOTS)) <= 4


def test_draws_of_any_number_of_rows_are_compiled_and_inspected_once(gpu: Gpu) -> None:
    compiled = set()
    launches_of(gpu, drawing(2), bound=True)
    for count in (1, 2, 3, 7, 64):
        before = gpu.inspected
        [(code, grid, _, _)] = launches_of(gpu, drawing(count), bound=True)
        compiled.add(code)
        assert gpu.inspected == before and grid == (count, 1, 1)
    assert len(compiled) == 1
    for count in (1, 2, 3):
        compiled.update(code for code, *_ in launches_of(gpu, drawing(count), bound=False))
    assert len(compiled) == 1
