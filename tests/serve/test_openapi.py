"""The document that is served says what is checked: whatever is made from it, or against it, gets a fitting answer."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import checks

from radixkv.serve import Settings, schemas
from radixkv.serve.errors import ApiError
from radixkv.serve.openapi import document
from tests.serve.served import CHAT, LOCAL, fake_model, served

DOCUMENT = document("fake", Settings())
OPERATIONS = [(path, method) for path, methods in DOCUMENT["paths"].items() for method in methods]
CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
]


@pytest.fixture(scope="module")
def server():
    with served(Settings(max_running=2048), model=fake_model(max_length=64), num_blocks=4096) as found:
        yield found


@pytest.mark.parametrize("wrong", [False, True], ids=["as documented", "against it"])
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_answers_are_as_documented(server, path: str, method: str, wrong: bool) -> None:
    app = server.client.app
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    operation = schema[path][method]
    mode = schemathesis.GenerationMode.NEGATIVE if wrong else schemathesis.GenerationMode.POSITIVE
    if wrong and method == "get":
        return  # there is nothing to get wrong

    @settings(
        max_examples=20,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=mode))
    def holds(case: Any) -> None:
        case.call_and_validate(LOCAL, checks=CHECKS)

    holds()


def test_the_document_needs_no_key_and_says_that_others_do():
    with served(Settings(api_keys={"ada": "ada-secret"})) as server:
        found = server.client.get("/openapi.json").json()
    assert found["security"] == [{"apiKey": []}]
    assert found["paths"]["/health"]["get"]["security"] == []
    assert found["info"]["version"]


def test_every_path_is_documented(server):
    paths = {route.path.replace("{model:path}", "{model}") for route in server.client.app.routes}
    assert paths - {"/openapi.json"} == set(DOCUMENT["paths"])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize"])
def test_every_documented_field_is_known(path):
    """Each may be null, if it need not be there; and what is not documented is refused."""
    body = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    read = {"/v1/chat/completions": schemas.read_chat, "/v1/completions": schemas.read_completion}.get(
        path, schemas.read_tokenize
    )
    given = {
        "model": "fake",
        **({"messages": CHAT["messages"]} if "messages" in body["properties"] else {"prompt": "x"}),
    }
    read({**dict.fromkeys(body["properties"]), **given})
    with pytest.raises(Exception, match="unknown field"):
        read({**given, "another": None})


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
@settings(max_examples=60, deadline=None)
def test_no_value_anywhere_breaks_the_reading(value):
    """Each field of a chat completion, one at a time, holds anything that JSON can say."""
    for name in DOCUMENT["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"][
        "schema"
    ]["properties"]:
        try:
            schemas.read_chat({**CHAT, name: value})
        except ApiError as error:
            wrong = error
        else:
            continue
        assert 400 <= wrong.status < 500 and wrong.response().body
