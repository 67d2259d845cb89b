"""Write a report as one HTML file that needs no script, no network and no other file.

Every text of an engine or a user is escaped. The page allows no external request (Content-Security-Policy), and it
follows the reader's preference for dark or light.
"""

from __future__ import annotations

import asyncio
import time
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from importlib.metadata import version
from pathlib import Path

from radixkv import private_files
from radixkv.telemetry.records import EvictionRecord, RequestRecord
from radixkv_monitor.alert_settings import DEFAULTS, Thresholds
from radixkv_monitor.feed import ThreadFeed
from radixkv_monitor.formatting import clock, count, duration, plural, share, short
from radixkv_monitor.history import gauges, series
from radixkv_monitor.occupancy import pool
from radixkv_monitor.pictures import StillFeed, all_views
from radixkv_monitor.print_once import figures
from radixkv_monitor.report import Latency, Report, collect
from radixkv_monitor.report_charts import Series, Stretch, areas, band, lines
from radixkv_monitor.state import State
from radixkv_monitor.views import VIEWS
from radixkv_monitor.views.requests import miss_sentence

SCREEN = (160, 48)
"""The columns and lines of the screens."""
PARTS = 240
"""The most parts of the span in a chart."""

RATES = (
    (("decode_tokens", "decode"), ("prefill_tokens", "prefill"), ("cached_tokens", "cached")),
    (("output_tokens", "output"), ("computed_tokens", "computed"), ("cached_tokens", "cached")),
)
"""Counters of tokens, and their names. Older engines do not count decode and prefill tokens."""

Cells = Sequence[object]

CSS = """
:root{--page:#14171d;--text:#d8dee9;--soft:#8f9bb0;--rule:#323a48;--panel:#1d222b;--on:#101318;
--good:#12b886;--idle:#8f9bb0;--warn:#e69f00;--bad:#f0743e;--c0:#56b4e9;--c1:#e69f00;--c2:#12b886;--c3:#cc79a7}
@media (prefers-color-scheme:light){:root{--page:#fbfcfe;--text:#1d2430;--soft:#5b6677;--rule:#cfd7e2;--panel:#f1f4f8;
--on:#fff;--good:#007a5a;--idle:#5b6677;--warn:#9c5f00;--bad:#b03a00;--c0:#0b62a3;--c1:#9c5f00;--c2:#007a5a;
--c3:#a8437d}}
body{background:var(--page);color:var(--text);font:15px/1.5 system-ui,sans-serif;margin:0}
main{max-width:1080px;margin:0 auto;padding:16px}
h1{font-size:24px;overflow-wrap:anywhere}h2{font-size:19px;margin-top:36px;border-bottom:1px solid var(--rule)}
.wide{overflow-x:auto}table{border-collapse:collapse;margin:10px 0;font-variant-numeric:tabular-nums}
caption{text-align:left;color:var(--soft)}th,td{text-align:left;vertical-align:top;padding:3px 14px 3px 0}
thead th{white-space:nowrap}tbody tr{border-top:1px solid var(--rule)}th,figcaption{color:var(--soft);font-weight:500}
td{overflow-wrap:anywhere}.facts th{white-space:nowrap}
figure{margin:14px 0}svg,img{width:100%;height:auto;display:block}summary{cursor:pointer;padding:5px 0}
.box{background:var(--panel);border-left:5px solid;padding:8px 14px}
.box.good{border-color:var(--good)}.box.idle{border-color:var(--idle)}
.box.warn{border-color:var(--warn)}.box.bad{border-color:var(--bad)}
.level{font-weight:700}.level.good{color:var(--good)}.level.idle{color:var(--idle)}
.level.warn{color:var(--warn)}.level.bad{color:var(--bad)}
rect.good{fill:var(--good)}rect.idle{fill:var(--idle)}rect.warn{fill:var(--warn)}rect.bad{fill:var(--bad)}
svg text{font:12px system-ui,sans-serif}.tick{fill:var(--soft)}.on{fill:var(--on);font-weight:700}
.grid{stroke:var(--rule)}.line{fill:none;stroke-width:2;stroke-linejoin:round}
.line.c0,.dot.c0{stroke:var(--c0)}.line.c1,.dot.c1{stroke:var(--c1);stroke-dasharray:7 3}
.line.c2,.dot.c2{stroke:var(--c2);stroke-dasharray:2 3}
.area{stroke:var(--page)}.area.c0{fill:var(--c0)}.area.c1{fill:var(--c1)}.area.c2{fill:var(--c2)}
.key{display:inline-block;width:26px;height:0;border-top:3px solid;margin:0 5px 4px 12px}
.key.c0{border-color:var(--c0)}.key.c1{border-color:var(--c1);border-top-style:dashed}
.key.c2{border-color:var(--c2);border-top-style:dotted}
"""
"""The style of the page. The colours are those of the monitor's themes; lines differ in their dashes too."""


def render(report: Report, pictures: Sequence[Sequence[str]]) -> str:
    """Return the page. `pictures` are SVG screens in the order of VIEWS: those on the dark theme, then on the light."""
    title = f"radixkv report: {report.title}"
    parts = (
        _header(report, title),
        _verdicts(report),
        _numbers(report),
        _charts(report),
        _screens(pictures),
        _regrets(report),
        _slowest(report),
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        "style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="dark light">\n'
        f"<title>{escape(title)}</title>\n<style>{CSS}</style></head>\n<body><main>\n"
        + "\n".join(parts)
        + "\n</main></body></html>\n"
    )


def write(
    path: Path,
    feed: ThreadFeed,
    state: State,
    *,
    live: bool,
    thresholds: Thresholds = DEFAULTS,
    progress: Callable[[float], None] = lambda share: None,
) -> None:
    """Write a report of a closed feed to a private file, whole or not at all. `state` is the feed's last state.

    `thresholds` are the verdicts' own. `progress` is called with the share that is done. Raises OSError.
    """
    report = collect(feed, state, live=live, thresholds=thresholds, progress=lambda share: progress(share / 2))
    still = StillFeed(feed.builder, state, feed.title, "stale" if state.stale else "live" if live else "ended")
    pictures = asyncio.run(all_views(still, SCREEN, lambda share: progress((1 + share) / 2), thresholds=thresholds))
    private_files.write(path, render(report, pictures).encode())


# ---- the parts, from top to bottom


def _header(report: Report, title: str) -> str:
    facts = report.state.facts
    device = " ".join(each for each in (facts.device, facts.dtype) if each != "none") or "no model"
    source = "a live engine" if report.live else "a recording"
    zone = time.strftime("UTC%z", time.localtime())
    rows: list[Cells] = [
        ("Source", f"{report.title} ({source})"),
        ("Span", f"{_moment(report.start)} to {_moment(report.end)} ({duration(report.end - report.start)})"),
        ("Engine", f"{facts.model}, {device}, pid {facts.pid}, radixkv {facts.version}"),
        ("Loaded", _moment(facts.started)),
        ("Pool", f"{plural(facts.num_blocks, 'block')} of {plural(facts.block_size, 'token')}, {facts.eviction}"),
        ("Written", f"{_moment(report.written)} by radixkv-monitor {version('radixkv')}; times are local ({zone})"),
    ]
    if report.engines > 1:
        rows.insert(3, ("Engines", f"{report.engines} in this span; the numbers are those of the last one"))
    if report.ending.reason:
        rows.insert(2, ("Ends", report.ending.reason))
    if report.ending.damaged_at is not None:
        text = f"The recording is damaged or cut after byte {report.ending.damaged_at:,}; its whole part was used."
        return f'<h1>{escape(title)}</h1><p class="bad box">{escape(text)}</p>{_facts(rows)}'
    return f"<h1>{escape(title)}</h1>{_facts(rows)}"


def _verdicts(report: Report) -> str:
    """Show the last verdict, a band of all, and a table of the changes of its level."""
    last = report.phases[-1]
    stretches, rows = [], []
    for each in report.phases:
        begin, lasted = clock(each.start), duration(each.end - each.start)
        text = f"{begin}, {lasted}, {each.level}: {each.sentence}"
        stretches.append(Stretch(each.start, each.end, each.level, text))
        rows.append((begin, _level(each.level), lasted, each.sentence))
    engines = {each.engine for each in report.phases}
    note = "A row begins where the level changes." + (" Several engines were seen." if len(engines) > 1 else "")
    return (
        f'<h2>Verdict</h2><p class="{last.level} box">{_level(last.level)} {escape(report.sentence)}</p>'
        f"<figure>{band(stretches, report.start, report.end)}<figcaption>Verdict over time. Windows of "
        f"“the last minute” end at the time of each verdict.</figcaption></figure>"
        f"<details><summary>{plural(len(rows), 'period')} of one level</summary><p>{note}</p>"
        f"{_table(('from', 'level', 'for', 'verdict at its beginning'), rows)}</details>"
    )


def _numbers(report: Report) -> str:
    """Show the numbers of the last state, percentiles of all requests, and the growth of counters over the span."""
    state = report.state
    latency = [_latency(each) for each in report.latencies]
    return (
        f"<h2>Key numbers</h2>{_facts(figures(state), f'At {clock(state.now)}')}"
        + _table(
            ("latency", "of", "p50", "p90", "p99"),
            latency,
            f"Latencies in the whole span, of {plural(report.requests, 'reported request')}",
        )
        + _facts(
            list(_growth(report)),
            f"Counted over {duration(report.counted)}, since {clock(report.end - report.counted)}",
        )
    )


def _latency(each: Latency) -> Cells:
    if each.times is None:
        return each.name, "not sent by this engine", *"---"
    times = map(duration, (each.times.median, each.times.p90, each.times.p99))
    return each.name, plural(each.times.count, each.noun), *times


def _growth(report: Report) -> Iterator[tuple[str, str]]:
    grown = report.growth

    def of(name: str) -> float:
        return grown.get(name, 0.0)

    prompt, cached, queried = of("prompt_tokens"), of("cached_tokens"), of("cache.query_tokens")
    yield "prompt tokens", f"{count(prompt)}, {count(cached)} of them from cache ({share(cached, prompt)})"
    yield "output tokens", count(of("output_tokens"))
    failed, timed_out = of("failed"), of("timed_out")
    ended = (f"{count(of('finished'))} finished", f"{count(failed - timed_out)} failed",
             f"{count(timed_out)} timed out", f"{count(of('cancelled'))} cancelled")  # fmt: skip
    yield "requests", ", ".join(ended)
    yield "preemptions", f"{count(of('preemptions'))}; {count(of('recomputed_tokens'))} tokens were computed again"
    yield "evicted", f"{count(of('cache.evicted_tokens'))} tokens"
    regret = of("cache.regret_tokens")
    yield (
        "regret",
        f"{count(regret)} of {count(queried)} requested tokens had been evicted ({share(regret, queried)})",
    )


def _charts(report: Report) -> str:
    """Show the hit rate, the tokens per second, the pool and the requests over the span."""
    seconds = report.end - report.start
    parts = max(1, min(PARTS, int(seconds)))
    history, end = report.history, report.end

    def growth(name: str) -> list[float]:
        return series(history, name, end, seconds, parts)

    def gauge(name: str) -> list[float | None]:
        return gauges(history, name, end, seconds, parts)

    known = report.state.stats
    rates = next((each for each in RATES if all(name in known for name, _ in each)), RATES[-1])
    hit = [part / whole if whole > 0 else None
           for part, whole in zip(growth("cached_tokens"), growth("prompt_tokens"), strict=True)]  # fmt: skip
    per_part = seconds / parts or 1.0
    tokens = [Series(label, [each / per_part for each in growth(name)]) for name, label in rates]
    requests = [Series("running", gauge("running")), Series("waiting", gauge("waiting"))]
    blocks, span, per = report.state.facts.num_blocks, (report.start, end), duration(per_part)
    return "<h2>Over time</h2>" + "".join(
        (
            _figure("Hit rate", f"cached of prompt tokens, in parts of {per}", [Series("hit rate", hit)],
                    lines([Series("hit rate", hit)], *span, lambda value: f"{value:.0%}", 1.0)),
            _figure("Tokens per second", f"means of {per}", tokens, lines(tokens, *span, short)),
            _figure("Pool", f"of {plural(blocks, 'block')}", shown := _pool(report, gauge),
                    areas(shown, *span, short, float(blocks or 1))),
            _figure("Requests", f"at the end of each {per}", requests, lines(requests, *span, short)),
        )
    )  # fmt: skip


def _pool(report: Report, gauge: Callable[[str], list[float | None]]) -> list[Series]:
    """Return the blocks over time by state; the free ones are the rest."""
    names = ("cache.cached_blocks", "cache.held_blocks", "cache.pinned_blocks")
    columns = zip(*map(gauge, names), strict=True)
    pools = [
        None if row[0] is None else pool({name: value or 0.0 for name, value in zip(names, row, strict=True)},
                                         report.state.facts.num_blocks)
        for row in columns
    ]  # fmt: skip
    return [
        Series(name, [None if each is None else float(getattr(each, name)) for each in pools])
        for name in ("active", "pinned", "cached")
    ]


def _screens(pictures: Sequence[Sequence[str]]) -> str:
    """Show the screens, the first one open."""
    parts: list[str] = []
    for entry, dark, light in zip(VIEWS, *pictures, strict=True):
        label = escape(f"{entry.title}: {entry.about}", quote=True)
        parts.append(
            f"<details{'' if parts else ' open'}><summary>{escape(entry.title)}: {escape(entry.about)}</summary>"
            f'<picture><source media="(prefers-color-scheme: light)" srcset="{_data(light)}">'
            f'<img src="{_data(dark)}" alt="{label}"></picture></details>'
        )
    return "<h2>Screens at the end of the span</h2>" + "\n".join(parts)


def _regrets(report: Report) -> str:
    reported, listed = plural(report.evictions, "reported eviction"), f"{len(report.regrets)} of {report.regretted:,}"
    text = f"Evicted tokens that were requested again, most tokens first: {listed} of {reported}."
    names = ("evicted", "node", "tokens", "from token", "unused for", "requested after", "ended here", "reason")
    shown = f"<p>{text}</p>{_table(names, map(_regret, report.regrets))}"
    without = f"<p>None of the {reported} was requested again.</p>"
    return "<h2>Top regrets</h2>" + (shown if report.regrets else without)


def _regret(each: EvictionRecord) -> Cells:
    after = duration((each.wanted_again or each.time) - each.time)
    return (
        *(clock(each.time), f"#{each.node}", f"{each.tokens:,}", f"{each.start:,}", duration(each.idle_s)),
        *(after, f"{each.hits:,}", each.pressure or "to make room"),
    )


def _slowest(report: Report) -> str:
    reported = plural(report.requests, "reported request")
    text = f"Longest time to first token (TTFT): {len(report.slowest)} of {reported}."
    names = ("request", "submitted", "namespace", "phase", "prompt", "cached", "TTFT", "queue time", "first miss")
    shown = f"<p>{text}</p>{_table(names, map(_request, report.slowest))}"
    without = f"<p>None of the {reported} has a first token.</p>"
    return "<h2>Slowest requests</h2>" + (shown if report.slowest else without)


def _request(each: RequestRecord) -> Cells:
    phase = "timed out" if each.timed_out else each.phase
    return (
        *(f"#{each.number}", clock(each.submitted), each.namespace or "default", phase, f"{each.prompt_tokens:,}"),
        *(share(each.cached_tokens, each.prompt_tokens), duration(each.ttft), duration(each.queue_time)),
        miss_sentence(each),
    )


# ---- elements


class Markup(str):
    """A text that is HTML already; all others are escaped."""


def _cell(value: object) -> str:
    return value if isinstance(value, Markup) else escape(str(value))


def _table(names: Sequence[str], rows: Iterable[Cells], caption: str = "") -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "\n".join(f"<tr>{''.join(f'<td>{_cell(value)}</td>' for value in row)}</tr>" for row in rows)
    named = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f'<div class="wide"><table>{named}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _facts(rows: Iterable[Cells], caption: str = "") -> str:
    """Write a table of a name and a text a row."""
    named = f"<caption>{escape(caption)}</caption>" if caption else ""
    body = "\n".join(f"<tr><th>{_cell(name)}</th><td>{_cell(text)}</td></tr>" for name, text in rows)
    return f'<div class="wide"><table class="facts">{named}<tbody>{body}</tbody></table></div>'


def _figure(title: str, unit: str, shown: Sequence[Series], drawing: str) -> str:
    names = "".join(f'<span class="key c{number}"></span>{escape(each.name)} ' for number, each in enumerate(shown))
    caption = f"<b>{escape(title)}</b>, {escape(unit)} · {names}"
    return f"<figure><figcaption>{caption}</figcaption>{drawing}</figure>"


def _level(level: str) -> Markup:
    return Markup(f'<span class="{level} level">{level}</span>')


def _data(picture: str) -> str:
    return f"data:image/svg+xml;base64,{b64encode(picture.encode()).decode()}"


def _moment(when: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when))
