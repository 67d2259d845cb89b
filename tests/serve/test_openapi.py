"""The OpenAPI document describes the checks: generated valid and invalid requests get the documented responses."""

from __future__ import annotations

from typing import Any

import jsonschema_rs
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from radixkv.serve import Settings, schemas
from radixkv.serve.anthropic import schemas as schemas_of_messages
from radixkv.serve.errors import ApiError
from radixkv.serve.openai_responses.schemas import read_response
from radixkv.serve.openapi import document
from radixkv.serve.role_order import ANY_ORDER
from tests.selection import Later
from tests.serve.served import ASKED, CHAT, LOCAL, fake_model, served

schemathesis: Any = Later("schemathesis")
checks: Any = Later("schemathesis.checks")
DOCUMENT = document(["fake"], Settings())
ALL = [
    (path, method, each["responses"]) for path, methods in DOCUMENT["paths"].items() for method, each in methods.items()
]
OPERATIONS = [(path, method) for path, method, found in ALL if "200" in found]
REFUSED = [(path, method) for path, method, found in ALL if "200" not in found]
MANY = 6  # examples in `make test-all`
NOT_GET = [(path, method) for path, method in OPERATIONS if method != "get"]  # a GET has no body
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
)


def conform(case: Any, *left_out: str) -> Any:
    """Send a request, and check the response; return it."""
    return case.call_and_validate(LOCAL, checks=[getattr(checks, name) for name in CHECKS if name not in left_out])


@pytest.fixture(scope="module")
def server():
    with served(Settings(max_running=2048), model=fake_model(max_length=64), num_blocks=4096) as found:
        yield found


@pytest.fixture(scope="module")
def schema(server):
    return schemathesis.openapi.from_asgi("/openapi.json", server.client.app, headers={"Host": "localhost"})


@pytest.mark.parametrize(
    ("path", "method", "count", "mode"),
    [
        *((*each, 1, "positive") for each in OPERATIONS),
        *(pytest.param(*each, MANY, "positive", marks=pytest.mark.long) for each in OPERATIONS),
        *(pytest.param(*each, MANY, "negative", marks=pytest.mark.long) for each in NOT_GET),
    ],
)
def test_answers_are_as_documented(schema, path: str, method: str, count: int, mode: str) -> None:
    operation = schema[path][method]

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode)))
    def holds(case: Any) -> None:
        conform(case)

    holds()


@pytest.mark.parametrize(("path", "method"), REFUSED)
def test_what_this_server_never_does_is_refused_as_documented(schema, path: str, method: str) -> None:
    case = schema[path][method].Case(path_parameters={"digest": "sha256:12"} if "{" in path else {})
    answer = conform(case, "not_a_server_error")
    assert answer.status_code == (400 if "embed" in path else 501)


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/api/chat", "/api/generate"]
)
@pytest.mark.parametrize("words", [1, 200], ids=["short", "too long"])
def test_streams_are_as_documented(schema, path: str, words: int) -> None:
    text = "a " * words
    prompt = {"/v1/completions": {"prompt": text}, "/v1/responses": {"input": text}, "/api/generate": {"prompt": text}}
    asked = prompt.get(path, {"messages": [{"role": "user", "content": text}]})
    case = schema[path]["post"].Case(body={"model": "fake", "stream": True, **asked}, media_type="application/json")
    conform(case)


def test_stored_responses_are_as_documented(server, schema) -> None:
    number = server.post("/v1/responses", {"model": "fake", "input": "a", "max_output_tokens": 2}).json()["id"]
    stored = [each for each in OPERATIONS if "{response_id}" in each[0]]
    for path, method in sorted(stored, key=lambda each: each[1] == "delete"):
        answer = schema[path][method].Case(path_parameters={"response_id": number}).call_and_validate(LOCAL)
        assert answer.status_code == 200


def test_the_document_needs_no_key_and_says_that_others_do():
    with served(Settings(api_keys={"ada": "ada-secret"})) as server:
        found = server.client.get("/openapi.json").json()
    assert found["security"] == [{"apiKey": []}, {"keyHeader": []}]
    assert found["paths"]["/health"]["get"]["security"] == []
    assert found["info"]["version"]


def test_every_path_is_documented(server):
    paths = {route.path.replace("{model:path}", "{model}") for route in server.client.app.routes}
    documented = set(DOCUMENT["paths"])
    assert paths == documented | {path.removeprefix("/v1") for path in documented if path.startswith("/v1/")}


def body_of(path: str, document: Any = DOCUMENT) -> Any:
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]


def read_responses(body: Any, ignored: Any = None) -> Any:
    return read_response(body, ignored, lambda _: None, ANY_ORDER)


def read_message(body: Any) -> Any:
    return schemas_of_messages.read_message(body, None, schemas_of_messages.Dialect())


BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result", "image")


def responses(path: str, method: str = "post") -> Any:
    return DOCUMENT["paths"][path][method]["responses"]


def fits(schema: Any, value: Any, document: Any = DOCUMENT) -> bool:
    """Whether JSON fits a schema of the document."""
    return jsonschema_rs.Draft202012Validator({**schema, "components": document["components"]}).is_valid(value)


def test_the_statuses_of_each_path_are_those_that_it_gives() -> None:
    assert set(responses("/health", "get")) == {"200", "403", "500", "503"}
    assert all({"200", "403", "500"} <= set(responses(*operation)) for operation in OPERATIONS)
    with served(Settings(api_keys={"ada": "ada-secret"}, max_running=1, max_waiting=0)) as server:
        given = {operation: server.client.request(operation[1], operation[0]) for operation in OPERATIONS}
        assert {operation for operation, answer in given.items() if answer.status_code == 200} == {
            operation for operation in OPERATIONS if "401" not in responses(*operation)
        }
        for operation, answer in given.items():
            documented = responses(*operation)[str(answer.status_code)]
            assert ("www-authenticate" in answer.headers) == ("WWW-Authenticate" in documented.get("headers", {}))
        with server.service.gate.limiter.admit("ada"):
            key = {"Authorization": "Bearer ada-secret"}
            full = server.post("/tokenize", {"prompt": "x"}, headers=key)
        assert full.status_code == 429 and full.headers["retry-after"] == "1"
        server.engine.close()
        gone = server.client.get("/health")
        assert gone.status_code == 503 and gone.headers["retry-after"]
    for status in ("429", "503"):
        assert "Retry-After" in responses("/tokenize")[status]["headers"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/v1/responses"])
def test_optional_fields_may_be_null_and_a_strict_server_documents_no_others(path):
    body, strict = body_of(path), document(["fake"], Settings(strict_fields=True))
    read, given = {
        "/v1/chat/completions": (schemas.read_chat, {"messages": CHAT["messages"]}),
        "/v1/completions": (schemas.read_completion, {"prompt": "x"}),
        "/v1/responses": (read_responses, {"input": "x"}),
        "/tokenize": (schemas.read_tokenize, {"messages": CHAT["messages"]}),
    }[path]
    given = {"model": "fake", **given}
    read({**dict.fromkeys(body["properties"]), **given})
    with pytest.raises(Exception, match="unknown field"):
        read({**given, "another": None})
    assert fits(body, {**given, "another": 1}) and not fits(body_of(path, strict), {**given, "another": 1}, strict)
    assert fits(body_of(path, strict), given, strict)


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
@settings(max_examples=25, deadline=None)
def test_no_value_anywhere_breaks_the_reading(value):
    """Each field of a chat completion, a message or a response, one at a time, may have any JSON value."""
    paths = ("/v1/chat/completions", "/v1/messages", "/v1/responses")
    chat, message, response = (body_of(path)["properties"] for path in paths)
    cases = [(schemas.read_chat, {**CHAT, name: value}) for name in chat]
    cases += [(read_responses, {"model": "fake", "input": "x", name: value}) for name in response]
    cases += [(read_responses, {"model": "fake", "input": [value, {name: value}]}) for name in ("type", "role")]
    cases += [(read_message, {**CHAT, name: value}) for name in message]
    blocks = [{"type": kind, "id": "a", "name": "b", "input": value, "content": value} for kind in BLOCKS]
    cases += [
        (read_message, {**CHAT, "messages": [*ASKED, {"role": role, "content": [{**block, **values}]}]})
        for block in blocks
        for values in ({}, {"text": value, "thinking": value}, {"tool_use_id": value}, {"type": value})
        for role in ("user", "assistant", "system")
    ]
    for read, body in cases:
        try:
            read(body)
        except ApiError as error:
            wrong = error
        else:
            continue
        assert 400 <= wrong.status < 500 and wrong.response().body
