"""`radixkv-replay run`, from its arguments to its files, with the bundled model and with a small server."""

import csv
import json
import signal
import subprocess
import sys
import time

import pytest

from radixkv_traces.cli import main
from tests.selection import mostly_long
from tests.traces.live.targets import http_server

# Two users with a common beginning, two turns each; blocks of 16 tokens.
LINES = [
    {"timestamp": 0, "input_length": 64, "output_length": 3, "hash_ids": [1, 2, 3, 4], "session": "a"},
    {"timestamp": 5, "input_length": 60, "output_length": 3, "hash_ids": [1, 2, 5, 6], "session": "b"},
    {"timestamp": 9, "input_length": 96, "output_length": 2, "hash_ids": [1, 2, 3, 4, 7, 8], "session": "a"},
    {"timestamp": 9, "input_length": 80, "output_length": 1, "hash_ids": [1, 2, 5, 6, 9], "session": "b"},
]


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return str(path)


def replayed(capsys, *arguments):
    """Run the command: its exit status, its summary, and its error output."""
    status = main(["run", *arguments, "--json"])
    said = capsys.readouterr()
    return status, json.loads(said.out) if said.out else None, said.err


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_an_engine_hits_what_the_blocks_share_and_all_of_it_is_on_disk(trace, tmp_path, capsys):
    out = tmp_path / "out"
    status, found, _ = replayed(
        capsys, trace, "--block-tokens", "16", "--asap", "--concurrency", "1", "--compare", "off", "--out", str(out)
    )
    assert status == 0
    cached, uncached = found["runs"]["radixkv"], found["runs"]["radixkv, no cache"]
    assert cached["prompt_tokens"] == uncached["prompt_tokens"] == 300
    # One session at a time: a's turns, then b's. b's first has 60 tokens, so its fourth block is not whole, and its
    # second prompt extends it.
    assert cached["cached_tokens"] == 0 + 64 + 32 + 60
    assert uncached["cached_tokens"] == 0
    assert (cached["finished"], cached["output_tokens"]) == (4, 9)
    assert found["cache_is_worth"].keys() >= {"ttft_ms", "output_tokens_per_s"}
    assert found["facts"]["model"] == "tiny"
    assert json.loads((out / "summary.json").read_text()) == found
    status, again, said = replayed(capsys, trace, "--out", str(out))
    assert (status, again) == (2, None)
    assert "results already" in said
    requests = rows(out / "requests.csv")
    assert [row["run"] for row in requests] == ["radixkv"] * 4 + ["radixkv, no cache"] * 4
    assert [row["cached_tokens"] for row in requests[:4]] == ["0", "64", "32", "60"]
    assert [row["session"] for row in requests[:4]] == ["a", "a", "b", "b"]
    assert all(float(row["ttft_ms"]) > 0 and not row["error"] for row in requests)
    assert {row["run"] for row in rows(out / "moments.csv")} == {"radixkv", "radixkv, no cache"}


def test_text_goes_through_the_template_and_a_prompt_that_is_too_long_is_counted(tmp_path, capsys):
    chat = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]
    long = [{"role": "user", "content": "word " * 9000}, {"role": "assistant", "content": "No."}]
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": chat}) + "\n" + json.dumps({"messages": long}) + "\n")
    status, found, _ = replayed(capsys, str(path), "--asap", "--max-output", "2")
    figures = found["runs"]["radixkv"]
    assert status == 0
    assert (figures["finished"], figures["too_long"], figures["failed"]) == (1, 1, 0)
    assert figures["prompt_tokens"] > 5


def test_a_wrong_setting_is_refused_before_the_trace_is_read(tmp_path, capsys):
    assert main(["run", str(tmp_path / "no trace"), "--order", "shortest"]) == 2
    assert "order='shortest': allowed are 'fcfs', 'longest-prefix'" in capsys.readouterr().err


def test_a_server_is_driven_and_its_failures_are_the_exit_status(trace, capsys):
    with http_server() as server:
        status, found, _ = replayed(capsys, trace, "--target", server.url, "--asap", "--goodput", "ttft:60000")
    assert status == 0
    figures = found["runs"][server.url]
    assert (figures["finished"], figures["hit_rate"], figures["goodput"]["share"]) == (4, 0.5, 1.0)
    with http_server("refused") as server:
        status, found, _ = replayed(capsys, trace, "--target", server.url, "--asap")
    assert status == 1
    assert found["runs"][server.url]["failed"] == 4
    with http_server("refused") as server:
        assert main(["run", trace, "--target", server.url, "--asap"]) == 1
    said = capsys.readouterr().out
    assert "4 x TargetError: HTTP 400: unknown field ignore_eos" in said
    assert "TTFT" not in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--warmup", "4"], "no request is left"),
        (["--start", "60"], "no request is left"),
        (["--speedup", "0"], "above 0"),
        (["--goodput", "speed:1"], "NAME:MILLISECONDS"),
        (["--shrink", "999"], "recorded block"),
        (["--target", "localhost"], "allowed is a URL"),
        (["--target", "http://127.0.0.1:1", "--compare", "off"], "leave out --target"),
        (["--target", "http://127.0.0.1:1", "--extra", "[1]"], "a JSON object"),
        (["--target", "http://127.0.0.1:1", "--extra", "{"], "no JSON"),
        (["--eviction", "random"], "random"),
    ],
)
def test_what_cannot_be_is_one_line_and_2(trace, capsys, arguments, message):
    status, found, said = replayed(capsys, trace, *arguments)
    assert (status, found) == (2, None)
    assert message in said
    assert said.count("\n") == 1


def test_a_folder_that_cannot_be_written_is_said_before_anything_is_sent(trace, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with http_server() as server:
        status, _, said = replayed(capsys, trace, "--target", server.url, "--out", str(tmp_path / "file"))
    assert status == 2
    assert "--out" in said
    assert server.bodies == []


@pytest.mark.parametrize(
    ("number", "status"),
    mostly_long([(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)], (signal.SIGTERM, 143)),
)
def test_a_signal_prints_and_writes_what_was_measured(tmp_path, number, status):
    lines = [LINES[0], {**LINES[1], "timestamp": 3_600_000}]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code = (
        "import signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background job ignores it
        "from radixkv_traces.cli import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    with http_server() as server:
        arguments = ["run", str(path), "--target", server.url, "--out", str(tmp_path / "out"), "--loop", "open"]
        child = subprocess.Popen(
            [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        deadline = time.monotonic() + 60
        while not server.bodies and child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.5)  # its answer arrives; if it were late, the assertion on `finished` would fail
        child.send_signal(number)
        said, complaint = child.communicate(timeout=60)
    assert child.returncode == status, complaint
    assert "Stopped early" in said
    assert complaint == ""
    found = json.loads((tmp_path / "out" / "summary.json").read_text())
    (figures,) = found["runs"].values()
    assert (figures["whole"], figures["finished"], figures["requests"]) == (False, 1, 1)
    assert len(rows(tmp_path / "out" / "requests.csv")) == 1
