"""The journal: a write-ahead log of received groups, with one file per step.

The groups of a step are durable (written and fsynced) before its weights are published and before
it is recorded. Also journaled are dropped groups, without rollouts; sample ranges, before they are
announced; and the numbers of a step's updates, such as the learning rate, when its batch is full.

Format of a record: size of the content (u32), crc32 of kind and content (u32), kind (u8), content.
The last file may end in a torn record, whose write was interrupted by a kill or a power cut.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import shlex
import struct
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple

from isal.isal_zlib import crc32

from peralta_zmq import atomic_files, wire
from peralta_zmq.atomic_files import failpoint
from peralta_zmq.errors import JournalError, OutageError, WireError, failure_text
from peralta_zmq.learning.admission import OUTCOMES
from peralta_zmq.learning.optimizer import BETAS, UpdateSettings
from peralta_zmq.rollout import RolloutGroup

JOURNAL = "journal"  # folder in the run folder
HEADER = struct.Struct("<IIB")  # size, crc32, kind
# Kinds of records with their content:
GROUP = 1  # a group's message
DROPPED = 2  # a DroppedGroup
RANGES = 3  # the first sample index that is not granted, as u64
BEGUN = 4  # UpdateSettings as JSON; the last one counts
logger = logging.getLogger(__name__)


class JournalRecord(NamedTuple):
    kind: int
    content: bytes


@dataclass(frozen=True, slots=True)
class DroppedGroup:
    """A group that is in no batch: identity, outcome and data for the curriculum."""

    sender: str  # one start of a generator, NAME/INCARNATION
    group_number: int
    outcome: str  # one of admission.OUTCOMES
    min_group_number: int = 0
    problem_id: str = ""  # set only for the difficulty pools: a sender's long text fills the disk
    mean_reward: float = 0.0
    sample_index: int | None = None

    @classmethod
    def of(cls, group: RolloutGroup, outcome: str) -> DroppedGroup:
        """The record of a group that does not update the pools."""
        return cls(
            group.sender,
            group.group_number,
            outcome,
            min_group_number=group.min_group_number,
            sample_index=group.sample_index,
        )

    def encode(self) -> bytes:
        """Return the content of a DROPPED record: JSON without fields at their default."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        defaults = {field.name: field.default for field in fields(self)}
        stored = {name: value for name, value in values.items() if value != defaults[name]}
        return json.dumps(stored, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, content: bytes) -> DroppedGroup:
        """The inverse of `encode`. Raises ValueError or TypeError."""
        return cls(**json.loads(content))


class Journal:
    """Buffers records and commits them to `folder/step_N.msgpack`. Use with `closing`.

    A failed commit loses nothing: the records keep waiting, and the next commit writes them again.
    """

    def __init__(self, folder: Path, *, before_write: Callable[[], None] = lambda: None) -> None:
        """`before_write` may raise an error; nothing is written then."""
        self._folder = folder
        self._before_write = before_write
        self._step = -1  # step of the waiting records and of the open file; -1: none yet
        self._descriptor = -1  # file descriptor of the open file; -1: closed
        self._size: int | None = None  # bytes of committed records in the file; None: unknown
        self._waiting: list[bytes] = []  # encoded records that are not committed
        self._waiting_since = 0.0  # monotonic seconds when the first of them was appended
        self._executor = ThreadPoolExecutor(1, "journal")
        self._pending_write: Future[None] | None = None  # writes all waiting records in the thread
        folder.mkdir(parents=True, exist_ok=True)

    def append(self, step: int, content: bytes, kind: int = GROUP) -> None:
        """Add a record of a step; the next `commit` makes it durable."""
        assert self._pending_write is None, "a commit ends before the next append"
        if step != self._step:
            assert not self._waiting, "a step ends with a commit"
            self.close()
            self._step = step
            self._size = None
        if not self._waiting:
            self._waiting_since = time.monotonic()
        header = HEADER.pack(len(content), crc32(content, kind), kind)
        self._waiting.append(header + content)

    def begin_commit(self) -> None:
        """Start to write the waiting records in a thread. `commit` must follow."""
        if self._waiting:
            self._pending_write = self._executor.submit(self._write, b"".join(self._waiting))

    def commit(self) -> bool:
        """Make the waiting records durable; False if there are none. Raises OutageError."""
        if not self._waiting:
            return False
        failpoint("journal.commit")  # a test can kill the process here
        write = self._pending_write
        self._pending_write = None
        try:
            if write is not None and write.exception():
                self.close()
                write = None  # try again below: the disk may have room by now
            if write is None:
                self._write(b"".join(self._waiting))
        except OSError as error:
            # After a failed fsync the kernel may report success for the same open file.
            self.close()
            file = self.file_of(self._step)
            raise OutageError(f"cannot write {file}: {failure_text(error, file)}") from error
        self._waiting.clear()
        failpoint("journal.synced")
        return True

    def read(self, step: int) -> list[JournalRecord]:
        """The whole records of a step; cuts off a torn one. Raises OutageError, JournalError."""
        file = self.file_of(step)
        records, torn = read_records(self._folder, step)
        if torn:
            self.check_last(step, "is damaged")
            good = file.stat().st_size - torn
            if _has_record(file.read_bytes(), good):
                raise JournalError(
                    f"{file} is damaged at byte {good}, with whole records after it; put a copy "
                    f"back, or drop those records (truncate -s {good} {shlex.quote(str(file))})"
                )
            logger.warning("journal cut: file=%s lost_bytes=%d", file.name, torn)
        if self.steps()[-1:] == [step]:  # their writer may have been killed before the fsync
            try:
                with file.open("r+b") as opened:
                    opened.truncate(file.stat().st_size - torn)
                    os.fsync(opened.fileno())
                atomic_files.sync_folder(self._folder)
            except OSError as error:
                raise OutageError(f"cannot write {file}: {failure_text(error)}") from error
        return records

    def check_last(self, step: int, fault: str) -> None:
        """Raise JournalError if later steps exist; `fault` describes this step's file."""
        if later := [other for other in self.steps() if other > step]:
            raise JournalError(
                f"{self.file_of(step)} {fault}, and there are later steps; put a copy back, or "
                f"move those of steps {step} to {later[-1]} away to continue from step {step - 1}"
            )

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def waited(self) -> float:
        """Seconds since the first waiting record was appended; 0 if there is none."""
        return time.monotonic() - self._waiting_since if self._waiting else 0.0

    def steps(self) -> list[int]:
        return list(files_in(self._folder))

    def prune(self, oldest: int) -> None:
        for step, file in files_in(self._folder).items():
            if step < oldest:
                with contextlib.suppress(OSError):  # a file that stays only takes space
                    file.unlink()

    def close(self) -> None:
        """Close the open file. Waiting records are not written."""
        if self._pending_write is not None:
            wait([self._pending_write])
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def file_of(self, step: int) -> Path:
        return file_of(self._folder, step)

    def _write(self, content: bytes) -> None:
        self._before_write()
        if self._descriptor < 0:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            self._descriptor = os.open(self.file_of(self._step), flags, 0o644)
            atomic_files.sync_folder(self._folder)
        if self._size is None:
            self._size = os.fstat(self._descriptor).st_size
        os.ftruncate(self._descriptor, self._size)  # removes a partial write of a failed commit
        if os.write(self._descriptor, content) < len(content):  # the disk is full
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        failpoint("journal.written")
        os.fsync(self._descriptor)
        self._size += len(content)


def files_in(folder: Path) -> dict[int, Path]:
    """The journal files by step, ascending."""
    return atomic_files.steps_in(folder, suffix=".msgpack")


def read_records(folder: Path, step: int) -> tuple[list[JournalRecord], int]:
    """The complete records of a step and the number of bytes after them; changes nothing."""
    file = file_of(folder, step)
    content = file.read_bytes() if file.exists() else b""
    records: list[JournalRecord] = []
    offset = 0
    while (record := _record_at(content, offset)) is not None:
        records.append(record)
        offset += HEADER.size + len(record.content)
    return records, len(content) - offset


def encode_number(number: int) -> bytes:
    return number.to_bytes(8, "little")


def decode_number(content: bytes) -> int:
    return int.from_bytes(content, "little")


def encode_update(update: UpdateSettings) -> bytes:
    return json.dumps(asdict(update)).encode()


def decode_update(content: bytes) -> UpdateSettings:
    """The inverse of `encode_update`. Raises ValueError or TypeError for other content."""
    numbers = json.loads(content)
    # Journals had AdamW's decays until these were constants.
    decays = numbers.pop("adam_beta1", BETAS[0]), numbers.pop("adam_beta2", BETAS[1])
    if decays != BETAS:
        raise ValueError(f"AdamW's decays are not {BETAS}")
    return UpdateSettings(**numbers)


class StepRecords(NamedTuple):
    entries: list[RolloutGroup | DroppedGroup | int]
    """In their order; a number is the first sample index that is not granted."""
    num_refused: int  # groups above the limits, which are decoded as dropped ones
    begun: UpdateSettings | None  # numbers of the step's updates

    @property
    def groups(self) -> list[RolloutGroup]:
        return [entry for entry in self.entries if isinstance(entry, RolloutGroup)]

    def is_complete(self, batch_size: int, *, is_newest: bool) -> bool:
        """Whether the batch was full; one with refused groups was, unless it is the newest."""
        num_rollouts = sum(len(group.rollouts) for group in self.groups)
        return num_rollouts >= batch_size or (self.num_refused > 0 and not is_newest)


def decode_step(
    records: Sequence[JournalRecord],
    limits: wire.GroupLimits,
    *,
    file: Path,
    step: int,
    run_id: str | None,
) -> StepRecords:
    """Decode the records of a step. Raises JournalError for one that is unreadable or foreign."""
    entries: list[RolloutGroup | DroppedGroup | int] = []
    begun: UpdateSettings | None = None
    for record in records:
        try:
            if record.kind == RANGES:
                entries.append(decode_number(record.content))
            elif record.kind == BEGUN:
                begun = decode_update(record.content)
            else:
                entries.append(decode_record(record, limits))
        except (WireError, *atomic_files.MALFORMED) as error:
            raise JournalError(
                f"{file} has a complete record that cannot be read ({error}); use the version and "
                "the model that wrote it, or move it and those of later steps away to continue "
                f"from step {step - 1}"
            ) from None
    num_groups = sum(record.kind == GROUP for record in records)
    decoded = StepRecords(entries, 0, begun)
    for group in decoded.groups:
        if group.run_id != run_id and run_id is not None:
            raise JournalError(
                f"{file} holds a group of run {group.run_id}, not of {run_id}; move it and those "
                f"of later steps away to continue from step {step - 1}, or choose another "
                "--run.name"
            )
    return decoded._replace(num_refused=num_groups - len(decoded.groups))


def decode_record(record: JournalRecord, limits: wire.GroupLimits) -> RolloutGroup | DroppedGroup:
    """Decode a GROUP or DROPPED record. Raises WireError, ValueError or TypeError."""
    if record.kind == DROPPED:
        group = DroppedGroup.decode(record.content)
        if group.outcome not in OUTCOMES:
            raise ValueError(f"unknown outcome {group.outcome!a:.40}")
        return group
    try:
        return wire.decode_group(record.content, limits)
    except wire.InvalidGroupError as error:
        group = error.group
        logger.warning("journaled group refused: group=%s reason=%s", group.name, error)
        return DroppedGroup.of(group, "invalid")


def file_of(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}.msgpack"


def _record_at(content: bytes, offset: int) -> JournalRecord | None:
    """The record that begins at `offset`, or None if it is incomplete or damaged."""
    if offset + HEADER.size > len(content):
        return None
    size, checksum, kind = HEADER.unpack_from(content, offset)
    end = offset + HEADER.size + size
    # A power cut may leave zeros after the last record. They would pass as empty records.
    if not size or end > len(content):
        return None
    body = content[offset + HEADER.size : end]
    return JournalRecord(kind, body) if crc32(body, kind) == checksum else None


def _has_record(content: bytes, start: int) -> bool:
    """True if a complete record begins at any offset after `start`."""
    kinds = b"[%c%c%c%c]" % (GROUP, DROPPED, RANGES, BEGUN)
    matches = re.compile(kinds).finditer(content, start + HEADER.size)
    return any(_record_at(content, match.end() - HEADER.size) for match in matches)
