"""Fill in the middle: the ids of prompts for known vocabularies and GGUF keys, /infill, and `suffix` of completions."""

from __future__ import annotations

import copy
import json
from functools import cache
from typing import Any

import pytest
from tokenizers import AddedToken, processors

from radixkv.errors import InvalidInput
from radixkv.models.gguf_tokenizer import tokenizer_of
from radixkv.sampling.params import SamplingParams
from radixkv.serve import Settings
from radixkv.serve.fim import FillInMiddle
from tests.gguf.tokenizer_files import header_of, metadata_of, published_bytes
from tests.serve.served import fake_model, served, tokenizer
from tests.serve.test_openapi import body_of, fits, responses

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>", "<|fim_pad|>")
PRE, SUF, MID, REP, SEP, PAD = range(1536, 1542)
ASKED: dict[str, Any] = {"input_prefix": "def add(a, b):\n", "prompt": "    return ", "input_suffix": "\n\nadd(1, 2)\n"}
FIELDS = ["content", "timings/prompt_n", "timings/prompt_ms", "timings/predicted_n", "tokens_cached", "x"]
LIMITS = {"t_max_prompt_ms": 500, "t_max_predict_ms": 250}
CHUNK = {"text": "one = 1\n", "time": 12.5, "filename": "a.py"}
SENT_BY_VIM = {**ASKED, "input_extra": [CHUNK], "n_predict": 4, "stop": [], "n_indent": 4, "top_k": 40, "top_p": 0.9}
SENT_BY_VIM |= {"stream": False, "samplers": ["top_k", "infill"], "cache_prompt": True, **LIMITS}
SENT_BY_VIM |= {"response_fields": FIELDS}


@cache
def with_tokens(*texts: str, special: bool = True) -> Any:
    """Return the bundled tokenizer with these added tokens, from id 1536 on."""
    made = copy.deepcopy(tokenizer())
    made.add_tokens([AddedToken(text, normalized=False, special=special) for text in texts], special_tokens=special)
    return made


def coder(**changes: Any) -> Any:
    return fake_model(tokenizer=with_tokens(*QWEN, special=False), vocab_size=1544, **changes)


def text(words: str) -> list[int]:
    return list(tokenizer().encode(words, add_special_tokens=False))


PSM = [PRE, *text("one"), SUF, *text("two"), MID]


def ids(made: Any, *parts: Any, order: str = "psm") -> list[int]:
    return FillInMiddle(made, order).ids(*parts).tolist()


def middle(*replies: int) -> Any:
    """Return a brain that replies with these tokens to every prompt that ends with the middle token, then stops."""

    def brain(tokens: list[int]) -> int:
        at = len(tokens) - 1 - tokens.index(MID) if MID in tokens else len(replies)
        return replies[at] if at < len(replies) else 2

    return brain


def test_the_ids_of_a_prompt_in_both_orders() -> None:
    made = with_tokens(*QWEN, special=False)
    assert ids(made, "one", "two") == PSM
    assert ids(made, "one", "two", order="spm") == [SUF, *text("two"), PRE, *text("one"), MID]
    assert ids(made, "", "") == [PRE, SUF, MID]
    files = [REP, *text("myproject\n"), SEP, *text("a.py\nA"), SEP, *text("b.py\nB"), SEP, *text("filename\n")]
    assert ids(made, "one", "two", [("a.py", "A"), ("b.py", "B")]) == [*files, *PSM]


def test_texts_have_no_control_tokens() -> None:
    made = with_tokens(*QWEN, special=False)
    found = ids(made, "<|fim_suffix|>x<|im_end|>", "<|fim_middle|>", [("<|fim_pad|>", "<|file_sep|>")])
    added = [token for token in found if token in made.added_tokens_decoder]
    assert added == [REP, SEP, SEP, PRE, SUF, MID]
    assert "<|fim_suffix|>x<|im_end|>" in made.decode(found)


@pytest.mark.parametrize(
    "texts",
    [
        ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
        ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),
    ],
)
def test_known_texts_of_tokens(texts: tuple[str, ...]) -> None:
    found = ids(with_tokens(*texts), "one", "two", [("a", "A")])
    assert found == [*text("\n\n--- snippet ---\n\nA"), *PSM]


@pytest.mark.parametrize("made", [tokenizer(), with_tokens("<fim_prefix>", "<fim_suffix>"), None])
def test_a_vocabulary_without_the_tokens(made: Any) -> None:
    fim = FillInMiddle(made, "psm")
    assert not fim.available
    with pytest.raises(InvalidInput, match="its vocabulary has no tokens for that"):
        fim.ids("one", "two")


@pytest.mark.parametrize("names", [("fim_pre", "fim_suf", "fim_mid"), ("prefix", "suffix", "middle")])
def test_keys_of_a_file_name_its_tokens(names: tuple[str, ...]) -> None:
    made = published_bytes("gpt-2")
    made.add_special_tokens([AddedToken(each, normalized=False, special=True) for each in ("{p}", "{s}", "{m}")])
    tokens = pre, suf, mid = [made.token_to_id(each) for each in ("{p}", "{s}", "{m}")]
    keys = dict(zip((f"{each}_token_id" for each in names), tokens, strict=True))
    metadata = metadata_of(made, pre="gpt-2", add_bos_token=False, **keys, fim_pad_token_id=made.token_to_id("a"))
    found = tokenizer_of(header_of(metadata))
    assert found is not None and found.fim_token_ids == dict(zip(("pre", "suf", "mid"), tokens, strict=True))
    prefix, suffix = [*made.encode("{").ids, *made.encode("s}a").ids], made.encode("b").ids
    assert ids(found, "{s}a", "b") == [pre, *prefix, suf, *suffix, mid]
    fim = FillInMiddle(found, "psm")
    assert set(fim.with_stops(SamplingParams(stop_token_ids=[5])).stop_token_ids) == {5, *tokens}
    assert fim.with_stops(SamplingParams(ignore_eos=True)).stop_token_ids == ()


def test_infill_as_llama_vim_asks() -> None:
    with served(model=coder(), brain=middle(*text("a + b"), PAD, 40)) as server:
        first, second = (server.post("/infill", SENT_BY_VIM) for _ in range(2))
        assert first.headers["warning"].endswith('cache_prompt, t_max_prompt_ms, t_max_predict_ms"')
    prefix = ASKED["input_prefix"] + ASKED["prompt"]
    prompt = ids(with_tokens(*QWEN), prefix, ASKED["input_suffix"], [("a.py", "one = 1\n")])
    assert first.json()["content"] == "a + b" and first.json().keys() == set(SENT_BY_VIM["response_fields"]) - {"x"}
    assert (first.json()["tokens_cached"], first.json()["timings/prompt_n"]) == (0, len(prompt))
    assert (second.json()["tokens_cached"], second.json()["timings/prompt_n"]) == (len(prompt) - 1, 1)


@pytest.mark.parametrize(
    ("fields", "content", "ending", "count"),
    [
        ({}, "a + b", ("eos", ""), 4),
        ({"n_predict": -1, "stop": [" +"]}, "a", ("word", " +"), 2),
        ({"n_predict": 2}, "a +", ("limit", ""), 2),
        ({"n_predict": 0}, "", ("limit", ""), 0),
    ],
)
def test_a_stream_has_the_same_reply(fields: Any, content: str, ending: Any, count: int) -> None:
    with served(model=coder(), brain=middle(*text("a + b"), SEP)) as server:
        whole = server.post("/infill", {**ASKED, **fields, "temperature": 0}).json()
        sent = server.post("/infill", {**ASKED, **fields, "temperature": 0, "stream": True})
    events = [json.loads(line.removeprefix("data: ")) for line in sent.text.splitlines() if line]
    assert "".join(event["content"] for event in events) == whole["content"] == content
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    assert [(each["stop_type"], each["stopping_word"]) for each in (whole, events[-1])] == [ending] * 2
    assert events[-1]["tokens_cached"] == whole["tokens_evaluated"] - 1
    assert whole["tokens_predicted"] == count == events[-1]["timings"]["predicted_n"] and not whole["truncated"]
    documented = responses("/infill")["200"]["content"]
    assert fits(documented["application/json"]["schema"], whole)
    assert fits(body_of("/infill"), SENT_BY_VIM)


def test_suffix_of_completions() -> None:
    body = {"model": "fake", "prompt": ["one", "three"], "suffix": "two", "temperature": 0, "max_tokens": 8}
    with served(Settings(fim_order="spm"), model=coder(), brain=middle(*text("and"), PRE)) as server:
        answer = server.post("/v1/completions", body).json()
        assert [each["text"] for each in answer["choices"]] == ["and", "and"]
        assert answer["usage"]["prompt_tokens"] == sum(len(text(each)) for each in ("one", "three", "two", "two")) + 6
        again = server.post("/v1/completions", {**body, "prompt": "one more"}).json()
        shared = [SUF, *text("two"), PRE, *text("one")]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == len(shared)
        for wrong in ({"echo": True}, {"prompt": [1, 2]}, {"prompt": [[1], [2]]}, {"suffix": 3}):
            refused = server.post("/v1/completions", {**body, **wrong})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "suffix")


def test_a_model_without_the_tokens_refuses_both_with_the_reason() -> None:
    with served() as server:
        for path, body in (("/infill", ASKED), ("/v1/completions", {"model": "fake", "prompt": "a", "suffix": "b"})):
            refused = server.post(path, body)
            assert refused.status_code == 400
            assert "this model cannot fill in the middle" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"input_suffix": None}, "input_suffix", "missing_required_parameter"),
        ({"n_predict": -3}, "n_predict", "invalid_value"),
        ({"model": "other"}, "model", "model_not_found"),
        ({"input_suffix": "a b " * 60}, "input_prefix", "context_length_exceeded"),
        ({"prompt": "a b " * 60_000}, "input_prefix", "context_length_exceeded"),
    ],
)
def test_wrong_bodies_and_long_prompts_are_refused(change: Any, param: str, code: str) -> None:
    with served(model=coder(max_length=64)) as server:
        refused = server.post("/infill", {**ASKED, **change})
        assert refused.status_code == (404 if param == "model" else 400)
        assert (refused.json()["error"]["param"], refused.json()["error"]["code"]) == (param, code)


def test_a_prompt_begins_with_the_token_that_the_tokenizer_puts_first() -> None:
    made = copy.deepcopy(with_tokens(*QWEN))
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|>:0 $A:0 <|im_end|>:0", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)]
    )
    assert made.encode("") == [1, 2]
    files = [REP, *text("myproject\n"), SEP, *text("a\nA"), SEP, *text("filename\n")]
    assert ids(made, "one", "two", [("a", "A")]) == [1, *files, *PSM]
