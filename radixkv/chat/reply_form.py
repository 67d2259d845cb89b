"""Find out how a chat template writes replies, by rendering replies of marker words; its source is never parsed.

A prompt ends where the next reply begins, and the model continues from there. In a later history the template writes
the reply itself, sometimes differently: it leaves out thinking, writes a header that the model would sample, or puts a
space in front. A `ReplyForm` records these differences.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Literal, TypeAlias

from radixkv.chat.calls.tools import with_object, with_text
from radixkv.chat.messages import Message
from radixkv.chat.rendering import Key, Memo, Rendering
from radixkv.chat.thinking import CHANNEL, THINK_END, THINK_START, only_thinks
from radixkv.errors import ChatError

ThinkingField: TypeAlias = Literal["content", "reasoning_content"]
CallNames: TypeAlias = tuple[tuple[str, str], ...]  # (id, name) of each call


@dataclass(frozen=True, slots=True)
class Marks:
    """Marker words for the parts of a reply: its answer, its thinking, and the arguments of each call."""

    answer: str
    thinking: str
    call: str


@dataclass(frozen=True, slots=True)
class Lead:
    """The difference between the end of a prompt and the text before the same reply in a history.

    `prompted` is the end of the prompt that the history leaves out, for example an open thinking tag. `written` is the
    text before the first mark of the reply that the prompt does not have.
    """

    prompted: str
    written: str


@dataclass(frozen=True)
class ReplyForm:
    """The way a template writes replies.

    `begins` is the text between the words of a user and the start of the reply. `begins_after_results` is the same
    after a tool result, empty if the template takes no tool results. `thinking_in` is the field from which the template
    takes thinking, None if it has no concept of it.
    """

    begins: str
    thinking_in: ThinkingField | None
    strips_thinking: bool
    calls_as_text: bool  # whether the arguments of calls must be JSON texts
    begins_after_results: str = ""
    thinking_tags: tuple[str, str] = (THINK_START, THINK_END)
    words_after_results: bool = False  # the words of a turn follow the results of its calls
    after_calls: str | None = None  # text between the last argument of a call and its result, if results are taken
    leads: dict[tuple[tuple[str, ...], bool, bool], tuple[Lead, ...]] = field(default_factory=dict)
    thinking: dict[bytes, int] = field(default_factory=dict)  # memo of splicing: number of thinking ids of a reply

    def opens_thinking(self, *, after_results: bool) -> bool:
        """Whether a prompt ends with an open thinking tag, so that the reply begins with thinking."""
        return (self.begins_after_results if after_results else self.begins).rstrip().endswith(THINK_START)

    def reply(self, marks: Marks, calls: CallNames = (), *, thinks: bool = False) -> Message:
        """Return an assistant message that consists of marks."""
        message: Message = {"role": "assistant", "content": marks.answer}
        if calls:  # a template may show content and calls in any order, or only one of them: mark both
            message["tool_calls"] = [_call(each, marks.call, as_text=self.calls_as_text) for each in calls]
        if thinks and calls:  # some templates that recognise tags before an answer take them for words before a call
            message["reasoning_content"] = marks.thinking
            if self.thinking_in == "reasoning_content":
                message["content"] = ""  # templates with channels take thinking or words before a call, not both
        elif calls and self.words_after_results:
            message["content"] = ""
        elif thinks:
            message = self.thoughtful(marks.thinking, marks.answer)
        return message

    def thoughtful(self, thinking: str, answer: str) -> Message:
        """Return an assistant message with thinking in the field that the template reads; in tags if it reads none."""
        if self.thinking_in == "reasoning_content":
            return {"role": "assistant", "content": answer, "reasoning_content": thinking}
        return {"role": "assistant", "content": f"{THINK_START}\n{thinking}\n{THINK_END}\n\n{answer}"}

    def taken(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the messages with calls in the form that the template takes."""
        take = with_text if self.calls_as_text else with_object
        return [
            {**each, "tool_calls": list(map(take, each["tool_calls"]))} if each.get("tool_calls") else each
            for each in messages
        ]

    def lead(
        self, rendering: Rendering, marks: Marks, calls: CallNames, before: str, *, thinks: bool, after_results: bool
    ) -> Lead | None:
        """Return the lead at the end of `before`, the text of a history up to the first mark of a reply.

        None if `before` ends with no lead of this template. Raises ChatError if the template takes no such reply.
        """
        names = tuple(name for _, name in calls)
        key = names, thinks, after_results
        known = self.leads.get(key)
        if known is None:  # several threads may compute the same value
            anonymous = tuple((_ID, name) for name in names)
            known = self._find_leads(rendering.without_content, anonymous, thinks, after_results)
            if len(self.leads) >= _LEADS:
                self.leads.clear()
            self.leads[key] = known
        leads = [Lead(each.prompted, each.written.replace(_MARKS.thinking, marks.thinking)) for each in known]
        found = (lead for lead in leads if before.endswith(lead.written))
        return max(found, key=lambda lead: len(lead.written), default=None)

    def spoken_from(self, text: str, *, opened: bool) -> int:
        """Return the index at which the thinking of a reply ends, in its text with control tokens.

        `opened` says that the prompt ended with an open tag. A reply that was cut short inside its thinking consists of
        thinking only.
        """
        again = text.rfind(self.begins) if CHANNEL in text else -1
        if again >= 0:  # the answer is a message of its own
            return again + len(self.begins)
        start, end = self.thinking_tags
        if opened or text.lstrip().startswith(start):
            return len(text) - len(text.partition(end)[2].lstrip())
        return len(text) if only_thinks(text) else 0

    def _find_leads(
        self, rendering: Rendering, calls: CallNames, thinks: bool, after_results: bool
    ) -> tuple[Lead, ...]:
        """Find the lead of a reply with an answer and, for calls, of one without: it may differ."""
        asked, last = self.asked_after_results() if after_results else ([_USER], _SAID)
        begins = rendering.render(asked).rpartition(last)[2]
        reply = self.reply(_MARKS, calls, thinks=thinks)
        found = []
        for each in [reply, {**reply, "content": ""}] if calls else [reply]:
            text = rendering.render([*asked, each, *(_results(calls, _SAID) or [_USER])]).partition(last)[2]
            marks = [at for mark in (_MARKS.answer, _MARKS.call) if (at := text.find(mark)) >= 0]
            if marks:
                before = text[: min(marks)]
                length = shared(before, begins)
                found.append(Lead(begins[length:], before[length:]))
        return tuple(found)

    def asked_after_results(self) -> tuple[list[Message], str]:
        """Return a dialogue that ends with a tool result, and the text of that result."""
        called = self.reply(_EARLIER, _ONE_CALL)
        return [_USER, called, *_results(_ONE_CALL, _RESULT)], _RESULT


_KNOWN = Memo[Key, ReplyForm]()
_MARKS = Marks("radixkv.answer.", "radixkv.thinking.", "radixkv.call.")
_EARLIER = Marks("radixkv.before.", "radixkv.before.", "radixkv.before.")
_SAID, _RESULT = "radixkv.user.", "radixkv.result."
_USER: Message = {"role": "user", "content": _SAID}
_ID = "radixkv00"  # nine letters and digits: some templates take no other ids
_ONE_CALL: CallNames = ((_ID, "look"),)
_TAG_BEGUN = re.compile(r"(?:<|\[)[^<>\[\]\s]*\Z")
_LEADS = 1000  # memoized leads; their number is bounded because callers choose the names of tools


def reply_form(rendering: Rendering) -> ReplyForm:
    """Return the form of a template with its arguments, found once for each tokenizer.

    Raises ChatError if the template drops the words of a user.
    """
    return _KNOWN.get(rendering.tokenizer, rendering.key, lambda: _find(rendering.without_content))


def _find(rendering: Rendering) -> ReplyForm:
    _, found, begins = rendering.render([_USER]).rpartition(_SAID)
    if not found:
        raise ChatError("the chat template drops what a user says")
    thinking_in = _thinking_in(rendering)
    strips = _strips(rendering, thinking_in or "content")
    form = ReplyForm(begins, thinking_in, strips, _takes_calls_as_text(rendering))
    form = replace(
        form,
        thinking_tags=_thinking_tags(rendering, form) or form.thinking_tags,
        words_after_results=_words_behind_results(rendering, form),
    )
    return _with_results(rendering, form)


def _words_behind_results(rendering: Rendering, form: ReplyForm) -> bool:
    text = _attempt(rendering, [_USER, form.reply(_MARKS, _ONE_CALL), *_results(_ONE_CALL, _RESULT)]) or ""
    return 0 <= text.find(_RESULT) < text.find(_MARKS.answer)


def _thinking_tags(rendering: Rendering, form: ReplyForm) -> tuple[str, str] | None:
    """Return the texts before and after thinking, if the template has tags of its own; channels are messages."""
    if form.thinking_in != "reasoning_content":
        return None
    text = _attempt(rendering, [_USER, form.reply(_MARKS, thinks=True)], reply=False) or ""
    said = text.rpartition(_SAID)[2]
    start, thought, rest = said[shared(said, form.begins) :].partition(_MARKS.thinking)
    end, answered, _ = rest.partition(_MARKS.answer)
    tags = start.strip(), end.strip()
    own = thought and answered and all(tags) and not any(tag in said for tag in (THINK_START, THINK_END, CHANNEL))
    return tags if own else None


def _with_results(rendering: Rendering, form: ReplyForm) -> ReplyForm:
    """Add the texts before and after a tool result to the form."""
    asked, last = form.asked_after_results()
    before, found, begins = (_attempt(rendering, asked) or "").rpartition(last)
    _, called, after_calls = before.rpartition(_EARLIER.call)
    if not (found and called):
        return form
    return replace(form, begins_after_results=begins, after_calls=after_calls)


def _thinking_in(rendering: Rendering) -> ThinkingField | None:
    """Find the field from which the template takes thinking, by rendering thinking in each."""
    if _strips(rendering, "content"):
        return "content"
    plain = ReplyForm("", "reasoning_content", strips_thinking=False, calls_as_text=False)
    for follows in ([], [_USER]):
        text = _attempt(rendering, [_USER, plain.reply(_MARKS, thinks=True), *follows], reply=bool(follows))
        if text is not None and _MARKS.thinking in text:
            return "reasoning_content"
    return None


def _strips(rendering: Rendering, where: ThinkingField) -> bool:
    """Whether the template leaves out the thinking of an earlier reply but shows its answer."""
    form = ReplyForm("", where, strips_thinking=False, calls_as_text=False)
    text = _attempt(rendering, [_USER, form.reply(_MARKS, thinks=True), _USER])
    if text is None or _MARKS.thinking in text or _MARKS.answer not in text:
        return False
    if where == "content":  # a template that removes the tags recognises them
        return True
    alone = _attempt(rendering, [_USER, form.reply(_MARKS, thinks=True)], reply=False)
    return alone is not None and _MARKS.thinking in alone


def _takes_calls_as_text(rendering: Rendering) -> bool:
    """Whether the arguments of a call must be a JSON text; most templates write an object as JSON themselves."""
    for as_text in (False, True):
        form = ReplyForm("", None, strips_thinking=False, calls_as_text=as_text)
        text = _attempt(rendering, [_USER, form.reply(_MARKS, _ONE_CALL), *_results(_ONE_CALL, _RESULT)])
        if text is not None and "{'mark'" not in text:  # the repr of a Python dict
            return as_text
    return False


def _attempt(rendering: Rendering, messages: Sequence[Message], *, reply: bool = True) -> str | None:
    try:
        return rendering.render(messages, reply=reply)
    except ChatError:
        return None


def _call(name: tuple[str, str], mark: str, *, as_text: bool) -> Message:
    function = {"name": name[1], "arguments": {"mark": mark}}
    call: Message = {"id": name[0], "type": "function", "function": function}
    return with_text(call) if as_text else call


def shared(first: str, second: str) -> int:
    """Count the leading characters that two texts share; a tag counts only as a whole."""
    length = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
    begun = _TAG_BEGUN.search(first[:length])
    return length if begun is None else begun.start()


def _results(calls: CallNames, said: str) -> list[Message]:
    return [{"role": "tool", "tool_call_id": number, "name": name, "content": said} for number, name in calls]
