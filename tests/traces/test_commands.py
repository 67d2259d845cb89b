"""The commands simulate, fragmentation and generate of radixkv-replay, called as by a user."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from radixkv_traces import cli, simulate
from radixkv_traces.cli import Progress
from radixkv_traces.formats import read, sample
from radixkv_traces.simulate import replay
from radixkv_traces.workload import prepare

ROOT = Path(__file__).parents[2]
Say = Callable[..., tuple[int, str, str]]


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    """Run a command: its status, its output, and its error output."""

    def run(*arguments: str) -> tuple[int, str, str]:
        try:
            status = cli.main(arguments)
        except SystemExit as exit_:  # argparse
            status = int(exit_.code or 0)
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


def rows(said: tuple[int, str, str]) -> dict[str, Any]:
    status, out, err = said
    assert (status, err) == (0, "")
    assert out.count("\n") == 1
    found: dict[str, Any] = json.loads(out)
    return found


def test_json_is_one_object_whose_rows_say_what_the_replays_found(say: Say) -> None:
    said = rows(
        say(
            "simulate",
            "sample:conversation",
            "--capacity",
            "2.5%,10%",
            "--policy",
            "lru,clairvoyant,infinite",
            "--json",
        )
    )
    trace = prepare(read(sample("conversation")), 512)
    assert (said["trace"], said["requests"], said["unique_blocks"], said["block_tokens"]) == (
        "sample:conversation", 570, trace.unique_blocks, 512,
    )  # fmt: skip
    assert [(row["policy"], row["capacity"]) for row in said["rows"]] == [
        (policy, capacity) for capacity in ("2.5%", "10%") for policy in ("lru", "clairvoyant", "infinite")
    ]
    for row in said["rows"]:
        result = replay(trace, row["capacity_blocks"], row["policy"])
        for name in ("token_hit_rate", "hit_tokens", "input_tokens", "evicted_blocks", "regret_tokens", "requests"):
            assert row[name] == getattr(result, name)
        assert row["seconds"] >= 0 and row["finished"]
        assert [blocks for _, blocks in row["occupancy"]][-1] == result.cached[-1]
        assert len(row["occupancy"]) == len(row["hit_rates"]) == 100
    lru, best, endless = said["rows"][:3]
    assert (lru["capacity_blocks"], endless["capacity_blocks"]) == (209, trace.unique_blocks)
    assert (lru["gap_closed"], best["gap_closed"], endless["gap_closed"]) == (0.0, 1.0, None)
    assert endless["token_hit_rate"] == said["infinite_token_hit_rate"]


def test_each_row_has_the_hit_rate_of_twice_the_memory(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ("simulate", "sample:cc_agent", "--capacity", "1000,2000,80%", "--policy", "lru,infinite", "--json")
    serve, calls = simulate._CachePool.serve, []

    def counted(pool: Any, index: int) -> int:
        calls.append(index)
        if len(calls) == 4 * 400 + 100:
            raise KeyboardInterrupt
        return serve(pool, index)

    monkeypatch.setattr(simulate._CachePool, "serve", counted)
    status, out, _ = say(*command)  # three capacities, twice 2000, and a part of twice 80%
    said = json.loads(out)
    assert status == 130 and not said["finished"]
    assert [row["token_hit_rate_twice"] is None for row in said["rows"]] == [False, False, False, False, True, False]
    monkeypatch.undo()
    lru = rows(say(*command))["rows"][::2]
    trace = prepare(read(sample("cc_agent")), 64)
    twice = [replay(trace, blocks, "lru").token_hit_rate for blocks in (2000, 4000, trace.unique_blocks)]
    assert [row["token_hit_rate_twice"] for row in lru] == twice
    assert lru[0]["token_hit_rate_twice"] == lru[1]["token_hit_rate"]


def test_the_curve_has_the_rates_of_other_pools_of_the_same_trace(say: Say) -> None:
    chosen = ("sample:conversation", "--limit", "200", "--policy", "lru", "--capacity", "100,400")
    command = ("simulate", *chosen, "--curve")
    said = rows(say(*command, "--json"))
    small, large = (said["curve"][name] for name in ("100", "400"))
    assert list(small) == ["0.25", "0.5", "1", "2", "4", "8", "inf"]
    assert [small["1"], large["1"]] == pytest.approx([row["token_hit_rate"] for row in said["rows"]])
    assert (small["4"], small["8"]) == (large["1"], large["2"])
    assert small["inf"] == pytest.approx(said["infinite_token_hit_rate"])
    assert f"  {small['8']:.4f}  {small['inf']:.4f}" in say(*command)[1]
    assert "--curve needs a replay without a queue" in say(*command, "--order", "fcfs")[2]


def test_rows_with_hints_follow_their_policy(say: Say) -> None:
    simulate = ("simulate", "sample:cc_agent", "--limit", "60", "--capacity", "1000", "--hints", "end,returns+end")
    found = rows(say(*simulate, "--policy", "lru,clairvoyant", "--json"))["rows"]
    assert [row["policy"] for row in found] == ["lru", "lru+end", "lru+returns+end", "clairvoyant"]
    assert found[1]["gap_closed"] >= 0 == found[0]["gap_closed"]


def test_a_part_of_a_trace(say: Say) -> None:
    def requests(*options: str) -> int:
        return int(rows(say("simulate", "sample:conversation", *options, "--policy", "infinite", "--json"))["requests"])

    times = [each.timestamp / 1000 for each in read(sample("conversation"))]
    assert requests("--start", "60", "--end", "600") == sum(60 <= each < 600 for each in times)
    assert requests("--start", "60", "--limit", "7") == 7
    assert requests("--limit", "9999") == len(times)


def test_text_is_replayed_by_times_and_untimed_sessions_take_turns(say: Say) -> None:
    said = rows(say("simulate", "sample:chat", "--policy", "infinite", "--json"))
    assert [time for time, _ in said["rows"][0]["occupancy"]] == [0.0, 5.0, 6.5, 14.0, 20.0, 22.0, 23.5, 31.0, 33.0]
    plain, turned, tokenized = (
        rows(say("simulate", "sample:taubench", "--capacity", "150", "--policy", "lru", "--json", *options))
        for options in ((), ("--interleave", "4"), ("--tokenizer", "tiny", "--block-tokens", "32"))
    )
    assert plain["input_tokens"] == turned["input_tokens"] != tokenized["input_tokens"]
    assert plain["unique_blocks"] == turned["unique_blocks"]
    assert plain["rows"][0]["token_hit_rate"] > turned["rows"][0]["token_hit_rate"]
    assert tokenized["block_tokens"] == 32


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_prints_what_is_known_by_then(
    say: Say, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, status: int
) -> None:
    serve, calls = simulate._CachePool.serve, []

    def signalled(pool: Any, index: int) -> int:
        calls.append(index)
        if len(calls) == 100:
            signal.raise_signal(number)
        return serve(pool, index)

    monkeypatch.setattr(simulate._CachePool, "serve", signalled)
    said = say("simulate", "sample:conversation", "--policy", "lru", "--capacity", "10%", "--json")
    assert said[0] == status
    (row,) = json.loads(said[1])["rows"]
    assert (row["requests"], row["finished"]) == (99, False)
    assert signal.getsignal(number) is signal.SIG_DFL


def test_times_that_look_wrong_are_warned_about(say: Say, tmp_path: Path) -> None:
    line = '{"timestamp": %f, "input_length": 700, "output_length": 90, "hash_ids": [1, 2], "session": "s"}\n'
    (tmp_path / "t").write_text("".join(line % (30.0 * turn) for turn in range(20)))
    for command in ("simulate", "fragmentation"):
        status, out, err = say(command, str(tmp_path / "t"))
        assert status == 0 and out
        assert err.startswith("radixkv-replay: warning: in 19 of 19 turns") and "may be seconds" in err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("simulate", "no-such-file"), "no-such-file"),
        (("simulate", "sample:none"), "conversation"),
        (("simulate", "sample:chat", "--policy", "unheard-of"), "clairvoyant"),
        (("simulate", "sample:chat", "--capacity", "much"), "capacity 'much'"),
        (("simulate", "sample:chat", "--capacity", "1GB"), "--model"),
        (("simulate", "sample:chat", "--kv-dtype", "int8"), "--kv-dtype int8 is a format of --model"),
        (("simulate", "sample:chat", "--model", "tiny", "--kv-bytes", "9", "--kv-dtype", "int8"), "without --kv-bytes"),
        (("simulate", "sample:chat", "--capacity", "0%"), "not even one block"),
        (("simulate", "sample:chat", "--hints", "end,never"), "hints after a +: returns, end"),
        (("simulate", "sample:chat", "--hints", "end", "--order", "fcfs"), "--hints needs a replay without a queue"),
        (("simulate", "sample:chat", "--start", "1000"), "no request"),
        (("simulate", "sample:conversation", "--tokenizer", "tiny"), "block ids"),
        (("simulate", "sample:chat", "--format", "mooncake"), "input_length: missing"),
        (("simulate", "sample:chat", "--limit", "0"), "--limit"),
        (("simulate", "sample:chat", "--start", "-1"), "--start"),
        (("fragmentation", "sample:chat", "--memory", "10%"), "memory '10%'"),
        (("fragmentation", "sample:chat", "--memory", "9"), "slab"),
        (("fragmentation", "sample:chat", "--memory", "x"), "memory 'x'"),
        (("simulate", "missing.jsonl"), "radixkv-replay: missing.jsonl: No such file or directory"),
        (("fragmentation", "sample:chat", "--block-sizes", "8,x"), "--block-sizes"),
        (("fragmentation", "sample:chat", "--block-sizes", "999999999"), "block size 999999999: allowed is 1 to"),
        (("generate", "poems"), "poems"),
        (("generate", "chat", "--rate", "0"), "rate"),
        ((), "COMMAND"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(say: Say, arguments: tuple[str, ...], complaint: str) -> None:
    status, out, err = say(*arguments)
    assert status in (1, 2) and out == "" and complaint in err
    assert err.splitlines()[-1].startswith("radixkv-replay")


def test_what_one_row_refuses_is_in_none_and_the_text_says_so(say: Say) -> None:
    out = say("fragmentation", "sample:conversation", "--max-length", "10")[1]
    assert "570 requests of at most 97,546 tokens" in out and "with slabs of 10\n" in out
    assert "570 of 570 requests are in no row" in out and "No request is left" in out and "fitted" not in out
    short = ("fragmentation", "sample:conversation", "--max-length", "8192", "--memory", "60000", "--block-sizes", "16")
    said = rows(say(*short, "--json"))
    longer = sum(each.input_length + max(1, each.output_length) > 8192 for each in read(sample("conversation")))
    assert 0 < longer < 570 == said["requests"]
    assert said["rows"][0]["refused"] == longer == said["left_out"]
    assert said["rows"][1]["refused"] > said["rows"][2]["refused"] > 0
    assert {row["left_out"] for row in said["rows"]} == {longer}
    assert f"{longer} of 570 requests are in no row" in say(*short)[1]
    in_codes = ("--memory", "64GiB", "--model", "llama-3.1-8b", "--kv-dtype", "int8", "--json")
    assert rows(say("fragmentation", "sample:cc_agent", *in_codes))["memory_tokens"] == 64 * 2**30 // (32 * 8 * 2 * 130)


def test_generated_lines_are_read_from_standard_input(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    status, lines, _ = say("generate", "chat", "--sessions", "5", "--seed", "7")
    assert status == 0
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
    said = rows(say("simulate", "-", "--policy", "lru", "--json"))
    assert (said["trace"], said["requests"], said["block_tokens"]) == ("standard input", lines.count("\n"), 64)


def shell(
    *arguments: str, code: str = "import sys; from radixkv_traces.cli import main; sys.exit(main())"
) -> list[str]:
    paths = f"sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'traces')!r}]"
    return [sys.executable, "-c", f"import sys; {paths}; {code}", *arguments]


def test_a_reader_that_leaves_is_no_error() -> None:
    with subprocess.Popen(
        shell("generate", "agent", "--sessions", "100000"), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().startswith(b'{"timestamp": 0')
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 1


def test_nothing_here_loads_torch() -> None:
    code = (
        "from radixkv_traces.cli import main; main(sys.argv[1:]);"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'loaded'"
    )
    command = ("simulate", "sample:taubench", "--tokenizer", "tiny", "--limit", "3", "--capacity", "10%")
    done = subprocess.run(shell(*command, code=code), capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_progress_in_a_file_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(cli.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    with Progress("lru", stream) as progress:
        for second in range(26):
            now[0] = float(second)
            progress(second, 25)
    assert stream.getvalue() == "lru: 10 of 25 (40%) requests\nlru: 20 of 25 (80%) requests\n"
