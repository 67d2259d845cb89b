"""Describe the effect of a command to the engine before it is sent, in the numbers of the state on screen.

Each function returns a question for the user, or raises ImpossibleError with the reason for which the engine would
refuse. `ControlledView` is the base of the views whose keys ask these questions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from textual.message import Message

from radixkv.telemetry.records import NodeRecord, RequestRecord
from radixkv_monitor.block_map import runs
from radixkv_monitor.formatting import duration, plural, share
from radixkv_monitor.state import State
from radixkv_monitor.views import View


class ImpossibleError(Exception):
    """A command that the engine would refuse; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Question:
    """A command and its consequences: `title` asks, and `consequences` are sentences. `engine` is the engine's name."""

    verb: str
    number: int
    engine: str
    title: str
    consequences: tuple[str, ...]


class CommandAsked(Message):
    """A user wants to send a command: the app asks for a confirmation first."""

    def __init__(self, question: Question) -> None:
        super().__init__()
        self.question = question


def can_control(state: State | None) -> bool:
    """Return whether commands are offered: the state is the present one of an engine that takes them."""
    return state is not None and state.control and not state.frozen and not state.past


def cancel(state: State, request: RequestRecord) -> Question:
    """Ask whether to cancel a request."""
    if not request.live:
        raise ImpossibleError(f"request #{request.number} has ended already")
    if request.admitted is None:
        progress = f"It has waited for {duration(state.now - request.submitted)}; nothing is computed yet."
        kept = ""
    else:
        done, most = request.output_tokens, request.max_tokens * request.streams
        progress = f"It is in {request.phase}: {done:,} of at most {plural(most, 'token')} are generated."
        kept = f"{plural(request.cached_tokens + request.computed_tokens, 'token')} of it stay cached until evicted."
    session = "" if request.session is None else f" The reply of session #{request.session} is lost."
    return Question(
        "cancel",
        request.number,
        state.facts.engine,
        f"Cancel request #{request.number}?",
        (progress, f"Its caller gets an error in place of a result.{session}", kept),
    )


def pin(state: State, node: NodeRecord) -> Question:
    """Ask whether to pin the text up to the end of a node."""
    _refuse_root(node)
    if node.residence == "host":
        raise ImpossibleError(f"node #{node.id} is in host memory: only tokens on the device can be pinned")
    tokens = node.start + node.tokens
    blocks = -(-tokens // state.facts.block_size)
    pinned, pool = state.stats.get("cache.pinned_blocks"), plural(state.facts.num_blocks, "block")
    now = "" if pinned is None else f" {int(pinned):,} of the pool's {pool} are pinned now."
    return Question(
        "pin",
        node.id,
        state.facts.engine,
        f"Pin node #{node.id}?",
        (
            f"The {plural(tokens, 'token')} up to its end, in {plural(blocks, 'block')} "
            f"({share(blocks, state.facts.num_blocks)} of the pool), cannot be evicted then.{now}",
            "The pin belongs to the engine: it holds until it is released, also after this monitor has ended.",
        ),
    )


def unpin(state: State, node: NodeRecord) -> Question:
    """Ask whether to release the pins that end at a node."""
    _refuse_root(node)
    if not node.pins:
        raise ImpossibleError(f"no pin ends at node #{node.id}")
    tokens = node.start + node.tokens
    return Question(
        "unpin",
        node.id,
        state.facts.engine,
        f"Release the {plural(node.pins, 'pin')} at node #{node.id}?",
        (
            "They may be pins of the engine's own callers, which rely on them.",
            f"Its text of {plural(tokens, 'token')} can be evicted then, unless a sequence or a longer pin holds it.",
        ),
    )


def demote(state: State, node: NodeRecord) -> Question:
    """Ask whether to evict a node before others."""
    _refuse_root(node)
    if node.locks:
        raise ImpossibleError(f"node #{node.id} is in use: sequences or pins hold it, so it cannot be evicted")
    if any(each.parent == node.id for each in state.nodes.values()):
        raise ImpossibleError(f"other nodes follow node #{node.id}: demote these first")
    if node.demoted:
        raise ImpossibleError(f"node #{node.id} is demoted already")
    place = "the next eviction takes it" if node.residence == "device" else "the host's next eviction takes it"
    return Question(
        "demote",
        node.id,
        state.facts.engine,
        f"Demote node #{node.id}?",
        (
            f"Its {plural(node.tokens, 'token')} in {plural(len(_blocks(node)), 'block')} are evicted before others: "
            f"{place}.",
            f"{_reused((node,))}A request that uses it again before that undoes this.",
        ),
    )


def clear(state: State, root: NodeRecord) -> Question:
    """Ask whether to forget everything of a namespace that is not held. O(nodes)."""
    if root.parent:
        raise ImpossibleError(f"node #{root.id} is not a namespace: select the row of a namespace")
    nodes = [each for each in below(state, root) if each.parent]
    lost, held = [each for each in nodes if not each.locks], [each for each in nodes if each.locks]
    if not lost:
        raise ImpossibleError("sequences or pins hold everything in this namespace")
    kept = {block for each in held for block in _blocks(each)}
    device = {block for each in lost if each.residence == "device" for block in _blocks(each)} - kept
    host = {block for each in lost if each.residence == "host" for block in _blocks(each)}
    where = plural(len(device), "block") + (
        f" of the pool and {plural(len(host), 'block')} of the host" if host else ""
    )
    sessions = sum(each.namespace == root.namespace and not each.closed for each in state.sessions.values())
    name = "the default namespace" if root.namespace is None else f"namespace {root.namespace}"
    more = f" {plural(sessions, 'open session')} of it will compute such prompts again." if sessions else ""
    stays = f"{plural(len(held), 'node')} stay, because sequences or pins hold them. " if held else ""
    return Question(
        "clear",
        root.id,
        state.facts.engine,
        f"Clear {name}?",
        (
            f"{plural(sum(each.tokens for each in lost), 'cached token')} of {plural(len(lost), 'node')} in {where} "
            "are forgotten, and the history of its evictions.",
            f"{_reused(each for each in lost if each.parent == root.id)}{more}".strip(),
            f"{stays}Other namespaces do not change.",
        ),
    )


def below(state: State, top: NodeRecord) -> Iterator[NodeRecord]:
    """Yield a node and all nodes below it. O(nodes)."""
    children: dict[int, list[NodeRecord]] = {}
    for each in state.nodes.values():
        children.setdefault(each.parent, []).append(each)
    waiting = [top]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += children.get(node.id, ())


def _refuse_root(node: NodeRecord) -> None:
    if not node.parent:
        raise ImpossibleError("a namespace has no tokens of its own: select one of its nodes")


def _reused(nodes: Iterable[NodeRecord]) -> str:
    """Return a sentence on the requests that reused nodes; empty if there is none, or if the engine does not count."""
    total = sum(each.reused or 0 for each in nodes)
    return f"{plural(total, 'request')} reused them so far. " if total else ""


def _blocks(node: NodeRecord) -> list[int]:
    return [block for start, count in runs(node.blocks) for block in range(start, start + count)]


class ControlledView(View):
    """A view with keys for commands, which are bound to `control(verb)`. They act only while commands are offered."""

    def question(self, verb: str) -> Question | None:
        """Return the question for a command to the selected item; None without one. Raises ImpossibleError."""
        raise NotImplementedError

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Hide the keys of commands while none is offered."""
        return can_control(self._state) if action == "control" else super().check_action(action, parameters)

    def action_control(self, verb: str) -> None:
        """Ask the app to confirm a command, or show the reason why it is not possible."""
        try:
            question = self.question(verb)
        except ImpossibleError as reason:
            text = str(reason)
            self.notify(f"{text[:1].upper()}{text[1:]}.", title="Nothing was sent", severity="warning", markup=False)
        else:
            if question is not None:
                self.post_message(CommandAsked(question))
