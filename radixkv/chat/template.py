"""Turn conversations into token ids without encoding sampled text a second time.

Decoding ids and encoding the text again may give other ids, and each difference ends a cached prefix. So the ids of a
reply are kept, and only new messages are rendered. A dummy assistant message of marker words shows the text that the
template writes after the words of an assistant.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, TypeAlias

from radixkv.chat.calls.choice import TRIAL_CALL, TRIAL_TOOLS, chosen
from radixkv.chat.calls.formats import HERMES, CallFormat, format_named
from radixkv.chat.messages import Message, ToolCall, calls_of
from radixkv.chat.rendering import Key, Memo, Rendering, at_least
from radixkv.chat.reply_form import CallNames, Marks, ReplyForm, reply_form, shared
from radixkv.chat.splicing import Splicing, from_stop_text, unused_word, without_closing
from radixkv.chat.template_arguments import Arguments
from radixkv.chat.thinking import CHANNEL, THINK_START
from radixkv.errors import ChatError, PromptTooLong

Thinking: TypeAlias = Literal["begun", "possible", "over"]

_CHOSEN = Memo[Key, CallFormat | None]()
_USER: Message = {"role": "user", "content": "radixkv.user."}
_TAG = 16  # most tokens of a tag and the white space after it, if each character is one
_LONG = 8  # characters per allowed token above which the tokens of a text are counted before it is encoded


class ChatTemplate:
    """Renders and encodes one conversation; its `tools`, `date` and `arguments` are fixed when the session begins.

    `arguments` are additional variables of the template, such as `enable_thinking`.

    With a `limit` in tokens, a text that exceeds it is refused before all of it is encoded.
    """

    def __init__(
        self,
        tokenizer: Any | None,
        stop_ids: frozenset[int],
        tools: Sequence[Any] | None = None,
        date: str | None = None,
        limit: int | None = None,
        *,
        arguments: Arguments | None = None,
        tool_format: str = "auto",
    ) -> None:
        """`tool_format` names the format of calls; "auto" tries the template.

        Raises ChatError for a model without a chat template, InvalidInput for an unknown format, and for tools that
        JSON cannot hold."""
        self._format = format_named(tool_format)
        self.rendering = Rendering(tokenizer, tools, date, arguments=arguments)
        self.stop_ids = stop_ids
        self.limit = limit

    @property
    def tools(self) -> list[Any] | None:
        """JSON schemas of the tools of the session."""
        return self.rendering.tools

    @property
    def date(self) -> str:
        """The day on which the session began."""
        return self.rendering.date

    @cached_property
    def form(self) -> ReplyForm:
        """The way the template writes replies. Raises ChatError if it refuses a plain conversation."""
        return reply_form(self.rendering)

    @property
    def strips_thinking(self) -> bool:
        """Whether the template leaves out the thinking of earlier replies."""
        return self.form.strips_thinking

    # ---- the ways to make a prompt; each raises ChatError, and PromptTooLong above the limit

    def opening(self, messages: Sequence[Message]) -> array[int]:
        """Return the ids of the first messages, up to the start of the next reply."""
        return self._extended(array("i"), self.rendering.render(self.form.taken(messages)))

    def continued(self, ids: array[int], new: Sequence[Message], answers: Sequence[ToolCall] = ()) -> array[int]:
        """Append new messages to `ids`, which end with a reply, up to the start of the next reply.

        `answers` are the tool calls of that reply if `new` holds their results. The stop token of the reply is kept if
        the template has it there too; a reply that was cut short is closed with the stop text of the template.
        """
        calls = tuple((call.id, call.name) for call in answers)
        said = self.without_stop(ids)
        tail = self._after_reply(new, calls)
        if not calls:
            tail = without_closing(self.rendering, tail, said, self.stop_texts)
        return self._extended(array("i", said), tail)

    def grown(
        self,
        messages: Sequence[Message],
        known: int,
        ids: array[int] | None,
        said: Mapping[int, Sequence[int]],
        *,
        appends: bool,
    ) -> array[int]:
        """Return the prompt of a conversation; the first `known` messages end with a reply.

        `ids` are the token ids of these messages, if they are one sequence. The others are appended to it if `appends`.
        Else all are rendered, with the sampled ids `said` in place of the replies.
        """
        if not appends or ids is None:
            return self.spliced(messages, said, keep_thinking=appends)
        new = messages[known:]
        answers = calls_of(messages[known - 1]) if new and new[0].get("role") == "tool" else ()
        return self.continued(ids, new, answers)

    def spliced(
        self, messages: Sequence[Message], said: Mapping[int, Sequence[int]], *, keep_thinking: bool
    ) -> array[int]:
        """Render a whole history, with the sampled ids in place of the replies.

        `said` maps positions in `messages` to the ids sampled there, a stop token included. Without `keep_thinking`
        the template decides for each reply whether its thinking is shown.
        """
        kept = {at: self.without_stop(ids) for at, ids in said.items()}
        splicing = Splicing(
            self.rendering, self.form, self.stop_texts, self.form.taken(messages), kept, keep_thinking=keep_thinking
        )
        ids = array("i")
        for text, sampled_text in splicing.pieces():
            ids = self._extended(ids, text) + array("i", sampled_text)
        return ids

    def prefilled(self, ids: array[int], messages: Sequence[Message], begun: Message) -> tuple[array[int], int | None]:
        """Append the beginning of a reply to `ids`, the prompt of `messages`, so that the model continues it.

        Also returns the index at which the reply begins, None if it does not begin at the end of the prompt: a prompt
        may end with an open thinking tag that the template leaves out of a reply without thinking.
        """
        prompt, said = self.rendering.render(self.form.taken(messages)), begun["content"]
        opening = self.form.thinking_tags[0]
        if said.lstrip().startswith(opening):  # it is what the model would sample itself
            said = said.lstrip().removeprefix(opening) if prompt.rstrip().endswith(opening) else said
            return self._extended(ids, said), len(ids)
        before = self._text_before(messages, begun)
        common = len(prompt) if before.startswith(prompt) else shared(before, prompt)
        left_out = self.rendering.encode(prompt[common:])
        if list(ids[len(ids) - len(left_out) :]) != left_out:
            return self._extended(array("i"), before + said), None
        kept = ids[: len(ids) - len(left_out)]
        return self._extended(kept, before[common:] + said), None if left_out else len(ids)

    def reply_start(self, prompt: Sequence[int]) -> int:
        """Return the length of a prompt up to the end of its last message, where the reply begins; 0 if unknown.

        A later turn repeats these tokens. It may drop those that follow, such as an open thinking tag.
        """
        opening = self.rendering.reply_opening
        if opening is None:
            return 0
        end = len(prompt) - len(opening)
        return end if list(prompt[end:]) == opening else 0

    # ---- replies

    def said_text(self, ids: Sequence[int]) -> str:
        """Return the text of a reply, control tokens included, without its stop token."""
        return self.rendering.text(self.without_stop(ids))

    def opens_thinking(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt ends with an open thinking tag, so that its reply begins with thinking."""
        return self.rendering.text(prompt[-_TAG:]).rstrip().endswith(THINK_START)

    def thinking_at(self, prompt: Sequence[int]) -> Thinking:
        """Return the state of thinking at the end of a prompt, where its reply begins."""
        if self.opens_thinking(prompt):
            return "begun"
        ends = self.rendering.text(prompt[-_TAG:]).rstrip().endswith(self.form.thinking_tags[1])
        return "over" if ends or self.form.thinking_in is None else "possible"

    def ends_in_thinking(self, ids: Sequence[int], start: int) -> bool:
        """Whether the reply that begins at `start` of `ids` has opened thinking and not closed it."""
        opening, closing = self.form.thinking_tags
        said = self.rendering.text(ids[start:])
        return (self.opens_thinking(ids[:start]) or said.lstrip().startswith(opening)) and closing not in said

    # ---- tags

    @cached_property
    def call_format(self) -> CallFormat | None:
        """The format of the model's tool calls, None if it is unknown."""
        if self._format is not None or self.rendering.tools_as_text:
            return self._format or HERMES
        rendering = self.rendering
        return _CHOSEN.get(rendering.tokenizer, rendering.key, lambda: chosen(rendering.tokenizer, self._trial_call()))

    @cached_property
    def has_channels(self) -> bool:
        """Whether the model may write thinking and answer as messages of their own."""
        return CHANNEL in self.rendering.template

    def token_of(self, tag: str) -> int | None:
        """Return the id of a tag that is one added token of the tokenizer; None for a tag that is text."""
        added = getattr(self.rendering.tokenizer, "added_tokens_decoder", {})
        return next((number for number, token in added.items() if token.content == tag), None)

    # ---- inside

    def _trial_call(self) -> str | None:
        """Return the trial call as the template writes it, after thinking; None if it shows no calls."""
        rendering = self.rendering.without_content.with_tools(TRIAL_TOOLS)
        try:
            form = reply_form(rendering)
            messages = form.taken(
                [_USER, {"role": "assistant", "content": "", "tool_calls": [TRIAL_CALL.as_message()]}]
            )
            whole, begun = rendering.render(messages, reply=False), rendering.render(messages[:1])
        except ChatError:
            return None
        text = whole[shared(whole, begun) :].rpartition(form.thinking_tags[1])[2]
        return text if TRIAL_CALL.name in text else None

    def _after_reply(self, new: Sequence[Message], calls: CallNames) -> str:
        """Render the text between the words of an assistant and the start of the next reply."""
        word = unused_word([*new, self.tools])
        marks = Marks(f"{word}reply.", f"{word}thinking.", f"{word}call.")
        # The words of a turn with calls may follow its results, but some templates show no calls without words.
        text = self._render_reply(marks, calls, new)
        if calls and marks.call not in text:
            text = self._render_reply(marks, calls, new, words=marks.answer)
        _, found, tail = text.rpartition(marks.call if marks.call in text else marks.answer)
        if not found:
            raise ChatError("the chat template drops assistant messages: use history='template'")
        return from_stop_text(tail, self.stop_texts, self.form.after_calls) if calls else tail

    def _text_before(self, messages: Sequence[Message], begun: Message) -> str:
        """Render a conversation up to the answer of a reply that has begun."""
        word = unused_word([*messages, begun, self.tools])
        marks = Marks(f"{word}reply.", f"{word}thinking.", f"{word}call.")
        thinking = begun.get("reasoning_content") if self.form.thinking_in == "reasoning_content" else None
        reply = self.form.reply(marks, thinks=bool(thinking))
        before, found, _ = self.rendering.render([*self.form.taken(messages), reply], reply=False).partition(
            marks.answer
        )
        if not found:
            raise ChatError("the chat template drops the message to continue")
        return before.replace(marks.thinking, thinking or "")

    def _render_reply(self, marks: Marks, calls: CallNames, new: Sequence[Message], words: str = "") -> str:
        """Render a reply of marks and the new messages; with one call if the template refuses more."""
        reply = self.form.reply(marks, calls)
        reply["content"] = words if calls else marks.answer
        try:
            return self.rendering.render([{"role": "user", "content": "x"}, reply, *new])
        except ChatError:
            if len(calls) < 2:
                raise
            return self._render_reply(marks, calls[:1], new, words)

    @cached_property
    def stop_texts(self) -> list[str]:
        """Texts of the tokens that end a reply."""
        texts = [self.rendering.text([stop]) for stop in sorted(self.stop_ids)]
        return [text for text in texts if text]  # a model may define stop ids that its tokenizer lacks

    def without_stop(self, ids: Sequence[int]) -> Sequence[int]:
        """Return the ids of a reply without the stop token at their end, if they have one."""
        return ids[:-1] if ids and ids[-1] in self.stop_ids else ids

    def _extended(self, ids: array[int], text: str) -> array[int]:
        """Append the ids of `text` to `ids`."""
        if self.limit is not None:
            self._check_length(text, self.limit - len(ids))
        return ids + array("i", self.rendering.encode(text))

    def _check_length(self, text: str, room: int) -> None:
        """Raise PromptTooLong for a text that has more than `room` tokens."""
        if len(text) <= _LONG * max(room, 0):
            return
        found = at_least(text, room, self.rendering.tokenizer, self.rendering.encode)
        if found > room:
            assert self.limit is not None
            message = f"the conversation has more than the {self.limit} tokens that it may have"
            raise PromptTooLong(message, tokens=self.limit - room + found, limit=self.limit)
