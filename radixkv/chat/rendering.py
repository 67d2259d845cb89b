"""Render messages to text by a chat template, encode text, and bound the number of its tokens from below.

The tools and the date of a conversation are fixed when it begins, so that its prefix stays the same. The lower bound
allows a prompt that is far too long to be refused without encoding all of it: the text is cut at places where no token
of the vocabulary can span the cut, and the tokens of the pieces are counted until the limit is exceeded.
"""

from __future__ import annotations

import json
import reprlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Generic, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

from radixkv.chat.generic_tools import with_tools_in_text
from radixkv.chat.messages import Message
from radixkv.chat.template_arguments import Arguments, arguments_key
from radixkv.engine.chat_messages import check_messages, rendered_with_text
from radixkv.engine.chat_prompts import ControlTokens, check_date, rendered, template_source, template_text, today
from radixkv.errors import ChatError, InvalidInput

_PIECE = 1 << 14  # characters that are encoded at a time
_REACH = 1 << 12  # characters that are searched for a cut
_AROUND = 2  # tokens that a tokenizer may add around each piece: a space, a begin-of-text token
_SPELT = {" ": " \u0120\u2581", "\n": "\n\u010a"}  # white space in vocabularies: verbatim, byte-level, sentencepiece


Found = TypeVar("Found")
Of = TypeVar("Of", bound=Hashable)
_MOST = 64  # findings of a tokenizer; their number is bounded because callers choose the arguments of templates


class Memo(Generic[Of, Found]):
    """Findings about tokenizers and their templates, as long as the tokenizer lives. Thread-safe."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Any, dict[Of, Found]] = WeakKeyDictionary()

    def get(self, tokenizer: Any, key: Of, find: Callable[[], Found]) -> Found:
        """Return what `find` finds for a tokenizer and a key, once; several threads may find the same."""
        known = self._known.setdefault(tokenizer, {})
        with suppress(KeyError):
            return known[key]
        found = find()
        if len(known) >= _MOST:
            known.clear()
        return known.setdefault(key, found)


@dataclass(frozen=True)
class Vocabulary:
    """Facts about the tokens of a tokenizer that bound the length of a text.

    `neighbours` holds each pair of adjacent characters in a token. `longest` maps each printable ASCII character that
    is a token by itself to the length of the longest token that contains it. Other characters may be unknown to the
    tokenizer, and it may encode many unknown characters as one token.
    """

    neighbours: frozenset[str]
    longest: Mapping[str, int]

    @classmethod
    def of(cls, tokenizer: Any) -> Vocabulary:
        """Return the vocabulary of a tokenizer, read once. O(vocabulary)."""
        return _READ.get(tokenizer, None, lambda: cls._read(tokenizer.get_vocab()))

    @classmethod
    def _read(cls, tokens: Mapping[str, int]) -> Vocabulary:
        neighbours: set[str] = set()
        longest: dict[str, int] = {}
        for token in tokens:
            neighbours.update(left + right for left, right in pairwise(token))
            for letter in filter(_is_sign, {*token.lower(), *token.upper()}):  # some tokenizers ignore case
                longest[letter] = max(longest.get(letter, 0), len(token))
        return cls(frozenset(neighbours), {letter: size for letter, size in longest.items() if letter in tokens})

    def parts(self, left: str, right: str) -> bool:
        """Whether no token can contain `left` followed by `right`."""
        if left not in self.longest or not (right in _SPELT or _is_sign(right)):
            return False
        return not any(left + each in self.neighbours for each in _SPELT.get(right, right))

    def of_letters(self, text: str) -> int:
        """Return a lower bound for the tokens of `text`: no token has more of a character than `longest` states."""
        counts = Counter(text)
        return int(sum(count / self.longest[letter] for letter, count in counts.items() if letter in self.longest))


_READ = Memo[None, Vocabulary]()


def at_least(text: str, enough: int, tokenizer: Any, encode: Callable[[str], list[int]]) -> int:
    """Return a lower bound for the tokens of `text`; counting stops above `enough`.

    Encodes O(enough) tokens, except for stretches that cannot be cut. The characters of such a stretch, for example one
    word of a million letters, are counted first. Text without any ASCII, for example Chinese, is encoded as a whole.
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


def pieces(text: str, tokenizer: Any) -> Iterator[str]:
    """Split a text into pieces of at most 20,480 characters, to encode them one at a time.

    A cut is where no token spans it, if there is such a place in reach. So the tokens of the pieces are about as many
    as the text has: each piece may have two tokens more.
    """
    vocabulary = Vocabulary.of(tokenizer)
    at = 0
    while at < len(text):
        end = min(_cut(text, at + _PIECE, vocabulary), at + _PIECE + _REACH)
        yield text[at:end]
        at = end


def _cut(text: str, start: int, vocabulary: Vocabulary) -> int:
    """Return the first index from `start` on that no token spans; the end of the text if there is none in reach."""
    for at in range(start, min(start + _REACH, len(text))):
        if vocabulary.parts(text[at - 1], text[at]):
            return at
    return len(text)


def _is_sign(letter: str) -> bool:
    return "!" <= letter <= "~"


_ANY_SCHEMA = {"type": "object", "properties": {}}
ANY_TOOL = [{"type": "function", "function": {"name": "look", "description": "Look.", "parameters": _ANY_SCHEMA}}]
_ANY_DATE = "01 Jan 2025"
_USER: Message = {"role": "user", "content": "radixkv.user."}
_SYSTEM: Message = {"role": "system", "content": "Be brief."}
Key: TypeAlias = tuple[str, str, bool]
_WRITES_TOOLS = Memo[tuple[str, str], bool]()
_REPLY_OPENINGS = Memo[Key, list[int] | None]()


class Rendering:
    """Renders one conversation; control tokens that users or tools write are escaped and stay text."""

    def __init__(
        self,
        tokenizer: Any | None,
        tools: Sequence[Any] | None = None,
        date: str | None = None,
        control_tokens: ControlTokens | None = None,
        arguments: Arguments | None = None,
    ) -> None:
        """`arguments` are additional variables of the template, such as `enable_thinking`.

        Raises ChatError for a model without a chat template, InvalidInput for tools that JSON cannot hold."""
        if tokenizer is None or not getattr(tokenizer, "chat_template", None):
            raise ChatError(
                "this model has no chat template, so it cannot hold a conversation: use generate() or submit()"
            )
        self.tokenizer = tokenizer
        self.tools = _json_copy(tools) if tools else None
        self.date = check_date(date) if date else today()
        self._guard = control_tokens or ControlTokens(tokenizer)
        self.arguments: Arguments = self._guard.quoted(arguments or {})

    @cached_property
    def template(self) -> str:
        """The source of the template. Raises ChatError if the tokenizer has several and none for this conversation."""
        return template_source(self.tokenizer, self.tools)

    @cached_property
    def key(self) -> Key:
        """The source of the template, its arguments, and whether tools are text, for findings that depend on these."""
        return self.template, arguments_key(self.arguments), self.tools_as_text

    @cached_property
    def writes_tools(self) -> bool:
        """Whether tools change the prompt; a template that refuses one of both prompts counts as well."""

        def find() -> bool:
            asked = ([_USER], [_SYSTEM, _USER])
            return any(self._plain(each, None) != self._plain(each, ANY_TOOL) for each in asked)

        return _WRITES_TOOLS.get(self.tokenizer, (self.template, arguments_key(self.arguments)), find)

    @cached_property
    def reply_opening(self) -> list[int] | None:
        """The ids that the template writes after the last message to begin a reply; None if they cannot be found."""
        return _REPLY_OPENINGS.get(self.tokenizer, self.key, lambda: self.without_content._find_reply_opening())

    @cached_property
    def tools_as_text(self) -> bool:
        """Whether the tools are text of the prompt, because the template does not write them."""
        return bool(self.tools) and not self.writes_tools

    def render(self, messages: Sequence[Message], *, reply: bool = True) -> str:
        """Render a conversation; with `reply` up to the start of the next reply.

        Raises ChatError if the template refuses the messages, and InvalidInput, with the index, for a message without
        role or text.
        """
        check_messages(messages, template_text(self.tokenizer))
        guarded = [self._guard.message(message) for message in messages]
        return rendered_with_text(guarded, lambda each: self._rendered(each, reply=reply))

    def escaped(self, message: Message) -> Message:
        """Escape the control tokens in the text and calls of an assistant message."""
        return {key: value if key == "role" else self._guard.quoted(value) for key, value in message.items()}

    def encode(self, text: str) -> list[int]:
        """Encode a rendered text. Raises InvalidInput for text that is not valid Unicode."""
        return self._guard.encode(text)

    def text(self, ids: Sequence[int]) -> str:
        """Decode ids, control tokens included."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    @cached_property
    def without_content(self) -> Rendering:
        """The same template without content of this conversation, for findings that are shared between sessions."""
        named = self.tools and not isinstance(self.tokenizer.chat_template, str)  # one of several may be for tools
        tools = ANY_TOOL if named or self.tools_as_text else None
        return Rendering(self.tokenizer, tools, _ANY_DATE, self._guard, self.arguments)

    def with_tools(self, tools: Sequence[Any]) -> Rendering:
        """Return the same template with other tools."""
        return Rendering(self.tokenizer, tools, self.date, self._guard, self.arguments)

    # ---- inside

    def _rendered(self, guarded: Sequence[Mapping[str, Any]], *, reply: bool) -> str:
        messages: list[Message] = list(map(dict, guarded))
        tools = self.tools
        if tools and self.tools_as_text:
            messages, tools = with_tools_in_text(messages, tools, takes_system=self._takes_system), None
        return rendered(self.tokenizer, messages, self.date, tools, reply=reply, arguments=self.arguments)

    def _find_reply_opening(self) -> list[int] | None:
        try:
            begun, without = self.render([_USER]), self.render([_USER], reply=False)
        except ChatError:
            return None
        return self.encode(begun.removeprefix(without)) if begun.startswith(without) else None

    @cached_property
    def _takes_system(self) -> bool:
        return _SYSTEM["content"] in (self._plain([_SYSTEM, _USER], None) or "")

    def _plain(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> str | None:
        """Render messages as the template itself does; None if it refuses them."""
        try:
            return rendered(self.tokenizer, messages, _ANY_DATE, tools, reply=True, arguments=self.arguments)
        except ChatError:
            return None


def _json_copy(tools: Sequence[Any]) -> list[Any]:
    if isinstance(tools, str | Mapping):
        shape = '[{"type": "function", "function": {...}}]'
        raise InvalidInput(f"tools must be a list of JSON schemas, such as {shape}; got {reprlib.repr(tools)}")
    try:
        return list(json.loads(json.dumps(list(tools))))
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"tools must be a list of JSON schemas, got {reprlib.repr(tools)}: {error}") from error
