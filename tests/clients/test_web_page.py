"""A web page that enforces CORS sends preflights, streams a reply, and reads errors; a foreign page gets nothing."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from radixkv.serve import Settings
from tests.clients.conftest import run_client
from tests.clients.install import JSDOM, obstacle
from tests.engine.fakes import make_engine
from tests.serve.served import events, fake_model, hosted_engine, says, texts

KEY = "ada-secret-1"
PROGRAM = Path(__file__).parent / "programs" / "web_page.js"
SETTINGS = Settings(port=0, drain_timeout=5, allowed_origins=["https://app.example:8443"], api_keys={"ada": KEY})


def test_only_an_allowed_page_streams_a_reply(tmp_path: Path) -> None:
    if not JSDOM.installed:
        pytest.skip(f"jsdom is not installed: {obstacle() or '`make clients` installs it'}")
    engine, runner = make_engine(num_blocks=512, model=fake_model(), brain=says("Hello Nora, how are you?"))
    runner.gate = gate = threading.Semaphore(4)  # the prompt, and tokens of "Hello"
    seen: list[tuple[str, str]] = []

    def around(app: ASGIApp) -> ASGIApp:
        async def watched(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http":
                seen.append((scope["method"], scope["path"]))
            if seen[-1:] == [("GET", "/v1/models")]:
                gate.release(1000)
            await app(scope, receive, send)

        return watched

    with hosted_engine(engine, runner, SETTINGS, around) as host:
        found = json.loads(run_client(["node", str(PROGRAM), str(JSDOM.path), host.url, KEY], tmp_path, tmp_path, {}))
    beginning, streamed, unauthorized, refused = found
    assert "Hello" in beginning and "[DONE]" not in beginning
    assert streamed["status"] == 200 and texts(events(streamed["text"])) == {0: "Hello Nora, how are you?"}
    assert streamed["headers"][0].startswith("req_") and "unknown_field" in streamed["headers"][1]
    assert unauthorized["status"] == 401 and "not known" in unauthorized["text"]
    assert refused == {"status": 0, "text": "", "headers": [None, None]}
    chat, models = "/v1/chat/completions", "/v1/models"
    assert seen[:4] == [("OPTIONS", chat), ("POST", chat), ("OPTIONS", models), ("GET", models)]
    assert seen[-1] == ("OPTIONS", chat) and seen.count(("POST", chat)) == 1
