"""Tensors of a simulated GPU, and how torch's operators on them are queued.

A tensor's values lie in `backing`, a CPU tensor. Views are made at once, everything else runs later. Sizes come from
the operators' kernels of the meta device, which is the device that torch sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.virtual_gpu.memory import READ, WRITE, Lease, Span, poison, span_of
from tests.virtual_gpu.transfers import copying, to_device, to_host

if TYPE_CHECKING:
    from tests.virtual_gpu.gpu import VirtualGpu

READS_BACK = {"_local_scalar_dense", "equal", "is_nonzero", "item", "allclose"}
BY_VALUES = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "nonzero_static", "bincount"}
FRESH = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"}
WHOLE = {"linear"}  # composite operators of which each is one launch
WITHOUT_VALUES = "a tensor was made where the simulated GPU was not installed, or for the meta device"
OFF_META = {"_grouped_mm"}  # operators whose kernels for the meta device refuse dtypes that CUDA takes
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}


class VirtualTensor(Tensor):
    """A view of an allocation of a simulated GPU."""

    backing: Tensor
    lease: Lease
    gpu: VirtualGpu

    @staticmethod
    def __new__(cls, gpu: VirtualGpu, backing: Tensor, lease: Lease) -> VirtualTensor:
        made: VirtualTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            backing.shape,
            strides=backing.stride(),
            storage_offset=backing.storage_offset(),
            dtype=backing.dtype,
            device=gpu.place,
        )
        made.backing, made.lease, made.gpu = backing, lease, gpu
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        gpu = next(leaf.gpu for leaf in leaves_of((args, kwargs)) if isinstance(leaf, VirtualTensor))
        return run_operator(gpu, func, args, kwargs or {})

    @property
    def plain_meta(self) -> Tensor:
        """A tensor of the same sizes without values."""
        return _meta(self.backing)

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(_with_values(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_with_values(index), value)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> NoReturn:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def __array__(self, dtype: Any = None) -> NoReturn:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def data_ptr(self) -> int:
        return self.gpu.addresses.note(self)

    @property
    def data(self) -> Tensor:
        """The same values, outside of autograd; another tensor may take their place."""
        return self.detach()

    @data.setter
    def data(self, other: VirtualTensor) -> None:
        Tensor.data.__set__(self, other)  # sizes and dtype
        self.backing, self.lease = other.backing, other.lease

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"VirtualTensor({tuple(self.shape)}, {self.dtype})"


def _with_values(index: Any) -> Any:
    """Return an index with tensors of the host for its lists: torch makes tensors of the meta device of them."""
    if isinstance(index, tuple):
        return tuple(_with_values(each) for each in index)
    if isinstance(index, list | range | np.ndarray):
        return torch.as_tensor(np.asarray(index))
    return index


class OperatorMode(TorchDispatchMode):
    """Queues the operators of one thread that make or use tensors of a simulated GPU."""

    def __init__(self, gpu: VirtualGpu) -> None:
        super().__init__()
        self._gpu = gpu

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # a call of torch's, whose guard takes as long as the rest
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") == self._gpu.place or any(issubclass(each, VirtualTensor) for each in types):
            return run_operator(self._gpu, func, args, kwargs)
        return func(*args, **kwargs)


def leaves_of(tree: Any) -> Iterator[Any]:
    """Yield the leaves of nested tuples, lists and dicts, as an operator's arguments are."""
    if isinstance(tree, tuple | list):
        for each in tree:
            yield from leaves_of(each)
    elif isinstance(tree, dict):
        for each in tree.values():
            yield from leaves_of(each)
    else:
        yield tree


def map_leaves(change: Callable[[Any], Any], tree: Any) -> Any:
    """Return the tree with changed leaves."""
    if isinstance(tree, tuple | list):
        changed = [map_leaves(change, each) for each in tree]
        return changed if isinstance(tree, list) else tuple(changed)
    if isinstance(tree, dict):
        return {key: map_leaves(change, each) for key, each in tree.items()}
    return change(tree)


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


@dataclass(frozen=True)
class Operator:
    """The parts of an operator's schema that decide how it is queued."""

    name: str
    is_view: bool
    composite: bool
    written: tuple[tuple[int, str], ...]  # positions and names of the arguments that it writes
    returned: tuple[int | None, ...]  # for each result, the place in `written` of the argument that it is
    draws: bool  # whether it takes a generator


@cache
def _operator(func: Any) -> Operator:
    schema = func._schema
    written, sets = [], []
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append((place, argument.name))
            sets.append(argument.alias_info.before_set)
    returned = []
    for result in schema.returns:
        alias = result.alias_info
        returned.append(sets.index(alias.before_set) if alias is not None and alias.is_write else None)
    return Operator(
        name=schema.name.split("::")[1],
        is_view=func.is_view,
        composite=torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"),
        written=tuple(written),
        returned=tuple(returned),
        draws=any(each.name == "generator" for each in schema.arguments),
    )


def run_operator(gpu: VirtualGpu, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Queue an operator, and return its results."""
    operator = _operator(func)
    gpu.check_context()
    if operator.name == "copy_":
        return _copy_(gpu, func, operator, *args, **kwargs)
    if operator.name == "_to_copy":
        return _to_copy(gpu, func, operator, args[0], kwargs)
    if operator.composite and operator.name not in WHOLE:
        with OperatorMode(gpu):
            return func.decompose(*args, **kwargs)
    if operator.is_view:
        return _view(gpu, func, args, kwargs)
    if operator.name in INDEXED:
        args = (args[0], [_index(gpu, each) for each in args[1]], *args[2:])
    if operator.name in READS_BACK:
        return _read_back(gpu, func, operator, args, kwargs)
    if operator.name in BY_VALUES or (operator.name in INDEXED and any(_is_mask(each) for each in args[1])):
        return _by_values(gpu, func, operator, args, kwargs)
    if operator.name == "_grouped_mm":
        _wait_for_groups(gpu, *args, **kwargs)
    return _queue(gpu, func, operator, args, kwargs)


def _virtual(tree: Any) -> Iterator[VirtualTensor]:
    return (leaf for leaf in leaves_of(tree) if isinstance(leaf, VirtualTensor))


def _values(leaf: Any) -> Any:
    """Return what a CPU computes with: the backing of a tensor."""
    if isinstance(leaf, VirtualTensor):
        return leaf.backing
    assert not isinstance(leaf, Tensor) or not leaf.is_meta, WITHOUT_VALUES
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _sizes(leaf: Any) -> Any:
    return leaf.plain_meta if isinstance(leaf, VirtualTensor) else leaf


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def _index(gpu: VirtualGpu, index: Any) -> Any:
    """Return an index on the device; one of the host is copied, as by CUDA."""
    if index is None or isinstance(index, VirtualTensor):
        return index
    return upload(gpu, index)


def upload(gpu: VirtualGpu, tensor: Tensor, *, non_blocking: bool = False) -> VirtualTensor:
    """Copy a tensor of the host to the device as torch's `to` does."""
    target = _fresh(gpu, _meta(tensor), "a copy to the device")
    to_device(gpu, target, tensor, non_blocking=non_blocking)
    return target


def _fresh(gpu: VirtualGpu, meta: Tensor, name: str) -> VirtualTensor:
    """Allocate a poisoned tensor of the sizes of `meta`."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(meta.shape, meta.stride(), strict=True))
    memory = gpu.allocate(max(reach, 0) * meta.itemsize, name)
    with torch.inference_mode():
        memory.backing = torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device="cpu")
        poison(memory.backing)
    return VirtualTensor(gpu, memory.backing, gpu.lease(memory))


def _view(gpu: VirtualGpu, func: Any, args: Any, kwargs: Any) -> Any:
    """Make a view, which needs no work of the device."""
    base = next(_virtual((args, kwargs)))
    with torch.inference_mode():
        made = func(*map_leaves(_values, args), **map_leaves(_values, kwargs))
    with torch.inference_mode(base.is_inference()):  # torch tracks the views of any other tensor
        return map_leaves(lambda each: VirtualTensor(gpu, each, base.lease) if isinstance(each, Tensor) else each, made)


def _spans(tree: Any, kind: str) -> list[Span]:
    return [span for each in _virtual(tree) for span in span_of(each.lease.memory, each.backing, kind)]


def _check_place(func: Any, tree: Any) -> None:
    """Raise for tensors of the host that an operator cannot take."""
    for leaf in leaves_of(tree):
        if isinstance(leaf, Tensor) and not isinstance(leaf, VirtualTensor) and leaf.ndim:
            assert not leaf.is_meta, WITHOUT_VALUES
            raise RuntimeError(f"Expected all tensors to be on the same device, but {func.name()} has one on the host")


def _queue(gpu: VirtualGpu, func: Any, operator: Operator, args: Any, kwargs: Any) -> Any:
    """Queue an operator whose results have sizes that do not depend on values."""
    if kwargs.get("device") is not None and kwargs["device"] != gpu.place:  # like a tensor here, but on the host
        return func(*map_leaves(_zeros, args), **map_leaves(_zeros, kwargs))
    _check_place(func, (args, kwargs))
    targets = [_argument(args, kwargs, place, name) for place, name in operator.written]
    sized = _remembered(func, args, kwargs)
    many = isinstance(sized, tuple | list)
    metas = list(sized) if many else [sized]
    results: list[Any] = []
    for place, meta in enumerate(metas):
        written = operator.returned[place] if place < len(operator.returned) else None
        if written is not None:
            results.append(targets[written])
        elif isinstance(meta, Tensor):
            results.append(_fresh(gpu, meta, operator.name))
        else:
            results.append(meta)
    if operator.name not in FRESH:
        spans = _spans(targets, WRITE) + _spans((args, kwargs), READ)
        run = _computation(gpu, func, operator, args, kwargs, results)
        made = [each for each in results if isinstance(each, VirtualTensor)]
        gpu.enqueue(operator.name, run, spans + _spans(made, WRITE))
    return type(sized)(results) if many else results[0]


_SIZES: dict[Any, Any] = {}


def _remembered(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the results without values; torch computes them once for the same sizes and numbers."""
    key = func, map_leaves(_key, list(args)).__repr__(), map_leaves(_key, kwargs).__repr__()
    if key not in _SIZES:
        _SIZES[key] = _sized(func, args, kwargs)
    return _SIZES[key]


def _key(leaf: Any) -> Any:
    return (*leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else leaf


def _sized(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the results without values."""
    try:
        return func(*map_leaves(_sizes, args), **map_leaves(_sizes, kwargs))
    except RuntimeError as error:
        if not isinstance(error, NotImplementedError) and _operator(func).name not in OFF_META:
            raise
        with torch.inference_mode():
            made = func(*map_leaves(_zeros, args), **{**map_leaves(_zeros, kwargs), **_on_host(kwargs)})
        return map_leaves(lambda each: _meta(each) if isinstance(each, Tensor) else each, made)


def _zeros(leaf: Any) -> Any:
    if isinstance(leaf, VirtualTensor):
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="cpu").zero_()
    return leaf


def _on_host(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"device": torch.device("cpu")} if kwargs.get("device") is not None else {}


def _argument(args: Any, kwargs: Any, place: int, name: str) -> Any:
    return args[place] if place < len(args) else kwargs.get(name)


def _computation(
    gpu: VirtualGpu, func: Any, operator: Operator, args: Any, kwargs: Any, results: list[Any]
) -> Callable[[], None]:
    """Return the work: compute on the values, then copy to the memory of the results that are new."""
    host_args, host_kwargs = map_leaves(_values, args), {**map_leaves(_values, kwargs), **_on_host(kwargs)}
    if operator.draws and host_kwargs.get("generator") is None:
        host_kwargs["generator"] = gpu.generator
    targets = [each.backing if isinstance(each, VirtualTensor) else None for each in results]
    new = [place >= len(operator.returned) or operator.returned[place] is None for place in range(len(results))]

    def run() -> None:
        values = host_args
        if operator.name == "histc":  # a CPU counts floats only
            values = (host_args[0].double(), *host_args[1:])
        made = func(*values, **host_kwargs)
        made = made if isinstance(made, tuple | list) else (made,)
        for place, (is_new, target, each) in enumerate(zip(new, targets, made, strict=True)):
            # A CPU's kernel may leave out a result for derivatives, as that of embedding bags does.
            if is_new and target is not None and (place == 0 or target.shape == each.shape):
                target.copy_(each)

    return run


def _read_back(gpu: VirtualGpu, func: Any, operator: Operator, args: Any, kwargs: Any) -> Any:
    """Answer an operator whose result is a number of the host."""
    gpu.enqueue("reading a number back", lambda: None, _spans((args, kwargs), READ), kind="copy")
    gpu.host_waits(f"reading a number back ({operator.name})")
    with torch.inference_mode():
        return func(*map_leaves(_values, args), **map_leaves(_values, kwargs))


def _wait_for_groups(
    gpu: VirtualGpu, one: Tensor, other: Tensor, offs: Tensor | None = None, bias: Any = None, out_dtype: Any = None
) -> None:
    """Read the offsets of a grouped product back, as torch does where CUTLASS does not compute it."""
    fast = gpu.capability in ((9, 0), (10, 0)) and {one.dtype, other.dtype, out_dtype} <= {torch.bfloat16, None}
    if offs is not None and not fast:
        gpu.enqueue("a copy to the host", lambda: None, _spans(offs, READ), kind="copy")
        gpu.host_waits("a copy of the offsets of groups to the host")


def _by_values(gpu: VirtualGpu, func: Any, operator: Operator, args: Any, kwargs: Any) -> Any:
    """Run an operator whose result's size depends on values, for which CUDA waits."""
    gpu.enqueue(operator.name, lambda: None, _spans((args, kwargs), READ))
    gpu.host_waits(f"a size that depends on values ({operator.name})")
    with torch.inference_mode():
        made = func(*map_leaves(_values, args), **map_leaves(_values, kwargs))
    if operator.written:
        return _argument(args, kwargs, *operator.written[0])

    def keep(each: Any) -> Any:
        if not isinstance(each, Tensor):
            return each
        target = _fresh(gpu, _meta(each), operator.name)
        gpu.enqueue(operator.name, copying(target.backing, each), _spans(target, WRITE))
        return target

    return map_leaves(keep, made)


def _copy_(
    gpu: VirtualGpu, func: Any, operator: Operator, target: Tensor, source: Tensor, non_blocking: bool = False
) -> Any:
    """Copy between tensors, of which one at least is on the device."""
    if isinstance(target, VirtualTensor) and isinstance(source, VirtualTensor):
        return _queue(gpu, func, operator, (target, source), {})
    if isinstance(target, VirtualTensor):
        to_device(gpu, target, source, non_blocking=non_blocking)
    else:
        assert isinstance(source, VirtualTensor)
        to_host(gpu, target, source, non_blocking=non_blocking, what="a copy to the host")
    return target


def _to_copy(gpu: VirtualGpu, func: Any, operator: Operator, source: Tensor, kwargs: dict[str, Any]) -> Any:
    """Copy to a device or dtype."""
    non_blocking = bool(kwargs.pop("non_blocking", False))
    there = kwargs.get("device") is None or torch.device(kwargs["device"]) == gpu.place
    if isinstance(source, VirtualTensor) and there:
        return _queue(gpu, func, operator, (source,), {**kwargs, "device": gpu.place})
    if isinstance(source, VirtualTensor):
        sized = func(source.plain_meta, **{**kwargs, "device": gpu.place, "pin_memory": None})
        if non_blocking:  # torch then allocates pinned memory
            target = gpu.pinned(sized.shape, sized.dtype)
        else:
            target = torch.empty_strided(sized.shape, sized.stride(), dtype=sized.dtype, device="cpu")
        to_host(gpu, target, source, non_blocking=non_blocking, what="a copy to the host")
        return target
    target = _fresh(gpu, func(_meta(source), **{**kwargs, "device": gpu.place}), "a copy to the device")
    to_device(gpu, target, source, non_blocking=non_blocking)
    return target
