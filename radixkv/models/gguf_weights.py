"""Load the weights of a GGUF file into a model of transformers, each parameter once and in its final dtype.

A tensor is read in chunks that are dequantised, restored and cast, so memory holds the finished weights and one chunk.
The file is read, not mapped, because the pages of a map count as memory of the process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from radixkv.errors import InvalidInput, UnsupportedModel
from radixkv.gguf.header import GGUFHeader, GGUFTensor, file_version
from radixkv.gguf.placements import Placement, placements, some

_CHUNK = 1 << 18  # numbers dequantised at once: a megabyte in float32, which stays in the cache of a core
_LARGE = 64 << 20  # bytes of a file that takes more than a second to load
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

Raw = np.ndarray[Any, np.dtype[np.uint8]]
Dequantise = Callable[[Raw], Tensor]  # [rows, bytes] to [rows, numbers]
Advance = Callable[[int], object]


def read_model(header: GGUFHeader, config: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """Return the model of a file on the CPU, with parameters in `dtype` and eager attention; `config` is `config_of`.

    A progress bar is shown on a terminal if the file is large. Raises UnsupportedModel for an architecture, a tensor or
    a tensor type that radixkv does not read. Raises InvalidInput for tensors that do not fit the metadata, and for a
    file that changed after its header was read. Costs one reading of the file and the dequantisation of its weights by
    numpy, about 10 ns of CPU time per weight.
    """
    places = placements(header, config)
    empty = _empty_model(header, config, dtype)
    _check_fit(header, places, dict(empty.named_parameters()))
    dequantise = _dequantisers(header)
    weights = {name: torch.empty(each.shape, dtype=each.dtype) for name, each in empty.named_parameters()}
    tensors = sorted((header.tensors[name] for name in places), key=lambda each: (each.file, each.offset))
    with _progress(header) as advance:
        for path, stored in groupby(tensors, key=lambda each: each.file):
            try:
                with path.open("rb") as file:
                    for tensor in stored:
                        place = places[tensor.name]
                        _fill(weights[place.parameter], file, tensor, place, dequantise[tensor.type_name])
                        advance(tensor.nbytes)
                    if file_version(file) != header.versions[path]:
                        raise InvalidInput(f"{path} was written or replaced while it was read: load it again")
            except OSError as error:
                raise InvalidInput(f"{path} cannot be read: {error.strerror}: check its disk") from error
    return _with_weights(empty, weights, header)


# ---- the model


def _empty_model(header: GGUFHeader, config: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """Return the model without weights, on the meta device."""
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


def _with_weights(empty: Any, weights: dict[str, Tensor], header: GGUFHeader) -> Any:
    """Return a model of the class and configuration of `empty` around these tensors, which are not copied."""
    model, info = type(empty).from_pretrained(
        None,
        config=empty.config,
        state_dict=weights,
        dtype=empty.dtype,
        attn_implementation="eager",
        output_loading_info=True,
    )
    wrong = {str(name) for names in info.values() for name in names}
    if wrong:
        raise UnsupportedModel(f"{header.path}: this release of transformers does not accept {some(wrong)}")
    return model


# ---- its weights


def _dequantisers(header: GGUFHeader) -> dict[str, Dequantise]:
    """Return the conversion to floats of each tensor type; raises UnsupportedModel for types without one."""
    found: dict[str, Dequantise] = {}
    for tensor in header.tensors.values():
        if tensor.type_name not in found:
            found[tensor.type_name] = _dequantiser(header, tensor)
    return found


def _dequantiser(header: GGUFHeader, tensor: GGUFTensor) -> Dequantise:
    if tensor.type_name in _FLOATS:
        dtype = _FLOATS[tensor.type_name]
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
            raw = buffer[: len(rows)]
            if file.readinto(raw.data) != raw.nbytes:
                raise InvalidInput(f"{tensor.file} ended within {tensor.name}: fetch or copy it again")
            with np.errstate(all="ignore"):  # NaN and infinity are found when the model is tested
                values = dequantise(raw)
                rows.copy_(torch.from_numpy(place.restore(values.float().numpy())) if place.changes else values)


@contextmanager
def _progress(header: GGUFHeader) -> Iterator[Advance]:
    """Show the bytes read on a terminal, for large files; yields the function to call with the bytes of each tensor."""
    total = sum(each.nbytes for each in header.tensors.values())
    if total < _LARGE:
        yield lambda nbytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(f"reading {header.path.name}", total=total)
        yield lambda nbytes: bar.advance(task, nbytes)
