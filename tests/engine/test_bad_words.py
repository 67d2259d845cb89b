"""Bad words: each spelling of a word that the tokenizer writes is excluded from the reply, and nothing else is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import radixkv
from radixkv import Engine, SamplingParams
from radixkv.engine.bad_words import spellings_of
from radixkv.errors import InvalidInput
from tests.engine.fakes import make_engine
from tests.gguf.tokenizer_files import published_bytes, published_pieces

QUESTION = [{"role": "user", "content": "What is the capital of Japan?"}]
GREEDY = SamplingParams(temperature=0, max_tokens=16)


def texts_of(tokenizer: Any, *words: str) -> list[list[str]]:
    """Return the spellings of words as the tokenizer's own strings."""
    return [tokenizer.convert_ids_to_tokens(list(each)) for each in spellings_of(tokenizer, len(tokenizer), words)]


def test_a_word_is_excluded_at_the_start_and_after_a_space() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=published_bytes("gpt-2"))
    assert texts_of(tokenizer, "year") == [["Ġyear"], ["y", "ear"]]
    assert texts_of(tokenizer, "days", ".") == [["."], ["Ġdays"], ["d", "ay", "s"]]  # " ." ends with "."
    assert texts_of(tokenizer, " is") == [["Ġis"]]
    assert texts_of(tokenizer) == []


@pytest.mark.parametrize("prefix", ["always", "first", "never"])
def test_sentencepiece_marks_the_start_of_a_word_and_none_after_a_line_break(prefix: str) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=published_pieces(prefix))
    assert texts_of(tokenizer, "year") == [["▁year"], ["y", "ear"]]


def test_a_word_that_the_model_cannot_sample_is_refused() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=published_bytes("gpt-2"))
    with pytest.raises(InvalidInput, match=r"^bad_words: this model's tokenizer has no tokens for 'year'$"):
        spellings_of(tokenizer, 3, ["year"])
    with pytest.raises(InvalidInput, match=r"^bad_words: '\\udc00' is no valid Unicode"):
        spellings_of(tokenizer, len(tokenizer), ["\udc00"])
    engine, _ = make_engine()
    with engine, pytest.raises(InvalidInput, match="bad_words need a tokenizer, and this model has none"):
        engine.generate([[1, 2]], SamplingParams(bad_words="x"))


@pytest.fixture(scope="module")
def tiny() -> Iterator[Engine]:
    with Engine.load("tiny", monitor=False, num_blocks=256) as engine:
        yield engine


@pytest.mark.parametrize("words", [["Tokyo"], ["Tokyo", "capital", "Japan"], ["The", "is"], ["of Japan"], ["T", "a"]])
def test_a_reply_matches_transformers_without_the_same_tokens(tiny: Engine, words: list[str]) -> None:
    tokenizer = tiny.model.tokenizer
    model = AutoModelForCausalLM.from_pretrained(Path(radixkv.__file__).parent / "assets" / "tiny", dtype=torch.float32)
    before = tiny.generate([QUESTION], GREEDY)[0].text
    done = tiny.generate([QUESTION], GREEDY.but(bad_words=words))[0]
    prompt = torch.tensor([tiny.client.inputs.encode(QUESTION, reply=True).tolist()])
    spellings = [list(each) for each in spellings_of(tokenizer, tiny.model.vocab_size, words)]
    found = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=16, bad_words_ids=spellings
    )
    assert list(done.token_ids) == found[0, prompt.shape[1] :].tolist()
    assert any(word in before for word in words) and not any(word in done.text.split() for word in words)


def test_the_end_of_the_prompt_is_no_part_of_a_word(tiny: Engine) -> None:
    tokenizer = tiny.model.tokenizer
    whole = tokenizer.encode("The capital of Japan", add_special_tokens=False)
    [*first, last] = tokenizer.encode(" Japan", add_special_tokens=False)
    prompt = [*tiny.client.inputs.encode(QUESTION, reply=True).tolist(), *whole[: len(whole) - 1]]
    assert whole[-1] == last and len(first) >= 1
    one = GREEDY.but(max_tokens=1, bad_words=["Japan"])
    assert tiny.generate([prompt], one)[0].token_ids == (last,)
    assert tiny.generate([prompt[: -len(first)]], one.but(max_tokens=len(first) + 1))[0].token_ids[-1] != last


def test_each_word_and_each_reply_by_itself(tiny: Engine) -> None:
    """Rows with different words, and rows without, in one batch."""
    params = [GREEDY.but(bad_words=words) for words in ((), ("Tokyo",), ("The", "is"), (), ("Tokyo", "capital"))]
    together = tiny.generate([QUESTION] * len(params), params)
    alone = [tiny.generate([QUESTION], each)[0] for each in params]
    assert [each.text for each in together] == [each.text for each in alone]
    assert len({each.text for each in alone}) == 4


def test_a_stream_may_be_launched_ahead_only_if_no_word_has_several_tokens(tiny: Engine) -> None:
    def host_bound(*words: str) -> bool:
        return tiny.client.inputs.request(QUESTION, GREEDY.but(bad_words=words)).replies.continuation.host_bound

    assert not host_bound() and not host_bound("?")
    assert host_bound("Japan") and host_bound("?", "Japan")
