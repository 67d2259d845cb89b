"""`radixkv-replay run`: a trace against a live engine, with progress, and with what was measured so far on Ctrl-C.

Knows arguments, terminals and the order of things. An engine, and torch with it, is loaded only where one is asked for.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from radixkv.cli.entry_point import INTERRUPTED
from radixkv.errors import InvalidInput
from radixkv_traces.formats import Request, TraceRequest, open_trace
from radixkv_traces.live import options, results
from radixkv_traces.live.asks import Ask, Synthesis, asks
from radixkv_traces.live.figures import Figures, compared, parse_goodput, summary
from radixkv_traces.live.player import Pace, Played, Player
from radixkv_traces.live.shown import Progress, show
from radixkv_traces.trace_options import name_of, source, window
from radixkv_traces.workload import block_tokens_of, interleave

if TYPE_CHECKING:
    from radixkv_traces.live.engine_target import EngineTarget
    from radixkv_traces.live.http_target import HttpTarget


_ABOUT = "replay a trace against a live engine, or any server that speaks OpenAI's HTTP"


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add the command to a parser's commands."""
    parser = commands.add_parser("run", help=_ABOUT, description=f"{_ABOUT[0].upper()}{_ABOUT[1:]}.", parents=[common])
    parser.set_defaults(module=__name__)
    options.add(parser)


def run(arguments: argparse.Namespace) -> int:
    """Replay, print, and write what was asked for; 0, 1 where a request failed, 130 behind Ctrl-C."""
    replay = Replay(
        arguments,
        _requests(arguments),
        options.pace(arguments),
        parse_goodput(arguments.goodput),
        None if arguments.out is None else results.folder(arguments.out, fresh=True),
    )
    status = 0
    try:
        asyncio.run(replay.play())
    except KeyboardInterrupt:
        status = INTERRUPTED
    finally:
        found = replay.written()
    if not replay.runs:
        return status
    print(json.dumps(found)) if arguments.json else show(found)
    return status or int(any(figures["failed"] for figures in found["runs"].values()))


@dataclass
class Replay:
    """One replay, or two to be compared; `runs` and `facts` grow as it goes."""

    arguments: argparse.Namespace
    requests: list[Request]
    pace: Pace
    goodput: dict[str, float]
    out: Path | None
    runs: list[Played] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    async def play(self) -> None:
        """Play the trace to each target in turn."""
        if self.arguments.target is not None:
            await self._play(await self._server())
            return
        await self._play(await self._engine("radixkv", prefix_cache=True))
        if self.arguments.compare is not None:
            await self._play(await self._engine("radixkv, no cache", prefix_cache=False))

    def written(self) -> Figures:
        """All figures so far, also on disk if that was asked for."""
        runs = {played.target: summary(played, self.goodput) for played in self.runs}
        trace = name_of(self.arguments.trace)
        found: Figures = {"trace": trace, "options": self._options(), "facts": self.facts, "runs": runs}
        if len(runs) == 2 and all(played.whole for played in self.runs):
            found["cache_is_worth"] = compared(*runs.values())
        if self.out is not None and self.runs:
            results.write(self.out, found, self.runs)
        return found

    def _options(self) -> Figures:
        names = ("loop", "speedup", "asap", "start", "end", "limit", "warmup", "shrink", "max_output", "seed")
        given = {name: getattr(self.arguments, name) for name in names}
        return {**given, "concurrency": self.pace.concurrency}

    async def _engine(self, name: str, *, prefix_cache: bool) -> EngineTarget:
        from radixkv_traces.live.engine_target import EngineTarget

        given = options.engine_options(self.arguments)
        return await EngineTarget.load(self.arguments.model or "tiny", name, prefix_cache=prefix_cache, **given)

    async def _server(self) -> HttpTarget:
        from radixkv_traces.live.http_target import HttpTarget

        arguments = self.arguments
        extra, key = options.extra_body(arguments), options.api_key(arguments)
        return await HttpTarget.at(
            arguments.target, arguments.model, api_key=key, extra=extra, timeout=arguments.timeout
        )

    async def _play(self, target: EngineTarget | HttpTarget) -> None:
        try:
            self.facts |= await target.facts()
            await self._play_to(target)
        finally:
            await target.close()

    async def _play_to(self, target: EngineTarget | HttpTarget) -> None:
        synthesis = self._synthesis(target)
        todo = asks(self.requests, synthesis, self.arguments.max_output)
        ahead, todo = todo[: self.arguments.warmup], todo[self.arguments.warmup :]
        with Progress(target.name, len(ahead) + len(todo)) as progress:
            player = Player(target, synthesis, self.pace, progress.told)
            self.runs.append(player.played)
            await player.warm(ahead)
            await player.play(_from_now(todo))

    def _synthesis(self, target: EngineTarget | HttpTarget) -> Synthesis:
        arguments = self.arguments
        vocab_size = getattr(target, "vocab_size", arguments.vocab_size)
        blocks = [request for request in self.requests if isinstance(request, TraceRequest)]
        block_tokens = arguments.block_tokens or (block_tokens_of(blocks) if blocks else arguments.shrink)
        return Synthesis(vocab_size, block_tokens, shrink=arguments.shrink, seed=arguments.seed)


def _requests(arguments: argparse.Namespace) -> list[Request]:
    """What is to be replayed, read whole, so that a bad line is found before a model is loaded for nothing."""
    if arguments.compare is not None and arguments.target is not None:
        raise InvalidInput("--compare off needs an engine of this process: leave out --target")
    requests = list(window(open_trace(source(arguments.trace), arguments.format), arguments))
    if arguments.interleave is not None:
        requests = list(interleave(requests, arguments.interleave))
    if len(requests) <= arguments.warmup:
        raise InvalidInput(f"{arguments.trace}: no request is left to replay (see --start, --end, --limit, --warmup)")
    return requests


def _from_now(asks: Sequence[Ask]) -> list[Ask]:
    """The asks, with times that begin at the first: what went ahead as warm-up took its own time."""
    return [replace(ask, due=ask.due - asks[0].due) for ask in asks]
