"""The machine: it draws one verb after the other for a world, from a seed.

Each step draws from a generator of its own, so that a run without some of its steps makes the same choices in the
others. `shrink` uses that.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from radixkv.cache import Hint
from radixkv.cache.tokens import FIRST_PSEUDO
from radixkv.cache.types import Purpose
from tests.cache.fuzz.beams import BeamGroup
from tests.cache.fuzz.options import GRID, Options
from tests.cache.fuzz.tracked import Tracked
from tests.cache.fuzz.world import World

PROOFS = 0.1
PURPOSES: tuple[Purpose, ...] = ("request", "request", "request", "request", "resume", "audit")
NAMESPACES = (None, None, None, "a", "b")
ROOTS = tuple(
    list(range(FIRST_PSEUDO + first, FIRST_PSEUDO + first + slots)) for first, slots in ((0, 3), (50, 9), (100, 33))
)
"""Compressed prefixes: the two namespaces have them in common."""
HINTS = (None, None, Hint(done=True), Hint(priority=1), Hint(done=True, priority=1))


class Machine:
    """One world, and the texts that were said in it."""

    def __init__(self, options: Options, seed: int) -> None:
        self.options, self.seed = options, seed
        self.rng = random.Random(seed)
        few, some = self.rng.randint(1, 12), self.rng.randint(8, 16 + 40 // options.block_size)
        blocks = self.rng.choice((few, some, some))
        if options.ample and not options.host:
            blocks = 100 + 2000 // options.block_size
        self.suffix = self.rng.choice((4, 12, 2 * options.block_size + 4))
        self.most_open = self.rng.choice((3, 6, 10))
        self.world = World(blocks, options, seed=seed, proofs=PROOFS)
        self.world.rng = self.world.pool.rng = self.rng
        self.said: list[list[int]] = [[]]
        self.done: list[str] = []  # the names of the verbs so far

    def run(self, steps: Iterable[int]) -> None:
        """Run some steps, by their numbers, and end the world."""
        for number in steps:
            self.step(number)
        if self.world.disk:
            self.world.disk.restart()
        self.world.wind_down()
        if self.world.disk:
            self.world.disk.wind_down()

    def step(self, number: int) -> None:
        """Draw a verb, run it, and check everything."""
        self.rng.seed((self.seed << 24) + number)
        able = [verb for verb in VERBS if verb.needs(self)]
        (verb,) = self.rng.choices(able, [verb.weight for verb in able])
        if self.options.ample and self.is_full:
            verb = Verb(0, start_again)
        self.done.append(f"{number} {verb.run.__name__}")
        verb.run(self)
        self.world.verify()

    @property
    def is_full(self) -> bool:
        """Whether a third of the last tier is in use: an ample one must never evict."""
        stats = self.world.cache.stats()
        if self.options.host:
            return stats.host_free_blocks < stats.host_blocks * 2 // 3
        return stats.free_blocks < stats.num_blocks * 2 // 3

    # Draws

    def one(self) -> Tracked:
        return self.rng.choice(self.world.live)

    def namespace(self) -> str | None:
        return self.rng.choice(NAMESPACES)

    def tokens(self) -> list[int]:
        """A few tokens, most of them equal, so that texts often have common prefixes."""
        letters = self.rng.choice((1, 2, 3))
        return [self.rng.randrange(letters) for _ in range(self.rng.randrange(self.suffix))]

    def earlier(self) -> list[int]:
        return self.rng.choice(self.said)

    def remember(self, text: list[int]) -> None:
        self.said = [*self.said[-30:], text[: self.world.num_blocks * self.world.block_size]]

    def prompt(self) -> list[int]:
        """The beginning of an earlier text, continued by a few tokens."""
        said = self.earlier()
        cut = self.rng.choice((len(said), self.rng.randrange(len(said) + 1)))
        root = self.rng.choice(ROOTS) if self.options.compressed and not cut and self.rng.random() < 0.5 else []
        self.remember(root + said[:cut] + self.tokens())
        return self.said[-1]

    def limit(self, namespace: str | None, said: list[int]) -> int | None:
        """A limit of `open`; an aligned one cuts the hit to a multiple of GRID."""
        if self.options.aligned:
            return self.world.usable(namespace, said) // GRID * GRID
        return self.rng.choice((None, None, max(0, len(said) - 1), self.rng.randrange(len(said) + 1)))


# Verbs of sequences


def open_sequence(machine: Machine) -> Tracked:
    world, rng = machine.world, machine.rng
    if len(world.live) >= machine.most_open:
        world.close(machine.one())
    said, namespace = machine.prompt(), machine.namespace()
    purpose = rng.choice(PURPOSES if machine.options.audits else PURPOSES[:-1])
    return world.open(namespace, said, machine.limit(namespace, said), rng.choice((0, 0, 0, 1, -1)), purpose)


def open_and_extend(machine: Machine) -> None:
    opened = open_sequence(machine)
    machine.world.extend(opened, machine.said[-1][opened.seq.length :])


def extend(machine: Machine) -> None:
    one = machine.one()
    if one.plan is not None and machine.rng.random() < 0.9:
        machine.world.commit(one, machine.rng.random() < 0.7)
    _extend(machine, one)


def _extend(machine: Machine, one: Tracked) -> None:
    tokens = machine.tokens()
    if machine.world.extend(one, tokens):
        machine.remember(one.tokens + tokens)


def lengthen(machine: Machine) -> None:
    """Draft after a planned token; mostly the draft is run, cut where it turned out to be wrong, and published.

    Sometimes the sequence is forked at any of these points, or another request hits its tokens before it goes on.
    """
    world, rng, one = machine.world, machine.rng, machine.one()

    def fork_perhaps() -> None:
        if machine.options.forks and len(world.live) < machine.most_open and rng.random() < 0.15:
            world.fork(one)

    if one.plan is not None:
        world.commit(one, rng.random() < 0.5)
    fork_perhaps()
    if world.states or one.unknown >= 0 or not world.plan(one, [rng.randrange(3)], one.seq.extend):
        return
    world.lengthen(one, machine.tokens(), rng.choice((0, 0, 1, 5)))
    if rng.random() < 0.8:
        start = len(one.tokens) + 1
        world.commit(one, publish=False)
        fork_perhaps()
        world.truncate(one, rng.randint(start, len(one.tokens)))
        world.publish(one, rng.choice((one.published, len(one.tokens), len(one.tokens))))
        machine.remember(one.tokens)
        if len(world.live) < machine.most_open and rng.random() < 0.3:
            world.open(one.namespace, one.tokens, machine.limit(one.namespace, one.tokens))
        world.plan(one, [rng.randrange(3)], one.seq.extend)


def extend_by_nothing(machine: Machine) -> None:
    machine.world.extend(machine.one(), [])


def extend_unknown(machine: Machine) -> None:
    one = machine.one()
    if one.plan is not None and machine.rng.random() < 0.8:
        machine.world.commit(one, publish=False)
    machine.world.extend_unknown(one, machine.rng.randrange(3))


def load(machine: Machine) -> None:
    """Continue a sequence along an earlier text by a load of what the host has, or sometimes of one token more."""
    world, rng, one = machine.world, machine.rng, machine.one()
    assert world.host
    if one.plan is not None and rng.random() < 0.8:
        world.commit(one)
    if machine.options.aligned and one.plan is None:
        world.truncate(one, len(one.tokens) // GRID * GRID)
    length = len(one.tokens)
    rests = [said[length:] for said in machine.said if len(said) > length and said[:length] == one.tokens]
    if rests:
        rest = rng.choice(rests)
        count = world.host.loadable(one, rest)
        if count and rng.random() < 0.3:
            count = world.host.load_length(count)
        world.host.load(one, rest[: max(1, count + (rng.random() < 0.1))])


def resolve(machine: Machine) -> None:
    machine.world.resolve(machine.one())


def publish(machine: Machine) -> None:
    """Publish a part, mostly of a sequence with unpublished tokens, whose plan may be pending."""
    one = machine.one()
    tails = [each for each in machine.world.live if each.published < len(each.tokens)]
    if tails and machine.rng.random() < 0.8:
        one = machine.rng.choice(tails)
    machine.world.publish(one, machine.rng.randint(0, len(one.tokens) + 1))


def execute(machine: Machine) -> None:
    live = machine.world.live
    machine.world.execute(machine.rng.sample(live, machine.rng.randint(1, len(live))))


def commit(machine: Machine) -> None:
    machine.world.commit(machine.one(), machine.rng.random() < 0.8)


def step(machine: Machine) -> None:
    machine.world.step(machine.rng.random() < 0.8)


def fork(machine: Machine) -> None:
    """Fork a sequence; mostly both go on at once."""
    world, one = machine.world, machine.one()
    others = [each for each in world.live if each is not one]
    if len(world.live) >= machine.most_open:
        world.close(machine.rng.choice(others))
    if one.plan is not None and machine.rng.random() < 0.8:
        world.commit(one, publish=machine.rng.random() < 0.3)
    twin = world.fork(one)
    if twin is not None and machine.rng.random() < 0.7:
        for each in machine.rng.sample((one, twin), 2):
            _extend(machine, each)
            if machine.rng.random() < 0.3:
                world.publish(each, machine.rng.randint(0, len(each.tokens)))


def beams(machine: Machine) -> None:
    """Search with beams from a sequence for some steps; the last beams stay, with tails that are unpublished."""
    world, one = machine.world, machine.one()
    if one.purpose == "audit":
        return
    if one.plan is not None:
        world.commit(one, publish=False)
    if one.unknown >= 0:
        world.resolve(one)
    BeamGroup(world, one, machine.rng).run(machine.rng.randint(1, 8), machine.most_open - len(world.live) + 1)


def truncate(machine: Machine) -> None:
    one = machine.one()
    length = machine.rng.randint(0, len(one.tokens))
    machine.world.truncate(one, length // GRID * GRID if machine.options.aligned else length)


def close(machine: Machine) -> None:
    machine.world.close(machine.one(), machine.rng.choice(HINTS))


def take_a_snapshot(machine: Machine) -> None:
    world, one = machine.world, machine.one()
    assert world.states
    world.states.snapshot_at(one, len(one.tokens) + machine.rng.randrange(-2, 20))


# Steps of the host


def run_the_moves(machine: Machine) -> None:
    assert machine.world.host
    machine.world.host.run_moves()


def confirm_the_moves(machine: Machine) -> None:
    assert machine.world.host
    machine.world.host.confirm_moves()


def run_the_copies(machine: Machine) -> None:
    assert machine.world.states
    machine.world.states.run_copies()


# Steps of the disk


def read_the_disk(machine: Machine) -> None:
    if machine.world.disk:
        machine.world.disk.read(machine.namespace(), machine.earlier())


def let_a_read_arrive(machine: Machine) -> None:
    if machine.world.disk and machine.world.disk.arriving:
        machine.world.disk.arrive()


def restart_the_disk(machine: Machine) -> None:
    if machine.world.disk:
        machine.world.disk.restart()


# Reads


def ask(machine: Machine) -> None:
    said, namespace = machine.earlier() + machine.tokens(), machine.namespace()
    limit = machine.rng.choice((None, machine.rng.randrange(len(said) + 1)))
    machine.world.ask_without_a_trace(namespace, said, limit)


def look_at_a_run(machine: Machine) -> None:
    machine.world.random_run()


def look_at_the_host(machine: Machine) -> None:
    assert machine.world.host
    machine.world.host.random_run()


def find_nodes(machine: Machine) -> None:
    machine.world.find_nodes()


# Verbs on cached text


def pin(machine: Machine) -> None:
    said = machine.earlier()
    text = said[: machine.rng.randrange(len(said) + 1)] if machine.rng.random() < 0.5 else said
    machine.world.pin(machine.namespace(), text, machine.rng.choice((None, None, 0.5, 3.5)))


def release(machine: Machine) -> None:
    machine.world.release(machine.rng.choice(machine.world.pins))


def unpin(machine: Machine) -> None:
    pinned = machine.rng.choice(machine.world.pins)
    machine.world.unpin(pinned.namespace, pinned.tokens[:-1] if machine.rng.random() < 0.3 else pinned.tokens)


def wait(machine: Machine) -> None:
    machine.world.wait(machine.rng.randint(1, 3))


def announce(machine: Machine) -> None:
    """Let a request wait, mostly for text that is cached; sometimes its namespace has no text."""
    world, rng = machine.world, machine.rng
    if len(world.waiting) == 6:
        world.end_an_announcement(world.waiting[0])
    said = machine.prompt() if rng.random() < 0.3 else machine.earlier()
    limit = rng.choice((None, None, rng.randrange(len(said) + 1)))
    world.announce(rng.choice((machine.namespace(), machine.namespace(), "new")), said, limit)


def end_an_announcement(machine: Machine) -> None:
    machine.world.end_an_announcement(machine.rng.choice(machine.world.waiting))


def demote(machine: Machine) -> None:
    said = machine.earlier()
    machine.world.demote(machine.namespace(), said, machine.rng.randrange(len(said) + 1))


def discard(machine: Machine) -> None:
    said, namespace = machine.earlier(), machine.namespace()
    start = machine.rng.randrange(len(said) + 1)
    machine.world.discard(namespace, said, start)
    if machine.world.disk:
        machine.world.disk.forget(namespace, said, start)


def evict(machine: Machine) -> None:
    machine.world.evict(machine.rng.randrange(machine.world.num_blocks + 2))


def drain(machine: Machine) -> None:
    machine.world.drain()


def clear(machine: Machine) -> None:
    machine.world.clear(pins=machine.rng.random() < 0.5)
    if machine.world.disk:
        machine.world.disk.clear()


def clear_namespace(machine: Machine) -> None:
    namespace = machine.namespace()
    machine.world.clear_namespace(namespace)
    if machine.world.disk:
        machine.world.disk.forget_namespace(namespace)


def close_all(machine: Machine) -> None:
    """Close and release everything: no block may be stranded. Sometimes evict or clear everything too."""
    world = machine.world
    world.step()
    while world.live:
        world.close(world.live[-1])
    while world.pins:
        world.release(world.pins[0])
    world.assert_little_is_stranded()
    world.forget_what_is_gone()
    machine.rng.choice((world.drain, world.clear, list, list))()


def start_again(machine: Machine) -> None:
    """Close and forget everything."""
    close_all(machine)
    machine.world.clear()


class Verb(NamedTuple):
    """A verb, how often it is drawn, and what it needs: options by their names, "live" sequences, "pinned" text."""

    weight: float
    run: Callable[[Machine], object]
    wants: tuple[str, ...] = ()

    def needs(self, machine: Machine) -> bool:
        """Whether the machine has all that the verb needs."""
        has = {"live": machine.world.live, "pinned": machine.world.pins, "announced": machine.world.waiting}
        return all(has[want] if want in has else getattr(machine.options, want) for want in self.wants)


VERBS = (
    Verb(3, open_sequence),
    Verb(17, open_and_extend),
    Verb(25, extend, ("live",)),
    Verb(1, extend_by_nothing, ("live",)),
    Verb(5, lengthen, ("live",)),
    Verb(8, extend_unknown, ("live",)),
    Verb(10, load, ("live", "host")),
    Verb(5, resolve, ("live",)),
    Verb(5, publish, ("live",)),
    Verb(10, execute, ("live",)),
    Verb(18, commit, ("live",)),
    Verb(2, step),
    Verb(5, fork, ("live", "forks")),
    Verb(2, beams, ("live", "forks")),
    Verb(5, truncate, ("live",)),
    Verb(12, close, ("live",)),
    Verb(5, take_a_snapshot, ("live", "states")),
    Verb(2, run_the_moves, ("host",)),
    Verb(2, confirm_the_moves, ("host",)),
    Verb(1, run_the_copies, ("states",)),
    Verb(12, read_the_disk, ("disk",)),
    Verb(10, let_a_read_arrive, ("disk",)),
    Verb(0.5, restart_the_disk, ("disk",)),
    Verb(4, ask),
    Verb(1, look_at_a_run),
    Verb(1, look_at_the_host, ("host",)),
    Verb(1, find_nodes),
    Verb(4, pin, ("pins",)),
    Verb(1, release, ("pinned",)),
    Verb(1, unpin, ("pinned",)),
    Verb(4, announce),
    Verb(2, end_an_announcement, ("announced",)),
    Verb(2, wait),
    Verb(2, demote),
    Verb(2, discard),
    Verb(0.5, evict),
    Verb(0.1, drain),
    Verb(0.1, clear),
    Verb(0.3, clear_namespace),
    Verb(0.3, close_all),
)


def shrink(options: Options, seed: int, steps: int) -> tuple[list[int], Machine]:
    """Drop the steps that a failure does not need; return the others, and the machine that failed."""
    kept, failed = list(range(steps)), Machine(options, seed)
    assert _fails(failed, kept), "the run does not fail"
    kept = kept[: len(failed.done)]
    size = len(kept)
    while size:
        for part in _parts(kept, size):
            rest = [each for each in kept if each not in part]
            machine = Machine(options, seed)
            if _fails(machine, rest):
                kept, failed = rest[: len(machine.done)], machine
        size //= 2
    return kept, failed


def _parts(steps: list[int], size: int) -> Iterator[set[int]]:
    return (set(steps[at : at + size]) for at in range(0, len(steps), size))


def _fails(machine: Machine, steps: list[int]) -> bool:
    try:
        machine.run(steps)
    except Exception:
        return True
    return False
