"""`radixkv doctor`: check whether radixkv works on this machine with a model, and suggest faster settings.

It loads the model as `Engine.load` does, but makes no pool and starts no thread.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

from radixkv.cli import doctor_weights, model_check
from radixkv.cli.doctor_checks import Finding, language, note, ok, problem, versions
from radixkv.errors import InvalidInput, RadixKVError, UnsafeFolder
from radixkv.sizing.kv_size import size_text

if TYPE_CHECKING:
    import torch

    from radixkv.gguf.header import GGUFHeader
    from radixkv.models.loaded import LayerSpec, LoadedModel
    from radixkv.sizing.memory import PoolSize

_LOAD_SETTINGS = "tokenizer device dtype kv_dtype weights model_code attention revision trust_remote_code"
_UNLIMITED = 1 << 30  # tokens; the checkpoint of a model with a longer context states no limit


def run(arguments: argparse.Namespace) -> int:
    """Print each finding when it is made; return 1 if one of them is a problem, else 0.

    Raises InvalidInput for a block size below 1.
    """
    if arguments.block_size < 1:
        raise InvalidInput(f"--block-size {arguments.block_size}: it must be at least 1")
    findings = []
    for finding in _findings(arguments):
        findings.append(finding)
        if not arguments.json:
            print(finding.line(width=13), flush=True)
    problems = sum(finding.status == "problem" for finding in findings)
    if arguments.json:
        print(json.dumps({"problems": problems, "findings": [asdict(each) for each in findings]}, indent=2))
    return 1 if problems else 0


def _findings(arguments: argparse.Namespace) -> Iterator[Finding]:
    header, refusal = None, None  # of a GGUF file; the reason why the model cannot be loaded
    try:
        header = model_check.check(arguments.model)  # importing torch takes seconds
    except Exception as error:  # any error is a finding
        refusal = error
    yield from versions("gguf" if header is not None else "")
    yield _telemetry()
    if refusal is not None:
        yield _refused(refusal, arguments)
        return
    try:
        import torch
        import transformers  # noqa: F401 - checks that it can be imported
    except ImportError as error:
        yield problem("model", f"nothing can be loaded: {error}")
        return
    yield from _machine(torch.cuda.is_available())
    yield from _ranks(arguments) if arguments.tensor_parallel > 1 else _whole(arguments, header)


def _whole(arguments: argparse.Namespace, header: GGUFHeader | None) -> Iterator[Finding]:
    """Load the model in this process, and report how it runs; `header` belongs to a GGUF file."""
    said: list[str] = []
    try:
        with _listening(said):
            loaded = _load(arguments)
    except Exception as error:  # any error is a finding
        yield _refused(error, arguments)
        return
    yield from _model(loaded, [each.removeprefix(f"{arguments.model}: ") for each in said])
    if header is not None:
        yield _file(header)
    yield doctor_weights.formats(loaded, arguments.weights, header)
    yield _pool(loaded, arguments)
    yield from _lower_tiers(loaded, arguments)
    yield _self_test(loaded)
    if loaded.kv_dtype != "auto":
        yield doctor_weights.of_kv(loaded, arguments.block_size)
    yield from language(loaded)
    yield from doctor_weights.accuracy(loaded, arguments.weights, header, lambda: _in_float32(arguments))
    yield from _faster(loaded)


def _refused(error: Exception, arguments: argparse.Namespace) -> Finding:
    """Return the finding for a model that cannot be loaded; raises the error with --debug."""
    if "debug" in arguments:
        raise error
    text = str(error) if isinstance(error, RadixKVError) else f"{type(error).__name__}: {error}"
    return problem("model", text if arguments.model in text else f"{arguments.model}: {text}")


def _in_float32(arguments: argparse.Namespace) -> LoadedModel:
    """Load the model again, with weights of float32. Its warnings were collected before."""
    with _listening([]):
        return _load(argparse.Namespace(**{**vars(arguments), "weights": "float32"}))


def _load(arguments: argparse.Namespace) -> LoadedModel:
    from radixkv.models.adapter import load

    return load(arguments.model, **{name: getattr(arguments, name) for name in _LOAD_SETTINGS.split()})


def _ranks(arguments: argparse.Namespace) -> Iterator[Finding]:
    """Report what each rank holds, or why the model cannot be divided."""
    from radixkv.cli.doctor_ranks import ranks

    try:
        yield from ranks(arguments, _LOAD_SETTINGS)
    except Exception as error:  # any error is a finding
        yield _refused(error, arguments)


@contextmanager
def _listening(said: list[str]) -> Iterator[None]:
    """Collect the warnings that radixkv logs meanwhile, except for those that other findings repeat."""
    handler = logging.Handler(logging.WARNING)
    handler.addFilter(lambda record: record.name not in ("radixkv.models.quantized.kernels", "radixkv.device"))
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign] # a class for one line
    log = logging.getLogger("radixkv")
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


# ---- the machine


def _telemetry() -> Finding:
    """Check whether radixkv-monitor could attach to an engine of this user."""
    from radixkv.telemetry.socket_paths import own_folder

    if os.environ.get("RADIXKV_MONITOR", "1") == "0":
        return note("telemetry", "switched off by RADIXKV_MONITOR=0: radixkv-monitor and ps see no engine")
    try:
        return ok("telemetry", f"the sockets for radixkv-monitor are in {own_folder()}")
    except UnsafeFolder as error:
        return problem("telemetry", str(error))


def _machine(has_cuda: bool) -> Iterator[Finding]:
    """List the devices and their memory."""
    import torch

    from radixkv.device import unusable_gpu
    from radixkv.sizing.memory import free_memory

    for index in range(torch.cuda.device_count() if has_cuda else 0):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        kind = f"{properties.name}, sm_{properties.major}{properties.minor}"
        yield ok(f"cuda:{index}", f"{kind}, {size_text(free)} of {size_text(total)} free")
    if reason := unusable_gpu():
        yield note("cuda", reason)
    counts = ((_cores(), "core"), (torch.get_num_threads(), "thread"))
    parts = [f"{count} {name}{'s' * (count > 1)}" for count, name in counts]
    yield ok("cpu", f"{', '.join(parts)}, {size_text(free_memory())} of memory free")


def _cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# ---- the model


def _model(loaded: LoadedModel, said: list[str]) -> Iterator[Finding]:
    """Describe the model, the warnings while it was loaded, and each kind of layer."""
    from radixkv.models.architecture import kind_of

    kind, dtype = kind_of(loaded.model), str(loaded.dtype).removeprefix("torch.")
    context = f"context {loaded.max_length:,}" if loaded.max_length < _UNLIMITED else "no limit of context"
    limits = f"{context}, {loaded.vocab_size:,} token ids"
    yield ok("model", f"{loaded.name}: {kind}, {dtype} on {loaded.device}, {limits}")
    for warning in dict.fromkeys(said):
        yield note("model", warning.removeprefix(f"{loaded.name}: "))
    yield doctor_weights.counted(loaded)
    for spec, count in Counter(loaded.layers).items():
        yield ok("layers", f"{count} x {_spec(spec)}")
    if loaded.state:
        count = len({spec.key.layer for spec in loaded.state})
        off = "torch.compile, CUDA graphs, audits and the fallback are off"
        yield ok("layers", f"{count} x recurrent state, {size_text(loaded.state_bytes)} a sequence in all; {off}")
    if loaded.layers:
        yield _attention(loaded)


def _file(header: GGUFHeader) -> Finding:
    """Describe a GGUF file: its size, and the types of its tensors."""
    stored, kinds = 0, Counter[str]()
    for tensor in header.tensors.values():
        stored += tensor.nbytes
        kinds[tensor.type_name] += 1
    types = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    return ok("file", f"GGUF of architecture {header.architecture}, {size_text(stored)} of weights; tensors: {types}")


def _attention(loaded: LoadedModel) -> Finding:
    if loaded.attention == "fallback":
        costs = "each sequence has a forward of its own, and each layer copies its context out of the pool"
        return note("attention", f"fallback, the model's own: {costs}. Hits and answers are the same")
    return ok("attention", f"{loaded.attention}{_why(loaded)}")


def _spec(spec: LayerSpec) -> str:
    parts = [f"{spec.heads} heads over {spec.kv_heads} KV heads, keys {spec.key_dim}, values {spec.value_dim}"]
    if spec.window is not None:
        parts.append(f"window {spec.window:,} (all KV is kept)")
    if spec.chunk is not None:
        parts.append(f"chunks of {spec.chunk:,} (all KV is kept)")
    if spec.softcap is not None:
        parts.append(f"softcap {spec.softcap:g}")
    if spec.sinks:
        parts.append("sinks")
    if spec.source is not None:
        parts.append(f"reads the KV of layer {spec.source}")
    return ", ".join(parts)


def _why(loaded: LoadedModel) -> str:
    """Explain the choice of the attention backend."""
    if loaded.attention == "triton":
        return ": the kernels serve every layer"
    if loaded.attention == "compiled":
        return ": single query rows by compiled functions, rows that share keys by torch"
    reason = _obstacle(loaded)
    return f": {reason}" if reason else ", although the Triton kernels could serve every layer"


def _obstacle(loaded: LoadedModel) -> str | None:
    """Return the reason why the Triton kernels cannot serve this model on this machine; None if they can."""
    from radixkv.attention.triton_backend import shape_obstacle

    reasons = (
        shape_obstacle(spec.shape, spec.heads, loaded.dtype, loaded.device, loaded.kv_dtype) for spec in loaded.layers
    )
    return next((reason for reason in reasons if reason is not None), None)


def _size(
    loaded: LoadedModel, arguments: argparse.Namespace, host_memory: str | None = None, disk: bool = False
) -> PoolSize:
    """Return the size of the pool that `Engine.load` would make. Raises InvalidInput."""
    from radixkv.config import EngineConfig
    from radixkv.models.step_memory import step_memory
    from radixkv.sizing.memory import pool_size

    usual = EngineConfig()
    reserved = arguments.kv_memory == "auto" and step_memory(
        loaded, block_size=arguments.block_size, max_sequences=arguments.max_sequences,
        max_batch_tokens=usual.max_batch_tokens, prefill_chunk=usual.prefill_chunk,
    )  # fmt: skip
    return pool_size(
        arguments.kv_memory, str(loaded.device), bytes_per_block=loaded.bytes_per_token * arguments.block_size,
        bytes_per_state=loaded.state_bytes, max_sequences=arguments.max_sequences,
        state_memory=arguments.state_memory, host_memory=host_memory, reserved=int(reserved), disk=disk,
    )  # fmt: skip


def _pool(loaded: LoadedModel, arguments: argparse.Namespace) -> Finding:
    """Describe the pool that `Engine.load` would make."""
    block = loaded.bytes_per_token * arguments.block_size
    try:
        found = _size(loaded, arguments)
    except InvalidInput as error:
        return problem("pool", str(error))
    blocks, slots = found.num_blocks, found.slots
    tokens = blocks * arguments.block_size
    text = f"{blocks:,} blocks of {arguments.block_size} tokens, {size_text(block)} each: {size_text(blocks * block)}"
    if loaded.state:
        states = f"{slots.rows} sequences at once and {slots.snapshots} snapshots"
        text = f"{text}; {size_text(slots.total * loaded.state_bytes)} of states: {states}"
        if slots.rows < arguments.max_sequences:
            return note(
                "pool", f"{text}; more memory (state_memory, kv_memory) allows more than {slots.rows} sequences"
            )
    if loaded.max_length >= _UNLIMITED:
        return ok("pool", f"{text}, {tokens:,} tokens")
    if tokens < loaded.max_length:
        return note("pool", f"{text}; its {tokens:,} tokens are fewer than the context of {loaded.max_length:,}")
    return ok("pool", f"{text}, {tokens // loaded.max_length:,} whole contexts")


def _lower_tiers(loaded: LoadedModel, arguments: argparse.Namespace) -> Iterator[Finding]:
    """Describe the host memory and the disk that `Engine.load` would add to the pool."""
    from radixkv.sizing.memory import disk_blocks

    block, block_size, disk = loaded.bytes_per_token * arguments.block_size, arguments.block_size, 0
    try:
        if arguments.disk_cache is not None:
            disk = disk_blocks(arguments.disk_memory, block, block_size, loaded.state_bytes)
    except InvalidInput as error:
        yield problem("disk", str(error))
    if arguments.host_memory is None and not disk:
        return
    try:
        blocks = _size(loaded, arguments, arguments.host_memory, disk > 0).host_blocks
    except InvalidInput as error:
        yield problem("host memory", str(error))
        return
    text = f"{blocks:,} more blocks, {blocks * block_size:,} tokens: {size_text(blocks * block)}"
    if not blocks:
        yield ok("host memory", "0: KV that leaves the pool is computed again")
    elif loaded.device.type == "cpu" and not disk:
        yield note("host memory", f"{text}; a larger --kv-memory holds as much in the same memory, without copies")
    else:
        yield ok("host memory", text)
    if disk:
        yield _disk(arguments.disk_cache, disk * block_size)


def _disk(path: str, tokens: int) -> Finding:
    """Check the folder of a disk cache, which has room for `tokens`."""
    from radixkv.disk.folder import DiskFolder
    from radixkv.disk.store import LEAST_FREE, LEAST_SHARE

    try:
        with closing(DiskFolder(path)) as folder:
            place = shutil.disk_usage(folder.path)
    except (InvalidInput, OSError) as error:
        return problem("disk", str(error))
    if place.free < max(LEAST_FREE, LEAST_SHARE * place.total):
        return note("disk", f"only {size_text(place.free)} are free: nothing would be written")
    return ok("disk", f"room for {tokens:,} tokens")


def _self_test(loaded: LoadedModel) -> Finding:
    """Repeat the self-test of loading, and report its error."""
    from radixkv.models.rounding import TOLERANCE
    from radixkv.models.selftest import self_test

    try:
        error = self_test(loaded)
    except RadixKVError as failed:
        return problem("self-test", str(failed))
    stored = "" if loaded.kv_dtype == "auto" else ", with KV as computed"
    allowed = f"({TOLERANCE.get(loaded.dtype, 1e-1):.0e} is allowed){stored}"
    return ok("self-test", f"paged, chunked and shared logits equal the model's own within {error:.1e} {allowed}")


# ---- faster settings


def _faster(loaded: LoadedModel) -> Iterator[Finding]:
    """Suggest settings that would be faster, with the reason."""
    if loaded.device.type == "cpu":
        yield from _faster_on_cpu(loaded.dtype, loaded.attention)
    elif loaded.dtype.itemsize > 2:
        yield note("faster", f"dtype='bfloat16': {loaded.dtype} takes twice the memory and bandwidth, or more")
    if loaded.device.type == "cuda" and loaded.attention == "torch":
        yield note("faster", f"attention='triton': {_obstacle(loaded) or 'it was not asked for'}")


def _faster_on_cpu(dtype: torch.dtype, attention: str) -> Iterator[Finding]:
    import torch

    where = ", with attention in torch" if attention == "torch" else ""
    yield note("faster", f"use a CUDA device: the model runs on the CPU{where}")
    cores, threads = _cores(), torch.get_num_threads()
    if threads < cores:
        limit = ", as OMP_NUM_THREADS sets it" if os.environ.get("OMP_NUM_THREADS") else ""
        yield note("faster", f"more threads: torch uses {threads} of {cores} cores{limit}")
    elif threads > cores:
        yield note("faster", f"fewer threads: torch uses {threads}, but the process has {cores} cores")
    if dtype.itemsize < 4:
        widened = f"attention widens KV in {str(dtype).removeprefix('torch.')} at each step"
        yield note("faster", f"dtype='float32', perhaps: {widened}, and only some CPUs multiply 16 bits fast")
    elif dtype.itemsize > 4:
        yield note("faster", "dtype='float32': float64 takes twice the memory and time")
