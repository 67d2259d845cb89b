"""The demo, played once on the bundled model."""

from __future__ import annotations

import re
import time
from importlib.machinery import ModuleSpec

import pytest
import torch

from radixkv import Engine, Reply, SamplingParams, Usage
from radixkv.cli import chat, demo, demo_script, main


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


@pytest.mark.long
def test_it_succeeds_with_equal_answers_all_of_them_right(played):
    status, out, _ = played
    assert status == 0
    assert re.search(r"All \d+ replies \(\d+ tokens\) are the same without the cache, token by token\.", out)
    lines = len(demo_script.CHAT) + 1 + sum(map(len, demo_script.CUSTOMERS.values()))
    assert f"{lines} of {lines} answers are right." in out


@pytest.mark.long
def test_it_shows_what_was_said_and_called(played):
    _, out, _ = played
    assert "What do you know about me?" in out
    assert "Your name is Nora. You live in Oslo." in out
    assert "place_order(camera, 3)" in out


@pytest.mark.long
def test_the_table_adds_up(played):
    _, out, _ = played
    hit_rate = float(re.search(r"hit rate\s+([\d.]+)%", out)[1])
    assert 80 < hit_rate < 100
    computed, all_of_it, less = re.search(r"tokens computed\s+([\d,]+)\s+([\d,]+)\s+(\d+)% saved", out).groups()
    share = int(computed.replace(",", "")) / int(all_of_it.replace(",", ""))
    assert int(less) == pytest.approx(100 * (1 - share), abs=1)
    pooled, alone = map(float, re.search(r"agents: KV memory\s+([\d.]+) MiB\s+([\d.]+) MiB", out).groups())
    slabs = float(re.search(r"whole contexts\s+[\d.]+ MiB\s+([\d.]+) MiB", out)[1])
    assert 3 * pooled < alone < slabs


@pytest.mark.long
def test_each_row_of_the_table_shows_a_gain_or_the_reason_why_there_is_none(played):
    rows = played[1].partition("Savings by sharing")[2].partition("First tokens")[0].splitlines()[4:]
    named = [row for row in rows if row[:20].strip()]  # the others continue a cell
    assert len(named) == 9
    assert all(re.search(r"\d tokens found|\d% saved|\dx (faster|less)|none: \w+", row) for row in named)


def said(*tokens: int) -> Reply:
    return Reply("", (), Usage(1, 0, 1, len(tokens), 0.0, 0.0), "stop", tokens)


def test_different_answers_are_a_loud_failure(monkeypatch, capsys):
    """The uncached run ends one of its replies a token early."""

    def dishonest(part, console, *, prefix_cache):
        replies = [said(1, 2), said(1, 2) if prefix_cache else said(1)]
        lines = [demo.Said("you", demo_script.GREETING, [reply]) for reply in replies]
        return demo.Part(lines, 1.0, stats)

    with Engine.load("tiny", num_blocks=16) as engine:
        engine.generate(["Hello"], SamplingParams(max_tokens=2))
        stats = engine.stats()
    monkeypatch.setattr(demo, "_play", dishonest)
    assert main(["demo"]) == 1
    assert "2 OF 4 REPLIES DIFFER WITH AND WITHOUT THE CACHE: replies [1, 3]." in capsys.readouterr().out


def test_tools_say_what_is_wrong_with_a_call():
    assert demo_script.use_tool("calculator", {"operation": "multiply", "a": 17, "b": 24}) == {"result": 408}
    assert "error" in demo_script.use_tool("fly", {})
    assert "error" in demo_script.use_tool("get_weather", {"city": "Atlantis"})
    assert "error" in demo_script.use_tool("check_stock", {"thing": "lamp"})


def test_an_answer_is_right_as_a_whole():
    line = demo_script.Line("?", "Yes.")
    usage = Usage(1, 0, 1, 1, 0.0, 0.0)
    answers = [demo.Said("you", line, [Reply(text, (), usage, "stop", (1,))]) for text in ("Yes.", "Yes", "No.")]
    assert [each.right for each in answers] == [True, False, False]


def test_the_installed_model_is_a_file_of_a_package(monkeypatch, tmp_path):
    file = tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf"
    monkeypatch.setattr(chat, "find_spec", lambda name: ModuleSpec(name, None, origin=str(tmp_path / "__init__.py")))
    assert chat.installed_model() is None  # the package is there, but not its file
    file.touch()
    assert chat.installed_model() == file
    monkeypatch.setattr(chat, "find_spec", lambda name: None)
    assert chat.installed_model() is None
