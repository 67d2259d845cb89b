"""Sampled token ids to text that never has to be taken back.

Knows: incomplete characters and stop strings, and how much text they hold back. Knows no request and no model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

_CONTEXT = 4  # tokens kept in front of new ones: some tokenizers spell a token differently at the start of a text
_WINDOW = 16  # tokens after which the decoded window is shortened again
_REPLACEMENT = "\ufffd"


class Detokenizer:
    """Incremental decoding: each token's text, once its characters are complete.

    A trailing run of U+FFFD may still become a character when its other bytes arrive, so it is held back.
    """

    def __init__(self, tokenizer: Any, context: Sequence[int]) -> None:
        """Start behind `context`, the tokens before the first new one (only the last few are used)."""
        self._decode_ids = _decoder(tokenizer)
        self._ids = list(context[-_CONTEXT:])
        self._sent = len(self._decode().rstrip(_REPLACEMENT))

    def push(self, token: int) -> str:
        """Add a token; returns the text that is now certain. O(window)."""
        self._ids.append(token)
        text = self._decode()
        certain = text.rstrip(_REPLACEMENT)
        new = certain[self._sent :]
        self._sent = max(self._sent, len(certain))
        if len(self._ids) > _WINDOW and certain == text:
            del self._ids[:-_CONTEXT]
            self._sent = len(self._decode())
        return new

    def flush(self) -> str:
        """The text held back, incomplete characters as U+FFFD."""
        new = self._decode()[self._sent :]
        self._sent += len(new)
        return new

    def _decode(self) -> str:
        if not self._ids:
            return ""
        return str(self._decode_ids(self._ids, skip_special_tokens=True))


def _decoder(tokenizer: Any) -> Callable[..., str]:
    """What decodes ids: the Rust tokenizer within, whose wrapper costs four times as much, if that adds nothing.

    A subclass that decodes in its own way is asked itself.
    """
    kind: Any = type(tokenizer)
    base = next((each for each in kind.__mro__ if "backend_tokenizer" in vars(each)), None)
    if base is not None and kind.decode is base.decode and kind._decode is base._decode:
        decode: Callable[..., str] = tokenizer.backend_tokenizer.decode
        return decode
    return partial(tokenizer.decode, clean_up_tokenization_spaces=False)


class TextStream:
    """The text of one stream; stops at the first stop string and never shows any part of it.

    Without a tokenizer the text stays empty.
    """

    def __init__(self, tokenizer: Any | None, context: Sequence[int], stop: Sequence[str] = ()) -> None:
        """Decode behind `context` and watch for the strings of `stop`."""
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer, context)
        self._stop = tuple(stop)
        self._held = ""
        self._released: list[str] = []
        self.stopped = False

    @property
    def text(self) -> str:
        """All text released so far."""
        return "".join(self._released)

    @property
    def held(self) -> int:
        """How many characters are held back, because a stop string may begin with them."""
        return len(self._held)

    def push(self, token: int, *, watch: bool = True) -> str:
        """Add a token; returns the text that it releases. Stop strings count only if `watch`. Sets `stopped`."""
        if self._detokenizer is None:
            return ""
        self._held += self._detokenizer.push(token)
        if not self._stop:
            return self._release(len(self._held))
        at = min((i for i in map(self._held.find, self._stop) if i >= 0), default=-1) if watch else -1
        self.stopped = at >= 0
        return self._release(at if self.stopped else len(self._held) - (self._undecided() if watch else 0))

    def flush(self) -> str:
        """Release what was held back; for a stream that ended without a stop string."""
        if self._detokenizer is None:
            return ""
        self._held += self._detokenizer.flush()
        return self._release(len(self._held))

    def _release(self, length: int) -> str:
        text = self._held[:length]
        self._held = "" if self.stopped else self._held[length:]
        self._released.append(text)
        return text

    def _undecided(self) -> int:
        """Characters at the end that could be the beginning of a stop string."""
        for length in range(min(len(self._held), max(map(len, self._stop), default=0)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0
