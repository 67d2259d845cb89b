"""The wire format only grows: old recordings are readable, and new fields are appended to their records.

`FIELDS` and `data/version_1.rec` were made once. A new field goes to the end of `FIELDS`, after it was added to the end
of its record; the recording stays as it is.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import msgpack
import pytest

from radixkv.telemetry.mirror import Mirror
from radixkv.telemetry.protocol import Bye, Delta, Frame, Hello, Snapshot, encode
from radixkv.telemetry.recording import MAGIC, read_recording
from radixkv.telemetry.records import (
    ITL_NAMES,
    PROCESS_NAMES,
    EngineFacts,
    EvictionRecord,
    NodeRecord,
    Record,
    RequestRecord,
    SequenceRecord,
    SessionRecord,
)
from tests.telemetry.wire import FACTS, eviction, node, request

RECORDING = Path(__file__).parent / "data" / "version_1.rec"
FIELDS: dict[type[Record], tuple[int, str]] = {  # values in every version, and all fields
    EngineFacts: (
        16,
        "engine pid started version model device dtype attention eviction num_blocks block_size bytes_per_block "
        "max_length max_sequences max_batch_tokens prefill_chunk exposes_text host_blocks control kv_dtype "
        "tensor_parallel",
    ),
    NodeRecord: (
        13,
        "id parent start tokens blocks holders locks pins hits priority demoted born used namespace head text "
        "residence reused",
    ),
    SequenceRecord: (8, "id request index node length cached blocks opened"),
    RequestRecord: (
        15,
        "number phase session namespace priority streams prompt_tokens max_tokens cached_tokens computed_tokens "
        "recomputed_tokens output_tokens preemptions coalesced submitted admitted first_token ended finish miss_reason "
        "miss_at miss_evicted_tokens miss_evicted_ago miss_pressure miss_without_state host_tokens "
        "preempted_ms request_id tenant label disk_tokens drafted_tokens accepted_tokens waits_for changed_part "
        "changed_rule own_text cached_text",
    ),
    SessionRecord: (
        10,
        "number namespace requests live tokens prompt_tokens cached_tokens output_tokens started used closed "
        "request_id tenant label",
    ),
    EvictionRecord: (10, "number time node start tokens blocks idle_s hits gone pressure wanted_again"),
}
SAMPLES: dict[type[Record], Record] = {
    EngineFacts: FACTS,
    NodeRecord: node(1),
    SequenceRecord: SequenceRecord(3, 1, 0, 1, 20, 16, (5, 1), 1.0),
    RequestRecord: request(1),
    SessionRecord: SessionRecord(1, None, 1, 0, 10, 10, 5, 2, 1.0, 2.0),
    EvictionRecord: eviction(1),
}
KINDS = pytest.mark.parametrize("kind", FIELDS, ids=lambda kind: kind.__name__)


def test_every_record_is_listed() -> None:
    known = {each.__name__ for each in Record.__subclasses__()}
    assert {each.__name__ for each in FIELDS} == {each.__name__ for each in SAMPLES} == known


@KINDS
def test_fields_keep_their_places_and_new_ones_are_appended_with_a_default(kind: type[Record]) -> None:
    needed, names = FIELDS[kind]
    declared = fields(kind)  # type: ignore[arg-type]  # a dataclass
    assert [each.name for each in declared] == names.split(), (
        "append a new field to the end of its record and of FIELDS"
    )
    assert [each.name for each in declared if each.default is MISSING] == names.split()[:needed], (
        "a new field needs a default: old recordings do not have it"
    )


@KINDS
def test_a_record_without_its_later_fields_is_read_with_their_defaults(kind: type[Record]) -> None:
    needed, _ = FIELDS[kind]
    values = SAMPLES[kind].pack()
    declared = fields(kind)  # type: ignore[arg-type]
    for length in range(needed, len(values) + 1):
        read = kind.unpack(values[:length])
        assert read.pack() == values[:length] + [each.default for each in declared[length:]]


def test_an_old_recording_is_read() -> None:
    frames = list(read_recording(RECORDING))
    assert [type(frame) for frame in frames] == [Hello, Snapshot, Delta, Bye]
    mirror = Mirror()
    for frame in frames:
        if isinstance(frame, Snapshot | Delta):
            mirror.apply(frame.changes)
    assert {number: (record.parent, record.tokens) for number, record in mirror.nodes.items()} == {
        3: (0, 0),
        4: (3, 6),
        5: (3, 24),
    }
    assert (mirror.time, mirror.stats["steps"], mirror.stats["cache.evicted_tokens"]) == (1006.0, 2.0, 16)
    assert mirror.ended[1].miss_pressure == "for a prompt"
    assert mirror.evictions[1].wanted_again == 1006.0
    assert mirror.sessions[7].namespace == "a"
    assert mirror.next_victims is None  # it was not sent yet
    assert {record.reused for record in mirror.nodes.values()} == {None}
    assert {record.preempted_ms for record in mirror.ended.values()} == {()}
    assert not {*ITL_NAMES, *PROCESS_NAMES, "decode_tokens"} & mirror.stats.keys()


def test_an_old_recording_is_written_as_it_was_but_for_appended_values() -> None:
    stream = RECORDING.read_bytes().removeprefix(MAGIC)
    for frame in read_recording(RECORDING):
        length = int.from_bytes(stream[:4], "big")
        old, stream = msgpack.unpackb(stream[4 : 4 + length]), stream[4 + length :]
        _assert_grown(old, _unpacked(frame))
    assert not stream


def _unpacked(frame: Frame) -> Any:
    return msgpack.unpackb(encode(frame)[4:])


def _assert_grown(old: Any, new: Any) -> None:
    """Every value of `old` is in `new`, in the same order; records and maps may be longer."""
    if isinstance(old, dict):
        assert list(old) == [key for key in new if key in old]
        for key, value in old.items():
            _assert_grown(value, new[key])
    elif isinstance(old, list):
        for was, now in zip(old, new, strict=False):
            _assert_grown(was, now)
        assert len(new) >= len(old)
    else:
        assert new == old
