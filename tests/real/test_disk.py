"""A session that is closed in a process that is then killed: a new one answers its next turn from the disk."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from radixkv import ChatSession, Engine, SamplingParams
from tests.real.conftest import Figure

GREEDY = SamplingParams(temperature=0, max_tokens=24, logprobs=3)
NEXT = "How many rooms have a view of the sea?"
EXACT = {"deterministic": True, "prefill_chunk": 64}
FIRST_LIFE = """
import json, os, signal, sys, time
from radixkv import Engine, SamplingParams
from tests.real.conversations import HANDBOOK

model, folder, saved, fields = *sys.argv[1:4], json.loads(sys.argv[4])
engine = Engine.load(model, num_blocks=600, disk_cache=folder, monitor=False, **fields)
with engine.chat(HANDBOOK) as chat:
    for text in ("When does the ferry leave?", "Is there a lift?", "What is for breakfast?"):
        chat.send(text, SamplingParams(temperature=0, max_tokens=24))
    chat.save(saved)
    grid = fields.get("prefill_chunk", 16)  # with deterministic only whole chunks are cached
    blocks = (len(chat.token_ids) - 1) // grid * grid // 16  # the last sampled token has no KV
until = time.monotonic() + 60
while (synced := engine.stats().disk.records) < blocks and time.monotonic() < until:
    time.sleep(0.05)
print(synced, blocks, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("fields", [{}, {"kv_dtype": "int8"}, EXACT, EXACT | {"kv_dtype": "int8"}])
def test_the_next_turn_after_a_kill(model_file: Path, tmp_path: Path, fields: dict[str, Any], figure: Figure) -> None:
    """Its tokens are those of the same conversation in a namespace without KV; if deterministic, so are its bits."""
    folder, saved = tmp_path / "disk", tmp_path / "chat.json"
    command = [sys.executable, "-c", FIRST_LIFE, str(model_file), str(folder), str(saved), json.dumps(fields)]
    first = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, cwd=Path(__file__).parents[2])
    assert first.returncode == -signal.SIGKILL
    synced, blocks = map(int, first.stdout.split())
    assert synced == blocks, "an idle engine writes all that is cached"
    with Engine.load(model_file, num_blocks=600, disk_cache=folder, monitor=False, **fields) as engine:
        sessions: list[ChatSession] = [engine.resume(saved, namespace=each) for each in (None, "computed")]
        replies = [session.send(NEXT, GREEDY) for session in sessions]
    read, computed = replies
    figure(
        f"disk, {fields}: {read.usage.disk_tokens} of {16 * synced} synced tokens read, {read.usage.ttft_s:.2f} s and "
        f"{computed.usage.ttft_s:.2f} s to the first token"
    )
    assert read.usage.disk_tokens >= 0.9 * 16 * synced
    assert computed.usage.cached_tokens == 0
    assert read.token_ids == computed.token_ids
    if "deterministic" in fields:
        assert read.logprobs is not None and read.logprobs == computed.logprobs
