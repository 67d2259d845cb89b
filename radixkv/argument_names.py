"""Say which argument a caller meant, in the error about a name that a call does not have.

This runs after a call has failed. Names of other libraries are in a table, others are compared with the names here.
"""

from __future__ import annotations

import difflib
import inspect
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar

from radixkv.removed import refuse_removed

Class = TypeVar("Class")

FOREIGN = {
    name: here
    for here, names in {
        "max_tokens": "max_new_tokens max_completion_tokens max_length n_predict num_predict",
        "min_tokens": "min_new_tokens",
        "temperature": "temp do_sample",
        "n": "num_return_sequences",
        "beam_width": "num_beams",
        "repetition_penalty": "repeat_penalty",
        "stop": "stop_sequences stop_strings",
        "stop_token_ids": "eos_token_id",
        "json_schema": "response_format guided_json",
        "params": "sampling_params",
        "kv_memory": "gpu_memory_utilization mem_fraction_static",
        "num_blocks": "max_model_len n_ctx",
        "max_sequences": "max_num_seqs",
        "max_batch_tokens": "max_num_batched_tokens",
        "prefix_cache": "enable_prefix_caching",
        "host_memory": "swap_space",
        "weights": "quantization load_in_8bit",
        "dtype": "torch_dtype",
        "device": "device_map n_gpu_layers",
        "model": "model_path",
        "system": "system_prompt",
    }.items()
    for name in names.split()
}
"""name in transformers, vLLM, SGLang, llama.cpp or OpenAI's API -> the nearest name here."""

_ELSEWHERE = {"SamplingParams": "write params=SamplingParams({})", "EngineConfig": "pass {} to Engine.load"}
_ADVICE: dict[str, str] = {}  # field of an explained dataclass -> advice for other calls that are given it


def explained(cls: type[Class]) -> type[Class]:
    """Decorate a dataclass of `_ELSEWHERE`: errors about unknown fields name the right one."""
    begin = cls.__init__

    @wraps(begin)
    def checked(self: Class, *args: Any, **given: Any) -> None:
        try:
            begin(self, *args, **given)
        except TypeError:
            explain(begin, self, args, given)
            raise

    cls.__init__ = checked  # type: ignore[assignment,method-assign]
    for name in cls.__dataclass_fields__:  # type: ignore[attr-defined]
        if name not in _ADVICE or cls.__name__ == "SamplingParams":  # a seed is of both: the one of a request is meant
            _ADVICE[name] = _ELSEWHERE[cls.__name__]
    return cls


def explain(call: Callable[..., Any], owner: object, args: Sequence[Any], given: Mapping[str, Any]) -> None:
    """Raise TypeError with advice if these arguments do not fit `call`; an error inside the call needs none."""
    kind, signature = type(owner).__name__, inspect.signature(call)
    name = kind if call.__name__ == "__init__" else f"{kind}.{call.__name__}"
    try:
        signature.bind(owner, *args, **given)
    except TypeError as misfit:
        if name == kind and name not in _ELSEWHERE:
            first = reprlib.repr(args[0]) if args else "..."
            maker = f"{name}.load({first})" if hasattr(owner, "load") else "engine.chat()"
            raise TypeError(f"{name}(...) connects parts that are already loaded: call {maker}") from None
        refuse_unknown(name, known := [*signature.parameters][1:], given)
        raise TypeError(f"{name}: {misfit}; it takes {', '.join(known)}") from None


def refuse_unknown(call: str, known: Iterable[str], given: Mapping[str, Any]) -> None:
    """Raise TypeError with advice if a name in `given` is not `known` to the call of that name.

    Raises InvalidInput for a name that was removed.
    """
    known = list(known)
    unknown = [name for name in given if name not in known]
    refuse_removed(unknown)
    for name in unknown:
        nearest = difflib.get_close_matches(name, known, 1) or difflib.get_close_matches(name, _ADVICE, 1)
        meant = name if name in _ADVICE else FOREIGN.get(name) or "".join(nearest)
        value = reprlib.repr(given[name])
        advice = f": did you mean {meant}?" if meant in known else f"; it takes {', '.join(known)}"
        if meant in _ADVICE and meant not in known:
            advice = f": {_ADVICE[meant].format(f'{meant}={value}' if meant == name else f'{meant}=...')}"
        raise TypeError(f"{call} has no argument {name}={value}{advice}") from None
