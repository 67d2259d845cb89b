"""Speculate: draft the next tokens of a stream from text, and check all of them in one forward.

A draw depends on the seed and the position of its token, not on the step. So row i of a verified chunk gives the token
that the i-th of as many steps would give, and the tokens up to the first difference from the draft are the reply's.

`Speculation` is the last stage before a forward. It lengthens the plans of decodes by drafts, after all other tokens of
the step were planned. A draft takes free blocks only, and gives back the ones that it does not need when its step ends.
Its KV is committed and not published: `verify` first cuts the sequence to the tokens that the stream took.

Where steps overlap, a stream with a draft is host-bound: the host must know its last token before it drafts more.

Idea: prompt lookup decoding (Saxena 2023) and REST (He et al. 2024); lossless verification after Leviathan et al. 2023.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from radixkv.config import EngineConfig
from radixkv.engine.draft_length import DraftLength, SentDraft, Step, Tally
from radixkv.engine.drafts import Draft, DraftSource, StreamDrafts
from radixkv.engine.draws import LastRows, Row
from radixkv.engine.fault_isolation import Fail
from radixkv.engine.output import Chunk
from radixkv.engine.request import Continuation, Drawn, Stream
from radixkv.engine.scheduler import Work
from radixkv.engine.stats import Counters
from radixkv.errors import InvalidConstraint, InvalidInput
from radixkv.sampling.token_mask import ConstrainedRow

if TYPE_CHECKING:
    from radixkv.models.adapter import LoadedModel

_log = logging.getLogger(__name__)

MOST = 15
"""Tokens of a draft at most: with the token before it, as many rows as the compiled attention of a CPU takes."""


def draft_obstacle(model: LoadedModel) -> str | None:
    """Return the reason why a model cannot verify drafts; None if it can."""
    if model.state:
        return "a draft that is rejected cannot be taken out of a recurrent state"
    return "the model's own attention takes one forward for each input" if model.attention == "fallback" else None


def speculating(model: LoadedModel, config: EngineConfig) -> EngineConfig:
    """Return the settings, without speculation if they are deterministic.

    Raises InvalidInput for a model that cannot verify drafts.
    """
    if config.speculate is None:
        return config
    if (obstacle := draft_obstacle(model)) is not None:
        raise InvalidInput(f"{model.name}: speculate={config.speculate!r} is not possible: {obstacle}")
    if config.deterministic:
        _log.warning("speculate=%r is off: deterministic=True computes each token alone", config.speculate)
        return replace(config, speculate=None)
    return config


class DraftedTokens:
    """The continuation of a stream that speculates: takes the verified tokens as `inner` takes them one by one."""

    def __init__(self, inner: Continuation, prediction: Sequence[int] = ()) -> None:
        """Verify drafts of the stream that `inner` continues; `prediction` is text that its reply may repeat."""
        self.inner, self.prediction = inner, prediction
        self.has_text, self.candidates, self.bad_words = inner.has_text, inner.candidates, inner.bad_words
        self.draft: array[int] | None = None  # in flight
        self.tally = Tally()
        self.waits = False  # a draft is likely, so the host must read the next token first
        self._sent = SentDraft("", 0, 0)
        self.last = 0  # the row that the last token was drawn from
        self._first = self._rows = 0  # the position of the draft, and the number of rows that may be taken
        self._text: StreamDrafts | None = None
        self._guess: tuple[int, Draft] | None = None

    @property
    def host_bound(self) -> bool:
        """Whether the host must read a token before the next one can be drawn or drafted."""
        return self.draft is not None or self.waits or self.inner.host_bound

    @property
    def mask(self) -> ConstrainedRow | None:
        """The constraint of the next token; None if it has none."""
        return self.inner.mask

    def propose(self, source: DraftSource, stream: Stream, most: int) -> Draft:
        """Return a draft of at most `most` tokens that follows the stream's tokens."""
        if self._text is None:
            self._text = source.of(stream, self.prediction)
        return self._text.propose(most)

    def begin(self, stream: Stream, proposed: Draft, draft: array[int]) -> None:
        """Verify `draft`, the first tokens of a proposal."""
        self.draft, self._first, self._rows = draft, len(stream.tokens), len(draft) + 1
        self._sent = SentDraft(proposed.source, proposed.matched, len(draft))

    def cut(self, rows: int) -> None:
        """Take the first `rows` rows only: the mask of the next one cannot be filled, and may not be needed."""
        self._rows = min(self._rows, rows)

    def end(self) -> SentDraft:
        """Return the draft whose rows were all taken, and verify none any more."""
        self.draft = None
        return self._sent

    def guess(self, stream: Stream, proposed: Draft) -> None:
        """Remember the first token of a proposal that was not worth its row."""
        self._guess = len(stream.tokens), proposed

    def judge(self, stream: Stream) -> tuple[Draft, bool] | None:
        """Return the last guess, and whether it was right; None if there is none."""
        guess, self._guess = self._guess, None
        if guess is None or guess[0] >= len(stream.tokens):
            return None
        place, proposed = guess
        return proposed, stream.tokens[place] == proposed.tokens[0]

    def follows(self, stream: Stream, draft: array[int]) -> bool:
        """Return whether the stream has the text of a row after `draft`: it may be ahead, by forced tokens."""
        return len(draft) < self._rows and stream.tokens[self._first :] == draft

    def take(self, stream: Stream, drawn: Drawn) -> Sequence[Chunk]:
        """Take the draw of a row that follows the stream's text."""
        self.last = len(stream.tokens) - self._first
        return self.inner.take(stream, drawn)

    def fork(self) -> DraftedTokens:
        """Return the continuation of another stream, which has the same tokens."""
        return DraftedTokens(self.inner.fork(), self.prediction)


class VerifiedRow(NamedTuple):
    """The key of the mask of a row after the first of a verified chunk."""

    stream: Stream
    place: int


class Speculation:
    """Drafts for the decodes of a core's steps: a stage before the forward, and the source of the rows to draw from."""

    def __init__(
        self,
        source: DraftSource,
        length: DraftLength,
        config: EngineConfig,
        counters: Counters,
        count: Callable[[Work, bool], bool],
        fail: Fail,
        *,
        most_rows: int,
        spare_blocks: int = 0,
    ) -> None:
        """Verify drafts of `source`, as long as `length` says.

        `count` counts computed tokens and returns whether to publish them, and `fail` ends the request that raised.
        With drafts, a step has at most `most_rows` rows of logits, and `spare_blocks` blocks stay free.
        """
        self._source, self._length = source, length
        self._counters, self._count, self._fail = counters, count, fail
        self._most_tokens, self._most_rows, self._spare = config.max_batch_tokens, most_rows, spare_blocks
        self._block_size = config.block_size
        self._last_rows = LastRows()

    # ---- before the forward

    def launch(self, work: list[Work]) -> list[Work]:
        """Lengthen the plans of decodes by drafts; returns all work."""
        drafting = [each for each in work if isinstance(each.stream.continuation, DraftedTokens) and _decodes(each)]
        if drafting:
            self._counters.drafting_steps += len(drafting)
            room = self._most_tokens - sum(len(each.tokens) for each in work)
            room = min(room, self._most_rows - sum(each.rows for each in work))
            step = self._length.begin(work)
            for each in drafting:
                try:
                    room -= self._draft(each, step, room)
                except Exception as error:
                    self._fail(each.stream.request, error)
        return [each for each in work if each.stream.active] if drafting else work

    def _draft(self, work: Work, step: Step, room: int) -> int:
        """Draft after the last token of a stream; returns the number of tokens.

        While the step in flight samples that token, only find out whether a draft is likely.
        """
        stream, request = work.stream, work.stream.request
        continuation = _drafted(stream)
        continuation.waits = False
        most = min(MOST, room, request.max_tokens - stream.output_length - 1)
        if stream.sequence.follows and self._block_size > MOST:
            # At the end of a block, a plain decode goes on with the block of others, whose last bits may differ.
            most = min(most, -work.end % self._block_size)
        if most <= 0 or not step.wants(continuation.tally):
            return 0
        draft = continuation.propose(self._source, stream, most)
        tokens = _without_stops(draft.tokens, request.stop_ids)
        if (row := continuation.mask) is not None and not work.relayed:
            tokens = tokens[: row.matcher.valid(tokens)]
        if (judged := continuation.judge(stream)) is not None:
            self._length.guessed(*judged, continuation.tally)
        if not (longest := step.best(draft, len(tokens), continuation.tally)) and tokens:
            continuation.guess(stream, draft)
        tokens = tokens[:longest]
        if work.relayed:
            continuation.waits = len(tokens) > 1
            return 0
        if tokens:
            plan = stream.sequence.lengthen(work.plan, tokens, self._spare)
            tokens = tokens[: len(plan.slots) - len(work.plan.slots)]
        if tokens:
            work.plan, work.draft, work.rows = plan, tokens, 1 + len(tokens)
            stream.in_flight += len(tokens)
            continuation.begin(stream, draft, tokens)
            step.add(draft, len(tokens), continuation.tally)
        return len(tokens)

    # ---- rows of the logits

    def masks(self, first: Mapping[Hashable, ConstrainedRow], work: list[Work]) -> Mapping[Hashable, ConstrainedRow]:
        """Return the constraints of all rows: see RowSource."""
        masks = dict(first)
        for each in work:
            if each.draft is not None and (row := first.get(each.stream)) is not None:
                matcher = row.matcher
                for place, token in enumerate(each.draft, 1):
                    matcher = matcher.fork()
                    try:
                        matcher.consume([token])
                    except InvalidConstraint:
                        _drafted(each.stream).cut(place)
                        break
                    masks[VerifiedRow(each.stream, place)] = ConstrainedRow(matcher, row.stop_ids)
        return masks

    def refuse(self, key: Hashable, error: InvalidConstraint, fail: Fail) -> None:
        """Cut the draft whose row has no mask: it fails the request where a token is drawn from that row."""
        if isinstance(key, VerifiedRow):
            _drafted(key.stream).cut(key.place)
        else:
            self._last_rows.refuse(key, error, fail)

    def follows(self, stream: Stream, draft: array[int]) -> bool:
        """See RowSource."""
        return _drafted(stream).follows(stream, draft)

    def rows(self, work: list[Work], fail: Fail) -> tuple[list[Row], int]:
        """Return the rows to draw from; a verified chunk has its rows in order: see RowSource."""
        rows, count = self._last_rows.rows(work, fail)
        verified: dict[Stream, list[Row]] = {}
        more = count
        for last, each in enumerate(work):
            start, more = more, more + each.rows - 1
            if each.draft is not None:
                count, stream = more, each.stream
                verified[stream] = [(start, stream, stream, each.end, None)] + [
                    (
                        start + place if place < len(each.draft) else last,
                        stream,
                        VerifiedRow(stream, place),
                        each.end + place,
                        each.draft[:place],
                    )
                    for place in range(1, len(each.draft) + 1)
                ]
        return [each for row in rows for each in verified.get(row[1], (row,))] if verified else rows, count

    # ---- after the tokens of a step were taken

    def verify(self, work: list[Work]) -> None:
        """Cut the sequences of drafts to the tokens that their streams took, and publish these."""
        for each in work:
            if each.draft is not None and not each.stream.request.channel.ended:
                try:
                    self._verify(each, each.draft)
                except Exception as error:
                    self._fail(each.stream.request, error)
        self._length.end(work)

    def _verify(self, work: Work, draft: array[int]) -> None:
        """Keep the KV of the tokens that a plain decode would have computed by now."""
        stream, continuation = work.stream, _drafted(work.stream)
        taken = stream.tokens[work.end :]
        accepted = _common(draft, taken)
        # After the last draw of a reply, a plain decode computes no tokens that a constraint forced.
        right = min(accepted, len(taken) - 1) if stream.finish_reason is None else continuation.last
        stream.in_flight -= len(draft)
        stream.sequence.truncate(work.end + right)
        if right and self._count(Work(stream, work.end, draft[:right], work.plan), True):
            stream.sequence.publish(work.end + right)
        stream.request.scheduling.queued.group.tokens += right
        sent = continuation.end()
        self._length.verified(sent, accepted, continuation.tally, ended=stream.finish_reason is not None)
        self._counters.drafted(sent.source, sent.tokens, right)
        stream.counts.add_draft(sent.tokens, right, predicted=sent.source == "prediction")


def _drafted(stream: Stream) -> DraftedTokens:
    assert isinstance(stream.continuation, DraftedTokens)
    return stream.continuation


def _decodes(work: Work) -> bool:
    """Return whether a stream's next token follows this work, and not the first one of its reply."""
    return work.samples and work.stream.output_length > 0 and work.rows == 1


def _common(first: array[int], second: array[int]) -> int:
    """Return the length of the common prefix of two runs of tokens."""
    length = min(len(first), len(second))
    return next((place for place in range(length) if first[place] != second[place]), length)


def _without_stops(tokens: array[int], stop_ids: frozenset[int]) -> array[int]:
    """Return the tokens before the first that ends the reply."""
    return next((tokens[:place] for place, token in enumerate(tokens) if token in stop_ids), tokens)
