"""Search for the most likely replies: beam search by copy-on-write forks (PagedAttention, SOSP 2023).

The prompt is computed once, and the beams of a request share its blocks and those of their common replies. After each
step in which all beams were computed, the search advances. It takes the best continuations of all beams, closes the
beams without one, and then forks those with several. In this order no fork needs a block that is not promised. The
sequences of a beam search are those of transformers' `generate(num_beams=k)`, and its scores are equal up to rounding.

Nothing after the prompt is published while the search runs, except by a preemption. A beam that ends publishes its
tokens if they are those of a finished reply: a later turn of the conversation hits them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import numpy as np

from radixkv.cache import Hint, Sequence
from radixkv.engine.output import Chunk, Completion
from radixkv.engine.request import Request, Stream, common_prefix
from radixkv.engine.text_stream import TextStream
from radixkv.errors import InvalidInput
from radixkv.sampling.params import Candidates, TokenLogprobs

Publish = Callable[[Stream], None]


class Offer(NamedTuple):
    """The candidates for a beam's next token, from the logits of `sequence`, and the log probabilities to return."""

    sequence: Sequence
    candidates: Candidates
    logprobs: TokenLogprobs | None

    def reported(self, place: int) -> TokenLogprobs | None:
        """Return the log probabilities to return if the candidate at `place` is chosen."""
        if self.logprobs is None:
            return None
        return TokenLogprobs(self.candidates.logprobs[place], self.logprobs.top)


class Beam(Stream):
    """One unfinished reply of a beam search. `score` is the sum of its log probabilities.

    Its text is followed only if stop strings may end it. `holds_reply` says that it holds all KV of a finished reply.
    """

    def __init__(self, request: BeamRequest, index: int, sequence: Sequence) -> None:
        super().__init__(request, index, sequence)
        if not request.params.stop:
            self.text = TextStream(None, ())
        self.score = 0.0
        self.offer: Offer | None = None
        self.holds_reply = False

    @property
    def offered(self) -> bool:
        """Whether the candidates for the next token are there; a preemption drops them."""
        return self.active and self.pending == 0 and self.offer is not None and self.offer.sequence is self.sequence

    def options(self, order: int) -> list[Option]:
        """Return the continuations of this beam, best first."""
        assert self.offer is not None
        found = zip(self.offer.candidates.tokens, self.offer.candidates.scores, strict=True)
        return sorted(Option(-self.score - score, order, token, place) for place, (token, score) in enumerate(found))

    def extended(self, option: Option) -> Beam:
        """Return a copy with one more token and its own score, still on this beam's sequence. O(reply)."""
        assert self.offer is not None
        child = copy(self)
        child.tokens, child.logprobs, child.text = self.tokens[:], self.logprobs[:], self.text.copy()
        child.accept(option.token, self.offer.reported(option.place))
        child.score, child.offer, child.first_token_at = -option.cost, None, None
        return child

    def continue_as(self, child: Beam) -> None:
        """Take the tokens of a child, and stay on the same sequence."""
        self.tokens, self.logprobs, self.text = child.tokens, child.logprobs, child.text
        self.score, self.offer = child.score, None


class Option(NamedTuple):
    """A continuation of the beam with the number `parent`; sorted best first, and ties by parent and token."""

    cost: float  # the negative score
    parent: int
    token: int
    place: int  # in the candidates


@dataclass(frozen=True, eq=False)
class FinishedReply:
    """A complete reply: `parent` with one more token. `score` is over its length to the power of `length_penalty`."""

    parent: Beam
    beam: Beam
    score: float


class BeamRequest(Request):
    """A request whose `streams` are the beams that its search continues, then the best replies."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.width = self.params.beam_width
        self.unforked = False
        self.host_bound = True
        # Each stop token, and any token that completes a stop string, ends a reply in place of continuing a beam.
        self.candidates = self.width + len(self.stop_ids) + (self.width if self.params.stop else 0)
        self._finished: list[FinishedReply] = []  # the best, best first
        self._scores: list[float] = []  # of the streams, once the search is over
        self._made = 0  # streams, for their indices
        self._computed = 0

    @property
    def computed_tokens(self) -> int:
        """The number of tokens that all beams have computed, those that have ended included."""
        return self._computed or super().computed_tokens

    def completion(self) -> Completion:
        """Return the best reply; its alternatives are the others, best first."""
        whole = super().completion()
        replies = zip((whole, *whole.alternatives), self._scores, strict=True)
        first, *others = [replace(reply, score=score) for reply, score in replies]
        return replace(first, alternatives=tuple(others))

    def offer(
        self, stream: Stream, candidates: Candidates, logprobs: TokenLogprobs | None, publish: Publish
    ) -> list[Chunk]:
        """Take the candidates of one beam; advance the search with the last beam's.

        Returns the chunks of all replies once the search is over, else nothing. `publish` is called for beams that end
        and have the tokens of a finished reply. Costs O(beams * (beams + length)) for each step, and the text of all
        replies at the end. Raises InvalidInput if no beam has a candidate.
        """
        beam = cast(Beam, stream)
        beam.offer = Offer(beam.sequence, candidates, logprobs)
        if not all(each.offered for each in self._beams):
            return []
        self._count()
        children = self._select()
        if self._is_over(children):
            return self._finish(publish)
        self._branch(children, publish)
        return []

    def _stream(self, index: int, sequence: Sequence) -> Stream:
        self._made += 1
        return Beam(self, index, sequence)

    @property
    def _beams(self) -> list[Beam]:
        """The running beams; until the search is over."""
        return cast(list[Beam], self.streams)

    def _count(self) -> None:
        """Count the tokens that this step computed for the first time."""
        self._computed = self._computed + len(self.streams) if self._computed else super().computed_tokens

    def _select(self) -> list[tuple[Beam, Beam]]:
        """Record the replies that finish now; return the beams to continue with, each as (parent, child).

        A reply may finish if it is among the best `width` continuations only.
        """
        beams, width = self._beams, self.width
        last = beams[0].output_length + 1 >= self.max_tokens
        finished: list[FinishedReply] = []
        children: list[tuple[Beam, Beam]] = []
        for rank, option in enumerate(heapq.merge(*(beam.options(order) for order, beam in enumerate(beams)))):
            if len(children) == width or (last and rank >= width):
                break
            parent = beams[option.parent]
            child = parent.extended(option)
            if child.finish_reason is None:
                children.append((parent, child))
            elif rank < width:
                finished.append(FinishedReply(parent, child, child.score / self._length_cost(child.output_length)))
        self._finished = sorted(self._finished + finished, key=lambda reply: -reply.score)[:width]
        for reply in self._finished:
            reply.parent.holds_reply = True
        return children

    def _length_cost(self, length: int) -> float:
        return math.pow(length, self.params.length_penalty)

    def _is_over(self, children: list[tuple[Beam, Beam]]) -> bool:
        """Return whether no beam is left, or whether none can, or is likely to, improve on `width` finished replies."""
        params = self.params
        if not children:
            return True
        if len(self._finished) < self.width:
            return False
        if params.early_stopping is True:
            return True
        best = children[0][1]
        longest = params.early_stopping == "never" and params.length_penalty > 0
        length = self.max_tokens if longest else best.output_length
        return best.score / self._length_cost(length) <= self._finished[-1].score

    def _branch(self, children: list[tuple[Beam, Beam]], publish: Publish) -> None:
        """Close the beams without children, then fork those with several; the best child stays in place."""
        parents = {parent for parent, _ in children}
        ended = [beam for beam in self._beams if beam not in parents]
        self.streams = [beam for beam in self._beams if beam in parents]
        for beam in ended:
            self._end(beam, publish, done=True)
        self.publish_late = True
        order: list[Beam] = []
        for parent, child in children:
            if parent in parents:
                parents.remove(parent)
                parent.continue_as(child)
                order.append(parent)
                continue
            child.sequence, child.index = parent.sequence.fork(), self._made
            child.recomputed_tokens = child.host_tokens = 0
            child.holds_reply = False
            self._made += 1
            self.streams.append(child)  # at once: an error in the next fork closes it
            order.append(child)
        for beam in ended:
            order[0].recomputed_tokens += beam.recomputed_tokens
            order[0].host_tokens += beam.host_tokens
        self.streams = [*order]

    def _end(self, beam: Beam, publish: Publish, *, done: bool) -> None:
        """Release the blocks of a beam; with `done`, those that a preemption has published are evicted first."""
        beam.finish_reason = "stop"
        if beam.holds_reply:
            publish(beam)
            beam.close()
        else:
            beam.sequence.close(Hint(done=done))

    def _finish(self, publish: Publish) -> list[Chunk]:
        """Close all beams, and make the finished replies the streams; returns their chunks."""
        beams = self._beams
        if not self._finished:
            raise InvalidInput("the sampling parameters leave no candidate for a beam")
        for beam in beams:
            self._end(beam, publish, done=False)
        streams = [Stream(self, rank, beams[0].sequence) for rank in range(len(self._finished))]
        chunks: list[Chunk] = []
        for stream, reply in zip(streams, self._finished, strict=True):
            chunks += replayed(stream, reply.beam)
        set_usage(streams, beams)
        self.streams, self.width = streams, len(streams)
        self._scores = [reply.score for reply in self._finished]
        return chunks


def replayed(stream: Stream, beam: Beam) -> Iterator[Chunk]:
    """Append the reply of a beam to a stream that has only the prompt; yields the chunk of each token."""
    start = len(stream.tokens)
    for place, token in enumerate(beam.tokens[start:]):
        yield stream.accept(token, beam.logprobs[place] if beam.logprobs else None)


def set_usage(streams: list[Stream], beams: list[Beam]) -> None:
    """Count each token that the replies hold KV for once: for the first reply that has it; it is cached for the others.

    The first reply also has the tokens that the beams, `beams` and earlier ones, computed again or loaded.
    """
    replies: list[np.ndarray] = []
    for stream in streams:
        tokens = np.array(stream.tokens[:-1], np.int32)
        stream.reached = len(tokens)
        shared = max((common_prefix(tokens, other) for other in replies), default=beams[0].cached_tokens)
        stream.cached_tokens = shared
        replies.append(tokens)
    streams[0].recomputed_tokens = sum(beam.recomputed_tokens for beam in beams)
    streams[0].host_tokens = sum(beam.host_tokens for beam in beams)
    streams[0].host_hits = beams[0].host_hits
