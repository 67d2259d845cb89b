"""What `warm` gives back: what it cost, and the pin if one was asked for. Knows nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixkv.cache import Pin
from radixkv.engine.engine_thread import EngineThread
from radixkv.engine.output import Usage
from radixkv.errors import EngineClosed

if TYPE_CHECKING:
    from types import TracebackType


class Warmed:
    """A prompt that was computed ahead of its use; with a pin, it stays until `release` or its ttl."""

    def __init__(self, usage: Usage, pin: Pin | None, engine_thread: EngineThread) -> None:
        """Keep the pin; it is released on the engine's thread, which owns the cache."""
        self.usage = usage
        self._pin = pin
        self._engine_thread = engine_thread

    @property
    def pinned_tokens(self) -> int:
        """Tokens that the pin holds; 0 without one."""
        return self._pin.length if self._pin is not None else 0

    def release(self) -> None:
        """Let the prompt be evicted again, from the next step boundary on, without waiting for it.

        May be called twice, and after the engine was closed.
        """
        if self._pin is not None:
            pin, self._pin = self._pin, None
            try:
                self._engine_thread.post(pin.release)
            except EngineClosed:
                return  # its pool is gone

    def __enter__(self) -> Warmed:
        """Use the pin in a `with` block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release the pin."""
        self.release()
