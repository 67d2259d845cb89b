"""Make a failing scenario smaller: drop requests, faults and events as long as it fails in the same place."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.simulation.scenario import Ask, Scenario
from tests.simulation.world import Stuck, World


def failure_of(scenario: Scenario, run: Callable[[Scenario], object] = lambda life: World(life).run()) -> str | None:
    """Return the exception's class and line with which this scenario fails; None if it does not."""
    try:
        run(scenario)
    except (Exception, Stuck) as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} in {where.name}: {where.line}"
    return None


def shrink(scenario: Scenario, failure: Callable[[Scenario], str | None] = failure_of) -> Scenario:
    """Return the smallest scenario that fails in the same place; the same one if it does not fail."""
    wanted = failure(scenario)
    if wanted is None:
        return scenario
    tried = True
    while tried:
        tried = False
        for smaller in _smaller(scenario):
            if failure(smaller) == wanted:
                scenario, tried = smaller, True
                break
    return scenario


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    for name in ("asks", "faults", "pinnings", "forgettings", "audits"):
        events = getattr(scenario, name)
        for size in (len(events) // 2, 1):
            for at in range(0, len(events), size or 1):
                if size:
                    yield replace(scenario, **{name: events[:at] + events[at + size :]})
    for at, ask in enumerate(scenario.asks):
        for simpler in _simpler(ask):
            yield replace(scenario, asks=(*scenario.asks[:at], simpler, *scenario.asks[at + 1 :]))


def _simpler(ask: Ask) -> Iterator[Ask]:
    plain = Ask(ask.number, ask.at, ask.prompt, ask.params, ask.max_tokens)
    for name in (
        "cancel",
        "cancel_in",
        "timeout",
        "lags",
        "flickers",
        "flaw",
        "namespace",
        "priority",
        "stop_ids",
        "rule",
    ):
        if getattr(ask, name) != getattr(plain, name):
            yield replace(ask, **{name: getattr(plain, name)})
    if ask.score_from:
        yield replace(ask, score_from=0, last_targets=(), params=ask.params.but(prompt_logprobs=None))
    if ask.bad_words:
        yield replace(ask, bad_words=(), params=ask.params.but(bad_words=()))
    if ask.params.beam_width > 1:
        yield replace(ask, params=ask.params.but(beam_width=1))
        yield replace(ask, params=ask.params.but(beam_width=ask.params.beam_width - 1))
    if ask.params.n > 1:
        yield replace(ask, params=ask.params.but(n=1))
    if len(ask.prompt) > 1:
        yield replace(ask, prompt=ask.prompt[: len(ask.prompt) // 2])
        yield replace(ask, prompt=ask.prompt[:-1])
    if ask.max_tokens > 1:
        yield replace(ask, max_tokens=ask.max_tokens - 1)
