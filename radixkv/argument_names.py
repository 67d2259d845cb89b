"""Say which argument a caller meant, in the error about a name that a call does not have.

`FOREIGN` has the names of other libraries. A name that is not in it is compared with the names that exist here. All of
this runs after a call has failed, and costs a call that succeeds nothing.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from functools import wraps
from typing import Any, TypeVar

Class = TypeVar("Class")

FOREIGN = {
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "min_new_tokens": "min_tokens",
    "temp": "temperature",
    "do_sample": "temperature",
    "num_return_sequences": "n",
    "num_beams": "beam_width",
    "repeat_penalty": "repetition_penalty",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "eos_token_id": "stop_token_ids",
    "response_format": "json_schema",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "sampling_params": "params",
    "gpu_memory_utilization": "kv_memory",
    "mem_fraction_static": "kv_memory",
    "max_model_len": "num_blocks",
    "n_ctx": "num_blocks",
    "max_num_seqs": "max_sequences",
    "max_num_batched_tokens": "max_batch_tokens",
    "chunked_prefill_size": "prefill_chunk",
    "enable_prefix_caching": "prefix_cache",
    "swap_space": "host_memory",
    "quantization": "weights",
    "load_in_8bit": "weights",
    "torch_dtype": "dtype",
    "device_map": "device",
    "n_gpu_layers": "device",
    "model_path": "model",
    "system_prompt": "system",
}
"""name in transformers, vLLM, SGLang, llama.cpp or OpenAI's API -> the nearest name here."""


_ADVICE: dict[str, str] = {}  # field of an explained class -> advice


def explained(advice: str) -> Callable[[type[Class]], type[Class]]:
    """Decorate a dataclass: an error about an unknown field names the right one.

    `advice` is for fields of it that a caller passes elsewhere, with {} for the argument.
    """

    def decorated(cls: type[Class]) -> type[Class]:
        begin: Any = cls.__init__

        @wraps(begin)
        def checked(self: Class, *args: Any, **given: Any) -> None:
            try:
                begin(self, *args, **given)
            except TypeError:
                refuse_unknown(cls.__name__, names, given)
                raise

        names = [each.name for each in fields(cls)]  # type: ignore[arg-type]
        cls.__init__ = checked  # type: ignore[assignment,method-assign]
        _ADVICE.update(dict.fromkeys(names, advice))
        return cls

    return decorated


def refuse_unknown(call: str, known: Iterable[str], given: Mapping[str, Any]) -> None:
    """Raise TypeError with advice if a name in `given` is not `known` to the call of that name."""
    known = list(known)
    unknown = next((each for each in given if each not in known), None)
    if unknown is not None:
        said = f"{call} has no argument {_shown(unknown, given[unknown])}"
        raise TypeError(said + _advice(unknown, given[unknown], known)) from None


def _advice(unknown: str, value: Any, known: list[str]) -> str:
    near = difflib.get_close_matches(unknown, known, 1) or difflib.get_close_matches(unknown, _ADVICE, 1)
    meant = unknown if unknown in _ADVICE else FOREIGN.get(unknown) or "".join(near)
    if meant in known:
        return f": did you mean {meant}?"
    if meant in _ADVICE:
        return f": {_ADVICE[meant].format(_shown(meant, value) if meant == unknown else f'{meant}=...')}"
    return f"; it takes {', '.join(known)}"


def _shown(name: str, value: Any) -> str:
    return f"{name}={reprlib.repr(value)}"
