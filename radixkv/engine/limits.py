"""How much runs at once, in which order requests come in, and who makes room. Knows numbers and names only."""

from __future__ import annotations

from dataclasses import dataclass

from radixkv.errors import InvalidInput
from radixkv.sampling.params import is_int

ORDERS = ("fcfs", "longest-prefix")
VICTIMS = ("cheapest", "last")


@dataclass(frozen=True)
class Limits:
    """Streams at once, tokens a step, tokens of one prompt a step; and the rules for who goes first, and who last.

    `order` is "fcfs" (first come, first served) or "longest-prefix" (whose cached prefix is longest; but a request
    that `max_overtakes` later ones passed goes first). A higher priority goes before either.
    `victim` says who is preempted when blocks run out: the "cheapest" to bring back, or the "last" admitted.
    `deterministic` ties chunks and hits to a grid of `prefill_chunk` tokens: see `reuse`.
    """

    max_sequences: int = 64
    max_batch_tokens: int = 2048
    prefill_chunk: int = 512
    order: str = "fcfs"
    max_overtakes: int = 32
    victim: str = "cheapest"
    deterministic: bool = False

    def __post_init__(self) -> None:
        """Refuse what could never run."""
        for name in ("max_sequences", "max_batch_tokens", "prefill_chunk", "max_overtakes"):
            least = 0 if name == "max_overtakes" else 1
            if not is_int(getattr(self, name)) or getattr(self, name) < least:
                raise InvalidInput(f"{name} must be an int, at least {least}, got {getattr(self, name)!r}")
        if self.max_batch_tokens < self.max_sequences:
            raise InvalidInput(
                f"max_batch_tokens ({self.max_batch_tokens}) must be at least max_sequences ({self.max_sequences}): "
                "every running sequence decodes one token a step"
            )
        if self.deterministic and self.prefill_chunk + self.max_sequences > self.max_batch_tokens:
            raise InvalidInput(
                f"deterministic=True computes whole chunks: prefill_chunk ({self.prefill_chunk}) and a token for each "
                f"of max_sequences ({self.max_sequences}) must fit max_batch_tokens ({self.max_batch_tokens})"
            )
        for name, allowed in (("order", ORDERS), ("victim", VICTIMS)):
            if getattr(self, name) not in allowed:
                raise InvalidInput(f"{name}={getattr(self, name)!r}: allowed are {', '.join(map(repr, allowed))}")
