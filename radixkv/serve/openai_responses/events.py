"""Build the output of one response from the pieces of a reply, and the server-sent events that announce it.

The events have consecutive sequence numbers. An item is announced, then its parts, then their text piece by piece; each
is ended before the next item starts. Consecutive pieces of one kind are one item.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from radixkv.chat.calls.block import CallDelta
from radixkv.serve.errors import ApiError
from radixkv.serve.fields import JsonObject
from radixkv.serve.openai_responses.items import seal
from radixkv.serve.openai_responses.schemas import ResponseRequest
from radixkv.serve.reply import Piece

Status = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
_ENDS = {"completed": "completed", "incomplete": "incomplete", "failed": "failed", "cancelled": "incomplete"}
_encode = json.JSONEncoder(separators=(",", ":")).encode


@dataclass(frozen=True, slots=True)
class TextForm:
    """The names of the items, parts and events of one kind of text."""

    item: str
    prefix: str
    part: str
    text_event: str
    part_event: str = "response.content_part"
    index: str = "content_index"
    extra: Mapping[str, Any] = field(default_factory=dict)


MESSAGE = TextForm("message", "msg", "output_text", "response.output_text", extra={"logprobs": []})
REASONING = TextForm("reasoning", "rs", "reasoning_text", "response.reasoning_text")
SUMMARY = replace(
    REASONING,
    part="summary_text",
    text_event="response.reasoning_summary_text",
    part_event="response.reasoning_summary_part",
    index="summary_index",
)


class ResponseEvents:
    """One response: its fields and output so far. Each method returns the events of a change as bytes."""

    def __init__(self, model: str, request: ResponseRequest) -> None:
        """Start a response without output."""
        self.id = f"resp_{uuid.uuid4().hex}"
        self.output: list[JsonObject] = []
        self.response: JsonObject = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "model": model,
            "output": self.output,
            "usage": None,
        }
        self.logprobs: list[JsonObject] = []  # of sampled tokens whose text is not in an event yet
        self._request = request
        self._encoded_echo = ""
        self._reasoning = SUMMARY if request.summary else REASONING
        self._sequence = 0
        self._text: _OpenText | None = None
        self._call: _Deltas | None = None

    def whole(self) -> JsonObject:
        """Return the response object."""
        return {**self.response, **self._request.echo}

    def start(self) -> bytes:
        """Announce the response."""
        return self._of_response("response.created") + self._of_response("response.in_progress")

    def push(self, piece: Piece, logprobs: Sequence[JsonObject] = ()) -> bytes:
        """Add a piece of the reply, with the log probabilities of its last token if it is content. O(characters)."""
        if piece.call is not None:
            self.logprobs.clear()  # of tokens of calls
            return self._of_call(piece.call)
        form, text = (self._reasoning, piece.thinking) if piece.thinking else (MESSAGE, piece.content)
        if not text:
            return b""
        events = b""
        if self._text is None or self._text.form is not form:
            if self._text is not None:
                self.logprobs.clear()  # of the end of thinking
            events = self._close_text() + self._open_text(form)
        assert self._text is not None
        scored, self.logprobs = [*self.logprobs, *logprobs] if form is MESSAGE else [], []
        return events + self._text.delta(text, self._next(), scored)

    def finish(self, status: Status, usage: JsonObject | None, reason: str | None = None) -> bytes:
        """End the response; `reason` says why it is incomplete. One with an incomplete call is incomplete."""
        cut = status in ("incomplete", "cancelled")
        events = self._close_text("incomplete" if cut else "completed") + self._close_call("incomplete")
        if any(item["status"] == "incomplete" for item in self.output) and not cut:
            status = "incomplete"
        if status == "completed" and not any(item["type"] in ("message", "function_call") for item in self.output):
            events += self._open_text(MESSAGE) + self._close_text()  # an empty reply, as clients expect a message
        self._end(status, usage)
        if reason is not None:
            self.response["incomplete_details"] = {"reason": reason}
        return events + self._of_response(f"response.{_ENDS[status]}")

    def fail(self, error: ApiError) -> bytes:
        """End the response with an error: an event of the error, then the failed response."""
        self._text = self._call = None
        shown = error.body()["error"]
        event = self._event("error", code=error.code, message=shown["message"], param=error.param)
        self._end("failed", None)
        code = "server_error" if error.code is None or error.status >= 500 else error.code
        self.response["error"] = {"code": code, "message": shown["message"]}
        return event + self._of_response("response.failed")

    # ---- inside

    def _end(self, status: Status, usage: JsonObject | None) -> None:
        self.response.update(status=status, usage=usage)
        if status == "completed":
            self.response["completed_at"] = int(time.time())

    def _open_text(self, form: TextForm) -> bytes:
        text = _OpenText(form, len(self.output))
        self._text = text
        item = self._text_item(text, "in_progress")
        self.output.append(item)
        added = self._event("response.output_item.added", output_index=text.at, item=item)
        return added + self._event(f"{form.part_event}.added", **text.place, part=_part(form, "", []))

    def _close_text(self, status: Status = "completed") -> bytes:
        text = self._text
        if text is None:
            return b""
        self._text = None
        form, said = text.form, text.text
        text.logprobs += self.logprobs if form is MESSAGE else []  # of tokens without text, such as the last one
        self.logprobs = []
        item = self._text_item(text, status)
        self.output[text.at] = item
        return b"".join(
            [
                self._event(f"{form.text_event}.done", **text.place, text=said, **text.extra),
                self._event(f"{form.part_event}.done", **text.place, part=_part(form, said, text.logprobs)),
                self._event("response.output_item.done", output_index=text.at, item=item),
            ]
        )

    def _text_item(self, text: _OpenText, status: Status) -> JsonObject:
        form = text.form
        parts = [_part(form, text.text, text.logprobs)] if status != "in_progress" else []
        head = {"id": text.id, "type": form.item, "status": status}
        if form is MESSAGE:
            return {**head, "role": "assistant", "content": parts}
        item: JsonObject = {
            **head,
            "summary": parts if form is SUMMARY else [],
            "content": parts if form is REASONING else [],
        }
        if self._request.encrypted:
            item["encrypted_content"] = seal(text.text) if parts else None
        return item

    def _of_call(self, delta: CallDelta) -> bytes:
        """Return the events for more of a call. A call ends before anything else begins."""
        events = self._close_text() + self._open_call(delta) if delta.opens else b""
        assert self._call is not None, "the first piece of a call opens it"
        if delta.arguments:
            events += self._call.add(delta.arguments, self._next())
        if delta.call is None:
            return events
        return events + self._close_call("completed" if delta.call.complete else "incomplete")

    def _open_call(self, delta: CallDelta) -> bytes:
        namespace, name = self._request.names.get(delta.name, (None, delta.name))
        at, number = len(self.output), f"fc_{uuid.uuid4().hex}"
        item: JsonObject = {"id": number, "type": "function_call", "call_id": delta.id, "name": name}
        if namespace is not None:
            item["namespace"] = namespace
        item |= {"status": "in_progress", "arguments": ""}
        self.output.append(item)
        self._call = _Deltas("response.function_call_arguments.delta", {"item_id": number, "output_index": at})
        return self._event("response.output_item.added", output_index=at, item=item)

    def _close_call(self, status: Status) -> bytes:
        call, self._call = self._call, None
        if call is None:
            return b""
        item = self.output[-1] = {**self.output[-1], "status": status, "arguments": call.text}
        done = self._event("response.function_call_arguments.done", **call.fields, arguments=call.text)
        return done + self._event("response.output_item.done", output_index=len(self.output) - 1, item=item)

    def _of_response(self, kind: str) -> bytes:
        """Return an event with the whole response. Its fields that repeat the request are encoded once."""
        if not self._encoded_echo:
            self._encoded_echo = _encode(self._request.echo)[1:]
        response = _encode(self.response)[:-1] + "," + self._encoded_echo
        event = f'event: {kind}\ndata: {{"type":"{kind}","sequence_number":{self._next()},"response":{response}}}\n\n'
        return event.encode()

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = _encode({"type": kind, "sequence_number": self._next(), **fields})
        return f"event: {kind}\ndata: {body}\n\n".encode()

    def _next(self) -> int:
        number = self._sequence
        self._sequence += 1
        return number


class _Deltas:
    """The text of an item so far, with the bytes that all its deltas share: they are the most frequent events."""

    def __init__(self, kind: str, fields: JsonObject) -> None:
        self.fields, self.texts = fields, list[str]()
        shared = _encode({"type": kind, **fields})[:-1]
        self._front = f'event: {kind}\ndata: {shared},"sequence_number":'

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.texts)

    def add(self, text: str, sequence: int) -> bytes:
        """Add text, and return its event."""
        self.texts.append(text)
        return f'{self._front}{sequence},"delta":{_encode(text)}}}\n\n'.encode()


class _OpenText:
    """The item of a text that is still arriving."""

    def __init__(self, form: TextForm, at: int) -> None:
        self.form, self.at = form, at
        self.id = f"{form.prefix}_{uuid.uuid4().hex}"
        self.place = {"item_id": self.id, "output_index": at, form.index: 0}
        self.logprobs: list[JsonObject] = []
        self._deltas = _Deltas(f"{form.text_event}.delta", {**self.place, **form.extra})

    @property
    def text(self) -> str:
        """The text so far."""
        return self._deltas.text

    @property
    def extra(self) -> JsonObject:
        """The fields of the last event of the text that its form adds."""
        return {"logprobs": _for_event(self.logprobs)} if self.form is MESSAGE else {}

    def delta(self, text: str, sequence: int, logprobs: list[JsonObject]) -> bytes:
        """Add text with log probabilities, usually without any, and return its event."""
        if not logprobs:
            return self._deltas.add(text, sequence)
        self._deltas.texts.append(text)
        self.logprobs += logprobs
        kind = f"{self.form.text_event}.delta"
        event = {"type": kind, **self.place, "logprobs": _for_event(logprobs)}
        event |= {"sequence_number": sequence, "delta": text}
        return f"event: {kind}\ndata: {_encode(event)}\n\n".encode()


def _for_event(logprobs: list[JsonObject]) -> list[JsonObject]:
    """Return log probabilities as events have them: without the bytes of tokens."""
    tops = [[{name: top[name] for name in ("token", "logprob")} for top in each["top_logprobs"]] for each in logprobs]
    return [
        {"token": each["token"], "logprob": each["logprob"], "top_logprobs": top}
        for each, top in zip(logprobs, tops, strict=True)
    ]


def _part(form: TextForm, text: str, logprobs: list[JsonObject]) -> JsonObject:
    part: JsonObject = {"type": form.part, "text": text}
    return {**part, "annotations": [], "logprobs": logprobs} if form is MESSAGE else part
