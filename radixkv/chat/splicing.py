"""Render a whole history by its template, with the sampled token ids in place of the replies.

Each reply is rendered as marker words. The text that the template writes around the markers is encoded, and the sampled
ids of the reply are put between. If the template leaves out the thinking of a reply, its ids are left out too.

Some templates drop the thinking of a reply but keep its tool calls. Markers cannot separate the text that replaces the
thinking from the text that begins a call. Such a reply is rendered verbatim, and its ids replace their own text if the
rendered history contains it.
"""

from __future__ import annotations

import json
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, TypeAlias

from radixkv.chat.messages import Message
from radixkv.chat.rendering import Rendering
from radixkv.chat.reply_form import CallNames, Marks, ReplyForm
from radixkv.chat.thinking import CHANNEL
from radixkv.errors import ChatError

_REMEMBERED = 20_000  # replies whose thinking was found
Piece: TypeAlias = tuple[str, Sequence[int]]  # text to encode, and the ids that follow it


@dataclass(frozen=True)
class _Sampled:
    """A reply of the history: its index, its ids without a stop token, and how it is rendered.

    `spoken_from` is the number of ids that are thinking. `headed`: the answer begins with a header of its own.
    """

    at: int
    ids: Sequence[int]
    marks: Marks
    calls: CallNames
    after_results: bool
    spoken_from: int
    headed: bool


class Splicing:
    """Splices sampled ids into one rendered history.

    `said` maps positions in `messages` to the ids sampled there, without stop tokens. Without `keep_thinking` the
    template decides for each reply whether its thinking is shown.
    """

    def __init__(
        self,
        rendering: Rendering,
        form: ReplyForm,
        stops: Sequence[str],
        messages: Sequence[Message],
        said: Mapping[int, Sequence[int]],
        *,
        keep_thinking: bool,
    ) -> None:
        """Prepare the marks; `stops` are the texts of the tokens that may end a reply."""
        self._rendering, self._form, self._stops = rendering, form, stops
        self._messages, self._keep = messages, keep_thinking
        word = unused_word([*messages, rendering.tools])
        self._replies = [self._sampled(at, said[at], word) for at in sorted(said)]
        self._verbatim: set[int] = set()

    def pieces(self) -> Iterator[Piece]:
        """Yield the text before each reply with the ids of the reply, then the text after the last one with no ids.

        Raises ChatError if the template drops a reply.
        """
        thinking = {reply.at for reply in self._replies if reply.spoken_from}
        rest = self._rendered(thinking)
        shown = {reply.at for reply in self._replies if reply.at in thinking and reply.marks.thinking in rest}
        self._verbatim = {
            reply.at for reply in self._replies if reply.at in thinking - shown and reply.calls and not reply.headed
        }
        if shown != thinking:  # without its thinking a reply may begin differently: render again
            rest = self._rendered(shown)
        for reply in self._replies:
            if reply.at in self._verbatim:
                before, ids, rest = self._split_at_text(reply, rest)
            else:
                before, rest = self._split_at_marks(reply, rest)
                before, ids = self._with_lead(reply, before, thinks=reply.at in shown)
            yield before, ids
        yield rest, ()

    # ---- inside

    def _sampled(self, at: int, ids: Sequence[int], word: str) -> _Sampled:
        marks = Marks(f"{word}answer{at}.", f"{word}thinking{at}.", f"{word}call{at}.")
        after_results = at > 0 and self._messages[at - 1].get("role") == "tool"
        calls = call_names(self._messages[at])
        opened = self._form.opens_thinking(after_results=after_results)
        whole = self._keep or self._form.thinking_in is None  # then thinking is ordinary text
        spoken_from = 0 if whole else _tokens_of_thinking(self._rendering, self._form, ids, opened=opened)
        headed = bool(spoken_from) and self._rendering.text(ids[spoken_from:]).startswith(CHANNEL)
        return _Sampled(at, ids, marks, calls, after_results, spoken_from, headed)

    def _rendered(self, thinking: set[int]) -> str:
        """Render the history; with one call a turn if the template refuses more."""
        try:
            return self._render(thinking)
        except ChatError:
            if all(len(reply.calls) < 2 for reply in self._replies):
                raise
            self._replies = [replace(reply, calls=reply.calls[:1]) for reply in self._replies]
            self._verbatim = set()
            return self._render(thinking)

    def _render(self, thinking: set[int]) -> str:
        messages = list(self._messages)
        for reply in self._replies:
            if reply.at in self._verbatim:
                messages[reply.at] = self._rendering.escaped(messages[reply.at])
            else:
                messages[reply.at] = self._form.reply(reply.marks, reply.calls, thinks=reply.at in thinking)
        return self._rendering.render(messages)

    def _split_at_text(self, reply: _Sampled, text: str) -> tuple[str, Sequence[int], str]:
        """Split the text at a reply that was rendered verbatim: text before, its ids, text after.

        If the template changed the words of the reply, there are no ids and the words stay in the text after.
        """
        ids = reply.ids[reply.spoken_from :]
        said = self._rendering.text(ids)
        later = [each.marks for each in self._replies if each.at > reply.at and each.at not in self._verbatim]
        marks = [at for each in later for mark in (each.answer, each.call) if (at := text.find(mark)) >= 0]
        at = text.find(said, 0, min(marks, default=len(text))) if said else -1
        return ("", (), text) if at < 0 else (text[:at], ids, text[at + len(said) :])

    def _split_at_marks(self, reply: _Sampled, text: str) -> tuple[str, str]:
        """Split the text at a reply that was rendered as marks: text before its first and after its last mark."""
        marks = [mark for mark in (reply.marks.answer, reply.marks.call) if mark in text]
        if not marks:
            raise ChatError(
                "the chat template dropped an assistant's message: it cannot be used with history='template'"
            )
        before = text[: min(text.find(mark) for mark in marks)]
        after = text[max(text.rfind(mark) + len(mark) for mark in marks) :]
        if reply.calls:
            return before, from_stop_text(after, self._stops, self._form.after_calls)
        return before, without_closing(self._rendering, after, reply.ids, self._stops)

    def _with_lead(self, reply: _Sampled, before: str, *, thinks: bool) -> Piece:
        """Return the text to encode before a reply, and the ids of the reply that remain.

        The text ends where a prompt would end, because the model sampled the rest.
        """
        ids = reply.ids if thinks or self._keep else reply.ids[reply.spoken_from :]
        lead = self._form.lead(
            self._rendering, reply.marks, reply.calls, before, thinks=thinks, after_results=reply.after_results
        )
        if lead is None:
            return before, ids
        if thinks or self._keep or reply.calls or self._begins_with(ids, lead.written):
            before = before.removesuffix(lead.written)
        return before + (lead.prompted if self._keep else ""), ids

    def _begins_with(self, ids: Sequence[int], written: str) -> bool:
        """Whether the ids begin with the header `written`, or with the part of it that was sampled before a cut."""
        if not written:
            return True
        said = self._rendering.text(ids[: 4 * len(written) + 4])  # a character may take four tokens
        return said.startswith(written) or (said != "" and written.startswith(said))


def call_names(message: Message) -> CallNames:
    """Return id and name of each call in a message."""
    return tuple((call["id"], call["function"]["name"]) for call in message.get("tool_calls") or ())


def from_stop_text(tail: str, stops: Sequence[str], after_calls: str | None = None) -> str:
    """Drop the text that closes a tool call, because the sampled ids contain it already.

    `after_calls`, if given, is the text between a call and its result; one of the stops must be in it. Raises ChatError
    if no stop token ends the call.
    """
    found = [at for at in map(tail.find, stops) if at >= 0]
    if not found or (after_calls is not None and not any(stop in after_calls for stop in stops)):
        raise ChatError("the chat template does not end a tool call with a stop token: use history='template'")
    return tail[min(found) :]


def without_closing(rendering: Rendering, tail: str, ids: Sequence[int], stops: Sequence[str]) -> str:
    """Return `tail`, the text after an answer, without the part that the model sampled itself.

    Some models close their answer before they end the turn. `ids` are the answer's, without a stop token.
    """
    closing = tail[: min((at for at in map(tail.find, stops) if at >= 0), default=0)]
    closes = rendering.encode(closing)
    for n in range(min(len(closes), len(ids)), 0, -1):  # a reply that was cut short has only some of them
        if list(ids[-n:]) == closes[:n]:
            return tail[len(rendering.text(closes[:n])) :]
    said = rendering.text(ids[-len(closing) :]) if closing else ""
    return tail[len(closing) :] if closing and said.endswith(closing) else tail


def unused_word(values: Any) -> str:
    """Return a prefix for marks that none of these values contains."""
    text = json.dumps(values, default=str, ensure_ascii=False)
    word = "radixkv."
    while word in text:
        word += "."
    return word


def _tokens_of_thinking(rendering: Rendering, form: ReplyForm, ids: Sequence[int], *, opened: bool) -> int:
    """Count the ids of a reply that belong to its thinking, including the closing tag and the white space after it.

    The result is memoized: a count decodes the reply about ten times, and each turn needs it for all earlier replies.
    """
    key = blake2b(array("i", ids).tobytes(), digest_size=16, person=b"opened" * opened).digest()
    known = form.thinking.get(key)
    if known is None:
        until = form.spoken_from(rendering.text(ids), opened=opened)
        known = bisect_right(range(1, len(ids) + 1), until, key=lambda n: len(rendering.text(ids[:n]))) if until else 0
        if len(form.thinking) >= _REMEMBERED:
            form.thinking.clear()
        form.thinking[key] = known
    return known
