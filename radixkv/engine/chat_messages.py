"""Check that chat messages have a known role, and a text or a list of tool calls, as every template needs them.

A message may lack its content, which OpenAI's clients write as None next to tool calls. Where it is missing, some
templates write no text, some write the word None, and some raise an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from radixkv.errors import ChatError, InvalidInput

Message: TypeAlias = Mapping[str, Any]
Render: TypeAlias = Callable[[Sequence[Message]], str]

ROLES = ("system", "user", "assistant", "tool", "developer")


def check_messages(messages: Sequence[Message], template: str = "") -> None:
    """Raise InvalidInput, with the index, for a message with a wrong role, content or list of calls.

    A role is one of `ROLES`, or one that the source of the chat template names in quotes, such as 'ipython'.
    """
    for at, message in enumerate(messages):
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise InvalidInput(
                f"message {at} has no role, it has {', '.join(map(repr, message)) or 'no field'}: "
                'write {"role": "user", "content": "..."}'
            )
        if role not in ROLES and f"'{role}'" not in template and f'"{role}"' not in template:
            raise InvalidInput(f"message {at} has the role {role!r}: allowed are {', '.join(ROLES)}")
        content = message.get("content")
        if isinstance(content, int | float | bytes | Mapping) and role != "tool":
            raise InvalidInput(f"message {at} has the content {content!r}: it must be a text, or a list of parts")
        calls = message.get("tool_calls")
        if calls and not (isinstance(calls, list | tuple) and all(map(_is_call, calls))):
            raise InvalidInput(f"message {at} has tool_calls that are no list of dicts: {calls!r}")


def _is_call(call: Any) -> bool:
    return isinstance(call, Mapping) and isinstance(call.get("function") or {}, Mapping)


def rendered_with_text(messages: Sequence[Message], render: Render) -> str:
    """Return `render(messages)`, with an empty text in place of missing content of tool calls.

    Renders once if every other message has content, else up to three times and once more for each that has none.
    Raises InvalidInput, with the index, for a message that the template cannot write without content, and the ChatError
    of `render`.
    """
    given = [_with_text(message) if message.get("tool_calls") else _without_none(message) for message in messages]
    empty = [at for at, message in enumerate(given) if "content" not in message]
    if not empty:
        return render(given)
    filled = list(map(_with_text, given))
    text = render(filled)
    written = _attempt(given, render, text)
    if written is not None:
        return written
    for at in empty:
        if _attempt([*filled[:at], given[at], *filled[at + 1 :]], render, text) is None:
            raise InvalidInput(f"message {at} has no content, and this model's chat template needs a text there")
    return text


def _with_text(message: Message) -> Message:
    return {**message, "content": ""} if message.get("content") is None else message


def _without_none(message: Message) -> Message:
    """Leave out content of None, as transformers does."""
    return {name: value for name, value in message.items() if name != "content" or value is not None}


def _attempt(messages: Sequence[Message], render: Render, filled: str) -> str | None:
    """Render messages without content; None if the template refuses that, or writes the word None for it.

    `filled` is the text with empty content in place of missing content.
    """
    try:
        text = render(messages)
    except ChatError:
        return None
    return text if text.count("None") <= filled.count("None") else None
