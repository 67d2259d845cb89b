"""The demo, played once on the bundled model."""

from __future__ import annotations

import dataclasses
import re
import time

import pytest
import torch

from radixkv import Reply, Usage
from radixkv.cli import demo, demo_script, main


@pytest.fixture(scope="module")
def played():
    """(exit status, printed text, seconds) of one demo, not on a terminal."""
    torch.set_num_threads(1)
    from contextlib import redirect_stdout
    from io import StringIO

    out, began = StringIO(), time.perf_counter()
    with redirect_stdout(out):
        status = main(["demo"])
    return status, out.getvalue(), time.perf_counter() - began


def test_it_succeeds_with_equal_answers_all_of_them_right(played):
    status, out, _ = played
    assert status == 0
    assert re.search(r"All \d+ replies \(\d+ tokens\) are the same without the cache, token by token\.", out)
    lines = len(demo_script.CHAT) + 1 + sum(len(customer.lines) for customer in demo_script.CUSTOMERS)
    assert f"{lines} of {lines} answers are right." in out


def test_it_shows_what_was_said_and_called(played):
    _, out, _ = played
    assert "What do you know about me?" in out
    assert "Your name is Nora. You live in Oslo." in out
    assert "place_order(item='camera', quantity=3)" in out


def test_it_is_plain_text_where_no_terminal_is(played):
    assert "\x1b" not in played[1]


def test_it_takes_less_than_a_minute(played):
    assert played[2] < 60


def test_the_table_adds_up(played):
    _, out, _ = played
    hit_rate = float(re.search(r"hit rate: found in the cache\D*([\d.]+)%", out)[1])
    assert 80 < hit_rate < 100
    computed, less, all_of_it = re.search(r"tokens computed.*?([\d,]+) \(saved (\d+)%\).*?([\d,]+)", out).groups()
    share = int(computed.replace(",", "")) / int(all_of_it.replace(",", ""))
    assert int(less) == pytest.approx(100 * (1 - share), abs=1)
    pooled = float(re.search(r"KV memory of the eight agents\D*([\d.]+) MB", out)[1])
    alone = float(re.search(r"nothing shared\D*([\d.]+) MB", out)[1])
    slabs = float(re.search(r"one slab of 4,096 tokens each\D*([\d.]+) MB", out)[1])
    assert 3 * pooled < alone < slabs


def said(*tokens: int) -> Reply:
    return Reply("", (), Usage(1, 0, 1, len(tokens), 0.0, 0.0), "stop", tokens)


def test_replies_differ_by_any_token_or_by_their_number():
    assert demo.differences([said(1, 2), said(3)], [said(1, 2), said(3)]) == []
    assert demo.differences([said(1, 2), said(3)], [said(1, 2), said(4)]) == [1]
    assert demo.differences([said(1, 2)], [said(1, 2, 3)]) == [0]
    assert demo.differences([said(1)], [said(1), said(2)]) == [1]


@pytest.mark.long
def test_different_answers_are_a_loud_failure(monkeypatch, capsys):
    """The uncached run is made to end one of its replies a token early."""
    honest = demo_script.play

    def dishonest(*args, **options):
        result = honest(*args, **options)
        first, *rest = result.chat
        cut = dataclasses.replace(first.replies[0], token_ids=first.replies[0].token_ids[:-1])
        return dataclasses.replace(result, chat=(dataclasses.replace(first, replies=(cut,)), *rest))

    monkeypatch.setattr(demo_script, "play", dishonest)
    monkeypatch.setattr(demo_script, "CUSTOMERS", demo_script.CUSTOMERS[:1])
    assert main(["demo"]) == 1
    assert "REPLIES DIFFER WITH AND WITHOUT THE CACHE: replies [0]." in capsys.readouterr().out


def test_tools_say_what_is_wrong_with_a_call():
    assert demo_script.use_tool("calculator", {"operation": "multiply", "a": 17, "b": 24}) == {"result": 408}
    assert "error" in demo_script.use_tool("fly", {})
    assert "error" in demo_script.use_tool("get_weather", {"city": "Atlantis"})
    assert "error" in demo_script.use_tool("check_stock", {"thing": "lamp"})
