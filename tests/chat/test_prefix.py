"""Chats over a compressed prefix: the session keeps the whole text, and its requests name the prefix."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from radixkv import AsyncEngine, Engine, SamplingParams
from radixkv.errors import InvalidInput, PrefixGone

GREEDY = SamplingParams(temperature=0, max_tokens=8)
MANUAL = "Ann, Ben and Cleo share a house by the sea. " * 8


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load("tiny", num_blocks=400, monitor=False, dtype="float64") as found:
        yield found


def test_a_chat_after_a_whole_prefix_goes_on_as_the_compressed_one(engine: Engine, tmp_path: Path) -> None:
    first = engine.chat(MANUAL)
    first.send("Who lives there?", GREEDY)
    prefix = engine.compress(first, keep=1)
    chat = engine.chat(prefix=prefix)
    assert chat.history == first.history and chat.prefix is prefix
    for text in ("\n\nHow many?", "Where?"):
        answer = chat.send(text, GREEDY)
        assert answer.text == first.send(text, GREEDY).text and chat.token_ids == first.token_ids
        assert answer.usage.cached_tokens >= prefix.slots
    (fork,) = chat.fork()
    for each in (first, fork):
        each.rewind()
        each.edit(2, "Why?", GREEDY)
    assert fork.token_ids == first.token_ids and fork.prefix is prefix
    fork.save(tmp_path / "chat.json")
    assert engine.resume(tmp_path / "chat.json").send("So?", GREEDY).text == first.send("So?", GREEDY).text


def test_a_resumed_chat_says_how_to_make_its_prefix_again(engine: Engine, tmp_path: Path) -> None:
    prefix = engine.compress(engine.chat(MANUAL, namespace="mine"), keep=0.75, method="snapkv")
    chat = engine.chat(prefix=prefix, namespace="mine")
    chat.save(tmp_path / "chat.json")
    said = chat.send("Who?", GREEDY).text
    engine.release_prefix(prefix)
    resumed = engine.resume(tmp_path / "chat.json", namespace="mine")
    for gone in (chat, resumed):
        with pytest.raises(PrefixGone, match=r"keep=0.75, method='snapkv'"):
            gone.send("Who?", GREEDY)
    assert resumed.turns == 0
    with Engine.load("tiny", prefix_cache=False) as other, pytest.raises(InvalidInput, match=r"^no prefix"):
        other.resume(tmp_path / "chat.json", namespace="mine")
    engine.compress(resumed.prefix.text, 0.75, method="snapkv", namespace="mine")
    assert resumed.send("Who?", GREEDY).text == said


def test_what_no_longer_begins_with_the_prefix_is_refused(engine: Engine) -> None:
    first = engine.chat(MANUAL)
    first.send("Who lives there?", GREEDY)
    prefix, text = engine.compress(first), engine.compress(list(range(5, 80)))
    chat = engine.chat(prefix=prefix)
    chat.rewind()
    with pytest.raises(InvalidInput, match="begin"):
        chat.send("Who?", GREEDY)
    refused: list[tuple[str, dict[str, Any]]] = [
        ("would drop", {"prefix": prefix, "overflow": "drop_oldest"}),
        *(("of a chat", each) for each in ({"prefix": prefix, "system": "x"}, {"prefix": text}, {"prefix": "x"})),
    ]
    for reason, options in refused:
        with pytest.raises(InvalidInput, match=reason):
            engine.chat(**options)
    with pytest.raises(InvalidInput, match="namespace"):
        engine.chat(prefix=prefix, namespace="other").send("Who?", GREEDY)


def test_a_chat_of_asyncio_is_compressed(engine: Engine) -> None:
    async def main() -> None:
        awaited = AsyncEngine(engine)
        first = awaited.chat(MANUAL)
        chat = awaited.chat(prefix=await awaited.compress(first, 1))
        assert (await chat.send("Who?", GREEDY)).text == (await first.send("Who?", GREEDY)).text

    asyncio.run(main())
