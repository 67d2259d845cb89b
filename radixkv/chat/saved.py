"""Hold the state of a conversation, write it to a small JSON file, and read it back.

A file is written as a whole or not at all, and only its owner may read it. It names the model, because token ids mean
nothing to another one. A reader checks its digest and that its turns, replies and token ids agree. The digest detects
damage; it proves no origin. A file does not select a namespace: the caller of `read` does.

Version 1 had no digest and contained the namespace. It is read with all other checks.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from radixkv import private_files
from radixkv.chat.calls.tools import too_deep
from radixkv.chat.calls.values import DEEPEST
from radixkv.chat.history_mode import HistoryMode
from radixkv.chat.messages import Message, ToolCall
from radixkv.engine.chat_prompts import check_date
from radixkv.engine.input_processor import checked_ids
from radixkv.errors import ChatError, InvalidInput
from radixkv.settings.kinds import is_int

Overflow = Literal["error", "drop_oldest"]
_FORMAT = "radixkv.chat"
_VERSION = 2
_FIELDS = ("model", "tools", "date", "history", "overflow", "opening", "turns", "token_ids")
_ADDED = {1: ("namespace",), 2: ("namespaced", "digest")}  # fields of a version in addition to these


@dataclass(frozen=True)
class Turn:
    """A user message, or tool results, and the reply to it.

    `end` is the number of the session's token ids up to the end of the reply. It is None if turns before it were
    dropped, and where each turn renders the whole history, because that may shorten earlier turns.
    """

    messages: tuple[Message, ...]
    reply_ids: tuple[int, ...]
    reply: Message
    tool_calls: tuple[ToolCall, ...]
    end: int | None


@dataclass(frozen=True)
class SessionState:
    """Everything that another session needs to begin or continue a conversation; its lists belong to the session.

    `prefix` is the compressed prefix with which it begins; in a state from a file, its text, method and `keep`.
    """

    tools: list[Any] | None
    date: str
    namespace: Hashable
    history: HistoryMode
    overflow: Overflow
    opening: Sequence[Message]
    turns: Sequence[Turn] = ()
    token_ids: Sequence[int] = ()
    prefix: Any = None


def write(state: SessionState, model: str, path: str | os.PathLike[str]) -> None:
    """Write a conversation with `model` to `path`, as a whole file that only its owner may read.

    Raises InvalidInput for values that JSON cannot hold, OSError.
    """
    if not isinstance(path, str | os.PathLike):
        raise InvalidInput(f"path must name a file to write, got {path!r}")
    try:
        saved = json.loads(json.dumps(_as_json(state, model)))
        _check_nesting(saved)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(f"this conversation cannot be saved: JSON cannot hold it: {error}") from error
    saved["digest"] = digest(saved)
    private_files.write(path, _encoded(saved))


def read(path: str | os.PathLike[str], model: str, vocab_size: int, namespace: Hashable = None) -> SessionState:
    """Read the conversation in `path`, which continues in `namespace`.

    Raises InvalidInput with the reason for a file that is damaged, is no saved conversation or belongs to another
    model, for one of a namespace if none is given, and for a path that is missing or cannot be read.
    """
    saved = _read(path)
    if saved["model"] != model:
        raise InvalidInput(f"{path} was saved with the model {saved['model']!r}, this engine runs {model!r}")
    with damaged(path):
        state = replace(_from_json(saved, vocab_size), namespace=namespace)
    if namespace is None and (saved.get("namespaced") or saved.get("namespace") is not None):
        raise InvalidInput(f"{path} was saved in a namespace: name the one to continue in, resume(path, namespace=...)")
    return state


def kv_path(path: str | os.PathLike[str]) -> str:
    """Return the file of the KV of a conversation in `path`."""
    return f"{os.fspath(path)}.kv"


def digest(saved: dict[str, Any]) -> str:
    """Return the SHA-256 of the fields of a save, without the digest itself; independent of their order."""
    fields = {name: value for name, value in saved.items() if name != "digest"}
    return sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


@contextmanager
def damaged(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn an error over an unexpected value in a saved conversation into InvalidInput."""
    try:
        yield
    except ChatError as error:
        raise InvalidInput(f"{path} cannot be continued with this engine's chat template: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise InvalidInput(f"{path} is damaged: {type(error).__name__}: {error}") from error


# ---- reading


def _read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the fields of a save, which are complete and, since version 2, as they were written."""
    try:
        saved = json.loads(Path(path).read_text(encoding="utf-8"))
    except TypeError as error:
        raise InvalidInput(f"path must name a file that `save` of a session wrote, got {path!r}") from error
    except OSError as error:
        reason = error.strerror or error
        raise InvalidInput(f"{path} cannot be read ({reason}): name a file that `save` of a session wrote") from error
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{path} is no saved conversation: {error}") from error
    if not isinstance(saved, dict) or saved.get("format") != _FORMAT:
        raise InvalidInput(f"{path} is no saved conversation: its format is not {_FORMAT!r}")
    version = saved.get("version")
    if not is_int(version) or version not in _ADDED:
        raise InvalidInput(f"{path} has version {version!r}, this radixkv reads 1 to {_VERSION}")
    missing = [name for name in (*_FIELDS, *_ADDED[version]) if name not in saved]
    if missing:
        raise InvalidInput(f"{path} is damaged: it lacks {', '.join(missing)}")
    with damaged(path):
        _check_nesting(saved)
        if version > 1 and saved["digest"] != digest(saved):
            raise ValueError("its digest differs: the file was changed, or is not whole")
    return saved


def _check_nesting(value: Any) -> None:
    """Raise ValueError for lists and objects that are nested too deeply to be copied and rendered."""
    if too_deep(value):
        raise ValueError(f"more than {DEEPEST} lists and objects are nested")


def _from_json(saved: dict[str, Any], vocab_size: int) -> SessionState:
    """Return the state; raises the errors that `damaged` turns into InvalidInput."""
    tools, history = saved["tools"], saved["history"]
    if not isinstance(tools, list | None):
        raise ValueError(f"tools are a list or null, not {tools!r}")
    if history not in ("append", "template"):
        raise ValueError(f"history is append or template, not {history!r}")
    ids, prefix = _ids(saved["token_ids"], vocab_size), saved.get("prefix")
    turns = [_turn_from_json(turn, vocab_size) for turn in saved["turns"]]
    if history == "template":  # version 1 wrote an end here, too, which later turns make wrong
        turns = [replace(turn, end=None) for turn in turns]
    _check_order(turns)
    _check_replies(turns, ids)
    return SessionState(
        tools=tools,
        date=check_date(saved["date"]),
        namespace=None,
        history=history,
        overflow=saved["overflow"],
        opening=[_message(message) for message in saved["opening"]],
        turns=turns,
        token_ids=ids,
        prefix=prefix and (checked_ids(prefix["text"], vocab_size), prefix["method"], prefix["keep"]),
    )


def _turn_from_json(saved: dict[str, Any], vocab_size: int) -> Turn:
    calls = tuple(ToolCall(**call) for call in saved["tool_calls"])
    if not all(isinstance(call.arguments, dict) for call in calls):
        raise ValueError("the arguments of a tool call are no object")
    messages = tuple(_message(message) for message in saved["messages"])
    reply, end = _message(saved["reply"], "assistant"), saved["end"]
    if (reply.get("tool_calls") or []) != [call.as_message() for call in calls]:
        raise ValueError("a reply has other tool calls than its turn")
    if not messages or not (end is None or is_int(end)):
        raise ValueError(f"a turn of {len(messages)} messages that ends at {end!r}")
    return Turn(messages, tuple(_ids(saved["reply_ids"], vocab_size)), reply, calls, end)


def _message(saved: Any, *roles: str) -> Message:
    """Return a message that has a role, one of `roles` if they are given."""
    if not isinstance(saved, dict) or not isinstance(saved.get("role"), str) or not saved["role"]:
        raise ValueError(f"{saved!r} is no message")
    if roles and saved["role"] not in roles:
        raise ValueError(f"a message of role {saved['role']!r} where {' or '.join(roles)} is expected")
    return saved


def _check_order(turns: Sequence[Turn]) -> None:
    """Raise ValueError unless each turn is one message of the user, or one result for each call of the turn before."""
    calls: Sequence[ToolCall] = ()
    for at, turn in enumerate(turns, start=1):
        roles = [message["role"] for message in turn.messages]
        answered = [message.get("tool_call_id") for message in turn.messages]
        results = roles == ["tool"] * len(roles) and answered == [call.id for call in calls]
        if roles != ["user"] and not results:
            raise ValueError(f"turn {at} is neither a user's message nor the results of the calls before it: {roles}")
        if not all(isinstance(message.get("content"), str) for message in (*turn.messages, turn.reply)):
            raise ValueError(f"turn {at} has a message without text")
        calls = turn.tool_calls


def _check_replies(turns: Sequence[Turn], ids: Sequence[int]) -> None:
    """Raise ValueError unless the ends grow, and the ids before each are the ids of its reply.

    The last id of a reply may differ: a template may write another stop token than the model has sampled.
    """
    if not turns and len(ids):
        raise ValueError(f"{len(ids)} token ids without a turn")
    before = 0
    for at, turn in enumerate(turns, start=1):
        is_last = at == len(turns)
        if turn.end is None and not before and not is_last:
            continue
        end = len(ids) if turn.end is None and not before else turn.end
        if end is None or not before < end <= len(ids) or (is_last and end != len(ids)):
            raise ValueError(f"turn {at} ends at {end!r}, after {before} and within {len(ids)} token ids")
        start, said = end - len(turn.reply_ids), turn.reply_ids[:-1]
        if not turn.reply_ids or start < before or tuple(ids[start : start + len(said)]) != said:
            raise ValueError(f"the reply of turn {at} differs from the token ids before its end {end}")
        before = end


def _ids(saved: Any, vocab_size: int) -> array[int]:
    return array("i", checked_ids(saved, vocab_size).tobytes()) if saved != [] else array("i")


# ---- writing


def _as_json(state: SessionState, model: str) -> dict[str, Any]:
    fields = asdict(replace(state, namespace=None, token_ids=list(state.token_ids), prefix=None))
    del fields["namespace"], fields["prefix"]
    if (prefix := state.prefix) is not None:
        fields["prefix"] = {"text": prefix.text.tolist(), "method": prefix.method, "keep": prefix.keep}
    namespaced = state.namespace is not None
    return {"format": _FORMAT, "version": _VERSION, "model": model, "namespaced": namespaced, **fields}


def _encoded(saved: dict[str, Any]) -> bytes:
    """Return the text of a save as UTF-8; a half of a surrogate pair, as in a call's arguments, has no other form."""
    try:
        return json.dumps(saved, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return json.dumps(saved).encode()
