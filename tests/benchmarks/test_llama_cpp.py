"""Check the rows of benchmarks/llama_cpp.py, and its protocol with fake engines."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import llama_cpp  # in the folder of the benchmarks, not installed
from llama_cpp_parts import worker
from llama_cpp_parts.worker import OURS, PEER, Side
from llama_cpp_parts.workloads import QUICK, STREAMS

FAKE = '''
"""Answer the commands of worker.py; arguments: CPU milliseconds a token, wall a token, and how the replies differ."""
import json, sys
cpu, wall, kind = float(sys.argv[1]), float(sys.argv[2]), sys.argv[3]

def tokens(text):
    return [ord(letter) + (kind == "other tokenizer") for letter in text]

def reply(prompt, count):
    same = [(prompt[-1] + step) % 50 for step in range(count)]
    return same if kind != "from token 2" else same[:2] + [99 for _ in same[2:]]

def answer(command, **given):
    if command == "load":
        sys.stderr.write("no room\\n")
        return {"versions": {sys.argv[0]: "1"}}
    if command == "tokenize":
        return {"ids": [tokens(text) for text in given["texts"]]}
    if command == "render":
        return {"texts": ["<" + each + ">" for each in given["questions"]]}
    if command == "usage":
        return {"cpu_s": cpu, "peak_mb": 100 * cpu}
    prompts, count = given["prompts"], given["tokens"]
    first = reply(prompts[0], count) if kind != "all different" else [77] * count
    spent = {"cpu_ms": cpu * count * len(prompts), "wall_ms": wall * count * len(prompts)}
    replies = [first] + [reply(each, count) if kind != "all different" else first for each in prompts[1:]]
    return {"replies": replies, "first": [spent] * len(prompts), "total": spent, "computed": sum(map(len, prompts))}

for line in sys.stdin:
    print(json.dumps(answer(**json.loads(line))), flush=True)
'''


@pytest.fixture
def fake(tmp_path: Path) -> Any:
    """Make an engine that takes some milliseconds a token."""
    script = tmp_path / "fake.py"
    script.write_text(FAKE)

    def make(name: str, cpu: float = 1, wall: float = 1, kind: str = "") -> Side:
        return Side(name, (sys.executable, "-S", "-E", str(script), str(cpu), str(wall), kind), {})

    return make


def compare(*sides: Side, clocks: tuple[str, ...] = ("cpu",), missing: str | None = None) -> dict[str, Any]:
    result = llama_cpp.compare(list(sides), "model.gguf", QUICK, list(clocks), 1, missing)
    return dict(json.loads(json.dumps(result)))


def test_rows_have_the_figures_of_both_engines_and_their_ratio(fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    result = compare(fake(OURS, cpu=6, wall=1), fake(PEER, cpu=2, wall=4), clocks=("cpu", "wall"))
    cpu, wall = result["rows"]["cpu"], result["rows"]["wall"]
    assert {name: cpu[name][OURS] for name in ("load", "decode_1", "decode_8", "chat_ttft", "peak_mb")} == {
        "load": 6,
        "decode_1": 6,
        "decode_8": 6,
        "chat_ttft": 6 * QUICK.reply,
        "peak_mb": 600,
    }
    assert cpu["prefill"][PEER] == round(2 / QUICK.prefill, 3)
    assert cpu["chat_total"][PEER] == round(2 * QUICK.reply * QUICK.turns / 1e3, 3)
    assert cpu["agents_total"][OURS] == round(6 * QUICK.reply * STREAMS / 1e3, 3)
    assert {row["ratio"] for row in cpu.values()} == {3}
    assert {row["ratio"] for name, row in wall.items() if name != "load"} == {0.25}
    assert "peak_mb" not in wall
    assert result["losing"]["cpu"] == list(cpu) and set(result["losing"]["wall"]) <= {"load"}
    assert result["settings_cpu_ms"] == dict.fromkeys(worker.SETTINGS, 2 * QUICK.decode)
    assert all(equal == length for equal, length in result["equal_leading_tokens"]) and not result["differ"]
    shown = capsys.readouterr().out
    assert "decode, 8 streams, per token, ms               6           2    3.00  loses" in shown
    assert "decode, 8 streams, per token, ms               1           4    0.25" in shown


def test_engines_that_compute_different_models_are_found(fake: Any) -> None:
    assert compare(fake(OURS), fake(PEER, kind="all different"))["differ"]


def test_different_tokenizers_end_the_benchmark(fake: Any) -> None:
    with pytest.raises(SystemExit, match=r"tokenizers of radixkv and llama\.cpp differ on"):
        compare(fake(OURS), fake(PEER, kind="other tokenizer"))
