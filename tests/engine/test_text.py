"""Incremental text: characters and stop strings may span tokens, and released text is never taken back."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers.convert_slow_tokenizer import bytes_to_unicode

from radixkv import SamplingParams
from radixkv.engine.text_stream import Detokenizer, TextStream, decoder
from tests.chat.worlds import byte_tokenizer, chat_engine

TOKENIZER = byte_tokenizer()


BYTES = bytes_to_unicode()


def spelled(text: str) -> list[int]:
    """One token per byte."""
    return [TOKENIZER.convert_tokens_to_ids(BYTES[byte]) for byte in text.encode()]


@given(st.text(max_size=30), st.text(max_size=5))
@settings(max_examples=40, deadline=None)
def test_chunks_join_to_the_text_and_none_is_half_a_character(text, context):
    detokenizer = Detokenizer(decoder(TOKENIZER), spelled(context))
    pieces = [detokenizer.push(token) for token in spelled(text)]
    whole = "".join(pieces) + detokenizer.flush()
    assert whole == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


@pytest.mark.parametrize("reply", ["", "a", "\ufffd", "\ufffda", "日本", '{"a": 1}'])
@pytest.mark.parametrize("end", ["\ufffd", "\ufffd\ufffd", "é\ufffd"])
def test_a_replacement_character_at_the_end_of_a_prompt_is_no_part_of_the_reply(end: str, reply: str) -> None:
    detokenizer = Detokenizer(decoder(TOKENIZER), spelled("Broken " + end))
    assert "".join(map(detokenizer.push, spelled(reply))) + detokenizer.flush() == reply


@pytest.mark.parametrize("known", [1, 2, 3])
def test_a_character_that_a_prompt_begins_is_the_replys_once_its_tokens_complete_it(known: int) -> None:
    context, rest = spelled("Hello 🙂")[: 6 + known], spelled("Hello 🙂!")[6 + known :]
    detokenizer = Detokenizer(decoder(TOKENIZER), context)
    assert "".join(map(detokenizer.push, rest)) + detokenizer.flush() == "🙂!"
    for reply in ("", "a", "ab"):
        detokenizer = Detokenizer(decoder(TOKENIZER), context)
        assert "".join(map(detokenizer.push, spelled(reply))) + detokenizer.flush() == reply


FALLBACK = Tokenizer(models.BPE({f"<0x{byte:02X}>": byte for byte in range(256)} | {"a": 256}, [], byte_fallback=True))
FALLBACK.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])


@pytest.mark.parametrize("context", ["", "a", "日本"])
@pytest.mark.parametrize("text", ["日本" * 12, "a日é🙂" * 9])
def test_decoders_that_refuse_all_bytes_after_a_part_of_a_character_get_none(text: str, context: str) -> None:
    detokenizer = Detokenizer(FALLBACK.decode, list(context.encode()))
    tokens = [256 if byte == ord("a") else byte for byte in text.encode()]
    assert "".join(map(detokenizer.push, tokens)) + detokenizer.flush() == text


@pytest.mark.parametrize("known", [1, 2])
@pytest.mark.parametrize("before", ["Hi", "Hi\ufffd", "é", "🙂", "日"])
def test_the_bytes_before_a_character_that_a_prompt_begins_are_no_part_of_the_reply(before: str, known: int) -> None:
    tokens, start = spelled(before + "日!"), len(before.encode()) + known
    detokenizer = Detokenizer(decoder(TOKENIZER), tokens[:start])
    assert "".join(map(detokenizer.push, tokens[start:])) + detokenizer.flush() == "日!"


def test_a_space_in_the_token_that_begins_a_character_is_the_contexts() -> None:
    tokens = [b"Hello", b" \xe6", b"\x97\xa5", b"!"]
    decode = lambda ids, **_: b"".join(tokens[each] for each in ids).decode(errors="replace")  # noqa: E731
    detokenizer = Detokenizer(decode, [0, 1])
    assert detokenizer.push(2) + detokenizer.push(3) + detokenizer.flush() == "日!"


def test_a_prompt_that_ends_with_a_stop_string_does_not_end_an_empty_reply() -> None:
    stream = TextStream(decoder(TOKENIZER), spelled("Broken \ufffd"), ["\ufffd"])
    assert stream.push(spelled("a")[0]) + stream.flush() == "a"
    assert stream.stopped_by is None


def test_invalid_bytes_appear_as_the_decoder_writes_them():
    rng = random.Random(0)
    for _ in range(50):
        tokens = [rng.randrange(256) for _ in range(40)]
        detokenizer = Detokenizer(decoder(TOKENIZER), [])
        pieces = [detokenizer.push(token) for token in tokens]
        assert "".join(pieces) + detokenizer.flush() == TOKENIZER.decode(tokens)


@given(st.text(alphabet="abé", max_size=25), st.lists(st.text(alphabet="abé", min_size=1, max_size=4), max_size=3))
@settings(max_examples=80, deadline=None)
def test_text_ends_before_the_first_stop_string(text, stops):
    stream = TextStream(decoder(TOKENIZER), [], stops)
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
    assert shown == "".join(stream.released) == expected
    assert (stream.stopped_by is not None) == bool(ends)
    if stream.stopped_by:
        assert text[len(expected) :].startswith(stream.stopped_by)


class Pieces:
    """A tokenizer whose tokens are these texts."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts

    def decode(self, ids: list[int], **options: object) -> str:
        return "".join(self.texts[each] for each in ids)


PIECES = st.lists(st.text(alphabet="ab", min_size=0, max_size=4), min_size=1, max_size=10)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=3)


def first_stop(pieces: list[str], stops: list[str], minimum: int) -> tuple[str, str | None]:
    """Return the text and the stop string, looking at the whole text after each token."""
    for count in range(minimum, len(pieces) + 1):
        text, earlier = "".join(pieces[:count]), len("".join(pieces[: max(minimum, 1) - 1]))
        found = [
            (at, order)
            for at in range(len(text))
            for order, stop in enumerate(stops)
            if text.startswith(stop, at) and at + len(stop) > earlier
        ]
        if count and found:
            at, order = min(found)
            return text[:at], stops[order]
    return "".join(pieces), None


@given(PIECES, STOPS, st.integers(0, 11))
@settings(max_examples=300, deadline=None)
def test_a_stop_string_ends_the_text_from_the_token_with_number_min_tokens_on(pieces, stops, minimum):
    stream = TextStream(decoder(Pieces(pieces)), [], stops)
    shown = ""
    for token in range(len(pieces)):
        shown += stream.push(token, watch=token + 1 >= minimum)
        if stream.stopped_by:
            break
    else:
        shown += stream.flush()
    assert (shown, stream.stopped_by) == first_stop(pieces, stops, minimum)
    assert shown == "".join(stream.released)


@pytest.mark.parametrize(
    ("pieces", "minimum", "shown"),
    [
        (["ab", "c"], 2, ["ab", "c"]),  # complete before the second token: a part of the text
        (["a", "b"], 2, ["", ""]),  # complete with the second token: it was held back
        (["xa", "b", "c"], 3, ["x", "ab", "c"]),
        (["aba", "b"], 2, ["ab", ""]),  # the first is passed, the second stops
        (["xab"], 1, ["x"]),
        (["ab", "", "c"], 2, ["ab", "", "c"]),
    ],
)
def test_beginnings_of_stop_strings_are_held_before_min_tokens(pieces, minimum, shown):
    stream = TextStream(decoder(Pieces(pieces)), [], ["ab"])
    assert [stream.push(token, watch=token + 1 >= minimum) for token in range(len(pieces))] == shown


def test_text_that_cannot_become_a_stop_string_is_not_held_back():
    stream = TextStream(decoder(TOKENIZER), [], ["ab!"])
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


def test_a_stop_string_may_begin_before_min_tokens():
    """The reply "You said o!" has the tokens Y, ou, " ", s, a, i, d, " ", o, "!"."""
    with chat_engine() as engine:
        for minimum, text in [(4, "You"), (5, "You said o!")]:
            params = SamplingParams(stop=" s", min_tokens=minimum, temperature=0)
            handle = engine.submit([{"role": "user", "content": "o"}], params)
            assert "".join(chunk.text for chunk in handle) == handle.result().text == text


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


def test_a_copy_of_a_text_goes_on_independently():
    first = TextStream(decoder(TOKENIZER), [], ["ab!"])
    shown = [first.push(token) for token in spelled("xéa")[:-2]]  # the last byte of a character is missing
    second = first.copy()
    for stream, rest in ((first, "éa"), (second, "éb"), (first, "b!"), (second, "ab")):
        for token in spelled(rest)[1 if rest[0] == "é" else 0 :]:
            stream.push(token)
    assert ("".join(first.released), first.stopped_by) == ("xé", "ab!")
    assert second.flush() == "ab" and ("".join(second.released), second.stopped_by) == ("xébab", None)
    assert shown == ["x", ""]
