"""How many tokens a long text has at least, without encoding much more of it than that takes.

Knows: a vocabulary's texts, in bytes spelt as letters or as they are. Knows no template and no limit of its own.

A text is cut only where no token of the vocabulary could stand across: behind a letter or sign of ASCII, before another
one or before white space, where no token has the two side by side. So its pieces have together the tokens that it has,
but for what some tokenizers put before each text that they are given.

Messages to text, and text to token ids.

Knows: one tokenizer and its chat template; a conversation's tools and date, which stay what they were when it began.
Knows no turn, and not what a reply is.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

from radixkv.chat.messages import Message
from radixkv.engine.input_processor import ControlTokens, check_date, rendered, template_source, today
from radixkv.errors import ChatError, InvalidInput

_PIECE = 1 << 14  # characters that are encoded at a time
_REACH = 1 << 12  # how far a cut is looked for
_AROUND = 2  # tokens that a tokenizer may put around a piece which the whole text has not: a space, a mark
_SPELT = {" ": " \u0120\u2581", "\n": "\n\u010a"}  # white space in vocabularies: as it is, as a byte, sentencepiece's


@dataclass(frozen=True)
class Vocabulary:
    """What the tokens of a tokenizer tell about a text's length.

    `neighbours` are each two characters that stand side by side in a token. `longest` has, for each letter and sign of
    ASCII that is a token by itself, the characters of the longest token with it. What is none by itself may be unknown,
    and tokenizers make one token of many unknown characters.
    """

    neighbours: frozenset[str]
    longest: Mapping[str, int]

    @classmethod
    def of(cls, tokenizer: Any) -> Vocabulary:
        """Read a tokenizer's tokens, once. O(vocabulary)."""
        if tokenizer not in _READ:
            _READ[tokenizer] = cls._read(tokenizer.get_vocab())
        return _READ[tokenizer]

    @classmethod
    def _read(cls, tokens: Mapping[str, int]) -> Vocabulary:
        neighbours: set[str] = set()
        longest: dict[str, int] = {}
        for token in tokens:
            neighbours.update(left + right for left, right in pairwise(token))
            for letter in filter(_is_sign, {*token.lower(), *token.upper()}):  # some tokenizers read letters alike
                longest[letter] = max(longest.get(letter, 0), len(token))
        return cls(frozenset(neighbours), {letter: size for letter, size in longest.items() if letter in tokens})

    def parts(self, left: str, right: str) -> bool:
        """Whether certainly no token stands across two characters."""
        if left not in self.longest or not (right in _SPELT or _is_sign(right)):
            return False
        return not any(left + each in self.neighbours for each in _SPELT.get(right, right))

    def of_letters(self, text: str) -> int:
        """Tokens that a text certainly has for its letters: each in a token as long as the longest one with it."""
        counts = Counter(text)
        return int(sum(count / self.longest[letter] for letter, count in counts.items() if letter in self.longest))


_READ: WeakKeyDictionary[Any, Vocabulary] = WeakKeyDictionary()


def at_least(text: str, enough: int, tokenizer: Any, encode: Callable[[str], list[int]]) -> int:
    """Tokens that `text` certainly has, with what `encode` makes of its pieces; counting stops beyond `enough`.

    O(enough) tokens are encoded, but for stretches that cannot be cut: one word of a million letters, say, whose
    letters are counted first, or Chinese without any ASCII, which is encoded whole.
    """
    vocabulary = Vocabulary.of(tokenizer)
    tokens = at = 0
    while at < len(text) and tokens <= enough:
        end = _cut(text, at + _PIECE, vocabulary)
        if end - at > _PIECE + _REACH and (sure := tokens + vocabulary.of_letters(text[at:end])) > enough:
            return sure
        tokens += max(len(encode(text[at:end])) - _AROUND, 0)
        at = end
    return tokens


def _cut(text: str, start: int, vocabulary: Vocabulary) -> int:
    """The first place from `start` on where no token stands across; the text's end if there is none near."""
    for at in range(start, min(start + _REACH, len(text))):
        if vocabulary.parts(text[at - 1], text[at]):
            return at
    return len(text)


def _is_sign(letter: str) -> bool:
    return "!" <= letter <= "~"


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
        control_tokens: ControlTokens | None = None,
    ) -> None:
        """Raises ChatError for a model without a chat template, InvalidInput for tools that JSON cannot hold."""
        if tokenizer is None or not getattr(tokenizer, "chat_template", None):
            raise ChatError(
                "this model has no chat template, so it cannot hold a conversation: use generate() or submit()"
            )
        self.tokenizer = tokenizer
        self.tools = _json_copy(tools) if tools else None
        self.date = check_date(date) if date else today()
        self._guard = control_tokens or ControlTokens(tokenizer)

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
