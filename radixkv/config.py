"""The settings of an engine, each declared once: its type, its default, its range and its meaning.

`EngineConfig` checks every value, and values against each other, when it is created. Checks that need the model, the
device or the file system are made by `Engine.load`. The commands make their options from the declarations below, and a
test compares the names in docs/engine.md with them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, cast

from radixkv.argument_names import explained
from radixkv.errors import InvalidInput, UnknownPolicy
from radixkv.settings.declared import check, described, given_in, setting
from radixkv.settings.kinds import FilePath, Flag, Integer, Kind, Number, OneOf, Rule, Size, Switch, Text
from radixkv.sizing.kv_size import KV_DTYPES

ATTENTION = ("auto", "torch", "triton", "compiled")
WEIGHTS = ("auto", "float32", "int8", "int4")
MODEL_CODE = ("auto", "transformers")
VERIFY = ("auto", "always")
ORDERS = ("fcfs", "longest-prefix")
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
    max_delay: float | None
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


def _is_processor(value: object) -> bool:
    """Whether a value has what `LogitsProcessor` declares; a class in place of an object is a mistake."""
    is_flag = isinstance(getattr(value, "reads_history", None), bool)
    return is_flag and callable(value) and callable(getattr(value, "applies", None)) and not isinstance(value, type)


class _Policy(Kind):
    """Take the names of eviction policies."""

    def checked(self, name: str, value: Any) -> Any:
        """See Kind; raises UnknownPolicy."""
        from radixkv.cache import POLICIES  # numpy takes 0.1 s, which commands that only print do not need

        if not isinstance(value, str) or value not in POLICIES:
            raise UnknownPolicy(f"{name}={value!r}: allowed are {', '.join(sorted(POLICIES))}")
        return value


_ANY, _FLAG, _SWITCH = Kind(), Flag(), Switch()
_LEAST = "{name} must be an int, at least {kind.low}, got {value!r}"
_COUNT = Integer(low=1, message=_LEAST)
_SECONDS = "{name} is a number of seconds above 0, got {value!r}"
_COMPILE = OneOf(members=("auto", True, False), message="{name}={value!r}: allowed are 'auto', True and False")
_MONITOR = Rule(
    test=lambda value: (
        isinstance(value, bool)
        or (isinstance(value, str) and (value == "rw" or value.startswith(("tcp://", "rw+tcp://"))))
    ),
    message="{name} must be True, False, 'rw' or an address such as 'tcp://127.0.0.1:7777', got {value!r}",
)
_FOLDER = FilePath(message="{name} names a folder, got {value!r}", metavar="FOLDER")
_RECORD = FilePath(message="{name} names a file to be written, got {value!r}")
_PROCESSORS = Rule(
    test=lambda value: isinstance(value, list | tuple) and all(map(_is_processor, value)),
    message="{name} must be a list of objects, each with what radixkv.LogitsProcessor declares, got {value!r}",
)
_NAME = Text(message="{name} must be a name, got {value!r}", metavar="NAME")


@explained
@described
@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The settings of an engine, checked; raises InvalidInput with the allowed values.

    `Engine.load` takes an `EngineConfig`, its fields as keyword arguments, or both; a keyword argument wins.
    """

    kv_memory: str | int = setting(
        "auto",
        Size(),
        "memory of the KV pool: bytes, a size such as 512MB, or auto (on a CPU a quarter of the free memory, at most "
        "4 GiB; on a GPU the free memory, without the memory of the largest step and 3% of the card)",
    )
    num_blocks: int | None = setting(
        None, Integer(low=1, optional=True, message=_LEAST), "blocks of the KV pool; overrides kv_memory"
    )
    state_memory: str | int = setting(
        "auto",
        Size(),
        "memory for the recurrent states of hybrid models, a part of kv_memory: bytes, a size such as 512MB, or auto "
        "(up to a third, at most half of it for running sequences; this may lower max_sequences)",
    )
    host_memory: str | int | None = setting(
        None,
        Size(optional=True),
        "host memory for KV that leaves the pool, in addition to kv_memory: bytes, a size such as 8GiB, or auto (a "
        "quarter of the memory that is free beside the pool). A hit in it is loaded instead of computed. None and 0 "
        "switch it off. Of hybrid models, a third of it at most holds recurrent states",
    )
    disk_cache: str | os.PathLike[str] | None = setting(  # noqa: RUF009 - it returns a field
        None,
        _FOLDER,
        "private folder for KV that leaves host memory: an engine that is started again finds it. It is text of users, "
        "in a form that a model can read. It needs host_memory, by default half of the pool up to 256 MiB or an eighth",
    )
    disk_memory: str | int = setting(
        "10GiB", Size(automatic=False), "size of the disk cache of one model: bytes, or a size such as 50GiB"
    )
    block_size: int = setting(16, _COUNT, "tokens per block")
    eviction: str = setting(
        "lru",
        _Policy(metavar="POLICY"),
        "eviction policy, a name of radixkv.cache.POLICIES (an unknown name lists them)",
    )
    device: str = setting("auto", _ANY, "cpu, cuda, cuda:1, ...; auto is cuda where there is a GPU")
    dtype: Any = setting(  # noqa: RUF009 - it returns a field
        "auto", _ANY, "float32, bfloat16, ...; auto is float32 on a CPU, elsewhere the dtype of the weights"
    )
    tensor_parallel: int = setting(
        1,
        _COUNT,
        "ranks that divide each layer of a model: processes that the engine starts, one for each GPU, or on a CPU for "
        "tests. Sizes of memory are of one rank",
    )
    rank_timeout: float = setting(
        30.0,
        Number(low=0, above=True, message=_SECONDS),
        "seconds after which a rank that does not answer ends the engine",
    )
    attention: str = setting(
        "auto",
        OneOf(members=ATTENTION),
        "attention backend: torch, triton, compiled (decodes in float32 on a CPU), or auto (triton on CUDA if it "
        "supports the model, compiled with int8 or int4 weights, else torch; the model's own attention if none is "
        "correct)",
    )
    kv_dtype: str = setting(
        "auto",
        OneOf(members=tuple(KV_DTYPES)),
        "format of the KV pool and of host memory: float16 or int8, which hold two and nearly four times the "
        "tokens of float32, or auto (as the model computes). With either, a hit may change an answer unless "
        "deterministic",
    )
    weights: str = setting(
        "auto",
        OneOf(members=WEIGHTS),
        "bits of the weights of linear layers on a CPU: int8, int4 (the embedding and the head keep 8 bits), float32, "
        "or auto (as a quantised GGUF file has them, else float32). Activations are float32",
    )
    model_code: str = setting(
        "auto",
        OneOf(members=MODEL_CODE),
        "whose layers run a model: radixkv's own for Llama-like models, which start sooner, and transformers' for "
        "others (auto); or transformers' for all (transformers)",
    )
    verify: str = setting(
        "auto",
        OneOf(members=VERIFY),
        "test a model whole at its first load only, and briefly at later ones (auto), or whole at each (always)",
    )
    compile: bool | str = setting(
        "auto",
        _COMPILE,
        "fuse the layers' operators on CUDA: by kernels for layers like Llama's, else by torch.compile, which takes a "
        "minute; auto does not compile if deterministic; False leaves the model as written",
    )
    max_sequences: int = setting(64, _COUNT, "streams that run at once")
    max_batch_tokens: int = setting(2048, _COUNT, "tokens per step, at least max_sequences")
    prefill_chunk: int = setting(512, _COUNT, "tokens of one prompt per step")
    order: str = setting(
        "fcfs",
        OneOf(members=ORDERS),
        "which waiting request of a priority runs first: the oldest (fcfs), or the one with the longest cached prefix "
        "(longest-prefix)",
    )
    max_delay: float | None = setting(
        10.0,
        Number(low=0, above=True, optional=True, message=_SECONDS.replace("0,", "0, or None,")),
        "seconds after which a request that was overtaken goes before all others of its priority and its group of "
        "namespaces; fcfs overtakes none",
    )
    speculate: str | None = setting(
        None,
        OneOf(members=SPECULATE, optional=True),
        "draft the next tokens from text that is repeated, and verify all of them in one forward; replies stay the "
        "same: ngram (the text of the request, and its prediction) or tree (also all text that its namespace has "
        "cached)",
    )
    prefix_cache: bool = setting(
        True, _SWITCH, "reuse cached prefixes; False computes every prompt in full, for comparisons"
    )
    deterministic: bool = setting(
        False,
        _FLAG,
        "compute the same bits with and without cache hits for a request that runs alone; hits end on multiples of "
        "prefill_chunk, a multiple of block_size",
    )
    monitor: bool | str = setting(
        True,
        _MONITOR,
        "allow radixkv-monitor of the same user to attach; it receives no text. A tcp:// address also admits clients "
        "with the token. 'rw' also admits commands, of the same user only: cancel, pin, unpin, demote, clear. False, "
        "or RADIXKV_MONITOR=0 in the environment, disables this",
    )
    expose_text: bool = setting(False, _FLAG, "show texts of cached nodes and of diverging prompts in the monitor")
    record: str | os.PathLike[str] | None = setting(  # noqa: RUF009 - it returns a field
        None, _RECORD, "new file for a trace of all requests, without their text, for radixkv-replay"
    )
    what_if: bool = setting(True, _FLAG, "show the hit rates that smaller and larger pools would have")
    seed: int = setting(
        0,
        Integer(message="{name} must be {kind.allowed}, got {value!r}"),
        "root of the seeds of requests that have none",
    )
    logits_processors: Sequence[Any] = setting(
        (), _PROCESSORS, "objects that change logits before sampling, applied in order: see radixkv.LogitsProcessor"
    )
    tool_format: str = setting(
        "auto",
        _NAME,
        "name of the format of the model's tool calls (an unknown name lists all); auto is the format that the chat "
        "template writes",
    )
    revision: str | None = setting(None, _ANY, "revision of a model on the hub")
    trust_remote_code: bool = setting(False, _SWITCH, "run code that comes with the model")

    def __post_init__(self) -> None:
        """Check each value by itself, then values against each other."""
        check(self)
        object.__setattr__(self, "logits_processors", tuple(self.logits_processors))
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


def settings_in(arguments: object) -> EngineConfigFields:
    """The attributes of `arguments` that are settings, such as the options of a command."""
    return cast(EngineConfigFields, given_in(arguments, EngineConfig))
