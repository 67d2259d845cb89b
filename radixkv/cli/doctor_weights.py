"""Describe the weights of a model for `radixkv doctor`: their formats with the reason, and the accuracy.

The accuracy of weights of 8 and 4 bits is the KL
divergence of the next token's distribution from the one that the same weights give in float32. The accuracy of KV is
measured alike.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import radixkv
from radixkv.cli.doctor_checks import Finding, note, ok
from radixkv.errors import InvalidInput, RadixKVError
from radixkv.sizing.kv_size import size_text

if TYPE_CHECKING:
    from torch import Tensor

    from radixkv.gguf.header import GGUFHeader
    from radixkv.models.loaded import LoadedModel

_TEXT = Path(radixkv.__file__).parent / "assets" / "english.txt"
_MOST_TOKENS = 512  # of the text
_COMPARE_S = 4.0  # time of the comparison, as far as a step is not longer
_LEAST = 16  # tokens
_MOST_LOGITS = 1 << 25  # of each of the two models: 128 MiB
_MOST_FLOAT32 = 8 << 30  # bytes of a model in float32 that is loaded for the comparison alone
_CLOSE = 1e-2  # nats; int8 has a fifth of it on small models
_GROUP = 16  # rows that are compared at a time in float64


# ---- formats


def counted(loaded: LoadedModel) -> Finding:
    """Count the weights in memory; a tied head counts twice if it was repacked."""
    from radixkv.models.quantized.layers import quantized_weights
    from radixkv.models.weights.size import repacked, weight_bytes

    numbers = sum(each.numel() for each in loaded.model.parameters()) + sum(repacked(loaded))
    kinds = Counter[str]()
    for each in quantized_weights(loaded.model):
        kinds[f"{each.format.bits} bits"] += each.inputs * each.outputs
    few = "".join(f", {count:,} of them in {bits}" for bits, count in sorted(kinds.items(), reverse=True))
    return ok("weights", f"{numbers + kinds.total():,} numbers in memory, {size_text(weight_bytes(loaded))}{few}")


def formats(loaded: LoadedModel, weights: str, header: GGUFHeader | None) -> Finding:
    """Name the format of each kind of tensor, and the reason; `weights` is the setting, `header` the header of a GGUF
    file.

    It is a note if weights were to have 8 or 4 bits and have none.
    """
    from radixkv.models.quantized.layers import quantized_weights

    found = quantized_weights(loaded.model)
    if not found:
        finding, reason = _reason_for_floats(loaded, weights, header)
        return finding("formats", f"{str(loaded.dtype).removeprefix('torch.')}: {reason}")
    model: Any = loaded.model
    outer = {
        id(small): small
        for module in (model.get_input_embeddings(), model.get_output_embeddings())
        if (small := getattr(module, "quantized", None)) is not None
    }
    kinds = {
        "embedding and head": Counter(each.format.description for each in outer.values()),
        "linear layers": Counter(each.format.description for each in found if id(each) not in outer),
    }
    parts = [f"{kind} {_shares(counts)}" for kind, counts in kinds.items() if counts]
    return ok("formats", f"{', '.join(parts)}, all else float32: {_reason_for_bits(weights, header)}")


def _shares(counts: Counter[str]) -> str:
    """Return the formats of one kind of tensor, with the number of tensors if there are several formats."""
    if len(counts) == 1:
        return next(iter(counts))
    return " and ".join(f"{name} ({count})" for name, count in counts.most_common())


def _reason_for_floats(
    loaded: LoadedModel, weights: str, header: GGUFHeader | None
) -> tuple[Callable[[str, str], Finding], str]:
    """Return the reason why no weight has 8 or 4 bits, and whether it is a note."""
    import torch

    from radixkv.models.gguf_weights import FLOATS
    from radixkv.models.quantized.kernels import obstacle

    if weights == "float32":
        return ok, "weights='float32' was asked for"
    if loaded.device.type != "cpu" or loaded.dtype != torch.float32:
        return ok, "weights of 8 and 4 bits are for float32 on a CPU"
    wanted = weights != "auto" or (
        header is not None and any(each.type_name not in FLOATS for each in header.tensors.values())
    )
    reason = obstacle()
    if wanted:
        return note, reason or "no layer is a plain one whose inputs are a multiple of 32"
    if reason is not None:
        return ok, f"no setting changes that, because for 8 and 4 bits {reason}"
    return ok, "'auto' keeps the bits of quantised GGUF files only; weights='int8' takes about a quarter of the memory"


def _reason_for_bits(weights: str, header: GGUFHeader | None) -> str:
    """Return the reason for the chosen formats."""
    asked = f"weights={weights!r}"
    if header is None:
        return f"{asked} rounds the weights of the files"
    kept, rounded = _types(header, weights)
    parts = [f"blocks of {' and '.join(kept)} are as in the file"] if kept else []
    if rounded:
        parts.append(f"weights of {' and '.join(rounded)} are rounded ({asked})")
    return ", ".join(parts)


def _types(header: GGUFHeader, weights: str) -> tuple[list[str], list[str]]:
    """Return the types of a GGUF file whose blocks are kept, and those whose weights are rounded to other blocks."""
    from radixkv.models.gguf_weights import formats as chosen
    from radixkv.models.quantized.kernels import BLOCKS

    types = {header.tensors[name].type_name: format for name, format in chosen(header, weights).items()}
    kept = [name for name, format in types.items() if BLOCKS.get(name) == format]
    return sorted(kept), sorted(set(types) - set(kept))


def _text_ids(loaded: LoadedModel) -> Sequence[int]:
    """Return the token ids of the text in the package that the model has embeddings for; none without a tokenizer."""
    if loaded.codec is None:
        return []
    return [each for each in loaded.codec.encode(_TEXT.read_text("utf-8")) if each < loaded.vocab_size]


# ---- accuracy


def accuracy(
    loaded: LoadedModel, weights: str, header: GGUFHeader | None, load_float32: Callable[[], LoadedModel]
) -> Iterator[Finding]:
    """Compare weights of 8 and 4 bits with float32 over a text of the package; nothing for other weights.

    If all blocks of a GGUF file were kept, the layers of `loaded` are turned into float32 for it, for good. Otherwise
    `load_float32` loads the original weights.
    """
    from radixkv.models.quantized.layers import quantized_weights

    found = quantized_weights(loaded.model)
    if not found:
        return
    kept = header is not None and not _types(header, weights)[1]
    try:
        ids = _text_ids(loaded)[: min(_MOST_TOKENS, _MOST_LOGITS // loaded.vocab_size, loaded.max_length)]
        if len(ids) < _LEAST:
            raise InvalidInput("there is no tokenizer for the text")
        _check_memory(sum(each.inputs * each.outputs * 4 for each in found), kept=kept)
        yield _compared(loaded, ids, None if kept else load_float32)
    except (RadixKVError, MemoryError, RuntimeError) as error:
        yield note("accuracy", f"the KL divergence from float32 was not measured: {error}")


def of_kv(loaded: LoadedModel, block_size: int) -> Finding:
    """Compare the pool's format with KV as computed over the text, and with itself in short chunks, as a hit does."""
    try:
        ids = _text_ids(loaded)[: min(_MOST_TOKENS, _MOST_LOGITS // loaded.vocab_size, loaded.max_length)]
        if len(ids) < _LEAST or loaded.state:
            raise InvalidInput("it has recurrent state" if loaded.state else "there is no tokenizer for the text")
        with _busy("comparing the formats of KV"):
            true = _pool_logits(replace(loaded, kv_dtype="auto"), ids, len(ids), block_size)
            mine = _pool_logits(loaded, ids, len(ids), block_size)
            cut = _pool_logits(loaded, ids, _LEAST, block_size)
    except (RadixKVError, MemoryError, RuntimeError) as error:
        return note("KV", f"the KL divergence of {loaded.kv_dtype} was not measured: {error}")
    (loss, same), (by_hit, same_hit) = _divergence(mine, true), _divergence(cut, mine)
    text = f"{len(ids)} positions: mean KL divergence {loss:.1e} nats from KV as computed, same most probable token in"
    hits = f"in chunks of {_LEAST}, as after hits, {by_hit:.1e} and {same_hit:.1%}"
    return (ok if loss <= _CLOSE else note)("KV", f"{loaded.kv_dtype}, {text} {same:.1%}; {hits}")


def _pool_logits(loaded: LoadedModel, ids: Sequence[int], chunk: int, block_size: int) -> Tensor:
    """Return the logits [len(ids), vocab] of a text that is computed over a pool, in chunks."""
    import numpy as np
    import torch

    from radixkv.models.loaded import SequenceInput
    from radixkv.models.runner import Runner

    tokens, count = np.array(ids, np.int32), len(ids)
    table = np.arange(-(-count // block_size), dtype=np.int32)
    runner, rows = Runner(loaded, len(table), block_size), []
    for start in range(0, count, chunk):
        end = min(start + chunk, count)
        given = tokens[start:end], start, np.arange(start, end), table[: -(-end // block_size)]
        rows.append(runner.run([SequenceInput(*given, logit_rows=end - start)]).roll(-1, 0))  # the last row came first
    return torch.cat(rows)[:, : loaded.vocab_size]


def _check_memory(needed: int, *, kept: bool) -> None:
    """Raise InvalidInput if weights in float32 do not fit, or would take long to load."""
    from radixkv.sizing.memory import free_memory

    if needed > (free := free_memory()):
        raise InvalidInput(f"in float32 the weights take {size_text(needed)}, and {size_text(free)} are free")
    if not kept and needed > _MOST_FLOAT32:
        raise InvalidInput(
            f"in float32 the weights take {size_text(needed)}, and more than {size_text(_MOST_FLOAT32)} load long"
        )


def _compared(loaded: LoadedModel, ids: Sequence[int], load_float32: Callable[[], LoadedModel] | None) -> Finding:
    """Compare as many positions of `ids` as take some seconds; a note if the two models differ much."""
    from radixkv.models.packed import unpack
    from radixkv.models.quantized.layers import quantized_weights

    shown = "comparing the weights with float32"
    with _busy(shown):
        began = time.perf_counter()
        _logits(loaded, ids[:_LEAST])
        a_token = (time.perf_counter() - began) / _LEAST
        ids = ids[: max(_LEAST, int(_COMPARE_S / a_token))]
        small = _logits(loaded, ids)
    if load_float32 is None:
        unpack(loaded.model)
        assert not quantized_weights(loaded.model)
        other, whose = loaded, "its own weights in float32"
    else:
        other, whose = load_float32(), "the float32 weights of the files"
    with _busy(shown):
        divergence, same = _divergence(small, _logits(other, ids))
    text = f"{len(ids)} positions of English text: mean KL divergence {divergence:.1e} nats from {whose}"
    finding = ok if divergence <= _CLOSE else note
    return finding("accuracy", f"{text}, and the same most probable token in {same:.1%}")


def _logits(loaded: LoadedModel, ids: Sequence[int]) -> Tensor:
    """Return the logits [len(ids), vocab] of one forward by the model's own attention."""
    import torch

    from radixkv.models.attention_interface import ForwardSignature, own_attention

    tokens = torch.tensor(ids)
    with torch.inference_mode(), own_attention(loaded.model):
        logits: Tensor = ForwardSignature.of(loaded.model).logits(
            loaded.model, tokens, torch.arange(len(ids)), use_cache=False
        )
    return logits[:, : loaded.vocab_size]


def _divergence(found: Tensor, expected: Tensor) -> tuple[float, float]:
    """Return the mean KL divergence of `found` from `expected` in nats, and the share of rows with the same maximum.

    Both are logits [rows, vocab]; computed in float64.
    """
    total = 0.0
    for start in range(0, len(found), _GROUP):
        ours, theirs = (each[start : start + _GROUP].double().log_softmax(-1) for each in (found, expected))
        total += float((theirs.exp() * (theirs - ours)).sum())
    same = (found.argmax(-1) == expected.argmax(-1)).double().mean()
    return max(total / len(found), 0.0), float(same)


@contextmanager
def _busy(text: str) -> Iterator[None]:
    """Show on a terminal that a measurement runs."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(text):
        yield
