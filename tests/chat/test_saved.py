"""Saved conversations: whole and private files, and what a reader believes of them."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from radixkv import Engine, SamplingParams, ToolResult
from radixkv.chat import saved
from radixkv.engine.runs import RunExchange
from radixkv.errors import InvalidInput
from tests.chat.worlds import CHATML, THINKING, chat_engine

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"city": {"type": "string"}}}}]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
GREEDY = SamplingParams(temperature=0)
Saved = dict[str, Any]


def changed(path: Path, change: Callable[[Saved], object], *, signed: bool = True) -> None:
    """Change a save; with a digest that fits, as a program that forges one would write it."""
    fields = json.loads(path.read_text())
    change(fields)
    if signed:
        fields["digest"] = saved.digest(fields)
    path.write_text(json.dumps(fields))


def as_version_1(fields: Saved) -> None:
    del fields["digest"], fields["namespaced"]
    fields.update(version=1, namespace="me")


@pytest.fixture(scope="module")
def saved_text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A conversation of two turns: a call and its result."""
    path = tmp_path_factory.mktemp("saved") / "chat.json"
    with chat_engine(lambda text: "Sunny." if "rain" in text else CALL) as engine:
        chat = engine.chat("Be kind.", tools=TOOLS)
        [call] = chat.send("Oslo?", GREEDY).tool_calls
        chat.tool_results([ToolResult(call.id, "no rain")], GREEDY)
        chat.save(path)
        assert engine.resume(path).history == chat.history
    return path.read_text()


@pytest.fixture
def two_turns(tmp_path: Path, saved_text: str) -> Path:
    """A file of its own for each test."""
    path = tmp_path / "chat.json"
    path.write_text(saved_text)
    return path


@pytest.fixture(scope="module")
def reader() -> Iterator[Engine]:
    with chat_engine() as engine:
        yield engine


def refused(engine: Engine, path: Path, match: str) -> None:
    with pytest.raises(InvalidInput, match=match):
        engine.resume(path)


# ---- files


def test_saving_and_resuming(tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    with chat_engine() as engine:
        chat = engine.chat("Be kind.", tools=TOOLS, namespace=("me", 1), overflow="drop_oldest")
        chat.send("one")
        chat.send("two")
        chat.save(path)
        again = engine.resume(path, namespace=("me", 1))
        assert (again.history, again.token_ids, again.turns) == (chat.history, chat.token_ids, 2)
        assert again.send("three").usage.cached_tokens == len(chat.token_ids) - 1
        chat.send("three")
        assert again.token_ids == chat.token_ids
        again.rewind(3)
        assert again.token_ids == []
    with chat_engine() as fresh:  # as in another process: nothing is cached
        resumed = fresh.resume(path, namespace="other")
        assert resumed.send("three").usage.cached_tokens == 0
        assert resumed.token_ids == chat.token_ids


def test_a_save_is_private_and_replaces_a_link(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "chat.json"
    victim.write_text("precious")
    path.symlink_to(victim)
    (tmp_path / "chat.json.partial").symlink_to(victim)
    with chat_engine() as engine:
        engine.chat().save(path)
        assert engine.resume(path).history == []
    assert victim.read_text() == "precious"
    assert stat.S_IMODE(path.lstat().st_mode) == 0o600 and not path.is_symlink()


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("wrong", [{"a": {1, 2}}, {"a": nested(150)}, {"a": nested(5000)}, {"a": 10**5000}])
def test_what_cannot_be_saved_leaves_the_save_before_it(tmp_path: Path, wrong: Saved) -> None:
    path = tmp_path / "chat.json"
    with chat_engine() as engine:
        engine.chat("first").save(path)
        with pytest.raises(InvalidInput, match="cannot be saved"):
            saved.write(_state(opening=[{"role": "user", "content": "x", **wrong}]), engine.model.name, path)
        assert engine.resume(path).history == [{"role": "system", "content": "first"}]
    assert [each.name for each in tmp_path.iterdir()] == ["chat.json"]


def _state(**fields: Any) -> saved.SessionState:
    return saved.SessionState(
        **{
            "tools": None,
            "date": "01 Jan 2026",
            "namespace": None,
            "history": "append",
            "overflow": "error",
            "turns": [],
            "token_ids": [],
            **fields,
        }
    )


# ---- namespaces and versions


def test_the_caller_names_the_namespace(tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    with chat_engine() as engine:
        chat = engine.chat("Be kind. " * 5, namespace="mine")
        chat.send("one")
        chat.save(path)
        assert "mine" not in path.read_text()
        with pytest.raises(InvalidInput, match="namespace="):
            engine.resume(path)
        with pytest.raises(InvalidInput, match="hashable"):
            engine.resume(path, namespace=["mine"])
        assert engine.resume(path, namespace="yours").send("two").usage.cached_tokens == 0
        assert engine.resume(path, namespace="mine").send("two").usage.cached_tokens > 50
        engine.chat("plain").save(path)
        assert engine.resume(path, namespace="mine").send("three").usage.cached_tokens < 10


def test_version_1_is_read_with_every_other_check(reader: Engine, two_turns: Path) -> None:
    before = json.loads(two_turns.read_text())
    changed(two_turns, as_version_1, signed=False)
    refused(reader, two_turns, "namespace=")  # the one in the file is not believed
    with chat_engine() as engine:
        assert engine.resume(two_turns, namespace="any").token_ids == before["token_ids"]
    changed(two_turns, lambda fields: fields.update(namespace=None), signed=False)
    with chat_engine() as engine:
        assert engine.resume(two_turns).token_ids == before["token_ids"]
    changed(two_turns, lambda fields: fields["token_ids"].__setitem__(-5, 7), signed=False)
    refused(reader, two_turns, "the reply of turn 2 differs")


@pytest.mark.parametrize(("shrinks", "version"), [(False, 2), (True, 2), (True, 1)])
def test_a_history_that_is_rendered_again_is_resumed(tmp_path: Path, shrinks: bool, version: int) -> None:
    path = tmp_path / "chat.json"
    said = iter(("<think>" + "so " * 100 + "</think>Yes.", "No.", "Well."))
    style = THINKING if shrinks else CHATML
    with chat_engine(lambda _: next(said), template=style) as engine, engine.chat(history="template") as chat:
        first = len(chat.send("one", GREEDY).token_ids)
        chat.send("two", GREEDY)
        assert (len(chat.token_ids) < first) == shrinks
        chat.save(path)
        if version == 1:
            changed(path, as_version_1, signed=False)
            changed(path, lambda fields: fields["turns"][0].update(end=first + 20), signed=False)
        again = engine.resume(path, namespace="me")
        assert (again.history, again.token_ids) == (chat.history, chat.token_ids)
        again.rewind()
        assert again.send("three", GREEDY).text == "Well."


# ---- damage


def test_a_changed_save_is_refused_by_its_digest(reader: Engine, two_turns: Path) -> None:
    changed(two_turns, lambda fields: fields["turns"][1]["reply"].update(content="Stormy."), signed=False)
    refused(reader, two_turns, r"chat\.json is damaged: .*digest")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", '"x"', "[" * 100_000, '{"a":' * 100_000, "\udc80", "NaN", "1" * 5000]
)
def test_other_files_are_refused(reader: Engine, tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text, errors="surrogateescape")
    refused(reader, tmp_path / "x.json", r"x\.json is no saved conversation")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        *(({"version": value}, "version") for value in (0, 3, "2", True, 2.0, None, [2])),
        ({"format": "x"}, "format"),
        *(({"model": value}, "was saved with the model") for value in ("other", None, ["fake"])),
        *(
            ({"token_ids": value}, "damaged")
            for value in ("abc", [1, "x"], None, [-5], [10_000], [2**40], {"a": 1}, [])
        ),
        *(({"opening": value}, "damaged") for value in (None, "x", [1], [{}], [{"role": ""}], [{"role": 3}])),
        *(({"turns": value}, "damaged") for value in (None, [1], [], [{}])),
        *(({"tools": value}, "damaged") for value in (5, "x", {"a": 1}, nested(99), nested(900))),
        *(({"history": value}, "history is") for value in ("auto", None, [1])),
        *(({"date": value}, "date is written as") for value in ("tomorrow", 3, "", None, ["31 Dec 2025"])),
    ],
)
def test_a_damaged_file_is_refused_by_name(reader: Engine, two_turns: Path, change: Saved, match: str) -> None:
    changed(two_turns, lambda fields: fields.update(change))
    refused(reader, two_turns, match)


@pytest.mark.parametrize("name", ["model", "tools", "date", "history", "overflow", "opening", "turns", "token_ids"])
def test_a_missing_field_is_named(reader: Engine, two_turns: Path, name: str) -> None:
    changed(two_turns, lambda fields: fields.pop(name))
    refused(reader, two_turns, f"it lacks {name}")


@pytest.mark.parametrize(
    ("at", "change"),
    [
        *((0, {"reply_ids": value}) for value in ([99999], [-1], "x", [], [7, 7], [7] * 1000)),
        *((0, {"end": value}) for value in ("x", 10**6, 0, -3, 2.0, True, 10)),
        *((1, {"end": value}) for value in (None, 10**6, 40)),
        *((0, {"reply": value}) for value in ("x", {}, {"role": "user", "content": "x"}, {"role": "assistant"})),
        *((0, {"messages": value}) for value in ([], ["x"], "x", [{"role": "user"}])),
        (0, {"messages": [{"role": "tool", "content": "x", "tool_call_id": "call_0_0"}]}),
        (1, {"messages": [{"role": "tool", "content": "x", "tool_call_id": "call_0_0"}] * 2}),
        (0, {"tool_calls": [{"id": "call_0_0", "name": "weather", "arguments": "{}"}]}),
    ],
)
def test_a_damaged_turn_is_refused_by_name(reader: Engine, two_turns: Path, at: int, change: Saved) -> None:
    changed(two_turns, lambda fields: fields["turns"][at].update(change))
    refused(reader, two_turns, r"chat\.json is damaged")


def test_a_conversation_of_another_template_is_refused_with_the_reason(two_turns: Path) -> None:
    numbered = "{% for m in messages %}{{ loop.index }} {{ m.role }} {{ m.content }}<|im_end|>{% endfor %}assistant "
    with (
        chat_engine(template=numbered) as engine,
        pytest.raises(InvalidInput, match="cannot be continued with this engine's chat template"),
    ):
        engine.resume(two_turns)


def test_a_conversation_moves_with_its_kv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, name = tmp_path / "chat.json", "f" * 24
    monkeypatch.setattr(RunExchange, "fingerprint_of", lambda *_: name)
    with chat_engine() as engine:
        chat = engine.chat("Be kind.", namespace="me")
        chat.send("one")
        chat.save(path, kv=True)
        hit, ids = len(chat.token_ids) - 1, chat.send("two").token_ids
    with chat_engine() as second:
        again = second.resume(path, namespace="you").send("two")
        assert (again.usage.cached_tokens, again.token_ids, caplog.text) == (hit, ids, "")
    name = "e" * 24
    with chat_engine() as other:
        again = other.resume(path, namespace="you").send("two")
        assert (again.usage.cached_tokens, again.token_ids) == (0, ids)
        assert caplog.text.count("its KV cannot be used") == 1
        (tmp_path / "other.json.kv").write_bytes((tmp_path / "chat.json.kv").read_bytes())
        other.chat("Be kind.").save(tmp_path / "other.json")
        assert not (tmp_path / "other.json.kv").exists()
        (tmp_path / "other.json.kv").write_text("a file of the user")
        other.chat("Be kind.").save(tmp_path / "other.json")
        assert (tmp_path / "other.json.kv").read_text() == "a file of the user"
