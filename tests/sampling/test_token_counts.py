"""Slots of the token counts: streams keep, lose and take over them, and each draw has the penalties of its own text."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from radixkv.sampling.device_sampler import DevicePending, DeviceSampler
from radixkv.sampling.params import SamplingParams
from radixkv.sampling.sampler import sample
from radixkv.sampling.token_counts import TokenCounts
from tests.sampling.lives import Life

CPU = torch.device("cpu")
PENALTIES = SamplingParams(temperature=0, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.5)


def life(number: int, *tokens: int, prompt_length: int = 1) -> Life:
    return Life(number, PENALTIES, list(tokens), prompt_length)


class Draws:
    """Draws with equal logits for all rows, so that only the penalties make them different."""

    def __init__(self, vocab: int = 12) -> None:
        self.counts = TokenCounts(CPU)
        self.vocab = vocab
        self._sampler = DeviceSampler(CPU, counts=self.counts)

    def begin(self, *lives: Life) -> DevicePending:
        """Begin a draw, and compare its tokens with those of the host's sampler."""
        logits = torch.linspace(3, 2, self.vocab).repeat(len(lives), 1)
        pending = self._sampler.begin(logits, [each.row() for each in lives])
        expected = sample(logits, [each.row(whole=True) for each in lives]).tokens
        assert pending.tokens.tolist() == expected
        for each, token in zip(lives, expected, strict=True):
            each.land()
            each.flying = token
        return pending

    def draw(self, *lives: Life) -> None:
        """Draw, and append the tokens."""
        self.begin(*lives).result()
        for each in lives:
            each.land()


def test_a_stream_that_grew_on_the_host_has_the_penalties_of_its_whole_text() -> None:
    """A constraint forces tokens that no draw has counted."""
    draws, one = Draws(), life(0, 3)
    for _ in range(3):
        draws.draw(one)
        one.tokens += [0, 1]


def test_more_streams_keep_the_counts_of_those_in_flight() -> None:
    draws, first = Draws(), [life(number, 0, number) for number in range(6)]
    flying = draws.begin(*first)
    draws.begin(*(life(number, number % 12) for number in range(6, 40)))
    draws.begin(*first)
    assert len(draws.counts.table) == 64
    del flying


def test_streams_of_the_same_draw_take_no_slot_from_each_other() -> None:
    draws, old = Draws(), [life(number, number) for number in range(8)]
    draws.draw(*old)
    draws.draw(*old[:4], *(life(8 + number, number) for number in range(6)))
    assert len(draws.counts.table) == 16


def test_the_slot_that_was_used_longest_ago_is_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    draws, old = Draws(), [life(number, number) for number in range(8)]
    draws.draw(*old)
    draws.draw(old[0])
    draws.draw(life(8, 1))
    filled: list[int] = []
    fill = TokenCounts.fill
    monkeypatch.setattr(TokenCounts, "fill", lambda *rest: (filled.append(len(rest[2])), fill(*rest))[1])
    draws.draw(old[0])
    draws.draw(old[1])
    assert filled == [0, 1]


def test_ids_beyond_the_vocabulary_are_not_counted() -> None:
    """The prompt of a model may have ids that its logits lack; the slot of another stream must not count them."""
    draws, one, other = Draws(), life(0, 1), life(1, 2)
    draws.draw(one, other)
    strange = life(2, 12, 13, 24, 25, 36, 37, 2, 12, prompt_length=4)
    logits = torch.linspace(3, 2, 12)[None]
    found = DeviceSampler(CPU, counts=draws.counts).begin(logits, [strange.row()]).result().tokens
    assert found == sample(logits, [life(2, 2, prompt_length=0).row()]).tokens
    draws.draw(one, other)


def test_tokens_that_the_host_appends_are_added_to_those_that_are_counted() -> None:
    """A beam has one more token in each step; counting its whole text again would cost more with each."""
    counts, one = TokenCounts(CPU), replace(life(0, 3, 4, 4), candidates=2)
    sampler = DeviceSampler(CPU, counts=counts)
    logits = torch.linspace(3, 2, 12)[None]
    sampler.begin(logits, [one.row()]).result()
    one.tokens += [5, 5, 11]
    filling = counts.plan([one.row()], 12)
    first = filling.slots[0].index * 12
    assert (filling.cleared.tolist(), filling.seen.tolist()) == ([], [])
    assert filling.replied.tolist() == [first + 5, first + 5, first + 11]
    for _ in range(2):  # a plan that is not carried out costs another filling
        assert sampler.begin(logits, [one.row()]).result() == sample(logits, [one.row()])
    assert counts.table[filling.slots[0].index].tolist() == [0, 0, 0, 1, 4, 4, 0, 0, 0, 0, 0, 2]
