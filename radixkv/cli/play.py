"""Plays the demo's script on an engine: every reply, what it cost, and what the pool held.

Knows an engine and the script. Prints nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from radixkv.cli import script
from radixkv.cli.script import Customer, Line

if TYPE_CHECKING:
    from radixkv.chat import ChatSession, Engine, Reply, ReplyStream, ToolCall
    from radixkv.sampling.params import SamplingParams

_MOST_CALLS = 3  # rounds of tool calls to one message, before its answer


@dataclass(frozen=True)
class Said:
    """A line, and all replies to it in order: those that call tools, then the answer."""

    who: str
    line: Line
    replies: tuple[Reply, ...]

    @property
    def answer(self) -> str:
        """The last reply's text."""
        return self.replies[-1].text

    @property
    def calls(self) -> list[ToolCall]:
        """The tool calls that were made on the way."""
        return [call for reply in self.replies for call in reply.tool_calls]

    @property
    def right(self) -> bool:
        """Whether the answer is the script's."""
        return self.answer == self.line.right


@dataclass(frozen=True)
class Footprint:
    """KV memory of the agents, in tokens: what the pool came to hold, what each would need alone, and one slab of the
    model's full length each.
    """

    pooled: int
    alone: int
    slabs: int


@dataclass(frozen=True)
class Played:
    """One run of the whole script."""

    chat: tuple[Said, ...]
    agents: tuple[Said, ...]
    footprint: Footprint

    @property
    def replies(self) -> list[Reply]:
        """Every reply, in the script's order."""
        return [reply for said in (*self.chat, *self.agents) for reply in said.replies]


Listener = Callable[[Said], None]


def play(engine: Engine, params: SamplingParams, told: Listener = lambda said: None) -> Played:
    """Play both parts; `told` hears of every line as soon as it is answered. Raises what the engine raises."""
    chat = play_chat(engine, params, told)
    agents, footprint = play_agents(engine, params, told)
    return Played(tuple(chat), tuple(agents), footprint)


def play_chat(engine: Engine, params: SamplingParams, told: Listener) -> list[Said]:
    """One person, one conversation, one line after the other."""
    session = engine.chat(script.CHAT_SYSTEM)
    said = []
    for line in script.CHAT:
        said.append(Said("you", line, (session.send(line.says, params),)))
        told(said[-1])
    return said


def play_agents(engine: Engine, params: SamplingParams, told: Listener) -> tuple[list[Said], Footprint]:
    """Eight customers fork from one conversation that has read the manual, and talk at the same time."""
    before = _held(engine)
    first = engine.chat(script.MANUAL, tools=script.TOOLS)
    said = [Said("all", script.GREETING, (first.send(script.GREETING.says, params),))]
    told(said[0])
    sessions = first.fork(len(script.CUSTOMERS))
    for at in range(max(len(customer.lines) for customer in script.CUSTOMERS)):
        for answered in _answer_all(sessions, script.CUSTOMERS, at, params):
            said.append(answered)
            told(answered)
    return said, _footprint(engine, sessions, before)


def _answer_all(
    sessions: Sequence[ChatSession], customers: Sequence[Customer], at: int, params: SamplingParams
) -> list[Said]:
    """Line `at` of every customer, all in one batch; tools run between the batches."""
    asking = [
        (session, customer) for session, customer in zip(sessions, customers, strict=True) if at < len(customer.lines)
    ]
    replies: list[list[Reply]] = [[] for _ in asking]
    streams: dict[int, ReplyStream] = {
        index: session.stream(customer.lines[at].says, params) for index, (session, customer) in enumerate(asking)
    }
    for _ in range(_MOST_CALLS):
        for index, stream in streams.items():
            replies[index].append(stream.wait())
        streams = {
            index: _answer_calls(asking[index][0], replies[index][-1], params)
            for index in streams
            if replies[index][-1].tool_calls
        }
    for stream in streams.values():
        stream.close()
    return [
        Said(customer.name, customer.lines[at], tuple(got)) for (_, customer), got in zip(asking, replies, strict=True)
    ]


def _answer_calls(session: ChatSession, reply: Reply, params: SamplingParams) -> ReplyStream:
    from radixkv.chat import ToolResult

    results = [ToolResult(call.id, json.dumps(script.use_tool(call.name, call.arguments))) for call in reply.tool_calls]
    return session.stream_tool_results(results, params)


def _held(engine: Engine) -> int:
    """Blocks of the pool that hold something."""
    cache = engine.stats().cache
    return cache.num_blocks - cache.free_blocks


def _footprint(engine: Engine, sessions: Sequence[ChatSession], before: int) -> Footprint:
    stats = engine.stats()
    size = stats.cache.block_size
    alone = sum(-(-len(session.token_ids) // size) for session in sessions)
    return Footprint((_held(engine) - before) * size, alone * size, stats.max_length * len(sessions))
