"""Chat templates: the texts of transformers, and an end to each hostile template."""

from __future__ import annotations

import ast
import datetime
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers.utils import chat_template_utils

from radixkv.chat.template_arguments import variables
from radixkv.engine import template_renderer
from radixkv.engine.chat_prompts import rendered
from radixkv.errors import ChatError
from tests.chat.worlds import byte_tokenizer

ROOT = Path(__file__).parents[2]
DATE = "31 Dec 2025"
HI = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"é": {"type": "<string>"}}}}]
CALL = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": {"at": 'a"<'}}}
RESULT = {"role": "tool", "tool_call_id": "call00001", "name": "look", "content": "seen"}
DIALOGUES: dict[str, list[dict[str, Any]]] = {
    "one": HI,
    "turns": [{"role": "system", "content": "Be <brief>."}, *HI, {"role": "assistant", "content": " It is.\n"}, *HI],
    "tools": [*HI, {"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT, *HI],
    "thinks": [*HI, {"role": "assistant", "content": "<think>\nx\n</think>\n\nYes", "thinking": "so"}, *HI],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "Hi"}, {"image": np.zeros(2)}]}],
}
SYNTAX = [
    "{% for m in messages recursive %}{{ loop.index }}{{ loop.length }}{{ loop([1, 2]) if m is mapping }}{% endfor %}",
    "{% for a, b in {'x': 1, 'y': [2]}.items() if b %}{{ loop.previtem }}{{ a ~ b ~ none }}{% else %}-{% endfor %}",
    "{% for m in messages if m.role == 'user' %}{{ loop.last }}{% if loop.index > 1 %}{% break %}{% endif %}"
    "{% endfor %}",
    "{% macro each(x, y='d') %}{{ x + y }}{{ caller() if caller }}{{ varargs }}{% endmacro %}"
    "{% call each('a', 'b', 3) %}!{% endcall %}{{ each('z') }}",
    "{% set ns = namespace(text='', found=false) %}{% for m in messages %}{% set ns.text = ns.text ~ loop.index %}"
    "{% endfor %}{{ ns.text }}{% set a, b = (1, messages|length) %}{{ a * b }}{{ 'x' * 3 }}{{ 2 ** 8 }}{{ [1] + [b] }}",
    "{{ messages | map(attribute='role') | unique | join(', ') }}{{ '%s-%5.2f' % ('a', 1.5) }}",
    "{{ 'a{}'.format(1) }}{{ {'b': 1, 'a': [true, none, 'é<']} | tojson }}{{ 'abc' | replace('b', 'x') }}",
    "{{ tools | tojson(indent=2) }}{{ dict(a=1) }}{{ messages[-1].content[::-1] }}{{ 'a-b'.split('-', 1) }}",
    "{{ ', '.join(['a', 'b']) }}{{ '7'.zfill(3) }}{{ [3, 1]|sum }}{{ bos_token }}|{{ undefined_one }}",
    "{% set x %}\n  in {{ 1 }}\n{% endset %}{% filter upper %}{{ x }}{% endfilter %}{{ x | indent(2) }}",
    "{% generation %}{% set a = 1 %}in{% endgeneration %}{{ a is defined }}{{ messages | string }}{{ documents }}",
    "{% block a %}b{{ self.c() }}{% endblock %}{% block c %}c{% endblock %}{{ namespace(a=[1]) }}{{ tools is none }}",
    "{{ messages | batch(2) | list }}{{ messages | groupby('role') }}{{ range(3) | slice(2) | list }}",
    "{{ ().__class__ }}{{ messages.append(1) }}",
    "{{ raise_exception('no') }}",
    "{{ 1 / 0 }}",
    "{% include 'x' %}",
    "{% broken",
]


def templates_of_the_tests() -> list[str]:
    """Texts in the source of all tests that look like templates, and the one of the tiny model."""
    found = {(ROOT / "radixkv" / "assets" / "tiny" / "chat_template.jinja").read_text(): None}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            text = node.value if isinstance(node, ast.Constant) and path != Path(__file__) else ""
            if isinstance(text, str) and ("{%" in text or "{{" in text) and len(text) > 12:
                found[text] = None
    return list(found)


def outcome(render: Any) -> str | None:
    try:
        return str(render())
    except Exception:
        return None


def compared(template: str, **values: Any) -> int:
    """Render dialogues with both renderers, and return the number of those that the template does not refuse."""
    tokenizer, texts = byte_tokenizer(template), []
    for messages in DIALOGUES.values():
        for tools, reply in ((None, True), (TOOLS, False)):
            told = {"tools": tools, "add_generation_prompt": reply, "tokenize": False, "date_string": DATE, **values}
            expected = outcome(lambda: tokenizer.apply_chat_template(messages, **told))  # noqa: B023
            texts.append(outcome(lambda: rendered(tokenizer, messages, DATE, tools, reply=reply, arguments=values)))  # noqa: B023
            assert texts[-1] == expected, (template, messages)
    return sum(text is not None for text in texts)


@pytest.mark.long
def test_texts_equal_those_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    day = datetime.datetime(2025, 12, 31)
    monkeypatch.setattr(chat_template_utils, "datetime", SimpleNamespace(now=lambda: day))
    found = templates_of_the_tests()
    counts = [compared(template) for template in found]
    assert len(found) > 60 and sum(counts) > 400
    assert [compared(template, enable_thinking=False) > 0 for template in SYNTAX] == [True] * 13 + [False] * 5


BIG = "{% set x = 'x' * 100000 %}"
DOUBLED = "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = DOUBLE %}{% endfor %}"
HOSTILE = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops in a filter": "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "loops of filters": "{% for a in range(99999) %}{{ range(99999) | map('string') | list | length }}{% endfor %}",
    "recursive loops": "{% for a in range(2) recursive %}{{ loop(range(9)) if loop.depth < 99 }}{% endfor %}",
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "blocks": "{% block b %}{% for i in range(9) %}{{ self.b() }}{% endfor %}{% endblock %}",
    "a caller": "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}"
    + "{% call m() %}" * 40
    + "x"
    + "{% endcall %}" * 40,
    "searches": BIG + "{% for a in range(99999) %}{% if ('y' ~ x) in x %}{% endif %}{% endfor %}",
    "output": BIG + "{% for a in range(99999) %}{{ x }}{% endfor %}",
    "a set block": BIG + "{% set y %}{% for a in range(99999) %}{{ x }}{% endfor %}{% endset %}",
    "joined texts": "{% set ns = namespace(x='x') %}{% for a in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "sums": DOUBLED.replace("DOUBLE", "ns.x + ns.x"),
    "lists": DOUBLED.replace("DOUBLE", "[ns.x, ns.x]") + "{{ ns.x }}",
    "dicts": DOUBLED.replace("DOUBLE", "dict(a=ns.x, b=ns.x)") + "{{ ns.x | tojson }}",
    "compared lists": DOUBLED.replace("DOUBLE", "[ns.x, ns.x]") + "{{ ns.x == ns.x }}",
    "products": "{{ 'x' * 10 ** 10 }}",
    "repeated lists": "{{ [0] * 10000000000 }}",
    "powers": "{{ 9 ** (9 ** 9) }}",
    "squares": "{% set ns = namespace(x=9) %}{% for a in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "wide fields": "{{ '%9999999999d' % 1 }}",
    "fields as wide as told": "{{ '{:>{}}'.format(1, 9999999999) }}",
    "a field many times": BIG + "{{ ('{0}' * 1000).format(x) }}",
    "a named field many times": BIG + "{{ ('%(a)s' * 1000) % {'a': x} }}",
    "long fields": "{{ ('{' ~ ':' * 900000).format(1) }}",
    "rounded numbers": "{{ 5 | round(-999999999) }}{{ 1.5 | round(999999999, 'ceil') }}",
    "a wide method": "{{ 'x'.ljust(9999999999) }}",
    "a wide filter": "{{ 'x' | center(9999999999) }}",
    "wide JSON": "{{ [1] | tojson(indent=9999999999) }}",
    "a refused method": "{{ 'x'.expandtabs(9) }}",
    "replaced texts": BIG + "{{ x.replace('x', x) }}",
    "texts that join": BIG + "{{ x.join(range(99999) | map('string')) }}",
    "a filter that joins": BIG + "{{ range(99999) | map('string') | join(x) }}",
    "batches": "{{ [1] | batch(9999999999, 0) | list }}",
    "sums of lists": "{{ range(99999) | map('string') | map('list') | sum(start=[]) }}",
    "a long source": "{# " + "x" * 200_000 + " #}",
    "a deep source": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "a dict's method": "{{ dict.update(messages[0], {'role': 'x'}) }}",
}


SLOW = {"sums", "macros", "loops of filters", "a caller", "recursive loops", "nested loops", "dicts", "lists"}
SLOW |= {"sums of lists", "texts that join", "a filter that joins", "loops in a filter"}  # they take a second each


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[pytest.mark.long] if each in SLOW else []) for each in HOSTILE]
)
def test_a_hostile_template_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_renderer, "_SECONDS", (1.0, 0))
    start = time.thread_time()
    with pytest.raises(ChatError, match="chat template"):
        rendered(byte_tokenizer(HOSTILE[name]), HI, DATE, reply=True)
    assert time.thread_time() - start < 5
    assert variables(HOSTILE[name]) is not None


def test_limits_grow_with_the_conversation() -> None:
    tokenizer = byte_tokenizer("{% for m in messages %}{{ m.content | trim ~ '\\n' }}{% endfor %}")
    messages = [{"role": "user", "content": "x" * 1000}] * 30_000
    assert len(rendered(tokenizer, messages, DATE, reply=True)) == 30_000 * 1001
    assert template_renderer.ENVIRONMENT.filters.keys() >= {"trim", "tojson", "selectattr"}
