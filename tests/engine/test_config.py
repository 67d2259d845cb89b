"""Every setting of an engine is declared once, checked at creation, and documented by its declaration."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from argparse import Namespace
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from radixkv import AsyncEngine, Engine, EngineConfig
from radixkv.cache import POLICIES
from radixkv.config import ATTENTION, ORDERS, EngineConfigFields, settings_in
from radixkv.engine.wait_queue import KEYS
from radixkv.errors import InvalidInput, UnknownPolicy
from radixkv.models.attention_interface import BACKENDS
from radixkv.sizing.kv_size import parse_bytes

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"kv_memory": "much"}, 'kv_memory must be "auto", bytes, or a size such as "512MB" or "2GiB"; got \'much\''),
    ({"host_memory": "all"}, 'host_memory must be "auto", bytes, or a size such as "512MB" or "2GiB"; got \'all\''),
    ({"num_blocks": 0}, "num_blocks must be an int, at least 1, got 0"),
    ({"num_blocks": 1.5}, "num_blocks must be an int, at least 1, got 1.5"),
    ({"block_size": None}, "block_size must be an int, at least 1, got None"),
    ({"attention": "flash"}, "attention='flash': allowed are 'auto', 'torch', 'triton', 'compiled'"),
    ({"compile": "max"}, "compile='max': allowed are 'auto', True and False"),
    ({"max_sequences": True}, "max_sequences must be an int, at least 1, got True"),
    ({"order": "lifo"}, "order='lifo': allowed are 'fcfs', 'longest-prefix'"),
    ({"deterministic": 1}, "deterministic must be True or False, got 1"),
    (
        {"num_blocks": 10, "kv_memory": "x"},
        'kv_memory must be "auto", bytes, or a size such as "512MB" or "2GiB"; got \'x\'',
    ),
    ({"kv_memory": None}, 'kv_memory must be "auto", bytes, or a size such as "512MB" or "2GiB"; got None'),
    (
        {"monitor": "udp://x"},
        "monitor must be True, False, 'rw' or an address such as 'tcp://127.0.0.1:7777', got 'udp://x'",
    ),
    ({"tool_format": None}, "tool_format must be a name, got None"),
    ({"expose_text": None}, "expose_text must be True or False, got None"),
    ({"record": 3}, "record names a file to be written, got 3"),
    (
        {"logits_processors": print},
        "logits_processors must be a list of objects, each with what radixkv.LogitsProcessor declares, got <built-in "
        "function print>",
    ),
    ({"seed": None}, "seed must be an int, got None"),
    (
        {"max_sequences": 9, "max_batch_tokens": 8},
        "max_batch_tokens (8) must be at least max_sequences (9): every running sequence decodes one token a step",
    ),
    (
        {"deterministic": True, "prefill_chunk": 60},
        "deterministic=True needs a prefill_chunk (60) of whole blocks of 16 tokens",
    ),
    (
        {"deterministic": True, "prefill_chunk": 2048},
        "deterministic=True computes whole chunks: prefill_chunk (2048) and a token for each of max_sequences (64) "
        "must fit max_batch_tokens (2048)",
    ),
]


@pytest.mark.parametrize(("wrong", "message"), REFUSED, ids=[", ".join(each) for each, _ in REFUSED])
def test_a_value_that_is_not_allowed_is_refused_with_what_is(wrong: dict[str, Any], message: str) -> None:
    for call in (lambda: EngineConfig(**wrong), lambda: Engine.load("tiny", **wrong)):
        with pytest.raises(InvalidInput) as refused:
            call()
        assert str(refused.value) == message


@pytest.mark.parametrize("eviction", ["random", None, 3])
def test_a_policy_is_one_of_the_caches_table(eviction: Any) -> None:
    with pytest.raises(UnknownPolicy, match=f"^eviction={eviction!r}: allowed are {', '.join(sorted(POLICIES))}$"):
        EngineConfig(eviction=eviction)
    for policy in POLICIES:
        assert EngineConfig(eviction=policy).eviction == policy


def test_the_keywords_of_load_are_the_fields() -> None:
    keywords, declared = get_type_hints(EngineConfigFields), get_type_hints(EngineConfig)
    assert list(keywords) == [each.name for each in fields(EngineConfig)]
    assert keywords == declared
    assert all(each.default is not MISSING for each in fields(EngineConfig))
    assert ATTENTION == BACKENDS


def test_load_takes_a_config_or_its_fields_or_both() -> None:
    config = EngineConfig(num_blocks=7, dtype="float32", monitor=False)
    with Engine.load("tiny", config, num_blocks=9, block_size=8) as engine:
        assert engine.config == replace(config, num_blocks=9, block_size=8)
        cache = engine.stats().cache
        assert (cache.num_blocks, cache.block_size) == (9, 8)
    with pytest.raises(InvalidInput, match="must be at least max_sequences"):
        Engine.load("tiny", config, max_batch_tokens=3)
    with pytest.raises(AttributeError):
        config.num_blocks = 3  # type: ignore[misc]
    assert list(inspect.signature(AsyncEngine.load).parameters) == list(inspect.signature(Engine.load).parameters)


def test_options_of_a_command_that_are_settings_are_found_by_their_names() -> None:
    arguments = Namespace(seed=3, kv_memory="8MB", max_tokens=8, model="tiny", record=None)
    assert settings_in(arguments) == {"kv_memory": "8MB", "record": None, "seed": 3}


def test_the_page_names_every_setting_and_help_describes_it() -> None:
    page = (Path(__file__).parents[2] / "docs" / "engine.md").read_text()
    table = page.partition("| purpose | fields |")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"`(\w+)`", table)) == sorted(each.name for each in fields(EngineConfig))
    text = EngineConfig.__doc__ or ""
    assert all(f"{each.name:20}{each.metadata['help']} ({each.default!r})\n" in text for each in fields(EngineConfig))


def test_sizes_in_words() -> None:
    assert parse_bytes(4096) == 4096
    assert parse_bytes("2g") == 2 * 10**9
    assert parse_bytes(" 0.5 MiB ") == 2**19
    for bad in ("", "much", "-1", "3 apples", True, "1e9"):
        with pytest.raises(InvalidInput, match="kv_memory"):
            parse_bytes(bad)


def test_settings_load_no_torch_and_no_numpy() -> None:
    code = "import sys, radixkv.config; sys.exit({'torch', 'numpy'} & set(sys.modules) != set())"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_orders_match_the_engines_table() -> None:
    assert set(ORDERS) == set(KEYS)
