"""POST /v1/messages and count_tokens over HTTP: keys, models, limits, errors, hits and tenants."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from radixkv.serve import Settings
from tests.serve.anthropic.messages import (
    ASKED,
    BODY,
    CALL,
    LOOK,
    MARK,
    assembled,
    message,
    prompt_tokens,
    stream,
)
from tests.serve.served import Served, fake_model, says, says_in_turn, served, tokenizer
from tests.serve.styles import QWEN

KEYS = {"ada": "ada-secret-1", "bob": "bob-secret-2"}
PATHS = ("/v1/messages", "/v1/messages/count_tokens")
# ---- keys, models, errors


@pytest.mark.parametrize("path", PATHS)
def test_both_forms_of_a_key_are_accepted(path: str):
    bearer = {"Authorization": f"Bearer {KEYS['ada']}"}
    with served(Settings(api_keys=KEYS)) as server:
        for headers in (bearer, {"x-api-key": KEYS["ada"]}, {**bearer, "x-api-key": "of another provider"}):
            assert server.post(path, BODY, headers=headers).status_code == 200
        for headers in ({}, {"x-api-key": "wrong-secret"}, {"Authorization": f"Basic {KEYS['ada']}"}):
            answer = server.post(path, BODY, headers=headers)
            assert (answer.status_code, answer.json()["type"]) == (401, "error")
            assert answer.json()["error"]["type"] == "authentication_error"
            assert answer.json()["request_id"] == answer.headers["request-id"]


def test_every_name_is_served_unless_the_server_is_strict():
    with served(brain=says("Hi.")) as server:
        for name in ("claude-sonnet-4-5", "fake"):
            assert message(server, model=name)["model"] == name
    with served(Settings(strict_fields=True)) as server:
        assert server.post("/v1/messages", {**BODY, "model": "fake"}).status_code == 200
        for path in PATHS:
            body = {"model": "claude-sonnet-4-5", "messages": ASKED}
            answer = server.post(path, body)
            assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")
            unknown = server.post(path, {**body, "model": "fake", "mood": 1})
            assert unknown.status_code == 400 and "mood" in unknown.json()["error"]["message"]


def test_limits_and_failures_are_errors_of_this_form():
    def failed(server: Any, **options: Any) -> tuple[int, str, str]:
        answer = server.client.post("/v1/messages", **options)
        assert answer.json()["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
        error = answer.json()["error"]
        return answer.status_code, error["type"], error["message"]

    with served(Settings(max_body=1000)) as server:
        assert failed(server, content=b"x" * 2000)[:2] == (413, "request_too_large")
        assert failed(server, content=b"{")[:2] == (400, "invalid_request_error")
        assert failed(server, content=rb'{"model": "\ud800", "messages": []}')[:2] == (400, "invalid_request_error")
    with served(Settings(max_running=1, max_waiting=0)) as server, server.service.gate.limiter.admit(None):
        answer = server.post("/v1/messages", BODY)
        assert answer.headers["retry-after"] == "1"
        assert (answer.status_code, answer.json()["error"]["type"]) == (429, "rate_limit_error")
    with served(fault=lambda chunks: 1 / 0) as server:
        for path, wrong in (
            ("/v1/messages", "GET"),
            ("/messages/count_tokens", "PUT"),
            ("/v1/messages/batches", "POST"),
        ):
            answer = server.client.request(wrong, path)
            assert answer.status_code in (404, 405) and answer.json()["type"] == "error"
        status, kind, words = failed(server, json=BODY)
        assert (status, kind) == (500, "api_error") and "division" not in words
    with served() as server:
        server.engine.close()
        assert failed(server, json=BODY)[:2] == (503, "overloaded_error")
        assert failed(server, json=BODY, headers={"Host": "evil.example"})[:2] == (403, "permission_error")


@pytest.mark.parametrize("words", [3000, 100_000])
def test_a_prompt_that_is_too_long_is_refused_in_the_words_on_which_clients_compact(words: int):
    with served() as server:
        answer = server.post("/v1/messages", {**BODY, "messages": [{"role": "user", "content": "word " * words}]})
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"
    begin, tokens, unit, comparison, limit, end = answer.json()["error"]["message"].rsplit(" ", 5)
    assert (begin, unit, comparison, limit, end) == ("prompt is too long:", "tokens", ">", "1999", "maximum")
    assert int(tokens) > 1999


@pytest.mark.parametrize("content", ["Some words. " * 10_000, "ü" * 30_000], ids=["words", "letters"])
def test_a_prompt_of_any_length_is_counted(content: str):
    """The counted pieces may differ from the whole by some tokens at each cut."""
    body = {"model": "m", "messages": [{"role": "user", "content": content}], "thinking": {"type": "adaptive"}}
    with served() as server:
        count = server.post("/v1/messages/count_tokens", body).json()["input_tokens"]
        begun = [*body["messages"], {"role": "assistant", "content": "Well"}]
        assert server.post("/v1/messages/count_tokens", {**body, "messages": begun}).json()["input_tokens"] > count
        short = sum(server.service.conversations.token_counts(ASKED))
        assert short == server.post("/v1/messages/count_tokens", BODY).json()["input_tokens"]
    whole = tokenizer().apply_chat_template(body["messages"], tokenize=False, add_generation_prompt=True)
    exact = len(tokenizer().encode(whole, add_special_tokens=False))
    assert exact > 2000 and abs(count - exact) <= 2 * (len(content) // 16_000 + 1)


# ---- hits of clients that send the conversation again


def blocks(content: Any, **marks: Any) -> Any:
    """Return content as a list of blocks, the last one with the marks."""
    found = [{"type": "text", "text": content}] if isinstance(content, str) else [dict(each) for each in content]
    return [*found[:-1], {**found[-1], **marks}]


@pytest.mark.parametrize("streamed", [True, False])
def test_a_last_message_of_the_assistant_is_continued(streamed: bool):
    with served(brain=says("You are Sam, and I am glad of it.")) as server:

        def ask(history: list[Any]) -> dict[str, Any]:
            return assembled(stream(server, messages=history)) if streamed else message(server, messages=history)

        begun = [*ASKED, {"role": "assistant", "content": "You are Sam,"}]
        answer = ask(begun)
        assert answer["content"][0]["text"] == " and I am glad of it."
        counted = server.post("/v1/messages/count_tokens", {"model": "m", "messages": begun}).json()
        assert counted["input_tokens"] == prompt_tokens(answer["usage"])
        spent = prompt_tokens(answer["usage"]) + answer["usage"]["output_tokens"]
        said = {"role": "assistant", "content": "You are Sam, and I am glad of it."}
        assert ask([*ASKED, said, *ASKED])["usage"]["cache_read_input_tokens"] >= spent - 1


@contextmanager
def templated(template: str) -> Iterator[Any]:
    """Yield a fake model with another chat template."""
    model = fake_model()
    before, model.tokenizer.chat_template = model.tokenizer.chat_template, template
    try:
        yield model
    finally:
        model.tokenizer.chat_template = before


def test_thinking_is_switched_where_the_template_has_a_switch():
    switch = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    body = {"model": "m", "messages": ASKED}
    with templated(QWEN + switch) as model, served(brain=says("So."), model=model) as server:

        def length(**fields: Any) -> int:
            answer = server.post("/v1/messages/count_tokens", {**body, **fields})
            assert "warning" not in answer.headers
            assert prompt_tokens(message(server, **fields)["usage"]) == answer.json()["input_tokens"]
            return int(answer.json()["input_tokens"])

        assert length() == length(thinking={"type": "adaptive"}) < length(thinking={"type": "disabled"})
    with served(brain=says("So.")) as server:
        answer = server.post("/v1/messages", {**BODY, "thinking": {"type": "disabled"}})
    assert answer.headers["warning"] == '299 radixkv "ignored: thinking"'


class Agent:
    """A session in the form of Claude Code's: a system message after the first prompt, marks that move, many tools."""

    def __init__(self, server: Served, number: int, prompt: str) -> None:
        reminder = {"type": "text", "text": "Remember the rules of this project. " * 30}
        self.server, self.number = server, number
        self.rules = "You have skills, and each skill has a description. " * 30
        self.history: list[Any] = [
            {"role": "user", "content": [reminder, {"type": "text", "text": prompt}]},
            {"role": "system", "content": [{"type": "text", "text": self.rules, **MARK}]},
        ]

    def turn(self) -> dict[str, Any]:
        billing = f"x-anthropic-billing-header: cc_version=2.1.330.0{self.number}b; cc_entrypoint=sdk-cli;"
        last = self.history[-1]
        answer = stream(
            self.server,
            max_tokens=32000,
            system=[*blocks(billing), *blocks("You are an agent. " * 60, **MARK)],
            tools=[
                {**LOOK, "name": name, "description": "It has a long description. " * 40} for name in ("look", "edit")
            ],
            messages=[*self.history[:-1], {**last, "content": blocks(last["content"], **MARK)}],
            thinking={"type": "adaptive", "display": "updates"},
            metadata={"user_id": f"session {self.number}"},
        )
        reply = assembled(answer)
        self.history[1] = {"role": "system", "content": self.rules}  # a string from the second turn on
        self.history.append({"role": "assistant", "content": reply["content"]})
        return dict(reply["usage"])

    def result(self, **changes: Any) -> None:
        """Answer the last call, whose input comes back with changes at the front."""
        call = self.history[-1]["content"][-1]
        call["input"] = {**changes, **call["input"]}
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "The file has 3 lines. " * 5}
        self.history.append({"role": "user", "content": [result]})


def test_the_sessions_of_an_agent_hit():
    edit = CALL.replace("look", "edit")
    brain = says_in_turn(f"I will look. {CALL}", edit, "Done: the line is right now.", "You are welcome.")
    with served(brain=brain, model=fake_model(max_length=8000), num_blocks=4096) as server:
        agent = Agent(server, 1, "Correct the second line.")
        first = agent.turn()
        agent.result()
        second = agent.turn()
        agent.result(replace_all=False)
        third = agent.turn()
        agent.history.append({"role": "user", "content": "Thank you."})
        fourth = agent.turn()
        another = Agent(server, 2, "Please look for mistakes in the file, and say how many there are.").turn()
    assert prompt_tokens(first) > 2000
    for before, usage in ((first, second), (third, fourth)):
        whole = prompt_tokens(before) + before["output_tokens"]
        assert usage["cache_read_input_tokens"] == whole - 1 >= 0.99 * whole
    assert third["cache_read_input_tokens"] >= prompt_tokens(second) - 1  # only the changed call was computed again
    assert another["cache_read_input_tokens"] >= 0.95 * prompt_tokens(first)
