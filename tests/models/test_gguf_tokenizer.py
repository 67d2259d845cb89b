"""The tokenizer of a GGUF file gives the ids, and the texts, of the tokenizer that the model was published with."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from radixkv.errors import InvalidInput, UnsupportedModel
from radixkv.gguf.header import GGUFHeader
from radixkv.models.file_tokenizer import FileTokenizer
from radixkv.models.gguf_tokenizer import stop_token_ids, tokenizer_of
from tests.gguf.tokenizer_files import (
    ADDED,
    CONTROL,
    CONTROLS,
    PUBLISHED,
    SIGN,
    UNUSED,
    USER_DEFINED,
    header_of,
    metadata_of,
    published_bytes,
    published_pieces,
)
from tests.models.test_file_tokenizer import same
from tests.selection import mostly_long

PIECES = (
    "Hello", "here", "year", "number", "/", ".\n", "//\r\n", "don't", "We'LL", "I'VE", "they'd", "'s", "'", "123",
    "1", "20240", "3.14", "x_1", "==", "...", "\U0001f680", "\U0001f469\u200d\U0001f467", "e\u0301", "\u00e9",
    "\u0915\u094d\u0937\u093f", "\u65e5\u672c", "\u4e2d12", "\u30da\u30f3", "\ud55c\uad6d", "\u0663\u0664", "\u00bd",
    "\u2167", "\u0645\u0631", "\u0840\u0859", "\u3000", "\xa0", "\u200b", " ", "  ", "   ", "        ", "\n", "\n\n",
    "\r\n", "\t", "\t\t", " \n ", SIGN, "\u0120", "</s>", "<0x0A>", "<think", *CONTROLS, *ADDED,
)  # fmt: skip
TEXTS = st.one_of(
    st.lists(st.sampled_from(PIECES), max_size=14).map("".join),
    st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=4)), max_size=8).map("".join),
    st.text(st.characters(codec="utf-8"), max_size=20),
)


@cache
def byte_pair(name: str) -> tuple[Tokenizer, FileTokenizer]:
    published = published_bytes(name)
    return published, plain_of(header_of(metadata_of(published, pre=name, add_bos_token=False)))


@cache
def piece_pair(prefix: str) -> tuple[Tokenizer, FileTokenizer]:
    controls = ("[INST]", "[/INST]") if prefix == "first" else ()
    published = published_pieces(prefix, controls)
    keys = {"add_space_prefix": False} if prefix == "never" else {}
    return published, plain_of(header_of(metadata_of(published, add_bos_token=False, **keys)))


def plain_of(header: GGUFHeader) -> FileTokenizer:
    found = tokenizer_of(header)
    assert found is not None
    return found


def built(header: GGUFHeader) -> PreTrainedTokenizerFast:
    """The tokenizer that a user reads, whose ids are equal."""
    theirs: PreTrainedTokenizerFast = plain_of(header).of_transformers()
    same(plain_of(header), theirs)
    return theirs


def check(published: Tokenizer, tokenizer: FileTokenizer, text: str) -> None:
    expected = published.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text) == expected
    if isinstance(published.decoder, decoders.ByteLevel):  # a small vocabulary hides a wrong split
        ours, theirs = (each.pre_tokenizer.pre_tokenize_str(text) for each in (tokenizer.backend_tokenizer, published))
        assert ours == theirs
    assert tokenizer.decode(expected) == published.decode(expected, skip_special_tokens=False)
    assert tokenizer.decode(expected, skip_special_tokens=True) == published.decode(expected)


def plain(**keys: Any) -> dict[str, Any]:
    return metadata_of(published_bytes("gpt-2"), **{"pre": "gpt-2", **keys})


# ---- ids and texts


@pytest.mark.parametrize("name", mostly_long(PUBLISHED, "smollm", "llama-bpe", "qwen2"))
@settings(max_examples=80)
@given(text=TEXTS)
def test_byte_level_ids_match_the_published_tokenizer(name: str, text: str) -> None:
    check(*byte_pair(name), text)


@pytest.mark.parametrize("prefix", ["always", "first", "never"])
@settings(max_examples=150)
@given(text=st.one_of(TEXTS, TEXTS.map(lambda text: f"[INST] {text}[/INST]{text}</s>{text}")))
def test_sentencepiece_ids_match_the_published_tokenizer(prefix: str, text: str) -> None:
    check(*piece_pair(prefix), text)


def test_a_piece_that_is_a_token_stays_whole_where_the_model_ignores_merges() -> None:
    published = published_bytes("llama-bpe")
    metadata = metadata_of(published, pre="llama-bpe", add_bos_token=False)
    metadata["tokenizer.ggml.tokens"].append("zqzq")
    metadata["tokenizer.ggml.token_type"].append(1)
    whole = len(metadata["tokenizer.ggml.tokens"]) - 1
    assert built(header_of(metadata)).encode("zqzq") == [whole]
    metadata["tokenizer.ggml.pre"] = "dbrx"
    assert whole not in built(header_of(metadata)).encode("zqzq")


def test_gemma_writes_runs_of_spaces_by_its_user_defined_tokens() -> None:
    published, tokenizer = piece_pair("never")
    assert tokenizer.backend_tokenizer.encode("        x").tokens == [SIGN * 8, "x"]
    metadata = metadata_of(published)
    assert "        " in metadata["tokenizer.ggml.tokens"]
    metadata["tokenizer.ggml.add_bos_token"] = False
    gemma = built(header_of(metadata, "gemma3"))  # an older file, without the key of the prefix
    assert gemma.encode("a  b") == tokenizer.encode("a  b")


def test_gemma_4_has_merges_and_leaves_the_first_token_to_its_template() -> None:
    published = published_pieces("never")
    metadata = metadata_of(published, model="gemma4", bos_token_id=1, add_bos_token=True)
    del metadata["tokenizer.ggml.scores"]
    metadata["tokenizer.ggml.merges"] = [" ".join(pair) for pair in json.loads(published.to_str())["model"]["merges"]]
    tokenizer = built(header_of(metadata, "gemma4"))
    for text in ("a  b", "The year 2024\n", "</s> x", "日本"):
        assert tokenizer.encode(text) == published.encode(text).ids


def test_added_tokens_of_phi_3_take_the_white_space_after_them() -> None:
    metadata = metadata_of(published_pieces("always"), add_bos_token=False)
    tokenizer = built(header_of(metadata, "phi3"))
    assert tokenizer.encode("<|im_end|>\n\n a") == tokenizer.encode("<|im_end|>a")
    assert tokenizer.encode("<|endoftext|>\na") != tokenizer.encode("<|endoftext|>a")


# ---- named tokens, types and templates


def test_named_tokens_and_settings() -> None:
    ids = {text: published_bytes("gpt-2").token_to_id(text) for text in CONTROLS}
    metadata = plain(bos_token_id=ids[CONTROLS[0]], eos_token_id=ids[CONTROLS[2]], padding_token_id=2**32 - 1)
    tokenizer = built(header_of(metadata))
    assert (tokenizer.bos_token, tokenizer.eos_token) == (CONTROLS[0], CONTROLS[2])
    assert tokenizer.pad_token is None and tokenizer.unk_token is None
    assert tokenizer.model_max_length == 2048
    assert tokenizer.clean_up_tokenization_spaces is False
    assert "." in tokenizer.decode(tokenizer.encode("a . b"), clean_up_tokenization_spaces=None)


@pytest.mark.parametrize(
    ("kind", "keys", "expected"),
    [
        ("gpt-2", {}, "x"),
        ("gpt-2", {"add_bos_token": True}, "^x"),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, "^x$"),
        ("llama-bpe", {}, "^x"),
        ("tekken", {}, "^x"),
        ("llama-bpe", {"add_bos_token": False}, "x"),
        ("pieces", {}, "^x"),
        ("pieces", {"add_bos_token": False, "add_eos_token": True}, "x$"),
    ],
)
def test_added_first_and_last_tokens(kind: str, keys: dict[str, Any], expected: str) -> None:
    published = published_pieces("always") if kind == "pieces" else published_bytes(kind)
    first, last = published.token_to_id("<|im_start|>"), published.token_to_id("<|im_end|>")
    named = {"bos_token_id": first, "eos_token_id": last, **({} if kind == "pieces" else {"pre": kind}), **keys}
    tokenizer = built(header_of(metadata_of(published, **named)))
    text = tokenizer.encode("x", add_special_tokens=False)
    ids = {"^": [first], "x": text, "$": [last]}
    assert tokenizer("x").input_ids == [id_ for sign in expected for id_ in ids[sign]]


def test_sentencepiece_files_without_keys_have_its_own_ids() -> None:
    tokenizer = built(header_of(metadata_of(published_pieces("always"))))
    assert (tokenizer.unk_token, tokenizer.bos_token, tokenizer.eos_token) == ("<unk>", "<s>", "</s>")
    assert tokenizer("a").input_ids[0] == 1


def test_chat_templates() -> None:
    key = "tokenizer.chat_template"
    assert built(header_of(plain())).chat_template is None
    assert built(header_of({**plain(), key: "{{ messages }}"})).chat_template == "{{ messages }}"
    several = {**plain(), key: "a", "tokenizer.chat_templates": ["tool_use"], f"{key}.tool_use": "b"}
    tokenizer = built(header_of(several))
    assert tokenizer.chat_template == {"default": "a", "tool_use": "b"}
    assert tokenizer.get_chat_template(None, tools=[{}]) == "b"


def test_a_saved_tokenizer_is_the_same_one_after_loading(tmp_path: Path) -> None:
    metadata = metadata_of(published_pieces("always"), eos_token_id=2)
    tokenizer = built(header_of({**metadata, "tokenizer.chat_template": "{{ messages }}"}))
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    again = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("  two", "a</s> b", "<think>\n"):
        assert again(text).input_ids == tokenizer(text).input_ids
    assert (again.chat_template, again.eos_token) == (tokenizer.chat_template, "</s>")


# ---- stop tokens


def stops(names: list[str], types: list[int] | None = None, **keys: int) -> list[str]:
    metadata = plain(**keys)
    metadata["tokenizer.ggml.tokens"] = names
    metadata["tokenizer.ggml.token_type"] = types or [CONTROL] * len(names)
    return [names[id_] for id_ in stop_token_ids(header_of(metadata))]


def test_stop_tokens_come_from_the_metadata_and_well_known_names() -> None:
    names = ["a", "<|im_end|>", "b", "<|endoftext|>", "c"]
    assert stops(names, eos_token_id=0, eot_token_id=2, eom_token_id=0) == ["a", "<|im_end|>", "b", "<|endoftext|>"]
    assert stops(names, [1, CONTROL, 1, USER_DEFINED, 1]) == ["<|im_end|>"]
    assert stops(["</s>", "x"], [1, 1]) == []


# ---- refusals


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"model": "bert"}, "kind 'bert'"),
        ({"model": "t5"}, "kind 't5'"),
        ({"model": "rwkv"}, "kind 'rwkv'"),
        ({"pre": "unheard-of"}, "no rule 'unheard-of'"),
        ({"pre": "default"}, "no rule 'default'"),
        ({"pre": None}, "does not state"),
        ({"remove_extra_whitespaces": True}, "remove_extra_whitespaces"),
        ({"precompiled_charsmap": [1, 2]}, "precompiled_charsmap"),
    ],
)
def test_tokenizers_that_cannot_be_reproduced_are_refused(keys: dict[str, Any], said: str) -> None:
    metadata = {name: value for name, value in plain(**keys).items() if value is not None}
    with pytest.raises(UnsupportedModel, match=said) as caught:
        tokenizer_of(header_of(metadata))
    assert "model.gguf" in str(caught.value) and "pass tokenizer=" in str(caught.value)


def _same(metadata: dict[str, Any]) -> None:
    metadata["tokenizer.ggml.tokens"][5] = metadata["tokenizer.ggml.tokens"][3]


BROKEN: dict[str, tuple[Any, str]] = {
    "a kind that is no text": (lambda m: m.update({"tokenizer.ggml.model": [1]}), "ggml.model is"),
    "a split that is no text": (lambda m: m.update({"tokenizer.ggml.pre": ["a"]}), "ggml.pre is"),
    "no tokens": (lambda m: m.pop("tokenizer.ggml.tokens"), "tokens is missing"),
    "empty": (lambda m: m.update({"tokenizer.ggml.tokens": []}), "no tokens"),
    "tokens that are no text": (lambda m: m["tokenizer.ggml.tokens"].append(3), "no str"),
    "types of another length": (lambda m: m["tokenizer.ggml.token_type"].pop(), "token types"),
    "types that are no numbers": (lambda m: m.update({"tokenizer.ggml.token_type": ["a"]}), "no int"),
    "the same token twice": (_same, "tokens 3 and 5 are the same"),
    "a token of a million letters": (lambda m: m["tokenizer.ggml.tokens"].__setitem__(9, "a" * 10**6), "1,000,000"),
    "an id beyond the tokens": (lambda m: m.update({"tokenizer.ggml.eos_token_id": 10**6}), "eos_token_id is 1000000"),
    "an id that is no number": (lambda m: m.update({"tokenizer.ggml.eot_token_id": "x"}), "eot_token_id is 'x'"),
    "a flag that is none": (lambda m: m.update({"tokenizer.ggml.add_bos_token": 3}), "bool is expected"),
    "no first token": (lambda m: m.update({"tokenizer.ggml.add_bos_token": True}), "names no such token"),
    "no merges": (lambda m: m.pop("tokenizer.ggml.merges"), "merges is missing"),
    "merges that are no text": (lambda m: m.update({"tokenizer.ggml.merges": [1]}), "no str"),
    "merges of unknown tokens": (lambda m: m["tokenizer.ggml.merges"].append("qqqq zzzz"), "cannot be built"),
    "merges of one token": (lambda m: m["tokenizer.ggml.merges"].append("qqqq"), "cannot be built"),
    "bytes that are no text": (lambda m: m["tokenizer.ggml.tokens"].__setitem__(9, "\udcff"), "valid UTF-8"),
    "merges that are no UTF-8": (lambda m: m["tokenizer.ggml.merges"].append("a \udcff"), "cannot be built"),
    "a template that is no text": (lambda m: m.update({"tokenizer.chat_template": 3}), "chat_template is 3"),
    "a template that is not there": (lambda m: m.update({"tokenizer.chat_templates": ["rag"]}), "template 'rag'"),
    "a context that is no number": (lambda m: m.update({"llama.context_length": "x"}), "context_length is 'x'"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_metadata_is_refused(name: str) -> None:
    change, said = BROKEN[name]
    metadata = plain()
    change(metadata)
    with pytest.raises(InvalidInput, match=said) as caught:
        tokenizer_of(header_of(metadata))
    assert "model.gguf" in str(caught.value) and "again" in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("change", ["missing", "short", "no numbers", "no bytes"])
def test_broken_sentencepiece_metadata_is_refused(change: str) -> None:
    metadata = metadata_of(published_pieces("always"))
    if change == "missing":
        del metadata["tokenizer.ggml.scores"]
    elif change == "short":
        metadata["tokenizer.ggml.scores"].pop()
    elif change == "no numbers":
        metadata["tokenizer.ggml.scores"][400] = "high"
    else:
        metadata["tokenizer.ggml.token_type"][:200] = [UNUSED] * 200
    with pytest.raises(InvalidInput, match="get it again"):
        tokenizer_of(header_of(metadata))
