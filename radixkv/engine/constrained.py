"""The continuation of a stream whose text follows a grammar."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from radixkv.engine.output import Chunk
from radixkv.engine.request import BadWords, Drawn, Stream
from radixkv.sampling.token_mask import ConstrainedRow, TokenMatcher


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
