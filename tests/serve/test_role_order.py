"""Text of the user after the results of tool calls: agents send it, and some chat templates refuse it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from radixkv.serve.conversations import Conversations
from radixkv.serve.history import HistoryIndex
from tests.chat import styles, worlds
from tests.chat.tool_call_dialects import DIALECTS
from tests.serve.anthropic.messages import LOOK
from tests.serve.served import Served, fake_model, served

# As Mistral's templates do: user and assistant alternate, apart from calls and their results.
ALTERNATES = """{%- set turns = namespace(at=0) %}
{%- for m in messages if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
{%- if (m.role == 'user') != (turns.at % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
{%- set turns.at = turns.at + 1 %}
{%- endfor %}
{%- for m in messages if m.role == 'system' and not loop.first %}{{ raise_exception('No late system') }}{% endfor %}"""
QWEN = DIALECTS["Qwen"]
CALL = [("look", {"path": "a.txt"})]


TAKE = (worlds.CHATML, styles.LLAMA3, styles.MISTRAL, styles.QWEN3, styles.GPT_OSS, "{{ messages[-1].content }}")


def test_templates_that_refuse_it_are_recognised() -> None:
    def takes(template: str) -> bool:
        tokenizer = worlds.byte_tokenizer(template)
        return Conversations(tokenizer, frozenset({tokenizer.eos_token_id}), HistoryIndex(0)).user_after_results

    assert [takes(template) for template in TAKE] == [True] * len(TAKE)
    assert not takes(ALTERNATES + worlds.CHATML)


def scripted(template: str) -> Any:
    """Serve a model that calls `look` until a prompt has the word "enough"."""
    dialect = replace(QWEN, template=template)
    tokenizer = dialect.tokenizer()
    brain = dialect.brain(lambda prompt: "Done." if "enough" in prompt else QWEN.write(CALL))
    facts = {"tokenizer": tokenizer, "vocab_size": len(tokenizer), "stop_token_ids": dialect.stops()}
    return served(model=fake_model(**facts), brain=brain)


def message_turns(server: Served, added: Callable[[int], list[Any]]) -> list[tuple[int, int]]:
    """Return (cached, prompt and reply) of each turn on /v1/messages; `added` is the content after each result."""
    body: dict[str, Any] = {"model": "m", "tools": [LOOK], "temperature": 0, "max_tokens": 200}
    body["messages"] = [{"role": "user", "content": "Go."}]
    costs = []
    for turn in range(4):
        answer = server.post("/v1/messages", body)
        assert answer.status_code == 200, answer.text
        content, used = answer.json()["content"], answer.json()["usage"]
        costs.append((used["cache_read_input_tokens"], sum(used.values())))
        if turn < 3:
            result = {"type": "tool_result", "tool_use_id": content[-1]["id"], "content": "."}
            body["messages"] += [
                {"role": "assistant", "content": content},
                {"role": "user", "content": [result, *added(turn)]},
            ]
    assert content[-1]["text"] == "Done."
    return costs


@pytest.mark.parametrize("template", [QWEN.template, ALTERNATES + QWEN.template], ids=["any order", "alternating"])
def test_texts_after_results_are_taken_and_later_turns_hit(template: str) -> None:
    def added(turn: int) -> list[Any]:
        texts = ["A reminder."] if turn < 2 else ["A reminder.", "That is enough."]
        return [{"type": "text", "text": each} for each in texts]

    with scripted(template) as server:
        costs = message_turns(server, added)
    for (_, before), (cached, _) in pairwise(costs):
        assert cached == before - 1
