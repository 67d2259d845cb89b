"""`radixkv-replay run`: replay a trace against a live engine or a server, and measure its latencies and hits.

Ctrl-C and SIGTERM print the measurements so far. An engine, and torch with it, is loaded only where the options request
for one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from radixkv.cli.entry_point import AddCommand
from radixkv.config import EngineConfig, settings_in
from radixkv.errors import InvalidInput
from radixkv.settings.command_line import add_settings
from radixkv_traces.cli import Progress, add_trace, interrupted_by_signals, name_of, positive, source, warn, window
from radixkv_traces.formats import Request, TraceRequest, open_trace
from radixkv_traces.live import results
from radixkv_traces.live.display import Tally, show
from radixkv_traces.live.player import Pace, Player, ReplayRun
from radixkv_traces.live.requests import Outcome, PromptMaker, plan_requests
from radixkv_traces.live.results import Figures, compared, parse_goodput, summary
from radixkv_traces.workload import block_tokens_of, interleave

if TYPE_CHECKING:
    from radixkv_traces.live.engine_target import EngineTarget
    from radixkv_traces.live.http_target import HttpTarget


_ASAP_CONCURRENCY = 64
_ABOUT = "replay a trace against a live engine, or any server with OpenAI's HTTP API"


def add(add_command: AddCommand) -> None:
    """Add the command to a parser's commands."""
    _add_options(add_command("run", _ABOUT, __name__))


def run(arguments: argparse.Namespace) -> int:
    """Replay, print, and write the requested files.

    Returns 0, or 1 if a request failed, or 130 after Ctrl-C, or 128 plus the number of a signal.
    """
    EngineConfig(**_engine_options(arguments))  # wrong settings are refused before the trace is read
    replay = Replay(
        arguments,
        _requests(arguments),
        _pace(arguments),
        parse_goodput(arguments.goodput),
        None if arguments.out is None else results.folder(arguments.out, fresh=True),
    )
    status = 0
    with interrupted_by_signals() as stop:
        try:
            asyncio.run(replay.play())
        except KeyboardInterrupt:
            status = stop.status
        finally:
            found = replay.written()
    if not replay.runs:
        return status
    print(json.dumps(found)) if arguments.json else show(found)
    return status or int(any(figures["failed"] for figures in found["runs"].values()))


@dataclass
class Replay:
    """One replay, or two to be compared; `runs` and `facts` grow as it runs."""

    arguments: argparse.Namespace
    requests: list[Request]
    pace: Pace
    goodput: dict[str, float]
    out: Path | None
    runs: list[ReplayRun] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    async def play(self) -> None:
        """Replay the trace against each target in turn."""
        if self.arguments.target is not None:
            await self._play(await self._server())
            return
        await self._play(await self._engine("radixkv", prefix_cache=True))
        if self.arguments.compare is not None:
            await self._play(await self._engine("radixkv, no cache", prefix_cache=False))

    def written(self) -> Figures:
        """Return all figures so far, and write them if `--out` was given."""
        runs = {run.target: summary(run, self.goodput) for run in self.runs}
        trace = name_of(self.arguments.trace)
        found: Figures = {"trace": trace, "options": self._options(), "facts": self.facts, "runs": runs}
        if len(runs) == 2 and all(run.whole for run in self.runs):
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

        given = _engine_options(self.arguments)
        return await EngineTarget.load(self.arguments.model or "tiny", name, prefix_cache=prefix_cache, **given)

    async def _server(self) -> HttpTarget:
        from radixkv_traces.live.http_target import HttpTarget

        arguments = self.arguments
        # The key is in a variable that an option names: an argument would show in the list of processes.
        extra, key = _extra_body(arguments), os.environ.get(arguments.api_key_env)
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
        prompt_maker = self._prompt_maker(target)
        todo = plan_requests(self.requests, prompt_maker, self.arguments.max_output)
        ahead, todo = todo[: self.arguments.warmup], todo[self.arguments.warmup :]
        tally, total = Tally(), len(ahead) + len(todo)
        with Progress(target.name) as progress:

            def count(outcome: Outcome) -> None:
                tally.add(outcome)
                progress(tally.done, total, tally.figures())

            player = Player(target, prompt_maker, self.pace, count)
            self.runs.append(player.result)
            await player.warm(ahead)
            # Times begin at the first request, because the warm-up took time of its own.
            await player.play([replace(each, due=each.due - todo[0].due) for each in todo])

    def _prompt_maker(self, target: EngineTarget | HttpTarget) -> PromptMaker:
        arguments = self.arguments
        vocab_size = getattr(target, "vocab_size", arguments.vocab_size)
        blocks = [request for request in self.requests if isinstance(request, TraceRequest)]
        block_tokens = arguments.block_tokens or (block_tokens_of(blocks) if blocks else arguments.shrink)
        return PromptMaker(vocab_size, block_tokens, shrink=arguments.shrink, seed=arguments.seed)


def _requests(arguments: argparse.Namespace) -> list[Request]:
    """Read all requests first, so that a bad line is found before a model is loaded."""
    if arguments.compare is not None and arguments.target is not None:
        raise InvalidInput("--compare off needs an engine of this process: leave out --target")
    requests = list(window(open_trace(source(arguments.trace), arguments.format), arguments))
    warn(requests)
    if arguments.interleave is not None:
        requests = list(interleave(requests, arguments.interleave))
    if len(requests) <= arguments.warmup:
        raise InvalidInput(f"{arguments.trace}: no request is left to replay (see --start, --end, --limit, --warmup)")
    return requests


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_trace(parser, tokenizer=False)
    _add_pace(parser.add_argument_group("timing"))
    _add_size(parser.add_argument_group("the requests"))
    _add_engine(parser.add_argument_group("engine in this process"))
    _add_target(parser.add_argument_group("other server"))
    _add_results(parser.add_argument_group("results"))


def _pace(arguments: argparse.Namespace) -> Pace:
    """Return the pace of the options. Raises InvalidInput."""
    concurrency = arguments.concurrency
    if concurrency is None and arguments.asap:
        concurrency = _ASAP_CONCURRENCY
    return Pace(arguments.loop, arguments.speedup, arguments.asap, concurrency)


def _engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings for `Engine.load`; `--seed` is for token ids, not for the engine."""
    return {name: value for name, value in settings_in(arguments).items() if name != "seed"}


def _extra_body(arguments: argparse.Namespace) -> Mapping[str, Any]:
    """Parse `--extra`, which is added to each body. Raises InvalidInput."""
    try:
        extra = json.loads(arguments.extra)
    except ValueError as error:
        raise InvalidInput(f"--extra {arguments.extra!r} is no JSON: {error}") from error
    if not isinstance(extra, dict):
        raise InvalidInput(f'--extra {arguments.extra!r}: allowed is a JSON object, such as {{"ignore_eos": null}}')
    return extra


def _add_pace(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--loop",
        choices=("open", "closed"),
        default="closed",
        help="open: at the recorded times, even if answers are late; closed (the default): a session's next request "
        "also waits for the answer to the one before",
    )
    group.add_argument("--speedup", type=float, default=1.0, metavar="X", help="replay X times as fast as recorded")
    group.add_argument(
        "--asap", action="store_true", help="ignore recorded times, and send as fast as --concurrency allows"
    )
    group.add_argument(
        "--concurrency",
        type=positive,
        metavar="N",
        help=f"at most N requests (closed loop: sessions) at once (default: no limit; {_ASAP_CONCURRENCY} with --asap)",
    )


def _add_size(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--warmup", type=positive, default=0, metavar="N", help="send the first N requests before the measurement"
    )
    group.add_argument(
        "--shrink",
        type=positive,
        default=1,
        metavar="N",
        help="make prompts and answers of recorded blocks N times shorter (for small models)",
    )
    group.add_argument("--max-output", type=positive, metavar="N", help="most tokens of an answer")
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of the token ids that are generated for block ids"
    )


def _add_engine(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--model", help="'tiny' (bundled, the default), a local folder, a GGUF file, or a hub name")
    add_settings(
        group, EngineConfig,
        "kv_memory", "num_blocks", "host_memory", "block_size", "eviction", "max_sequences", "order",
        "max_delay", "attention", "device", "dtype",
    )  # fmt: skip
    group.add_argument("--compare", choices=("off",), help="off: replay again with the prefix cache off, and compare")


def _add_target(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--target", metavar="URL", help="use this OpenAI-compatible server instead of an engine in this process"
    )
    group.add_argument(
        "--vocab-size", type=positive, default=30000, metavar="N", help="token ids are below N (default: 30000)"
    )
    group.add_argument(
        "--extra", default="{}", metavar="JSON", help='fields added to each body; {"ignore_eos": null} removes a field'
    )
    group.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="longest time without data from the server (default: 600)",
    )
    group.add_argument(
        "--api-key-env", default="OPENAI_API_KEY", metavar="NAME", help="environment variable with the API key"
    )


def _add_results(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--goodput",
        action="append",
        default=[],
        metavar="NAME:MS",
        help="count requests within this limit; NAME is ttft, tpot or e2e; may be repeated",
    )
    group.add_argument("--out", metavar="DIR", help="folder for summary.json, requests.csv and moments.csv")
    group.add_argument("--json", action="store_true", help="print the summary as one JSON object")
