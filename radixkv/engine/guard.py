"""Text from outside stays text: nobody writes another's turns by spelling a control token.

Knows: one tokenizer's control tokens, and which roles speak from outside. Knows no template and no session.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from radixkv.errors import InvalidInput

Message = Mapping[str, Any]

# Put inside a control token's text, so that it is encoded in two halves and stays text. A Unicode noncharacter, so
# never part of a text.
_BREAK = "\ufdd0"
_UNTRUSTED = frozenset({"user", "tool"})


class Guard:
    """Breaks control tokens up in what users and tools say, and encodes what was rendered from that."""

    def __init__(self, tokenizer: Any) -> None:
        """Guard prompts of this tokenizer."""
        self._tokenizer = tokenizer

    def message(self, message: Message) -> Message:
        """The message, with control tokens broken up if it comes from outside."""
        if message.get("role") not in _UNTRUSTED:
            return message
        return {**message, "content": self._break_up(message.get("content"))}

    def quoted(self, value: Any) -> Any:
        """A value as JSON has them, with control tokens broken up in all of its texts."""
        if isinstance(value, str):
            return self._break_up(value)
        if isinstance(value, Mapping):
            return {self.quoted(key): self.quoted(each) for key, each in value.items()}
        return [self.quoted(each) for each in value] if isinstance(value, list) else value

    def encode(self, text: str) -> list[int]:
        """Ids of a rendered text; what `message` broke up is encoded in pieces. Raises as `checked_text`."""
        ids: list[int] = []
        for piece in checked_text(text).split(_BREAK):
            if piece:
                ids.extend(self._tokenizer.encode(piece, add_special_tokens=False))
        return ids

    def _break_up(self, content: Any) -> Any:
        if isinstance(content, str):
            content = content.replace(_BREAK, "")
            for control in self._controls:
                content = content.replace(control, control[0] + _BREAK + control[1:])
            return content
        if isinstance(content, list):
            return [{**part, "text": self._break_up(part["text"])} if "text" in part else part for part in content]
        return content

    @cached_property
    def _controls(self) -> list[str]:
        """Texts of all control tokens, longest first.

        A token that stands in the chat template is one, whether it is marked as special or not: some are not (Qwen's
        `</tool_response>`), and text must not end what the template has begun.
        """
        tokenizer = self._tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        template = template_text(tokenizer)
        controls = {str(token) for token in tokenizer.all_special_tokens}
        controls |= {t.content for t in added if t.special or (t.content.strip() and t.content in template)}
        return sorted((text for text in controls if len(text) > 1), key=lambda text: (-len(text), text))


def template_text(tokenizer: Any | None) -> str:
    """The source of a tokenizer's chat template, of all of them if it has several; empty if it has none."""
    given = getattr(tokenizer, "chat_template", None) or ""
    return "\n".join(map(str, given.values())) if isinstance(given, Mapping) else str(given)


def checked_text(text: str) -> str:
    """The text itself; raises InvalidInput if it has half of a surrogate pair, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(f"this text is no valid Unicode: {error}") from error
    return text
