"""Check how each request ended, the engine's counters, and that no block is held after the last request.

The last check empties the cache.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from radixkv.engine.beams import BeamSearch
from radixkv.engine.scores import PromptScores
from radixkv.errors import (
    EngineClosed,
    InvalidConstraint,
    InvalidInput,
    PrefixGone,
    PromptTooLong,
    RequestCancelled,
    RequestFailed,
    RequestTimedOut,
)
from tests.simulation.draw import answers_of
from tests.simulation.oracle import Reply, prompt_scores
from tests.simulation.scenario import Sabotage

if TYPE_CHECKING:
    from tests.simulation.world import Customer, World


class FinalChecks:
    """The checks of one world; each raises AssertionError."""

    def __init__(self, world: World) -> None:
        self.world, self.core, self.cache = world, world.core, world.cache

    def check(self) -> None:
        """Each request has its answer or the error of its fault; no block is held; counters add up."""
        self.world.accounting.check()
        self.world.accounting.contents()
        for customer in self.world.customers.values():
            self._outcome(customer)
        self._counters()
        self._nothing_is_held()
        for audit in self.world.audits:
            if isinstance(audit.exception(timeout=0), EngineClosed):
                assert self.world.step == self.world.scenario.close
            elif self.world.scenario.reuse and self.world.scenario.states is None:
                assert audit.result(timeout=0).differ == 0
            else:
                assert isinstance(audit.exception(timeout=0), InvalidInput)
        listener = self.world.listener
        assert listener is None or listener.events <= listener.raises + 1, "an observer was notified after it raised"

    def _outcome(self, customer: Customer) -> None:
        ask, channel = customer.ask, customer.channel
        assert channel.ends == 1, f"request {ask.number} ended {channel.ends} times"
        answers = answers_of(ask)
        for index, answer in enumerate(answers):
            said = channel.tokens(index)
            assert said == answer.tokens[: len(said)], f"request {ask.number}.{index} said {said}, not {answer.tokens}"
        assert all(chunk.index < len(answers) for chunk in channel.chunks)
        if channel.completion is not None:
            self._completion(customer, answers)
        else:
            assert self._deserved(customer), f"request {ask.number} must not end with {channel.error!r}"

    def _completion(self, customer: Customer, answers: tuple[Reply, ...]) -> None:
        ask, done = customer.ask, customer.channel.completion
        assert done is not None and not customer.cancelled and not customer.gone
        streams = [done, *done.alternatives]
        assert [(each.token_ids, each.finish_reason) for each in streams] == [
            (answer.tokens, answer.finish_reason) for answer in answers
        ], f"request {ask.number} answered {streams}, not {answers}"
        scores = [answer.score for answer in answers]
        assert [each.score for each in streams] == pytest.approx(scores, abs=1e-4), f"request {ask.number}: {scores}"
        self._scores(customer)
        for index, each in enumerate(streams):
            assert customer.channel.tokens(index) == each.token_ids, f"request {ask.number}: chunks are not the answer"
            usage = each.usage
            held = len(ask.prompt) + answers[index].before_last_draw
            assert usage.cached_tokens + usage.computed_tokens == held, f"request {ask.number}: {usage}, {held} tokens"
            assert usage.preemptions == customer.request.scheduling.preemptions
            assert 0 <= usage.ttft_s <= usage.total_s
        if ask.timeout is not None:
            late = (1 + self.world.scenario.overlap) * self.world.scenario.tick
            assert done.usage.total_s <= ask.timeout + late, f"request {ask.number} finished after its deadline"

    def _scores(self, customer: Customer) -> None:
        """All scores that were asked for are those of the whole prompt, computed at once."""
        ask, scores, done = customer.ask, customer.request.scores, customer.channel.completion
        if not isinstance(scores, PromptScores):
            return
        table, name = prompt_scores(ask.prompt), f"request {ask.number}"
        rows = table[ask.score_from - 1 : -1]
        chosen = rows[range(len(rows)), list(ask.prompt[ask.score_from :])]
        assert scores.missing == len(ask.prompt), name
        assert scores.chosen.tolist() == pytest.approx(chosen.tolist(), abs=1e-5), name
        assert scores.ranks.tolist() == (1 + (rows > chosen[:, None]).sum(1)).tolist(), name
        best = rows.topk(scores.top)
        assert scores.ids.tolist() == best.indices.tolist(), name
        assert scores.values.tolist() == [pytest.approx(row, abs=1e-5) for row in best.values.tolist()], name
        if ask.last_targets:
            assert scores.last is not None
            assert scores.last.chosen.tolist() == pytest.approx(table[-1, list(ask.last_targets)].tolist(), abs=1e-5)
        reported = [each and each.chosen for each in done.prompt_logprobs] if done and done.prompt_logprobs else None
        wanted = [None] * ask.score_from + scores.chosen.tolist()
        assert not done or reported == wanted, f"{name}: {reported}"

    def _deserved(self, customer: Customer) -> bool:
        """Return whether this error is one that the scenario caused for this request."""
        ask, error, faults = customer.ask, customer.channel.error, self.world.faults
        if isinstance(error, RequestCancelled):
            return customer.cancelled
        if isinstance(error, PrefixGone):
            return customer.gone
        if isinstance(error, RequestTimedOut):
            return (
                ask.timeout is not None and customer.ended_at is not None and customer.ended_at >= _deadline(customer)
            )
        if isinstance(error, EngineClosed):
            return self.world.step == self.world.scenario.close
        if isinstance(error, PromptTooLong):
            return (
                bool(self.world.pins or self.world.scenario.compressings) and not customer.request.scheduling.admitted
            )
        assert isinstance(error, RequestFailed), f"request {ask.number}: {error!r}"
        cause, flaw = error.__cause__, ask.flaw
        if flaw is not None and flaw.kind == "nan" and isinstance(cause, InvalidInput):
            return True
        if flaw is not None and flaw.kind == "rule" and isinstance(cause, InvalidConstraint):
            return True
        if flaw is not None and flaw.kind == "open" and isinstance(cause, Sabotage):
            return True
        return cause is customer.channel.raised is not None or faults.explains(cause, ask)

    def _counters(self) -> None:
        counters, customers = self.core.counters, list(self.world.customers.values())
        ends = Counter(type(c.channel.error) for c in customers)
        assert counters.finished == ends[type(None)]
        assert counters.cancelled == ends[RequestCancelled]
        assert counters.failed == sum(ends.values()) - ends[type(None)] - ends[RequestCancelled]
        assert counters.timed_out == ends[RequestTimedOut]
        assert counters.preemptions == sum(c.request.scheduling.preemptions for c in customers)
        put = sum(len(c.channel.chunks) for c in customers)
        assert put <= counters.output_tokens <= put + sum(c.channel.raised is not None for c in customers)
        alone = [c for c in customers if not isinstance(c.request.replies, BeamSearch)]
        tokens = Counter((c.ask.number, chunk.index) for c in alone for chunk in c.channel.chunks)
        assert sum(self.core.token_times.histogram.counts) == sum(count - 1 for count in tokens.values())
        missed = sum(count for name, count in vars(counters).items() if name.startswith("missed_"))
        assert missed == counters.computed_tokens - counters.decode_tokens
        lookups = sum(count for name, count in vars(counters).items() if name.startswith("lookups_"))
        assert lookups == sum(c.request.reported.counted for c in customers)
        if ends[type(None)] == len(customers):
            self._sums(counters)
        stats = self.cache.stats()
        committed = counters.computed_tokens + counters.recomputed_tokens
        committed += sum(each.written for each in self.world.model.compressed)
        # Chunks of a request that failed in another part of its step are wasted, and are not committed.
        in_parts = any(c.ask.flaw is not None for c in customers) or self.world.faults.fired or self.world.faults.began
        most = committed + counters.wasted_tokens + self.world.draft_checks.rejected()
        least = committed if in_parts else most
        assert least <= stats.committed_tokens <= most, f"{counters}, {stats}"
        assert counters.host_tokens == stats.loaded_tokens, f"{counters}, {stats}"
        asked = sum(len(c.ask.prompt) for c in customers if c.request.scheduling.admitted)
        refused = sum(len(c.ask.prompt) for c in customers if isinstance(c.channel.error, PromptTooLong | PrefixGone))
        assert asked <= stats.query_tokens <= asked + refused, f"{asked} tokens were asked for: {stats}"

    def _sums(self, counters: Any) -> None:
        """If all requests finished, their usage adds up to the engine's counters."""
        done = [c.channel.completion for c in self.world.customers.values() if c.channel.completion is not None]
        streams = [each for first in done for each in (first, *first.alternatives)]
        scored = [customer for customer in self.world.customers.values() if customer.ask.score_from]
        assert counters.prompt_tokens == sum(each.usage.prompt_tokens for each in done)
        assert counters.computed_tokens == sum(
            c.request.replies.computed_tokens(c.request) for c in self.world.customers.values()
        )
        assert counters.recomputed_tokens == sum(each.usage.recomputed_tokens for each in streams)
        assert counters.host_tokens == sum(each.usage.host_tokens for each in streams)
        # Tokens that streams share are no hits. Beams of a group that resumes may hit more than its replies have.
        own = [each.usage.cached_tokens - each.usage.prompt_tokens * (each.index > 0) for each in streams]
        own = [0 if each.score is not None and each.index else hits for each, hits in zip(streams, own, strict=True)]
        resumed = any(first.score is not None and first.usage.preemptions for first in done)
        assert counters.cached_tokens == sum(own) or (resumed and counters.cached_tokens > sum(own))
        expected = sum(len(c.ask.prompt) - c.ask.score_from + len(c.ask.last_targets) for c in scored)
        assert counters.scored_tokens + counters.reused_scores >= expected
        assert all(each.usage.preemptions or not each.usage.recomputed_tokens for each in streams)

    def _nothing_is_held(self) -> None:
        cache, scheduler = self.cache, self.core.scheduler
        assert not cache.state.open and not len(scheduler.waiting) and not scheduler.running and not self.core.busy
        for _, pin in self.world.pins:
            pin.release()
        self.world.compressions.end()
        assert cache.free_blocks + cache.evictable_blocks == cache.num_blocks, "something is held"
        if not self.world.scenario.reuse:
            assert cache.free_blocks == cache.num_blocks, "something was published"
        cache.clear()
        cache.check()
        stats = cache.stats()
        reads = self.world.disk.reads if self.world.disk else ()  # their blocks stay lent if the engine was closed
        lent = sum(len(read.records) for _, read in reads)
        assert cache.free_blocks == cache.num_blocks, "something leaked"
        assert stats.host_free_blocks + lent == stats.host_blocks, "something leaked on the host"


def _deadline(customer: Customer) -> float:
    deadline = customer.request.deadline
    assert deadline is not None
    return deadline
