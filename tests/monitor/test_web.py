"""Test `--web`: the guard of the page, its files and its websocket; the app in a page; downloads; and the end."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from radixkv_monitor import cli, options, web
from radixkv_monitor.app import MonitorApp
from scripts.draw_monitor import Moment

aiohttp = pytest.importorskip("aiohttp", reason="needs radixkv[web]")
pytest.importorskip("textual_serve", reason="needs radixkv[web]")

SELF = [sys.executable, "-c", "import sys; from radixkv_monitor.cli import main; sys.exit(main())"]
PATHS = ("/", "/ws", "/static/js/textual.js", "/download/1", "/nowhere")


def served(check: Callable[[Any, str], Awaitable[None]]) -> None:
    """Serve the pages of an app that never starts, on a free port, and pass a session and the base URL to `check`."""
    pages = web.Pages(["--demo"], "monitor")

    async def run() -> None:
        from aiohttp import test_utils

        async with (
            test_utils.TestServer(pages.application()) as server,
            aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session,
        ):
            session.token, session.cookie = pages.token, pages.cookie
            await check(session, f"http://127.0.0.1:{server.port}")

    asyncio.run(run())


def test_two_servers_of_one_host_have_cookies_of_their_own() -> None:
    assert web.Pages([], "one").cookie != web.Pages([], "two").cookie


@pytest.mark.filterwarnings("ignore:Setting custom")
def test_nothing_is_served_without_the_token() -> None:
    async def check(session: Any, base: str) -> None:
        for query in ("", "?token=", "?token=wrong", f"?token={session.token[:-1]}"):
            for path in PATHS:
                reply = await session.get(f"{base}{path}{query}")
                assert reply.status == 403 and "with its token" in await reply.text()
        for path in PATHS[1:]:  # the token is for the page; all else needs its cookie
            assert (await session.get(f"{base}{path}?token={session.token}")).status == 403
        assert (await session.get(base, cookies={session.cookie: "é" * 40})).status == 403
        assert not session.cookie_jar

    served(check)


@pytest.mark.filterwarnings("ignore:Setting custom")
def test_the_first_page_exchanges_the_token_for_a_cookie() -> None:
    async def check(session: Any, base: str) -> None:
        first = await session.get(f"{base}/?token={session.token}", allow_redirects=False)
        assert (first.status, first.headers["Location"]) == (303, "/")
        assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(first.headers["Set-Cookie"].split("; "))
        page = await session.get(base)
        text = await page.text()
        assert page.status == 200 and session.token not in text
        assert f'data-session-websocket-url="{base.replace("http", "ws")}/ws"' in text
        policy = page.headers["Content-Security-Policy"]
        assert "default-src 'self'" in policy and "frame-ancestors 'none'" in policy and "googleapis" not in policy
        assert page.headers["Referrer-Policy"] == "no-referrer" and page.headers["Cache-Control"] == "no-store"
        assert (await session.get(f"{base}/static/js/textual.js")).status == 200
        assert (await session.get(f"{base}/static/")).status == 403  # no list of files
        assert (await session.get(f"{base}/download/1")).status == 404

    served(check)


@pytest.mark.filterwarnings("ignore:Setting custom")
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.test"}, 403),  # a name of another server that leads here (DNS rebinding)
        ({"Host": "evil.test:80"}, 403),
        ({"Host": "localhost.evil.test"}, 403),
        ({"Host": "0.0.0.0:1"}, 403),
        ({"Host": "localhost:9999"}, 200),  # through a tunnel
        ({"Host": "[::1]:9999"}, 200),
        ({"Origin": "http://evil.test"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "localhost:9999", "Origin": "http://localhost:9998"}, 403),
        ({"Host": "localhost:9999", "Origin": "http://localhost:9999"}, 200),
    ],
)
def test_other_hosts_and_pages_are_refused(headers: dict[str, str], status: int) -> None:
    async def check(session: Any, base: str) -> None:
        headers_of_all = {**headers, "Cookie": f"{session.cookie}={session.token}"}
        for path in PATHS[:3]:
            reply = await session.get(f"{base}{path}", headers=headers_of_all)
            assert (reply.status == 403) == (status == 403), path
        if status == 200 and "Host" in headers:
            text = await (await session.get(base, headers=headers_of_all)).text()
            assert f'"ws://{headers["Host"]}/ws"' in text

    served(check)


# ---- the app in a browser


def test_a_browser_downloads_exports_and_records_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    delivered: list[tuple[str, str]] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("radixkv_monitor.app.exit_with_parent", lambda _: None)
    monkeypatch.setattr(MonitorApp, "is_web", True)
    monkeypatch.setattr(
        MonitorApp, "deliver_text", lambda _, text, save_filename: delivered.append((save_filename, text.read()))
    )
    app = MonitorApp(Moment(), "evictions")

    async def script() -> None:
        async with app.run_test(size=(100, 30)) as pilot:
            await pilot.pause()
            app.tick()
            await pilot.press("e", "j")
            await pilot.pause()
            ((name, text),) = delivered
            assert re.fullmatch(r"radixkv-evictions-[\d-]+\.json", name) and len(json.loads(text)) > 100
            await pilot.press("e", "s")
            await pilot.pause()
            assert delivered[1][0].endswith(".svg") and delivered[1][1].startswith("<svg")
            await pilot.press("r")
            await pilot.pause()
            assert "A browser writes no files here" in [each.message for each in app._notifications][-1]

    asyncio.run(script())
    assert not list(tmp_path.iterdir())


def test_a_port_in_use_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["--demo", "--web", "--port", str(port)]) == 1
    said = capsys.readouterr()
    assert f"127.0.0.1, port {port}: " in said.err and "--port" in said.err and said.err.count("\n") == 1
    assert said.out == ""


def test_no_engine_is_said_before_a_page_is_served(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("radixkv.telemetry.discovery.engines", list)
    monkeypatch.setattr(web, "serve", lambda *_: pytest.fail("it served"))
    assert cli.main(["--web"]) == 1
    assert cli.main(["--web", "nosuch"]) == 2
    said = capsys.readouterr().err
    assert "no running engine of this user" in said and "nosuch is not a process id" in said


def test_a_page_has_the_options_of_the_command() -> None:
    given = options.parser().parse_args(
        ["--web", "--view", "pool", "--theme", "light", "--token", "t", "tcp://127.0.0.1:1"]
    )
    again = options.parser().parse_args(options.for_page(given))
    assert again.read_only and not again.web
    for name in ("view", "theme", "sort", "token", "target", "replay", "demo", "host_blocks"):
        assert getattr(again, name) == getattr(given, name)
