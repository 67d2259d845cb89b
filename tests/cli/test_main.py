"""Arguments, errors and exit statuses."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from radixkv import __version__
from radixkv.cli import main
from radixkv.config import EngineConfig
from radixkv.errors import InvalidInput


def test_version_and_help_say_so_and_leave(capsys):
    for option, said in (("--version", f"radixkv {__version__}"), ("--help", "chat")):
        with pytest.raises(SystemExit) as left:
            main([option])
        assert left.value.code == 0
        assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["dance"],
        ["chat", "--max-tokens", "many"],
        ["chat", "--monitor", "maybe"],
        ["demo", "extra"],
        ["chat", "one", "--model", "two"],
    ],
)
def test_wrong_usage_is_status_2(argv, capsys):
    with pytest.raises(SystemExit) as left:
        main(argv)
    assert left.value.code == 2
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["chat", "serve", "doctor", "plan"])
def test_host_memory_and_a_disk_are_options_of_each_command_that_sizes_a_pool(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    told = capsys.readouterr().out
    assert "--host-memory SIZE" in told and "--disk-memory SIZE" in told
    assert ("--disk-cache FOLDER" in told) == (command != "plan")


@pytest.mark.parametrize(
    ("given", "monitor"),
    [("rw", "rw"), ("on", True), ("off", False), ("rw+tcp://127.0.0.1:7777", "rw+tcp://127.0.0.1:7777"), (None, True)],
)
@pytest.mark.parametrize("command", ["chat", "serve"])
def test_the_mode_of_the_monitor_reaches_the_engine(command, given, monitor, monkeypatch, capsys):
    def load(model, config=None, *, tokenizer=None, **fields):
        raise InvalidInput(f"loaded with {replace(config or EngineConfig(), **fields).monitor!r}")

    monkeypatch.setattr("radixkv.chat.Engine.load", load)
    options = [] if given is None else ["--monitor", given]
    assert main([command, "tiny", *options, *(["--port", "0"] if command == "serve" else [])]) == 2
    assert f"loaded with {monitor!r}" in capsys.readouterr().err


def test_help_loads_no_torch():
    code = (
        "import sys\nfrom radixkv.cli import main\n"
        "try: main(['chat', '--help'])\nexcept SystemExit: pass\n"
        "assert not {'torch', 'transformers', 'rich', 'numpy'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--model", "/no/such/folder"], "no model folder /no/such/folder"),
        (["/no/such/folder"], "no model folder /no/such/folder"),
        (["--temperature", "-1"], "temperature"),
        (["--max-tokens", "0"], "max_tokens"),
        (["--kv-memory", "lots"], "lots"),
        (["--host-memory", "all"], "host_memory must be"),
        (["tiny", "--host-memory", "1kB"], "give at least 192 KiB, or 0 for none"),
    ],
)
def test_bad_input_is_one_line_and_status_2(options, said, capsys):
    assert main(["chat", *options]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.startswith("radixkv: ")
    assert err.count("\n") == 1


def test_an_unexpected_error_is_one_line_too(monkeypatch, capsys):
    def fail(arguments):
        raise RuntimeError("the roof is on fire")

    monkeypatch.setattr("radixkv.cli.demo.run", fail)
    assert main(["demo"]) == 1
    assert capsys.readouterr().err == "radixkv: RuntimeError: the roof is on fire (--debug shows where)\n"
    with pytest.raises(RuntimeError):
        main(["demo", "--debug"])


@pytest.mark.parametrize("raised", [None, RuntimeError("a lazy import failed")])
def test_ctrl_c_is_status_130(monkeypatch, raised):
    def interrupt(arguments):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise raised or error from error

    monkeypatch.setattr("radixkv.cli.chat.run", interrupt)
    assert main(["chat"]) == 130
