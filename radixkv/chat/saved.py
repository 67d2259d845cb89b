"""Hold the state of a conversation, write it to a small JSON file, and read it back.

A file is written as a whole or not at all. It names the model, because token ids mean nothing to another one.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from radixkv.chat.history_mode import HistoryMode
from radixkv.chat.messages import Message, ToolCall
from radixkv.engine.input_processor import checked_ids
from radixkv.errors import InvalidInput
from radixkv.sampling.params import is_int

Overflow = Literal["error", "drop_oldest"]
_FORMAT = "radixkv.chat"
_VERSION = 1


@dataclass(frozen=True)
class Turn:
    """A user message, or tool results, and the reply to it.

    `end` is the number of the session's token ids up to the end of the reply; None if turns before it were dropped.
    """

    messages: tuple[Message, ...]
    reply_ids: tuple[int, ...]
    reply: Message
    tool_calls: tuple[ToolCall, ...]
    end: int | None


@dataclass(frozen=True)
class SessionState:
    """Everything that another session needs to continue a conversation; its lists still belong to the session."""

    tools: list[Any] | None
    date: str
    namespace: Hashable
    history: HistoryMode
    overflow: Overflow
    opening: Sequence[Message]
    turns: Sequence[Turn]
    token_ids: Sequence[int]


def write(state: SessionState, model: str, path: str | os.PathLike[str]) -> None:
    """Write a conversation with `model` to `path`. Raises InvalidInput for values that JSON cannot hold, OSError."""
    target = Path(path)
    try:
        text = json.dumps(_as_json(state, model), ensure_ascii=False)
    except TypeError as error:
        raise InvalidInput(f"this conversation cannot be saved, JSON cannot hold it: {error}") from error
    partial = target.with_name(target.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, target)


def read(path: str | os.PathLike[str], model: str, vocab_size: int) -> SessionState:
    """Read the conversation in `path`. Raises InvalidInput for another format, version or model; OSError."""
    saved = _read(path)
    if saved["model"] != model:
        raise InvalidInput(f"{path} was saved with the model {saved['model']!r}, this engine runs {model!r}")
    with damaged(path):
        return _from_json(saved, vocab_size)


@contextmanager
def damaged(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn an error over an unexpected value in a saved conversation into InvalidInput."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InvalidInput(f"{path} is damaged: {type(error).__name__}: {error}") from error


def _read(path: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        saved = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidInput(f"{path} is no saved conversation: {error}") from error
    if not isinstance(saved, dict) or saved.get("format") != _FORMAT:
        raise InvalidInput(f"{path} is no saved conversation: its format is not {_FORMAT!r}")
    if saved.get("version") != _VERSION:
        raise InvalidInput(f"{path} has version {saved.get('version')!r}, this radixkv reads {_VERSION}")
    missing = [name for name in ("model", "token_ids", "turns", "opening") if name not in saved]
    if missing:
        raise InvalidInput(f"{path} is damaged: it lacks {', '.join(missing)}")
    return saved


def _as_json(state: SessionState, model: str) -> dict[str, Any]:
    if not isinstance(state.namespace, (str, int, type(None))):
        raise InvalidInput(f"only a namespace of text, int or None can be saved, not {state.namespace!r}")
    return {
        "format": _FORMAT,
        "version": _VERSION,
        "model": model,
        "tools": state.tools,
        "date": state.date,
        "namespace": state.namespace,
        "history": state.history,
        "overflow": state.overflow,
        "opening": state.opening,
        "turns": [_turn_as_json(turn) for turn in state.turns],
        "token_ids": list(state.token_ids),
    }


def _turn_as_json(turn: Turn) -> dict[str, Any]:
    calls = [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in turn.tool_calls]
    return {
        "messages": list(turn.messages),
        "reply": turn.reply,
        "reply_ids": list(turn.reply_ids),
        "tool_calls": calls,
        "end": turn.end,
    }


def _from_json(saved: dict[str, Any], vocab_size: int) -> SessionState:
    ids = _ids(saved["token_ids"], vocab_size)
    return SessionState(
        tools=saved["tools"],
        date=saved["date"],
        namespace=saved["namespace"],
        history=saved["history"],
        overflow=saved["overflow"],
        opening=[_message(message) for message in saved["opening"]],
        turns=[_turn_from_json(turn, len(ids), vocab_size) for turn in saved["turns"]],
        token_ids=ids,
    )


def _turn_from_json(saved: dict[str, Any], length: int, vocab_size: int) -> Turn:
    calls = tuple(ToolCall(**call) for call in saved["tool_calls"])
    messages = tuple(_message(message) for message in saved["messages"])
    end = saved["end"]
    if not messages or (end is not None and not (is_int(end) and 0 <= end <= length)):
        raise ValueError(f"a turn of {len(messages)} messages that ends at {end!r}")
    return Turn(messages, tuple(_ids(saved["reply_ids"], vocab_size)), _message(saved["reply"]), calls, end)


def _message(saved: Any) -> Message:
    if not isinstance(saved, dict) or not isinstance(saved.get("role"), str):
        raise ValueError(f"{saved!r} is no message")
    return saved


def _ids(saved: Any, vocab_size: int) -> array[int]:
    return array("i", checked_ids(saved, vocab_size).tobytes()) if saved != [] else array("i")
