"""A recording returns the written frames, ends properly after a crash, and rejects other files."""

from __future__ import annotations

import logging
import stat
import threading
from pathlib import Path

import pytest

from radixkv.errors import ProtocolError
from radixkv.telemetry.mirror import Mirror
from radixkv.telemetry.protocol import Bye, Delta, Gap, Hello, Snapshot, encode, snapshot_frames
from radixkv.telemetry.recording import MAGIC, FlightRecorder, RecordingWriter, read_recording
from radixkv.telemetry.records import Changes
from tests.telemetry.served import room
from tests.telemetry.wire import FACTS, node

DELTAS = [Delta(Changes(float(at), nodes=(node(at),)), seq=at, ts=float(at)) for at in range(1, 4)]


def written(path):
    with RecordingWriter(path, FACTS, ts=0.5) as writer:
        frames = [Hello(FACTS, ts=0.5), *snapshot_frames(Mirror(), 0, 0.5), *DELTAS]
        for frame in frames[1:]:
            assert writer.write(frame) == len(encode(frame))
    return frames


def test_what_was_written_is_read(tmp_path):
    frames = written(tmp_path / "a.rec")
    assert list(read_recording(tmp_path / "a.rec")) == frames
    assert (tmp_path / "a.rec").read_bytes().startswith(b"RADIXKV-TELEMETRY 1\n")


def test_a_cut_recording_ends_with_a_bye_that_says_so(tmp_path, caplog):
    path = tmp_path / "a.rec"
    frames = written(path)
    whole = path.read_bytes()
    last = len(encode(frames[-1]))
    for cut in (1, 3, last - 1):
        path.write_bytes(whole[:-cut])
        with caplog.at_level(logging.WARNING):
            *read, bye = read_recording(path)
        assert read == frames[:-1]
        assert bye == Bye(f"the recording ends inside a frame: {last - cut} bytes of it are there", seq=2, ts=2.0)
        assert bye.reason in caplog.text
    path.write_bytes(whole[:-last])
    assert list(read_recording(path)) == frames[:-1]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is not a telemetry recording"),
        (b"%PDF-1.7 and more", "is not a telemetry recording"),
        (b"RADIXKV-TELEMETRY 2\n", "is a recording of version 2; this program reads version 1"),
        (MAGIC, "holds no frame"),
        (MAGIC + encode(Hello(FACTS))[:-1], "holds no frame"),
        (MAGIC + encode(Gap(1)), "its first frame is no hello"),
        (MAGIC + b"nonsense", "cap"),
    ],
)
def test_what_is_no_recording_is_refused(tmp_path, data, said):
    (tmp_path / "a.rec").write_bytes(data)
    with pytest.raises(ProtocolError, match=said):
        list(read_recording(tmp_path / "a.rec"))


def test_damage_is_refused_after_the_good_frames(tmp_path):
    (tmp_path / "a.rec").write_bytes(MAGIC + encode(Hello(FACTS)) + encode(DELTAS[0]) + b"\xff" * 9)
    frames = read_recording(tmp_path / "a.rec")
    assert [next(frames), next(frames)] == [Hello(FACTS), DELTAS[0]]
    good = len(MAGIC + encode(Hello(FACTS)) + encode(DELTAS[0]))
    with pytest.raises(ProtocolError, match=f"damaged after byte {good}: .*cap"):
        next(frames)


# ---- the flight recorder


def snapshot(at: int) -> list[bytes]:
    return [encode(Snapshot(0, 1, Changes(float(at), reset=True, nodes=(node(at),)), seq=at))]


def delta(at: int) -> bytes:
    return encode(Delta(Changes(float(at), nodes=(node(at),)), seq=at))


def seconds_of(recorder: FlightRecorder, path: Path) -> list[int]:
    """The seconds that a saved recording covers; it must begin with a snapshot."""
    size = recorder.save(path, 0.0)
    assert size == path.stat().st_size
    hello, first, *rest = read_recording(path)
    assert isinstance(hello, Hello) and isinstance(first, Snapshot)
    return [int(frame.changes.time) for frame in (first, *rest)]


def recorded(total: int, **limits: float) -> FlightRecorder:
    """The frames that remain after this number of seconds, with a delta in each."""
    recorder = FlightRecorder(FACTS, **limits)  # type: ignore[arg-type]
    for at in range(total):
        if recorder.is_due(float(at)):
            recorder.begin(snapshot(at), float(at))
        else:
            recorder.add(delta(at))
    return recorder


def test_the_last_minutes_are_kept_and_little_more(tmp_path):
    kept = seconds_of(recorded(995, seconds=100.0), tmp_path / "a.rec")
    assert kept == list(range(kept[0], 995))
    assert 100 <= len(kept) <= 110


def test_bytes_are_bounded_and_the_newest_are_kept(tmp_path):
    frame = len(delta(50_000))
    recorder = recorded(5000, max_bytes=100 * frame)
    kept = seconds_of(recorder, tmp_path / "a.rec")
    assert kept == list(range(kept[0], 5000))
    assert len(kept) >= 80
    assert recorder.size <= 115 * frame


def test_a_full_disk_loses_neither_what_is_kept_nor_the_file_of_before(tmp_path):
    recorder, path = recorded(50), tmp_path / "a.rec"
    before = seconds_of(recorder, path)
    whole = path.read_bytes()
    recorder.add(delta(50))
    with room(1000), pytest.raises(OSError, match="File too large"):
        recorder.save(path, 0.0)
    assert path.read_bytes() == whole
    assert [each.name for each in tmp_path.iterdir()] == ["a.rec"]
    assert seconds_of(recorder, path) == [*before, 50]


def test_a_full_disk_cuts_a_recording_where_a_reader_finds_all_before(tmp_path):
    path = tmp_path / "a.rec"
    writer = RecordingWriter(path, FACTS)
    writer.write(DELTAS[0])
    with room(path.stat().st_size + 10):
        with pytest.raises(OSError, match="File too large"):
            writer.write(DELTAS[1])
        with pytest.raises(OSError, match="File too large"):
            writer.close()
    *read, bye = read_recording(path)
    assert read == [Hello(FACTS), DELTAS[0]]
    assert isinstance(bye, Bye)


def test_recordings_are_for_their_owner_alone(tmp_path):
    written(tmp_path / "a.rec")
    recorded(3).save(tmp_path / "b.rec", 0.0)
    assert [stat.S_IMODE(path.stat().st_mode) for path in sorted(tmp_path.iterdir())] == [0o600, 0o600]


def test_it_is_saved_while_others_write(tmp_path):
    recorder = recorded(1)
    stop = threading.Event()

    def write() -> None:
        at = 1
        while not stop.is_set():
            if recorder.is_due(float(at)):
                recorder.begin(snapshot(at), float(at))
            else:
                recorder.add(delta(at))
            at += 1

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(10):
            kept = seconds_of(recorder, tmp_path / "a.rec")
            assert kept == list(range(kept[0], kept[-1] + 1))
    finally:
        stop.set()
        thread.join()
