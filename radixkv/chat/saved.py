"""A conversation as a small JSON file, and back.

Knows: the file's format and version. Knows no engine beyond the name of its model.
"""

from __future__ import annotations

import json
import os
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any

from radixkv.chat.messages import ToolCall
from radixkv.chat.session import ChatSession, Turn
from radixkv.chat.template import ChatTemplate
from radixkv.errors import InvalidInput

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
    if max(saved["token_ids"], default=0) >= engine.model.vocab_size:
        raise InvalidInput(f"{path} has token ids outside this model's vocabulary of {engine.model.vocab_size}")
    try:
        return _from_json(engine, saved)
    except (KeyError, TypeError, ValueError) as error:
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
    template = ChatTemplate(model.tokenizer, model.stop_token_ids, saved["tools"], saved["date"])
    session = ChatSession(
        engine,
        template,
        saved["opening"],
        namespace=saved["namespace"],
        history=saved["history"],
        overflow=saved["overflow"],
    )
    session._turns = [_turn_from_json(turn) for turn in saved["turns"]]
    session._ids = array("i", saved["token_ids"])
    return session


def _turn_from_json(saved: dict[str, Any]) -> Turn:
    calls = tuple(ToolCall(**call) for call in saved["tool_calls"])
    return Turn(tuple(saved["messages"]), tuple(saved["reply_ids"]), saved["reply"], calls, saved["end"])
