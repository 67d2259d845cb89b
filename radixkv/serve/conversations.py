"""From a whole conversation, sent by a client that keeps it, to a prompt that begins as the last one ended.

Knows: one model's chat template, and what was said before (history.py). Knows no HTTP and no engine.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from json import dumps, loads
from typing import Any, Literal

from radixkv.chat.history_mode import history_mode
from radixkv.chat.messages import Message, ToolCall
from radixkv.chat.template import ChatTemplate
from radixkv.chat.thinking import THINK_END, THINK_START
from radixkv.engine.input_processor import ControlTokens, today
from radixkv.errors import ChatError, InvalidInput, PromptTooLong
from radixkv.serve.history import HistoryIndex, HistoryStats, Known, Tools

Mode = Literal["auto", "append", "template"]
MODES = ("auto", "append", "template")
_TEMPLATES = 64  # how many lists of tools are kept ready ...
_LARGE = 1 << 16  # ... none of more characters than this


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation as token ids, up to where the assistant's turn begins.

    `known` of its messages end with a reply whose ids are the engine's own; 0 where the template encoded everything.
    `session` is a number that the requests of one conversation share. The rest is what `remember` needs.
    """

    ids: array[int]
    known: int
    session: int
    namespace: Hashable
    messages: tuple[Message, ...]
    tools: Tools
    date: str


class Conversations:
    """Encodes conversations, and remembers the ids of replies; may be used from any thread.

    `mode` says where new messages go, as in `Engine.chat`: "append" puts them behind the ids that are known,
    "template" renders everything anew around the ids of the replies, "auto" appends unless the template leaves the
    thinking of earlier replies out. Where appending would lose what the template writes with tools, conversations with
    tools are rendered. `capacity` bounds the bytes that are remembered; with 0 the template encodes
    everything. `new_session` numbers the conversations that begin. `limit` is how many tokens a prompt may have: one
    that grew beyond it by appending is rendered anew, if that makes it shorter.
    """

    def __init__(
        self,
        tokenizer: Any | None,
        stop_ids: frozenset[int],
        capacity: int,
        mode: Mode = "auto",
        *,
        new_session: Callable[[], int] | None = None,
        limit: int | None = None,
    ) -> None:
        """For one model's tokenizer, which may have no chat template: then `prompt` raises ChatError.

        Raises InvalidInput for "append" where that would lose what the template writes even without tools.
        """
        if mode not in MODES:
            raise InvalidInput(f"history must be one of {', '.join(MODES)}, not {mode!r}")
        self._index = HistoryIndex(capacity)
        self._mode, self._limit = mode, limit
        self._new_session = new_session or count(1).__next__
        self._tokenizer, self._stop_ids = tokenizer, stop_ids
        # Reading a tokenizer's control tokens takes longer than a short prompt does.
        self._template = lru_cache(_TEMPLATES)(self._make_template)
        if mode == "append" and getattr(tokenizer, "chat_template", None):
            try:
                history_mode(self._template("", ""), mode)
            except ChatError as error:
                raise InvalidInput(str(error)) from error

    def prompt(self, namespace: Hashable, messages: Sequence[Message], tools: Tools = None) -> ChatPrompt:
        """The prompt of a conversation; raises ChatError where the template takes no such messages, PromptTooLong.

        Raises InvalidInput for tools that it does not write.
        O(bytes of the messages + tokens), and encoding what is not known.
        """
        known = self._index.ids_for(namespace, messages, tools)
        date = known.date or today()
        template = self._template_of(tools, date)
        template.check_tools()
        ids, covered = self._from_known(template, known, messages), known.messages
        if ids is None or (self._limit is not None and len(ids) > self._limit):
            whole = template.opening(messages)
            if ids is None or len(whole) < len(ids):
                ids, covered = whole, 0
        session = self._new_session() if known.session is None else known.session
        return ChatPrompt(ids, covered, session, namespace, tuple(messages), tools, date)

    def remember(
        self, prompt: ChatPrompt, reply: Message, emitted_ids: Sequence[int], *, cut: str | None = None
    ) -> None:
        """Note that `prompt` was answered by `emitted_ids`, and that its client was told `reply`, a message.

        `cut` is the reply's text, its tags included, if not all that was sampled was told: a stop string ended it.
        """
        ids: array[int] | None = array("i", emitted_ids)
        if cut is not None:
            ids = self._cut(self._template_of(prompt.tools, prompt.date), emitted_ids, cut)
        if ids is not None:
            self._index.remember(
                prompt.namespace,
                prompt.messages,
                reply,
                prompt.ids,
                ids,
                tools=prompt.tools,
                date=prompt.date,
                session=prompt.session,
            )

    @property
    def keeps_thinking(self) -> bool:
        """Whether the template is known to write the thinking of earlier replies, too."""
        try:
            return not self._template("", "").strips_thinking
        except ChatError:
            return False

    @property
    def thinking_tags(self) -> tuple[str, str]:
        """What stands before and behind the thinking of a reply."""
        try:
            return self._template("", "").form.thinking_tags
        except ChatError:
            return THINK_START, THINK_END

    @property
    def stats(self) -> HistoryStats:
        """What is remembered, and how often it was found."""
        return self._index.stats

    # ---- inside

    def _template_of(self, tools: Tools, date: str) -> ChatTemplate:
        text = dumps(tools) if tools else ""
        return self._template(text, date) if len(text) <= _LARGE else self._make_template(text, date)

    def _make_template(self, tools: str, date: str) -> ChatTemplate:
        return ChatTemplate(self._tokenizer, self._stop_ids, loads(tools) if tools else None, date, self._limit)

    def _appends(self, template: ChatTemplate) -> bool:
        try:
            return history_mode(template, self._mode) == "append"
        except ChatError:  # it would lose something with tools, and these are some
            return False

    def _from_known(self, template: ChatTemplate, known: Known, messages: Sequence[Message]) -> array[int] | None:
        """Ids with those that are known in their places; None if there are none, or the template cannot be used so."""
        if not known.messages:
            return None
        try:
            if not self._appends(template):
                return template.spliced(messages, known.said, keep_thinking=False)
            new = messages[known.messages :]
            answered = messages[known.messages - 1] if new and new[0].get("role") == "tool" else {}
            return template.continued(known.ids, new, _calls(answered))
        except (ChatError, PromptTooLong):
            return None

    def _cut(self, template: ChatTemplate, ids: Sequence[int], text: str) -> array[int] | None:
        """Ids that say `text`, with which those of a reply begin: those that lie within it, and the rest encoded anew.

        None if that cannot be told.
        """
        kept = bisect_right(range(len(ids)), len(text), key=lambda n: len(template.said_text(ids[: n + 1])))
        before = template.said_text(ids[:kept])
        if not text.startswith(before):  # a control token that texts leave out, or characters in parts
            return None
        rest = ControlTokens(self._tokenizer).encode(text.removeprefix(before))
        return array("i", ids[:kept]) + array("i", rest)


def _calls(reply: Message) -> list[ToolCall]:
    """The tool calls of a reply that is known."""
    functions = [(call["id"], call["function"]) for call in reply.get("tool_calls") or ()]
    return [ToolCall(number, function["name"], function["arguments"]) for number, function in functions]
