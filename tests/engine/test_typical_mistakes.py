"""The mistakes of a first hour: each error names the argument, its value and the right way."""

from __future__ import annotations

import asyncio
import inspect
import logging
import pickle
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

import radixkv
from radixkv import AsyncEngine, ChatSession, Engine, EngineConfig, SamplingParams
from radixkv.argument_names import FOREIGN

GREEDY = SamplingParams(temperature=0, max_tokens=4)
BOT = [{"role": "bot", "content": "Hi"}]


@dataclass(frozen=True)
class World:
    """An engine that runs and one that is closed, a session, and a folder of wrong files."""

    engine: Engine
    chat: ChatSession
    closed: Engine
    files: Path

    def load(self, model: Any = "tiny", **settings: Any) -> Engine:
        return Engine.load(self.files / model if model != "tiny" else model, **settings)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    files = tmp_path_factory.mktemp("files")
    (files / "cat.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))
    (files / "folder").mkdir()
    (files / "cut.gguf").write_bytes(b"GGUF" + bytes([3, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 5, 0]))
    with Engine.load("tiny", num_blocks=64, monitor=False) as engine, engine.chat() as chat:
        closed = Engine.load("tiny", num_blocks=64, monitor=False)
        closed.close()
        yield World(engine, chat, closed, files)


def _wrapped(world: World) -> Any:
    return AsyncEngine(world.engine)


MISTAKES: list[tuple[Callable[[World], Any], str]] = [
    # names of arguments
    (lambda w: Engine("tiny"), "Engine(...) connects parts; call Engine.load('tiny')"),
    (lambda w: ChatSession("tiny"), "ChatSession(...); call engine.chat()"),
    (lambda w: AsyncEngine("tiny"), "AsyncEngine wraps an engine; 'tiny'; await AsyncEngine.load('tiny')"),
    (lambda w: w.load(kv_mem="1GB"), "Engine.load; kv_mem='1GB'; did you mean kv_memory?"),
    (lambda w: w.load(gpu_memory_utilization=0.9), "gpu_memory_utilization=0.9; did you mean kv_memory?"),
    (lambda w: w.load(temperature=0), "Engine.load; temperature=0; params=SamplingParams(temperature=0)"),
    (lambda w: SamplingParams(max_new_tokens=9), "max_new_tokens=9; did you mean max_tokens?"),
    (lambda w: GREEDY.but(temprature=1), "temprature=1; did you mean temperature?"),
    (lambda w: w.engine.generate(["Hi"], max_tokens=9), "Engine.generate; params=SamplingParams(max_tokens=9)"),
    (lambda w: w.engine.generate(["Hi"], sampling_params=GREEDY), "sampling_params; did you mean params?"),
    (lambda w: w.chat.send("Hi", max_new_tokens=9), "ChatSession.send; max_new_tokens=9; (max_tokens=...)"),
    (lambda w: w.chat.send("Hi", seed=1), "write params=SamplingParams(seed=1)"),
    (lambda w: w.engine.submit(), "Engine.submit: missing a required argument: 'prompt'; it takes prompt, params"),
    (lambda w: w.engine.chat(system_prompt="Be kind."), "system_prompt='Be kind.'; did you mean system?"),
    (lambda w: w.engine.chat(kv_memory="1GB"), "Engine.chat; pass kv_memory='1GB' to Engine.load"),
    (lambda w: asyncio.run(_wrapped(w).submit("Hi", top_p=1)), "AsyncEngine.submit; SamplingParams(top_p=1)"),
    # types and values
    (lambda w: w.load(num_blocks="64"), "num_blocks must be an int, at least 1; '64'"),
    (lambda w: w.load(kv_memory="lots"), "kv_memory must be; \"512MB\"; got 'lots'"),
    (lambda w: w.load(kv_memory="1KB"), "kv_memory; 1000 B holds no block; 96 KiB"),
    (lambda w: w.load(device="gpu"), "device='gpu' is no device; 'cuda'"),
    (lambda w: SamplingParams(temperature="0"), "temperature must be a number >= 0; '0'"),
    (lambda w: w.engine.submit("Hi", {"temperature": 0}), "params must be SamplingParams; {'temperature': 0}"),
    (lambda w: w.engine.submit(None), "a prompt is a text; a list of chat messages; got None"),
    (lambda w: w.engine.submit(["a", "b"]), "got ['a', 'b']; several texts to generate()"),
    (lambda w: w.engine.submit({"role": "user", "content": "Hi"}), "got {'content': 'Hi'; put the message into a list"),
    (lambda w: w.engine.submit(BOT), "message 0; 'bot'; allowed are system, user, assistant, tool, developer"),
    (lambda w: w.engine.submit([{"role": "user", "content": {"text": 5}}]), "message 0; content {'text': 5}; a text"),
    (lambda w: w.engine.generate([{"role": "user", "content": "Hi"}]), "generate([messages])"),
    (lambda w: w.engine.generate(["a", "b"], [GREEDY]), "1 sampling params for 2 prompts; one for each"),
    (lambda w: w.engine.generate(["a"], timeout="5"), "timeout must be a number of seconds; '5'"),
    (lambda w: w.engine.chat([{"role": "user", "content": "Hi"}]), "system prompt must be a text; messages=[...]"),
    (lambda w: w.engine.chat(tools="weather"), 'tools must be a list; "type": "function"; got \'weather\''),
    # files
    (lambda w: Engine.load(None), "a model is a name; a folder; got None"),
    (lambda w: w.load("cat.png"), "cat.png is a file; the folder that holds config.json; a GGUF file"),
    (lambda w: w.load("folder"), "folder is no model folder; it has no config.json"),
    (lambda w: w.load("cut.gguf"), "cut.gguf; truncated; copy it again"),
    (lambda w: w.chat.save(w.files / "no" / "chat.json"), "No such file; no/chat.json"),
    (lambda w: w.engine.resume(w.files / "cat.png"), "cat.png is no saved conversation"),
    # the order of calls
    (lambda w: w.chat.fork("2"), "n must be an int >= 1; got '2'"),
    (lambda w: w.chat.rewind(), "no turns yet; nothing to rewind; turns=1"),
    (lambda w: w.closed.chat(), "the engine was closed; load a new one"),
    (lambda w: w.closed.generate(["Hi"]), "the engine was closed; load a new one"),
    (lambda w: pickle.dumps(w.engine), "cannot be pickled; load another engine; radixkv serve"),
    (lambda w: pickle.dumps(w.engine.submit("Hi", GREEDY)), "cannot be pickled; send its result()"),
    # asyncio
    (lambda w: asyncio.run(_wrapped(w).chat().stream("Hi", GREEDY)).text, "'AsyncReplyStream'; 'text'"),
]


@pytest.mark.parametrize(("call", "words"), MISTAKES, ids=[words.replace(" ", "-") for _, words in MISTAKES])
def test_an_error_names_the_argument_its_value_and_the_right_way(
    world: World, call: Callable[[World], Any], words: str
) -> None:
    with pytest.raises((TypeError, ValueError, AttributeError, OSError, radixkv.RadixKVError)) as caught:
        call(world)
    missing = [each for each in words.split("; ") if each not in str(caught.value)]
    assert not missing, f"{caught.value} lacks {missing}"
    assert not re.search(r"NoneType|\d{7}|\.radixkv-|positional", str(caught.value))


def test_a_prompt_that_is_too_long_is_reported_once(world: World, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(ValueError, match="4096 tokens, the pool holds 1024"),
    ):
        world.engine.generate(["Hello there " * 3000])
    assert not caplog.records


def test_a_role_that_the_template_names_is_taken(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = world.engine.model.tokenizer
    monkeypatch.setattr(tokenizer, "chat_template", tokenizer.chat_template + "{# message.role == 'bot' #}")
    assert world.engine.generate([BOT], GREEDY)[0].token_ids


def test_turns_count_from_1(world: World) -> None:
    with world.engine.chat() as chat:
        chat.send("Hello!", GREEDY)
        for turn in (0, 2, True):
            with pytest.raises(ValueError, match="turn must be an int from 1 to 1"):
                chat.edit(turn, "Bye!")
        assert chat.edit(1, "Bye!", GREEDY).usage and chat.turns == 1


def test_foreign_names_mean_arguments_that_exist() -> None:
    calls = (Engine.load, Engine.generate, Engine.chat, EngineConfig, SamplingParams)
    names = {name for call in calls for name in inspect.signature(call).parameters}
    assert set(FOREIGN.values()) <= names
    assert not names & set(FOREIGN)


def test_representations_are_short_and_wait_for_nothing(world: World) -> None:
    handle = world.engine.submit("Hello! " * 9, GREEDY.but(max_tokens=99, ignore_eos=True))
    done = handle.result()
    cancelled = world.engine.submit("Hello!", GREEDY.but(max_tokens=900, ignore_eos=True))
    cancelled.cancel()
    warm = world.engine.warm("Hello! " * 9, pin=True)
    world.engine.client.thread.ask(lambda: None)
    reply = world.engine.chat().send("Hello!", GREEDY)
    for shown, words in [
        (world.engine, "<Engine tiny on cpu: 64 blocks of 16 tokens>"),
        (world.closed, "<Engine tiny on cpu: 64 blocks of 16 tokens, closed>"),
        (AsyncEngine(world.engine), "<AsyncEngine of <Engine tiny"),
        (world.chat, "<ChatSession of tiny: 0 turns, 0 tokens>"),
        (AsyncEngine(world.engine).chat(), "<AsyncChatSession of tiny: 0 turns"),
        (done, "'length': 99 tokens, "),
        (handle, "<Handle: <Completion "),
        (cancelled, "<Handle: RequestCancelled("),
        (radixkv.AsyncHandle(handle), "<AsyncHandle: <Completion "),
        (reply, "<Reply "),
        (warm, "of them pinned>"),
    ]:
        assert words in repr(shown) and len(repr(shown)) < 150, repr(shown)
    warm.release()


def test_docstrings_describe_each_field_and_how_an_engine_is_made() -> None:
    public = [getattr(radixkv, name) for name in radixkv.__all__]
    records = [each for each in public if is_dataclass(each)]
    assert not [f"{each}: {one.name}" for each in records for one in fields(each) if one.name not in each.__doc__]
    assert "Engine.load" in (Engine.__doc__ or "").splitlines()[0]
