"""Files that commit 5f9d9bd7 wrote stay readable: a saved chat, a disk folder, a trace, and transcripts of clients.

They are in tests/assets/earlier, and must not be made again. `tests/monitor/test_old_recordings.py` has recordings.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from radixkv import AsyncEngine, Engine, SamplingParams
from radixkv.serve import create_app
from radixkv_traces.formats import read
from tests.disk.stored import arrived, let_any_disk_do, opened
from tests.serve.served import LOCAL

FOLDER = Path(__file__).parent / "assets" / "earlier"
CHANGING = {"id", "created", "created_at", "completed_at", "system_fingerprint"}
"""Fields that differ between two answers to one request. So do durations, and counts of cached tokens."""


def test_a_saved_chat_goes_on() -> None:
    with Engine.load("tiny", num_blocks=64, monitor=False) as engine:
        chat = engine.resume(FOLDER / "chat.json", namespace="ann")
        reply = chat.send("Where do I live?", SamplingParams(temperature=0, max_tokens=24))
    assert reply.text == "You live in Oslo."


def test_a_disk_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    let_any_disk_do(monkeypatch)
    shutil.copytree(FOLDER / "disk", tmp_path / "disk")
    with opened(tmp_path / "disk") as store:
        assert [arrived(store, text) for text in (1, 2, 3)] == [6, 6, 2]


def test_a_trace_has_its_requests() -> None:
    requests = list(read(FOLDER / "trace.jsonl"))
    assert [(each.input_length, each.output_length) for each in requests] == [(27, 10), (51, 6), (71, 6)]


def steady(answer: Any) -> Any:
    """Return an answer without the values that differ between two answers to one request."""
    if isinstance(answer, list):
        return [steady(each) for each in answer]
    if not isinstance(answer, dict):
        return answer
    changing = {name for name in answer if name in CHANGING or "duration" in name or "cache" in name}
    return {name: type(value) if name in changing else steady(value) for name, value in answer.items()}


def test_transcripts_of_clients_are_answered_as_before() -> None:
    rows = json.loads((FOLDER / "transcripts.json").read_text("utf-8"))
    engine = Engine.load("tiny", num_blocks=256, monitor=False)
    with engine, TestClient(create_app(AsyncEngine(engine)), LOCAL) as client:
        for row in rows:
            answer = client.post(row["path"], json=row["request"])
            assert answer.status_code == 200, answer.text
            assert steady(answer.json()) == steady(row["response"])
    assert len({row["path"] for row in rows}) == 5
