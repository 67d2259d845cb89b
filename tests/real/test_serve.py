"""`radixkv serve FILE.gguf` with the official `openai` client: its replies are the engine's own, and chats hit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from radixkv import Engine, SamplingParams

SYSTEM = {"role": "system", "content": "You answer in one short sentence."}
GREEDY = SamplingParams(temperature=0, max_tokens=32)


@pytest.fixture(scope="module")
def client(model_file: Path) -> Iterator[openai.OpenAI]:
    """A client of the real command, which ends with status 0 on Ctrl-C."""
    options = ["--port", "0", "--kv-memory", "400MB", "--dtype", "float32", "--model-name", "smollm2", "--quiet"]
    command = [sys.executable, "-m", "radixkv", "serve", str(model_file), *options]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "RADIXKV_MONITOR": "0"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stderr is not None
            url = next(line.split()[-1] for line in process.stderr if "/v1" in line)
            with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
                yield client
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
        finally:
            process.kill()


def asked(client: openai.OpenAI, messages: Any, **options: Any) -> Any:
    options = {"temperature": 0, "max_tokens": 32, **options}
    return client.chat.completions.create(model="smollm2", messages=messages, **options)


def test_a_reply_is_the_engines_own(client: openai.OpenAI, engine: Engine) -> None:
    messages = [SYSTEM, {"role": "user", "content": "What is the capital of France?"}]
    [own] = engine.generate([messages], GREEDY)
    reply = asked(client, messages)
    assert reply.choices[0].message.content == own.text == "The capital of France is Paris."
    assert reply.choices[0].finish_reason == own.finish_reason == "stop"
    assert reply.usage.prompt_tokens == own.usage.prompt_tokens
    assert reply.usage.completion_tokens == own.usage.output_tokens


def test_a_conversation_that_is_sent_again_hits_all_but_its_new_tokens(client: openai.OpenAI) -> None:
    """After the first reply, the prompt tokens that are not cached are the last sampled one and the new message."""
    messages: list[Any] = [SYSTEM]
    known = 0
    for question in ("What is the capital of Italy?", "What language is spoken there?", "Which currency do they use?"):
        messages.append({"role": "user", "content": question})
        reply = asked(client, messages)
        if known:
            assert reply.usage.prompt_tokens_details.cached_tokens == known - 1
        known = reply.usage.prompt_tokens + reply.usage.completion_tokens
        messages.append({"role": "assistant", "content": reply.choices[0].message.content})
    assert [each["content"].rstrip(".").split()[-1] for each in messages[2::2]][::2] == ["Rome", "Euro"]
