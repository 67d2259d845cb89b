"""A recording says what was written, ends well where a crash cut it, and names what it is not."""

from __future__ import annotations

import io
import logging

import pytest

from radixkv.errors import ProtocolError
from radixkv.telemetry.frames import Bye, Delta, Gap, Hello
from radixkv.telemetry.mirror import Mirror
from radixkv.telemetry.protocol import encode, snapshot_frames
from radixkv.telemetry.recording import MAGIC, RecordingWriter, read_recording
from radixkv.telemetry.records import Changes
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


def test_a_file_that_is_given_stays_open():
    file = io.BytesIO()
    writer = RecordingWriter(file, FACTS)
    writer.write(DELTAS[0])
    writer.close()
    writer.close()
    assert file.getvalue() == MAGIC + encode(Hello(FACTS)) + encode(DELTAS[0])


def test_frames_are_in_the_file_before_it_is_closed(tmp_path):
    writer = RecordingWriter(tmp_path / "a.rec", FACTS)
    writer.write(DELTAS[0])
    assert list(read_recording(tmp_path / "a.rec")) == [Hello(FACTS), DELTAS[0]]
    writer.close()


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
        (b"", "is no recording"),
        (b"%PDF-1.7 and more", "is no recording"),
        (b"RADIXKV-TELEMETRY 2\n", "is no recording"),
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


def test_damage_is_refused_behind_the_good_frames(tmp_path):
    (tmp_path / "a.rec").write_bytes(MAGIC + encode(Hello(FACTS)) + encode(DELTAS[0]) + b"\xff" * 9)
    frames = read_recording(tmp_path / "a.rec")
    assert [next(frames), next(frames)] == [Hello(FACTS), DELTAS[0]]
    with pytest.raises(ProtocolError, match="cap"):
        next(frames)


def test_files_that_are_not_there_are_oserrors(tmp_path):
    with pytest.raises(FileNotFoundError):
        list(read_recording(tmp_path / "none.rec"))
    with pytest.raises(OSError):
        RecordingWriter(tmp_path / "no" / "such" / "folder.rec", FACTS)
