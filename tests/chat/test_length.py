"""Prompts that are certainly too long are refused before all of their text is encoded; no others are."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from radixkv.chat import rendering
from radixkv.chat.rendering import at_least
from radixkv.chat.template import ChatTemplate
from radixkv.errors import ContextOverflow, PromptTooLong
from tests.chat.worlds import CHATML, byte_tokenizer, chat_engine

STOPS = frozenset(byte_tokenizer().convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"]))
WORDS = ("the", "there", "here", "he", "quick", "1", "12", "x=", "==", "====", "\n", "\n\n", "  ", "    ", "é", "中文")


def fast(raw: Tokenizer) -> PreTrainedTokenizerFast:
    raw.add_special_tokens([AddedToken("<|end|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>")


@cache
def bytes_and_merges() -> PreTrainedTokenizerFast:
    """As GPT-2's: words with the space in front, runs of spaces, signs and line ends in one token."""
    from tokenizers import trainers

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    text = [" ".join(WORDS) * 3, " ".join(reversed(WORDS)), "        x\n\n\n\ny", "--------\n" * 4]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(text * 5, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet))
    return fast(raw)


@cache
def unigrams() -> PreTrainedTokenizerFast:
    """The likeliest pieces, rather than merges."""
    tokens = [
        ("<unk>", 0.0),
        *((word.replace(" ", "▁"), -float(len(word))) for word in WORDS),
        ("▁", -3.0),
        ("▁the", -1.5),
    ]
    tokens += [(letter, -8.0) for letter in "abcdefghijklmnopqrstuvwxyz=1234567890." if letter not in dict(tokens)]
    raw = Tokenizer(models.Unigram(tokens, unk_id=0))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    return fast(raw)


AROUND = {"bytes_and_merges": 0, "unigrams": 1}  # the mark that is put before each text
TOKENIZERS = {each.__name__: each for each in (bytes_and_merges, unigrams)}
TEXTS = st.lists(
    st.sampled_from([*WORDS, " ", " the", "<|end|>", "a", "b1", "::", "q"]) | st.text(max_size=3), max_size=80
).map("".join)


def encoder(tokenizer: Any, seen: list[str] | None = None) -> Any:
    def encode(text: str) -> list[int]:
        if seen is not None:
            seen.append(text)
        return list(tokenizer.encode(text, add_special_tokens=False))

    return encode


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60, deadline=None)
@given(text=TEXTS, piece=st.integers(1, 30))
def test_it_is_never_more_than_there_are(name: str, text: str, piece: int) -> None:
    tokenizer = TOKENIZERS[name]()
    encode = encoder(tokenizer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendering, "_PIECE", piece)
        patch.setattr(rendering, "_REACH", 12)
        patch.setattr(rendering, "_AROUND", AROUND[name])
        counted, real = at_least(text, 10**9, tokenizer, encode), len(encode(text))
        assert counted <= real
        assert AROUND[name] or counted == real  # a cut is no place where tokens would have met


@pytest.mark.parametrize("name", TOKENIZERS)
def test_no_more_is_encoded_than_it_takes(name: str) -> None:
    tokenizer, seen = TOKENIZERS[name](), list[str]()
    text = "there the quick x here " * 100_000
    assert at_least(text, 1000, tokenizer, encoder(tokenizer, seen)) > 1000
    assert sum(map(len, seen)) < 60_000
    assert "".join(seen) == text[: sum(map(len, seen))]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_one_endless_word_is_counted_by_its_letters(name: str) -> None:
    tokenizer, seen = TOKENIZERS[name](), list[str]()
    word = "=" * 150_000  # nowhere to cut: two of them may stand in a token
    longest = max(map(len, tokenizer.get_vocab()))
    known = at_least(word, 10, tokenizer, encoder(tokenizer, seen))
    assert len(word) / longest - 1 <= known <= len(encoder(tokenizer)(word))
    assert sum(map(len, seen)) < 50_000


@pytest.mark.parametrize("grow", ["opening", "continued", "spliced"])
def test_a_template_refuses_what_cannot_fit(grow: str) -> None:
    template = ChatTemplate(byte_tokenizer(CHATML), STOPS, limit=500)
    long, seen = [{"role": "user", "content": "Hello you. " * 50_000}], list[str]()
    encode = template.rendering.encode
    template.rendering.encode = lambda text: seen.append(text) or encode(text)  # type: ignore[method-assign,func-returns-value]
    ids = template.opening([{"role": "user", "content": "Hi"}])
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "b"}, *long]
    ways = {
        "opening": lambda: template.opening(long),
        "continued": lambda: template.continued(ids, long),
        "spliced": lambda: template.spliced(messages, {1: [65]}, keep_thinking=True),
    }
    with pytest.raises(PromptTooLong, match="more than the 500 tokens"):
        ways[grow]()
    assert sum(map(len, seen)) < 25_000


@settings(max_examples=30, deadline=None)
@given(text=TEXTS)
def test_what_fits_is_never_refused(text: str) -> None:
    messages = [{"role": "user", "content": text}]
    ids = ChatTemplate(byte_tokenizer(CHATML), STOPS).opening(messages)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("radixkv.chat.template._LONG", 0)  # count every text
        patch.setattr(rendering, "_PIECE", 7)
        patch.setattr(rendering, "_AROUND", 0)
        assert ChatTemplate(byte_tokenizer(CHATML), STOPS, limit=len(ids)).opening(messages) == ids
        with pytest.raises(PromptTooLong):
            ChatTemplate(byte_tokenizer(CHATML), STOPS, limit=len(ids) - 1).opening(messages)


def test_a_session_says_that_it_is_full_and_keeps_its_history() -> None:
    with chat_engine(max_length=400) as engine, engine.chat() as chat:
        chat.send("one")
        before = (chat.history, chat.token_ids)
        with pytest.raises(ContextOverflow, match=r"has more than 400 tokens and the context 400: rewind"):
            chat.send("Hello you. " * 5000)
        assert (chat.history, chat.token_ids) == before
        assert chat.send("two").text == "You said two!"
