"""Conversations to token ids, so that what was sampled is never encoded a second time.

Knows: one tokenizer and its chat template, the session's tools and date. Knows no engine and no turn that failed.

Text that was decoded and encoded again need not give the same ids, and every difference ends a cached prefix. So the
ids of a reply are kept, and only what is new is rendered: after a dummy assistant message whose content is a
sentinel stands exactly the text that a template puts behind an assistant's words.
"""

from __future__ import annotations

import datetime
import json
from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from radixkv.chat.messages import THINK_END, THINK_START, Message, ToolCall
from radixkv.engine.guard import Guard
from radixkv.errors import ChatError, InvalidInput


class ChatTemplate:
    """Renders and encodes; `tools` and `date` stay what they were when the session began."""

    def __init__(
        self,
        tokenizer: Any | None,
        stop_ids: frozenset[int],
        tools: Sequence[Any] | None = None,
        date: str | None = None,
    ) -> None:
        """Raises ChatError for a model without a chat template, InvalidInput for tools that JSON cannot hold."""
        if tokenizer is None or not getattr(tokenizer, "chat_template", None):
            raise ChatError(
                "this model has no chat template, so it cannot hold a conversation: use generate() or submit()"
            )
        self._tokenizer = tokenizer
        self._guard = Guard(tokenizer)
        self.stop_ids = stop_ids
        self.tools = _json_copy(tools) if tools else None
        self.date = date or datetime.date.today().strftime("%d %b %Y")

    # ---- the three ways to a prompt

    def opening(self, messages: Sequence[Message]) -> array[int]:
        """Ids of a conversation's beginning, up to where the assistant's turn begins."""
        return self._encode(self._render(messages))

    def continued(self, ids: array[int], new: Sequence[Message], answers: Sequence[ToolCall] = ()) -> array[int]:
        """`ids`, which end with a reply, and behind them the new messages and the beginning of the next reply.

        `answers` are the tool calls of that reply if `new` holds their results. The reply's stop token is kept if the
        template has it there too; it is closed with the template's if it was cut short.
        """
        tail = self._behind_reply(new, answers)
        last = ids[-1] if ids and ids[-1] in self.stop_ids else None
        if last is None:
            return ids + self._encode(tail)
        emitted = self._text([last])
        if tail.startswith(emitted):
            return ids + self._encode(tail.removeprefix(emitted))
        return ids[:-1] + self._encode(tail)

    def spliced(
        self, messages: Sequence[Message], said: Mapping[int, Sequence[int]], *, keep_thinking: bool
    ) -> array[int]:
        """Ids of a whole history through the template, with the stored ids of what was said in their places.

        `said` maps positions in `messages` to the ids sampled there, a stop token included. Without `keep_thinking`
        the template decides whose thinking it still shows.
        """
        marks = {at: (_sentinel(messages, f"answer{at}"), _sentinel(messages, f"thinking{at}")) for at in said}
        shown = [dict(message) for message in messages]
        thought = {} if keep_thinking else {at: self._thinking_length(ids) for at, ids in said.items()}
        for at, (answer, thinking) in marks.items():
            content = f"{THINK_START}\n{thinking}\n{THINK_END}\n\n{answer}" if thought.get(at) else answer
            shown[at] = {"role": "assistant", "content": content}
        rest = self._render(shown)
        ids = array("i")
        for at, (answer, thinking) in sorted(marks.items()):
            before, found, rest = rest.partition(answer)
            if not found:
                raise ChatError(
                    "the chat template dropped an assistant's message: it cannot be used with history='template'"
                )
            ids += self._spliced_reply(before, thinking, self._without_stop(said[at]), thought.get(at, 0))
        return ids + self._encode(rest)

    @cached_property
    def strips_thinking(self) -> bool:
        """Whether the template leaves the thinking of earlier replies out."""
        content = f"{THINK_START}\nearlier-thinking\n{THINK_END}\n\nearlier-answer"
        user = {"role": "user", "content": "x"}
        text = self._render([user, {"role": "assistant", "content": content}, user])
        return "earlier-thinking" not in text

    # ---- what was said

    def said_text(self, ids: Sequence[int]) -> str:
        """The text of a reply, control tokens included, without its stop token."""
        return self._text(self._without_stop(ids))

    def _without_stop(self, ids: Sequence[int]) -> Sequence[int]:
        return ids[:-1] if ids and ids[-1] in self.stop_ids else ids

    def _thinking_length(self, ids: Sequence[int]) -> int:
        """Tokens of the thinking, its closing tag and the white space behind it; 0 without thinking."""
        if THINK_END not in self._text(ids):
            return 0
        length = bisect_left(range(len(ids)), True, key=lambda n: THINK_END in self._text(ids[: n + 1])) + 1
        while length < len(ids) and not self._text([ids[length]]).strip():
            length += 1
        return length

    def _spliced_reply(self, before: str, thinking: str, ids: Sequence[int], thought: int) -> array[int]:
        """Ids of the text before a reply and of the reply, with its thinking if the template shows it."""
        if not thought:
            return self._encode(before) + array("i", ids)
        ahead, shown, _ = before.partition(thinking)
        if not shown:
            return self._encode(before) + array("i", ids[thought:])
        if self._text(ids).startswith(THINK_START):  # then the opening tag was sampled, not given by the template
            ahead = ahead[: ahead.rindex(THINK_START)]
        return self._encode(ahead) + array("i", ids)

    # ---- rendering

    def _behind_reply(self, new: Sequence[Message], answers: Sequence[ToolCall]) -> str:
        """The text from behind an assistant's words to the beginning of the next reply."""
        mark = _sentinel(new, "reply")
        reply: Message = {"role": "assistant", "content": mark}
        if answers:  # a template may show content and calls in any order, or only one of them: mark both
            reply["tool_calls"] = [ToolCall(c.id, c.name, {"mark": mark}).as_message() for c in answers]
        text = self._render([{"role": "user", "content": "x"}, reply, *new])
        _, found, tail = text.rpartition(mark)
        if not found:
            raise ChatError("the chat template drops assistant messages: use history='template'")
        return self._from_stop(tail) if answers else tail

    def _from_stop(self, tail: str) -> str:
        """Skip what closes the dummy tool call: the reply brought its own."""
        found = [at for at in (tail.find(self._text([stop])) for stop in self.stop_ids) if at >= 0]
        if not found:
            raise ChatError("the chat template does not end a tool call with a stop token: use history='template'")
        return tail[min(found) :]

    def _render(self, messages: Sequence[Message]) -> str:
        guarded = [self._guard.message(message) for message in messages]
        try:
            text = self._tokenizer.apply_chat_template(
                guarded, tools=self.tools, add_generation_prompt=True, tokenize=False, date_string=self.date
            )
        except Exception as error:  # templates raise what they like, jinja's own errors among it
            raise ChatError(f"the model's chat template refuses this conversation: {error}") from error
        return str(text)

    def _encode(self, text: str) -> array[int]:
        return array("i", self._guard.encode(text))

    def _text(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _json_copy(tools: Sequence[Any]) -> list[Any]:
    try:
        return list(json.loads(json.dumps(list(tools))))
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"tools must be a list of JSON schemas: {error}") from error


def _sentinel(messages: Sequence[Message], name: str) -> str:
    """A word that none of the messages contains."""
    text = json.dumps(list(messages), default=str, ensure_ascii=False)
    mark = f"radixkv.{name}."
    while mark in text:
        mark += "."
    return mark
