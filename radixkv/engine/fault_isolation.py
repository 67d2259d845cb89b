"""Find the request that makes a step fail, so that only that request ends.

A forward or a draw that raises is repeated on each half of its parts, and so on. A part that ran writes the same values
again, so a request fails only if it fails alone. A step that needs too much memory at once gets through in parts.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from typing import TypeVar

from radixkv.engine.request import Request
from radixkv.errors import RequestFailed

_log = logging.getLogger(__name__)
Item = TypeVar("Item")
Result = TypeVar("Result")


def in_halves(
    items: list[Item],
    call: Callable[[list[Item]], Result],
    owner: Callable[[Item], Request],
    fail: Callable[[Request, Exception], None],
    error: Exception,
) -> list[tuple[list[Item], Result]]:
    """Repeat `call`, which raised `error` on `items`, on each half; `fail` the owner of an item that raises alone.

    Leaves out items of requests that have ended meanwhile. Costs 2 log n calls of falling size for each that fails.
    """
    if len(items) == 1:
        fail(owner(items[0]), error)
        return []
    _log.warning("a step of %d parts raised %r: trying its halves", len(items), error)
    _release_tensors(error)
    results: list[tuple[list[Item], Result]] = []
    middle = len(items) // 2
    for half in (items[:middle], items[middle:]):
        live = [item for item in half if not owner(item).channel.ended]
        if not live:
            continue
        try:
            results.append((live, call(live)))
            continue
        except Exception as raised:
            problem = raised
        results += in_halves(live, call, owner, fail, problem)
    return results


def failure(error: Exception) -> RequestFailed:
    """Return the error for the caller of a request that raised `error` on the engine's thread."""
    failed = RequestFailed(f"a step of this request raised {type(error).__name__}: {error}")
    failed.__cause__ = error
    return failed


def _release_tensors(error: BaseException | None) -> None:
    """Clear the frames of an exception and of its causes: they hold tensors, and it may have been out of memory."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
