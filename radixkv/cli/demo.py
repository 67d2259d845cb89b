"""`radixkv demo`: a chat, eight agents that fork from one prompt, the same without a cache, and the savings.

The lines of the demo, and the code that plays them on an engine, are in `demo_script.py`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from radixkv.cli import demo_script
from radixkv.cli.demo_script import Footprint, Played, Said

if TYPE_CHECKING:
    from radixkv.chat import Engine, Reply
    from radixkv.engine import EngineStats
    from radixkv.sampling.params import SamplingParams

_BLOCKS = 1024  # 16 tokens each: far more than the demo needs, so that nothing is evicted


@dataclass(frozen=True)
class Run:
    """The script, played on one engine."""

    played: Played
    stats: EngineStats
    seconds: float


def run(arguments: argparse.Namespace) -> int:
    """Run the demo; return 0, or 1 if an answer with the cache differs from the one without."""
    console = Console(highlight=False)
    params = _greedy()
    console.print(_banner())
    with _load(console, prefix_cache=True) as engine:
        cached = _play_shown(console, engine, params)
    console.print(_headline("3", "The same words without a cache: every prompt computed in full"))
    with _load(console, prefix_cache=False) as engine:
        uncached = _play_counted(console, engine, params, expected=len(cached.played.replies))
    different = differences(cached.played.replies, uncached.played.replies)
    console.print(_verdict(cached.played, different))
    console.print(savings(cached, uncached))
    return 1 if different else 0


def differences(cached: Sequence[Reply], uncached: Sequence[Reply]) -> list[int]:
    """Return the indices of replies whose tokens differ; a reply that one side lacks counts as different."""
    longest = max(len(cached), len(uncached))
    return [at for at in range(longest) if _tokens(cached, at) != _tokens(uncached, at)]


def _tokens(replies: Sequence[Reply], at: int) -> tuple[int, ...] | None:
    return replies[at].token_ids if at < len(replies) else None


# ---- running


def _greedy() -> SamplingParams:
    from radixkv.sampling.params import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=96)


def _load(console: Console, *, prefix_cache: bool) -> Engine:
    with console.status("loading the bundled model"):
        from radixkv.chat import Engine  # takes seconds: it imports torch

        # Equal answers are promised in float32: lower precision may round ties differently in another batch.
        return Engine.load("tiny", num_blocks=_BLOCKS, dtype="float32", prefix_cache=prefix_cache)


def _play_shown(console: Console, engine: Engine, params: SamplingParams) -> Run:
    """Play both parts, and print each line when it is answered."""
    began = time.perf_counter()
    console.print(_headline("1", f"A conversation. System prompt: {demo_script.CHAT_SYSTEM!r}"))
    chat = demo_script.play_chat(engine, params, lambda said: console.print(_line(said)))
    console.print(_headline("2", "Eight customers fork from one conversation with a shop's agent, all at once"))
    console.print(_about_manual())
    agents, footprint = demo_script.play_agents(engine, params, lambda said: console.print(_line(said)))
    played = Played(tuple(chat), tuple(agents), footprint)
    return Run(played, engine.stats(), time.perf_counter() - began)


def _play_counted(console: Console, engine: Engine, params: SamplingParams, expected: int) -> Run:
    """Play both parts with a progress bar."""
    began = time.perf_counter()
    with Progress(
        TextColumn("   {task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    ) as progress:
        task = progress.add_task("replies", total=expected)
        played = demo_script.play(engine, params, lambda said: progress.advance(task, len(said.replies)))
    return Run(played, engine.stats(), time.perf_counter() - began)


# ---- output


def _banner() -> Panel:
    return Panel.fit(
        "[bold]radixkv[/bold]: conversations and branches share one KV pool through a radix tree over their tokens\n"
        "The numbers on the right: prompt tokens found in the cache, and the time to the first token of the reply.",
        border_style="cyan",
    )


def _headline(number: str, text: str) -> Text:
    return Text.assemble("\n", (f" {number} ", "bold reverse"), (f" {text}", "bold"), "\n")


def _about_manual() -> Text:
    names = ", ".join(tool["function"]["name"] for tool in demo_script.TOOLS)
    return Text(
        f"   The prompt: opening hours, rules, {len(demo_script.PRODUCTS)} products, and the tools {names}.\n", "dim"
    )


def _line(said: Said) -> Table:
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
    grid.add_row("Mira", Text(said.answer, "" if said.right else "red"), _cost(said.replies[-1]))
    return grid


def _cost(reply: Reply) -> str:
    usage = reply.usage
    return f"{usage.cached_tokens:,}/{usage.prompt_tokens:,} hit {usage.ttft_s * 1000:5.0f} ms"


def _verdict(played: Played, different: list[int]) -> Panel:
    replies, said = played.replies, [*played.chat, *played.agents]
    if different:
        text = f"{len(different)} OF {len(replies)} REPLIES DIFFER WITH AND WITHOUT THE CACHE: replies {different}."
        return Panel.fit(f"{text}\nThis is a bug: please report it.", border_style="bold red")
    tokens = sum(len(reply.token_ids) for reply in replies)
    right = sum(each.right for each in said)
    text = f"All {len(replies)} replies ({tokens:,} tokens) are the same without the cache, token by token."
    return Panel.fit(f"{text}\n{right} of {len(said)} answers are right.", border_style="green")


def savings(cached: Run, uncached: Run) -> Table:
    """Format the savings of the cache, one row per quantity."""
    table = Table(title="Savings by sharing", title_justify="left", title_style="bold")
    for name in ("", "with the cache", "without"):
        table.add_column(name, justify="left" if not name else "right")
    hit, miss = cached.stats, uncached.stats
    saved = 1 - hit.computed_tokens / miss.computed_tokens
    table.add_row("prompt tokens", f"{hit.prompt_tokens:,}", f"{miss.prompt_tokens:,}")
    table.add_row("hit rate: found in the cache", f"{hit.hit_rate:.1%}", f"{miss.hit_rate:.1%}")
    table.add_row(
        "tokens computed, replies included", f"{hit.computed_tokens:,} (saved {saved:.0%})", f"{miss.computed_tokens:,}"
    )
    _add_ttft(table, "chat", cached.played.chat, uncached.played.chat)
    _add_ttft(table, "eight agents at once", cached.played.agents[1:], uncached.played.agents[1:])
    table.add_row("time for everything", f"{cached.seconds:.1f} s", f"{uncached.seconds:.1f} s")
    _add_memory(table, cached.played.footprint, hit)
    return table


def _add_ttft(table: Table, name: str, *runs: Sequence[Said]) -> None:
    medians = [median(reply.usage.ttft_s for said in run for reply in said.replies) for run in runs]
    table.add_row(f"first token, median: {name}", *(f"{seconds * 1000:.0f} ms" for seconds in medians))


def _add_memory(table: Table, footprint: Footprint, stats: EngineStats) -> None:
    per_token = stats.kv_bytes / (stats.cache.num_blocks * stats.cache.block_size)
    pooled, alone, slabs = (
        f"{tokens * per_token / 1e6:,.1f} MB" for tokens in (footprint.pooled, footprint.alone, footprint.slabs)
    )
    table.add_section()
    table.add_row("KV memory of the eight agents", pooled, "")
    table.add_row("  paged, but nothing shared", "", alone)
    table.add_row(f"  one slab of {stats.max_length:,} tokens each", "", slabs)
