"""The chat in the terminal, typed to on the bundled model."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import torch
from rich.console import Console

from radixkv import Engine, SamplingParams
from radixkv.cli import main
from radixkv.cli.chat import Repl
from tests.selection import mostly_long


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    torch.set_num_threads(1)
    with Engine.load("tiny", num_blocks=256) as engine:
        yield engine


@pytest.fixture
def typed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Type lines into a new conversation; return the printed text."""

    def run(*lines: str) -> str:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        out = io.StringIO()
        console = Console(file=out, width=120)
        Repl(engine, engine.chat(), SamplingParams(temperature=0), console).loop()
        return out.getvalue()

    return run


def test_main_talks_until_the_input_ends(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello!\nMy name is Nora.\n\nWhat is my name?\n"))
    assert main(["chat", "tiny", "--kv-memory", "16MB", "--system", "You are Mira."]) == 0
    out = capsys.readouterr().out
    assert "Hello! How can I help you today?" in out
    assert "Your name is Nora." in out
    assert "\x1b" not in out, "control codes where no terminal is"


def test_a_fork_leaves_the_first_branch_as_it_is(typed):
    out = typed(
        "My name is Nora.",
        "/fork",
        "I have a red hat.",
        "/branch 1",
        "What color is my hat?",
        "/branch 2",
        "What color is my hat?",
    )
    assert "You have not told me about your hat." in out
    assert out.rindex("Your hat is red.") > out.index("You have not told me about your hat.")
    assert "* branch 1: 1 turn," in out
    assert "  branch 2: 2 turns" in out


def test_rewind_forgets(typed):
    out = typed("I like soup.", "My name is Nora.", "/rewind", "What is my name?", "What do I like?")
    assert "1 turn left" in out
    assert "You have not told me your name." in out
    assert "You like soup." in out


def test_edit_says_something_else_in_an_earlier_turn(typed):
    out = typed("My name is Nora.", "Hello!", "/edit 1 My name is Omar.", "What is my name?")
    assert "Nice to meet you, Omar!" in out
    assert "Your name is Omar." in out


def test_stats_counts_what_was_found(typed):
    out = typed("Hello!", "Thank you!", "/stats")
    assert "prompt tokens" in out
    assert "of 256 in use, 16 tokens each" in out


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("/dance", "unknown command /dance"),
        ("/rewind", "this conversation has no turn yet"),
        ("/edit", "type /edit N TEXT"),
        ("/edit 1 Hello!", "this conversation has no turn yet"),
        ("/branch 7", "from 1 to 1"),
        ("/branch two", "from 1 to 1"),
    ],
)
def test_a_wrong_command_says_what_to_type_and_the_talk_goes_on(typed, command, said):
    out = typed(command, "Hello!")
    assert said in out
    assert out.index(said) < out.index("How can I help you today?")


def test_an_error_of_the_engine_is_said_and_the_talk_goes_on(typed):
    out = typed("Hello! " * 3000, "Hello!")
    assert "tokens" in out
    assert "Hello! How can I help you today?" in out


@pytest.mark.parametrize("before", ["", "Hello!\n/edit 1 "])
def test_ctrl_c_stops_a_reply_and_leaves_the_conversation_as_it_was(engine, monkeypatch, before):
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{before}My name is Nora.\nWhat is my name?\n"))
    out = io.StringIO()
    repl = Repl(engine, engine.chat(), SamplingParams(temperature=0), Console(file=out, width=120))
    said = repl._console.out
    pressed = iter([True])

    def out_then_interrupt(*args, **options):
        said(*args, **options)
        if "Nice" in out.getvalue() and next(pressed, False):
            raise KeyboardInterrupt

    monkeypatch.setattr(repl._console, "out", out_then_interrupt)
    repl.loop()
    assert "stopped; the conversation is as it was before." in out.getvalue()
    assert "You have not told me your name." in out.getvalue()
    assert repl.session.turns == (2 if before else 1)


def test_a_reply_that_fills_the_context_says_so(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello!\n"))
    out = io.StringIO()
    with Engine.load("tiny", num_blocks=1) as small:
        Repl(small, small.chat(), SamplingParams(temperature=0), Console(file=out, width=120)).loop()
    assert "stopped because the context is full" in out.getvalue()


def test_a_saved_conversation_is_continued_in_a_new_branch(typed, tmp_path):
    file = tmp_path / "nora.json"
    out = typed("My name is Nora.", f"/save {file}", "Hello!", f"/save {file}", f"/load {file}", "What is my name?")
    out = " ".join(out.split())
    assert f"1 turn saved to {file} Hello!" in out
    assert "in place of its content" in out
    assert "now in branch 2, with 2 turns" in out
    assert "Your name is Nora." in out
    assert "now in branch 2, with 2 turns" in typed(f"/load {file}")  # a system prompt of branch 1 is not lost


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("/save", "type /save FILE"),
        ("/load", "type /load FILE"),
        ("/save notes.txt", "not saved, because this file is there, and would be lost: notes.txt is no saved"),
        ("/save missing/folder.json", "missing/folder.json: No such file or directory"),
        ("/load notes.txt", "notes.txt is no saved conversation"),
        ("/load missing.json", "missing.json cannot be read (No such file or directory)"),
    ],
)
def test_a_file_that_cannot_be_saved_or_loaded_loses_nothing(typed, tmp_path, monkeypatch, command, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("milk")
    out = typed("My name is Nora.", command, "What is my name?")
    assert said in out.replace("\n", " ")
    assert "Your name is Nora." in out
    assert (tmp_path / "notes.txt").read_text() == "milk"


def test_a_chat_without_a_named_model_takes_the_installed_one_and_says_so(monkeypatch, capsys):
    monkeypatch.setattr("radixkv.cli.chat.installed_model", lambda: "/models/SmolLM2-Q4_1.gguf")
    assert main(["chat"]) == 2  # no such file
    assert "taking SmolLM2-Q4_1, which is installed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("typed", "status"),
    mostly_long([("Hello!\n/quit\n", 0), ("\x03", 130), ("\x04", 0), ("/quit\n", 0)], ("\x03", 130)),
)
def test_the_first_line_is_read_while_the_model_loads(typed: str, status: int) -> None:
    own, end = pty.openpty()
    command = [sys.executable, "-m", "radixkv", "chat", "tiny", "--kv-memory", "16MB"]
    with subprocess.Popen(command, stdin=end, stdout=end, stderr=end, preexec_fn=_take_terminal) as process:
        os.close(end)
        shown = b""
        with suppress(OSError):  # Linux's end of a terminal
            while piece := os.read(own, 1000):
                shown += piece
                if typed and b"1> " in shown:
                    assert b"context" not in shown  # the model is not loaded
                    os.write(own, typed.encode())
                    typed = ""
        os.close(own)
        assert process.wait(30) == status
    plain = b" ".join(re.sub(rb"\x1b\[[\d;]*m", b"", shown).split())
    assert b"Try: My name is Nora. / What is my name?" in plain
    assert b"Traceback" not in shown
    assert (b"How can I help you today?" in shown) == (b"Hello!" in shown)


def _take_terminal() -> None:
    """Make the standard input the terminal of a new session, whose Ctrl-C is a signal."""
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
