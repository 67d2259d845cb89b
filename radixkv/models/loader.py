"""Find a model and load it into memory: the bundled one, a local folder or GGUF file, or a name on the hub.

`checkpoint` examines the files first, and `weights.check` compares the loaded weights with the model. `gguf_weights`
loads GGUF files, and `native.files` safetensors of models that have layers of our own. transformers, which takes
seconds to import, is imported only where it is used; its errors become errors that a user can act on.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from radixkv import model_path
from radixkv.device import device_of
from radixkv.errors import InvalidInput, RadixKVError, UnsupportedModel
from radixkv.gguf.architectures import config_of
from radixkv.gguf.header import GGUFHeader, read_header
from radixkv.model_path import BUNDLED, readable
from radixkv.models import checkpoint, file_tokenizer, gguf_weights
from radixkv.models.checkpoint import Checkpoint
from radixkv.models.native import files
from radixkv.models.quantized.kernels import kernels
from radixkv.models.weights.check import check_weights
from radixkv.sizing.kv_size import size_text
from radixkv.sizing.memory import free_memory

_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model",
    "sentencepiece.bpe.model", "tekken.json",
)  # fmt: skip
_SHOWN = 400  # letters of an error of another library

_log = logging.getLogger(__name__)


class Division(NamedTuple):
    """The `share` of the weights that this process holds, and the options by which transformers divides them."""

    share: float = 1.0
    options: Mapping[str, Any] = MappingProxyType({})


WHOLE = Division()


def read(
    name: str,
    *,
    tokenizer: Any | None = None,
    dtype: torch.dtype | str,
    device: torch.device,
    revision: str | None,
    trust_remote_code: bool,
    weights: str = "float32",
    model_code: str = "transformers",
    division: Division = WHOLE,
) -> tuple[Any, Any | None]:
    """Return (model, tokenizer or None); weights come from safetensors or GGUF, and every one of them is in the files.

    With a `tokenizer`, the files of another one are not read. `dtype` "auto" is the dtype of the saved weights, and
    bfloat16 for quantised GGUF. With `weights` other than "float32", linear layers of a GGUF file keep 8 or 4 bits, as
    `gguf_weights.formats` chooses; the layers of other models are quantised later. With `model_code` "auto" the model
    has layers of our own if `native.switches` lists it, else transformers', in this `division`. Raises
    InvalidInput if there is no usable model of this name or its weights do not fit into memory, UnsupportedModel if
    radixkv cannot run the model.
    """
    wanted = _Wanted(name, dtype, device, weights, division)
    folder, revision = folder_of(name, revision)
    local = revision is None
    if model_path.is_gguf(folder):
        return _read_gguf(folder, wanted, tokenizer, own_layers=model_code == "auto")
    place = str(folder) if local else name
    options = {"revision": revision, "trust_remote_code": trust_remote_code, "local_files_only": local}
    with _room_for(name), readable():
        found = checkpoint.examine(folder)
        model = _read_native(found, wanted) if model_code == "auto" else None
        model = (model or _read_by_transformers(found, wanted, place, options)).to(device)
    if tokenizer is None:
        tokenizer = _read_tokenizer(place, folder, options)
    check_tokens(model, tokenizer, name)
    _keep_named_stops(model, tokenizer, found)
    return model, tokenizer


@dataclass(frozen=True)
class _Wanted:
    """The name of a model, and how its weights are to be held; dtype "auto" is the dtype of the saved ones."""

    name: str
    dtype: torch.dtype | str
    device: torch.device
    weights: str
    division: Division = WHOLE

    def check_memory(self, needed: int, half: int) -> None:
        """Refuse weights that do not fit into memory, before the machine starts to swap: they are read, then moved.

        All weights take `needed` bytes in this form, and `half` in a dtype of 16 bits.
        """
        needed, half = (int(each * self.division.share) for each in (needed, half))
        places = {"cpu": free_memory()}
        if device_of(self.device).is_gpu:
            places[str(self.device)] = device_of(self.device).memory()[0]
        kind = str(self.dtype).removeprefix("torch.") if isinstance(self.dtype, torch.dtype) else "they are saved"
        for place, free in places.items():
            if needed > free:
                advice = f"; with dtype='bfloat16' they take {size_text(half)}" if half <= free else ""
                if self.weights in ("int8", "int4"):
                    kind, advice = self.weights, ""
                raise InvalidInput(
                    f"the weights of {self.name!r} take {size_text(needed)} as {kind}, and {size_text(free)} are free "
                    f"on {place}{advice}"
                )


# ---- files


def folder_of(name: str, revision: str | None) -> tuple[Path, str | None]:
    """Return the folder or GGUF file of a model, fetched from the hub if need be, and its commit there.

    Raises InvalidInput if there is none, and for a revision of a local model.
    """
    folder = model_path.find(name)
    if folder is None:
        folder = _fetched(name, revision)
        return folder, folder.name  # the commit: nothing changes between two files
    if revision is not None:
        raise InvalidInput(f"revision={revision!r} is for models on the hub, and {name!r} is here")
    return folder, None


def _fetched(name: str, revision: str | None) -> Path:
    """Fetch the configuration and weights of a hub model, unless they are cached; return their folder."""
    from huggingface_hub import try_to_load_from_cache
    from transformers.utils import cached_file

    maybe: dict[str, Any] = {"_raise_exceptions_for_missing_entries": False}
    bundled = "" if "/" in name else f"; the bundled model is {' or '.join(map(repr, BUNDLED))}"
    if not isinstance(try_to_load_from_cache(name, checkpoint.CONFIG, revision=revision), str):
        _log.warning("%s: there is no folder of that name: looking for it on the hub%s", name, bundled)
    try:
        folder = Path(str(cached_file(name, checkpoint.CONFIG, revision=revision))).parent
        maybe["revision"] = folder.name
        for file in (checkpoint.GENERATION, checkpoint.ADAPTER):
            cached_file(name, file, **maybe)
        for file in checkpoint.weight_names(folder, checkpoint.read_config(folder)):
            if cached_file(name, file, **maybe) is not None:
                for shard in checkpoint.shards(folder, file):
                    cached_file(name, shard, **maybe)
                break
    except InvalidInput:
        raise
    except (OSError, ValueError) as error:
        hint = "; of a repository of GGUF files, download one and give its path" if "gguf" in name.lower() else bundled
        said = f"cannot find model {name!r}: no local folder of that name, and {_text(error)}{hint}"
        raise InvalidInput(said) from error
    return folder


# ---- weights


def _read_native(found: Checkpoint, wanted: _Wanted) -> Any | None:
    """Load the weights into layers of our own; None if `files` does not read them."""
    check_memory = partial(wanted.check_memory, half=found.bytes_in(2))
    return files.read_model(found, wanted.dtype, wanted.weights, check_memory)


def _read_by_transformers(found: Checkpoint, wanted: _Wanted, place: str, options: dict[str, Any]) -> Any:
    """Load the weights into transformers' model."""
    with _own_reports(silent=wanted.name in BUNDLED or threading.current_thread() is not threading.main_thread()):
        empty = checkpoint.described(found, place, options)
        model = _read_quantised(empty, found, wanted) if wanted.weights in ("int8", "int4") else None
        if model is not None:
            return model
        itemsize = wanted.dtype.itemsize if isinstance(wanted.dtype, torch.dtype) else None
        replace(wanted, weights="float32").check_memory(found.bytes_in(itemsize), found.bytes_in(2))
        return _read_model(found, wanted, place, options)


def _read_model(found: Checkpoint, wanted: _Wanted, place: str, options: dict[str, Any]) -> Any:
    """Load the weights as they are; errors of transformers become errors of ours, with their text."""
    from transformers import AutoModelForCausalLM

    name = wanted.name
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            place,
            dtype=wanted.dtype,
            use_safetensors=True,
            attn_implementation="eager",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are reported, and check_weights refuses them
            **options,
            **wanted.division.options,
        )
    except ImportError as error:
        raise UnsupportedModel(f"{name!r} needs a package that is not here: {_text(error)}") from error
    except (ValueError, KeyError) as error:
        if "Unrecognized configuration class" in str(error):
            kind = found.config.get("model_type")
            raise UnsupportedModel(f"{name!r} is no decoder: transformers has none of model_type {kind!r}") from error
        raise UnsupportedModel(f"transformers cannot make a decoder of {name!r}: {_text(error)}") from error
    except Exception as error:
        if _no_memory(error):
            raise
        raise InvalidInput(f"{name!r} cannot be read: {type(error).__name__}: {_text(error)}") from error
    check_weights(model, info, name, found.tensors)
    return model


def _read_quantised(empty: Any | None, found: Checkpoint, wanted: _Wanted) -> Any | None:
    """Load the weights and quantise each when it is read; None if they must be loaded in float32 first.

    Errors of files, which the second way reports, are a reason for None, too.
    """
    if empty is None or kernels() is None:
        return None
    check_memory = partial(wanted.check_memory, half=found.bytes_in(2))
    try:
        from radixkv.models.quantized import on_load  # extends transformers, which may change

        return on_load.read(empty, found, wanted.name, wanted.weights, check_memory)
    except Exception as error:
        if isinstance(error, RadixKVError) or _no_memory(error):
            raise
        said = "%s: weights are loaded in float32, then quantised: %s: %s"
        _log.debug(said, wanted.name, type(error).__name__, error)
        return None


def _read_gguf(file: Path, wanted: _Wanted, tokenizer: Any | None, *, own_layers: bool) -> tuple[Any, Any | None]:
    """Return the model and tokenizer of a GGUF file; all checks precede the reading of weights."""
    from radixkv.models.gguf_tokenizer import stop_token_ids, tokenizer_of

    with _room_for(wanted.name), readable():
        header = read_header(file)
        config = config_of(header)
        dtype = wanted.dtype if isinstance(wanted.dtype, torch.dtype) else getattr(torch, config["dtype"])
        formats = gguf_weights.formats(header, wanted.weights)
        # Blocks may keep their format, so the sizes are of the numbers in `dtype`, whatever `weights` says.
        check_memory = partial(replace(wanted, dtype=dtype, weights="float32").check_memory, half=header.bytes_in(2))
        # At least these bytes. Which layers keep their format is certain when the model exists.
        check_memory(gguf_weights.bytes_of(header, formats, dtype.itemsize))
        if tokenizer is None:
            tokenizer, stops = tokenizer_of(header), stop_token_ids(header)
        else:
            stops = _stops_without_tokenizer(header, config)
        native = files.empty_model(config, dtype) if own_layers else None
        with _own_reports(silent=True) if native is None else nullcontext():
            model = gguf_weights.read_model(header, config, dtype, formats, check_memory, native).to(wanted.device)
    model.generation_config.eos_token_id = stops or None
    check_tokens(model, tokenizer, wanted.name)
    return model, tokenizer


def _stops_without_tokenizer(header: GGUFHeader, config: Mapping[str, Any]) -> list[int]:
    """Return the stop tokens of a GGUF file, or its end of text alone if its own tokenizer is broken or unknown."""
    from radixkv.models.gguf_tokenizer import stop_token_ids

    try:
        return stop_token_ids(header)
    except RadixKVError:
        end = config["eos_token_id"]
        return [] if end is None else [end]


def _text(error: Exception) -> str:
    """Return the text of an error of transformers, shortened; for models with their own code, the advice."""
    text = str(error)
    if "trust_remote_code" in text:
        return "it brings its own code; pass trust_remote_code=True if you have read and trust it"
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else text[:_SHOWN] + " ..."


@contextmanager
def _room_for(name: str) -> Iterator[None]:
    """Turn every out-of-memory error into InvalidInput while this is open."""
    try:
        yield
    except Exception as error:
        if not _no_memory(error):
            raise
        advice = "take another device, or a dtype of 16 bits"
        raise InvalidInput(f"no memory is left for the weights of {name!r}: {advice} ({_text(error)})") from error


def _no_memory(error: Exception) -> bool:
    """Return whether memory ran out: torch raises its own class on a GPU, on a CPU a RuntimeError."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error)


# ---- the tokenizer


def given_tokenizer(source: Any, *, trust_remote_code: bool) -> Any:
    """Return the tokenizer that is to replace the model's own: `source`, or the tokenizer of a folder, GGUF file or hub
    name.

    Raises InvalidInput if `source` is neither, or has no tokenizer that can be read.
    """
    from radixkv.models.gguf_tokenizer import tokenizer_of

    if not isinstance(source, str | os.PathLike):
        from transformers import PreTrainedTokenizerBase

        if isinstance(source, PreTrainedTokenizerBase):
            return source
        raise InvalidInput(_no_tokenizer(source))
    name = model_path.name_of(source)
    folder = model_path.find(name, "tokenizer")
    if folder is not None and model_path.is_gguf(folder):
        if (found := tokenizer_of(read_header(folder))) is None:
            raise InvalidInput(f"{folder} has no tokenizer: give a folder or hub name that has one")
        return found
    place, options = name, {"trust_remote_code": trust_remote_code}
    if folder is not None:
        place, options = str(folder), {**options, "local_files_only": True}
        with readable():
            if not _has_tokenizer(folder):
                raise InvalidInput(f"{folder} has no tokenizer: none of {', '.join(_TOKENIZER_FILES)}")
    else:
        from huggingface_hub import try_to_load_from_cache

        if not isinstance(try_to_load_from_cache(name, "tokenizer_config.json"), str):
            _log.warning("tokenizer %s: there is no folder of that name: looking for it on the hub", name)
    try:
        return _tokenizer(place, folder, options)
    except Exception as error:  # tokenizers' own errors are plain Exceptions
        where = f"in {folder}" if folder is not None else f"{name!r}, of no local folder,"
        raise InvalidInput(f"the tokenizer {where} cannot be read: {_text(error)}") from error


def _no_tokenizer(source: Any) -> str:
    """Return the error for an object that is no tokenizer of transformers, with a remedy if there is a known one."""
    import tokenizers
    from transformers import PreTrainedTokenizerBase

    kind = f"{type(source).__module__}.{type(source).__name__}"
    said = f"tokenizer must be a tokenizer of transformers, or a folder or hub name that has one, not a {kind}"
    if isinstance(getattr(source, "tokenizer", None), PreTrainedTokenizerBase):  # a processor
        return f"{said}: pass its .tokenizer"
    if isinstance(source, tokenizers.Tokenizer):
        return f"{said}: wrap it, transformers.PreTrainedTokenizerFast(tokenizer_object=...)"
    return said


def _read_tokenizer(place: str, folder: Path, options: dict[str, Any]) -> Any | None:
    """Return the model's tokenizer; None if it has none (token ids still work)."""
    local = place == str(folder)
    if local and not _has_tokenizer(folder):
        return None
    try:
        return _tokenizer(place, folder if local else None, options)
    except Exception as error:  # tokenizers' own errors are plain Exceptions
        if not _has_tokenizer(folder):
            return None
        raise InvalidInput(f"the tokenizer in {folder} cannot be read: {_text(error)}") from error


def _tokenizer(place: str, folder: Path | None, options: dict[str, Any]) -> Any:
    """Return the tokenizer of a place, which may be a local folder; raises any Exception of transformers."""

    def by_transformers(**more: Any) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(place, **options, **more)

    own = None if folder is None else file_tokenizer.read(folder, by_transformers)
    return by_transformers() if own is None else own


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / file).is_file() for file in _TOKENIZER_FILES)


def check_tokens(model: Any, tokenizer: Any | None, name: str) -> None:
    """Warn of tokens without an embedding: from a larger tokenizer, or from another model's settings."""
    rows = getattr(model.get_input_embeddings(), "num_embeddings", None)
    if rows is None:
        return
    stops = [each for each in stop_ids(_settings(model)) if each >= rows]
    if stops:
        said = "%s: its generation settings end replies at token %d, and it has %d tokens: they may be another model's"
        _log.warning(said, name, min(stops), rows)
    vocabulary = {} if tokenizer is None else tokenizer.get_vocab()
    beyond = sorted((id_, token) for token, id_ in vocabulary.items() if id_ >= rows)
    if beyond:
        first, token = beyond[0]
        _log.warning(
            "%s: the tokenizer has %d tokens that the model has no embedding for, %r (%d) among them: prompts with "
            "them are refused", name, len(beyond), token, first,
        )  # fmt: skip


def _keep_named_stops(model: Any, tokenizer: Any | None, found: Checkpoint) -> None:
    """Remove the configuration's stop token if it is the default of transformers' class and the files name others.

    If the files name none, the default stays, because transformers would also end a reply there.
    """
    parts = [found.config, *(part for part in found.config.values() if isinstance(part, dict))]
    config = model.config.get_text_config()
    if not any("eos_token_id" in part for part in parts) and stop_ids(_settings(model)) | stop_ids(tokenizer):
        config.eos_token_id = None


def _settings(model: Any) -> Any | None:
    return getattr(model, "generation_config", None)


def stop_ids(settings: Any) -> set[int]:
    """Return the stop tokens that these settings, or this tokenizer, name."""
    ids = getattr(settings, "eos_token_id", None)
    return set(ids) if isinstance(ids, list | tuple) else set() if ids is None else {ids}


# ---- output of transformers


@contextmanager
def _own_reports(*, silent: bool) -> Iterator[None]:
    """Keep transformers from printing its table of weights that do not fit; `silent` also hides the progress bar."""
    from transformers.utils import logging as transformers_logging

    with ExitStack() as after:
        log = logging.getLogger("transformers.modeling_utils")
        log.addFilter(_no_table)
        after.callback(log.removeFilter, _no_table)
        if silent and transformers_logging.is_progress_bar_enabled():
            transformers_logging.disable_progress_bar()
            after.callback(transformers_logging.enable_progress_bar)
        yield


def _no_table(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    return "LOAD REPORT" not in text or "CONVERSION" in text
