"""Made-up logs of requests: 20 with one fault of known cost each, and 5 without any.

Each request of a faulty log is sent in one version. A real cache holds the prompts as they were sent. The cost is how
many tokens more it hits if a prompt has an earlier version, without tokens that only the earlier version has.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import cache
from random import Random
from typing import Any
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from radixkv.cache import PrefixCache
from radixkv_traces.chats import ChatRequest, Message
from radixkv_traces.text_blocks import estimate, rendered, spoken

WORDS = """answer ask block branch build cache call change check code count each edit engine error file find first keep
line list model module name never open path prompt read reason report request result run search short stop test text
token tool user value when write""".split()  # noqa: SIM905


@dataclass(frozen=True, slots=True)
class Fault:
    """Requests as sent, and the one finding for them. The requests at the indices `broken` cost `tokens` together."""

    requests: list[ChatRequest]
    rule: str = ""
    place: str = ""  # a part such as "messages[5]", or "messages[5], character 80" where a text differs
    tokens: int = 0
    broken: tuple[int, ...] = ()

    def findings(self) -> list[tuple[str, str, int, int]]:
        """Return rule, place, tokens and requests of each finding: one, or none of a clean log."""
        return [(self.rule, self.place, self.tokens, len(self.broken))] if self.broken else []

    def allowed(self, at: int) -> set[tuple[str, str] | None]:
        """Return the right live answers: part and rule, or None; in the first request of a session, both."""
        found = (self.place.split(",")[0], self.rule) if at in self.broken else None
        return {found, None} if self.requests[at].turn == 1 else {found}


# ---- conversations


def prose(rng: Random, words: int) -> str:
    return " ".join(rng.choices(WORDS, k=words)).capitalize() + "."


def tool(rng: Random, name: str) -> dict[str, Any]:
    fields = {word: {"type": "string", "description": prose(rng, 8)} for word in rng.sample(WORDS, 4)}
    schema = {"type": "object", "properties": fields, "required": [*fields][:2]}
    return {"type": "function", "function": {"name": name, "description": prose(rng, 30), "parameters": schema}}


def ask(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def conversation(rng: Random, turns: int) -> list[Message]:
    """Write the messages after the system prompt: two of three turns answer a call, the third one is a question."""
    messages = ask(prose(rng, 40))
    for turn in range(1, turns):
        answer: Message = {"role": "assistant", "content": prose(rng, 50) + "\n\n"}
        after, *_ = ask(prose(rng, 30))
        if turn % 3:
            arguments = json.dumps({"path": f"src/{rng.choice(WORDS)}.py", "limit": rng.randint(9, 999)})
            call = {"id": f"call_{rng.getrandbits(48):x}", "function": {"name": WORDS[turn], "arguments": arguments}}
            answer = {**answer, "content": "", "tool_calls": [call], "reasoning_content": prose(rng, 25)}
            after = {"role": "tool", "tool_call_id": call["id"], "content": f"10:0{turn}:07 {prose(rng, 90)}"}
        messages += [answer, after]
    return messages


def session(name: str, system: str, tools: Sequence[Any], messages: Sequence[Message]) -> list[ChatRequest]:
    """Return a request for each user message and each result of a tool, without times."""
    whole = ({"role": "system", "content": system}, *messages)
    ends = [at + 1 for at, message in enumerate(whole) if message["role"] in ("user", "tool")]
    return [ChatRequest(0, whole[:n], name, turn, 60, None, None, None, (*tools,)) for turn, n in enumerate(ends, 1)]


def interleaved(rng: Random, sessions: Sequence[list[ChatRequest]], minutes: float = 4) -> list[ChatRequest]:
    """Mix sessions at random, each in its order, with a request every few minutes."""
    left, log = [list(each) for each in sessions], list[ChatRequest]()
    while any(left):
        first = rng.choice([each for each in left if each]).pop(0)
        log.append(replace(first, timestamp=len(log) * minutes * 60_000 + rng.randint(0, 9) * 1000))
    return log


def prefix(rng: Random) -> tuple[str, list[Any]]:
    """Return a system prompt of about 600 tokens, and 6 to 12 tools."""
    return prose(rng, 420), [tool(rng, f"{name}_tool") for name in rng.sample(WORDS, rng.randint(6, 12))]


def sharing(rng: Random, said: Sequence[list[Message]]) -> list[ChatRequest]:
    """Return sessions that share a system prompt and tools."""
    same = prefix(rng)
    return interleaved(rng, [session(f"s{at}", *same, each) for at, each in enumerate(said)])


def plain_log(rng: Random, turns: Sequence[int] = (9, 7, 8)) -> list[ChatRequest]:
    return sharing(rng, [conversation(rng, each) for each in turns])


# ---- the oracle


class Oracle:
    """A cache of prompts that never evicts, token by token."""

    def __init__(self) -> None:
        self.cache = PrefixCache(400_000, 1)

    def hits(self, request: ChatRequest) -> int:
        return self.cache.match(tokens(request), request.namespace).length

    def add(self, request: ChatRequest) -> int:
        """Serve a request; returns the tokens of its prompt that missed."""
        prompt = tokens(request)
        with self.cache.open(prompt, request.namespace) as opened:
            missed = prompt[opened.length :]
            opened.extend(missed)
            opened.commit()
        return len(missed)


def tokens(request: ChatRequest) -> NDArray[np.int32]:
    """Encode each part of a prompt: tools with keys as sent, then messages with the thinking as sent. ASCII only."""
    texts = [json.dumps(each, separators=(",", ":")) + "\n" for each in request.tools]
    for said in request.messages:
        thought = said.get("reasoning_content")
        shown = f"<think>\n{thought}\n</think>\n" if thought else ""
        texts.append(rendered({**said, "content": shown + spoken({"content": said["content"]})}))
    return np.frombuffer(b"".join(estimate(text).tobytes() for text in texts), np.int32)


# ---- faults


Change = Callable[[list[Any], list[Message], Any], Any]


def version_of(base: ChatRequest, version: Hashable, change: Change) -> ChatRequest:
    """Return a copy of a request in a version; False is the unchanged one, and with True only session s0 changes."""
    tools, messages = json.loads(json.dumps([base.tools, base.messages]))
    if version and (version is not True or base.session == "s0"):
        change(tools, messages, version)
    return replace(base, tools=tuple(tools), messages=tuple(messages))


def fault(
    rule: str, place: str, log: list[ChatRequest], name: Callable[[int, ChatRequest], Hashable], change: Change
) -> Fault:
    """Send each request of a log in the version that `name` returns; the cost is the highest over earlier versions."""
    oracle, seen, sent, costs = Oracle(), dict[Hashable, None](), list[ChatRequest](), dict[int, int]()
    for at, base in enumerate(log):
        sent.append(now := version_of(base, name(at, base), change))
        size, hits, earlier = len(tokens(now)), oracle.hits(now), [version_of(base, each, change) for each in seen]
        cost = max((oracle.hits(each) - max(0, len(tokens(each)) - size) for each in earlier), default=0) - hits
        costs |= {at: cost} if cost > 0 else {}
        oracle.add(now)
        seen[name(at, base)] = None
    return Fault(sent, rule, place, sum(costs.values()), (*costs,))


def private_first(log: list[ChatRequest]) -> Fault:
    """Put a text of each session before the system prompt that all share; undone, it follows the shared one."""
    oracle, undone, sent, costs = Oracle(), Oracle(), list[ChatRequest](), dict[int, int]()
    for at, base in enumerate(log):
        private = {"role": "system", "content": f"Project {base.session}. {prose(Random(base.session), 150)}"}
        shared, *rest = base.messages
        sent.append(replace(base, messages=(private, shared, *rest)))
        missed = oracle.add(sent[-1]) - undone.add(replace(base, messages=(shared, private, *rest)))
        costs |= {at: missed} if missed else {}
    return Fault(sent, "private-first", "system", sum(costs.values()), (*costs,))


def put(message: Message, at: int, text: str, end: int | None = None) -> None:
    """Put a text at a character of a message, in place of its text up to `end`."""
    content = message["content"]
    message["content"] = content[:at] + text + content[at if end is None else end :]


def rewrite_calls(messages: list[Message]) -> None:
    """Write the arguments of two calls as a data base may return them."""
    for call in (messages[at]["tool_calls"][0]["function"] for at in (2, 4)):
        call["arguments"] = json.dumps(json.loads(call["arguments"]), sort_keys=True, separators=(",", ":"))


def clock(form: str) -> Callable[[int, ChatRequest], str]:
    """Return the time of a request, counted from 23:12."""
    return lambda _, it: f"{datetime(2026, 11, 28, 23, 12, tzinfo=UTC) + timedelta(milliseconds=it.timestamp):{form}}"


def number(at: int, _: ChatRequest) -> UUID:
    return UUID(int=Random(at).getrandbits(128), version=4)


def turn(first: int) -> Callable[[int, ChatRequest], bool]:
    """Return the version of requests where session s0 changes at a turn, and stays so."""
    return lambda _, it: it.session == "s0" and it.turn >= first


SUMMARY = {"role": "user", "content": f"Summary of the conversation so far: {prose(Random(5), 60)}"}
NEW_TOOL = tool(Random(7), "new_tool")

TABLE: dict[str, tuple[str, str, Callable[[int, ChatRequest], Hashable], Change]] = {
    # name: rule, place, version of a request, change of its tools and messages
    "date": ("volatile-text", "system, character 831",
        clock("%Y-%m-%d"), lambda _, said, v: put(said[0], 812, f" Today is {v}.")),
    "clock": ("volatile-text", "system, character 111",
        clock("%H:%M:%S"), lambda _, said, v: put(said[0], 100, f" It is {v}.")),
    "request id": ("volatile-text", "system, character 8",
        number, lambda _, said, v: put(said[0], 0, f"Request {v}.\n")),
    "id in context": ("volatile-text", "messages[1], character 13",
        number, lambda _, said, v: put(said[1], 10, f"id={v}\n")),
    "tools shuffled": ("tools-order", "tools[0]",
        lambda at, _: at // 5, lambda tools, _, v: tools.extend([tools.pop(0) for _ in range(v)])),
    "tools swapped": ("tools-order", "tools[3]", turn(4), lambda tools, *_: [tools.insert(3, tools.pop(4))]),
    "tool added": ("tools-changed", "tools[2]", turn(5), lambda tools, *_: tools.insert(2, NEW_TOOL)),
    "tool removed": ("tools-changed", "tools[3]", turn(3), lambda tools, *_: tools.pop(3)),
    "tool described": ("tools-changed", "tools[4]",
        lambda at, _: at // 13, lambda tools, *_: tools[4]["function"].update(description="It is new.")),
    "schema keys": ("schema-order", "tools[2]", lambda _, it: ("", "properties", "type")[int(it.session[1:])],
        lambda tools, _, v: (fields := tools[2]["function"]["parameters"]).update({v: fields.pop(v)})),
    "message edited": ("message-changed", "messages[1], character 30",
        turn(5), lambda _, said, v: put(said[1], 30, "(solved) ")),
    "message dropped": ("message-dropped", "messages[6]", turn(6), lambda _, said, v: said.pop(6)),
    "window": ("message-dropped", "messages[1]",
        lambda _, it: max(0, 2 * it.turn - 8), lambda _, said, v: said.__delitem__(slice(1, 1 + v))),
    "summarised": ("history-summarised", "messages[1]",
        turn(8), lambda _, said, v: said.__setitem__(slice(1, 10), [SUMMARY])),
    "call rewritten": ("call-rewritten", "messages[2]", turn(4), lambda _, said, v: rewrite_calls(said)),
    "reply trimmed": ("message-changed", "messages[6], character 292",
        turn(6), lambda _, said, v: put(said[6], -2, "", 9999)),
    "thinking dropped": ("thinking-dropped", "messages[2]",
        turn(4), lambda _, said, v: [each.pop("reasoning_content", None) for each in said]),
    "result truncated": ("message-changed", "messages[3], character 200",
        turn(5), lambda _, said, v: put(said[3], 200, "[cut]", 9999)),
    "system changed": ("system-changed", "system, character 57",
        turn(5), lambda _, said, v: put(said[0], 57, "(You review.) ")),
}  # fmt: skip


@cache
def faults() -> dict[str, Fault]:
    """Return the logs with one fault each."""
    return {
        name: fault(rule, place, plain_log(Random(seed)), version, change)
        for seed, (name, (rule, place, version, change)) in enumerate(TABLE.items())
    } | {"private first": private_first(plain_log(Random(99)))}


# ---- logs without faults


def clean_logs(rng: Random) -> dict[str, list[ChatRequest]]:
    """Return sessions that only grow, that ask other questions, that have titles and sub-agents, or that branch."""
    grown, said, same, agents = plain_log(rng), conversation(rng, 8), prefix(rng), list[list[ChatRequest]]()
    dates = [ask(f"Write the report of 2026-11-0{day}.") for day in range(1, 5)]
    spaces = sharing(rng, dates + [conversation(rng, turns) for turns in (4, 6, 5)])
    edits = [said[:12] + ask(f"How was it{when}?") for when in ("", " on 2026-11-01", " on 2026-11-02")]
    for name in ("s0", "s1"):
        main = conversation(rng, 8)
        agents += [session(name, *same, main), session(name, prose(rng, 420), (), main[:1])]
        agents += [session(name, prose(rng, 420), same[1][:n], conversation(rng, 6)) for n in (99, 5)]
    return {
        "growth": [*grown[:10], grown[9], *grown[10:]],  # a request is sent twice
        "one system": [replace(each, namespace=f"n{int(each.session[1:]) % 2}") for each in spaces],
        "other question": interleaved(
            rng, [session("s0", *same, said)[:7] + [session("s0", *same, it)[-1] for it in [*edits, said]]]
        ),
        "sub-agents": interleaved(rng, agents),
        "branches": sharing(rng, [said[:5] + conversation(rng, 5)[1:] for _ in range(3)]),
    }


CLEAN = clean_logs(Random(5))
NAMES = [*TABLE, "private first", *CLEAN]


def log_of(name: str) -> Fault:
    """Return a log by its name, with or without a fault."""
    return Fault(CLEAN[name]) if name in CLEAN else faults()[name]
