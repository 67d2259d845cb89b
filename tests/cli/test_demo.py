"""The demo, played once on the bundled model."""

from __future__ import annotations

import dataclasses
import re
import time
from importlib.machinery import ModuleSpec

import pytest
import torch

from radixkv import Engine, Reply, SamplingParams, Usage
from radixkv.cli import demo, demo_agents, demo_chat, main


@pytest.fixture(scope="module")
def played():
    """(exit status, printed text, seconds) of one demo, not on a terminal."""
    torch.set_num_threads(1)
    from contextlib import redirect_stdout
    from io import StringIO

    out, began = StringIO(), time.perf_counter()
    with redirect_stdout(out):
        status = main(["demo", "--model", "tiny"])
    return status, out.getvalue(), time.perf_counter() - began


@pytest.mark.long
def test_it_succeeds_with_equal_answers_all_of_them_right(played):
    status, out, _ = played
    assert status == 0
    assert re.search(r"All \d+ replies \(\d+ tokens\) are the same without the cache, token by token\.", out)
    lines = len(demo_chat.BUNDLED_CHAT.lines) + 1 + sum(len(customer.lines) for customer in demo_agents.CUSTOMERS)
    assert f"{lines} of {lines} answers are right." in out


@pytest.mark.long
def test_it_shows_what_was_said_and_called(played):
    _, out, _ = played
    assert "What do you know about me?" in out
    assert "Your name is Nora. You live in Oslo." in out
    assert "place_order(item='camera', quantity=3)" in out


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


def test_replies_differ_by_any_token_or_by_their_number():
    assert demo.differences([said(1, 2), said(3)], [said(1, 2), said(3)]) == []
    assert demo.differences([said(1, 2), said(3)], [said(1, 2), said(4)]) == [1]
    assert demo.differences([said(1, 2)], [said(1, 2, 3)]) == [0]
    assert demo.differences([said(1)], [said(1), said(2)]) == [1]


@pytest.mark.long
def test_different_answers_are_a_loud_failure(monkeypatch, capsys):
    """The uncached run is made to end one of its replies a token early."""
    honest = demo.play

    def dishonest(*args, prefix_cache):
        result = honest(*args, prefix_cache=prefix_cache)
        if prefix_cache:
            return result
        first, *rest = result.chat.said
        cut = dataclasses.replace(first.replies[0], token_ids=first.replies[0].token_ids[:-1])
        chat = dataclasses.replace(result.chat, said=(dataclasses.replace(first, replies=(cut,)), *rest))
        return dataclasses.replace(result, chat=chat)

    monkeypatch.setattr(demo, "play", dishonest)
    monkeypatch.setattr(demo_agents, "CUSTOMERS", demo_agents.CUSTOMERS[:1])
    assert main(["demo", "--model", "tiny"]) == 1
    assert "REPLIES DIFFER WITH AND WITHOUT THE CACHE: replies [0]." in capsys.readouterr().out


def test_tools_say_what_is_wrong_with_a_call():
    assert demo_agents.use_tool("calculator", {"operation": "multiply", "a": 17, "b": 24}) == {"result": 408}
    assert "error" in demo_agents.use_tool("fly", {})
    assert "error" in demo_agents.use_tool("get_weather", {"city": "Atlantis"})
    assert "error" in demo_agents.use_tool("check_stock", {"thing": "lamp"})


def answered(line: demo_chat.Line, text: str) -> demo_chat.Said:
    return demo_chat.Said("you", line, (Reply(text, (), Usage(1, 0, 1, 1, 0.0, 0.0), "stop", (1,)),))


def test_an_answer_is_checked_as_a_whole_in_part_or_not():
    whole, part, free = demo_chat.Line("?", "Yes."), demo_chat.Line("?", part="Euro"), demo_chat.Line("?")
    assert [answered(whole, text).right for text in ("Yes.", "Yes", "No.")] == [True, False, False]
    assert [answered(part, text).right for text in ("The euro.", "Yen.")] == [True, False]
    assert answered(free, "Maybe.").right
    assert [line.is_checked for line in (whole, part, free)] == [True, True, False]


def test_the_conversation_has_branches_and_an_edit_where_the_chat_has():
    """The bundled model plays the lines of a real one; its answers do not matter here."""
    greedy = SamplingParams(temperature=0, max_tokens=4)
    with Engine.load("tiny", num_blocks=128, dtype="float32") as engine:
        said = demo_chat.play(engine, demo_chat.REAL_CHAT, greedy)
    assert [each.speaker for each in said] == ["you"] * 3 + [f"fork {n}" for n in (1, 2, 3, 4)] * 2 + ["edit"] * 2
    chat = demo_chat.REAL_CHAT
    assert {each.line for each in said} == {
        *chat.lines,
        *(line for lines in chat.branches for line in lines),
        *chat.edited,
    }
    prompts = [each.replies[0].usage.prompt_tokens for each in said]
    assert prompts[0] < prompts[1] < prompts[2] < min(prompts[3:7]) < max(prompts[3:7]) < min(prompts[7:11])
    assert prompts[11] < prompts[1]  # the edit begins again


def test_the_model_of_the_conversation_is_the_given_one_the_installed_one_or_tiny(monkeypatch, tmp_path):
    file = tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf"
    monkeypatch.setattr(
        demo_chat, "find_spec", lambda name: ModuleSpec(name, None, origin=str(tmp_path / "__init__.py"))
    )
    assert demo_chat.chosen(None) == "tiny"  # the package is there, but not its file
    file.touch()
    assert demo_chat.chosen(None) == str(file)
    assert demo_chat.chosen("tiny") == "tiny"
    monkeypatch.setattr(demo_chat, "find_spec", lambda name: None)
    assert demo_chat.chosen(None) == "tiny"
