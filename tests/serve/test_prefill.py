"""A reply continues the last message, an assistant's: the prompt ends inside that message, and later turns hit it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chat.worlds import CHATML, THINKING
from tests.serve.served import ASKED, CHAT, events, says, served, texts
from tests.serve.styles import QWEN
from tests.serve.test_template_options import server_of

PATH = "/v1/chat/completions"
BEGUN = {"role": "assistant", "content": "The first three"}
MORE = {"role": "user", "content": "And then?"}


def prompt(server: Any, messages: list[dict[str, Any]], **fields: Any) -> str:
    answer = server.post("/tokenize", {"messages": messages, **fields})
    assert answer.status_code == 200, answer.text
    return str(server.engine.model.tokenizer.decode(answer.json()["tokens"], skip_special_tokens=False))


@pytest.mark.parametrize("template", [CHATML, THINKING, QWEN], ids=["ChatML", "thinking", "Qwen"])
@pytest.mark.parametrize("field", [{"continue_final_message": True}, {"add_generation_prompt": False}])
def test_a_prompt_ends_inside_the_last_message(template, field):
    with server_of(template) as server:
        found = prompt(server, [*ASKED, BEGUN], **field)
        assert found == prompt(server, ASKED) + "The first three"
        assert prompt(server, [*ASKED, BEGUN]).endswith(
            "<|im_start|>assistant\n"
        )  # without the field a new reply begins
        spaces = {"role": "assistant", "content": " a \n"}
        assert prompt(server, [*ASKED, spaces], **field).endswith("assistant\n a \n")


@pytest.mark.parametrize("stream", [False, True])
def test_the_reply_continues_the_message_and_the_next_turn_hits_all_of_it(stream):
    """The scripted reply begins with the message, as sampled: the server returns the rest."""
    with served(brain=says("The first three are red, green and blue.")) as server:
        body = {**CHAT, "messages": [*ASKED, BEGUN], "continue_final_message": True, "stream": stream}
        answer = server.post(PATH, {**body, "stream_options": {"include_usage": True}} if stream else body)
        if stream:
            found = events(answer.text)
            rest, spent = texts(found[:-1])[0], found[-1]["usage"]
        else:
            rest, spent = answer.json()["choices"][0]["message"]["content"], answer.json()["usage"]
        assert rest == " are red, green and blue."
        whole = {"role": "assistant", "content": BEGUN["content"] + rest}
        again = server.chat(messages=[*ASKED, whole, MORE])
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == spent["total_tokens"] - 1
        server.service.conversations._index.check()


@pytest.mark.parametrize("template", [CHATML, QWEN], ids=["ChatML", "Qwen"])
def test_a_reply_that_was_cut_continues_from_its_own_ids(template):
    """Random ids: encoding their text gives other ones, so only the sampled ids can be continued."""
    chat = {"model": "fake", "seed": 5, "temperature": 1, "ignore_eos": True}
    with server_of(template) as server:
        whole = server.post(PATH, {**chat, "messages": ASKED, "max_tokens": 24}).json()
        first = server.post(PATH, {**chat, "messages": ASKED, "max_tokens": 12}).json()
        said = first["choices"][0]["message"]
        assert whole["choices"][0]["message"]["content"].startswith(said["content"].rstrip("\ufffd"))
        body = {**chat, "messages": [*ASKED, said], "continue_final_message": True, "max_tokens": 12}
        second = server.post(PATH, body).json()
        assert second["usage"]["prompt_tokens"] == first["usage"]["total_tokens"]
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["total_tokens"] - 1
        rest = second["choices"][0]["message"]["content"]
        third = [*ASKED, {"role": "assistant", "content": said["content"] + rest}, MORE]
        again = server.post(PATH, {**chat, "messages": third, "max_tokens": 1}).json()
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == second["usage"]["total_tokens"] - 1


def test_a_reply_that_was_cut_while_it_thought_goes_on_thinking():
    with served(brain=says("<think>\nOne two three four.\n</think>\n\nFive.")) as server:
        first = server.chat(max_tokens=10)
        said = first["choices"][0]["message"]
        assert said["reasoning_content"] and not said["content"]
        rest = server.chat(messages=[*ASKED, said], continue_final_message=True)["choices"][0]["message"]
    assert rest["content"] == "Five."
    assert said["reasoning_content"] + rest["reasoning_content"] == "One two three four."


def test_what_cannot_be_continued_is_refused():
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    with served() as server:
        for body, param in [
            ({"continue_final_message": True}, "continue_final_message"),
            ({"add_generation_prompt": False}, "add_generation_prompt"),
            (
                {"messages": [*ASKED, BEGUN], "continue_final_message": True, "add_generation_prompt": True},
                "add_generation_prompt",
            ),
            (
                {"messages": [*ASKED, {"role": "assistant", "tool_calls": [call]}], "continue_final_message": True},
                "continue_final_message",
            ),
        ]:
            answer = server.post(PATH, {**CHAT, **body})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
        fine = {"continue_final_message": False, "add_generation_prompt": True, "max_tokens": 1}
        assert "warning" not in server.post(PATH, {**CHAT, **fine}).headers
