"""Requests of web pages, of containers and by other names: refused on each path, unless an option allows them."""

from __future__ import annotations

import re
from typing import Any

import pytest

from radixkv.cli.main import _parser
from radixkv.errors import InvalidInput
from radixkv.serve import Settings
from radixkv.serve.command import naming_options, read_settings
from tests.serve.served import CHAT, served

KEYS = {"ada": "ada-secret-1"}
KEY = {"Authorization": f"Bearer {KEYS['ada']}"}
PAGE = "https://app.example:8443"
ALLOWING = Settings(allowed_origins=[PAGE], allowed_hosts=["host.docker.internal"])
ASKED_HEADERS = "authorization,content-type,x-stainless-lang"
PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": ASKED_HEADERS}
FOREIGN = [{"Host": "evil.example"}, {"Origin": "https://evil.example"}, {"Origin": "null"}]


def settings_of(*options: str) -> Settings:
    """Return the settings of a command line."""
    with naming_options():
        return read_settings(_parser().parse_args(["serve", "tiny", *options]), {})


@pytest.mark.parametrize("settings", [Settings(), ALLOWING], ids=["default", "allowing"])
def test_no_path_answers_a_foreign_host_or_origin(settings: Settings) -> None:
    with served(settings) as server:
        routes = [(route.path, method) for route in server.client.app.routes for method in route.methods]  # type: ignore
        assert len(routes) > 40
        for path, method in [*routes, ("/unknown", "GET"), ("/v1/models", "OPTIONS"), ("/v1/models", "PATCH")]:
            for headers in FOREIGN:
                answer = server.client.request(method, re.sub("{.*?}", "fake", path), headers=headers)
                assert answer.status_code == 403 and "access-control-allow-origin" not in answer.headers, (path, method)
        refused = server.post("/v1/messages", CHAT, headers=FOREIGN[0])
        assert refused.json()["error"]["type"] == "permission_error"  # in Anthropic's form


@pytest.mark.parametrize(
    ("header", "value", "option"),
    [
        ("Host", "host.docker.internal:8000", "--allowed-host host.docker.internal"),
        ("Host", "My_Desk.LAN.", "--allowed-host my_desk.lan"),
        ("Host", "[FD00::1]:8000", "--allowed-host [fd00::1]"),
        ("Origin", PAGE, f"--allowed-origin {PAGE}"),
        ("Origin", "http://[fd00::1]:3000", "--allowed-origin http://[fd00::1]:3000"),
        ("Origin", "chrome-extension://abcdef", "--allowed-origin chrome-extension://abcdef"),
        ("Origin", "moz-extension://0b5a-4c", "--allowed-origin moz-extension://0b5a-4c"),
    ],
)
def test_a_refusal_names_the_option_that_allows_the_request(header: str, value: str, option: str) -> None:
    with served() as server:
        refused = server.client.get("/v1/models", headers={header: value})
        assert refused.status_code == 403
        assert refused.json()["error"]["message"].endswith(f"; to allow this, start the server with {option}")
    with served(settings_of(*option.split())) as server:
        assert server.client.get("/v1/models", headers={header: value}).status_code == 200
        for other in (f"x{value}", f"{value}.evil.example"):
            assert server.client.get("/v1/models", headers={header: other}).status_code == 403


def test_a_value_that_no_option_allows_gets_no_hint() -> None:
    with served(ALLOWING) as server:
        for header, value in (("Origin", "null"), ("Origin", "https://a, http://b"), ("Host", "."), ("Host", "a@b")):
            refused = server.client.get("/", headers={header: value})
            assert refused.status_code == 403 and refused.json()["error"]["message"].endswith("page from elsewhere")


def test_an_allowed_host_is_no_allowed_origin() -> None:
    with served(ALLOWING) as server:
        for origins, status in (
            ([], 200),
            ([PAGE], 200),
            (["http://host.docker.internal"], 403),
            ([PAGE, "null"], 403),
        ):
            headers = [("Host", "host.docker.internal:8000"), *(("Origin", origin) for origin in origins)]
            assert server.client.get("/v1/models", headers=headers).status_code == status


@pytest.mark.parametrize("settings", [ALLOWING, Settings(allowed_origins=[PAGE], api_keys=KEYS, max_body=1)])
def test_a_preflight_is_answered_without_a_key(settings: Settings) -> None:
    asked = {**PREFLIGHT, "Access-Control-Request-Private-Network": "true"}
    with served(settings) as server:
        headers = server.client.options("/v1/messages", headers={**asked, "Origin": PAGE}).raise_for_status().headers
        for other in ("https://evil.example", "https://app.example", f"{PAGE}0", PAGE.upper(), "null"):
            refused = server.client.options("/v1/messages", headers={**asked, "Origin": other})
            assert refused.status_code == 400 and "access-control-allow-origin" not in refused.headers
    assert headers["access-control-allow-origin"] == PAGE and "Origin" in headers["vary"].split(", ")
    assert headers["access-control-allow-headers"] == ASKED_HEADERS
    assert headers["access-control-allow-methods"] == "DELETE, GET, HEAD, POST"
    assert headers["access-control-allow-private-network"] == "true"


def assert_readable(answer: Any, status: int, origin: str = PAGE) -> None:
    """Check that a page can read the response, and that a cache would keep it for this page only."""
    assert answer.status_code == status, answer.text
    assert answer.headers.get_list("access-control-allow-origin") == [origin]
    exposed = "x-request-id, request-id, warning, retry-after, x-radixkv-miss"
    assert answer.headers["access-control-expose-headers"] == exposed
    assert answer.headers["vary"] == "Origin" and "x-request-id" in answer.headers


def test_an_allowed_page_can_read_each_response(monkeypatch: pytest.MonkeyPatch) -> None:
    origin, chat = {"Origin": PAGE}, "/v1/chat/completions"
    with served(ALLOWING) as server:
        assert_readable(server.client.get("/health", headers={**origin, "Host": "evil.example"}), 403)
    settings = Settings(allowed_origins=[PAGE], api_keys=KEYS, max_body=1000, max_running=1, max_waiting=0)
    with served(settings) as server:
        for fields, status in ({"stream": True}, 200), ({"unknown": 1}, 200), ({"user": "x" * 1000}, 413):
            assert_readable(server.post(chat, {**CHAT, **fields}, headers=origin | KEY), status)
        with server.service.gate.limiter.admit("ada"):
            assert_readable(server.post(chat, CHAT, headers=origin | KEY), 429)
        monkeypatch.setattr(server.service.metrics, "scrape", lambda: 1 / 0)
        server.service.gate.ending = True
        for path, more, status in (
            ("/metrics", KEY, 500),
            ("/v1/models", {}, 401),
            ("/unknown", {}, 404),
            ("/health", {}, 503),
            ("/health", {f"x-{number}": "" for number in range(300)}, 431),
        ):
            assert_readable(server.client.get(path, headers=origin | more), status)
        assert server.client.get("/").headers["vary"] == "Origin"


def test_all_pages_may_be_allowed_with_keys() -> None:
    with served(settings_of("--allowed-origin", "*", "--api-key", f"ada={KEYS['ada']}")) as server:
        assert_readable(server.client.get("/v1/models", headers={"Origin": "https://any.example"}), 401, "*")


def test_without_the_option_no_response_has_a_header_of_cors() -> None:
    with served() as server:
        for method, status in (("GET", 200), ("OPTIONS", 405)):
            answer = server.client.request(method, "/health", headers={**PREFLIGHT, "Origin": "http://localhost:3000"})
            assert answer.status_code == status
            assert not [name for name in answer.headers if name.startswith("access-control") or name == "vary"]


@pytest.mark.parametrize(
    ("option", "values", "reason"),
    [
        (
            "--allowed-origin",
            ["", "null", "app.example", "https://a/", "https://a, https://b"],
            "must be scheme://host",
        ),
        ("--allowed-origin", ["*"], "cannot be [*] without keys"),
        ("--allowed-host", ["", ".", "*", "a:80", "http://a", "fd00::1", "b\xfccher.example"], "must be names"),
        ("--tls-cert", ["cert.pem"], "and --tls-key belong together"),
        ("--tls-key", ["key.pem"], "and --tls-key belong together"),
    ],
)
def test_wrong_values_of_options_are_refused(option: str, values: list[str], reason: str) -> None:
    for value in values:
        with pytest.raises(InvalidInput, match=f"^--[a-z-]+ {reason}"):
            settings_of(option, value)
