"""Messages to text, and text to token ids.

Knows: one tokenizer and its chat template; a conversation's tools and date, which stay what they were when it began.
Knows no turn, and not what a reply is.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from radixkv.chat.messages import Message
from radixkv.engine.input_processor import Guard, check_date, rendered, template_source, today
from radixkv.errors import ChatError, InvalidInput

_ANY_SCHEMA = {"type": "object", "properties": {}}
ANY_TOOL = [{"type": "function", "function": {"name": "look", "description": "Look.", "parameters": _ANY_SCHEMA}}]
_ANY_DATE = "01 Jan 2025"


class Rendering:
    """One conversation's way to text; control tokens that users and tools spell stay text."""

    def __init__(
        self,
        tokenizer: Any | None,
        tools: Sequence[Any] | None = None,
        date: str | None = None,
        guard: Guard | None = None,
    ) -> None:
        """Raises ChatError for a model without a chat template, InvalidInput for tools that JSON cannot hold."""
        if tokenizer is None or not getattr(tokenizer, "chat_template", None):
            raise ChatError(
                "this model has no chat template, so it cannot hold a conversation: use generate() or submit()"
            )
        self.tokenizer = tokenizer
        self.tools = _json_copy(tools) if tools else None
        self.date = check_date(date) if date else today()
        self._guard = guard or Guard(tokenizer)

    @cached_property
    def template(self) -> str:
        """The template's source; raises ChatError if the tokenizer has several and none for this conversation."""
        return template_source(self.tokenizer, self.tools)

    def render(self, messages: Sequence[Message], *, reply: bool = True) -> str:
        """The text of a conversation; with `reply` up to where the next reply begins.

        Raises ChatError if the template takes no such messages.
        """
        guarded = [self._guard.message(message) for message in messages]
        return rendered(self.tokenizer, guarded, self.date, self.tools, reply=reply)

    def harmless(self, message: Message) -> Message:
        """A message of the assistant's, without control tokens in what it says and calls."""
        return {key: value if key == "role" else self._guard.quoted(value) for key, value in message.items()}

    def encode(self, text: str) -> list[int]:
        """Ids of a rendered text. Raises InvalidInput for text that is no Unicode."""
        return self._guard.encode(text)

    def text(self, ids: Sequence[int]) -> str:
        """What ids say, control tokens included."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    @cached_property
    def neutral(self) -> Rendering:
        """The same template without anything of this conversation in it, for what others are to know of it, too."""
        named = self.tools and not isinstance(self.tokenizer.chat_template, str)  # of several, one may be for tools
        return self.neutral_with(ANY_TOOL if named else None)

    def neutral_with(self, tools: Sequence[Any] | None) -> Rendering:
        """The same tokenizer with these tools, and nothing else of this conversation."""
        return Rendering(self.tokenizer, tools, _ANY_DATE, self._guard)


def _json_copy(tools: Sequence[Any]) -> list[Any]:
    try:
        return list(json.loads(json.dumps(list(tools))))
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"tools must be a list of JSON schemas: {error}") from error
