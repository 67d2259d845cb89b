"""Test `--report`: its numbers against the frames, its verdicts over time, its page, and the file."""

from __future__ import annotations

import asyncio
import re
import stat
from base64 import b64decode
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from radixkv.telemetry.protocol import CRASHED, Bye, Delta, Hello, Snapshot, encode
from radixkv.telemetry.recording import MAGIC, read_recording
from radixkv.telemetry.records import ITL_NAMES, Changes, EngineFacts, EvictionRecord, RequestRecord
from radixkv_monitor import cli, print_once, report_html
from radixkv_monitor.app import MonitorApp
from radixkv_monitor.pictures import all_views, drawn
from radixkv_monitor.print_once import first_state
from radixkv_monitor.replay import FileFeed
from radixkv_monitor.report import LISTED, Report, collect
from radixkv_monitor.report_html import SCREEN, render
from radixkv_monitor.theme import LIGHT
from radixkv_monitor.views import VIEWS
from scripts.draw_monitor import Moment
from tests.monitor.fake_feed import FACTS

AGENTS = Path(__file__).parent / "data" / "agents.rec"
PICTURES = [["<svg/>"] * len(VIEWS)] * 2
VOID = {"meta", "img", "source", "rect", "line", "polyline", "polygon", "circle"}


class Page(HTMLParser):
    """The elements and texts of a page; it fails on elements that are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def written(path: Path, *frames: Any, facts: EngineFacts = FACTS) -> Path:
    path.write_bytes(MAGIC + b"".join(map(encode, (Hello(facts), *frames))))
    return path


def collected(path: Path) -> Report:
    feed = FileFeed(path)
    state = first_state(feed, 5.0)
    return collect(feed, state, live=False)


def whole(time: float, **stats: float) -> Snapshot:
    return Snapshot(0, 1, Changes(time=time, reset=True, stats=stats), ts=time)


def later(time: float, requests: tuple[RequestRecord, ...] = (), **stats: float) -> Delta:
    return Delta(Changes(time=time, requests=requests, stats=stats), ts=time)


def request(number: int, submitted: float, first_token: float | None = None, **values: Any) -> RequestRecord:
    plain = RequestRecord(
        number=number, phase="finished", session=None, namespace=None, priority=0, streams=1, prompt_tokens=100,
        max_tokens=9, cached_tokens=0, computed_tokens=100, recomputed_tokens=0, output_tokens=1, preemptions=0,
        coalesced=False, submitted=submitted, admitted=submitted, first_token=first_token,
    )  # fmt: skip
    return replace(plain, **values)


# ---- the contents


def test_the_numbers_match_the_frames() -> None:
    requests: dict[int, RequestRecord] = {}
    evictions: dict[int, EvictionRecord] = {}
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    for frame in read_recording(AGENTS):
        if isinstance(frame, Snapshot | Delta):
            first = first or frame.changes.stats
            last |= frame.changes.stats
            requests |= {each.number: each for each in frame.changes.requests}
            evictions |= {each.number: each for each in frame.changes.evictions}
    report = collected(AGENTS)
    assert (report.requests, report.evictions) == (len(requests), len(evictions))
    wanted = [each for each in evictions.values() if each.wanted_again is not None]
    assert report.regretted == len(wanted) > LISTED == len(report.regrets)
    assert [each.tokens for each in report.regrets] == sorted((each.tokens for each in wanted), reverse=True)[:LISTED]
    times = sorted((each.ttft for each in requests.values() if each.ttft is not None), reverse=True)
    assert [each.ttft for each in report.slowest] == times[:LISTED]
    hit, miss, queue, itl, e2e = (each.times for each in report.latencies)
    assert hit and miss and queue and e2e and hit.count + miss.count == len(times) and queue.count >= len(times)
    ended = sorted((each.ended or 0.0) - each.submitted for each in requests.values() if each.phase == "finished")
    assert (e2e.count, e2e.median) == (len(ended), ended[(len(ended) - 1) // 2])
    assert (itl is None) == (ITL_NAMES[0] not in last)
    for name in ("prompt_tokens", "cached_tokens", "output_tokens", "finished", "cache.regret_tokens"):
        assert report.growth[name] == last[name] - first.get(name, 0)


def test_the_verdicts_over_time_match_each_moment(tmp_path: Path) -> None:
    """A request fails at 20 s; a minute later nothing is wrong any more, and without requests the engine is idle."""
    stats = {"prompt_tokens": 100.0, "cached_tokens": 50.0}
    frames = (
        whole(1000.0),
        later(1005.0, **stats),
        later(1020.0, (request(1, 1019.0, ended=1020.0, phase="failed"),), failed=1.0),
        *(later(1000.0 + second, **stats) for second in range(25, 201, 5)),
    )
    report = collected(written(tmp_path / "a.rec", *frames))
    found = [(each.level, round(each.start), round(each.end)) for each in report.phases]
    assert [level for level, _, _ in found] == ["idle", "good", "bad", "idle"]
    assert found[0][1] == 1000 and found[-1][2] == 1200
    assert all(one[2] == two[1] for one, two in pairwise(found))
    assert found[1][1] in (1005, 1006) and found[2][1] in (1020, 1021) and found[3][1] in (1080, 1081, 1082)
    assert "1 request failed" in report.phases[2].sentence
    rows = Page(render(report, PICTURES))
    assert "1 request failed in the last minute" in " ".join(rows.texts)
    levels = [values["class"] for tag, values in rows.elements if tag == "rect"]
    assert levels == ["idle", "good", "bad", "idle"]


def test_a_crash_is_the_last_verdict(tmp_path: Path) -> None:
    path = written(tmp_path / "a.rec", whole(1000.0), later(1005.0), Bye(f"{CRASHED}: KeyError", ts=1005.0))
    report = collected(path)
    assert "KeyError" in report.sentence and report.phases[-1].level == "bad"
    assert (report.phases[-1].start, report.phases[-1].end) == (1005.0, 1005.0)


def test_another_engine_begins_another_period_and_its_counters_begin_at_0(tmp_path: Path) -> None:
    other = replace(FACTS, engine="engine-2", started=1010.0)
    path = written(
        tmp_path / "a.rec",
        *(whole(1000.0, output_tokens=100.0), later(1009.0, output_tokens=900.0)),
        *(Hello(other), whole(1011.0, output_tokens=1.0), later(1015.0, output_tokens=41.0)),
    )
    report = collected(path)
    assert report.engines == 2 and {each.engine for each in report.phases} == {"engine-1", "engine-2"}
    assert report.growth["output_tokens"] == 40.0 and report.counted == 4.0
    assert "2 in this span" in render(report, PICTURES)


# ---- the page


def test_texts_of_users_are_escaped(tmp_path: Path) -> None:
    rude = "<script>alert('&\"1')</script>"
    facts = replace(FACTS, model=rude, device='"><img src=x onerror=alert(1)>')
    miss = request(7, 1000.0, 1003.0, namespace=rude, miss_reason="evicted", miss_at=3, miss_pressure=rude)
    gone = EvictionRecord(1, 1001.0, 5, 0, 64, 4, 2.0, 1, True, rude, wanted_again=1003.0)
    changes = Changes(time=1004.0, requests=(miss,), evictions=(gone,))
    path = written(tmp_path / "<b>'.rec", whole(1000.0), Delta(changes, ts=1004.0), facts=facts)
    text = render(collected(path), PICTURES)
    page = Page(text)
    assert {tag for tag, _ in page.elements}.isdisjoint({"script", "b>'.rec"})
    assert sum(tag == "img" for tag, _ in page.elements) == len(VIEWS)
    assert not any(name.startswith("on") for _, values in page.elements for name in values)
    assert page.texts.count(rude) == 2  # the namespace of the request, and the reason of the eviction
    assert "radixkv report: <b>'.rec" in page.texts


def test_the_page_asks_for_nothing_and_has_a_picture_of_every_view() -> None:
    page = Page(render(collected(AGENTS), PICTURES))
    links = [values[name] or "" for _, values in page.elements for name in ("src", "srcset", "href") if name in values]
    assert len(links) == 2 * len(VIEWS) and all(link.startswith("data:image/svg+xml;base64,") for link in links)
    policy = [values["content"] for tag, values in page.elements if tag == "meta" and "http-equiv" in values]
    assert policy == ["default-src 'none'; img-src data:; style-src 'unsafe-inline'"]
    assert "url(" not in report_html.CSS and "@import" not in report_html.CSS
    labels = [values["alt"] or "" for tag, values in page.elements if tag == "img"]
    assert [label.split(":")[0] for label in labels] == [each.title for each in VIEWS]


@pytest.mark.long
def test_the_light_pictures_have_nothing_of_the_dark_theme() -> None:
    """A view, shown or hidden while the theme changes, looks as in an app that began with the theme."""
    _, light = asyncio.run(all_views(Moment(), SCREEN))
    for name, picture in zip(("overview", "tree", "latency"), (light[0], light[1], light[6]), strict=True):
        fresh = asyncio.run(drawn(MonitorApp(Moment(), name, theme=LIGHT), size=SCREEN))
        assert picture == fresh, name
        keys = ("4", "t", {"overview": "1", "tree": "2", "latency": "7"}[name])
        assert asyncio.run(drawn(MonitorApp(Moment(), name), keys, SCREEN)) == fresh, name


def test_the_chart_of_tokens_names_the_counters_that_the_engine_sends(tmp_path: Path) -> None:
    def named(**stats: float) -> str:
        path = written(tmp_path / "a.rec", whole(1000.0, **stats), later(1009.0, **stats))
        text = render(collected(path), PICTURES)
        return re.sub("<[^>]*>", "", text.partition("<b>Tokens per second</b>")[2].partition("</figcaption>")[0])

    counters = {"output_tokens": 1.0, "computed_tokens": 1.0, "cached_tokens": 1.0}
    assert named(**counters).split("·")[1].split() == ["output", "computed", "cached"]
    newer = {**counters, "decode_tokens": 1.0, "prefill_tokens": 1.0}
    assert named(**newer).split("·")[1].split() == ["decode", "prefill", "cached"]


# ---- the command


@pytest.mark.long
def test_the_report_of_a_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.html"
    assert cli.main([str(AGENTS), "--report", str(path)]) == 0
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err == f"radixkv-monitor: wrote {path}\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and path.stat().st_size < 2 * 2**20
    page = Page(path.read_text(encoding="utf-8"))
    shown = [
        values.get("src") or values.get("srcset") or "" for tag, values in page.elements if tag in ("img", "source")
    ]
    drawn = [ElementTree.fromstring(b64decode(each.partition(",")[2])) for each in shown]
    assert len(drawn) == 2 * len(VIEWS)
    for at, entry in enumerate(VIEWS):
        light, dark = (_letters(picture) for picture in drawn[2 * at : 2 * at + 2])
        assert entry.title in dark and "■ended" in dark
        assert light == dark  # the same texts in other colours
    assert cli.main([str(AGENTS), "--report", str(path)]) == 2
    assert "is there already" in capsys.readouterr().err


def _letters(picture: ElementTree.Element) -> str:
    """Return the texts of a picture without blanks, because runs of cells depend on the theme."""
    texts = (each.text or "" for each in picture.iter("{http://www.w3.org/2000/svg}text"))
    return "".join("".join(texts).split())


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write reports without drawing their screens."""

    async def none(*_: object, **__: object) -> list[list[str]]:
        return PICTURES

    monkeypatch.setattr(report_html, "all_views", none)


@pytest.mark.usefixtures("undrawn")
def test_the_report_of_a_damaged_recording_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = written(tmp_path / "a.rec", whole(1000.0), later(1004.0)), tmp_path / "out.html"
    good = path.stat().st_size
    path.write_bytes(path.read_bytes() + encode(later(1005.0))[:-1])
    assert cli.main([str(path), "--report", str(out)]) == 4
    assert "the end is missing" in capsys.readouterr().err
    assert f"damaged or cut after byte {good:,}; its whole part was used." in out.read_text()


@pytest.mark.usefixtures("undrawn")
def test_the_report_of_a_live_engine_may_end_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C after the first state writes the report; before it, nothing is written."""
    out = tmp_path / "out.html"

    def interrupted(feed: Any, *_: object) -> None:
        for _ in range(1000):
            if feed.latest is not None:
                break
            real_sleep(0.01)
        raise KeyboardInterrupt

    real_sleep = print_once.time.sleep
    monkeypatch.setattr(print_once, "_watch", interrupted)
    assert cli.main(["--demo", "--report", str(out)]) == 0
    assert "demo (a live engine)" in out.read_text()
    capsys.readouterr()

    def at_once(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(print_once, "_watch", at_once)
    monkeypatch.setattr("radixkv_monitor.demo.DemoFeed._run", lambda _: None)
    assert cli.main(["--demo", "--report", str(tmp_path / "none.html")]) == 130
    assert [each.name for each in tmp_path.iterdir()] == ["out.html"]


@pytest.mark.usefixtures("undrawn")
def test_a_report_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, folder = written(tmp_path / "a.rec", whole(1000.0)), tmp_path / "folder"
    folder.mkdir()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("radixkv.private_files._sync", full)
    assert cli.main([str(source), "--report", str(folder / "out.html")]) == 1
    assert "No space left" in capsys.readouterr().err and not list(folder.iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--report", "/nowhere/at/all.html"], "its folder does not exist"),
        (["--report", "/"], "is there already"),
        (["--report", "new.html", "--once"], "exclude each other"),
    ],
)
def test_wrong_usage(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([str(AGENTS), *arguments]) == 2
    assert words in capsys.readouterr().err
