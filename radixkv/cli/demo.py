"""`radixkv demo`: a chat, eight agents that fork from one prompt, the same without a cache, and the savings.

`demo_script` has the lines. Both runs play them on an engine of the bundled model; the second run prints nothing.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from statistics import median
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Column, Table

from radixkv.cli.demo_script import CHAT, CUSTOMERS, GREETING, MANUAL, SYSTEM, TOOLS, Line, use_tool
from radixkv.sizing.kv_size import size_text

if TYPE_CHECKING:
    from radixkv.chat import ChatSession, Engine, Reply, ReplyStream
    from radixkv.engine import EngineStats

_BLOCKS = 1024  # of 16 tokens: more than the demo needs, so that nothing is evicted
_ABOUT = (
    "[bold]radixkv[/bold]: conversations and branches share one KV pool, through a radix tree over tokens.\n"
    "The model is tiny, the bundled one. `radixkv chat MODEL` talks to another one.\n"
    "On the right are the prompt tokens found in the cache, and the time to the first token of the reply."
)
_HEADLINES = {
    "chat": f"A conversation. System prompt: {SYSTEM!r}",
    "agents": "Eight customers fork from one conversation with a shop's agent, all at once",
}


@dataclass(frozen=True)
class Said:
    """A line, and all replies to it in order: replies that call tools, then the answer."""

    speaker: str
    line: Line
    replies: list[Reply]

    @property
    def right(self) -> bool:
        """Whether the last reply is the right answer."""
        return self.replies[-1].text == self.line.right


@dataclass(frozen=True)
class Part:
    """The conversation or the agents, played on an engine of its own."""

    said: list[Said]
    seconds: float  # without printing
    stats: EngineStats  # at the end, while all conversations are open

    @property
    def replies(self) -> list[Reply]:
        """All replies, in the order of the script."""
        return [reply for said in self.said for reply in said.replies]


Run = dict[str, Part]


def run(arguments: argparse.Namespace) -> int:
    """Run the demo; return 0, or 1 if an answer with the cache differs from the one without."""
    console = Console(highlight=False)
    console.print(Panel.fit(_ABOUT, border_style="cyan"))
    with console.status("starting"):  # the first steps of a process are slower
        _play("chat", None, prefix_cache=False)
    cached = {part: _play(part, console, prefix_cache=True) for part in _HEADLINES}
    console.print("\nThe same words without a cache: every prompt computed in full", style="bold")
    with console.status("computing"):
        uncached = {part: _play(part, None, prefix_cache=False) for part in _HEADLINES}
    different = differences(*(_replies(each) for each in (cached, uncached)))
    console.print(_verdict(cached, different))
    console.print(_savings(cached, uncached))
    return 1 if different else 0


def differences(cached: list[Reply], uncached: list[Reply]) -> list[int]:
    """Return the indices of replies whose tokens differ; a reply that one side lacks counts as different."""
    tokens = ([reply.token_ids for reply in replies] for replies in (cached, uncached))
    return [at for at, (one, other) in enumerate(zip_longest(*tokens)) if one != other]


def _replies(run: Run) -> list[Reply]:
    return [reply for part in run.values() for reply in part.replies]


# ---- playing


def _play(part: str, console: Console | None, *, prefix_cache: bool) -> Part:
    """Play a part of the script, and print each line when it is answered."""
    from radixkv.chat import Engine  # takes seconds: it imports torch

    if console is not None:
        console.print(f"\n{_HEADLINES[part]}\n", style="bold")
    # Equal answers are promised in float32: lower precision may round ties differently in another batch.
    with Engine.load("tiny", num_blocks=_BLOCKS, dtype="float32", prefix_cache=prefix_cache) as engine:
        answered, said, seconds = {"chat": _chat, "agents": _agents}[part](engine), list[Said](), 0.0
        began = time.perf_counter()
        for each in answered:
            seconds += time.perf_counter() - began
            said.append(each)
            if console is not None:
                _print(console, each)
            began = time.perf_counter()
        return Part(said, seconds, engine.stats())


def _chat(engine: Engine) -> Iterator[Said]:
    """Play the conversation."""
    session = engine.chat(SYSTEM)
    for line in CHAT:
        yield Said("you", line, [_ask(session, line).wait()])


def _agents(engine: Engine) -> Iterator[Said]:
    """Fork a conversation for each customer from one that has read the manual, and run them at the same time."""
    first = engine.chat(MANUAL, tools=TOOLS)
    yield Said("all", GREETING, [_ask(first, GREETING).wait()])
    sessions = dict(zip(CUSTOMERS, first.fork(len(CUSTOMERS)), strict=True))
    for lines in zip(*CUSTOMERS.values(), strict=True):
        said = [Said(name, line, []) for name, line in zip(CUSTOMERS, lines, strict=True)]
        streams = [(each, _ask(sessions[each.speaker], each.line)) for each in said]
        while streams:  # tools run between the batches
            for each, stream in streams:
                each.replies.append(stream.wait())
            calling = [each for each, _ in streams if each.replies[-1].tool_calls]
            streams = [(each, _answer_calls(sessions[each.speaker], each.replies[-1])) for each in calling]
        yield from said


def _ask(session: ChatSession, line: Line) -> ReplyStream:
    from radixkv.sampling.params import SamplingParams

    return session.stream(line.says, SamplingParams(temperature=0.0, max_tokens=96))


def _answer_calls(session: ChatSession, reply: Reply) -> ReplyStream:
    from radixkv.chat import ToolResult
    from radixkv.sampling.params import SamplingParams

    results = [ToolResult(call.id, json.dumps(use_tool(call.name, call.arguments))) for call in reply.tool_calls]
    return session.stream_tool_results(results, SamplingParams(temperature=0.0, max_tokens=96))


# ---- output


def _print(console: Console, said: Said) -> None:
    """Print a line, then its tool calls and the answer, each with its cost on the right."""
    console.print(f"{said.speaker:>7}  {said.line.says}", style="cyan", markup=False)
    for reply in said.replies:
        calls = [f"{call.name}({', '.join(map(str, call.arguments.values()))})" for call in reply.tool_calls]
        speaker, text = ("tools", ", ".join(calls)) if calls else ("Mira", reply.text)
        usage, style = reply.usage, "yellow" if calls else "" if said.right else "red"
        cost = f"{usage.cached_tokens:>4}/{usage.prompt_tokens:<4} hit {usage.ttft_s * 1000:5.0f} ms"
        console.print(f"{speaker:>7}  {text:<47} {cost}", style=style, markup=False)


def _verdict(cached: Run, different: list[int]) -> Panel:
    replies, said = _replies(cached), [each for part in cached.values() for each in part.said]
    if different:
        text = f"{len(different)} OF {len(replies)} REPLIES DIFFER WITH AND WITHOUT THE CACHE: replies {different}."
        return Panel.fit(f"{text}\nThis is a bug: please report it.", border_style="bold red")
    tokens = sum(len(reply.token_ids) for reply in replies)
    text = f"All {len(replies)} replies ({tokens:,} tokens) are the same without the cache, token by token."
    right = sum(each.right for each in said)
    return Panel.fit(f"{text}\n{right} of {len(said)} answers are right.", border_style="green")


def _savings(cached: Run, uncached: Run) -> Table:
    """Format the savings of the cache, one row per quantity. A row without a gain says why."""
    stats = cached["agents"].stats
    numbers = (Column(name, justify="right", no_wrap=True) for name in ("with cache", "without"))
    table = Table("", *numbers, "gain", box=box.SIMPLE_HEAD, title_justify="left", caption_justify="left")
    table.title, table.title_style = "Savings by sharing", "bold"
    table.caption = (
        f"First tokens are medians. Without a cache, each agent has its own blocks, or {stats.max_length:,} tokens at "
        "once.\nTo chat yourself: radixkv chat tiny (.venv/bin/radixkv in a clone)"
    )
    asked, computed, found = (
        [sum(getattr(part.stats, f"{name}_tokens") for part in run.values()) for run in (cached, uncached)]
        for name in ("prompt", "computed", "cached")
    )
    rates = [f"{hits / tokens:.1%}" for hits, tokens in zip(found, asked, strict=True)]
    table.add_row("prompt tokens", *(f"{tokens:,}" for tokens in asked), "none: the same words")
    table.add_row("hit rate", *rates, f"{found[0]:,} tokens found")
    table.add_row("tokens computed", *(f"{each:,}" for each in computed), f"{1 - computed[0] / computed[1]:.0%} saved")
    for name in cached:
        parts = cached[name], uncached[name]
        first = [median(reply.usage.ttft_s for reply in part.replies[1:]) for part in parts]
        shown = [f"{seconds * 1000:.0f} ms" for seconds in first]
        table.add_row(f"{name}: first token", *shown, _gain("such prompts cost little", *first))
        seconds = [part.seconds for part in parts]
        table.add_row("  all replies", *(f"{each:.1f} s" for each in seconds), _gain("it is mostly decoding", *seconds))
    size, per_token = stats.cache.block_size, stats.kv_bytes / (stats.cache.num_blocks * stats.cache.block_size)
    pooled = (stats.cache.num_blocks - stats.cache.free_blocks) * size
    ends = [said.replies[-1] for said in cached["agents"].said[-len(CUSTOMERS) :]]
    alone = sum(-(-(reply.usage.prompt_tokens + len(reply.token_ids)) // size) * size for reply in ends)
    for name, tokens in (("agents: KV memory", alone), ("  whole contexts", stats.max_length * len(CUSTOMERS))):
        sizes = (size_text(each * per_token) for each in (pooled, tokens))
        table.add_row(name, *sizes, f"{tokens / pooled:.1f}x less")
    return table


def _gain(otherwise: str, cached: float, uncached: float) -> str:
    """Format how many times faster the cached run was; `otherwise` says why, if that is less than 1.1 times.

    >>> _gain("short prompts", 10, 25), _gain("short prompts", 10, 9.6)
    ('2.5x faster', 'none: short prompts')
    """
    return f"{uncached / cached:.1f}x faster" if uncached >= 1.1 * cached else f"none: {otherwise}"
