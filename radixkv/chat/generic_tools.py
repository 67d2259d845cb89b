"""Describe tools in the prompt of a template that does not write them, with the calls and results as text.

The format is Hermes', which many models have seen. The system prompt lists the tools; calls are part of the
text of a reply, and results are text of the user.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from radixkv.chat.calls.formats import HERMES
from radixkv.chat.messages import Message

_ABOUT = """# Tools

You can call these functions, each given as JSON:
{tools}

To call a function, write its name and arguments as a JSON object in tags, once for each call:
{start}
{{"name": "...", "arguments": {{...}}}}
{end}"""
_RESULT = "<tool_response>\n{}\n</tool_response>"


def with_tools_in_text(messages: Sequence[Message], tools: Sequence[Any], *, takes_system: bool) -> list[Message]:
    """Return the messages with the tools in the system prompt, and with calls and results as text. O(bytes).

    Without `takes_system`, the template refuses or drops system prompts, and the first message of a user begins with
    the tools. Results and the user's text after them are one message, since many templates require turns to alternate.
    """
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return _with_opening(
        calls_as_text(messages), _ABOUT.format(tools=listed, start=HERMES.start, end=HERMES.end), takes_system
    )


def _with_opening(messages: list[Message], about: str, takes_system: bool) -> list[Message]:
    if takes_system and messages and messages[0].get("role") == "system":
        return [{**messages[0], "content": f"{_text(messages[0])}\n\n{about}"}, *messages[1:]]
    if takes_system:
        return [{"role": "system", "content": about}, *messages]
    for at, message in enumerate(messages):
        if message.get("role") == "user":
            opened = {**message, "content": f"{about}\n\n{_text(message)}"}
            return [*messages[:at], opened, *messages[at + 1 :]]
    return messages


def calls_as_text(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with tool calls as text of the assistant, and results as text of the user. O(bytes)."""
    texts: list[Message] = []
    after_result = False
    for message in messages:
        role = message.get("role")
        if after_result and role in ("tool", "user"):
            text = _RESULT.format(_text(message)) if role == "tool" else _text(message)
            texts[-1]["content"] += f"\n{text}"
        elif role == "tool":
            texts.append({"role": "user", "content": _RESULT.format(_text(message))})
        elif message.get("tool_calls"):
            said = "\n".join(part for part in (_text(message), *map(_call, message["tool_calls"])) if part)
            texts.append({**{name: message[name] for name in message if name != "tool_calls"}, "content": said})
        else:
            texts.append(message)
        after_result = role == "tool"
    return texts


def _call(call: Message) -> str:
    function = call.get("function") or {}
    arguments = function.get("arguments")
    written = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    name = json.dumps(function.get("name"), ensure_ascii=False)
    return f'{HERMES.start}\n{{"name": {name}, "arguments": {written}}}\n{HERMES.end}'


def _text(message: Message) -> str:
    """Return the text of a message, whose parts are joined by line feeds."""
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return "" if content is None else str(content)
