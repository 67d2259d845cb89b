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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from radixkv.cache import Hint
from radixkv.cache import Sequence as CachedSequence
from radixkv.engine.output import Chunk, Completion
from radixkv.engine.request import SAMPLED, BadWords, Drawn, Request, Stream, common_prefix
from radixkv.errors import InvalidInput
from radixkv.sampling.params import Candidates, SamplingParams, TokenLogprobs

Publish = Callable[[Stream], None]


class Offer(NamedTuple):
    """The candidates for a beam's next token, from the logits of `sequence`, and the log probabilities to return."""

    sequence: CachedSequence
    candidates: Candidates
    logprobs: TokenLogprobs | None

    def reported(self, place: int) -> TokenLogprobs | None:
        """Return the log probabilities to return if the candidate at `place` is chosen."""
        if self.logprobs is None:
            return None
        return TokenLogprobs(self.candidates.logprobs[place], self.logprobs.top)


class Beam:
    """The continuation of a beam: it takes candidates, and waits for the search to advance.

    `score` is the sum of the log probabilities of its tokens. Its text is followed only if stop strings may end it.
    `holds_reply` says that its stream holds all KV of a finished reply.
    """

    host_bound = True
    mask = None

    def __init__(self, candidates: int, bad_words: BadWords, *, has_text: bool, score: float = 0.0) -> None:
        """Take `candidates` candidates for each token."""
        self.has_text = has_text
        self.score = score
        self.offer: Offer | None = None
        self.holds_reply = False
        self.candidates, self.bad_words = candidates, bad_words

    def take(self, stream: Stream, drawn: Drawn) -> Sequence[Chunk]:
        """Keep the candidates until all beams have theirs: see `BeamSearch.advance`."""
        assert drawn.candidates is not None
        self.offer = Offer(stream.sequence, drawn.candidates, drawn.logprobs)
        return ()

    def fork(self) -> Beam:
        """Return a beam with the same score."""
        return self.scored(self.score)

    def scored(self, score: float) -> Beam:
        """Return another beam of the search, which has a score of its own."""
        return Beam(self.candidates, self.bad_words, has_text=self.has_text, score=score)

    def continue_as(self, child: Beam) -> None:
        """Take the score of a child; what the stream holds stays held."""
        self.score, self.offer = child.score, None

    def has_offer(self, stream: Stream) -> bool:
        """Whether the candidates for the stream's next token are there; a preemption drops them."""
        offer = self.offer
        return offer is not None and stream.active and stream.pending == 0 and offer.sequence is stream.sequence

    def options(self, order: int) -> list[Option]:
        """Return the continuations of this beam, best first."""
        assert self.offer is not None
        found = zip(self.offer.candidates.tokens, self.offer.candidates.scores, strict=True)
        return sorted(Option(-self.score - score, order, token, place) for place, (token, score) in enumerate(found))

    def extended(self, stream: Stream, option: Option) -> Child:
        """Return a copy of the stream with one more token and a score of its own, on the same sequence. O(reply)."""
        assert self.offer is not None
        beam = self.scored(-option.cost)
        twin = stream.twin(beam)
        twin.accept(option.token, self.offer.reported(option.place))
        return Child(stream, twin, beam)


class Option(NamedTuple):
    """A continuation of the beam with the number `parent`; sorted best first, and ties by parent and token."""

    cost: float  # the negative score
    parent: int
    token: int
    place: int  # in the candidates


class Child(NamedTuple):
    """A possible next state of a beam: the stream `parent` with one more token."""

    parent: Stream
    stream: Stream
    beam: Beam


@dataclass(frozen=True, eq=False)
class FinishedReply:
    """A complete reply. `score` is over its length to the power of `length_penalty`."""

    parent: Beam
    stream: Stream
    score: float


class BeamSearch:
    """The replies of a search. The request's streams are the beams that it continues, then the best replies."""

    parameter, kind = "beam_width", "beams"

    def __init__(self, params: SamplingParams, max_tokens: int, stop_ids: frozenset[int], bad_words: BadWords) -> None:
        """Search for the `params.beam_width` best replies to one prompt."""
        self.width = params.beam_width
        # Each stop token, and any token that completes a stop string, ends a reply in place of continuing a beam.
        candidates = self.width + len(stop_ids) + (self.width if params.stop else 0)
        self.continuation = Beam(candidates, bad_words, has_text=bool(params.stop))
        self._params, self._max_tokens = params, max_tokens
        self._beams: dict[Stream, Beam] = {}  # the running ones, while the search runs
        self._finished: list[FinishedReply] = []  # the best, best first
        self._scores: list[float] = []  # of the streams, once the search is over
        self._made = 1  # streams, for their indices
        self._computed = 0

    def drawing(self, stream: Stream) -> Sequence[Stream]:
        """Return the stream: beams fork after their candidates were drawn."""
        return (stream,)

    def advance(self, request: Request, publish: Publish) -> Sequence[Chunk]:
        """Advance the search once all beams have candidates.

        Returns the chunks of all replies once the search is over, else nothing. `publish` is called for beams that end
        and have the tokens of a finished reply. Costs O(beams * (beams + length)) for each step, and the text of all
        replies at the end. Raises InvalidInput if no beam has a candidate.
        """
        if self._scores:
            return ()
        beams = self._beams or {request.streams[0]: self.continuation}
        if not all(beam.has_offer(stream) for stream, beam in beams.items()):
            return ()
        self._beams = beams
        self._count(request)
        children = self._select()
        if self._is_over(children):
            return self._finish(request, publish)
        self._branch(request, children, publish)
        return ()

    def computed_tokens(self, request: Request) -> int:
        """Return the number of tokens that all beams have computed, those that have ended included."""
        return self._computed or computed_by(request.streams)

    def completion(self, request: Request) -> Completion:
        """Return the best reply; its alternatives are the others, best first."""
        replies = zip(request.streams, self._scores, strict=True)
        first, *others = [replace(stream.completion(), score=score) for stream, score in replies]
        return replace(first, alternatives=tuple(others))

    def _count(self, request: Request) -> None:
        """Count the tokens that this step computed for the first time."""
        self._computed = self._computed + len(self._beams) if self._computed else computed_by(request.streams)

    def _select(self) -> list[Child]:
        """Record the replies that finish now; return the beams to continue with.

        A reply may finish if it is among the best `width` continuations only.
        """
        beams, width = list(self._beams.items()), self.width
        last = beams[0][0].output_length + 1 >= self._max_tokens
        finished: list[FinishedReply] = []
        children: list[Child] = []
        options = heapq.merge(*(beam.options(order) for order, (_, beam) in enumerate(beams)))
        for rank, option in enumerate(options):
            if len(children) == width or (last and rank >= width):
                break
            stream, beam = beams[option.parent]
            child = beam.extended(stream, option)
            if child.stream.finish_reason is None:
                children.append(child)
            elif rank < width:
                score = child.beam.score / self._length_cost(child.stream.output_length)
                finished.append(FinishedReply(beam, child.stream, score))
        self._finished = sorted(self._finished + finished, key=lambda reply: -reply.score)[:width]
        for reply in self._finished:
            reply.parent.holds_reply = True
        return children

    def _length_cost(self, length: int) -> float:
        return math.pow(length, self._params.length_penalty)

    def _is_over(self, children: list[Child]) -> bool:
        """Return whether no beam is left, or whether none can, or is likely to, improve on `width` finished replies."""
        params = self._params
        if not children:
            return True
        if len(self._finished) < self.width:
            return False
        if params.early_stopping is True:
            return True
        best = children[0]
        longest = params.early_stopping == "never" and params.length_penalty > 0
        length = self._max_tokens if longest else best.stream.output_length
        return best.beam.score / self._length_cost(length) <= self._finished[-1].score

    def _branch(self, request: Request, children: list[Child], publish: Publish) -> None:
        """Close the beams without children, then fork those with several; the best child stays in place."""
        parents = {child.parent for child in children}
        ended = {stream: beam for stream, beam in self._beams.items() if stream not in parents}
        request.streams = [stream for stream in self._beams if stream in parents]
        for stream, beam in ended.items():
            _end(stream, beam, publish, done=True)
        request.scheduling.publish_late = True
        beams, self._beams = self._beams, {}
        for parent, stream, beam in children:
            if parent in parents:
                parents.remove(parent)
                parent.continue_as(stream)
                beams[parent].continue_as(beam)
                self._beams[parent] = beams[parent]
                continue
            stream.sequence, stream.index = parent.sequence.fork(), self._made
            stream.counts.recomputed_tokens = stream.counts.host_tokens = 0
            self._made += 1
            request.streams.append(stream)  # at once: an error in the next fork closes it
            self._beams[stream] = beam
        request.streams = list(self._beams)
        for stream in ended:
            request.streams[0].counts.recomputed_tokens += stream.counts.recomputed_tokens
            request.streams[0].counts.host_tokens += stream.counts.host_tokens

    def _finish(self, request: Request, publish: Publish) -> list[Chunk]:
        """Close all beams, and make the finished replies the streams; returns their chunks."""
        beams = list(self._beams)
        if not self._finished:
            raise InvalidInput("the sampling parameters leave no candidate for a beam")
        for stream, beam in self._beams.items():
            _end(stream, beam, publish, done=False)
        streams = [Stream(request, rank, beams[0].sequence, SAMPLED) for rank in range(len(self._finished))]
        chunks: list[Chunk] = []
        for stream, reply in zip(streams, self._finished, strict=True):
            chunks += replayed(stream, reply.stream)
        set_usage(streams, beams)
        request.streams, self.width = streams, len(streams)
        self._scores = [reply.score for reply in self._finished]
        self._beams, self._finished = {}, []
        return chunks


def computed_by(streams: list[Stream]) -> int:
    """Return the number of tokens that streams have computed, each counted once."""
    return sum(stream.counts.reached - stream.counts.cached_tokens for stream in streams)


def _end(stream: Stream, beam: Beam, publish: Publish, *, done: bool) -> None:
    """Release the blocks of a beam; with `done`, those that a preemption has published are evicted first."""
    stream.finish_reason = "stop"
    if beam.holds_reply:
        publish(stream)
        stream.close()
    else:
        stream.sequence.close(Hint(done=done))


def replayed(stream: Stream, reply: Stream) -> Iterator[Chunk]:
    """Append a reply to a stream that has only the prompt; yields the chunk of each token."""
    start = len(stream.tokens)
    for place, token in enumerate(reply.tokens[start:]):
        yield stream.accept(token, reply.logprobs[place] if reply.logprobs else None)


def set_usage(streams: list[Stream], beams: list[Stream]) -> None:
    """Count each token that the replies hold KV for once: for the first reply that has it; it is cached for the others.

    The first reply also has the tokens that the beams, `beams` and earlier ones, computed again or loaded.
    """
    replies: list[np.ndarray] = []
    for stream in streams:
        tokens = np.array(stream.tokens[:-1], np.int32)
        stream.counts.reached = len(tokens)
        shared = max((common_prefix(tokens, other) for other in replies), default=beams[0].counts.cached_tokens)
        stream.counts.cached_tokens = shared
        replies.append(tokens)
    streams[0].counts.recomputed_tokens = sum(beam.counts.recomputed_tokens for beam in beams)
    streams[0].counts.host_tokens = sum(beam.counts.host_tokens for beam in beams)
    streams[0].counts.host_hits = beams[0].counts.host_hits
