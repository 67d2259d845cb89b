"""API keys, cache namespaces, and settings that a server refuses as unsafe."""

from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from radixkv.errors import InvalidInput
from radixkv.serve import Settings
from radixkv.serve.access import NAMESPACE_HEADER, Auth, namespace
from radixkv.serve.command import read_keys
from radixkv.serve.errors import ApiError
from tests.serve.served import CHAT, says, served

KEYS = {"ada": "ada-secret-1", "bob": "bob-secret-2"}


def bearer(key, **more):
    return {"Authorization": f"Bearer {key}", **more}


def test_nothing_but_health_is_told_to_strangers():
    path = "/metrics"
    with served(Settings(api_keys=KEYS)) as server:
        get = server.client.get
        assert get("/health").status_code == 200
        for headers in ({}, bearer("wrong-secret"), bearer(""), {"Authorization": f"Basic {KEYS['ada']}"}):
            answer = get(path, headers=headers)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
        assert get(path, headers=bearer(KEYS["bob"])).status_code == 200


def test_a_key_that_is_no_ascii_is_unknown():
    with pytest.raises(ApiError, match="not known"):
        Auth(KEYS).tenant(Headers(raw=[(b"authorization", b"Bearer \xff\xfe")]))


@pytest.mark.parametrize("name", ["localhost", "LocalHost:8000", "127.0.0.1:8000", "[::1]:8000"])
def test_a_server_without_keys_answers_to_its_own_machine(name):
    with served() as server:
        assert server.client.get("/v1/models", headers={"Host": name}).status_code == 200
        assert server.client.get("/v1/models", headers={"Origin": f"http://{name}"}).status_code == 200


@pytest.mark.parametrize(
    "name",
    [
        "evil.example",
        "evil.example:8000",
        "127.0.0.1.evil.example",
        "evil.example@localhost",
        "localhost/.evil.example",
        "localhost:80:80",
        "[::1",
        "",
        "null",
    ],
)
def test_a_server_without_keys_answers_to_no_page_from_elsewhere(name):
    with served() as server:
        for headers in ({"Host": name}, {"Origin": f"http://{name}"}):
            answer = server.client.get("/v1/models", headers=headers)
            assert answer.status_code == 403 and answer.json()["error"]["code"] == "not_local"
    with served(Settings(api_keys=KEYS)) as server:
        assert server.client.get("/health", headers={"Host": name, "Origin": f"http://{name}"}).status_code == 200


def cached(server, key=None, header=None, **fields):
    headers = {**(bearer(key) if key else {}), **({NAMESPACE_HEADER: header} if header else {})}
    answer = server.post("/v1/chat/completions", {**CHAT, **fields}, headers=headers)
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_no_tenant_finds_what_another_said():
    with served(Settings(api_keys=KEYS), brain=says("Yes.")) as server:
        assert not cached(server, KEYS["ada"])
        assert cached(server, KEYS["ada"])
        assert not cached(server, KEYS["bob"])
        for name in ("ada", "x"):
            assert not cached(server, KEYS["bob"], header=name)
            assert cached(server, KEYS["bob"], header=name)
        assert not cached(server, KEYS["ada"], header="x")


def test_names_are_kept_apart_however_they_are_spelt():
    names = [{}, *({NAMESPACE_HEADER: name} for name in ("b", "b/c", "a", "(a, b)"))]
    known = {namespace(tenant, Headers(sent)) for tenant in ("a", "a/b", "a, b") for sent in names}
    assert len(known) == 15


def test_a_name_that_is_too_long_or_odd_is_refused():
    with served() as server:
        answer = server.post("/v1/chat/completions", CHAT, headers={NAMESPACE_HEADER: "x" * 257})
        odd = server.post("/v1/chat/completions", CHAT, headers={NAMESPACE_HEADER: b"caf\xe9"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == NAMESPACE_HEADER
    assert odd.status_code == 400 and odd.json()["error"]["param"] == NAMESPACE_HEADER


def test_a_salt_names_the_namespace_as_the_header_does():
    with served(Settings(api_keys=KEYS)) as server:
        hits = [cached(server, KEYS["ada"]), *(cached(server, KEYS["ada"], cache_salt="x") for _ in range(2))]
        hits += [cached(server, KEYS["ada"], header="x"), cached(server, KEYS["ada"], cache_salt="")]
        assert [*hits, cached(server, KEYS["bob"], cache_salt="x")] == [False, False, True, True, True, False]
        for salt, header in (("x", "y"), ("caf\xe9", None), ("x" * 257, None), (5, None)):
            headers = bearer(KEYS["ada"]) | ({} if header is None else {NAMESPACE_HEADER: header})
            refused = server.post("/v1/chat/completions", {**CHAT, "cache_salt": salt}, headers=headers)
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "cache_salt"


def test_a_salt_isolates_stored_responses():
    with served(brain=says("Yes.")) as server:
        first = server.post("/v1/responses", {"model": "fake", "input": "Hi", "cache_salt": "x"}).json()["id"]
        more = {"model": "fake", "input": "Hi", "previous_response_id": first}
        answers = [server.post("/v1/responses", {**more, **salt}) for salt in ({}, {"cache_salt": "x"})]
        assert [each.status_code for each in answers] == [400, 200]
        assert server.client.get(f"/v1/responses/{first}", headers={NAMESPACE_HEADER: "x"}).status_code == 200


# ---- settings


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", ""])
def test_a_server_without_keys_is_not_open_to_others(host):
    with pytest.raises(InvalidInput, match="API key"):
        Settings(host=host)
    assert Settings(host=host, api_keys=KEYS).host == host


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"ada": "short"}, "at least 8"),
        ({"": "long-enough"}, "at least 8"),
        ({"a": "same-key1", "b": "same-key1"}, "two names"),
    ],
)
def test_keys_that_are_none(keys, said):
    with pytest.raises(InvalidInput, match=said):
        Settings(api_keys=keys)


def test_settings_do_not_show_their_keys():
    assert "secret" not in repr(Settings(api_keys=KEYS))


def test_keys_from_the_command_line(tmp_path):
    (tmp_path / "key").write_text("from-a-file\n")
    assert read_keys([f"ada=@{tmp_path}/key", "bob=a=b"]) == {"ada": "from-a-file", "bob": "a=b"}
    for wrong in (["just-a-key"], ["=key"], ["a=@/no/such/file"], ["a=1", "a=2"]):
        with pytest.raises(InvalidInput) as refused:
            read_keys(wrong)
        assert "just-a-key" not in str(refused.value)
