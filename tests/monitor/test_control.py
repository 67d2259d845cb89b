"""Test the keys that change an engine: their questions, confirmations and replies, and when they are offered."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from textual.pilot import Pilot

from radixkv.sampling.params import SamplingParams
from radixkv.telemetry.command_queue import Outcome
from radixkv.telemetry.protocol import Command, Decoder, Hello, Reply
from radixkv.telemetry.records import Changes
from radixkv_monitor import questions
from radixkv_monitor.app import MonitorApp
from radixkv_monitor.dialogs import ConfirmScreen
from radixkv_monitor.feed import Feed, Status
from radixkv_monitor.feed_factory import feed_of
from radixkv_monitor.live import LOST, NOT_NOW, OTHER_ENGINE, CommandChannel
from radixkv_monitor.questions import ImpossibleError
from radixkv_monitor.state import State
from radixkv_monitor.views.tree import TreeView
from tests.engine.fakes import make_engine
from tests.monitor.fake_feed import FACTS, FakeFeed
from tests.monitor.samples import node, request, session
from tests.monitor.view_host import screen, state
from tests.telemetry.served import runtime_folder

ROOT = node(id=1, parent=0, tokens=0, blocks=(), namespace="ann", head=(), hits=0)
LEAF = node(id=2, parent=1, tokens=32, blocks=(0, 2), reused=5)
HELD = node(id=3, parent=1, tokens=20, blocks=(2, 2), locks=1, holders=1, pins=1, reused=1, head=(9,))
RUNNING = request(
    number=7, phase="decode", ended=None, finish=None, session=3, output_tokens=12, max_tokens=50, computed_tokens=51
)
CHANGES = Changes(
    1000.0, True, {"running": 1.0, "cache.pinned_blocks": 2.0}, (ROOT, LEAF, HELD), requests=(RUNNING,), sessions=()
)


class ControlledFeed(FakeFeed):
    """A feed whose engine takes commands: `sent` has them, and `answer` their outcome, which tests may delay."""

    def __init__(self, *changes: Changes) -> None:
        super().__init__(*changes)
        self.allowed = True
        self.sent: list[tuple[str, int, str]] = []
        self.answer: Outcome | None = Outcome(True, "did it")
        self.reply: Future[Outcome] = Future()

    @property
    def current(self) -> State | None:
        state = super().current
        return None if state is None else replace(state, control=self.allowed)

    def command(self, verb: str, number: int, engine: str) -> Future[Outcome]:
        self.sent.append((verb, number, engine))
        if self.answer is not None:
            self.reply.set_result(self.answer)
        return self.reply


Script = Callable[["Pilot[None]", MonitorApp, ControlledFeed], Awaitable[None]]


def run(
    script: Script, view: str = "tree", *, size: tuple[int, int] = (120, 30), read_only: bool = False
) -> ControlledFeed:
    feed = ControlledFeed(CHANGES)
    app = MonitorApp(feed, view, read_only=read_only)

    async def go() -> None:
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            app.tick()
            await pilot.pause()
            await script(pilot, app, feed)

    asyncio.run(go())
    return feed


def shown(app: MonitorApp) -> str:
    return "\n".join(screen(app))


def toasts(app: MonitorApp) -> list[tuple[str, str]]:
    return [(each.title, str(each.message)) for each in app._notifications]


async def select(app: MonitorApp, pilot: Pilot[None], number: int) -> None:
    view = app.view
    assert isinstance(view, TreeView)
    view.lines.go_to(number)
    await pilot.pause()


CASES = [
    ("tree", 2, "p", "pin", 2, ("Pin node #2?", "32 tokens up to its end, in 2 blocks (3% of", "2 of the pool's 64")),
    ("tree", 3, "u", "unpin", 3, ("Release the 1 pin at node #3?", "of the engine's own callers")),
    ("tree", 2, "d", "demote", 2, ("Demote node #2?", "Its 32 tokens in 2 blocks", "5 requests reused them so far")),
    ("tree", 1, "x", "clear", 1, ("Clear namespace ann?", "32 cached tokens of 1 node in 2 blocks", "1 node stay")),
    ("requests", 7, "x", "cancel", 7, ("Cancel request #7?", "12 of at most 50 tokens", "session #3", "111 tokens")),
]  # fmt: skip


@pytest.mark.parametrize(("view", "selected", "key", "verb", "number", "texts"), CASES)
def test_each_key_asks_first_and_only_yes_sends(
    view: str, selected: int, key: str, verb: str, number: int, texts: tuple[str, ...]
) -> None:
    async def script(pilot: Pilot[None], app: MonitorApp, feed: ControlledFeed) -> None:
        if view == "tree":
            await select(app, pilot, selected)
        for answer in ("n", "escape", "enter", "q", "y") if key == "p" else ("n", "y"):
            assert not feed.sent and not toasts(app)
            await pilot.press(key)
            await pilot.pause()
            assert isinstance(app.screen, ConfirmScreen) and not feed.sent
            text = " ".join(shown(app).replace("│", " ").split())
            assert all(each in text for each in texts), text
            await pilot.press(answer)
            await pilot.pause()
            assert not isinstance(app.screen, ConfirmScreen)
        await pilot.pause()
        assert toasts(app) == [("Done", "Did it.")]

    assert run(script, view).sent == [(verb, number, FACTS.engine)]


def test_the_mouse_can_answer_on_a_small_screen() -> None:
    async def script(pilot: Pilot[None], app: MonitorApp, feed: ControlledFeed) -> None:
        await select(app, pilot, 2)
        await pilot.press("d")
        await pilot.pause()
        lines = screen(app)
        at = next(index for index, line in enumerate(lines) if " y " in line and "yes" in line)
        await pilot.click(offset=(lines[at].index("yes") + 1, at))
        await pilot.pause()

    assert run(script, size=(40, 14)).sent == [("demote", 2, FACTS.engine)]


Change = Callable[[ControlledFeed], object]

ABSENCES: dict[str, Change] = {
    "an engine that only sends": lambda feed: setattr(feed, "allowed", False),
    "a lost engine": lambda feed: setattr(feed, "link", Status("stale", 1000.0, "gone")),
    "a silent engine": lambda feed: setattr(feed, "link", Status("silent", 1000.0, "no news", 5.0)),
    "a recording": lambda feed: setattr(feed, "__class__", FakeFeed),
}


@pytest.mark.long
def test_keys_are_neither_shown_nor_active_unless_the_present_can_be_changed() -> None:
    async def script(pilot: Pilot[None], app: MonitorApp, feed: ControlledFeed) -> None:
        await select(app, pilot, 2)
        app.update_bottom_line()
        await pilot.pause()
        assert "d demote" in shown(app)
        await pilot.press("question_mark")
        await pilot.pause()
        assert "evict the node before others" in shown(app)
        await pilot.press("escape", "space")
        await assert_no_commands(pilot, app)
        await pilot.press("space")
        for change in ABSENCES.values():
            feed.allowed, feed.link = True, Status("live", 0.0)
            app.tick()
            await pilot.pause()
            app.update_bottom_line()
            await pilot.pause()
            assert "d demote" in shown(app)
            change(feed)
            await assert_no_commands(pilot, app)

    assert run(script, size=(120, 60)).sent == []


def test_read_only_offers_no_commands() -> None:
    async def script(pilot: Pilot[None], app: MonitorApp, feed: ControlledFeed) -> None:
        await select(app, pilot, 2)
        await assert_no_commands(pilot, app)

    assert run(script, read_only=True).sent == []


async def assert_no_commands(pilot: Pilot[None], app: MonitorApp) -> None:
    app.tick()
    await pilot.pause()
    await pilot.press(*"pudx")
    await pilot.pause()
    assert not isinstance(app.screen, ConfirmScreen) and not toasts(app)
    app.update_bottom_line()
    await pilot.pause()
    assert "demote" not in shown(app) and "unpin" not in shown(app)
    await pilot.press("question_mark")
    await pilot.pause()
    assert "evict the node before others" not in shown(app)
    await pilot.press("escape")
    await pilot.pause()


def test_the_keys_are_text_in_a_filter() -> None:
    async def script(pilot: Pilot[None], app: MonitorApp, feed: ControlledFeed) -> None:
        await select(app, pilot, 2)
        await pilot.press("slash", *"pudx", "y")
        await pilot.pause()
        assert not isinstance(app.screen, ConfirmScreen) and not toasts(app)
        assert "pudxy" in shown(app)

    assert run(script).sent == []


def test_a_confirmation_that_comes_after_the_engine_is_gone_sends_nothing() -> None:
    async def script(pilot: Pilot[None], app: MonitorApp, feed: ControlledFeed) -> None:
        await select(app, pilot, 2)
        await pilot.press("d")
        await pilot.pause()
        feed.link = Status("stale", 1000.0, "gone")
        await pilot.press("y")
        await pilot.pause()
        assert toasts(app) == [("Not done", "The screen no longer shows the present state of that engine.")]

    assert run(script).sent == []


def test_a_confirmation_for_another_source_sends_nothing() -> None:
    async def script(pilot: Pilot[None], app: MonitorApp, feed: ControlledFeed) -> None:
        await select(app, pilot, 2)
        await pilot.press("d")
        await pilot.pause()
        other = ControlledFeed(CHANGES)
        await app.switch_to(other)
        await pilot.press("y")
        await pilot.pause()
        assert other.sent == [] and len(toasts(app)) == 1

    assert run(script).sent == []


def test_a_late_reply_is_announced_and_a_refusal_is_shown_without_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv_monitor.app.REPLY_NOTICE", 0.01)

    async def script(pilot: Pilot[None], app: MonitorApp, feed: ControlledFeed) -> None:
        feed.answer = None
        await select(app, pilot, 2)
        await pilot.press("d", "y")
        while not toasts(app):
            await pilot.pause(0.01)
        assert toasts(app) == [("Sent", "The engine executes commands between two steps.")]
        feed.reply.set_result(Outcome(False, "namespace '[bold]x[/bold]' is gone"))
        while len(toasts(app)) < 2:
            await pilot.pause(0.01)
        assert toasts(app)[1] == ("Not done", "Namespace '[bold]x[/bold]' is gone.")
        assert not any(each.markup for each in app._notifications)

    run(script)


REFUSALS = {
    ("u", 2): "No pin ends at node #2.",
    ("d", 3): "Node #3 is in use: sequences or pins hold it, so it cannot be evicted.",
    ("p", 1): "A namespace has no tokens of its own: select one of its nodes.",
    ("x", 2): "Node #2 is not a namespace: select the row of a namespace.",
}


def test_what_the_engine_would_refuse_is_not_asked() -> None:
    async def script(pilot: Pilot[None], app: MonitorApp, feed: ControlledFeed) -> None:
        for number, ((key, selected), text) in enumerate(REFUSALS.items()):
            await select(app, pilot, selected)
            await pilot.press(key)
            await pilot.pause()
            assert not isinstance(app.screen, ConfirmScreen)
            assert toasts(app)[number:] == [("Nothing was sent", text)]

    assert run(script).sent == []


# ---- the questions


def test_clearing_counts_what_is_lost_and_what_stays() -> None:
    nodes = [
        ROOT,
        LEAF,
        HELD,
        node(id=4, parent=2, start=32, tokens=10, blocks=(40, 1), residence="host", reused=2),
        node(id=5, parent=3, start=20, tokens=12, blocks=(3, 2), reused=1),
        node(id=6, parent=0, tokens=0, blocks=(), namespace="ben"),
        node(id=7, parent=6, tokens=99, blocks=(30, 7)),
    ]
    sessions = [session(number=1, namespace="ann"), session(number=2, namespace="ann", closed=True), session(number=3)]
    asked = questions.clear(state(nodes=nodes, sessions=sessions), ROOT)
    lost, reuse, rest = asked.consequences
    assert lost.startswith("54 cached tokens of 3 nodes in 3 blocks of the pool and 1 block of the host are forgotten")
    assert reuse == "5 requests reused them so far.  1 open session of it will compute such prompts again."
    assert rest.startswith("1 node stay") and rest.endswith("Other namespaces do not change.")
    with pytest.raises(ImpossibleError, match="hold everything"):
        questions.clear(state(nodes=[ROOT, HELD]), ROOT)
    default = node(id=1, parent=0, tokens=0, blocks=(), namespace=None)
    assert questions.clear(state(nodes=[default, LEAF]), default).title == "Clear the default namespace?"


def test_a_waiting_request_loses_nothing_and_an_ended_one_is_refused() -> None:
    waiting = request(phase="waiting", admitted=None, first_token=None, ended=None, finish=None, submitted=1000.0)
    asked = questions.cancel(state(now=1004.0), waiting)
    assert asked.consequences[0] == "It has waited for 4.0 s; nothing is computed yet."
    with pytest.raises(ImpossibleError, match="ended already"):
        questions.cancel(state(), request())


def test_a_node_with_others_after_it_and_one_on_the_host_are_refused() -> None:
    below = node(id=4, parent=2, start=32)
    with pytest.raises(ImpossibleError, match="follow"):
        questions.demote(state(nodes=[ROOT, LEAF, below]), LEAF)
    with pytest.raises(ImpossibleError, match="demoted already"):
        questions.demote(state(nodes=[ROOT]), replace(LEAF, demoted=True))
    with pytest.raises(ImpossibleError, match="host memory"):
        questions.pin(state(nodes=[ROOT]), replace(LEAF, residence="host"))


# ---- the connection


@contextmanager
def channel() -> Iterator[tuple[CommandChannel, socket.socket]]:
    ours, theirs = socket.socketpair()
    theirs.settimeout(20)
    made = CommandChannel()
    made.open(ours)
    with ours, theirs:
        yield made, theirs


def test_a_command_waits_for_the_reply_of_its_number() -> None:
    with channel() as (commands, engine):
        hello = Hello(replace(FACTS, control=True))
        assert commands.take([hello]) == [hello]
        first, second = (commands.send("pin", number, FACTS.engine) for number in (5, 6))
        data = engine.recv(4096)
        sent = [each for each in Decoder().feed(data) if isinstance(each, Command)]
        assert [(each.verb, each.number) for each in sent] == [("pin", 5), ("pin", 6)]
        rest = commands.take([Reply(99, True, "x"), Reply(sent[1].id, False, "no"), Reply(sent[0].id, True, "yes")])
        assert rest == [] and (first.result(0), second.result(0)) == (Outcome(True, "yes"), Outcome(False, "no"))


def test_a_lost_connection_ends_its_commands() -> None:
    with channel() as (commands, _):
        commands.take([Hello(replace(FACTS, control=True))])
        waiting = commands.send("clear", 1, FACTS.engine)
        assert not waiting.done()
        commands.close()
        assert waiting.result(0) == Outcome(False, LOST)
        assert commands.send("clear", 1, FACTS.engine).result(0) == Outcome(False, NOT_NOW)


def test_nothing_is_sent_before_the_hello_without_control_or_to_another_engine() -> None:
    with channel() as (commands, engine):
        assert commands.send("clear", 1, FACTS.engine).result(0).text == NOT_NOW
        commands.take([Hello(FACTS)])
        assert not commands.allows(FACTS.engine)
        assert commands.send("clear", 1, FACTS.engine).result(0).text == NOT_NOW
        commands.take([Hello(replace(FACTS, control=True))])
        assert commands.allows(FACTS.engine) and not commands.allows("") and not commands.allows("other")
        assert commands.send("clear", 1, "other").result(0).text == OTHER_ENGINE
        engine.setblocking(False)
        with pytest.raises(BlockingIOError):
            engine.recv(1)


def test_feeds_take_no_commands_unless_they_are_connected_to_an_engine() -> None:
    feed: Feed = FakeFeed(CHANGES)
    assert feed.command("clear", 1, FACTS.engine).result(0) == Outcome(False, "still takes no commands")
    assert feed.current is not None and not feed.current.control


def test_keys_change_a_real_engine_and_its_recording_says_nothing_of_control(tmp_path: Path) -> None:
    with runtime_folder():
        engine, _ = make_engine(100, 4, monitor="rw")
        with engine:
            assert engine.monitoring is not None
            engine.generate([list(range(21))], SamplingParams(max_tokens=1), namespace="ann")
            feed = feed_of(str(engine.monitoring.publisher.path))
            app = MonitorApp(feed, "tree")

            async def go() -> None:
                async with app.run_test(size=(120, 30)) as pilot:
                    while app.shown is None or not app.shown.nodes:
                        await pilot.pause(0.02)
                    feed.record(tmp_path / "a.rec")
                    assert app.shown.control and not app.shown.facts.control
                    await pilot.press("x", "y")
                    while not toasts(app):
                        await pilot.pause(0.02)

            asyncio.run(go())
            assert toasts(app)[0] == ("Done", "Cleared namespace 'ann': freed 6 blocks; nothing of it is left.")
            assert not engine.probe([1, 2, 3, 4], namespace="ann").length
        first = next(iter(Decoder().feed((tmp_path / "a.rec").read_bytes().partition(b"\n")[2])))
        assert isinstance(first, Hello) and not first.facts.control
