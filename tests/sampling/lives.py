"""Simulate the draws of an engine whose steps overlap, and compare each with `sample`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st

from radixkv.device import device_of
from radixkv.sampling.device_sampler import DeviceSampler
from radixkv.sampling.params import SampleRow, SamplingParams
from radixkv.sampling.sampler import finite_rows, sample
from tests.sampling.test_sampler import PARAMS, STOPS, logits_for

VOCAB = 150
PARAM_LISTS = st.lists(PARAMS.flatmap(lambda p: st.sampled_from([p, p.but(logprobs=3)])), min_size=1, max_size=7)


@dataclass
class Life:
    """A stream of a simulated engine: its tokens on the host, and the token that is in flight, if any."""

    number: int
    params: SamplingParams
    tokens: list[int]
    prompt_length: int
    flying: int | None = None
    candidates: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()

    @property
    def host_bound(self) -> bool:
        """Whether a draw must be read before the next one begins."""
        return bool(self.candidates) or any(len(word) > 1 for word in self.bad_words)

    def land(self) -> None:
        """Append the token in flight, unless it was dropped."""
        if self.flying is not None:
            self.tokens.append(self.flying)
            self.flying = None

    def row(self, *, whole: bool = False) -> SampleRow:
        """Return the row of the next draw, with all tokens for the host sampler if `whole`."""
        known = [*self.tokens, self.flying] if whole and self.flying is not None else list(self.tokens)
        return SampleRow(
            self.params,
            seed=self.number % 3,
            position=len(self.tokens) + (self.flying is not None),
            history=known,
            prompt_length=self.prompt_length,
            stop_token_ids=STOPS,
            stream=self.number,
            in_flight=0 if whole or self.flying is None else 1,
            candidates=self.candidates,
            bad_words=self.bad_words,
        )


def life(rng: Random, params: SamplingParams, number: int) -> Life:
    """Return a stream with a random text; some are beams, and some replies must not contain some of ten tokens."""
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(0, 9))]
    reply = [rng.randrange(VOCAB) for _ in range(rng.randint(0, 6))]
    made = Life(number, params, prompt + reply, len(prompt))
    if rng.random() < 0.3:
        made.candidates = rng.choice([1, 3, 8, VOCAB, 2 * VOCAB])
    if rng.random() < 0.4:
        most = rng.choice([1, 3])
        words = [tuple(rng.randrange(10) for _ in range(rng.randint(1, most))) for _ in range(12)]
        made.params, made.bad_words = params.but(bad_words=["words"]), tuple(words)
        made.tokens += [rng.randrange(10) for _ in range(3)]
    return made


def compare_lives(params: list[SamplingParams], seed: int, device: DeviceSampler, place: torch.device) -> None:
    """Begin each draw before the preceding one is read. Some tokens in flight are dropped; streams end and start.

    The host appends one of the candidates to a beam, or forks it.
    """
    rng = Random(seed)
    streams = [life(rng, each, number) for number, each in enumerate(params)]
    unread: list[tuple[Any, Any, list[bool], list[Life]]] = []  # the draw in flight, its expected results, its streams
    for step in range(6):
        in_flight = [each for *_, lives in unread for each in lives]
        batch = [each for each in streams if rng.random() < 0.8 and not (each.host_bound and each in in_flight)]
        rng.shuffle(batch)
        logits = logits_for(len(batch) + 2, seed % 1000 + step)
        sources = [rng.randrange(len(logits)) for _ in batch]
        there = device_of(place).upload(logits)
        pending = device.begin(there, [each.row() for each in batch], sources)
        expected = sample(logits[sources], [each.row(whole=True) for each in batch])
        for earlier, found, finite, lives in unread:
            assert earlier.result() == found
            assert earlier.finite() == finite
            for each in lives:
                each.land()
            for number, (each, candidates) in enumerate(
                zip(lives, found.candidates or (), strict=bool(found.candidates))
            ):
                if candidates is None or not candidates.tokens or each not in streams:
                    continue
                if rng.random() < 0.3:  # forked
                    each = replace(each, number=1000 + 100 * step + number, tokens=list(each.tokens))
                    streams.append(each)
                each.tokens.append(rng.choice(candidates.tokens))
        unread = [(pending, expected, finite_rows(logits), batch)]
        for each, token in zip(batch, expected.tokens, strict=True):
            each.flying = None if each.candidates else token
        for each in streams:
            if rng.random() < 0.15:  # preempted
                each.flying = None
        if rng.random() < 0.3:
            streams[rng.randrange(len(streams))] = life(rng, rng.choice(params), 100 + step)
