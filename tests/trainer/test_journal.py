"""The journal: durability, torn tails, damage, disk errors."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shlex
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from faults import failing

from peralta_zmq.errors import JournalError, OutageError
from peralta_zmq.learning.optimizer import UpdateSettings
from peralta_zmq.trainer.journal import (
    DROPPED,
    GROUP,
    HEADER,
    RANGES,
    Journal,
    JournalRecord,
    decode_update,
    encode_update,
)

FRAMES = [b"first", b"the second one", b"3"]
ENDS = [14, 37, 47]  # bytes after each record: 9 of header and the frame


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with closing(Journal(tmp_path / "journal")) as opened:
        yield opened


def written(folder: Path, frames: list[bytes] = FRAMES) -> Path:
    """A journal file of step 4 whose writer has closed it."""
    with closing(Journal(folder)) as journal:
        for frame in frames:
            journal.append(4, frame)
        journal.commit()
    return folder / "step_000004.msgpack"


def read(folder: Path) -> list[bytes]:
    with closing(Journal(folder)) as journal:
        return frames(journal, 4)


def frames(journal: Journal, step: int) -> list[bytes]:
    return [record.content for record in journal.read(step)]


def test_records_come_back_by_step_in_order_with_their_kind(journal: Journal) -> None:
    records = [JournalRecord(*each) for each in ((GROUP, b"a"), (DROPPED, b"c"), (RANGES, b"d"))]
    for step, record in ((4, records[0]), (5, records[0]), (4, records[1]), (4, records[2])):
        journal.append(step, record.content, record.kind)
        journal.commit()
    assert journal.read(4) == records
    assert (frames(journal, 5), journal.read(9)) == ([b"a"], [])


@pytest.mark.parametrize("kind", [GROUP, DROPPED, RANGES])
def test_damage_before_one_record_of_any_kind_is_refused(tmp_path: Path, kind: int) -> None:
    with closing(Journal(tmp_path)) as journal:
        journal.append(4, b"damaged")
        journal.append(4, b"complete", kind)
        journal.commit()
        damage(tmp_path / "step_000004.msgpack", 12)
        with pytest.raises(JournalError, match="with whole records after it"):
            journal.read(4)


def test_records_are_on_disk_when_commit_returns_and_not_before(
    journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    real = os.fsync

    def record(descriptor: int) -> None:
        sizes.append(os.fstat(descriptor).st_size)
        real(descriptor)

    journal.append(4, b"first")
    assert (journal.read(4), journal.commit(), journal.commit()) == ([], True, False)
    monkeypatch.setattr(os, "fsync", record)
    journal.append(4, b"the second one")
    journal.commit()
    assert sizes == [ENDS[1]]


def test_read_makes_unsynced_records_of_a_killed_writer_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path)
    os.truncate(file, ENDS[1] + 3)
    synced: list[tuple[int, int]] = []
    real = os.fsync

    def record(descriptor: int) -> None:
        status = os.fstat(descriptor)
        synced.append((status.st_ino, status.st_size))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    assert read(tmp_path) == FRAMES[:2]
    assert (file.stat().st_ino, ENDS[1]) in synced
    assert tmp_path.stat().st_ino in dict(synced)


def test_read_reports_a_failed_fsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path)
    monkeypatch.setattr(os, "fsync", failing(errno.EIO))
    with pytest.raises(OutageError, match=r"cannot write .*step_000004\.msgpack: Input/output"):
        read(tmp_path)


@pytest.mark.parametrize("size", range(ENDS[-1] + 1))
def test_torn_tail_costs_only_the_record_it_tears(tmp_path: Path, size: int) -> None:
    os.truncate(written(tmp_path), size)
    assert read(tmp_path) == FRAMES[: sum(end <= size for end in ENDS)]


def test_torn_tail_is_reported_and_cut_before_the_next_record(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    os.truncate(written(tmp_path), ENDS[1] + 3)
    with closing(Journal(tmp_path)) as journal:
        journal.read(4)
        journal.append(4, b"new")
        journal.commit()
    assert read(tmp_path) == [*FRAMES[:2], b"new"]
    assert caplog.messages == ["journal cut: file=step_000004.msgpack lost_bytes=3"]


def damage(file: Path, position: int) -> bytes:
    """Flip a bit; returns the new content of the file."""
    content = bytearray(file.read_bytes())
    content[position] ^= 4
    file.write_bytes(content)
    return bytes(content)


@pytest.mark.parametrize("position", range(ENDS[1], ENDS[2]))
def test_bit_flip_never_yields_the_damaged_record(tmp_path: Path, position: int) -> None:
    damage(written(tmp_path), position)
    assert read(tmp_path) == FRAMES[:2]


@pytest.mark.parametrize("position", range(ENDS[0], ENDS[1]))
def test_damage_before_whole_records_is_refused_and_kept(tmp_path: Path, position: int) -> None:
    file = written(tmp_path)
    content = damage(file, position)
    with closing(Journal(tmp_path)) as journal:
        where = rf"step_000004\.msgpack is damaged at byte {ENDS[0]}, with whole records after it"
        remedy = rf"drop those records \((truncate -s {ENDS[0]} .+)\)$"
        with pytest.raises(JournalError, match=f"{where}.* or {remedy}") as refused:
            journal.read(4)
        assert file.read_bytes() == content
        command = re.search(remedy, str(refused.value))
        assert command and subprocess.run(shlex.split(command[1]), check=True).returncode == 0
    assert read(tmp_path) == FRAMES[:1]


@pytest.mark.parametrize(
    "tail",
    [
        *(bytes(zeros) for zeros in (1, 8, 64, 4096)),  # a power cut may leave them
        random.Random(7).randbytes(200_000),
        HEADER.pack(2**32 - 1, 0, 1) + b"x",  # a length beyond the end of the file
    ],
    ids=lambda tail: f"{len(tail)} bytes",
)
def test_bytes_after_the_last_record_are_a_torn_tail(tmp_path: Path, tail: bytes) -> None:
    file = written(tmp_path)
    file.write_bytes(file.read_bytes() + tail)
    assert read(tmp_path) == FRAMES


def test_torn_file_before_the_last_step_is_refused_and_kept(tmp_path: Path) -> None:
    os.truncate(written(tmp_path), ENDS[1] + 3)
    with closing(Journal(tmp_path)) as journal:
        for step in (5, 7):
            journal.append(step, b"frame")
            journal.commit()
        with pytest.raises(JournalError, match=r"step_000004\.msgpack is damaged.* 4 to 7 away"):
            journal.read(4)
    assert (tmp_path / "step_000004.msgpack").stat().st_size == ENDS[1] + 3


def test_old_steps_are_pruned_and_newer_stay(journal: Journal, tmp_path: Path) -> None:
    for step in (1, 2, 3, 1000):
        journal.append(step, b"frame")
        journal.commit()
    journal.prune(3)
    names = sorted(os.listdir(tmp_path / "journal"))
    assert names == ["step_000003.msgpack", "step_001000.msgpack"]


@pytest.mark.parametrize("call", ["write", "fsync", "open"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_disk_error_is_reported_and_the_commit_repeated(
    journal: Journal, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    journal.append(4, b"frame")
    with monkeypatch.context() as patched:
        patched.setattr(os, call, failing(code))
        with pytest.raises(OutageError, match=os.strerror(code)):
            journal.commit()
    journal.append(4, b"another")
    journal.commit()  # room again: nothing is lost or written twice
    assert frames(journal, 4) == [b"frame", b"another"]


def test_partly_written_record_is_reported_and_cut_off(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal.append(4, b"whole")
    journal.commit()
    real = os.write

    def write_a_part(descriptor: int, content: bytes) -> int:
        return real(descriptor, content[:5])

    journal.append(4, b"frame")
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", write_a_part)
        with pytest.raises(OutageError, match="step_000004"):
            journal.commit()
    journal.commit()
    assert frames(journal, 4) == [b"whole", b"frame"]


def test_begun_commit_ends_with_commit_and_writes_once(journal: Journal) -> None:
    for frame in FRAMES:
        journal.append(4, frame)
    journal.begin_commit()
    with pytest.raises(AssertionError, match="ends before the next"):
        journal.append(4, b"too soon")
    assert (journal.commit(), journal.commit(), frames(journal, 4)) == (True, False, FRAMES)


def test_failed_begun_commit_is_reported_and_repeated(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = threading.Semaphore(0)

    def full(descriptor: int) -> None:
        attempts.release()
        raise OSError(errno.ENOSPC, "full")

    journal.append(4, b"frame")
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        journal.begin_commit()
        with pytest.raises(OutageError, match="full"):
            journal.commit()
        assert journal.num_waiting == 1
        journal.begin_commit()
        assert all(attempts.acquire(timeout=30) for _ in range(3))
    assert journal.commit() and frames(journal, 4) == [b"frame"]  # there is room again


def test_update_of_an_older_journal_is_read_if_its_decays_are_the_present_ones() -> None:
    update = UpdateSettings(1e-3, weight_decay=0.1, max_grad_norm=1.0)
    numbers = json.loads(encode_update(update)) | {"adam_beta1": 0.9, "adam_beta2": 0.95}
    assert decode_update(json.dumps(numbers).encode()) == update
    with pytest.raises(ValueError, match="AdamW's decays"):
        decode_update(json.dumps(numbers | {"adam_beta2": 0.999}).encode())
