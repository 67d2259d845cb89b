"""Incremental text: characters and stop strings may span tokens, and released text is never taken back."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.convert_slow_tokenizer import bytes_to_unicode

from radixkv import SamplingParams
from radixkv.engine.request import Detokenizer, TextStream
from tests.chat.worlds import byte_tokenizer, chat_engine

TOKENIZER = byte_tokenizer()


BYTES = bytes_to_unicode()


def spelled(text: str) -> list[int]:
    """One token per byte."""
    return [TOKENIZER.convert_tokens_to_ids(BYTES[byte]) for byte in text.encode()]


@given(st.text(max_size=30), st.text(max_size=5))
@settings(max_examples=40, deadline=None)
def test_chunks_join_to_the_text_and_none_is_half_a_character(text, context):
    detokenizer = Detokenizer(TOKENIZER, spelled(context))
    pieces = [detokenizer.push(token) for token in spelled(text)]
    whole = "".join(pieces) + detokenizer.flush()
    assert whole == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


def test_invalid_bytes_appear_as_the_decoder_writes_them():
    rng = random.Random(0)
    for _ in range(50):
        tokens = [rng.randrange(256) for _ in range(40)]
        detokenizer = Detokenizer(TOKENIZER, [])
        pieces = [detokenizer.push(token) for token in tokens]
        assert "".join(pieces) + detokenizer.flush() == TOKENIZER.decode(tokens)


@given(st.text(alphabet="abé", max_size=25), st.lists(st.text(alphabet="abé", min_size=1, max_size=4), max_size=3))
@settings(max_examples=80, deadline=None)
def test_text_ends_before_the_first_stop_string(text, stops):
    stream = TextStream(TOKENIZER, [], stops)
    shown = ""
    for token in spelled(text):
        shown += stream.push(token)
        assert not any(stop in shown for stop in stops)
        if stream.stopped_by:
            break
    else:
        shown += stream.flush()
    # The first stop string to be complete ends the text; of several complete at once, the one that begins first.
    ends = [end for end in range(len(text) + 1) if any(stop in text[:end] for stop in stops)]
    expected = text if not ends else text[: min(i for i in (text[: ends[0]].find(s) for s in stops) if i >= 0)]
    assert shown == stream.text == expected
    assert (stream.stopped_by is not None) == bool(ends)
    if stream.stopped_by:
        assert text[len(expected) :].startswith(stream.stopped_by)


def test_text_that_cannot_become_a_stop_string_is_not_held_back():
    stream = TextStream(TOKENIZER, [], ["ab!"])
    assert [stream.push(token) for token in spelled("xabcab")] == ["x", "", "", "abc", "", ""]
    assert stream.flush() == "ab"


@pytest.mark.parametrize(("stop", "text"), [("said h", "You "), ("ell", "You said h"), ("never", "You said hello!")])
def test_stop_strings_across_tokens_in_the_engine(stop, text):
    messages = [{"role": "user", "content": "hello"}]  # "hell" is one token, "o" another
    with chat_engine() as engine:
        handle = engine.submit(messages, SamplingParams(stop=[stop, "nowhere"], temperature=0))
        shown = "".join(chunk.text for chunk in handle)
        done = handle.result()
        assert shown == done.text == text
        assert done.finish_reason == "stop"
        assert engine.model.tokenizer.decode(done.token_ids, skip_special_tokens=True).startswith(text)


def test_stop_strings_do_not_count_before_min_tokens():
    messages = [{"role": "user", "content": "o"}]
    with chat_engine() as engine:
        params = SamplingParams(stop="o", min_tokens=4, temperature=0)
        assert engine.generate([messages], params)[0].text == "You said "


def test_text_prompts_are_encoded_as_the_tokenizer_does():
    with chat_engine(lambda text: "x") as engine:
        text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
        as_text = engine.generate([text], SamplingParams(temperature=0))[0]
        as_chat = engine.generate([[{"role": "user", "content": "hello"}]], SamplingParams(temperature=0))[0]
        assert as_text.text == as_chat.text == "x"
        assert as_chat.usage.cached_tokens == as_text.usage.prompt_tokens - 1
        assert engine.generate(text, SamplingParams(temperature=0))[0].text == "x"


def test_warming_a_system_prompt_is_a_hit_for_every_conversation():
    with chat_engine() as engine:
        system = "You are a shopkeeper. " * 10
        warmed = engine.warm([{"role": "system", "content": system}])
        for text in ("a", "b"):
            reply = engine.chat(system).send(text)
            assert reply.usage.cached_tokens >= warmed.usage.prompt_tokens - len("assistant\n")
