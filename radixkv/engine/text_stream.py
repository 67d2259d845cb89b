"""The text of one reply, decoded token by token.

Text is released only when it can never be taken back: incomplete characters and possible beginnings of stop strings are
held.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from operator import itemgetter
from typing import Any, TypeAlias

_CONTEXT = 4  # tokens decoded before new ones: some tokenizers spell a token differently at the start of a text
_WINDOW = 16  # tokens after which the decoded window is cut to the context
_LONGEST = 4  # tokens of one character at most
_REPLACEMENT = "\ufffd"
Decode: TypeAlias = Callable[..., str]  # of token ids, and by name skip_special_tokens


class Detokenizer:
    """Decodes token by token, and returns the text of complete characters.

    A trailing run of U+FFFD may become a character with the bytes of the next tokens, so it is held back. Where the
    context ends with such a run, the run is the context's, but a character that the first tokens complete is theirs.
    The decoded window begins with a whole character: some decoders refuse all bytes that follow a part of one.
    """

    def __init__(self, decode: Decode, context: Sequence[int]) -> None:
        """Start after `context`, the tokens before the first new one (only the last few are used)."""
        self._decode_ids = decode
        self._ids = list(context[-_CONTEXT:])
        text = self._decoded(self._ids)
        self._sent = len(text)
        self._open = 0  # U+FFFD at the end of the context, which the first tokens may complete
        if _REPLACEMENT in text:
            self._start_after(context)

    def push(self, token: int) -> str:
        """Add a token; returns the text that can no longer change. O(window)."""
        self._ids.append(token)
        text = self._decoded(self._ids)
        certain = text.rstrip(_REPLACEMENT)
        if self._open:
            self._pass_context(text, certain)
        new = certain[self._sent :]
        self._sent = max(self._sent, len(certain))
        if len(self._ids) > _WINDOW and certain == text:
            self._ids, text = self._window(self._ids)
            self._sent = len(text)
        return new

    def copy(self) -> Detokenizer:
        """Return another one that goes on independently. O(window)."""
        twin = copy(self)
        twin._ids = self._ids[:]
        return twin

    def flush(self) -> str:
        """Return the text that was held back, with incomplete characters as U+FFFD."""
        text = self._decoded(self._ids)
        if self._open:
            self._pass_context(text, text)
        new = text[self._sent :]
        self._sent += len(new)
        return new

    def _start_after(self, context: Sequence[int]) -> None:
        """Start after a context with U+FFFD: its last few tokens begin or end inside a character."""
        for cut in range(_LONGEST):  # the tokens that begin a character
            window, text = self._window(context[: len(context) - cut])
            if not text.endswith(_REPLACEMENT):
                break
        else:
            cut, (window, text) = 0, self._window(context)
        self._ids = [*window, *context[len(context) - cut :]]
        whole = self._decoded(self._ids)
        self._sent = max(len(text.rstrip(_REPLACEMENT)), len(whole.rstrip(_REPLACEMENT)))
        self._open = max(0, len(whole) - self._sent)

    def _pass_context(self, text: str, certain: str) -> None:
        """Pass over the end of the context, unless the tokens after it have completed its last character."""
        if len(certain) > self._sent:
            after = text[self._sent :]
            self._sent += min(self._open, len(after) - len(after.lstrip(_REPLACEMENT)))
            self._open = 0

    def _window(self, ids: Sequence[int]) -> tuple[list[int], str]:
        """Return the last few tokens, and their text. It begins with a whole character if `ids` have one there."""
        for length in range(_CONTEXT, _CONTEXT + _LONGEST):
            window = list(ids[-length:])
            text = self._decoded(window)
            if not text.startswith(_REPLACEMENT):
                return window, text
        return list(ids[-_CONTEXT:]), self._decoded(ids[-_CONTEXT:])

    def _decoded(self, ids: Sequence[int]) -> str:
        return str(self._decode_ids(ids, skip_special_tokens=True)) if ids else ""


def decoder(tokenizer: Any) -> Decode:
    """Return the decode function of the Rust tokenizer, which costs a quarter of its wrapper's.

    A tokenizer class with a decode of its own is called itself.
    """
    own: set[str] = set()  # attributes of the classes below the one of Rust tokenizers
    for kind in type(tokenizer).__mro__:
        if "backend_tokenizer" in vars(kind):
            if own.isdisjoint(("decode", "_decode")):
                decode: Decode = tokenizer.backend_tokenizer.decode
                return decode
            break
        own |= vars(kind).keys()
    return partial(tokenizer.decode, clean_up_tokenization_spaces=False)


class TextStream:
    """The text of one stream. It ends before the first stop string, and releases no part of a stop string.

    A stop string that is complete before the stream may stop is a part of the text. Without a decode function the text
    stays empty.
    """

    def __init__(self, decode: Decode | None, context: Sequence[int], stop: Sequence[str] = ()) -> None:
        """Decode the tokens after `context`, and look for the strings of `stop`."""
        self._detokenizer = None if decode is None else Detokenizer(decode, context)
        self._stop = tuple(stop)
        self.held = ""  # characters that a stop string may begin with
        self._passed = 0  # characters at the start of `held` that came before the stream might stop
        self.released: list[str] = []  # the parts of the text so far
        self.stopped_by: str | None = None  # the stop string that ended the text

    def copy(self) -> TextStream:
        """Return another one with the same text that goes on independently. O(text)."""
        twin = copy(self)
        twin.released = self.released[:]
        if self._detokenizer is not None:
            twin._detokenizer = self._detokenizer.copy()
        return twin

    def push(self, token: int, *, watch: bool = True) -> str:
        """Add a token; returns the text that it releases. If `watch`, sets `stopped_by` where a stop string ends."""
        if self._detokenizer is None:
            return ""
        self.held += self._detokenizer.push(token)
        if not self._stop:
            return self._release(len(self.held))
        if not watch:
            self._passed = len(self.held)
            return self._release(len(self.held) - self._undecided())
        found = [(at, stop) for stop in self._stop if (at := self._found(stop)) >= 0]
        if not found:
            return self._release(len(self.held) - self._undecided())
        at, self.stopped_by = min(found, key=itemgetter(0))
        return self._release(at)

    def _found(self, stop: str) -> int:
        """Return where a stop string begins that ends after the passed characters; -1 if there is none."""
        return self.held.find(stop, max(self._passed - len(stop) + 1, 0))

    def flush(self) -> str:
        """Release the text that was held back, at the end of a stream without a stop string."""
        if self._detokenizer is None:
            return ""
        self.held += self._detokenizer.flush()
        return self._release(len(self.held))

    def _release(self, length: int) -> str:
        text = self.held[:length]
        self.held = "" if self.stopped_by else self.held[length:]
        self._passed = max(self._passed - length, 0)
        self.released.append(text)
        return text

    def _undecided(self) -> int:
        """Return how many characters at the end could be the beginning of a stop string."""
        for length in range(min(len(self.held), max(map(len, self._stop), default=0)), 0, -1):
            if any(len(stop) > length and stop.startswith(self.held[-length:]) for stop in self._stop):
                return length
        return 0
