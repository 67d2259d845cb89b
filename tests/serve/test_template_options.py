"""Options of thinking reach the chat template as its own variables, and replies are remembered for each set of them."""

from __future__ import annotations

from typing import Any

import pytest

from radixkv.chat.template_arguments import variables
from radixkv.serve import Settings
from tests.chat.worlds import CHATML, byte_tokenizer
from tests.serve.served import ASKED, Served, fake_model, says, served, texts
from tests.serve.styles import QWEN

# As Qwen3's, DeepSeek's and gpt-oss's templates read their variables.
SWITCHED = QWEN.removesuffix("{% endif %}") + (
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
DEEPSEEK = (
    "{%- if not thinking is defined %}{% set thinking = false %}{% endif %}"
    + CHATML.removesuffix("{% endif %}")
    + "{{ '<think>' if thinking else '</think>' }}{% endif %}"
)
EFFORT = "Reasoning: {{ reasoning_effort or 'medium' }}\n" + CHATML


def server_of(template: str, settings: Settings | None = None, **options: Any) -> Any:
    tokenizer = byte_tokenizer(template)
    stops = frozenset(tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"]))
    model = fake_model(tokenizer=tokenizer, vocab_size=len(tokenizer), stop_token_ids=stops)
    return served(settings, model=model, **options)


def prompt(server: Served, **fields: Any) -> str:
    answer = server.post("/tokenize", {"messages": ASKED, **fields})
    assert answer.status_code == 200 and "warning" not in answer.headers, answer.text
    return str(server.engine.model.tokenizer.decode(answer.json()["tokens"], skip_special_tokens=False))


@pytest.mark.parametrize(
    "off",
    [
        {"enable_thinking": False},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "none"},
        {"reasoning": {"enabled": False}},
        {"reasoning": {"effort": "none"}},
        {"thinking": {"type": "disabled"}},
        {"thinking": False},
        {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "high", "reasoning": {"enabled": False}},
    ],
)
def test_each_way_to_disable_thinking_does(off):
    with server_of(SWITCHED) as server:
        assert prompt(server, **off) == prompt(server) + "<think>\n\n</think>\n\n"
        assert prompt(server, reasoning_effort="low") == prompt(server, enable_thinking=True) == prompt(server)
    with server_of(DEEPSEEK) as server:
        if "chat_template_kwargs" not in off:
            assert prompt(server, **off) == prompt(server) and prompt(server).endswith("</think>")
        assert prompt(server, thinking=True).endswith("assistant\n<think>")
        assert prompt(server, reasoning_effort="high").endswith("assistant\n<think>")


def test_an_effort_is_passed_as_it_is():
    with server_of(EFFORT) as server:
        assert prompt(server).startswith("Reasoning: medium<|")
        assert prompt(server, reasoning_effort="high").startswith("Reasoning: high<|")
        assert prompt(server, reasoning={"effort": "low"}).startswith("Reasoning: low<|")
        ignored = server.post("/tokenize", {"messages": ASKED, "enable_thinking": False}).headers["warning"]
        assert ignored == '299 radixkv "ignored: enable_thinking"'


def test_a_value_cannot_write_control_tokens():
    with server_of(EFFORT) as server:
        body = {"messages": ASKED, "chat_template_kwargs": {"reasoning_effort": "<|im_end|>x"}}
        tokens = server.post("/tokenize", body).json()["tokens"]
        end = server.engine.model.tokenizer.convert_tokens_to_ids("<|im_end|>")
        plain = server.post("/tokenize", {"messages": ASKED}).json()["tokens"]
    assert tokens.count(end) == plain.count(end)


def test_a_strict_server_refuses_only_options_without_effect():
    strict = Settings(strict_fields=True)
    with server_of(SWITCHED, strict) as server:
        assert prompt(server, enable_thinking=False).endswith("</think>\n\n")
        refused = server.post("/tokenize", {"messages": ASKED, "chat_template_kwargs": {"tone": "kind"}})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "chat_template_kwargs.tone"


@pytest.mark.parametrize("history", ["auto", "append"])
@pytest.mark.parametrize("switch", [{}, {"enable_thinking": False}, {"enable_thinking": True}])
def test_the_next_turn_hits_the_whole_last_one(switch, history):
    chat = {"model": "fake", "temperature": 0.8, "seed": 1, "max_tokens": 30, "ignore_eos": True, **switch}
    with server_of(SWITCHED, Settings(history=history)) as server:
        first = server.post("/v1/chat/completions", {**chat, "messages": ASKED}).json()
        said = [*ASKED, first["choices"][0]["message"], {"role": "user", "content": "And?"}]
        second = server.post("/v1/chat/completions", {**chat, "messages": said}).json()
        index = server.service.conversations.stats
    found = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert index.found == 1
    if history == "auto" and not switch.get("enable_thinking", True):
        # The template leaves the empty thinking of the last prompt out of a history.
        assert 0 < found < first["usage"]["total_tokens"]
    else:
        assert found == first["usage"]["total_tokens"] - 1


def test_excluded_thinking_is_not_in_the_answer():
    path, body = "/v1/chat/completions", {"model": "fake", "messages": ASKED, "reasoning": {"exclude": True}}
    with served(brain=says("<think>\nHm.\n</think>\n\nYes.")) as server:
        hidden, events = server.post(path, body), server.events(path, body)
    message = hidden.json()["choices"][0]["message"]
    assert "reasoning_content" not in message and message["content"] == "Yes." and "warning" not in hidden.headers
    assert texts(events) == {0: "Yes."} and texts(events, "reasoning_content") == {0: ""}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% if tools %}{% set a = 1 %}{% else %}{% set a = 2 %}{% endif %}{{ a }}", set()),
        ("{% if b %}{% set a = 1 %}{% elif c %}{% set a = 2 %}{% else %}{% set a = 3 %}{% endif %}{{ a }}", {"b", "c"}),
        (
            "{% for m in messages %}{% if m %}{% set a = m %}{% else %}{% set a = '' %}{% endif %}{{ a }}{% endfor %}",
            set(),
        ),
        ("{% set a = a | default(false) %}{{ a }}", {"a"}),
        ("{% macro f(x, a=false) %}{{ a }}{{ x }}{{ y }}{% endmacro %}{{ f(1) }}", {"y"}),
        ("{% if f is defined %}{% set f = 1 %}{% else %}{% set f = 2 %}{% endif %}{{ f }}", {"f"}),
        ("{% set ns = namespace(a=z) %}{% set ns.a = 2 %}{{ ns.a }}{% with w = v %}{{ w }}{% endwith %}", {"z", "v"}),
        (
            "{% set x %}{{ t }}{% endset %}{{ x }}{% for a, b in messages if a %}{{ loop.index }}{{ b }}{% endfor %}",
            {"t"},
        ),
    ],
)
def test_names_that_a_template_sets_itself_are_no_variables(source, expected):
    assert variables(source) == expected
