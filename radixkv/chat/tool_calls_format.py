"""The forms in which models write tool calls, and which of them a model uses.

Knows: tags, ids, what a tokenizer and its template tell. Knows no JSON and no reply.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from radixkv.engine.input_processor import template_text


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a call is written: `start`, JSON, `end`.

    `named`: the name may stand before the JSON, which is then the arguments alone. `bare`: a call of a tool that was
    given needs no `start` at the beginning of a reply, or behind another call. `inner` tags stand within a call.
    """

    name: str
    start: str
    end: str = ""
    inner: tuple[str, ...] = ()
    named: bool = False
    bare: bool = False
    short_ids: bool = False

    @property
    def tags(self) -> tuple[str, ...]:
        """All texts that may be control tokens, which decoding leaves out."""
        return tuple(tag for tag in (self.start, self.end, *self.inner) if tag)

    def call_id(self, seed: str, number: int) -> str:
        """The id of a reply's call `number`: another for each `seed`, and always the same.

        >>> HERMES.call_id("7", 0)
        'call_7_0'
        """
        if self.short_ids:
            return blake2b(f"{seed}_{number}".encode(), digest_size=5).hexdigest()[:9]
        return f"call_{seed}_{number}"


HERMES = CallFormat("hermes", "<tool_call>", "</tool_call>")
MISTRAL = CallFormat("mistral", "[TOOL_CALLS]", inner=("[CALL_ID]", "[ARGS]"), named=True, short_ids=True)
LLAMA = CallFormat("llama", "<|python_tag|>", bare=True)
FORMATS = (HERMES, MISTRAL, LLAMA)  # in this order: models that were trained further keep tokens that they do not use


def format_of(tokenizer: Any | None) -> CallFormat | None:
    """The form that a model's template writes, else the one whose tag is a token of its own; None for another form."""
    template = template_text(tokenizer)
    added = {token.content for token in getattr(tokenizer, "added_tokens_decoder", {}).values()}
    written = [form for form in FORMATS if form.start in template]
    return next(iter([*written, *(form for form in FORMATS if form.start in added)]), None)


def tool_names(tools: Sequence[Any] | None) -> frozenset[str]:
    """Names of the tools among these schemas, which may be anything that JSON can hold."""
    schemas = [tool for tool in tools or () if isinstance(tool, dict)]
    functions = [tool["function"] if isinstance(tool.get("function"), dict) else tool for tool in schemas]
    return frozenset(name for function in functions if isinstance(name := function.get("name"), str))
