"""`radixkv demo`: a chat, eight agents that fork from one prompt, the same without a cache, and the savings.

The lines of the demo, and the code that plays them on an engine, are in `demo_chat.py` and `demo_agents.py`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from statistics import median
from typing import TYPE_CHECKING, TypeVar

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from radixkv.cli import demo_agents, demo_chat
from radixkv.cli.demo_agents import Footprint
from radixkv.cli.demo_chat import BUNDLED, Listener, Said
from radixkv.model_path import shown_name
from radixkv.sizing.kv_size import size_text

if TYPE_CHECKING:
    from radixkv.chat import Engine, Reply
    from radixkv.engine import EngineStats

_CHAT_BLOCKS, _AGENT_BLOCKS = 256, 1024  # 16 tokens each: more than the demo needs, so that nothing is evicted
Played = TypeVar("Played")
_Watch = Callable[[str], AbstractContextManager[Listener]]  # called with "chat" or "agents" before that part


@dataclass(frozen=True)
class Part:
    """The conversation or the agents, played on an engine of its own."""

    said: tuple[Said, ...]
    stats: EngineStats
    seconds: float  # from the first message to the last reply, without printing

    @property
    def replies(self) -> list[Reply]:
        """All replies, in the order of the script."""
        return [reply for said in self.said for reply in said.replies]


@dataclass(frozen=True)
class Run:
    """Both parts, with the cache or without."""

    chat: Part
    agents: Part
    footprint: Footprint

    @property
    def said(self) -> tuple[Said, ...]:
        """All lines with their replies."""
        return self.chat.said + self.agents.said

    @property
    def replies(self) -> list[Reply]:
        """All replies, in the order of the script."""
        return self.chat.replies + self.agents.replies

    def total(self, counter: str) -> int:
        """Add a counter of the engines' stats over both parts."""
        return sum(getattr(part.stats, counter) for part in (self.chat, self.agents))


def run(arguments: argparse.Namespace) -> int:
    """Run the demo; return 0, or 1 if an answer with the cache differs from the one without.

    Raises InvalidInput or UnsupportedModel if the model of the conversation cannot be loaded.
    """
    console = Console(highlight=False)
    model = demo_chat.chosen(arguments.model)
    console.print(_banner(model))
    _warm_up(console)
    cached = play(console, model, partial(_show, console, model), prefix_cache=True)
    console.print(_headline("3", "The same words without a cache: every prompt computed in full"))
    expected = {"chat": len(cached.chat.replies), "agents": len(cached.agents.replies)}
    uncached = play(console, model, partial(_count, console, expected), prefix_cache=False)
    different = differences(cached.replies, uncached.replies)
    console.print(_verdict(cached, different))
    console.print(savings(cached, uncached))
    return 1 if different else 0


def differences(cached: Sequence[Reply], uncached: Sequence[Reply]) -> list[int]:
    """Return the indices of replies whose tokens differ; a reply that one side lacks counts as different."""
    tokens = ([reply.token_ids for reply in replies] for replies in (cached, uncached))
    return [at for at, (one, other) in enumerate(zip_longest(*tokens)) if one != other]


# ---- running


def _load(console: Console, model: str, num_blocks: int, *, prefix_cache: bool) -> Engine:
    from radixkv.chat import Engine  # takes seconds: it imports torch

    if console.is_terminal and model != BUNDLED:  # the loader may show a bar below this line
        console.print(f"\n   loading {_title(model)}", style="dim", markup=False)
    # Equal answers are promised in float32: lower precision may round ties differently in another batch.
    return Engine.load(model, num_blocks=num_blocks, dtype="float32", prefix_cache=prefix_cache)


def _warm_up(console: Console) -> None:
    """Answer one line, so that the first steps of the process, which are slower, are in neither run."""
    from radixkv.sampling.params import SamplingParams

    with console.status("starting"), _load(console, BUNDLED, _CHAT_BLOCKS, prefix_cache=False) as engine:
        engine.chat().send(demo_agents.GREETING.says, SamplingParams(temperature=0.0, max_tokens=16))


def play(console: Console, model: str, watch: _Watch, *, prefix_cache: bool) -> Run:
    """Play the conversation on `model`, then the agents on the bundled model, each watched by a listener."""
    from radixkv.sampling.params import SamplingParams

    chat, params = demo_chat.chat_for(model), SamplingParams(temperature=0.0, max_tokens=96)
    with _load(console, model, _CHAT_BLOCKS, prefix_cache=prefix_cache) as engine, watch("chat") as on_answer:
        talk, seconds = _timed(partial(demo_chat.play, engine, chat, params), on_answer)
        first = Part(tuple(talk), engine.stats(), seconds)
    with _load(console, BUNDLED, _AGENT_BLOCKS, prefix_cache=prefix_cache) as engine, watch("agents") as on_answer:
        (said, footprint), seconds = _timed(partial(demo_agents.play, engine, params), on_answer)
        return Run(first, Part(tuple(said), engine.stats(), seconds), footprint)


def _timed(play: Callable[[Listener], Played], listener: Listener) -> tuple[Played, float]:
    """Return the result of `play`, and its seconds without those of the listener: printing belongs to no run."""
    printing = []

    def watched(said: Said) -> None:
        paused = time.perf_counter()
        listener(said)
        printing.append(time.perf_counter() - paused)

    began = time.perf_counter()
    return play(watched), time.perf_counter() - began - sum(printing)


@contextmanager
def _show(console: Console, model: str, part: str) -> Iterator[Listener]:
    """Print the headline of a part, then each line when it is answered."""
    if part == "chat":
        chat = demo_chat.chat_for(model)
        console.print(_headline("1", f"A conversation. System prompt: {chat.system!r}"))
    else:
        console.print(_headline("2", "Eight customers fork from one conversation with a shop's agent, all at once"))
        console.print(_about_manual())
    assistant = "Mira" if part == "agents" or model == BUNDLED else "model"
    yield lambda said: console.print(_line(said, assistant))


@contextmanager
def _count(console: Console, expected: dict[str, int], part: str) -> Iterator[Listener]:
    """Show a progress bar of the replies of a part."""
    with Progress(
        TextColumn("   {task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    ) as progress:
        task = progress.add_task("replies", total=expected[part])
        yield lambda said: progress.advance(task, len(said.replies))


# ---- output


def _title(model: str) -> str:
    return "tiny, the bundled model" if model == BUNDLED else shown_name(model)


def _banner(model: str) -> Panel:
    real = "" if demo_chat.installed_model() else " `make real` installs a real model for part 1 (93 MB)."
    return Panel.fit(
        "[bold]radixkv[/bold]: conversations and branches share one KV pool through a radix tree over their tokens\n"
        f"Model: {_title(model)}{'' if model == BUNDLED else f' in part 1, {_title(BUNDLED)}, in part 2'}.{real}\n"
        "The numbers on the right: prompt tokens found in the cache, and the time to the first token of the reply.",
        border_style="cyan",
    )


def _headline(number: str, text: str) -> Text:
    return Text.assemble("\n", (f" {number} ", "bold reverse"), (f" {text}", "bold"), "\n")


def _about_manual() -> Text:
    names = ", ".join(tool["function"]["name"] for tool in demo_agents.TOOLS)
    return Text(
        f"   The prompt: opening hours, rules, {len(demo_agents.PRODUCTS)} products, and the tools {names}.\n", "dim"
    )


def _line(said: Said, assistant: str) -> Table:
    """Format a line: speaker, text, tool calls and answer on the left, the cost on the right."""
    grid = Table.grid(expand=True, padding=(0, 1))
    grid.add_column(width=7, justify="right", style="cyan")
    grid.add_column(ratio=1)
    grid.add_column(width=26, justify="right", style="dim")
    grid.add_row(said.speaker, Text(said.line.says, "cyan"), "")
    for reply in said.replies:
        for call in reply.tool_calls:
            arguments = ", ".join(f"{key}={value!r}" for key, value in call.arguments.items())
            grid.add_row(
                "tool", Text(f"{call.name}({arguments})", "yellow"), _cost(reply) if call is reply.tool_calls[0] else ""
            )
    grid.add_row(assistant, Text(said.answer, "" if said.right else "red"), _cost(said.replies[-1]))
    return grid


def _cost(reply: Reply) -> str:
    usage = reply.usage
    return f"{usage.cached_tokens:,}/{usage.prompt_tokens:,} hit {usage.ttft_s * 1000:5.0f} ms"


def _verdict(cached: Run, different: list[int]) -> Panel:
    replies = cached.replies
    if different:
        text = f"{len(different)} OF {len(replies)} REPLIES DIFFER WITH AND WITHOUT THE CACHE: replies {different}."
        return Panel.fit(f"{text}\nThis is a bug: please report it.", border_style="bold red")
    tokens = sum(len(reply.token_ids) for reply in replies)
    checked = [said for said in cached.said if said.line.is_checked]
    right, free = sum(said.right for said in checked), len(cached.said) - len(checked)
    text = f"All {len(replies)} replies ({tokens:,} tokens) are the same without the cache, token by token."
    more = f" {free} questions have no single right answer." if free else ""
    return Panel.fit(f"{text}\n{right} of {len(checked)} answers are right.{more}", border_style="green")


def savings(cached: Run, uncached: Run) -> Table:
    """Format the savings of the cache, one row per quantity. A row without a gain says why."""
    context = cached.agents.stats.max_length
    numbers = (Column(name, justify="right", no_wrap=True) for name in ("with cache", "without"))
    table = Table("", *numbers, "gain", box=box.SIMPLE_HEAD, title_justify="left", caption_justify="left")
    table.title, table.title_style = "Savings by sharing", "bold"
    table.caption = (
        f"First tokens are medians. Without a cache, each agent has its own blocks, or {context:,} tokens at once.\n"
        "To chat yourself: radixkv chat tiny (.venv/bin/radixkv in a clone)"
    )
    counted = ("prompt", "computed", "cached")
    asked, computed, found = ([run.total(f"{name}_tokens") for run in (cached, uncached)] for name in counted)
    rates = [f"{hits / tokens:.1%}" for hits, tokens in zip(found, asked, strict=True)]
    table.add_row("prompt tokens", *(f"{tokens:,}" for tokens in asked), "none: the same words")
    table.add_row("hit rate", *rates, f"{found[0]:,} tokens found")
    table.add_row("tokens computed", *(f"{each:,}" for each in computed), f"{1 - computed[0] / computed[1]:.0%} saved")
    _add_times(table, "chat", cached.chat, uncached.chat)
    _add_times(table, "agents", cached.agents, uncached.agents, skip=1)
    _add_memory(table, cached.footprint, cached.agents.stats)
    return table


def _add_times(table: Table, name: str, *parts: Part, skip: int = 0) -> None:
    """Add the median time to the first token, of all lines but the first `skip`, and the time of the whole part."""
    medians = [median(reply.usage.ttft_s for said in part.said[skip:] for reply in said.replies) for part in parts]
    shown = [f"{seconds * 1000:.0f} ms" for seconds in medians]
    table.add_row(f"{name}: first token", *shown, _gain("such prompts cost little", *medians))
    seconds = [part.seconds for part in parts]
    table.add_row("  all replies", *(f"{each:.1f} s" for each in seconds), _gain("it is mostly decoding", *seconds))


def _gain(otherwise: str, cached: float, uncached: float) -> str:
    """Format how many times faster the cached run was; `otherwise` says why, if that is less than 1.1 times.

    >>> _gain("short prompts", 10, 25), _gain("short prompts", 10, 9.6)
    ('2.5x faster', 'none: short prompts')
    """
    return f"{uncached / cached:.1f}x faster" if uncached >= 1.1 * cached else f"none: {otherwise}"


def _add_memory(table: Table, footprint: Footprint, stats: EngineStats) -> None:
    per_token = stats.kv_bytes / (stats.cache.num_blocks * stats.cache.block_size)
    pooled = size_text(footprint.pooled * per_token)
    for name, tokens in (("agents: KV memory", footprint.alone), ("  whole contexts", footprint.slabs)):
        table.add_row(name, pooled, size_text(tokens * per_token), f"{tokens / footprint.pooled:.1f}x less")
