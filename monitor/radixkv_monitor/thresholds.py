"""Thresholds of the verdict: the numbers from which on a state of the engine is a warning."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Upper bounds, except `hit_rate`, a lower one. None switches a check off.

    Shares are 0 to 1, times in seconds. Rates, percentiles and `failed` are of the last minute. `held`: share of the
    pool's blocks that requests and pins hold. `regret`: share of the requested tokens that had been evicted.
    `longest_wait`: time of the oldest request that is not admitted. `failed`: the number of failed requests above which
    the verdict is "bad"; `timed_out` and `preemptions` are numbers above which it is "warn".
    """

    held: float | None = 0.95
    regret: float | None = 0.05
    longest_wait: float | None = 10.0
    preemptions: int | None = 0
    failed: int | None = 0
    timed_out: int | None = 0
    hit_rate: float | None = None
    ttft_p50: float | None = None
    ttft_p90: float | None = None
    ttft_p99: float | None = None
    queue_time_p90: float | None = None
    itl_p50: float | None = None
    itl_p90: float | None = None
    itl_p99: float | None = None
    telemetry_share: float | None = None


DEFAULTS = Thresholds()
"""The thresholds of a monitor without a file of its own."""

UNCONDITIONAL = ("crashed", "differing", "host", "silent", "stale")
"""The reasons of a verdict that have no threshold: the engine crashed, audited blocks differ, transfers to or from the
host failed, the engine sends nothing, or it cannot be reached.
"""
