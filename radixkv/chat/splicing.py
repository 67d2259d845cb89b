"""A whole history as its template writes it, with the ids that were sampled in the replies' places.

Knows: marks in a rendered text, and what stands around them. Knows no engine and no turn.

Each reply is rendered as marks. What the template writes around these is encoded, and between stand the reply's own
ids: all of them, or those behind its thinking where the template shows that no more.

Where thinking goes and tool calls stay, marks do not tell what the template puts in the thinking's place from what a
call begins with. Such a reply is rendered as it is, and its ids take the place of their own text, if that is there.
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
Piece: TypeAlias = tuple[str, Sequence[int]]  # text to encode, and ids to stand behind it


@dataclass(frozen=True)
class _Sampled:
    """A reply of the history: its place, its ids without a stop token, and how it is rendered.

    `spoken_from` is how many of the ids are thinking. `headed`: what is said begins with a header of its own.
    """

    at: int
    ids: Sequence[int]
    marks: Marks
    calls: CallNames
    after_results: bool
    spoken_from: int
    headed: bool


class Splicing:
    """One history with the replies whose ids are known, by their positions, without stop tokens.

    Without `keep_thinking` the template decides whose thinking it still shows.
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
        """`stops` are the texts of the tokens that may end a reply."""
        self._rendering, self._form, self._stops = rendering, form, stops
        self._messages, self._keep = messages, keep_thinking
        word = unused_word([*messages, rendering.tools])
        self._replies = [self._sampled(at, said[at], word) for at in sorted(said)]
        self._as_they_are: set[int] = set()

    def pieces(self) -> Iterator[Piece]:
        """What stands before a reply and the reply, one after another; at last what stands behind all, and no ids.

        Raises ChatError if the template drops a reply.
        """
        thinking = {reply.at for reply in self._replies if reply.spoken_from}
        rest = self._rendered(thinking)
        shown = {reply.at for reply in self._replies if reply.at in thinking and reply.marks.thinking in rest}
        self._as_they_are = {
            reply.at for reply in self._replies if reply.at in thinking - shown and reply.calls and not reply.headed
        }
        if shown != thinking:  # what is left without its thinking may begin otherwise: render it so
            rest = self._rendered(shown)
        for reply in self._replies:
            if reply.at in self._as_they_are:
                before, ids, rest = self._in_its_place(reply, rest)
            else:
                before, rest = self._taken_out(reply, rest)
                before, ids = self._placed(reply, before, thinks=reply.at in shown)
            yield before, ids
        yield rest, ()

    # ---- inside

    def _sampled(self, at: int, ids: Sequence[int], word: str) -> _Sampled:
        marks = Marks(f"{word}answer{at}.", f"{word}thinking{at}.", f"{word}call{at}.")
        after_results = at > 0 and self._messages[at - 1].get("role") == "tool"
        calls = call_names(self._messages[at])
        opened = self._form.opens_thinking(after_results=after_results)
        whole = self._keep or self._form.thinking_in is None  # then thinking is text as any other
        spoken_from = 0 if whole else _tokens_of_thinking(self._rendering, self._form, ids, opened=opened)
        headed = bool(spoken_from) and self._rendering.text(ids[spoken_from:]).startswith(CHANNEL)
        return _Sampled(at, ids, marks, calls, after_results, spoken_from, headed)

    def _rendered(self, thinking: set[int]) -> str:
        """The history; some templates write one call a turn, models do not."""
        try:
            return self._render(thinking)
        except ChatError:
            if all(len(reply.calls) < 2 for reply in self._replies):
                raise
            self._replies = [replace(reply, calls=reply.calls[:1]) for reply in self._replies]
            self._as_they_are = set()
            return self._render(thinking)

    def _render(self, thinking: set[int]) -> str:
        messages = list(self._messages)
        for reply in self._replies:
            if reply.at in self._as_they_are:
                messages[reply.at] = self._rendering.harmless(messages[reply.at])
            else:
                messages[reply.at] = self._form.reply(reply.marks, reply.calls, thinks=reply.at in thinking)
        return self._rendering.render(messages)

    def _in_its_place(self, reply: _Sampled, text: str) -> tuple[str, Sequence[int], str]:
        """What stands before a reply that was rendered as it is, its ids, and what stands behind.

        No ids where the template writes it in other words: then these are part of what stands behind.
        """
        ids = reply.ids[reply.spoken_from :]
        said = self._rendering.text(ids)
        later = [each.marks for each in self._replies if each.at > reply.at and each.at not in self._as_they_are]
        marks = [at for each in later for mark in (each.answer, each.call) if (at := text.find(mark)) >= 0]
        at = text.find(said, 0, min(marks, default=len(text))) if said else -1
        return ("", (), text) if at < 0 else (text[:at], ids, text[at + len(said) :])

    def _taken_out(self, reply: _Sampled, text: str) -> tuple[str, str]:
        """What stands before a reply's first mark, and what stands behind its last."""
        marks = [mark for mark in (reply.marks.answer, reply.marks.call) if mark in text]
        if not marks:
            raise ChatError(
                "the chat template dropped an assistant's message: it cannot be used with history='template'"
            )
        before = text[: min(text.find(mark) for mark in marks)]
        behind = text[max(text.rfind(mark) + len(mark) for mark in marks) :]
        if reply.calls:
            return before, from_stop(behind, self._stops, self._form.behind_calls)
        return before, unsaid(self._rendering, behind, reply.ids, self._stops)

    def _placed(self, reply: _Sampled, before: str, *, thinks: bool) -> Piece:
        """The text to stand before a reply's ids, and those of them that are left.

        The text of a history goes as far as a prompt goes; what it has beyond, the model has sampled.
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
        """Whether a reply has sampled a header itself, or what there is of it before it was cut short."""
        if not written:
            return True
        said = self._rendering.text(ids[: 4 * len(written) + 4])  # a character may take four tokens
        return said.startswith(written) or (said != "" and written.startswith(said))


def call_names(message: Message) -> CallNames:
    """Id and name of each call in a message."""
    return tuple((call["id"], call["function"]["name"]) for call in message.get("tool_calls") or ())


def from_stop(tail: str, stops: Sequence[str], behind_calls: str | None = None) -> str:
    """Skip what closes a call that is marks only: the reply brought its own. Raises ChatError if nothing ends it.

    What ends another turn ends no call: a stop has to stand in `behind_calls`, if that is known.
    """
    found = [at for at in map(tail.find, stops) if at >= 0]
    if not found or (behind_calls is not None and not any(stop in behind_calls for stop in stops)):
        raise ChatError("the chat template does not end a tool call with a stop token: use history='template'")
    return tail[min(found) :]


def unsaid(rendering: Rendering, tail: str, ids: Sequence[int], stops: Sequence[str]) -> str:
    """What stands behind an answer and was not sampled with it: some models close it before they end their turn.

    `ids` are the answer's, without a stop token.
    """
    closing = tail[: min((at for at in map(tail.find, stops) if at >= 0), default=0)]
    closes = rendering.encode(closing)
    for n in range(min(len(closes), len(ids)), 0, -1):  # a reply that was cut may lack some
        if list(ids[-n:]) == closes[:n]:
            return tail[len(rendering.text(closes[:n])) :]
    said = rendering.text(ids[-len(closing) :]) if closing else ""
    return tail[len(closing) :] if closing and said.endswith(closing) else tail


def unused_word(values: Any) -> str:
    """A beginning for marks that none of these values contains."""
    text = json.dumps(values, default=str, ensure_ascii=False)
    word = "radixkv."
    while word in text:
        word += "."
    return word


def _tokens_of_thinking(rendering: Rendering, form: ReplyForm, ids: Sequence[int], *, opened: bool) -> int:
    """How many of a reply's ids lie within its thinking, its closing tag and the white space behind it.

    Each turn asks for those of all replies before, and finding out decodes a reply some ten times: so it is remembered.
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
