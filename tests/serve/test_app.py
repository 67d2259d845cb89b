"""Endpoints return the engine's results in OpenAI's form."""

from __future__ import annotations

import dataclasses
import gzip
import json
import logging
import threading
from datetime import datetime

import pytest

from radixkv import SamplingParams, __version__
from radixkv.serve import Settings
from radixkv.serve.token_texts import TokenTexts
from tests.serve.served import ASKED, CHAT, fake_model, says, served, texts, tokenizer
from tests.telemetry.served import runtime_folder

PLAIN = {"model": "fake", "prompt": "Once upon a time", "temperature": 0, "max_tokens": 6}


@pytest.mark.parametrize("stream", [False, True])
def test_each_reply_is_remembered_before_its_end_is_told(stream):
    """Random token ids, which a tokenizer would encode differently."""
    with served() as server:
        body = {**CHAT, "max_tokens": 20, "n": 3, "temperature": 1, "ignore_eos": True}
        if stream:
            said = list(texts(server.events("/v1/chat/completions", body)).values())
        else:
            said = [choice["message"]["content"] for choice in server.chat(**body)["choices"]]
        assert server.service.conversations.stats.remembered == 3
        for text in said:
            more = [{"role": "assistant", "content": text}, {"role": "user", "content": "And?"}]
            server.chat(messages=[*ASKED, *more], max_tokens=1)
        assert server.service.conversations.stats.found == 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_cut_reply_with_thinking_is_continued_as_it_was_told(stream):
    """The words before a stop string occur once in the next prompt."""
    brain = says("<think>a</think> ha STOPha")
    with served(brain=brain) as server:
        body = {**CHAT, "stop": "STOP"}
        if stream:
            events = server.events("/v1/chat/completions", body)
            said, thinking = texts(events)[0], texts(events, "reasoning_content")[0]
        else:
            message = server.chat(**body)["choices"][0]["message"]
            said, thinking = message["content"], message["reasoning_content"]
        assert (said, thinking) == ("ha ", "a")
        more = [*ASKED, {"role": "assistant", "content": said}, {"role": "user", "content": "And?"}]
        prompt = server.post("/tokenize", {"messages": more}).json()["tokens"]
        assert server.service.conversations.stats.found == 1
    assert "<think>a</think> ha <|im_end|>" in tokenizer().decode(prompt)


def test_a_token_of_the_clients_own_that_ends_a_reply_is_not_part_of_it():
    (end,) = tokenizer().encode(".", add_special_tokens=False)
    with served(brain=says("One, two. Three.")) as server:
        message = server.chat(stop_token_ids=[end])["choices"][0]["message"]
        more = [*ASKED, message, {"role": "user", "content": "And?"}]
        prompt = server.post("/tokenize", {"messages": more}).json()["tokens"]
        assert server.service.conversations.stats.found == 1
    assert message["content"] == "One, two"
    assert "One, two<|im_end|>" in tokenizer().decode(prompt)


def test_logprobs_are_of_every_token():
    with served(brain=says("Two words")) as server:
        answer = server.chat(logprobs=True, top_logprobs=2)
        streamed = server.events("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2})
    entries = answer["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == "Two words<|im_end|>"
    assert all(bytes(entry["bytes"]).decode() == entry["token"] for entry in entries)
    assert all(len(entry["top_logprobs"]) == 2 and entry["logprob"] <= 0 for entry in entries)
    assert all(entry["top_logprobs"][0]["token"] == entry["token"] for entry in entries)
    one_by_one = [choice["logprobs"] for event in streamed for choice in event["choices"] if choice["logprobs"]]
    assert [entry for each in one_by_one for entry in each["content"]] == entries


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_large_answers_are_made_outside_the_event_loop(path, monkeypatch):
    threads, decoded = set(), []

    class Counting(TokenTexts):
        def __getitem__(self, token):
            threads.add(threading.current_thread().name)
            return super().__getitem__(token)

    class Decodes:
        def decode(self, ids):
            decoded.extend(ids)
            return tokenizer().decode(ids)

    wanted = {"logprobs": True, "top_logprobs": 20} if "chat" in path else {"logprobs": 20}
    asked = {"messages": ASKED} if "chat" in path else {"prompt": "Once"}
    with served() as server:
        monkeypatch.setattr(server.service, "opens_thinking", lambda _: False)  # tokenize reads a few tokens itself
        monkeypatch.setattr(server.service, "token_texts", Counting(Decodes()))
        body = {"model": "fake", **asked, **wanted, "max_tokens": 30, "n": 4, "ignore_eos": True}
        assert server.post(path, body).status_code == 200
    assert threads and all(name.startswith("asyncio_") for name in threads)
    assert decoded and len(decoded) == len(set(decoded))


def test_a_template_may_open_the_thinking():
    opens = type(tokenizer()).from_pretrained(tokenizer().name_or_path)
    opens.chat_template = opens.chat_template.replace("assistant\n{%", "assistant\n<think>\n{%")
    shown = opens.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True)
    assert shown.endswith("<think>\n")
    spoken = [*opens.encode("Hm.\n</think>\n\nYes.", add_special_tokens=False), 2]
    begin = len(opens.encode(shown, add_special_tokens=False))
    with served(model=fake_model(tokenizer=opens), brain=lambda tokens: spoken[len(tokens) - begin]) as server:
        message = server.chat()["choices"][0]["message"]
        streamed = server.events("/v1/chat/completions", CHAT)
    assert (message["content"], message["reasoning_content"]) == ("Yes.", "Hm.")
    assert texts(streamed) == {0: "Yes."} and texts(streamed, "reasoning_content") == {0: "Hm."}


# ---- texts


@pytest.mark.parametrize("prompt", ["Once upon a time", [5, 6, 7], ["One", "Two"], [[5, 6], [7]]])
def test_completions_take_all_four_forms_of_prompts(prompt):
    many = prompt if len(prompt) == 2 else [prompt]
    params = SamplingParams(temperature=0, max_tokens=6, n=2)
    with served() as server:
        answer = server.post("/v1/completions", {**PLAIN, "prompt": prompt, "n": 2}).json()
        streamed = server.events("/v1/completions", {**PLAIN, "prompt": prompt, "n": 2})
        own = server.engine.generate(many, params)
    said = [text for each in own for text in (each.text, *(other.text for other in each.alternatives))]
    assert [choice["text"] for choice in answer["choices"]] == said
    assert texts(streamed) == dict(enumerate(said))
    assert answer["usage"]["prompt_tokens"] == sum(each.usage.prompt_tokens for each in own)


# ---- other endpoints


def test_models_health_and_tokens():
    with served(Settings(model_name="house-model")) as server:
        page = server.client.get("/v1/models").json()
        [card] = page["data"]
        assert card["id"] == "house-model" and card["max_model_len"] == 2000
        assert (page["first_id"], page["last_id"], page["has_more"]) == ("house-model", "house-model", False)
        assert (card["type"], card["display_name"]) == ("model", "house-model")  # as Anthropic's clients read it
        assert datetime.fromisoformat(card["created_at"]).timestamp() == card["created"]
        assert server.client.get("/v1/models/house-model").json() == card
        assert server.client.get("/v1/models/another").status_code == 404
        assert server.client.get("/health").json() == {"status": "ok"}
        ids = server.post("/tokenize", {"prompt": "Once upon"}).json()
        assert ids == {"tokens": tokenizer().encode("Once upon"), "count": len(ids["tokens"]), "max_model_len": 2000}
        counted = server.post("/tokenize", {"messages": ASKED}).json()["count"]
        assert counted == server.chat(model="house-model", max_tokens=1)["usage"]["prompt_tokens"]
        missing = server.post("/v1/chat/completions", CHAT)
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"


def test_paths_that_vllm_and_claude_code_ask_for():
    with served(Settings(api_keys={"ada": "ada-secret"})) as server:
        key = {"x-api-key": "ada-secret"}
        assert server.client.head("/api/hello").status_code == 200
        assert server.client.get("/version").json()["version"] == __version__
        assert server.client.get("/ping").json() == server.client.post("/ping").json() == {"status": "ok"}
        assert server.client.get("/load").status_code == 401
        assert server.client.get("/load", headers=key).json() == {"server_load": 0}
        for text in ("Once upon a time", ""):
            tokens = tokenizer().encode(text)
            assert server.post("/detokenize", {"tokens": tokens}, headers=key).json() == {"prompt": text}
        wrong = server.post("/detokenize", {"tokens": [99999]}, headers=key)
        assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "tokens"


def test_usage_names_the_tokens_that_came_from_the_host():
    prompt, others = list(range(3, 43)), [list(range(50 * at, 50 * at + 40)) for at in range(1, 12)]
    with served(num_blocks=24, host_blocks=200, model=fake_model(max_length=96)) as server:

        def details(tokens):
            answer = server.post("/v1/completions", {"model": "fake", "prompt": tokens, "max_tokens": 1})
            return answer.json()["usage"]["prompt_tokens_details"]

        assert [details(prompt), details(prompt)] == [{"cached_tokens": 0}, {"cached_tokens": 39}]
        for each in others:
            details(each)
        assert details(prompt) == {"cached_tokens": 39, "host_tokens": 39}
        answer = server.post("/v1/responses", {"model": "fake", "input": "Hi", "max_output_tokens": 1}).json()
        assert "host_tokens" not in answer["usage"]["input_tokens_details"]


def test_what_does_not_exist_says_so_in_the_same_shape():
    with served() as server:
        nowhere, wrong = server.client.get("/health/"), server.client.get("/v1/completions")  # nothing is redirected
    assert (nowhere.status_code, wrong.status_code) == (404, 405)
    assert nowhere.json()["error"]["code"] == "not_found" and wrong.json()["error"]["code"] == "method_not_allowed"
    assert "POST" in wrong.headers["allow"]


def test_a_compressed_body_is_told_so():
    path = "/tokenize"
    with served(Settings(max_body=100)) as server:
        answer = server.client.post(path, content=gzip.compress(b"x" * 10_000), headers={"Content-Encoding": "gzip"})
        plain = server.client.post(path, content=b"x", headers={"Content-Encoding": "identity"})
    assert answer.status_code == 415 and answer.json()["error"]["code"] == "unsupported_media_type"
    assert plain.status_code == 400


def test_a_step_that_fails_is_500_and_leaves_the_server_serving(caplog):
    faults = [RuntimeError("secret words")]

    def fault(chunks):
        if faults:
            raise faults.pop()

    with served(brain=says("Yes."), fault=fault) as server:
        failed = server.post("/v1/chat/completions", CHAT)
        assert server.chat()["choices"][0]["message"]["content"] == "Yes."
        faults.append(RuntimeError("secret words"))
        streamed = server.post("/v1/chat/completions", {**CHAT, "stream": True})
    assert failed.status_code == 500 and failed.json()["error"]["type"] == "server_error"
    assert "secret" not in failed.text + streamed.text
    last = streamed.text.strip().splitlines()[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "internal_error"
    assert caplog.text.count("RuntimeError: secret words") >= 2


def test_the_log_has_numbers_and_no_content(caplog):
    caplog.set_level(logging.DEBUG, "radixkv.serve")
    words = [{"role": "user", "content": "PURPLE elephants"}]
    with served(Settings(api_keys={"ada": "SECRET-key"}), brain=says("GREEN mice")) as server:
        headers = {"Authorization": "Bearer SECRET-key", "X-Request-Id": "my-1", "X-RadixKV-Namespace": "HIDDEN"}
        answer = server.post("/v1/chat/completions", {**CHAT, "messages": words}, headers=headers)
        server.post("/v1/chat/completions", {**CHAT, "messages": words, "mood": "YELLOW"}, headers=headers)
        server.client.get("/v1/models/BLUE", headers=headers)
        odd = server.client.get("/health", headers={"X-Request-Id": "bad id\t"})
    assert answer.headers["x-request-id"] == "my-1"
    assert odd.headers["x-request-id"].startswith("req_")
    lines = [record.getMessage() for record in caplog.records if record.name == "radixkv.serve"]
    assert lines[0].startswith("my-1 POST /v1/chat/completions 200 ") and "cached=0" in lines[0]
    assert len(lines) == 4 and lines[1].endswith(" ignored=mood")
    for word in ("PURPLE", "GREEN", "SECRET", "HIDDEN", "YELLOW", "BLUE"):
        assert word not in caplog.text


def test_a_log_line_and_a_record_of_the_monitor_name_the_same_request(caplog):
    caplog.set_level(logging.INFO, "radixkv.serve")
    key = {"Authorization": "Bearer SECRET-key"}
    with runtime_folder(), served(Settings(api_keys={"ada": "SECRET-key"}), monitor=True) as server:
        monitoring = server.engine.monitoring
        monitoring.publisher.close()
        server.engine.client.thread.ask(lambda: monitoring.recorder.cache_recorder.attach(server.engine.core.cache))
        for number, path in enumerate(("/v1/chat/completions", "/v1/messages", "/v1/completions"), 1):
            body = PLAIN if path == "/v1/completions" else CHAT
            names = {"X-Request-Id": f"my-{number}", "X-Radixkv-Label": "nightly" if number < 3 else "two words"}
            assert server.post(path, {"max_tokens": 2, **body}, headers={**key, **names}).status_code == 200
        changes = server.engine.client.thread.ask(monitoring.recorder.collect)
    lines = [record.getMessage() for record in caplog.records if record.name == "radixkv.serve"]
    assert all(line.startswith(f"my-{number} ") and " tenant=ada" in line for number, line in enumerate(lines, 1))
    assert [" label=nightly" in line for line in lines] == [True, True, False], "a label of other characters is none"
    found = [(each.request_id, each.tenant, each.label) for each in changes.requests]
    assert found == [("my-1", "ada", "nightly"), ("my-2", "ada", "nightly"), ("my-3", "ada", None)]
    assert ("my-2", "ada", "nightly") in [(each.request_id, each.tenant, each.label) for each in changes.sessions]


def test_a_model_without_a_tokenizer_completes_token_ids():
    model = dataclasses.replace(fake_model(), tokenizer=None)
    with served(model=model) as server:
        answer = server.post("/v1/completions", {**PLAIN, "prompt": [5, 6, 7], "logprobs": 0})
        assert answer.status_code == 200 and len(answer.json()["choices"][0]["logprobs"]["tokens"]) == 6
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", PLAIN)):
            assert server.post(path, body).status_code == 400
