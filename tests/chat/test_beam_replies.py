"""Beam searches with text: stop strings, conversations, and what monitors and recordings say about them."""

from __future__ import annotations

import pytest

from radixkv import Engine, SamplingParams
from radixkv.errors import InvalidInput
from radixkv.sampling.params import TokenLogprobs
from tests.chat.worlds import byte_tokenizer, chat_engine
from tests.engine.fakes import FakeModel, check, make_engine

BEAMS = SamplingParams(beam_width=3, max_tokens=60)


def text_engine(**settings: object) -> Engine:
    """An engine of a model that writes random bytes; its logits depend on the whole text."""
    tokenizer = byte_tokenizer()
    return make_engine(300, 4, model=FakeModel(tokenizer, len(tokenizer), 10_000, frozenset()), **settings)[0]  # type: ignore[arg-type]


def test_a_stop_string_ends_a_beam_where_it_ends_a_sampled_reply() -> None:
    params = SamplingParams(beam_width=4, max_tokens=10, length_penalty=-1.0)
    with text_engine() as engine:
        free = engine.generate(["a text"], params)[0]
        letters = "".join(each.text for each in (free, *free.alternatives))
        stop = next(letter for letter in letters[3:] if letter.isascii())
        found = engine.generate(["a text"], params.but(stop=[stop]))[0]
        stopped = [each for each in (found, *found.alternatives) if each.stop_text == stop]
        assert stopped
        for each in (found, *found.alternatives):
            decoded = engine.model.tokenizer.decode(list(each.token_ids))
            assert each.text == decoded.partition(stop)[0]
            assert (each.finish_reason == "stop") == (stop in decoded) == (each in stopped)
            assert decoded.find(stop) in {-1, len(decoded) - 1}  # with the first one
        check(engine)


def test_the_best_beam_is_the_turn_of_a_conversation() -> None:
    with chat_engine() as engine, engine.chat("Be brief.") as chat:
        reply = chat.send("hello", BEAMS)
        assert reply.text == "You said hello!"
        known = chat.token_ids
        stream = chat.stream("again", BEAMS.but(logprobs=1))
        assert "".join(chunk.text for chunk in stream) == stream.reply.text == "You said again!"
        assert stream.reply.usage.cached_tokens == len(known) - 1  # the beam's own KV
        best, *others = (result := stream.handle.result()), *result.alternatives
        assert best.score is not None and [each.index for each in others] == [1, 2]
        assert all(isinstance(each, TokenLogprobs) for each in best.logprobs or ())
        assert chat.history[-1]["content"] == "You said again!"
        with pytest.raises(InvalidInput, match="one reply a turn"):
            chat.send("x", SamplingParams(n=2))
        check(engine)
