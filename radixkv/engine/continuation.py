"""Choose the next token of a stream, and the streams of a request.

A stream has one `Continuation`. It sets the mask and the candidates of the next draw, and whether the host must read
each token before the next draw. Then it takes the drawn token. A request has one `Replies` object, which forks the
streams and makes the result. `Samples` and `SampledTokens` are the default, `ConstrainedTokens` follow a grammar, and
`beams` has a search.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple, Protocol

from radixkv.engine.output import Chunk, Completion
from radixkv.sampling.token_mask import ConstrainedRow

if TYPE_CHECKING:
    from radixkv.engine.request import Request, Stream
    from radixkv.sampling.params import Candidates, TokenLogprobs
    from radixkv.sampling.token_mask import TokenMatcher

BadWords = tuple[tuple[int, ...], ...]


class Drawn(NamedTuple):
    """The draw of one row: a token, or for a row with `candidates` the most likely ones."""

    token: int
    logprobs: TokenLogprobs | None
    candidates: Candidates | None


class Continuation(Protocol):
    """The rules for the next token of one stream."""

    @property
    def host_bound(self) -> bool:
        """Whether the host must read a token before the next one can be drawn."""

    @property
    def mask(self) -> ConstrainedRow | None:
        """The constraint of the next token; None if it has none."""

    @property
    def has_text(self) -> bool:
        """Whether the text is needed while tokens are drawn."""

    @property
    def candidates(self) -> int:
        """The number of most likely tokens to find for the next one; 0 if it is sampled."""

    @property
    def bad_words(self) -> BadWords:
        """The token ids of each text that the reply must not contain."""

    def take(self, stream: Stream, drawn: Drawn) -> Sequence[Chunk]:
        """Take a draw; returns a chunk for each token that it adds to the stream.

        The tokens after the first were forced. Raises the error with which the request fails.
        """
        ...

    def fork(self) -> Continuation:
        """Return the continuation of another stream, which has the same tokens."""
        ...


class Replies(Protocol):
    """The number of streams that continue a request's prompt, when they fork, and their result.

    Errors name the sampling `parameter` that sets the width, and the `kind` of streams.
    """

    parameter: str
    kind: str

    @property
    def width(self) -> int:
        """The number of streams, forked or not."""

    @property
    def continuation(self) -> Continuation:
        """The continuation of the first stream."""

    def drawing(self, stream: Stream) -> Sequence[Stream]:
        """Return the streams whose next token is drawn from the last logits of `stream`: itself, and its new forks."""
        ...

    def advance(self, request: Request, publish: Callable[[Stream], None]) -> Sequence[Chunk]:
        """Go on after a step of the request; returns the chunks that only all of its streams together could release.

        `publish` is called for streams that end here, before they are closed.
        """
        ...

    def computed_tokens(self, request: Request) -> int:
        """Return the number of tokens that the streams have computed, each counted once."""
        ...

    def completion(self, request: Request) -> Completion:
        """Return the result of all streams, which have finished."""
        ...


class ConstrainedTokens:
    """Samples tokens that a constraint allows, and appends the tokens that it forces."""

    host_bound = True
    has_text = True
    candidates = 0

    def __init__(self, matcher: TokenMatcher, stop_ids: frozenset[int], bad_words: BadWords = ()) -> None:
        """Follow one stream by `matcher`; `stop_ids` end it where its text is complete."""
        self.mask = ConstrainedRow(matcher, stop_ids)
        self.bad_words = bad_words

    def take(self, stream: Stream, drawn: Drawn) -> Sequence[Chunk]:
        """Append the token, then the tokens that the constraint forces after it.

        With log probabilities no token is forced, since each needs logits. A stop token of the request is never forced
        either: it would end an incomplete text. Raises InvalidConstraint if the constraint has become too expensive to
        follow.
        """
        matcher, stop_ids, forced = self.mask.matcher, self.mask.stop_ids, list[int]()
        finished = False
        if drawn.token not in stop_ids:
            matcher.consume([drawn.token])
            if stream.request.params.logprobs is None:
                forced = list(takewhile(lambda each: each not in stop_ids, matcher.forced()))
                matcher.consume(forced)
            finished = matcher.finished
        chunks: list[Chunk] = []
        for place, token in enumerate((drawn.token, *forced)):
            chunks.append(stream.accept(token, drawn.logprobs, finished=finished and place == len(forced)))
            if stream.finish_reason is not None:
                break
        return chunks

    def fork(self) -> ConstrainedTokens:
        """Return the continuation of another stream, whose matcher has the same text."""
        return ConstrainedTokens(self.mask.matcher.fork(), self.mask.stop_ids, self.bad_words)
