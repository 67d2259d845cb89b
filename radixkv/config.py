"""The settings of an engine, each declared once: its type, its default, its range and its meaning.

`EngineConfig` checks every value, and values against each other, when it is created. Checks that need the model, the
device or the file system are made by `Engine.load`. The commands make their options from the declarations below, and a
test compares the names in docs/engine.md with them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypedDict, cast

from radixkv.argument_names import explained
from radixkv.errors import InvalidInput, UnknownPolicy
from radixkv.sampling.params import is_int
from radixkv.sizing.kv_size import KV_DTYPES, parse_bytes

ATTENTION = ("auto", "torch", "triton", "compiled")
WEIGHTS = ("auto", "float32", "int8", "int4")
MODEL_CODE = ("auto", "transformers")
VERIFY = ("auto", "always")
ORDERS = ("fcfs", "longest-prefix")
VICTIMS = ("cheapest", "last")
SPECULATE = ("ngram", "tree")


class EngineConfigFields(TypedDict, total=False):
    """The fields of `EngineConfig` as keyword arguments; a test compares the two lists."""

    kv_memory: str | int
    num_blocks: int | None
    state_memory: str | int
    host_memory: str | int | None
    disk_cache: str | os.PathLike[str] | None
    disk_memory: str | int
    block_size: int
    eviction: str
    namespace_limits: Mapping[Any, float] | None
    device: str
    dtype: Any
    tensor_parallel: int
    rank_timeout: float
    attention: str
    kv_dtype: str
    weights: str
    model_code: str
    verify: str
    compile: bool | str
    max_sequences: int
    max_batch_tokens: int
    prefill_chunk: int
    order: str
    max_overtakes: int
    max_delay: float | None
    victim: str
    speculate: str | None
    prefix_cache: bool
    deterministic: bool
    monitor: bool | str
    expose_text: bool
    record: str | os.PathLike[str] | None
    what_if: bool
    seed: int
    logits_processors: Sequence[Any]
    tool_format: str
    revision: str | None
    trust_remote_code: bool


_Rule = tuple[Callable[[Any], bool], str]  # which values are accepted, and the message for others
_FLAG: _Rule = (lambda value: isinstance(value, bool), "{name} must be True or False, got {value!r}")
_INT: _Rule = (is_int, "{name} must be an int, got {value!r}")
_COMPILE: _Rule = (
    lambda value: isinstance(value, bool) or value == "auto",
    "{name}={value!r}: allowed are 'auto', True and False",
)
_SECONDS: _Rule = (
    lambda value: isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf"),
    "{name} is a number of seconds above 0, got {value!r}",
)
_DELAY: _Rule = (lambda value: value is None or _SECONDS[0](value), _SECONDS[1].replace("0,", "0, or None,"))
_MONITOR: _Rule = (
    lambda value: (
        isinstance(value, bool)
        or (isinstance(value, str) and (value == "rw" or value.startswith(("tcp://", "rw+tcp://"))))
    ),
    "{name} must be True, False, 'rw' or an address such as 'tcp://127.0.0.1:7777', got {value!r}",
)
_FOLDER: _Rule = (
    lambda value: value is None or (isinstance(value, str | os.PathLike) and bool(os.fspath(value))),
    "{name} names a folder, got {value!r}",
)
_RECORD: _Rule = (
    lambda value: value is None or isinstance(value, str | os.PathLike),
    "{name} names a file to be written, got {value!r}",
)


def _is_processor(value: object) -> bool:
    """Whether a value has what `LogitsProcessor` declares; a class in place of an object is a mistake."""
    is_flag = isinstance(getattr(value, "reads_history", None), bool)
    return is_flag and callable(value) and callable(getattr(value, "applies", None)) and not isinstance(value, type)


_PROCESSORS: _Rule = (
    lambda value: isinstance(value, list | tuple) and all(map(_is_processor, value)),
    "{name} must be a list of objects, each with what radixkv.LogitsProcessor declares, got {value!r}",
)


def _setting(
    default: Any, help: str, rule: _Rule | None = None, *, least: int | None = None, choices: tuple[str, ...] = ()
) -> Any:
    """Declare a field: its meaning, and which values are allowed. `least` is the smallest int."""
    if least is not None:
        optional = default is None
        rule = (
            lambda value: (optional and value is None) or (is_int(value) and value >= least),
            f"{{name}} must be an int, at least {least}, got {{value!r}}",
        )
    if choices:
        allowed = (*choices, None) if default is None else choices
        rule = (allowed.__contains__, f"{{name}}={{value!r}}: allowed are {', '.join(map(repr, allowed))}")
    return field(default=default, metadata={"help": help, "rule": rule, "least": least, "choices": choices})


@explained
@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The settings of an engine, checked; raises InvalidInput with the allowed values.

    `Engine.load` takes an `EngineConfig`, its fields as keyword arguments, or both; a keyword argument wins.
    """

    kv_memory: str | int = _setting(
        "auto",
        "memory of the KV pool: bytes, a size such as 512MB, or auto (on a CPU a quarter of the free memory, at most "
        "4 GiB; on a GPU the free memory, without the memory of the largest step and 3% of the card)",
    )
    num_blocks: int | None = _setting(None, "blocks of the KV pool; overrides kv_memory", least=1)
    state_memory: str | int = _setting(
        "auto",
        "memory for the recurrent states of hybrid models, a part of kv_memory: bytes, a size such as 512MB, or auto "
        "(up to a third, at most half of it for running sequences; this may lower max_sequences)",
    )
    host_memory: str | int | None = _setting(
        None,
        "host memory for KV that leaves the pool, in addition to kv_memory: bytes, a size such as 8GiB, or auto (a "
        "quarter of the memory that is free beside the pool). A hit in it is loaded instead of computed. None and 0 "
        "switch it off. Of hybrid models, a third of it at most holds recurrent states",
    )
    disk_cache: str | os.PathLike[str] | None = _setting(  # noqa: RUF009 - it returns a field
        None,
        "private folder for KV that leaves host memory: an engine that is started again finds it. It is text of users, "
        "in a form that a model can read. It needs host_memory, by default half of the pool up to 256 MiB or an eighth",
        _FOLDER,
    )
    disk_memory: str | int = _setting("10GiB", "size of the disk cache of one model: bytes, or a size such as 50GiB")
    block_size: int = _setting(16, "tokens per block", least=1)
    eviction: str = _setting("lru", "eviction policy, a name of radixkv.cache.POLICIES (an unknown name lists them)")
    namespace_limits: Mapping[Any, float] | None = _setting(
        None,
        "shares of the pool that are guaranteed to namespaces, such as {'ann': 0.5}; the share of a tuple counts for "
        "all tuples that begin with it",
    )
    device: str = _setting("auto", "cpu, cuda, cuda:1, ...; auto is cuda where there is a GPU")
    dtype: Any = _setting(  # noqa: RUF009 - it returns a field
        "auto", "float32, bfloat16, ...; auto is float32 on a CPU, elsewhere the dtype of the weights"
    )
    tensor_parallel: int = _setting(
        1,
        "ranks that divide each layer of a model: processes that the engine starts, one for each GPU, or on a CPU for "
        "tests. Sizes of memory are of one rank",
        least=1,
    )
    rank_timeout: float = _setting(30.0, "seconds after which a rank that does not answer ends the engine", _SECONDS)
    attention: str = _setting(
        "auto",
        "attention backend: torch, triton, compiled (decodes in float32 on a CPU), or auto (triton on CUDA if it "
        "supports the model, compiled with int8 or int4 weights, else torch; the model's own attention if none is "
        "correct)",
        choices=ATTENTION,
    )
    kv_dtype: str = _setting(
        "auto",
        "format of the KV pool and of host memory: float16 or int8, which hold two and nearly four times the "
        "tokens of float32, or auto (as the model computes). With either, a hit may change an answer unless "
        "deterministic",
        choices=tuple(KV_DTYPES),
    )
    weights: str = _setting(
        "auto",
        "bits of the weights of linear layers on a CPU: int8, int4 (the embedding and the head keep 8 bits), float32, "
        "or auto (as a quantised GGUF file has them, else float32). Activations are float32",
        choices=WEIGHTS,
    )
    model_code: str = _setting(
        "auto",
        "whose layers run a model: radixkv's own for Llama-like models, which start sooner, and transformers' for "
        "others (auto); or transformers' for all (transformers)",
        choices=MODEL_CODE,
    )
    verify: str = _setting(
        "auto",
        "test a model whole at its first load only, and briefly at later ones (auto), or whole at each (always)",
        choices=VERIFY,
    )
    compile: bool | str = _setting(
        "auto",
        "fuse the layers' operators on CUDA: by kernels for layers like Llama's, else by torch.compile, which takes a "
        "minute; auto does not compile if deterministic; False leaves the model as written",
        _COMPILE,
    )
    max_sequences: int = _setting(64, "streams that run at once", least=1)
    max_batch_tokens: int = _setting(2048, "tokens per step, at least max_sequences", least=1)
    prefill_chunk: int = _setting(512, "tokens of one prompt per step", least=1)
    order: str = _setting(
        "fcfs",
        "which waiting request of a priority runs first: the oldest (fcfs), or the one with the longest cached prefix "
        "(longest-prefix)",
        choices=ORDERS,
    )
    max_overtakes: int = _setting(32, "later requests that may overtake a waiting one", least=0)
    max_delay: float | None = _setting(
        None,
        "seconds after which a request that was overtaken goes before all others of its priority and its group of "
        "namespaces; fcfs overtakes none",
        _DELAY,
    )
    victim: str = _setting(
        "cheapest",
        "which request is preempted when blocks run out: the one that is cheapest to resume (cheapest), or the one "
        "that was admitted last (last)",
        choices=VICTIMS,
    )
    speculate: str | None = _setting(
        None,
        "draft the next tokens from text that is repeated, and verify all of them in one forward; replies stay the "
        "same: ngram (the text of the request, and its prediction) or tree (also all text that its namespace has "
        "cached)",
        choices=SPECULATE,
    )
    prefix_cache: bool = _setting(True, "reuse cached prefixes; False computes every prompt in full, for comparisons")
    deterministic: bool = _setting(
        False,
        "compute the same bits with and without cache hits for a request that runs alone; hits end on multiples of "
        "prefill_chunk, a multiple of block_size",
        _FLAG,
    )
    monitor: bool | str = _setting(
        True,
        "allow radixkv-monitor of the same user to attach; it receives no text. A tcp:// address also admits clients "
        "with the token. 'rw' also admits commands, of the same user only: cancel, pin, unpin, demote, clear. False, "
        "or RADIXKV_MONITOR=0 in the environment, disables this",
        _MONITOR,
    )
    expose_text: bool = _setting(False, "show texts of cached nodes and of diverging prompts in the monitor", _FLAG)
    record: str | os.PathLike[str] | None = _setting(  # noqa: RUF009 - it returns a field
        None, "new file for a trace of all requests, without their text, for radixkv-replay", _RECORD
    )
    what_if: bool = _setting(True, "show the hit rates that smaller and larger pools would have", _FLAG)
    seed: int = _setting(0, "root of the seeds of requests that have none", _INT)
    logits_processors: Sequence[Any] = _setting(
        (), "objects that change logits before sampling, applied in order: see radixkv.LogitsProcessor", _PROCESSORS
    )
    tool_format: str = _setting(
        "auto",
        "name of the format of the model's tool calls (an unknown name lists all); auto is the format that the chat "
        "template writes",
        (lambda value: isinstance(value, str), "{name} must be a name, got {value!r}"),
    )
    revision: str | None = _setting(None, "revision of a model on the hub")
    trust_remote_code: bool = _setting(False, "run code that comes with the model")

    def __post_init__(self) -> None:
        """Check each value by itself, then values against each other."""
        for each in fields(self):
            value, rule = getattr(self, each.name), each.metadata["rule"]
            if rule is not None and not rule[0](value):
                raise InvalidInput(rule[1].format(name=each.name, value=value))
        object.__setattr__(self, "logits_processors", tuple(self.logits_processors))
        if not isinstance(self.eviction, str) or self.eviction not in _policies():
            raise UnknownPolicy(f"eviction={self.eviction!r}: allowed are {', '.join(_policies())}")
        if self.namespace_limits is not None:
            _check_limits(self.namespace_limits)
        for name in ("kv_memory", "state_memory", "host_memory", "disk_memory"):
            value = getattr(self, name)
            if (value != "auto" or name == "disk_memory") and not (name == "host_memory" and value is None):
                parse_bytes(value, name, automatic=name != "disk_memory")
        if self.disk_cache is not None and not self.prefix_cache:
            raise InvalidInput("disk_cache keeps cached text, and prefix_cache=False has none: leave one of them out")
        if self.max_batch_tokens < self.max_sequences:
            raise InvalidInput(
                f"max_batch_tokens ({self.max_batch_tokens}) must be at least max_sequences ({self.max_sequences}): "
                "every running sequence decodes one token a step"
            )
        if not self.deterministic:
            return
        if self.prefill_chunk + self.max_sequences > self.max_batch_tokens:
            raise InvalidInput(
                f"deterministic=True computes whole chunks: prefill_chunk ({self.prefill_chunk}) and a token for each "
                f"of max_sequences ({self.max_sequences}) must fit max_batch_tokens ({self.max_batch_tokens})"
            )
        if self.prefill_chunk % self.block_size:  # branches would part inside a block, which an audit cannot compare
            raise InvalidInput(
                f"deterministic=True needs a prefill_chunk ({self.prefill_chunk}) of whole blocks of {self.block_size} "
                "tokens"
            )


EngineConfig.__doc__ = f"{EngineConfig.__doc__}\n" + "".join(
    f"    {each.name:20}{each.metadata['help']} ({each.default!r})\n" for each in fields(EngineConfig)
)


def settings_in(arguments: object) -> EngineConfigFields:
    """The attributes of `arguments` that are settings, such as the options of a command."""
    found = {each.name: getattr(arguments, each.name) for each in fields(EngineConfig) if hasattr(arguments, each.name)}
    return cast(EngineConfigFields, found)


def _check_limits(shares: Mapping[Any, float]) -> None:
    from radixkv.cache.quotas import NamespaceLimits  # as below

    NamespaceLimits(shares)


def _policies() -> list[str]:
    from radixkv.cache import POLICIES  # numpy takes 0.1 s, which commands that only print do not need

    return sorted(POLICIES)
