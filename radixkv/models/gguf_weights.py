"""Load the weights of a GGUF file into a model, each parameter once and in its final dtype.

A tensor is read in chunks that are dequantised, restored and cast, so memory holds the finished weights and one chunk.
Weights of linear layers and embeddings may keep their 8 or 4 bits instead: `formats` chooses, from the tensors' types.
The file is read, not mapped, because the pages of a map count as memory of the process.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from io import BufferedReader
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from radixkv.errors import InvalidInput, UnsupportedModel
from radixkv.gguf.header import GGUFHeader, GGUFTensor, file_version
from radixkv.gguf.placements import Placement, placements, some
from radixkv.models.identity import Piece
from radixkv.models.native.files import fill
from radixkv.models.native.layers import NativeModel
from radixkv.models.quantized.kernels import BLOCKS, GROUP, Format, QuantizedWeights, kernels, stored_bytes
from radixkv.models.quantized.layers import replace_layers, replaceable

_CHUNK = 1 << 18  # numbers dequantised at once: a megabyte in float32, which stays in the cache of a core
_LARGE = 64 << 20  # bytes of a file that takes more than a second to load
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The types of tensors that are not quantised."""

Raw = np.ndarray[Any, np.dtype[np.uint8]]
Dequantise = Callable[[Raw], Tensor]  # [rows, bytes] to [rows, numbers]
Advance = Callable[[int], object]
Formats = Mapping[str, Format]
_OUTER = {"token_embd.weight", "output.weight"}  # the embedding and the head


def formats(header: GGUFHeader, weights: str) -> dict[str, Format]:
    """Return the format of each tensor that may keep 8 or 4 bits, by name; all others become floats.

    `weights` "auto" chooses formats for quantised types only, "float32" for none. "int8" and "int4" also quantise
    floats, the embedding and the head to no less than 8 bits. Blocks of Q8_0, Q4_0 and Q4_1 are always kept. Other
    quantised types get 8 bits, which none of them exceeds. Without compiled products, no tensor has a format.
    """
    found: dict[str, Format] = {}
    for name, tensor in header.tensors.items():
        if len(tensor.shape) != 2 or tensor.shape[1] % GROUP or weights == "float32":
            continue
        if tensor.type_name in BLOCKS:
            found[name] = BLOCKS[tensor.type_name]
        elif tensor.type_name not in FLOATS or weights == "int8" or (weights == "int4" and name in _OUTER):
            found[name] = Format.INT8
        elif weights == "int4":
            found[name] = Format.INT4_MIN
    return found if found and kernels() is not None else {}


def bytes_of(header: GGUFHeader, formats: Formats, itemsize: int) -> int:
    """Return the bytes of all weights: of those in `formats` as stored, of the others with `itemsize` per number."""
    return sum(
        stored_bytes(each.shape[0], each.shape[1], formats[name]) if name in formats else each.numbers * itemsize
        for name, each in header.tensors.items()
    )


def read_model(
    header: GGUFHeader,
    config: Mapping[str, Any],
    dtype: torch.dtype,
    formats: Formats | None = None,
    check_memory: Callable[[int], None] = lambda _: None,
    native: NativeModel | None = None,
) -> Any:
    """Return the model of a file on the CPU, with parameters in `dtype`: `native`, or transformers' model.

    `config` is `config_of` the header, and `native` a model of it on the meta device. transformers' has eager
    attention, and is built twice. Tensors in `formats` that belong to plain linear layers or embeddings are stored in
    their format, in modules of `quantized.layers`. Blocks of the same format are copied, other types are dequantised
    and rounded again. `check_memory` gets the bytes of all weights before the first is read, and may raise.
    A progress bar is shown on a terminal if the file is large. Raises UnsupportedModel for an architecture, a tensor or
    a tensor type that radixkv does not read. Raises InvalidInput for tensors that do not fit the metadata, and for a
    file that changed after its header was read. Costs one reading of the file and the dequantisation of its weights by
    numpy, about 10 ns of CPU time per weight.
    """
    empty: Any = _empty_model(header, config, dtype) if native is None else native
    places, parameters = placements(header, config), dict(empty.named_parameters())
    _check_fit(header, places, parameters)
    modules = replaceable(empty) if formats else {}
    kept = _kept(formats or {}, places, modules)
    check_memory(bytes_of(header, kept, dtype.itemsize))
    small = {}
    for name, format in kept.items():
        outputs, inputs = header.tensors[name].shape
        small[places[name].parameter] = QuantizedWeights(outputs, inputs, format)
    weights = {
        name: torch.empty(each.shape, dtype=each.dtype) for name, each in parameters.items() if name not in small
    }
    _read_weights(header, places, weights, small)
    model = _with_weights(empty, weights, small, header)
    replace_layers(model, small, modules)
    return model


def _read_weights(
    header: GGUFHeader,
    places: Mapping[str, Placement],
    weights: Mapping[str, Tensor],
    small: Mapping[str, QuantizedWeights],
) -> None:
    """Read the tensors of a file into parameters and quantised weights, both by the parameter's name."""
    dequantise = _dequantisers(header, [name for name in places if not _is_copied(header, places[name], name, small)])

    def read(file: BufferedReader, tensor: GGUFTensor) -> None:
        place = places[tensor.name]
        if place.parameter in small:
            _store(small[place.parameter], file, tensor, place, dequantise.get(tensor.type_name))
        else:
            _fill(weights[place.parameter], file, tensor, place, dequantise[tensor.type_name])

    _read_files(header, [header.tensors[name] for name in places], read)


def _kept(formats: Formats, places: Mapping[str, Placement], modules: Collection[str]) -> Formats:
    """Return the formats of the tensors that are stored in them, by the names of the tensors."""
    return {
        name: formats[name]
        for name, place in places.items()
        if name in formats and place.parameter in modules and place.keeps_blocks
    }


def _read_files(
    header: GGUFHeader, tensors: Iterable[GGUFTensor], read: Callable[[BufferedReader, GGUFTensor], None]
) -> None:
    """Call `read` with each tensor and its open file, in the order of the files' bytes. Raises InvalidInput."""
    in_order = sorted(tensors, key=lambda each: (each.file, each.offset))
    with _progress(header) as advance:
        for path, stored in groupby(in_order, key=lambda each: each.file):
            try:
                with path.open("rb") as file:
                    for tensor in stored:
                        read(file, tensor)
                        advance(tensor.nbytes)
                    if file_version(file) != header.versions[path]:
                        raise InvalidInput(f"{path} was written or replaced while it was read: load it again")
            except OSError as error:
                raise InvalidInput(f"{path} cannot be read: {error.strerror}: check its disk") from error


# ---- the model


def _empty_model(header: GGUFHeader, config: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """Return the model without weights, on the meta device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                AutoConfig.for_model(**config), dtype=dtype, attn_implementation="eager"
            )
    except Exception as error:  # of validation, which has classes of its own
        text = " ".join(str(error).split())[:400]
        raise UnsupportedModel(f"{header.path}: transformers cannot make a model of its metadata: {text}") from error


def _check_fit(header: GGUFHeader, places: Mapping[str, Placement], parameters: Mapping[str, Tensor]) -> None:
    """Refuse tensors without a parameter, parameters without a tensor, and other shapes than the parameters have."""
    surplus = [name for name, place in places.items() if place.parameter not in parameters]
    if surplus:
        raise UnsupportedModel(
            f"{header.path}: the model that its metadata describe has no place for {some(surplus)}, and would answer "
            "otherwise without: load the safetensors that the file was made from"
        )
    for name, place in places.items():
        wanted = list(parameters[place.parameter].shape)
        if place.half is not None:
            wanted[1] //= 2
        if (found := list(header.tensors[name].shape)) != wanted:
            raise InvalidInput(
                f"{header.path}: {name} has the shape {found}, and the metadata ask for {wanted}: fetch it again"
            )
    filled = Counter(place.parameter for place in places.values())
    halved = {place.parameter for place in places.values() if place.half is not None}
    missing = [name for name in parameters if filled[name] != 1 + (name in halved)]
    if missing:
        raise UnsupportedModel(
            f"{header.path}: no tensor fills {some(missing)}, which would be random: fetch the model elsewhere"
        )


def _with_weights(empty: Any, weights: Mapping[str, Tensor], small: Collection[str], header: GGUFHeader) -> Any:
    """Return a model around these tensors, which are not copied: `empty`, or another one of its class for transformers.

    There the parameters `small` get zeros that take no memory.
    """
    if isinstance(empty, NativeModel):
        fill(empty, weights)
        empty.sources = tuple(Piece(each.file, each.offset, each.nbytes) for each in header.tensors.values())
        return empty
    zeros = {name: torch.zeros((), dtype=empty.dtype).expand(empty.get_parameter(name).shape) for name in small}
    model, info = type(empty).from_pretrained(
        None,
        config=empty.config,
        state_dict={**weights, **zeros},
        dtype=empty.dtype,
        attn_implementation="eager",
        output_loading_info=True,
    )
    wrong = {str(name) for names in info.values() for name in names}
    if wrong:
        raise UnsupportedModel(f"{header.path}: this release of transformers does not accept {some(wrong)}")
    return model


# ---- its weights


def _is_copied(header: GGUFHeader, place: Placement, name: str, small: Mapping[str, QuantizedWeights]) -> bool:
    """Return whether the blocks of a tensor are stored as they are."""
    return place.parameter in small and BLOCKS.get(header.tensors[name].type_name) == small[place.parameter].format


def _dequantisers(header: GGUFHeader, names: Collection[str]) -> dict[str, Dequantise]:
    """Return the conversion to floats of these tensors' types; raises UnsupportedModel for types without one."""
    found: dict[str, Dequantise] = {}
    for tensor in (header.tensors[name] for name in names):
        if tensor.type_name not in found:
            found[tensor.type_name] = _dequantiser(header, tensor)
    return found


def _dequantiser(header: GGUFHeader, tensor: GGUFTensor) -> Dequantise:
    if tensor.type_name in FLOATS:
        dtype = FLOATS[tensor.type_name]
        return lambda raw: torch.from_numpy(raw).view(dtype)
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError as error:
        raise UnsupportedModel(
            f"{header.path} has weights of type {tensor.type_name}, which the package gguf dequantises: "
            "pip install 'radixkv[gguf]'"
        ) from error
    try:
        kind = GGMLQuantizationType(tensor.type_id)
        dequantize(np.zeros((1, tensor.nbytes // (tensor.numbers // tensor.shape[-1])), np.uint8), kind)
    except (NotImplementedError, ValueError) as error:
        raise UnsupportedModel(
            f"{header.path}: {tensor.name} has type {tensor.type_name}, which the package gguf does not dequantise: "
            "fetch the model in another quantisation"
        ) from error
    return lambda raw: torch.from_numpy(dequantize(raw, kind))


def _fill(
    parameter: Tensor, file: BufferedReader, tensor: GGUFTensor, place: Placement, dequantise: Dequantise
) -> None:
    """Read a tensor into the rows of a parameter that it fills."""
    if parameter.ndim == 1:
        parts = [parameter[:, None] if place.head_rows else parameter[None]]
    else:
        parts = list(parameter) if parameter.ndim == 3 else [parameter]  # one part per expert
    if place.half is not None:
        parts = [part.chunk(2)[place.half] for part in parts]
    row_bytes = tensor.nbytes // sum(len(part) for part in parts)
    step = max(1, _CHUNK // parts[0].shape[1] // place.step) * place.step
    buffer = np.empty((min(step, len(parts[0])), row_bytes), np.uint8)
    file.seek(tensor.offset)
    for part in parts:
        for start in range(0, len(part), step):
            rows = part[start : start + step]
            raw = _read(file, tensor, buffer[: len(rows)])
            with np.errstate(all="ignore"):  # NaN and infinity are found when the model is tested
                values = dequantise(raw)
                rows.copy_(torch.from_numpy(place.restore(values.float().numpy())) if place.changes else values)


def _store(
    weights: QuantizedWeights, file: BufferedReader, tensor: GGUFTensor, place: Placement, dequantise: Dequantise | None
) -> None:
    """Read a tensor into quantised weights: copy its blocks, or dequantise them and round again."""
    copied = BLOCKS.get(tensor.type_name) == weights.format
    step = max(1, _CHUNK // weights.inputs // place.step) * place.step
    buffer = np.empty((min(step, weights.outputs), tensor.nbytes // weights.outputs), np.uint8)
    file.seek(tensor.offset)
    for start in range(0, weights.outputs, step):
        raw = _read(file, tensor, buffer[: weights.outputs - start])
        if copied:
            weights.store_blocks(place.reorder(raw), start)
            continue
        assert dequantise is not None
        with np.errstate(all="ignore"):  # NaN and infinity are found when the model is tested
            weights.quantise(torch.from_numpy(place.restore(dequantise(raw).float().numpy())), start)


def _read(file: BufferedReader, tensor: GGUFTensor, buffer: Raw) -> Raw:
    """Fill a buffer with the next bytes of a tensor, and return it."""
    if file.readinto(buffer.data) != buffer.nbytes:
        raise InvalidInput(f"{tensor.file} ended within {tensor.name}: fetch or copy it again")
    return buffer


def _progress(header: GGUFHeader) -> AbstractContextManager[Advance]:
    """Show the bytes read of large files, but not in a thread: another one may use the terminal meanwhile."""
    total = sum(each.nbytes for each in header.tensors.values())
    if total < _LARGE or threading.current_thread() is not threading.main_thread():
        return nullcontext(lambda nbytes: None)
    return byte_bar(f"reading {header.path.name}", total)


@contextmanager
def byte_bar(text: str, total: int) -> Iterator[Advance]:
    """Show a bar for `total` bytes on stderr if that is a terminal; yield a function that adds bytes to it."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(text, total=total)
        yield lambda nbytes: bar.advance(task, nbytes)
