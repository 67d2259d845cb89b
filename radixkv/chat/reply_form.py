"""How one chat template writes replies: found out by rendering marked ones, never by reading the template.

Knows: marks, what a template writes around them, and in which field it looks for thinking. Knows no turn and no ids.

A prompt ends where the next reply begins, and a model writes on from there. In a history, the template writes the same
place with the reply in it, and not always alike: thinking is left out, a header that the model samples is the
template's, a space is put in front.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, Literal, TypeAlias
from weakref import WeakKeyDictionary

from radixkv.chat.messages import Message
from radixkv.chat.rendering import ANY_TOOL, Rendering
from radixkv.chat.thinking import CHANNEL, THINK_END, THINK_START, only_thinks
from radixkv.chat.tool_call_formats import with_object, with_text
from radixkv.errors import ChatError

ThinkingField: TypeAlias = Literal["content", "reasoning_content"]
CallNames: TypeAlias = tuple[tuple[str, str], ...]  # (id, name) of each call


@dataclass(frozen=True, slots=True)
class Marks:
    """Words that stand for what a reply says: its answer, its thinking, and the arguments of each call."""

    answer: str
    thinking: str
    call: str


@dataclass(frozen=True, slots=True)
class Lead:
    """What a template writes between the end of a prompt and the first word of a reply that is part of a history.

    `prompted` is what the prompt ends with and the history leaves out: an opened tag of thinking. `written` is what
    the history has before the reply's first mark, and the prompt has not.
    """

    prompted: str
    written: str


@dataclass(frozen=True)
class ReplyForm:
    """The findings about a template. `thinking_in` is where it looks for thinking, None if it knows none.

    `begins` is the text from behind a user's words to where a reply begins; `begins_behind_results` the one from behind
    a tool's, empty if the template takes no results. `writes_tools`: tools make a difference to what it writes.
    """

    begins: str
    thinking_in: ThinkingField | None
    strips_thinking: bool
    calls_as_text: bool  # whether the arguments of calls must be JSON texts
    begins_behind_results: str = ""
    thinking_tags: tuple[str, str] = (THINK_START, THINK_END)
    words_behind_results: bool = False  # a turn's words stand behind the results of its calls
    behind_calls: str | None = None  # from a call's last argument to its result, if the template takes results
    writes_tools: bool = True
    leads: dict[tuple[tuple[str, ...], bool, bool], tuple[Lead, ...]] = field(default_factory=dict)
    thinking: dict[bytes, int] = field(default_factory=dict)  # splicing's: how long that of a reply is

    def opens_thinking(self, *, after_results: bool) -> bool:
        """Whether a prompt ends with an open tag, so that the model's first words are thinking."""
        return (self.begins_behind_results if after_results else self.begins).rstrip().endswith(THINK_START)

    def reply(self, marks: Marks, calls: CallNames = (), *, thinks: bool = False) -> Message:
        """A message of the assistant's that says marks only."""
        message: Message = {"role": "assistant", "content": marks.answer}
        if calls:  # a template may show content and calls in any order, or only one of them: mark both
            message["tool_calls"] = [_call(each, marks.call, as_text=self.calls_as_text) for each in calls]
        if thinks and calls:  # tags before a call are words to some templates that know them before an answer
            message["reasoning_content"] = marks.thinking
            if self.thinking_in == "reasoning_content":
                message["content"] = ""  # templates with channels take thinking or words before a call, not both
        elif calls and self.words_behind_results:
            message["content"] = ""
        elif thinks:
            message = self.thoughtful(marks.thinking, marks.answer)
        return message

    def thoughtful(self, thinking: str, answer: str) -> Message:
        """A message of the assistant's with thinking where the template looks for it, in tags if it knows none."""
        if self.thinking_in == "reasoning_content":
            return {"role": "assistant", "content": answer, "reasoning_content": thinking}
        return {"role": "assistant", "content": f"{THINK_START}\n{thinking}\n{THINK_END}\n\n{answer}"}

    def taken(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages with calls as the template takes them."""
        take = with_text if self.calls_as_text else with_object
        return [
            {**each, "tool_calls": list(map(take, each["tool_calls"]))} if each.get("tool_calls") else each
            for each in messages
        ]

    def lead(
        self, rendering: Rendering, marks: Marks, calls: CallNames, before: str, *, thinks: bool, after_results: bool
    ) -> Lead | None:
        """What stands at the end of `before`, the text of a history up to a reply's first mark, and in no prompt.

        None if nothing that is known. Raises ChatError if the template takes no such reply.
        """
        names = tuple(name for _, name in calls)
        key = names, thinks, after_results
        known = self.leads.get(key)
        if known is None:  # others may look, too, and find the same
            anonymous = tuple((_ID, name) for name in names)
            known = self._find_leads(rendering.neutral, anonymous, thinks, after_results)
            if len(self.leads) >= _LEADS:
                self.leads.clear()
            self.leads[key] = known
        leads = [Lead(each.prompted, each.written.replace(_MARKS.thinking, marks.thinking)) for each in known]
        return max((lead for lead in leads if before.endswith(lead.written)), key=_length, default=None)

    def spoken_from(self, text: str, *, opened: bool) -> int:
        """Where the thinking of a reply ends, in its text with control tokens, and so what is said begins.

        `opened` says that its prompt ended with an open tag. All of it is thinking if it was cut before its end.
        """
        again = text.rfind(self.begins) if CHANNEL in text else -1
        if again >= 0:  # what is said is a message of its own
            return again + len(self.begins)
        start, end = self.thinking_tags
        if opened or text.lstrip().startswith(start):
            return len(text) - len(text.partition(end)[2].lstrip())
        return len(text) if only_thinks(text) else 0

    def _find_leads(
        self, rendering: Rendering, calls: CallNames, thinks: bool, after_results: bool
    ) -> tuple[Lead, ...]:
        """With an answer, and without one if there are calls: what stands first depends on that."""
        asked, last = self.asked_behind_results() if after_results else ([_USER], _SAID)
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

    def asked_behind_results(self) -> tuple[list[Message], str]:
        """A dialogue that ends with the result of a call, and what that result says."""
        called = self.reply(_EARLIER, _ONE_CALL)
        return [_USER, called, *_results(_ONE_CALL, _RESULT)], _RESULT


_KNOWN: WeakKeyDictionary[Any, dict[str, ReplyForm]] = WeakKeyDictionary()
_MARKS = Marks("radixkv.answer.", "radixkv.thinking.", "radixkv.call.")
_EARLIER = Marks("radixkv.before.", "radixkv.before.", "radixkv.before.")
_SAID, _RESULT = "radixkv.user.", "radixkv.result."
_USER: Message = {"role": "user", "content": _SAID}
_SYSTEM: Message = {"role": "system", "content": "Be brief."}
_ID = "radixkv00"  # nine letters and digits: some templates take no other ids
_ONE_CALL: CallNames = ((_ID, "look"),)
_TAG_BEGUN = re.compile(r"(?:<|\[)[^<>\[\]\s]*\Z")
_LEADS = 1000  # that are remembered; the names of tools are the callers'


def reply_form(rendering: Rendering) -> ReplyForm:
    """How this template writes replies; tried once for each tokenizer. Raises ChatError if it shows no user's words."""
    known = _KNOWN.setdefault(rendering.tokenizer, {})
    if rendering.template not in known:
        known[rendering.template] = _find(rendering.neutral)
    return known[rendering.template]


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
        words_behind_results=_words_behind_results(rendering, form),
        writes_tools=_writes_tools(rendering),
    )
    return _with_results(rendering, form)


def _writes_tools(rendering: Rendering) -> bool:
    """Whether a prompt with tools is another than one without; so it is, too, where one of them is refused."""
    for asked in ([_USER], [_SYSTEM, _USER]):
        plain, with_tools = (_attempt(rendering.neutral_with(tools), asked) for tools in (None, ANY_TOOL))
        if plain != with_tools:
            return True
    return False


def _words_behind_results(rendering: Rendering, form: ReplyForm) -> bool:
    text = _attempt(rendering, [_USER, form.reply(_MARKS, _ONE_CALL), *_results(_ONE_CALL, _RESULT)]) or ""
    return 0 <= text.find(_RESULT) < text.find(_MARKS.answer)


def _thinking_tags(rendering: Rendering, form: ReplyForm) -> tuple[str, str] | None:
    """What stands before and behind thinking, if these are tags of the template's own; channels are messages."""
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
    """The form, and what stands before and behind a tool's result."""
    asked, last = form.asked_behind_results()
    before, found, begins = (_attempt(rendering, asked) or "").rpartition(last)
    _, called, behind_calls = before.rpartition(_EARLIER.call)
    if not (found and called):
        return form
    return replace(form, begins_behind_results=begins, behind_calls=behind_calls)


def _thinking_in(rendering: Rendering) -> ThinkingField | None:
    """Where the template looks for thinking: it shows that apart from the answer, or shows it in no earlier turn."""
    if _strips(rendering, "content"):
        return "content"
    plain = ReplyForm("", "reasoning_content", strips_thinking=False, calls_as_text=False)
    for follows in ([], [_USER]):
        text = _attempt(rendering, [_USER, plain.reply(_MARKS, thinks=True), *follows], reply=bool(follows))
        if text is not None and _MARKS.thinking in text:
            return "reasoning_content"
    return None


def _strips(rendering: Rendering, where: ThinkingField) -> bool:
    """Whether the template leaves an earlier reply's thinking out, and shows its answer."""
    form = ReplyForm("", where, strips_thinking=False, calls_as_text=False)
    text = _attempt(rendering, [_USER, form.reply(_MARKS, thinks=True), _USER])
    if text is None or _MARKS.thinking in text or _MARKS.answer not in text:
        return False
    if where == "content":  # nobody cuts tags that he does not know out of an answer
        return True
    alone = _attempt(rendering, [_USER, form.reply(_MARKS, thinks=True)], reply=False)
    return alone is not None and _MARKS.thinking in alone


def _takes_calls_as_text(rendering: Rendering) -> bool:
    """Whether the arguments of a call must be a JSON text; most templates write an object as JSON themselves."""
    for as_text in (False, True):
        form = ReplyForm("", None, strips_thinking=False, calls_as_text=as_text)
        text = _attempt(rendering, [_USER, form.reply(_MARKS, _ONE_CALL), *_results(_ONE_CALL, _RESULT)])
        if text is not None and "{'mark'" not in text:  # which is Python's way to write an object
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


def _length(lead: Lead) -> int:
    return len(lead.written)


def shared(first: str, second: str) -> int:
    """How many characters two texts share from the start; a tag is shared as a whole, or not at all."""
    length = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
    begun = _TAG_BEGUN.search(first[:length])
    return length if begun is None else begun.start()


def _results(calls: CallNames, said: str) -> list[Message]:
    return [{"role": "tool", "tool_call_id": number, "name": name, "content": said} for number, name in calls]
