"""Why a prefix was found, or not: the miss explainer's answer. Knows what one namespace shows of itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Reason = Literal["full", "never_seen", "diverged", "evicted", "limit"]


@dataclass(frozen=True, slots=True)
class Explanation:
    """What `open` would find now, and why it stops there. `str()` is one plain sentence."""

    tokens: int  # asked for
    matched: int  # longest cached prefix
    length: int  # what `open` would hold: `matched`, but at most `limit`
    reason: Reason
    diverged_at: int | None = None  # the first token that differs from what is cached there
    evicted_tokens: int = 0  # how many more would have matched
    evicted_ago: float | None = None  # seconds since the first of them went
    pressure: str | None = None  # what they made room for

    def __str__(self) -> str:
        head = f"{self.length} of {self.tokens} tokens are cached"
        match self.reason:
            case "full":
                return f"{head}: the whole prompt."
            case "limit":
                return f"{head}: {self.matched} match, held back by limit={self.length}."
            case "evicted":
                return (
                    f"{head}: the next {self.evicted_tokens} were evicted {self.evicted_ago:.1f} s ago {self.pressure}."
                )
            case "diverged":
                return f"{head}: at token {self.diverged_at} the prompt diverges from what is cached."
            case "never_seen":
                return f"{head}: what follows was never seen (or went so long ago that it is forgotten)."
