"""Measure how much of their prompts hybrid models hit, at several memories for recurrent states.

    python benchmarks/hybrid.py [--quick] [--rounds 7]

  caches    Token streams of chats, chats whose template strips the reasoning of earlier replies, agents that fork from
            one history, and repeated prompts, one request at a time. `PrefixCache` has slots for 1, 2 and 4
            snapshots per session. Models of other engines' rules get the same requests and slots: a state at every
            block of 16, vLLM's `align` mode with blocks of 528, SGLang's one state at each node's end, and SGLang with
            `extra_buffer` (hybrid_parts/policies.py has the rules). For comparison each rule also gets slots for all
            its states. The bound is a cache of a model without recurrent state. KV memory holds all requests.
  engines   Chats with both kinds of template on small random models, Qwen3.5 and LFM2, from the messages to the
            replies. Each request must hit as many tokens as the cache alone hits with the same token streams. Copies of
            states are counted by the arena, and given per turn; this includes those that a forward makes inside of a
            chunk.
  ttft      Time to the first token of a prompt of 2,048 tokens on the same models: nothing cached, and 90% cached.

The bars: at 4 states a session, 0.95 of the bound's hit rate; at each memory, none of the first three rules is ahead;
each turn of a chat whose reasoning is stripped hits all but its last message, with 2 states a session and more. Hit
rates count prompt tokens, and are exact. Times are medians on one thread: process CPU time, and wall time in brackets.
The last line is one JSON object; the exit code is 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

from hybrid_parts import policies
from hybrid_parts.policies import BOUND, OURS, RULES, Replay
from hybrid_parts.workloads import Ask, Workload, workloads

MEMORY = (1, 2, 4)  # states per session
ALL = 10_000  # more states per session than any rule keeps
SHARE = 0.95
BEATEN = list(RULES)[:3]
RESUMED_FROM = 2  # states per session


# ---- caches


def caches(workload: Workload) -> list[dict[str, Any]]:
    texts, bound = policies.paths(workload.asks), policies.attention_only(workload.asks)
    assert bound.hits == [text.matched for text in texts], "the trie and the cache match different prefixes"
    print(
        f"\ncaches: {workload.name}, {workload.sessions} sessions, {len(workload.asks)} prompts of {bound.tokens:,} "
        f"tokens; without recurrent state {bound.rate:.4f} hit, {bound.computed:,} computed"
    )
    rows = []
    for states in (*MEMORY, ALL):
        slots, shown = states * workload.sessions, "all" if states == ALL else states
        found = {OURS: policies.with_states(workload.asks, slots)}
        found |= {name: policies.by_rule(texts, slots, rule) for name, rule in RULES.items()}
        for name, replay in found.items():
            row = _row(workload, states, name, replay, bound)
            rows.append(row)
            print(
                f"  {shown:>3} states a session, {name:<12} {replay.rate:.4f} hit {row['of_bound']:>6.1%} of the bound "
                f"{replay.computed:>9,} computed {row['resumed']:>6.1%} of the turns resumed"
            )
    return rows


def _row(workload: Workload, states: int, name: str, replay: Replay, bound: Replay) -> dict[str, Any]:
    found = {"workload": workload.name, "states": states, "policy": name, "strips": workload.resumes}
    found |= {"hit_rate": round(replay.rate, 4), BOUND: round(bound.rate, 4)}
    found["of_bound"] = round(replay.rate / bound.rate, 4)
    return found | {"computed": replay.computed, "resumed": round(resumed(workload.asks, replay.hits), 4)}


def resumed(asks: Sequence[Ask], hits: Sequence[int]) -> float:
    """Return the share of turns, without the first of each session, that hit the last message of the turn before."""
    ends: dict[int, int] = {}
    turns = []
    for ask, hit in zip(asks, hits, strict=True):
        if ask.session in ends:
            turns.append(hit >= min(ends[ask.session], len(ask.prompt) - 1))
        ends[ask.session] = ask.message_end
    return sum(turns) / len(turns)


# ---- engines


def engine_chats(kind: str, template: str, *, sessions: int, turns: int) -> dict[str, Any]:
    from hybrid_parts import engines

    slots = 2 * sessions
    with engines.load(kind, engines.TEMPLATES[template], slots) as engine:
        asks, hits = engines.chats(engine, strips=template == "strips reasoning", sessions=sessions, turns=turns)
        stats = engine.stats()
    alone, bound = policies.with_states(asks, slots), policies.attention_only(asks)
    row = {
        "model": kind,
        "template": template,
        "turns": len(asks),
        "hit_rate": round(sum(hits) / alone.tokens, 4),
        BOUND: round(bound.rate, 4),
        "same_hits": hits == alone.hits,
        "resumed": round(resumed(asks, hits), 4),
        "state_bytes": stats.state_bytes // (stats.cache.state_rows + stats.cache.state_slots),
        "copies_per_turn": round(stats.state_copies / len(asks), 2),
        "copied_bytes_per_turn": round(stats.state_copied_bytes / len(asks)),
    }
    print(
        f"engines: {kind}, {template}, {len(asks)} turns, 2 states a session: {row['hit_rate']:.4f} hit "
        f"({alone.rate:.4f} in the cache alone, {bound.rate:.4f} without recurrent state), "
        f"{row['copies_per_turn']} copies of {row['state_bytes']:,} bytes a turn"
    )
    return row


def ttft(kind: str, rounds: int) -> dict[str, Any]:
    from hybrid_parts import engines

    row = engines.ttft(kind, rounds=rounds)
    print(
        f"ttft: {kind}, {row['tokens']:,} tokens: {row['cold_cpu_ms']} ({row['cold_ms']}) ms cold, "
        f"{row['hit_cpu_ms']} ({row['hit_ms']}) ms with {row['hit_tokens']:,} tokens hit: "
        f"{row['cold_cpu_ms'] / row['hit_cpu_ms']:.1f} times as fast"
    )
    return row


# ---- bars


def missed(rows: Sequence[dict[str, Any]], engines: Sequence[dict[str, Any]]) -> list[str]:
    """Return a sentence for each bar that is missed."""
    found = []
    for row in (row for row in rows if row["policy"] == OURS and row["states"] in MEMORY):
        where = f"{row['workload']} at {row['states']} states a session"
        if row["states"] == max(MEMORY) and row["of_bound"] < SHARE:
            found.append(f"{where}: {row['of_bound']:.3f} of the bound")
        if row["strips"] and row["states"] >= RESUMED_FROM and row["resumed"] < 1:
            found.append(f"{where}: {row['resumed']:.1%} of the turns hit all but the last message")
        for other in rows:
            same = all(other[name] == row[name] for name in ("workload", "states"))
            if same and other["policy"] in BEATEN and other["hit_rate"] > row["hit_rate"]:
                found.append(f"{where}: {row['hit_rate']:.4f} hit, and {other['hit_rate']:.4f} by {other['policy']}")
    for row in engines:
        where = f"{row['model']}, {row['template']}"
        if not row["same_hits"]:
            found.append(f"{where}: the engine and the cache alone hit different tokens")
        if row["resumed"] < 1:
            found.append(f"{where}: {row['resumed']:.1%} of the engine's turns hit all but the last message")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer sessions, and three rounds")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of the time to the first token")
    arguments = parser.parse_args()
    rounds, sessions, turns = (3, 3, 3) if arguments.quick else (arguments.rounds, 6, 6)
    rows = [row for workload in workloads(quick=arguments.quick) for row in caches(workload)]
    print()
    kinds, templates = ("qwen3_5", "lfm2"), ("keeps replies", "strips reasoning")
    engines = [engine_chats(kind, name, sessions=sessions, turns=turns) for kind in kinds for name in templates]
    times = [ttft(kind, rounds) for kind in kinds]
    failures = missed(rows, engines)
    print("\n" + ("\n".join(f"MISSED: {failure}" for failure in failures) or "all bars are met"))
    print(json.dumps({"benchmark": "hybrid", "caches": rows, "engines": engines, "ttft": times, "missed": failures}))
    if failures:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
