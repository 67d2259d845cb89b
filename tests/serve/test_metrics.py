"""Prometheus metrics equal the engine's own numbers, and contain no text of requests."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from radixkv import SamplingParams
from radixkv.cache import CacheStats
from radixkv.chat import AsyncEngine
from radixkv.disk import DiskStats
from radixkv.engine import EngineStats
from radixkv.engine.latency import Histogram
from radixkv.errors import EngineClosed, RequestTimedOut
from radixkv.figures import figures
from radixkv.serve.history import HistoryStats
from radixkv.serve.metrics import ServerMetrics
from tests.engine.fakes import check, make_engine

Numbers = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def read(body: bytes) -> Numbers:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


def watched(
    test: Callable[[AsyncEngine, ServerMetrics], Awaitable[None]], *, vllm: bool = False, **options: Any
) -> None:
    """Run `test` on a fake engine whose requests are counted."""

    async def run() -> None:
        engine, _ = make_engine(**options)
        async with AsyncEngine(engine) as served:
            metrics = ServerMetrics(served, "a-model", vllm=vllm, refused=lambda: 3)
            await metrics.watch()
            await test(served, metrics)
            check(engine)

    asyncio.run(run())


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, **more)


def test_why_prompts_missed_is_counted_once_a_request() -> None:
    async def test(engine: AsyncEngine, metrics: ServerMetrics) -> None:
        prompt = list(range(1, 13))
        await engine.generate([prompt], greedy(1))  # not in the cache
        await engine.generate([prompt], greedy(1))  # all but the last token
        await engine.generate([[*prompt[:8], 30, 31]], greedy(1))  # diverges after 8 tokens
        await engine.generate([[40 + at % 9 for at in range(100)]], greedy(1))  # evicts others
        await engine.generate([prompt], greedy(1))
        stats = await engine.stats()
        lookups = (stats.lookups_full, stats.lookups_never_seen, stats.lookups_diverged, stats.lookups_evicted)
        assert lookups == (1, 2, 1, 1)
        assert (stats.missed_full, stats.missed_never_seen) == (1, 112)

    watched(test, num_blocks=28)


def test_a_prompt_that_the_host_has_is_a_full_hit() -> None:
    async def test(engine: AsyncEngine, metrics: ServerMetrics) -> None:
        for prompt in ([*range(40)], [30] * 40, [*range(40)]):
            await engine.generate([prompt], greedy(1))
        stats = await engine.stats()
        assert (stats.lookups_full, stats.missed_full, stats.missed_never_seen) == (1, 1, 80)
        assert stats.cache.loaded_tokens == stats.host_tokens > 0

    watched(test, num_blocks=16, host_blocks=64)


def distinct(record: type[Any], first: int, **more: Any) -> Any:
    """A record whose figures are all different."""
    numbers = {name: number for number, (name, _) in enumerate(figures(record), first)}
    return record(**numbers, **more)


FILLED = distinct(
    EngineStats,
    1000,
    **dict.fromkeys(("model", "device", "dtype", "attention"), "x"),
    max_length=1,
    kv_bytes=2,
    cache=distinct(CacheStats, 2000),
    disk=distinct(DiskStats, 3000),
)


def test_each_figure_is_a_metric_or_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """And each number of a record is a figure, except for what a loaded engine does not change."""

    async def test(engine: AsyncEngine, metrics: ServerMetrics) -> None:
        monkeypatch.setattr(engine.client, "stats", lambda: FILLED)
        numbers = read(await metrics.scrape())
        names = {name.removesuffix("_total") for name, _ in numbers}
        for record in (FILLED, FILLED.cache, FILLED.disk):
            declared = dict(figures(type(record)))
            plain = {each.name for each in fields(record) if each.type in ("int", "float")}
            assert plain - declared.keys() == ({"max_length", "kv_bytes"} if record is FILLED else set())
            for name, figure in declared.items():
                assert figure.help[0].isupper() and not figure.help.endswith(".") and figure.unit
                if figure.hidden:
                    assert set(re.findall(r"radixkv:\w+", figure.hidden)) <= names
                    continue
                metric = f"radixkv:{figure.metric}" + "_total" * (figure.kind == "counter")
                assert numbers[metric, tuple(sorted(figure.labels))] == getattr(record, name)

    watched(test)


def test_the_pages_name_figures_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(engine: AsyncEngine, metrics: ServerMetrics) -> None:
        await engine.generate([[1, 2, 3, 4, 5]], greedy(1))
        metrics._history = lambda: HistoryStats(1)
        exported = {family.name for family in await metrics.families()}
        pages = [path.read_text() for path in (*Path("docs").glob("*.md"), Path("README.md"), Path("CONTRIBUTING.md"))]
        named = set(re.findall(r"radixkv:[a-z_]+", " ".join(pages)))
        assert named and {name.removesuffix("_total") for name in named} <= exported
        attributes = set(re.findall(r"stats\(\)\.([a-z_]+)", " ".join(pages)))
        assert attributes and all(hasattr(FILLED, name) or hasattr(FILLED.cache, name) for name in attributes)

    watched(test)


def test_the_metrics_that_are_made_of_several_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(engine: AsyncEngine, metrics: ServerMetrics) -> None:
        await engine.generate([[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 9]], greedy(7))
        await metrics.scrape()  # the what-if curve is measured on another thread
        monkeypatch.setattr(engine.client, "stats", lambda: FILLED)
        numbers = read(await metrics.scrape())
        cache, disk = FILLED.cache, FILLED.disk
        parts = {
            "state_rows": (cache.state_rows, cache.state_rows_used),
            "state_slots": (cache.state_slots, cache.state_slots_used),
            "host_blocks": (cache.host_blocks, cache.host_blocks - cache.host_free_blocks),
            "disk_blocks": (disk.slots, disk.records),
        }
        for name, (whole, used) in parts.items():
            found = [numbers[f"radixkv:{name}", (("state", state),)] for state in ("used", "free")]
            assert found == [used, whole - used]
        ends = {dict(labels)["outcome"]: value for (name, labels), value in numbers.items() if "ended_total" in name}
        failed = FILLED.failed - FILLED.timed_out
        expected = {"cancelled": FILLED.cancelled, "timed_out": FILLED.timed_out, "failed": failed, "refused": 3}
        assert ends == {"finished": FILLED.finished, **expected}
        assert {numbers["radixkv:what_if_hit_ratio", (("pool", each),)] for each in ("0.25", "1", "inf")} == {4 / 11}

    watched(test)


def test_times_and_sizes_of_requests() -> None:
    async def test(engine: AsyncEngine, metrics: ServerMetrics) -> None:
        prompt = list(range(1, 11))
        replies = [(await engine.generate([prompt], params))[0] for params in (greedy(6), greedy(4, n=2), greedy(1))]
        await engine.warm([20, 21, 22])  # warming samples no token
        numbers = read(await metrics.scrape())
        first = [numbers["radixkv:ttft_seconds_count", (("cached", how),)] for how in ("less", "most")]
        assert first == [1, 2]
        total = sum(max(each.usage.total_s for each in (reply, *reply.alternatives)) for reply in replies)
        assert numbers["radixkv:request_seconds_sum", ()] == pytest.approx(total)
        assert numbers["radixkv:request_output_tokens_sum", ()] == 6 + 2 * 4 + 1
        assert numbers["radixkv:token_gap_seconds_count", ()] == 5 + 2 * 3
        assert numbers["radixkv:request_prompt_tokens_sum", ()] == 30
        assert numbers["radixkv:request_prompt_tokens_bucket", (("le", "10.0"),)] == 3
        assert numbers["radixkv:request_prompt_tokens_bucket", (("le", "5.0"),)] == 0

    watched(test)


def test_each_gap_between_tokens_is_counted_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stall is one long gap, not several slightly longer gaps."""
    times = iter([0.0, 0.02, 0.04, 3.04, 10.0, 10.25, 20.0, 20.5])  # of steps
    monkeypatch.setattr("radixkv.engine.draws.perf_counter", times.__next__)

    async def test(engine: AsyncEngine, metrics: ServerMetrics) -> None:
        await engine.generate([[1, 2, 3, 4, 5]], greedy(4))
        await engine.generate([[1, 2, 3, 4, 9]], greedy(2, n=2))
        handle = await engine.submit([1, 2, 3], greedy(2))
        await handle.result()
        numbers = read(await metrics.scrape())
        gaps = {
            bound: numbers["radixkv:token_gap_seconds_bucket", (("le", bound),)] for bound in ("0.03", "0.3", "5.0")
        }
        assert gaps == {"0.03": 2, "0.3": 4, "5.0": 6}
        assert numbers["radixkv:token_gap_seconds_sum", ()] == pytest.approx(0.02 + 0.02 + 3 + 0.25 + 0.25 + 0.5)
        assert next(times, None) is None

    watched(test)


def test_vllms_names_say_the_same() -> None:
    async def test(engine: AsyncEngine, metrics: ServerMetrics) -> None:
        await engine.generate([[1, 2, 3, 4, 5, 6]], greedy(3))
        await engine.generate([[1, 2, 3, 4, 5, 6]], greedy(3, n=2))
        numbers, stats = read(await metrics.scrape()), await engine.stats()
        named = (("engine", "0"), ("model_name", "a-model"))
        expected = {
            "num_requests_running": 0,
            "num_requests_waiting": 0,
            "kv_cache_usage_perc": 0,
            "prefix_cache_queries_total": 12,
            "prefix_cache_hits_total": stats.cached_tokens,
            "prompt_tokens_total": 12,
            "generation_tokens_total": 9,
            "num_preemptions_total": 0,
            "time_to_first_token_seconds_count": 2,
            "e2e_request_latency_seconds_count": 2,
            "inter_token_latency_seconds_count": 6,
            "request_time_per_output_token_seconds_count": 3,
            "request_generation_tokens_sum": 9,
            "request_max_num_generation_tokens_sum": 6,
            "request_params_max_tokens_sum": 6,
            # The names that older dashboards use.
            "gpu_cache_usage_perc": 0,
            "time_per_output_token_seconds_count": 6,
        }
        assert {name: numbers[f"vllm:{name}", named] for name in expected} == expected
        ended = (("engine", "0"), ("finished_reason", "length"), ("model_name", "a-model"))
        assert numbers["vllm:request_success_total", ended] == 3
        parts = [numbers[f"vllm:request_{part}_time_seconds_sum", named] for part in ("queue", "prefill", "decode")]
        assert sum(parts) == pytest.approx(numbers["vllm:e2e_request_latency_seconds_sum", named])

    watched(test, vllm=True)


def test_a_pool_that_is_in_use_shows() -> None:
    async def test(engine: AsyncEngine, metrics: ServerMetrics) -> None:
        handle = await engine.submit([1, 2, 3, 4, 5], greedy(200))
        async for _ in handle:
            numbers = read(await metrics.scrape())
            named = (("engine", "0"), ("model_name", "a-model"))
            if numbers["vllm:num_requests_running", named]:
                assert numbers["vllm:kv_cache_usage_perc", named] > 0
                assert numbers["radixkv:blocks", (("state", "held"),)] > 0
                assert numbers["radixkv:requests", (("state", "running"),)] == 1
                break
        else:
            pytest.fail("it was never seen running")

    watched(test, vllm=True)


def test_a_failed_request_has_no_times_and_costs_no_other() -> None:
    def fault(chunks: Any) -> None:
        if any(13 in chunk.tokens for chunk in chunks):
            raise RuntimeError("thirteen")

    async def test(engine: AsyncEngine, metrics: ServerMetrics) -> None:
        with pytest.raises(Exception, match="thirteen"):
            await engine.generate([[1, 13, 2]], greedy(3))
        with pytest.raises(RequestTimedOut):
            await engine.generate([[7, 8, 9]], greedy(200), timeout=1e-9)
        handle = await engine.submit([1, 2, 3], greedy(200))
        handle.cancel()
        await engine.generate([[4, 5, 6]], greedy(3))
        numbers = read(await metrics.scrape())
        assert numbers["radixkv:request_seconds_count", ()] == 1
        ends = {dict(labels)["outcome"]: value for (name, labels), value in numbers.items() if "ended_total" in name}
        assert ends == {"finished": 1, "cancelled": 1, "timed_out": 1, "failed": 1, "refused": 3}

    watched(test, fault=fault)


def test_no_label_and_no_help_names_a_client() -> None:
    async def test(engine: AsyncEngine, metrics: ServerMetrics) -> None:
        await engine.generate([[1, 2, 3]], greedy(3), namespace=("tenant-of-mine", "key-of-his"))
        body = (await metrics.scrape()).decode()
        assert "tenant-of-mine" not in body and "key-of-his" not in body
        allowed = {"reason", "state", "outcome", "cached", "direction", "le", "model", "device", "dtype", "attention"}
        allowed |= {"kv_dtype", "source", "pool"}
        assert {label for _, labels in read(body.encode()) for label, _ in labels} <= allowed

    watched(test)


def test_a_closed_engine_says_so() -> None:
    async def run() -> None:
        engine, _ = make_engine()
        served = AsyncEngine(engine)
        metrics = ServerMetrics(served, "a-model")
        await served.close()
        with pytest.raises(EngineClosed):
            await metrics.scrape()

    asyncio.run(run())


def test_a_histogram_counts_up_to_each_bound() -> None:
    histogram = Histogram([1.0, 5.0])
    for value in (0.5, 1.0, 1.5, 7.0):
        histogram.observe(value)
    assert histogram.buckets == [("1.0", 2.0), ("5.0", 3.0), ("+Inf", 4.0)]
    twin = histogram.copy()
    twin.add(histogram)
    assert (twin.buckets[-1], twin.sum, histogram.sum) == (("+Inf", 8.0), 20.0, 10.0)
