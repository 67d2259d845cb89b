"""Several models behind one server, over fake engines."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from radixkv import Engine
from radixkv.cli.main import main
from radixkv.config import EngineConfig
from radixkv.errors import InvalidInput
from radixkv.serve import Settings
from radixkv.serve.app import application
from radixkv.serve.models import loading
from radixkv.serve.models.several import SeveralModels
from radixkv.serve.models.specs import ModelSpec, specs_of
from radixkv.serve.openapi import document as create_document
from tests.engine.fakes import FakeRunner, make_engine
from tests.serve.served import ASKED, LOCAL, fake_model, says, until

SAID = {"one": "I am the first.", "two": "I am the second.", "three": "I am the third."}
KEYS = {"ada": "correct-horse-1", "ben": "battery-staple-2"}


@dataclass
class Place:
    """A server of three models, and what was loaded."""

    client: TestClient
    models: SeveralModels
    loads: list[str] = field(default_factory=list)
    runners: dict[str, FakeRunner] = field(default_factory=dict)
    engines: dict[str, Engine] = field(default_factory=dict)

    def chat(self, model: str, **fields: Any) -> Any:
        body = {"model": model, "messages": ASKED, "temperature": 0, **fields}
        return self.client.post("/v1/chat/completions", json=body)

    def says(self, model: str) -> str:
        answer = self.chat(model)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])

    def states(self) -> dict[str, str]:
        return {each["id"]: each["status"]["value"] for each in self.client.get("/v1/models").json()["data"]}


@contextmanager
def several(
    monkeypatch: pytest.MonkeyPatch, settings: Settings | None = None, *, fails: Sequence[str] = (), gate: Any = None
) -> Iterator[Place]:
    specs = [ModelSpec(name, "tiny", EngineConfig(), (f"{name}-too",)) for name in SAID]
    models, model = SeveralModels(specs, settings or Settings()), fake_model()  # its tokenizer is slow to load

    def load(spec: ModelSpec) -> Engine:
        place.loads.append(spec.name)
        if spec.name in fails:
            raise InvalidInput("its file is cut off")
        engine, runner = make_engine(num_blocks=256, model=model, brain=says(SAID[spec.name]))
        runner.gate = gate if spec.name == "one" else None
        place.engines[spec.name], place.runners[spec.name] = engine, runner
        return engine

    monkeypatch.setattr(loading, "load_engine", load)
    monkeypatch.setattr(loading, "weight_bytes", lambda _: 1000)  # a fake model has none
    with TestClient(application(models), LOCAL) as client:
        place = Place(client, models)
        yield place
        assert client.portal is not None
        client.portal.call(models.close)
    assert all(engine.client.thread.closed for engine in place.engines.values())


@pytest.mark.long
def test_each_model_answers_under_all_of_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    with several(monkeypatch) as place:
        assert place.states() == dict.fromkeys(SAID, "unloaded")
        for name, text in SAID.items():
            for each in (name, f"{name}-too", f"{name}:latest", f"{name}-too:latest"):
                assert place.says(each) == text
        assert place.loads == list(SAID) and place.states() == dict.fromkeys(SAID, "loaded")
        assert place.chat("two-too").json()["model"] == "two"
        card = place.client.get("/v1/models/two-too").json()
        assert (card["id"], card["aliases"], card["max_model_len"]) == ("two", ["two-too"], 1024)


@pytest.mark.long
def test_an_unknown_name_is_refused_except_on_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"model": "claude-9", "messages": ASKED, "max_tokens": 50}
    with several(monkeypatch) as place:
        refused = place.chat("gpt-9")
        assert refused.status_code == 404 and place.loads == []
        assert refused.json()["error"]["message"] == "model 'gpt-9' not found: this server has 'one', 'two', 'three'"
        assert place.client.get("/v1/models/gpt-9").status_code == 404
        said = place.client.post("/v1/messages", json=body).json()
        assert (said["content"][0]["text"], place.loads) == (SAID["one"], ["one"])
        assert place.client.post("/v1/messages", json={**body, "model": "two"}).json()["model"] == "two"
        counted = place.client.post("/v1/messages/count_tokens", json={**body, "model": "three"})
        assert counted.status_code == 200 and place.loads == ["one", "two", "three"]
    with several(monkeypatch, Settings(strict_fields=True)) as place:
        refused = place.client.post("/v1/messages", json=body)
        assert refused.status_code == 404 and refused.json()["type"] == "error" and place.loads == []


def test_a_load_that_fails_is_told_and_others_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    with several(monkeypatch, fails=["two"]) as place:
        failed = place.chat("two")
        assert (failed.status_code, failed.headers["x-should-retry"]) == (500, "false")
        assert failed.json()["error"]["message"] == "the model 'two' could not be loaded: its file is cut off"
        assert place.says("") == SAID["one"]  # as llama.vim asks
        (card,) = (each for each in place.client.get("/v1/models").json()["data"] if each["id"] == "two")
        assert card["status"] == {"value": "failed", "error": "its file is cut off"}
        assert place.chat("two").status_code == 500 and place.loads == ["two", "one", "two"]


def test_models_are_loaded_and_unloaded_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    with several(monkeypatch) as place:
        for path, state in (("load", "loaded"), ("load", "loaded"), ("unload", "unloaded"), ("unload", "unloaded")):
            assert place.client.post(f"/models/{path}", json={"model": "two-too"}).json() == {"success": True}
            assert place.states()["two"] == state
        assert place.loads == ["two"]
        assert place.client.post("/models/load", json={"model": "gpt-9"}).status_code == 404
        assert place.client.post("/models/load", json={}).status_code == 400
    with several(monkeypatch, Settings(api_keys=KEYS)) as place:
        for path in ("load", "unload"):
            assert place.client.post(f"/models/{path}", json={"model": "two"}).status_code == 401
        assert place.loads == []


@pytest.mark.long
def test_the_document_has_all_names_and_what_loads_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with several(monkeypatch, fails=["two"]) as place:
        document = place.client.get("/openapi.json").json()
        named = document["components"]["schemas"]["ChatBody"]["properties"]["model"]["enum"]
        assert named == ["one", "one-too", "two", "two-too", "three", "three-too"]
        for path in ("/models/load", "/models/unload"):
            declared = document["paths"][path]["post"]["responses"]
            for body in ({"model": "one"}, {"model": "two"}, {"model": "gpt-9"}, {"model": 1}, {}):
                assert str(place.client.post(path, json=body).status_code) in declared
        assert "409" in declared and "/models/load" not in create_document(["one"], Settings())["paths"]


@pytest.mark.long
def test_a_model_with_a_running_stream_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Semaphore(1)
    settings = Settings(max_loaded=1, load_timeout=1.0, retry_after=7)
    with several(monkeypatch, settings, gate=gate) as place:
        answers: list[Any] = []
        asking = threading.Thread(target=lambda: answers.append(place.chat("one", stream=True)))
        asking.start()
        until(lambda: "one" in place.runners and place.models.gate.limiter.streams == 1)
        refused = place.chat("two")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "7")
        assert "there is no room for it: try again in 7 s" in refused.json()["error"]["message"]
        busy = place.client.post("/models/unload", json={"model": "one"})
        assert busy.status_code == 409 and "1 running request" in busy.json()["error"]["message"]
        gate.release(1000)
        asking.join(20)
        assert answers[0].status_code == 200 and "data: [DONE]" in answers[0].text
        until(lambda: place.chat("two").status_code == 200)
        assert place.states()["one"] == "unloaded"


@pytest.mark.long
def test_responses_and_conversations_outlive_a_load_and_are_per_model(monkeypatch: pytest.MonkeyPatch) -> None:
    with several(monkeypatch) as place:
        first = place.client.post("/v1/responses", json={"model": "one", "input": "Hello!"}).json()
        place.client.post("/models/unload", json={"model": "one"})
        found = place.client.get(f"/v1/responses/{first['id']}")
        assert found.json()["id"] == first["id"] and place.states()["one"] == "unloaded"
        more = {"input": "And?", "previous_response_id": first["id"]}
        assert place.client.post("/v1/responses", json={"model": "two", **more}).status_code == 400
        assert place.client.post("/v1/responses", json={"model": "one", **more}).status_code == 200
        metrics = place.client.get("/metrics").text
        assert 'radixkv:history_found_total{model="one"} 1.0' in metrics  # the reply of before the unload
        assert place.client.delete(f"/v1/responses/{first['id']}").json()["deleted"]
        assert place.client.get(f"/v1/responses/{first['id']}").status_code == 404


@pytest.mark.long
def test_metrics_have_the_model_and_refusals_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with several(monkeypatch) as place:
        place.says("one")
        place.says("two")
        lines = place.client.get("/metrics").text.splitlines()
        assert {'radixkv:model_loaded{model="three"} 0.0', 'radixkv:model_loads_total{model="two"} 1.0'} < {*lines}
        assert [line for line in lines if line.startswith("# TYPE radixkv:steps")] == [
            "# TYPE radixkv:steps_total counter"
        ]
        assert sum(line.startswith("radixkv:steps_total{model=") for line in lines) == 2
        assert sum('outcome="refused"' in line for line in lines) == 1
        assert all("model=" in line for line in lines if not line.startswith("#"))


# ---- declarations


def read(tmp_path: Path, text: str, *sources: str, **settings: Any) -> list[ModelSpec]:
    file = tmp_path / "models.toml"
    file.write_text(text)
    return specs_of(sources, str(file), EngineConfig(**settings), None)


def test_a_file_has_names_aliases_and_settings(tmp_path: Path) -> None:
    text = """
[[model]]
path = "tiny"
name = "small"
aliases = ["gpt-4o-mini"]
max_sequences = 7

[[model]]
path = "tiny"
kv_memory = "64MB"
"""
    first, second = read(tmp_path, text, max_sequences=9, disk_cache="/var/kv")
    assert (first.name, first.aliases, first.config.max_sequences) == ("small", ("gpt-4o-mini",), 7)
    assert (second.name, second.config.max_sequences, second.config.kv_memory) == ("tiny", 9, "64MB")
    assert str(first.config.disk_cache) == "/var/kv/small"  # engines share no folder
    assert second.estimate() > 64_000_000


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[model]]\nname = 'a'", "model 1: path is missing"),
        ("[[model]]\npath = 'tiny'\ncolour = 'red'", "model 1: 'colour' is no field; there are name, path, aliases"),
        ("[[model]]\npath = 'tiny'\n[[model]]\npath = 'tiny'", "two models have the name 'tiny'"),
        ("[[model]]\npath = 'tiny'\naliases = ['tiny:latest']", "two models have the name 'tiny:latest'"),
        ("[[model]]\npath = './nowhere'", "there is no model folder"),
        ("[model]\npath = 'tiny'", "must have a table \\[\\[model\\]\\] for each model"),
        ("[[model]]\npath = 'tiny'\nlogits_processors = []", "'logits_processors' is no field"),
    ],
)
def test_a_wrong_file_is_refused_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        read(tmp_path, text)


def test_options_of_one_model_are_refused_for_several(tmp_path: Path) -> None:
    text = "[[model]]\npath = 'tiny'\nname = 'a'\n[[model]]\npath = 'tiny'\nname = 'b'"
    with pytest.raises(InvalidInput, match="record names one file for several models"):
        read(tmp_path, text, record=str(tmp_path / "trace"))
    file = str(tmp_path / "models.toml")
    with pytest.raises(InvalidInput, match="--tokenizer is of one model"):
        specs_of([], file, EngineConfig(), "tiny")
    with pytest.raises(InvalidInput, match="model_name names one model"):
        specs_of(["tiny"], file, EngineConfig(), None, "b")
    with pytest.raises(InvalidInput, match="name a model"):
        specs_of([], None, EngineConfig(), None)


def test_the_only_model_may_be_named_and_each_load_has_a_trace_of_its_own() -> None:
    (spec,) = specs_of(["tiny"], None, EngineConfig(record="/var/trace.jsonl"), None, "b")
    assert (spec.name, spec.source, spec.for_load(1)) == ("b", "tiny", spec)
    assert str(spec.for_load(2).config.record) == "/var/trace-2.jsonl"


def test_a_limit_of_memory_needs_pools_of_a_given_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "tiny", "--model-memory", "1GB"]) == 2
    assert "--model-memory needs pools of a given size" in capsys.readouterr().err


def test_a_name_and_a_tokenizer_are_found_in_the_folder_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "words").mkdir()
    (spec,) = read(tmp_path, "[[model]]\npath = 'tiny'\ntokenizer = 'words'")
    assert spec.tokenizer == str(tmp_path / "words")


def test_ollamas_clients_load_list_and_unload_models(monkeypatch: pytest.MonkeyPatch) -> None:
    with several(monkeypatch, Settings(keep_alive=300)) as place:
        shown = place.client.post("/api/show", json={"model": "two:latest"}).json()  # from the files
        assert shown["capabilities"] == ["completion", "tools"] and place.loads == []
        names = [each["name"] for each in place.client.get("/api/tags").json()["models"]]
        assert names[:3] == ["one:latest", "one-too:latest", "two:latest"]
        assert place.client.get("/api/ps").json() == {"models": []}
        body = {"model": "two-too:latest", "messages": ASKED, "stream": False}
        said = place.client.post("/api/chat", json=body).json()
        assert (said["message"]["content"], said["model"]) == (SAID["two"], "two-too:latest")
        assert 1 < said["load_duration"] < said["total_duration"]
        [running] = place.client.get("/api/ps").json()["models"]
        assert (running["name"], running["context_length"]) == ("two:latest", 1024)
        assert place.client.post("/api/chat", json={"model": "two", "keep_alive": 0}).json()["done_reason"] == "unload"
        until(lambda: place.states()["two"] == "unloaded")
        missing = place.client.post("/api/chat", json={**body, "model": "gpt-9"})
        assert missing.status_code == 404 and missing.json()["error"].startswith("model 'gpt-9' not found")


@pytest.mark.long
def test_a_keep_alive_stays_until_the_next_one_or_an_unload(monkeypatch: pytest.MonkeyPatch) -> None:
    for settings, longest in ((Settings(keep_alive=300), 900), (Settings(keep_alive=300, api_keys=KEYS), 300)):
        with several(monkeypatch, settings) as place:
            place.client.headers["authorization"] = f"Bearer {KEYS['ada']}"
            (slot,) = (each.slot for each in place.models._entries if each.spec.name == "two")
            for given, expected in (
                (None, 300),
                ("15m", longest),
                (None, longest),
                (60, 60),
                (None, 60),
                (-1, math.inf),
            ):
                place.client.post("/api/chat", json={"model": "two", "keep_alive": given})
                assert slot.keep_alive == min(expected, math.inf if longest == 900 else 300)
                assert place.says("two") == SAID["two"]
            assert place.client.post("/models/unload", json={"model": "two"}).status_code == 200
            assert place.says("two") == SAID["two"] and slot.keep_alive == 300


@pytest.mark.long
@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_an_unload_loads_nothing(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    with several(monkeypatch, Settings(max_loaded=1)) as place:
        place.says("one")
        for given in (0, "0", "0s"):
            answer = place.client.post(path, json={"model": "two:latest", "keep_alive": given}).json()
            assert (answer["model"], answer["done_reason"]) == ("two:latest", "unload")
        assert place.loads == ["one"] and place.states()["one"] == "loaded"
        assert place.client.post(path, json={"model": "two", "keep_alive": "1s"}).json()["done_reason"] == "load"
        assert place.loads == ["one", "two"]


@pytest.mark.long
def test_a_broken_engine_is_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with several(monkeypatch) as place:
        place.says("one")
        place.engines["one"].client.thread.stop()  # as after an error that escaped a step
        assert place.says("one") == SAID["one"] and place.loads == ["one", "one"]
