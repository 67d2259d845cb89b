"""A conversation as a small JSON file, and back.

Knows: the file's format and version. Knows no engine beyond the name of its model.
"""

from __future__ import annotations

import json
import os
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any

from radixkv.chat.messages import Message, ToolCall
from radixkv.chat.session import ChatSession, Turn
from radixkv.chat.template import ChatTemplate
from radixkv.engine.input_processor import checked_ids
from radixkv.errors import InvalidInput
from radixkv.sampling.params import is_int

if TYPE_CHECKING:
    from radixkv.engine import RequestEngine

_FORMAT = "radixkv.chat"
_VERSION = 1


def save(session: ChatSession, path: str | os.PathLike[str]) -> None:
    """Write `session` to `path`, as a whole or not at all. Raises InvalidInput for what JSON cannot hold, OSError."""
    target = Path(path)
    try:
        text = json.dumps(_as_json(session), ensure_ascii=False)
    except TypeError as error:
        raise InvalidInput(f"this conversation cannot be saved, JSON cannot hold it: {error}") from error
    partial = target.with_name(target.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, target)


def resume(engine: RequestEngine, path: str | os.PathLike[str]) -> ChatSession:
    """The session that was saved to `path`. Raises InvalidInput for another format, version or model; OSError."""
    saved = _read(path)
    if saved["model"] != engine.model.name:
        raise InvalidInput(
            f"{path} was saved with the model {saved['model']!r}, this engine runs {engine.model.name!r}"
        )
    try:
        return _from_json(engine, saved)
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


def _as_json(session: ChatSession) -> dict[str, Any]:
    if not isinstance(session._namespace, (str, int, type(None))):
        raise InvalidInput(f"only a namespace of text, int or None can be saved, not {session._namespace!r}")
    return {
        "format": _FORMAT,
        "version": _VERSION,
        "model": session._engine.model.name,
        "tools": session._template.tools,
        "date": session._template.date,
        "namespace": session._namespace,
        "history": "append" if session._append else "template",
        "overflow": session._overflow,
        "opening": session._opening,
        "turns": [_turn_as_json(turn) for turn in session._turns],
        "token_ids": list(session._ids),
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


def _from_json(engine: RequestEngine, saved: dict[str, Any]) -> ChatSession:
    model = engine.model
    template = ChatTemplate(
        model.tokenizer, model.stop_token_ids, saved["tools"], saved["date"], limit=engine.context_limit
    )
    session = ChatSession(
        engine,
        template,
        [_message(message) for message in saved["opening"]],
        namespace=saved["namespace"],
        history=saved["history"],
        overflow=saved["overflow"],
    )
    session._ids = _ids(saved["token_ids"], model.vocab_size)
    session._turns = [_turn_from_json(turn, len(session._ids), model.vocab_size) for turn in saved["turns"]]
    return session


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
