"""Render chat messages with a tokenizer's template, and encode them: control tokens come from the template only.

The names of control tokens in messages of users and tools stay text. A template that writes the date gets the day on
which the conversation began: a new date in the system prompt would change the whole prefix.
"""

from __future__ import annotations

import datetime
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

from radixkv.engine import template_renderer
from radixkv.engine.chat_messages import Message, check_messages, rendered_with_text
from radixkv.errors import ChatError, InvalidInput


def encode_chat(messages: Any, tokenizer: Any | None, *, reply: bool) -> list[int]:
    """Render messages with the tokenizer's chat template, as a session that begins today does, and encode them.

    Control tokens come from the template only. Raises ChatError if the template refuses the messages, and InvalidInput
    as `check_messages` and `rendered_with_text` do.
    """
    if tokenizer is None:
        raise InvalidInput("this model has no tokenizer, so it cannot read chat messages: pass token ids")
    if not getattr(tokenizer, "chat_template", None):
        raise InvalidInput("this tokenizer has no chat template: pass text or token ids instead of chat messages")
    check_messages(messages, template_text(tokenizer))
    control_tokens = ControlTokens(tokenizer)
    guarded = [control_tokens.message(message) for message in messages]
    date = today()
    return control_tokens.encode(rendered_with_text(guarded, lambda each: rendered(tokenizer, each, date, reply=reply)))


def template_source(tokenizer: Any, tools: Sequence[Any] | None = None) -> str:
    """Return the template's source; raises ChatError if it is too long, or none of several fits the conversation."""
    try:
        return template_renderer.check_source(str(tokenizer.get_chat_template(None, tools=tools)))
    except ValueError as error:
        raise ChatError(f"the model's chat template cannot be read: {error}") from error


def rendered(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    date: str,
    tools: Sequence[Any] | None = None,
    *,
    reply: bool,
    arguments: Mapping[str, Any] | None = None,
) -> str:
    """Render a conversation that began on `date`; with `reply` up to where the next reply begins.

    `arguments` are additional variables of the template. Raises ChatError if the template refuses the messages.
    """
    values = {**tokenizer.special_tokens_map, **(arguments or {}), "add_generation_prompt": reply, **_dated(date)}
    source = template_source(tokenizer, tools)
    try:
        return template_renderer.render(source, messages, tools, values)
    except Exception as error:  # templates raise any class, and jinja its own
        raise ChatError(f"the model's chat template refuses this conversation: {error}") from error


# Inserted into the text of a control token, so that its two halves are encoded as text. A Unicode noncharacter, which
# no valid text contains.
_BREAK = "\ufdd0"
_UNTRUSTED = frozenset({"user", "tool"})


class ControlTokens:
    """Breaks up the names of control tokens in messages of users and tools, and encodes the rendered text."""

    def __init__(self, tokenizer: Any, more: Collection[str] = ()) -> None:
        """Use the control tokens of a tokenizer and of its chat template, and `more` of its added tokens."""
        self._tokenizer, self._more = tokenizer, more

    def message(self, message: Message) -> Message:
        """Return the message, with control tokens broken up if its role is user or tool."""
        if message.get("role") not in _UNTRUSTED:
            return message
        return {**message, "content": self._break_up(message.get("content"))}

    def quoted(self, value: Any) -> Any:
        """Return a JSON value with control tokens broken up in all of its strings."""
        if isinstance(value, str):
            return self._break_up(value)
        if isinstance(value, Mapping):
            return {self.quoted(key): self.quoted(each) for key, each in value.items()}
        return [self.quoted(each) for each in value] if isinstance(value, list) else value

    def encode(self, text: str) -> list[int]:
        """Return the ids of a rendered text; text that `message` broke up is encoded in pieces.

        Raises as `checked_text`.
        """
        ids: list[int] = []
        for piece in checked_text(text).split(_BREAK):
            if piece:
                ids.extend(self._tokenizer.encode(piece, add_special_tokens=False))
        return ids

    def _break_up(self, content: Any) -> Any:
        if isinstance(content, str):
            content = content.replace(_BREAK, "")
            for control in self._controls:
                content = content.replace(control, control[0] + _BREAK + control[1:])
            return content
        if isinstance(content, list):
            return [{**part, "text": self._break_up(part["text"])} if "text" in part else part for part in content]
        return content

    @cached_property
    def _controls(self) -> list[str]:
        """The texts of all control tokens, longest first.

        An added token of the chat template counts even if it is not marked as special, such as Qwen's
        `</tool_response>`: a message must not close a block that the template opened.
        """
        tokenizer = self._tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        template = template_text(tokenizer)
        controls = {*self._more, *map(str, tokenizer.all_special_tokens)}
        controls |= {t.content for t in added if t.special or (t.content.strip() and t.content in template)}
        return sorted((text for text in controls if len(text) > 1), key=lambda text: (-len(text), text))


def template_text(tokenizer: Any | None) -> str:
    """Return the source of a tokenizer's chat template, of all of them if there are several; empty without one."""
    given = getattr(tokenizer, "chat_template", None) or ""
    return "\n".join(map(str, given.values())) if isinstance(given, Mapping) else str(given)


def checked_text(text: str) -> str:
    """Return the text; raises InvalidInput if it has half of a surrogate pair, which tokenizers refuse."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(f"this text is no valid Unicode: {error}") from error
    return text


_FORM = "%d %b %Y"


def today() -> str:
    """Return the date in the format that sessions save: 21 Nov 2026."""
    return datetime.date.today().strftime(_FORM)


def check_date(date: object) -> str:
    """Return the date; raises InvalidInput unless it has the format of `today`."""
    try:
        datetime.datetime.strptime(str(date), _FORM)
    except ValueError as error:
        raise InvalidInput(f"a conversation's date is written as {today()!r}, not {date!r}") from error
    return str(date)


def _dated(date: str) -> dict[str, Any]:
    """Return the variables with which a template writes the date, with a clock that stands at its beginning."""
    return {"date_string": date, "strftime_now": datetime.datetime.strptime(date, _FORM).strftime}
