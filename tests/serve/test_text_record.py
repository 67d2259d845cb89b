"""`--record-text`: the file reads as a trace of chats, and neither its disk nor its absence disturbs a request."""

from __future__ import annotations

import stat
from array import array
from pathlib import Path
from typing import Any

import pytest

from radixkv.errors import InvalidInput
from radixkv.serve import Settings
from radixkv.serve.conversations import ChatPrompt
from radixkv.serve.text_record import _MOST_WAITING, TextRecord
from radixkv_traces.formats import open_trace
from tests.serve.served import ASKED, says, served

WHO: dict[str, Any] = {"type": "function", "function": {"name": "who", "parameters": {"type": "object"}}}
PROMPT = ChatPrompt(array("i"), 0, 1, None, (), None, "")


def read(path: Path) -> list[Any]:
    return list(open_trace(path))


def test_the_file_has_each_chat_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "texts.jsonl"
    with served(Settings(record_text=str(path)), brain=says("Me.")) as server:
        reply = server.chat(tools=[WHO])["choices"][0]["message"]["content"]
        messages = [*ASKED, {"role": "assistant", "content": reply}, {"role": "user", "content": "Where?"}]
        server.post("/v1/messages", {"model": "fake", "max_tokens": 9, "messages": messages, "cache_salt": "secret"})
        server.post("/api/chat", {"model": "fake", "stream": False, "messages": ASKED})
    assert f"the texts of all chat requests are written to {path}" in caplog.text
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    first, second, third = read(path)
    assert first.messages == tuple(ASKED) and first.tools == (WHO,)
    assert [each["content"] for each in second.messages] == ["Hello!", "Me.", "Where?"]
    assert first.namespace == third.namespace != second.namespace and "secret" not in path.read_text()
    assert first.output_length == second.output_length == third.output_length == 4  # the stop token too
    assert first.session != second.session != third.session != first.session
    assert 0 <= first.timestamp <= second.timestamp <= third.timestamp > 0


def test_an_existing_file_and_a_missing_folder_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text("mine")
    with pytest.raises(InvalidInput, match=r"record_text: .* exists"):
        Settings(record_text=str(path))
    assert path.read_text() == "mine"
    with pytest.raises(InvalidInput, match=r"record_text: there is no folder .*nowhere"):
        Settings(record_text=str(tmp_path / "nowhere" / "texts.jsonl"))


def test_a_full_disk_ends_the_record_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with served(brain=says("Me.")) as server:
        server.service.gate.texts = texts = TextRecord(str(tmp_path / "texts.jsonl"))
        server.chat()
        full: Any = texts._file
        full.write = lambda data: (_ for _ in ()).throw(OSError(28, "No space left on device"))
        for _ in range(3):
            assert server.chat()["choices"][0]["message"]["content"] == "Me."
    assert caplog.text.count("has ended") == caplog.text.count("No space left") == 1
    assert len((tmp_path / "texts.jsonl").read_text().splitlines()) == 1


def test_two_models_share_nothing_and_a_slow_disk_ends_the_record(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    texts = TextRecord(str(tmp_path / "texts.jsonl"))
    for at, model in enumerate("abaa"):
        texts._queued += _MOST_WAITING * (at == 2)
        texts.add(0.0, model, PROMPT, ASKED, 1)
    texts.close()
    first, second, third = read(tmp_path / "texts.jsonl")
    assert first.namespace == third.namespace != second.namespace
    assert caplog.text.count("the disk does not keep up") == 1
