"""What a request gives back: chunks while it runs, one completion at its end.

Knows: the frozen results that travel from the engine's thread to a caller's. Knows no cache, model or thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from radixkv.models.sampler import TokenLogprobs

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Usage:
    """What one stream cost, in tokens and seconds.

    `cached_tokens + computed_tokens` is every token that the stream holds KV for: the prompt and what was sampled,
    without the last sampled token, which nobody had to compute. Streams 1..n-1 of a request fork behind the prompt, so
    the whole prompt counts as cached for them. Times are measured from `submit`.
    `preemptions` is how often the request gave way to others, `recomputed_tokens` what that cost: tokens that were
    computed again, and are not in `computed_tokens` a second time.
    """

    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    output_tokens: int
    ttft_s: float
    total_s: float
    preemptions: int = 0
    recomputed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """One step of one stream: a sampled token and the text that it released.

    `text` is empty while the text might still turn out to be part of a stop string or of an unfinished character.
    `finish_reason` is set on a stream's last chunk only. `held` characters are known behind `text`, and kept back.
    """

    text: str
    token_ids: tuple[int, ...]
    index: int = 0
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    held: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """All that one stream produced, and what it cost.

    `text` ends before a stop string or a stop token; `token_ids` holds every sampled token, a stop token included.
    `finish_reason` is "stop" (a stop id or stop string) or "length" (max_tokens, or the context was full).
    With `n > 1`, `alternatives` holds the completions of the streams 1..n-1.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    logprobs: tuple[TokenLogprobs, ...] | None = None
    index: int = 0
    alternatives: tuple[Completion, ...] = ()
