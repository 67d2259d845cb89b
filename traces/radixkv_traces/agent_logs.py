"""Session logs of coding agents, one JSON object a line: Claude Code, and Codex.

A log has the text that the user, the tools and the model wrote. It lacks parts of each prompt: the definitions of
tools, and for Claude Code the system prompt. Thinking is left out, because providers drop it from later prompts.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from radixkv_traces.chats import ChatRequest, Message
from radixkv_traces.records import Epoch, Line, Named, is_count, short_repr

_OPEN = 64  # answers of Claude Code whose later lines may still come


@dataclass(slots=True)
class _Entry:
    """A line of Claude Code's log: its place in the tree of lines."""

    parent: str | None
    time: float
    message: Message | None = None  # of the user
    answer: _Answer | None = None  # this line is a block of
    results: dict[str, Message] = field(default_factory=dict)  # of tools, by the id of the call


@dataclass(slots=True)
class _Answer:
    """An answer of Claude Code, whose blocks are on lines of their own."""

    prompt: tuple[Message, ...]
    time: float
    session: str
    turn: int
    texts: list[str] = field(default_factory=list)
    calls: list[Message] = field(default_factory=list)
    output: int | None = None
    stop: str | None = None
    said: Message | None = None  # its message, once a later prompt has it

    def message(self) -> Message:
        if self.said is None:
            self.said = {"role": "assistant", "content": "".join(self.texts)}
            if self.calls:
                self.said["tool_calls"] = self.calls
        return self.said

    def request(self) -> ChatRequest:
        return ChatRequest(
            self.time, self.prompt, self.session, self.turn, self.output, self.message(), self.stop or "end_turn"
        )


def claude_code(objects: Iterator[Named]) -> Iterator[ChatRequest]:
    """Return the requests of a log of Claude Code: one for each message of the model. O(messages) each.

    Lines form a tree by `parentUuid`; sub-agents and edited turns are branches of it. A request is sent at the time of
    the line before it.
    """
    log = _ClaudeCodeLog()
    for name, line in objects:
        yield from log.add(line, line.name("sessionId") or name)
    yield from log.rest()


class _ClaudeCodeLog:
    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._answers: dict[str, _Answer] = {}
        self._results: dict[str, Message] = {}
        self._open: deque[_Answer] = deque()
        self._turns: dict[str, int] = {}
        self._epoch = Epoch()

    def add(self, line: Line, session: str) -> Iterator[ChatRequest]:
        """Read a line; returns the requests that are complete by now."""
        own = line.text("uuid")
        if own is None:
            return  # a summary or a snapshot of files
        time = self._epoch.since(line, "timestamp", line.required("timestamp"))
        entry = self._entries[own] = _Entry(line.text("parentUuid"), time)
        message = line.fields.get("message")
        if not isinstance(message, dict) or line.fields.get("isApiErrorMessage"):
            return
        if line.fields.get("type") == "user":
            self._add_user(line, entry, message)
        elif line.fields.get("type") == "assistant" and message.get("model") != "<synthetic>":
            agent = line.name("agentId")
            self._add_block(line, entry, message, session if agent is None else f"{session}/{agent}")
            while len(self._open) > _OPEN:
                yield self._open.popleft().request()

    def rest(self) -> Iterator[ChatRequest]:
        """Return the requests that were still open at the end of the file."""
        while self._open:
            yield self._open.popleft().request()

    def _add_user(self, line: Line, entry: _Entry, message: dict[str, Any]) -> None:
        texts = []
        for part in _parts(line, message.get("content")):
            if part.get("type") == "tool_result":
                number = str(part.get("tool_use_id"))
                said = {"role": "tool", "tool_call_id": number, "content": _text(line, part.get("content"))}
                entry.results[number] = self._results[number] = said
            else:
                texts.append(_text(line, [part]))
        if texts:
            entry.message = {"role": "user", "content": "\n".join(texts)}

    def _add_block(self, line: Line, entry: _Entry, message: dict[str, Any], session: str) -> None:
        number = str(message.get("id") or line.fields.get("requestId") or line.fields["uuid"])
        answer = self._answers.get(number)
        if answer is None:
            prompt = self._prompt(entry.parent)
            if not prompt:
                return  # the beginning of the conversation is in another file
            before = self._entries.get(entry.parent or "", entry)
            self._turns[session] = turn = self._turns.get(session, 0) + 1
            answer = self._answers[number] = _Answer(prompt, before.time, session, turn)
            self._open.append(answer)
        entry.answer = answer
        for part in _parts(line, message.get("content")):
            if part.get("type") == "text":
                answer.texts.append(_text(line, [part]))
            elif part.get("type") == "tool_use":
                answer.calls.append(_call(part.get("id"), part.get("name"), part.get("input")))
        usage = message.get("usage")
        output = usage.get("output_tokens") if isinstance(usage, dict) else None
        answer.output = output if is_count(output) else answer.output
        answer.stop = message["stop_reason"] if isinstance(message.get("stop_reason"), str) else answer.stop

    def _prompt(self, end: str | None) -> tuple[Message, ...]:
        """Return the messages on the path to a line: results of parallel calls are on branches of it."""
        path: list[_Entry] = []
        seen = set()
        while end is not None and end in self._entries and end not in seen:
            seen.add(end)
            path.append(self._entries[end])
            end = path[-1].parent
        messages: list[Message] = []
        shown: set[int] = set()
        for entry in reversed(path):
            if entry.answer is not None and id(entry.answer) not in shown:
                shown.add(id(entry.answer))
                messages.append(entry.answer.message())
                numbers = [str(call["id"]) for call in entry.answer.calls]
                messages += [self._results[number] for number in numbers if number in self._results]
                shown.update(id(self._results[number]) for number in numbers if number in self._results)
            messages += [each for each in entry.results.values() if id(each) not in shown]
            shown.update(map(id, entry.results.values()))
            if entry.message is not None:
                messages.append(entry.message)
        return tuple(messages)


def codex(objects: Iterator[Named]) -> Iterator[ChatRequest]:
    """Return the requests of a log ("rollout") of Codex: one for each row of items that the model wrote.

    A request is sent at the time of the line before it. O(items) each.
    """
    log = _CodexLog()
    for name, line in objects:
        payload = line.fields.get("payload")
        if not isinstance(payload, dict):
            raise line.wrong("payload", f"{short_repr(payload)} is not an object")
        yield from log.add(line, payload, name)
    yield from log.finished()


class _CodexLog:
    def __init__(self) -> None:
        self._session: str | None = None
        self._history: list[Message] = []
        self._answer: _Answer | None = None  # that is being written
        self._answered = False  # an item came after the answer
        self._before = 0.0
        self._turn = 0
        self._epoch = Epoch()

    def add(self, line: Line, payload: dict[str, Any], name: str) -> Iterator[ChatRequest]:
        """Read a line; returns the request that it completes."""
        now = self._epoch.since(line, "timestamp", line.required("timestamp"))
        kind, item = line.fields.get("type"), payload.get("type")
        if kind == "session_meta" and self._session is None:
            self._begin(payload, name)
        elif kind == "compacted":
            yield from self.finished()
            self._compact(line, payload)
        elif kind == "response_item" and (item in _CODEX_OUTPUT or payload.get("role") == "assistant"):
            if self._answer is None or self._answered:
                yield from self.finished()
                self._turn += 1
                self._answer = _Answer(tuple(self._history), self._before, self._session or name, self._turn)
                self._answered = False
            self._write(line, payload)
        elif kind == "response_item":
            self._answered = True
            self._pending(line, payload)
        elif kind == "event_msg" and item == "token_count" and self._answer is not None:
            self._count(payload)
        if kind == "response_item":
            self._before = now

    def finished(self) -> Iterator[ChatRequest]:
        """Return the request whose answer is complete, if there is one."""
        answer, self._answer = self._answer, None
        if answer is not None:
            inputs = self._history[len(answer.prompt) :]
            self._history[len(answer.prompt) :] = [answer.message(), *inputs]
            answer.stop = "tool_use" if answer.calls else "end_turn"
            if answer.prompt:
                yield answer.request()

    def _begin(self, payload: dict[str, Any], name: str) -> None:
        self._session = payload["id"] if isinstance(payload.get("id"), str) else name
        base = payload.get("base_instructions")
        text = base.get("text") if isinstance(base, dict) else payload.get("instructions")
        if isinstance(text, str) and text:
            self._history.append({"role": "system", "content": text})

    def _compact(self, line: Line, payload: dict[str, Any]) -> None:
        kept = [each for each in self._history if each["role"] == "system"]
        history = payload.get("replacement_history")
        self._history = kept
        if isinstance(history, list):
            for item in history:
                if isinstance(item, dict):
                    self._pending(line, item)
        else:
            self._history.append({"role": "user", "content": _text(line, payload.get("message"))})

    def _pending(self, line: Line, item: dict[str, Any]) -> None:
        """Add an item that the model reads."""
        kind = str(item.get("type"))
        if kind == "message":
            role = item.get("role") if item.get("role") in ("system", "developer", "assistant") else "user"
            self._history.append({"role": role, "content": _text(line, item.get("content"))})
        elif kind.endswith("_output"):
            output = item.get("output")
            text = output if isinstance(output, str) else json.dumps(output, ensure_ascii=False)
            self._history.append({"role": "tool", "tool_call_id": str(item.get("call_id")), "content": text})

    def _write(self, line: Line, item: dict[str, Any]) -> None:
        """Add an item that the model wrote."""
        answer = self._answer
        assert answer is not None
        if item.get("type") == "message":
            answer.texts.append(_text(line, item.get("content")))
        elif item.get("type") != "reasoning":
            arguments = item.get("arguments", item.get("input", item.get("action")))
            answer.calls.append(_call(item.get("call_id"), item.get("name", item.get("type")), arguments))

    def _count(self, payload: dict[str, Any]) -> None:
        info = payload.get("info")
        usage = info.get("last_token_usage") if isinstance(info, dict) else None
        output = usage.get("output_tokens") if isinstance(usage, dict) else None
        if self._answer is not None and self._answer.output is None and is_count(output):
            self._answer.output = output


_CODEX_OUTPUT = ("reasoning", "function_call", "custom_tool_call", "local_shell_call", "web_search_call")


def _parts(line: Line, content: Any) -> list[dict[str, Any]]:
    """Return a content as a list of parts."""
    if content is None or isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise line.wrong("message.content", f"{short_repr(content)} is no string and no list of parts")
    return content


def _text(line: Line, content: Any) -> str:
    """Return the text of a content; a part without text counts as its type."""
    texts = [part.get("text", f"[{part.get('type')}]") for part in _parts(line, content)]
    return "".join(text if isinstance(text, str) else "" for text in texts)


def _call(number: Any, name: Any, arguments: Any) -> Message:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": str(number), "type": "function", "function": {"name": str(name), "arguments": text}}
