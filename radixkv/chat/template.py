"""Conversations to token ids, so that what was sampled is never encoded a second time.

Knows: one tokenizer and its chat template, how that writes replies, and how long a prompt may be. Knows no engine and
no turn that failed.

Text that was decoded and encoded again need not give the same ids, and every difference ends a cached prefix. So the
ids of a reply are kept, and only what is new is rendered: after a dummy assistant message whose words are marks
stands exactly the text that a template puts behind an assistant's words.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from radixkv.chat.messages import Message, ToolCall
from radixkv.chat.rendering import Rendering, at_least
from radixkv.chat.reply_form import CallNames, Marks, ReplyForm, reply_form
from radixkv.chat.splicing import Splicing, from_stop, unsaid, unused_word
from radixkv.chat.thinking import THINK_START
from radixkv.errors import ChatError, InvalidInput, PromptTooLong

_TAG = 16  # tokens that a tag and the white space behind it take at most, spelt letter by letter
_LONG = 8  # characters for each token that is allowed: what is longer is likely to be too long, and is counted first


class ChatTemplate:
    """Renders and encodes; `tools` and `date` stay what they were when the session began.

    With a `limit`, text that certainly has more tokens is refused before all of it is encoded.
    """

    def __init__(
        self,
        tokenizer: Any | None,
        stop_ids: frozenset[int],
        tools: Sequence[Any] | None = None,
        date: str | None = None,
        limit: int | None = None,
    ) -> None:
        """Raises ChatError for a model without a chat template, InvalidInput for tools that JSON cannot hold."""
        self.rendering = Rendering(tokenizer, tools, date)
        self.stop_ids = stop_ids
        self.limit = limit

    @property
    def tools(self) -> list[Any] | None:
        """JSON schemas of the tools, as they were when the session began."""
        return self.rendering.tools

    @property
    def date(self) -> str:
        """The day on which the session began."""
        return self.rendering.date

    @cached_property
    def form(self) -> ReplyForm:
        """How the template writes replies; raises ChatError if it takes no plain conversation."""
        return reply_form(self.rendering)

    @property
    def strips_thinking(self) -> bool:
        """Whether the template leaves the thinking of earlier replies out."""
        return self.form.strips_thinking

    def check_tools(self) -> None:
        """Raise InvalidInput for tools that the template does not write: the model would never see them."""
        if self.tools and not self.form.writes_tools:
            raise InvalidInput(
                "tools are nothing that this model's chat template writes, so the model would never see them: leave "
                "them out, describe them in the system prompt, or give the tokenizer a template that writes them"
            )

    # ---- the three ways to a prompt; each raises ChatError, and PromptTooLong for what is certainly beyond the limit

    def opening(self, messages: Sequence[Message]) -> array[int]:
        """Ids of a conversation's beginning, up to where the assistant's turn begins."""
        return self._extended(array("i"), self.rendering.render(self.form.taken(messages)))

    def continued(self, ids: array[int], new: Sequence[Message], answers: Sequence[ToolCall] = ()) -> array[int]:
        """`ids`, which end with a reply, and behind them the new messages and the beginning of the next reply.

        `answers` are the tool calls of that reply if `new` holds their results. The reply's stop token is kept if the
        template has it there too; it is closed with the template's if it was cut short.
        """
        calls = tuple((call.id, call.name) for call in answers)
        said = self._without_stop(ids)
        tail = self._behind_reply(new, calls)
        if not calls:
            tail = unsaid(self.rendering, tail, said, self.stop_texts)
        return self._extended(array("i", said), tail)

    def spliced(
        self, messages: Sequence[Message], said: Mapping[int, Sequence[int]], *, keep_thinking: bool
    ) -> array[int]:
        """Ids of a whole history through the template, with the stored ids of what was said in their places.

        `said` maps positions in `messages` to the ids sampled there, a stop token included. Without `keep_thinking`
        the template decides whose thinking it still shows.
        """
        kept = {at: self._without_stop(ids) for at, ids in said.items()}
        splicing = Splicing(
            self.rendering, self.form, self.stop_texts, self.form.taken(messages), kept, keep_thinking=keep_thinking
        )
        ids = array("i")
        for text, emitted in splicing.pieces():
            ids = self._extended(ids, text) + array("i", emitted)
        return ids

    # ---- what was said

    def said_text(self, ids: Sequence[int]) -> str:
        """The text of a reply, control tokens included, without its stop token."""
        return self.rendering.text(self._without_stop(ids))

    def opens_thinking(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt ends with an open tag, so that its reply's first words are thinking."""
        return self.rendering.text(prompt[-_TAG:]).rstrip().endswith(THINK_START)

    # ---- inside

    def _behind_reply(self, new: Sequence[Message], calls: CallNames) -> str:
        """The text from behind an assistant's words to the beginning of the next reply."""
        word = unused_word([*new, self.tools])
        marks = Marks(f"{word}reply.", f"{word}thinking.", f"{word}call.")
        # Words of a turn with calls may stand behind its results; some templates show no calls without words, though.
        text = self._around_reply(marks, calls, new)
        if calls and marks.call not in text:
            text = self._around_reply(marks, calls, new, words=marks.answer)
        _, found, tail = text.rpartition(marks.call if marks.call in text else marks.answer)
        if not found:
            raise ChatError("the chat template drops assistant messages: use history='template'")
        return from_stop(tail, self.stop_texts, self.form.behind_calls) if calls else tail

    def _around_reply(self, marks: Marks, calls: CallNames, new: Sequence[Message], words: str = "") -> str:
        """A reply that says marks only, and the new messages; some templates write one call a turn, models do not."""
        reply = self.form.reply(marks, calls)
        reply["content"] = words if calls else marks.answer
        try:
            return self.rendering.render([{"role": "user", "content": "x"}, reply, *new])
        except ChatError:
            if len(calls) < 2:
                raise
            return self._around_reply(marks, calls[:1], new, words)

    @cached_property
    def stop_texts(self) -> list[str]:
        """Texts of the tokens that end a reply."""
        texts = [self.rendering.text([stop]) for stop in sorted(self.stop_ids)]
        return [text for text in texts if text]  # a model may name tokens that its tokenizer does not have

    def _without_stop(self, ids: Sequence[int]) -> Sequence[int]:
        return ids[:-1] if ids and ids[-1] in self.stop_ids else ids

    def _extended(self, ids: array[int], text: str) -> array[int]:
        """`ids`, and behind them those of a text."""
        if self.limit is not None:
            self._check_length(text, self.limit - len(ids))
        return ids + array("i", self.rendering.encode(text))

    def _check_length(self, text: str, room: int) -> None:
        """Raise PromptTooLong for a text that certainly has more tokens than there is room for."""
        if len(text) <= _LONG * max(room, 0):
            return
        if at_least(text, room, self.rendering.tokenizer, self.rendering.encode) > room:
            raise PromptTooLong(f"the conversation has more than the {self.limit} tokens that it may have")
