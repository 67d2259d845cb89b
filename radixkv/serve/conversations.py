"""Encode whole conversations, as clients send them, so that a prompt begins as the previous turn ended.

The ids of earlier replies are taken from the history (history.py), so that the cache finds the whole prefix.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import blake2b
from itertools import count
from json import dumps, loads
from typing import Any, TypeVar

from radixkv.chat.calls.formats import CallFormat
from radixkv.chat.constrained import CallRule, constrained
from radixkv.chat.history_mode import history_mode
from radixkv.chat.messages import Message
from radixkv.chat.rendering import ANY_TOOL, pieces
from radixkv.chat.template import ChatTemplate
from radixkv.chat.template_arguments import Arguments, TemplateOption, arguments_key, template_arguments
from radixkv.chat.thinking import THINK_END, THINK_START
from radixkv.engine.chat_prompts import ControlTokens, today
from radixkv.errors import ChatError, InvalidInput, PromptTooLong
from radixkv.prompt_breaks import Break
from radixkv.sampling.params import SamplingParams
from radixkv.serve.history import HistoryIndex, HistoryStats, Known, Tools
from radixkv.server_settings import Mode

MOST_SESSIONS = 4096  # keys of clients whose session numbers are kept, some 200 bytes each
_TEMPLATES = 64  # templates that are kept, one for each list of tools, date and arguments
_LARGE = 1 << 16  # characters of a list of tools whose template is not kept


Fact = TypeVar("Fact")


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation as token ids, up to the start of the assistant's turn.

    The first `known` messages end with a reply whose sampled ids were reused; 0 if the template encoded everything.
    `session` is a number that the requests of one conversation share. `remember` needs the other fields.

    With a prefill, the ids end inside the reply: `begun` is its beginning as a message. The reply's ids begin at
    `reply_at`, None if its ids cannot be reused in a later prompt. `in_thinking` says that they end inside thinking.
    `reply_start` is the length of the ids up to the end of the last message before the reply; 0 if unknown.
    `repeats` says that the ids begin with the remembered ids. `broken` is the first part that differs from an earlier
    prompt of the conversation, and `place` names the prompt for later ones, see `compared`.
    """

    ids: array[int]
    known: int
    session: int
    namespace: Hashable
    messages: tuple[Message, ...]
    tools: Tools
    date: str
    arguments: Arguments = field(default_factory=dict)
    begun: Message | None = None
    reply_at: int | None = None
    in_thinking: bool = False
    reply_start: int = 0
    repeats: bool = True
    broken: Break | None = None
    place: int = 0


class Conversations:
    """Encode conversations, and remember the ids of replies. Thread-safe.

    `mode` is as in `Engine.chat`: "append" appends new messages to the remembered ids; "template" renders the whole
    conversation around the ids of the replies; "auto" appends, unless the template omits the thinking of earlier
    replies. Conversations with tools are rendered if appending would lose text that the template writes with tools.
    `history` remembers replies; if its capacity is 0, the template encodes everything. `new_session` numbers new
    conversations. `limit` is the maximum length of a prompt: an appended prompt beyond it is rendered instead, if that
    is shorter.
    """

    def __init__(
        self,
        tokenizer: Any | None,
        stop_ids: frozenset[int],
        history: HistoryIndex,
        mode: Mode = "auto",
        *,
        new_session: Callable[[], int] | None = None,
        limit: int | None = None,
        tool_format: str = "auto",
    ) -> None:
        """Serve one model's tokenizer; without a chat template, `prompt` raises ChatError.

        Raises InvalidInput for "append" if that would lose text of the template even without tools.
        """
        self._index = history
        self._mode, self._limit, self._tool_format = mode, limit, tool_format
        self._new_session = new_session or count(1).__next__
        self._sessions: OrderedDict[tuple[Hashable, bytes], int] = OrderedDict()  # the least recent first
        self._lock = threading.Lock()
        self._tokenizer, self._stop_ids = tokenizer, stop_ids
        # Reading a tokenizer's control tokens takes longer than a short prompt does.
        self._template = lru_cache(_TEMPLATES)(self._make_template)
        if mode == "append" and getattr(tokenizer, "chat_template", None):
            try:
                history_mode(self._template("", ""), mode)
            except ChatError as error:
                raise InvalidInput(str(error)) from error

    def prompt(
        self,
        namespace: Hashable,
        messages: Sequence[Message],
        tools: Tools = None,
        session_key: str | None = None,
        arguments: Arguments | None = None,
        *,
        prefill: bool = False,
        date: str | None = None,
    ) -> ChatPrompt:
        """Return the prompt of a conversation. O(bytes of the messages + tokens), and encoding the new text.

        `arguments` are additional variables of the template; replies are remembered for each set of them.
        `session_key` gives its session, or without a key the remembered conversation.
        With `prefill`, the prompt ends inside the last message, a reply that the model continues. A remembered reply,
        for example one that `max_tokens` cut, continues from its own ids. `date` is the day of a new conversation.
        Raises ChatError if the template refuses the messages, and PromptTooLong.
        """
        known = self._index.ids_for(namespace, messages, tools, arguments)
        known = replace(known, date=known.date or date)
        if not prefill:
            return self._prompt(known, namespace, messages, tools, session_key, arguments)
        *asked, begun = messages
        template = self._template_of(tools, known.date or today(), arguments)
        at: int | None
        if known.messages == len(messages):
            session = self.session(namespace, session_key) or known.session or self._new_session()
            at = len(known.ids) - len(known.reply_ids[len(asked)])
            ids = array("i", template.without_stop(known.ids))
            prompt = ChatPrompt(ids, known.messages, session, namespace, tuple(asked), tools, template.date)
        else:
            prompt = self._prompt(known, namespace, asked, tools, session_key, arguments)
            template = self._template_of(tools, prompt.date, arguments)
            ids, at = template.prefilled(prompt.ids, asked, begun)
        in_thinking = at is not None and template.ends_in_thinking(ids, at)
        return replace(prompt, ids=ids, arguments=arguments or {}, begun=begun, reply_at=at, in_thinking=in_thinking)

    def compared(self, prompt: ChatPrompt, session_key: str | None) -> ChatPrompt:
        """Return a prompt with its `broken` part, and remember its parts for later prompts.

        A change breaks nothing where the ids of the changed message are known nonetheless. O(parts).
        """
        breaks, tools = self._index.breaks, prompt.tools or ()
        comparison = breaks.compared(prompt.namespace, prompt.messages, tools, session_key)
        found = comparison.found
        if not prompt.repeats:
            rule = "template-changed" if self.keeps_thinking else "thinking-dropped"
            found = found or Break(len(tools) + prompt.known, "template", rule)
        elif found is not None and len(tools) <= found.at < len(tools) + prompt.known:
            found = None
        if found is not None:
            breaks.counts[found.part.partition("[")[0].removesuffix("s"), found.rule] += 1
        return replace(prompt, broken=found, place=comparison.place)

    def token_counts(
        self, messages: Sequence[Message], tools: Tools = None, arguments: Arguments | None = None
    ) -> Iterator[int]:
        """Yield the numbers of tokens in the pieces of a conversation of any length, rendered without its history.

        Their sum is about the length of the prompt, see `rendering.pieces`. Each step takes some milliseconds, apart
        from the first, which renders. Raises ChatError if the template refuses the messages.
        """
        template = self._template_of(tools, today(), arguments)
        text = template.rendering.render(template.form.taken(messages))
        for piece in pieces(text, self._tokenizer):
            yield len(template.rendering.encode(piece))

    def remember(
        self, prompt: ChatPrompt, reply: Message, emitted_ids: Sequence[int], *, cut: str | None = None
    ) -> None:
        """Store that `prompt` was answered by `emitted_ids`, and that its client received the message `reply`.

        `cut` is the reply's text with its tags, if a stop string or token cut off some of the sampled text.
        """
        ids: array[int] | None = array("i", emitted_ids)
        if cut is not None:
            ids = self._cut(self._template_of(prompt.tools, prompt.date, prompt.arguments), emitted_ids, cut)
        asked = prompt.ids
        if prompt.begun is not None:
            if prompt.reply_at is None or ids is None:
                return
            reply = _joined(prompt.begun, reply)
            asked, ids = prompt.ids[: prompt.reply_at], prompt.ids[prompt.reply_at :] + ids
        self._index.breaks.answered(prompt.place, reply)
        if ids is not None:
            self._index.remember(
                prompt.namespace,
                prompt.messages,
                reply,
                asked,
                ids,
                tools=prompt.tools,
                arguments=prompt.arguments,
                date=prompt.date,
                session=prompt.session,
            )

    def constrained(self, params: SamplingParams, prompt: ChatPrompt, rule: CallRule, *, calls: bool) -> SamplingParams:
        """Return the parameters of a reply to `prompt` whose answer is constrained, or whose calls follow `rule`.

        `calls` says that the reply may make calls. Raises InvalidConstraint.
        """
        template = self._template_of(prompt.tools, prompt.date, prompt.arguments)
        thinking = template.thinking_at(prompt.ids)
        if prompt.begun is not None:
            thinking = "begun" if prompt.in_thinking else "over"
        return constrained(params, template, rule, thinking, reads_calls=calls)

    def session(self, namespace: Hashable, key: str | None) -> int | None:
        """Return the number of a session that a client names, None without a key.

        The most recent `MOST_SESSIONS` keys of all namespaces are kept; an older key gets a new number.
        """
        if not key:
            return None
        name = namespace, blake2b(key.encode(), digest_size=16).digest()
        with self._lock:
            number = self._sessions.pop(name, None) or self._new_session()
            self._sessions[name] = number
            if len(self._sessions) > MOST_SESSIONS:
                self._sessions.popitem(last=False)
        return number

    def arguments(self, options: Sequence[TemplateOption], tools: Tools) -> tuple[Arguments, list[str]]:
        """Return the template's arguments for a client's options, and the names of options that it does not read.

        Raises ChatError without a chat template.
        """
        if not options:
            return {}, []
        return template_arguments(self._template_of(tools, today()).rendering.template, options)

    @property
    def keeps_thinking(self) -> bool:
        """Whether the template writes the thinking of earlier replies."""
        return self._fact(lambda template: not template.strips_thinking, False)

    @property
    def thinking_tags(self) -> tuple[str, str]:
        """The tags that enclose the thinking of a reply."""
        return self._fact(lambda template: template.form.thinking_tags, (THINK_START, THINK_END))

    @property
    def call_format(self) -> CallFormat | None:
        """The format of the model's tool calls, None if it is unknown."""
        return self._fact(lambda template: template.call_format, None, tools=dumps(ANY_TOOL))

    @property
    def late_system(self) -> bool:
        """Whether the template writes a system message that follows a reply in its place, and does not refuse it."""
        messages = [{"role": role, "content": f"{role} said"} for role in ("user", "assistant", "system")]
        text = self._fact(lambda template: template.rendering.render(messages), "")
        return "assistant said" in text[: max(text.find("system said"), 0)]

    @property
    def user_after_results(self) -> bool:
        """Whether the template takes a text of the user after the results of tool calls, or takes no results."""

        def takes(template: ChatTemplate) -> bool:
            asked, result = template.form.asked_after_results()
            if not template.form.begins_after_results:
                return True
            text = template.rendering.render([*asked, {"role": "user", "content": "user said"}])
            return "user said" in text.rpartition(result)[2]

        return self._fact(takes, False)

    @property
    def stats(self) -> HistoryStats:
        """The counters of the history."""
        return self._index.stats

    # ---- inside

    def _fact(self, read: Callable[[ChatTemplate], Fact], otherwise: Fact, *, tools: str = "") -> Fact:
        """Return a fact about the template; `otherwise` if there is none, or if it refuses the messages."""
        try:
            return read(self._template(tools, ""))
        except ChatError:
            return otherwise

    def _prompt(
        self,
        known: Known,
        namespace: Hashable,
        messages: Sequence[Message],
        tools: Tools,
        session_key: str | None,
        arguments: Arguments | None,
    ) -> ChatPrompt:
        """Return the prompt of a conversation whose remembered beginning is `known`."""
        date = known.date or today()
        template = self._template_of(tools, date, arguments)
        ids, covered = self._from_known(template, known, messages), known.messages
        if ids is None or (self._limit is not None and len(ids) > self._limit):
            whole = template.opening(messages)
            if ids is None or len(whole) < len(ids):
                ids, covered = whole, 0
        session = self.session(namespace, session_key) or known.session or self._new_session()
        prompt = ChatPrompt(ids, covered, session, namespace, tuple(messages), tools, date, arguments or {})
        remembered = known.ids[:-1]  # the last id may be another stop token
        repeats = ids[: len(remembered)] == remembered
        return replace(prompt, reply_start=template.reply_start(ids), repeats=repeats)

    def _template_of(self, tools: Tools, date: str, arguments: Arguments | None = None) -> ChatTemplate:
        text, more = dumps(tools) if tools else "", arguments_key(arguments or {})
        make = self._template if len(text) <= _LARGE else self._make_template
        return make(text, date, more)

    def _make_template(self, tools: str, date: str, arguments: str = "") -> ChatTemplate:
        values = loads(arguments) if arguments else None
        given = loads(tools) if tools else None
        options: dict[str, Any] = {"arguments": values, "tool_format": self._tool_format}
        return ChatTemplate(self._tokenizer, self._stop_ids, given, date, self._limit, **options)

    def _appends(self, template: ChatTemplate) -> bool:
        try:
            return history_mode(template, self._mode) == "append"
        except ChatError:  # with these tools, appending would lose text
            return False

    def _from_known(self, template: ChatTemplate, known: Known, messages: Sequence[Message]) -> array[int] | None:
        """Return the prompt's ids with the remembered ids in place; None if there are none or they cannot be used."""
        if not known.messages:
            return None
        try:
            appends = self._appends(template)
            return template.grown(messages, known.messages, known.ids, known.reply_ids, appends=appends)
        except (ChatError, PromptTooLong):
            return None

    def _cut(self, template: ChatTemplate, ids: Sequence[int], text: str) -> array[int] | None:
        """Return ids of `text`, the start of a reply: sampled ids as far as they lie within it, the rest encoded.

        None if a token's text is not found in `text`.
        """
        kept = bisect_right(range(len(ids)), len(text), key=lambda n: len(template.said_text(ids[: n + 1])))
        before = template.said_text(ids[:kept])
        if not text.startswith(before):  # a control token that decoding leaves out, or part of a character
            return None
        rest = ControlTokens(self._tokenizer).encode(text.removeprefix(before))
        return array("i", ids[:kept]) + array("i", rest)


def _joined(begun: Message, rest: Message) -> Message:
    """Return a reply as a client sends it back that adds the continuation to the beginning."""
    whole = {**rest, "content": begun["content"] + rest["content"]}
    if thinking := (begun.get("reasoning_content") or "") + (rest.get("reasoning_content") or ""):
        whole["reasoning_content"] = thinking
    return whole
