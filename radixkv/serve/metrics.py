"""Prometheus metrics of an engine and its requests, with radixkv's names and with vLLM's.

No label ever contains text of a request, or the name of a tenant.
"""

from __future__ import annotations

from asyncio import wrap_future
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from radixkv.cache import CacheStats
from radixkv.chat import AsyncEngine
from radixkv.disk import DiskStats
from radixkv.engine import EngineStats
from radixkv.engine.latency import Histogram
from radixkv.figures import figures
from radixkv.serve.history import HistoryStats
from radixkv.serve.request_watch import RequestCounts, RequestWatch
from radixkv.telemetry.what_if import SIZES, WhatIfReport

CONTENT_TYPE = CONTENT_TYPE_LATEST


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """The values of one scrape."""

    stats: EngineStats
    requests: RequestCounts
    history: HistoryStats | None
    model: str
    refused: int
    what_if: WhatIfReport | None


class ServerMetrics:
    """The metrics of one engine and its server. Requests are counted from `watch` or the first scrape on."""

    def __init__(
        self,
        engine: AsyncEngine,
        model: str,
        *,
        history: Callable[[], HistoryStats] | None = None,
        refused: Callable[[], int] = int,
        vllm: bool = False,
    ) -> None:
        """`model` is the name for clients, `refused` counts refused requests, `vllm` adds vLLM's names."""
        self._engine = engine
        self._model, self._history, self._refused, self._vllm = model, history, refused, vllm
        self._watch: RequestWatch | None = None

    async def watch(self) -> None:
        """Count requests from now on. Raises EngineClosed."""
        await wrap_future(self._engine.client.thread.call(self._begin))

    async def scrape(self) -> bytes:
        """Return all metrics between two steps, in Prometheus' text format; raise EngineClosed."""
        return exposition(await self.families())

    async def families(self) -> list[Metric]:
        """Return all metrics between two steps; raise EngineClosed."""
        looked = await wrap_future(self._engine.client.thread.call(self._look))
        return self._families(*looked, await self._engine.what_if())

    def text(self) -> str:
        """Return the text of `scrape`, and wait for it."""
        client = self._engine.client
        report = client.thread.ask(client.curve.ask).result()
        return exposition(self._families(*client.thread.ask(self._look), report)).decode()

    def _families(self, stats: EngineStats, requests: RequestCounts, report: WhatIfReport | None) -> list[Metric]:
        history = None if self._history is None else self._history()
        snapshot = _Snapshot(stats, requests, history, self._model, self._refused(), report)
        return [*_own(snapshot), *(_vllms(snapshot) if self._vllm else ())]

    def _begin(self) -> RequestWatch:
        """Start counting, once. Called on the engine's thread only, so two scrapes cannot start twice."""
        if self._watch is None:
            self._watch = RequestWatch(self._engine.client.core)
        return self._watch

    def _look(self) -> tuple[EngineStats, RequestCounts]:
        return self._engine.client.stats(), self._begin().counts.copy()


def exposition(families: Iterable[Metric]) -> bytes:
    """Return metrics in Prometheus' text format."""
    return generate_latest(_Once(families))


class _Once(CollectorRegistry):
    """A registry of metric families that are complete already."""

    def __init__(self, families: Iterable[Metric]) -> None:
        super().__init__()
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """Yield the families."""
        yield from self._families


# ---- families


Value = float | Histogram


def _family(
    kind: Any,
    name: str,
    about: str,
    value: Value | Mapping[str, Value],
    label: str = "",
    common: Mapping[str, str] = MappingProxyType({}),
) -> Metric:
    """Return a family of one value, or of values by `label`; each sample has the `common` labels, too."""
    values = value if isinstance(value, Mapping) else {"": value}
    family = kind(name, about, labels=[*common, *filter(None, [label])])
    for each, number in values.items():
        labels = [*common.values(), *([each] if label else ())]
        sample = (number.buckets, number.sum) if isinstance(number, Histogram) else (number,)
        family.add_metric(labels, *sample)
    assert isinstance(family, Metric)
    return family


_gauge = partial(_family, GaugeMetricFamily)
_counter = partial(_family, CounterMetricFamily)
_histogram = partial(_family, HistogramMetricFamily)


# ---- radixkv's own


def _declared(record: EngineStats | CacheStats | DiskStats) -> dict[str, Any]:
    """Return the families of the declared figures of a record, by name."""
    families: dict[str, Any] = {}
    for name, figure in figures(type(record)):
        if figure.hidden:
            continue
        if figure.metric not in families:
            labels = [label for label, _ in figure.labels]
            families[figure.metric] = _KINDS[figure.kind](f"radixkv:{figure.metric}", figure.help, labels=labels)
        families[figure.metric].add_metric([word for _, word in figure.labels], getattr(record, name))
    return families


_KINDS: dict[str, Any] = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}


def _own(snapshot: _Snapshot) -> Iterator[Metric]:
    stats = snapshot.stats
    labels = {"model": snapshot.model, "device": stats.device, "dtype": stats.dtype, "attention": stats.attention}
    labels |= {"kv_dtype": stats.kv_dtype}
    yield _gauge("radixkv:engine_info", "Labels describe the engine; always 1", 1, common=labels)
    declared = _declared(stats)
    for outcome, number in (("failed", stats.failed - stats.timed_out), ("refused", snapshot.refused)):
        declared["requests_ended"].add_metric([outcome], number)
    for families in (declared, _declared(stats.cache), _declared(stats.disk)):
        yield from families.values()
    yield from _used_and_free(stats)
    histograms = snapshot.requests.histograms
    first = {"most": histograms["ttft_hit"], "less": histograms["ttft_miss"]}
    about = "Time to the first token, by whether at least half of the prompt was cached"
    yield _histogram("radixkv:ttft_seconds", about, first, "cached")
    for name, (histogram, about) in _OWN_HISTOGRAMS.items():
        yield _histogram(f"radixkv:{name}", about, histograms[histogram])
    if snapshot.history is not None:
        yield from _own_history(snapshot.history)
    if (report := snapshot.what_if) is not None and report.recent.requests:
        rates = {f"{size:g}": rate for size, rate in zip(SIZES, report.recent.hit_rates, strict=True)}
        about = "Hit rate of the last 10 minutes in an LRU pool of this relative size"
        yield _gauge("radixkv:what_if_hit_ratio", about, rates, "pool")


def _used_and_free(stats: EngineStats) -> Iterator[Metric]:
    """Yield the used and the free part of a tier."""
    cache, disk = stats.cache, stats.disk
    for name, about, whole, used in (
        ("state_rows", "Recurrent states that running sequences have, or may take",
         cache.state_rows, cache.state_rows_used),
        ("state_slots", "Slots of cached recurrent states", cache.state_slots, cache.state_slots_used),
        ("host_blocks", "Blocks of the second tier, in host memory",
         cache.host_blocks, cache.host_blocks - cache.host_free_blocks),
        ("disk_blocks", "Blocks of the third tier, on disk", disk.slots, disk.records),
    ):  # fmt: skip
        yield _gauge(f"radixkv:{name}", about, {"used": used, "free": whole - used}, "state")


def _own_history(history: HistoryStats) -> Iterator[Metric]:
    yield _gauge("radixkv:history_bytes", "Memory of the stored conversation history, in bytes", history.bytes)
    yield _gauge("radixkv:history_replies", "Replies whose token ids are stored", history.replies)
    yield _counter("radixkv:history_lookups", "Requests whose messages contain earlier replies", history.lookups)
    yield _counter("radixkv:history_found", "Requests for which a stored reply was found", history.found)
    about = "Requests that changed an earlier part of their conversation, by the kind of part and the rule of lint"
    broken = CounterMetricFamily("radixkv:prefix_breaks", about, labels=["part", "rule"])
    for labels, number in sorted(history.breaks.items()):
        broken.add_metric(labels, number)
    yield broken
    yield _counter("radixkv:history_forgotten", "Stored replies that were dropped to make room", history.forgotten)


_OWN_HISTOGRAMS = {
    "token_gap_seconds": ("gap", "Seconds between two tokens of a stream"),
    "queue_seconds": ("queue", "Seconds from the submission of a request to its admission"),
    "request_seconds": ("total", "Seconds from the submission of a request to its end"),
    "request_prompt_tokens": ("prompt_tokens", "Prompt tokens of a request"),
    "request_output_tokens": ("output_tokens", "Output tokens of a request"),
}


# ---- vLLM's


def _vllms(snapshot: _Snapshot) -> Iterator[Metric]:
    """Yield vLLM's metrics with radixkv's values. Metrics without a counterpart in radixkv are left out."""
    stats, cache, requests = snapshot.stats, snapshot.stats.cache, snapshot.requests
    histograms = requests.histograms
    named = {"model_name": snapshot.model, "engine": "0"}
    gauges = {
        "num_requests_running": stats.running,
        "num_requests_waiting": stats.waiting,
        # In vLLM, cached blocks that no request holds count as free. Dashboards use either name; the second is older.
        **dict.fromkeys(("kv_cache_usage_perc", "gpu_cache_usage_perc"), cache.held_blocks / cache.num_blocks),
    }
    counters = {
        "prefix_cache_queries": stats.prompt_tokens,
        "prefix_cache_hits": stats.cached_tokens,
        "prompt_tokens": stats.prompt_tokens,
        "generation_tokens": stats.output_tokens,
        "num_preemptions": stats.preemptions,
        "spec_decode_num_drafts": stats.drafts,
        "spec_decode_num_draft_tokens": stats.drafted_tokens,
        "spec_decode_num_accepted_tokens": stats.accepted_tokens,
    }
    for name, value in gauges.items():
        yield _gauge(f"vllm:{name}", _SAME, value, common=named)
    for name, value in counters.items():
        yield _counter(f"vllm:{name}", _SAME, value, common=named)
    ends = {"stop": requests.streams["stop"], "length": requests.streams["length"], "abort": stats.cancelled}
    yield _counter("vllm:request_success", _SAME, ends, "finished_reason", named)
    config = {"block_size": str(cache.block_size), "num_gpu_blocks": str(cache.num_blocks)}
    yield _gauge("vllm:cache_config_info", _SAME, 1, common={**named, **config})
    for name, parts in _VLLM_HISTOGRAMS.items():
        yield _histogram(f"vllm:{name}", _SAME, _sum([histograms[part] for part in parts]), common=named)


def _sum(histograms: list[Histogram]) -> Histogram:
    first, *others = histograms
    whole = first.copy()
    for each in others:
        whole.add(each)
    return whole


_SAME = "The metric that vLLM exports under this name"
_VLLM_HISTOGRAMS = {
    "time_to_first_token_seconds": ("ttft_hit", "ttft_miss"),
    "inter_token_latency_seconds": ("gap",),
    "time_per_output_token_seconds": ("gap",),  # its older name
    "request_time_per_output_token_seconds": ("gap_mean",),
    "e2e_request_latency_seconds": ("total",),
    "request_queue_time_seconds": ("queue",),
    "request_prefill_time_seconds": ("prefill",),
    "request_decode_time_seconds": ("decode",),
    "request_inference_time_seconds": ("inference",),
    "request_prompt_tokens": ("prompt_tokens",),
    "request_generation_tokens": ("output_tokens",),
    "request_max_num_generation_tokens": ("longest",),
    "request_params_max_tokens": ("max_tokens",),
    "request_params_n": ("streams",),
}
