"""Frames survive any split of the stream; other bytes raise ProtocolError, and cost bounded memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.errors import ProtocolError, RadixKVError
from radixkv.telemetry.protocol import (
    MAX_FRAME,
    Attach,
    Bye,
    Command,
    Decoder,
    Delta,
    Frame,
    Gap,
    Hello,
    Reply,
    Snapshot,
    encode,
)
from radixkv.telemetry.records import Changes, EngineFacts, SessionRecord
from tests.monitor import samples
from tests.telemetry.wire import DICE, FACTS, TEXT, TIME, Dice, eviction, node, request


def any_frame(dice: Dice) -> Frame:
    page = dice.randrange(4)
    frames: tuple[Callable[[], Frame], ...] = (
        lambda: Hello(dice.record(EngineFacts)),
        lambda: Command(dice.count(), dice.text()[:32], dice.count()),
        lambda: Reply(dice.count(), dice.random() < 0.5, dice.text()),
        lambda: Snapshot(page, page + dice.randrange(1, 4), dice.changes(reset=page == 0)),
        lambda: Delta(dice.changes()),
        lambda: Gap(dice.count()),
        lambda: Bye(dice.text()),
        lambda: Attach(dice.text(), dice.uniform(0.1, 100)),
    )
    return replace(dice.choice(frames)(), seq=dice.count(), ts=dice.time())


FRAMES = DICE.map(any_frame)


def framed(body: object) -> bytes:
    packed = body if isinstance(body, bytes) else msgpack.packb(body)
    return len(packed).to_bytes(4, "big") + packed


def hello(**other: int) -> bytes:
    return framed({"v": 1, "t": "hello", "seq": 1, "ts": 0.0, "engine": replace(FACTS, **other).pack()})


WHAT_IF = samples.WHAT_IF.as_fields()


def delta(**body: object) -> bytes:
    return framed({"v": 1, "t": "delta", "seq": 1, "ts": 0.0, "body": {"time": 0.0, **body}})


def tried(decoder: Decoder, data: bytes) -> tuple[list[Frame], str]:
    """The decoded frames, and the message of the error. Any error other than ProtocolError fails the test."""
    got: list[Frame] = []
    try:
        got.extend(decoder.feed(data))
    except ProtocolError as refused:
        return got, str(refused)
    return got, ""


def refusal(data: bytes, **options: int) -> str:
    with pytest.raises(ProtocolError) as refused:
        list(Decoder(**options).feed(data))
    assert isinstance(refused.value, RadixKVError)
    return str(refused.value)


@settings(max_examples=30, deadline=None)
@given(st.lists(FRAMES, max_size=4), st.data())
def test_frames_survive_any_split_of_the_stream(frames, data):
    stream = b"".join(map(encode, frames))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    decoder, got = Decoder(), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        got += decoder.feed(stream[start:end])
    assert got == frames
    assert decoder.pending == 0


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=200) | st.binary(max_size=60).map(framed), st.integers(0, 3))
def test_garbage_is_refused_or_waits_for_more_and_is_never_another_error(garbage, good):
    decoder = Decoder(limit=4096)
    frames, refused = tried(decoder, encode(Gap(7)) * good + garbage)
    assert frames[:good] == [Gap(7)] * good
    assert decoder.pending <= (0 if refused else 4099)


@settings(max_examples=50, deadline=None)
@given(FRAMES, st.data())
def test_a_flipped_byte_is_another_frame_or_refused(frame, data):
    stream = bytearray(encode(frame))
    stream[data.draw(st.integers(4, len(stream) - 1))] = data.draw(st.integers(0, 255))
    frames, refused = tried(Decoder(), bytes(stream))
    assert len(frames) == (0 if refused else 1)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | TEXT | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
KEYS = ("body", "page", "pages", "dropped", "reason", "engine", "token", "hz")
BODY = st.fixed_dictionaries({"time": TIME}, optional=dict.fromkeys(Changes.__slots__[1:], ANYTHING))


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["hello", "snapshot", "delta", "gap", "bye", "attach", "event"]),
    st.fixed_dictionaries({}, optional={**dict.fromkeys(KEYS, ANYTHING), "body": ANYTHING | BODY}),
)
def test_frames_of_wrong_types_are_refused(name, fields):
    """An accepted frame has fields of the right types: encoding it again gives the same frame."""
    data = framed({"v": 1, "t": name, "seq": 1, "ts": 0.0, **fields})
    frames, refused = tried(Decoder(), data)
    assert len(frames) == (0 if refused else 1)
    assert tried(Decoder(), b"".join(map(encode, frames))) == (frames, "")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"GET / HTTP/1.1\r\n", "claims 1195725856 bytes"),
        (framed(b"\xc1"), "makes no sense"),
        (framed([1, 2]), "is a map"),
        (framed({"v": 2, "t": "gap"}), "version 1, the other side 2"),
        (framed({"v": 1, "t": "dance"}), "no 'dance' frames"),
        (framed({"v": True, "t": "gap"}), "'v'"),
        (framed({"v": 1, "t": "gap", "seq": -1, "ts": 0.0, "dropped": 1}), "'seq'"),
        (framed({"v": 1, "t": "gap", "seq": 0, "ts": float("nan"), "dropped": 1}), "'ts'"),
        (framed({"v": 1, "t": "attach", "seq": 0, "ts": 0.0, "token": "", "hz": 0.0}), "'hz'"),
        (
            framed({"v": 1, "t": "snapshot", "seq": 0, "ts": 0.0, "page": 1, "pages": 1, "body": {"time": 0.0}}),
            "page 1 of 1",
        ),
        (framed({"v": 1, "t": "snapshot", "seq": 0, "ts": 0.0, "page": 0, "pages": 1, "body": {"time": 0}}), "resets"),
        (framed(b"\x82\xa1a\x01\xa1a\x02"), "once each"),
        (framed(msgpack.packb({"v": msgpack.ExtType(5, b"")})), "extensions"),
        (delta(stats={"steps": "many"}), "'steps'"),
        (hello(num_blocks=2**40), "1099511627776 blocks"),
        (hello(block_size=0), "0 tokens"),
        (hello(host_blocks=2**40), "1099511627776 blocks"),
        (delta(nodes=[7]), "list of records"),
        (delta(gone_nodes=[1, "2"]), "list of ids"),
        (delta(gone_nodes=[-1]), "list of ids"),
        (delta(what_if=7), "'what_if'"),
        (delta(what_if=json.dumps(WHAT_IF | {"dropped": 1e999})), "out of range"),
        (delta(what_if=json.dumps(WHAT_IF | {"recent": WHAT_IF["recent"] | {"hit_tokens": [1]}})), "out of range"),
        (delta(nodes=[[1, 2]]), "NodeRecord has 13 to 18 values, not 2"),
        (delta(nodes=[[*node(1).pack()[:-3], 5]]), "NodeRecord.text cannot be a int"),
        (delta(nodes=[[*node(1).pack()[:-2], "shelf"]]), "NodeRecord.residence cannot be shelf"),
        (delta(nodes=[[True, *node(1).pack()[1:]]]), "NodeRecord.id cannot be a bool"),
        (delta(nodes=[[-1, *node(1).pack()[1:]]]), "NodeRecord.id cannot be -1"),
        (delta(nodes=[node(1, blocks=(3,)).pack()]), "NodeRecord.blocks"),
        (delta(nodes=[node(1, blocks=(-3, 1)).pack()]), "NodeRecord.blocks"),
        (delta(nodes=[node(1, blocks=(0, 2**31 - 1) * 3).pack()]), "NodeRecord.blocks"),
        (delta(nodes=[node(1, head=((),)).pack()]), "NodeRecord.head"),
        (delta(requests=[request(1, miss_reason="bad luck").pack()]), "RequestRecord.miss_reason"),
        (delta(evictions=[eviction(1, float("inf")).pack()]), "EvictionRecord.wanted_again"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_is_said(data, said):
    assert said in refusal(data)


def test_the_decoder_stays_broken_and_gives_what_came_before():
    decoder, got = Decoder(), []
    stream = encode(Gap(1)) + framed([]) + encode(Gap(2))
    with pytest.raises(ProtocolError):
        got.extend(decoder.feed(stream))
    assert got == [Gap(1)]
    frames = decoder.feed(encode(Gap(3)))
    with pytest.raises(ProtocolError):
        next(frames)
    assert decoder.pending == 0


def test_frames_over_the_cap_are_refused_on_both_sides():
    bye = Bye("x" * 200)
    with pytest.raises(ProtocolError, match="over the cap of 100"):
        encode(bye, limit=100)
    assert "100 is the cap" in refusal(encode(bye), limit=100)
    huge = Delta(Changes(0.0, gone_nodes=tuple(range(2**40, 2**40 + MAX_FRAME // 9 + 1))))
    with pytest.raises(ProtocolError, match="pages"):
        encode(huge)


BOMBS = {
    "deep arrays": b"\x91" * 100_000,
    "deep maps": b"\x81\xa1a" * 100_000,
    "deep and wide": b"\xdc\xff\xff" * 100_000,
    "claims": b"\xdd\xff\xff\xff\xff" * 10,
    "many empty arrays": b"\xdc\x00\x3c" + (b"\xdc\xff\xff" + b"\x90" * 65_535) * 60,
    "many empty maps": b"\xdc\x00\x3c" + (b"\xdc\xff\xff" + b"\x80" * 65_535) * 60,
    "a long text": b"\xdb\x00\x3f\xff\x00" + b"x" * 0x3FFF00,
    "bytes": b"\xc6\x00\x3f\xff\x00" + b"x" * 0x3FFF00,
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused(name):
    assert refusal(framed(BOMBS[name]))


def test_bombs_cost_bounded_memory():
    """Measured in a fresh process by its own peak, which never falls; getrusage would include the parent's."""
    if not Path("/proc/self/status").exists():
        pytest.skip("this system does not say how much memory a process had")
    code = (
        "import re\nfrom pathlib import Path\nfrom tests.telemetry.test_protocol import BOMBS, framed, refusal\n"
        "def most(): return int(re.search(r'VmHWM:\\s+(\\d+) kB', Path('/proc/self/status').read_text())[1])\n"
        "before = most()\n[refusal(framed(bomb)) for bomb in BOMBS.values()]\nprint(most() - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 128 * 1024


def test_a_frame_has_so_many_arrays_and_maps_and_no_more():
    assert list(Decoder().feed(delta(weather=[[]] * 65_533)))  # with the three arrays around them, exactly the limit
    assert "at most 65536 arrays" in refusal(delta(weather=[[]] * 65_535, gone_nodes=[]))
    assert list(Decoder().feed(delta(stats={})))
    assert "at most 3 maps" in refusal(delta(stats={}, weather={}))


def test_records_of_earlier_and_later_releases_are_read():
    short = node(1).pack()[:13]
    long = [*node(2).pack(), "something new"]
    (frame,) = Decoder().feed(delta(nodes=[short, long]))
    assert frame.changes.nodes == (node(1), node(2))
    (frame,) = Decoder().feed(delta(weather=["sunny"]))
    assert frame.changes == Changes(0.0)


def test_numbers_beyond_64_bits_go_to_the_limit():
    changes = Changes(0.0, nodes=(node(1), node(2)))
    huge = [getattr(changes.nodes[0], name) for name in changes.nodes[0].__slots__]
    huge[9] = -(10**30)
    (frame,) = Decoder().feed(encode(Delta(Changes(0.0, nodes=(type(changes.nodes[0])(*huge),)))))
    assert frame.changes.nodes[0].priority == -(2**63) + 1
    with pytest.raises(TypeError, match="plain values"):
        encode(Bye(object()))  # type: ignore[arg-type]


EVIL = "\x1b[2J\x1b[31mred\r\n\x07\u202e"
TAMED = r"\x1b[2J\x1b[31mred\r\n\x07\u202e"


def test_texts_cannot_command_a_terminal():
    changes = Changes(
        0.0,
        nodes=(node(1, namespace=EVIL, text=EVIL),),
        requests=(replace(request(1), namespace=EVIL, finish=EVIL, miss_pressure=EVIL),),
        sessions=(SessionRecord(1, EVIL, 0, 0, 0, 0, 0, 0, 0.0, 0.0),),
        evictions=(replace(eviction(1), pressure=EVIL),),
    )
    facts = replace(FACTS, engine=EVIL, model=EVIL, device=EVIL, dtype=EVIL, attention=EVIL, eviction=EVIL)
    frames = list(Decoder().feed(encode(Hello(facts)) + encode(Delta(changes)) + encode(Bye(EVIL))))
    texts = [text for text in _texts(frames) if "red" in text]
    assert texts == [TAMED] * 14
    assert TAMED.isprintable()


def _texts(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list | tuple):
        return [text for each in value for text in _texts(each)]
    names = getattr(type(value), "__slots__", ()) if value is not None else ()
    return [text for name in names for text in _texts(getattr(value, name))]
