# ruff: noqa: RUF001 - DeepSeek's control tokens have wide bars
"""Declare the formats in which models write tool calls: a family is one row of tags for one of six shapes.

Text of a row is a pattern of `Source.pattern`: `{name}` is the name of the tool, and white space is optional. A row is
read by `shapes.py`, written by `chat/constrained.py`, and chosen by `choice.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property, partial
from hashlib import blake2b
from typing import Any, Literal

from radixkv.errors import InvalidInput

Shape = Literal["json", "header", "tags", "python", "own quotes"]

_TAG = re.compile(r"<\|[^<>]*\|>|<[^<>\s={}]+>|\[[A-Z_]+\]|\]<\]\w+\[>\[|｜\w+｜")


@dataclass(frozen=True)
class CallFormat:
    """A format of tool calls: `start`, one call or several, `end`.

    "json": objects with name and arguments, such as `entry`.
    "header": `head`, JSON arguments, `tail`. Channels are headers with several `starts`.
    "tags": `head`, then `argument`, a value and `close` for each argument, then `tail`.
    "python": `name(key=value, ...)`, in brackets or not.
    "own quotes": `head`, an object with bare keys and strings in `quote`, `tail`.

    Several calls share the tags of a `section`, perhaps in the brackets of an `array`, or each has its own.
    `bare` is the character that begins a call without `start`, at the beginning of a reply or after another call; the
    tool must exist. `own_id` is how the words of `head` make the id that the model gives a call.
    """

    shape: Shape
    starts: tuple[str, ...]
    end: str = ""
    head: str = ""
    tail: str = ""
    argument: str = ""
    close: str = ""
    quote: str = ""
    bare: str = ""
    own_id: str = ""
    short_ids: bool = False
    entry: str = '{"name": NAME, "arguments": ARGUMENTS}'
    section: bool = False
    array: bool = False
    name: str = ""

    @property
    def start(self) -> str:
        """The text that begins calls, as models write it most often."""
        return self.starts[0]

    @property
    def closings(self) -> tuple[str, ...]:
        """The texts that may end an argument in tags: the line break of a row is optional."""
        rest = self.close.strip()
        cdata = [f"]]>{rest}"] if "CDATA" in self.argument else []
        return tuple(dict.fromkeys([self.close.rstrip(), rest, *cdata]))

    @cached_property
    def tags(self) -> tuple[str, ...]:
        """All texts of the format that may be control tokens, which decoding leaves out."""
        texts = (*self.starts, self.head, self.argument, self.close, self.tail, self.end)
        found = {tag: None for text in texts for tag in [text.strip(), *_TAG.findall(text)] if tag}
        return (*found, *([self.quote] if self.quote else []))

    def call_id(self, seed: str, number: int) -> str:
        """Return the id of call `number` of a reply: deterministic, and different for each `seed`.

        >>> HERMES.call_id("7", 0)
        'call_7_0'
        """
        if self.short_ids:
            return blake2b(f"{seed}_{number}".encode(), digest_size=5).hexdigest()[:9]
        return f"call_{seed}_{number}"


def _row(shape: Shape, block: str, call: str = "", argument: str = "", **texts: Any) -> CallFormat:
    """Return a row. `call` has `{arguments}` between head and tail, and `argument` has `{value}` between its tags.

    `block` has `{call}` between its tags, or `{calls}`, perhaps in brackets, if there are several.
    """
    section, array = "{calls}" in block, "[{calls}]" in block
    start, _, end = re.sub(r"\[\{calls\}\]|\{calls\}", "{call}", block).partition("{call}")
    head, _, tail = call.partition("{arguments}")
    before, _, close = argument.partition("{value}")
    row = CallFormat(shape, (start,), end, head, tail, before, close, section=section, array=array)
    return replace(row, **texts)


_json, _headed, _tags = partial(_row, "json"), partial(_row, "header"), partial(_row, "tags")
_CHANNELS = ("<|start|>assistant", "<|start|>assistant<|channel|>commentary", "<|channel|>commentary", "")

_ROWS = {  # in this order: fine-tuned models keep tokens of formats that they no longer use
    "hermes": _json("<tool_call>{call}</tool_call>", entry='\n{"name": NAME, "arguments": ARGUMENTS}\n'),
    "mistral": _json("[TOOL_CALLS]", "{name}([CALL_ID]{id})([ARGS]){arguments}", own_id="{id}", short_ids=True),
    "llama": _json("<|python_tag|>", entry='{"name": NAME, "parameters": ARGUMENTS}', bare="{"),
    "nemotron": _json("<TOOLCALL>[{calls}]</TOOLCALL>"),
    "tool_calls": _json("<tool_calls>[{calls}]</tool_calls>"),
    "granite": _json("<|tool_call|>[{calls}]"),
    "phi-4-mini": _json("<|tool_call|>[{calls}]<|/tool_call|>"),
    "cohere": _json(
        "<|START_ACTION|>[{calls}]<|END_ACTION|>",
        entry='{"tool_call_id": "INDEX", "tool_name": NAME, "parameters": ARGUMENTS}',
    ),
    "apertus": _json("<|tools_prefix|>[{calls}]<|tools_suffix|>", entry="{NAME: ARGUMENTS}"),
    "gigachat": _json("<|function_call|>"),
    "gigachat-role": _json("function call<|role_sep|>"),
    "kimi-k2": _headed(
        "<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>",
        "<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>",
        own_id="functions.{name}:{index}",
    ),
    "deepseek-v3": _headed(
        "<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>",
    ),
    "deepseek-v3.1": _headed(
        "<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>",
    ),
    "solar": _headed(
        "<|tool_calls|>{calls}<|calls|>",
        "<|tool_call:begin|>{id}<|tool_call:name|>{name}<|tool_call:args|>{arguments}<|tool_call:end|>",
        own_id="{id}",
    ),
    "functionary-v3.1": _headed("<function=", "{name}>{arguments}</function>"),
    "gpt-oss": _headed(
        "",
        "{name}{any}<|message|>{arguments}<|call|>",
        starts=tuple(f"{role} to=functions." for role in _CHANNELS),
    ),
    "qwen3-coder": _tags(
        "<tool_call>{call}\n</tool_call>",
        "\n<function={name}>\n{arguments}</function>",
        "<parameter={key}>\n{value}\n</parameter>\n",
    ),
    "seed-oss": _tags(
        "<seed:tool_call>{call}\n</seed:tool_call>",
        "\n<function={name}>\n{arguments}</function>",
        "<parameter={key}>{value}</parameter>\n",
    ),
    "glm": _tags(
        "<tool_call>{call}</tool_call>",
        "{name}\n{arguments}",
        "<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
    ),
    "hunyuan": _tags(
        "<tool_calls:opensource>{calls}\n</tool_calls:opensource>",
        "\n<tool_call:opensource>{name}<tool_sep:opensource>\n{arguments}</tool_call:opensource>",
        "<arg_key:opensource>{key}</arg_key:opensource>\n<arg_value:opensource>{value}</arg_value:opensource>\n",
    ),
    "minimax-m2": _tags(
        "<minimax:tool_call>{calls}\n</minimax:tool_call>",
        '\n<invoke name="{name}">\n{arguments}</invoke>',
        '<parameter name="{key}">{value}</parameter>\n',
    ),
    "minicpm": _tags(
        '<function name="', '{name}">{arguments}</function>', '<param name="{key}">(<![CDATA[){value}</param>'
    ),
    "kimi-k3": _tags(
        "<|open|>tools<|sep|>{calls}<|close|>tools<|sep|>",
        '<|open|>call tool="{name}" index="{index}"<|sep|>{arguments}<|close|>call<|sep|>',
        '<|open|>argument key="{key}" type="{type}"<|sep|>{value}<|close|>argument<|sep|>',
    ),
    "deepseek-v3.2": _tags(
        "<｜DSML｜function_calls>{calls}\n</｜DSML｜function_calls>",
        '\n<｜DSML｜invoke name="{name}">\n{arguments}</｜DSML｜invoke>',
        '<｜DSML｜parameter name="{key}" string="{string}">{value}</｜DSML｜parameter>\n',
    ),
    "deepseek-v4": _tags(
        "<｜DSML｜tool_calls>{calls}\n</｜DSML｜tool_calls>",
        '\n<｜DSML｜invoke name="{name}">\n{arguments}</｜DSML｜invoke>',
        '<｜DSML｜parameter name="{key}" string="{string}">{value}</｜DSML｜parameter>\n',
    ),
    "lfm2": _row("python", "<|tool_call_start|>[{calls}]<|tool_call_end|>"),
    "olmo3": _row("python", "<function_calls>{calls}\n</function_calls>"),
    "llama4": _row("python", "<|python_start|>[{calls}]<|python_end|>", bare="["),
    "gemma4": _row("own quotes", "<|tool_call>", "call:{name}{arguments}<tool_call|>", quote='<|"|>'),
    "functiongemma": _row(
        "own quotes", "<start_function_call>", "call:{name}{arguments}<end_function_call>", quote="<escape>"
    ),
}
FORMATS = tuple(replace(row, name=name) for name, row in _ROWS.items())
HERMES, MISTRAL, LLAMA = FORMATS[:3]


def format_named(name: str) -> CallFormat | None:
    """Return the format of a name, None for "auto". Raises InvalidInput for an unknown name, with the list of names."""
    by_name = {"auto": None, **{form.name: form for form in FORMATS}}
    if name not in by_name:
        raise InvalidInput(f"tool_format={name!r}: allowed are {', '.join(map(repr, by_name))}")
    return by_name[name]
