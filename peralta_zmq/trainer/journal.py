"""The write-ahead log of what became of every group, one file per optimizer step.

No step is published or saved before its groups are on disk. Restart = newest checkpoint + the
journal replayed.
Knows records of bytes; knows nothing of what they say.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shlex
import struct
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

from isal.isal_zlib import crc32

from peralta_zmq import atomic_files
from peralta_zmq.atomic_files import STEP_NAME
from peralta_zmq.errors import JournalError
from peralta_zmq.failpoints import failpoint

HEADER = struct.Struct("<IIB")  # bytes of content, crc32 of kind and content, kind
GROUP, DROPPED = 1, 2
logger = logging.getLogger(__name__)


class JournalRecord(NamedTuple):
    """A group's message as it came (GROUP), or a note of one that was not taken (DROPPED)."""

    kind: int
    content: bytes


class Journal:
    """Collects records in memory and commits them to `folder/step_N.msgpack`. Use with `closing`.

    After a failed commit nothing is lost: the next one writes the same records again.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._step = -1
        self._descriptor = -1
        self._size: int | None = None  # bytes of whole records in the step's file, once known
        self._waiting: list[bytes] = []  # encoded, not yet committed
        self._since = 0.0  # monotonic seconds, when the first of them came
        self._writer = ThreadPoolExecutor(1, "journal")
        self._writing: Future[None] | None = None  # of all that waits
        folder.mkdir(parents=True, exist_ok=True)

    def append(self, step: int, content: bytes, kind: int = GROUP) -> None:
        """Take in one record of a step; it is durable after the next `commit`."""
        assert self._writing is None, "a commit ends before more is taken in"
        if step != self._step:
            assert not self._waiting, "a step ends with a commit"
            self.close()
            self._step, self._size = step, None
        if not self._waiting:
            self._since = time.monotonic()
        self._waiting.append(_encoded(JournalRecord(kind, content)))

    def begin_commit(self) -> None:
        """Write what was appended while the caller goes on, up to its `commit`."""
        if self._waiting:
            self._writing = self._writer.submit(self._write, b"".join(self._waiting))

    def commit(self) -> bool:
        """Make what was appended durable; False when there was nothing to do.

        Raises JournalError when the disk refuses; the file is whole again before the next try.
        """
        if not self._waiting:
            return False
        failpoint("journal.commit")
        writing, self._writing = self._writing, None
        try:
            if writing is not None and isinstance(writing.exception(), OSError):
                self.close()
                writing = None  # that was at the begin of a step: the disk may have room by now
            if writing is not None:
                writing.result()
            else:
                self._write(b"".join(self._waiting))
        except OSError as error:
            self.close()  # a second fsync of the same pages would lie
            raise JournalError(
                f"cannot write {self.file_of(self._step)}: {error.strerror}"
            ) from None
        self._waiting.clear()
        failpoint("journal.synced")
        return True

    def read(self, step: int) -> list[JournalRecord]:
        """The whole records of a step; a torn tail is cut off the file and reported.

        The last step's are durable then: who wrote them may have been killed before his fsync.
        Raises JournalError when the disk refuses; and when there are later steps, or whole records
        behind a torn tail: then it is no tail, but damage.
        """
        file = self.file_of(step)
        records, torn = read_records(self._folder, step)
        if torn:
            self.check_last(step, "is damaged")
            good = file.stat().st_size - torn
            if _has_record(file.read_bytes(), good):
                raise JournalError(
                    f"{file} is damaged at byte {good} and whole behind it; put a copy back, or "
                    f"give up what is behind (truncate -s {good} {shlex.quote(str(file))})"
                )
            logger.warning("journal cut: file=%s lost_bytes=%d", file.name, torn)
        if self.steps()[-1:] == [step]:
            self._keep(file, file.stat().st_size - torn)
        return records

    def check_last(self, step: int, fault: str) -> None:
        """Raise JournalError with the fault of this step's file when there are later steps."""
        if later := [each for each in self.steps() if each > step]:
            raise JournalError(
                f"{self.file_of(step)} {fault}, and there are later steps; put a copy back, or "
                f"move those of steps {step} to {later[-1]} away to go on from step {step - 1}"
            )

    @property
    def num_waiting(self) -> int:
        """Records not yet committed."""
        return len(self._waiting)

    @property
    def waited(self) -> float:
        """Seconds since the first of these was appended; 0 when there are none."""
        return time.monotonic() - self._since if self._waiting else 0.0

    def steps(self) -> list[int]:
        """Steps that have a file, ascending; other names are ignored."""
        return steps_in(self._folder)

    def prune(self, oldest: int) -> None:
        """Remove the files of steps before `oldest`."""
        for step in self.steps():
            if step < oldest:
                with contextlib.suppress(OSError):  # it is only in the way
                    self.file_of(step).unlink()

    def move_after(self, step: int, target: Path) -> None:
        """Move the files of later steps to another folder, the newest first."""
        for later in reversed(self.steps()):
            if later > step:
                os.rename(self.file_of(later), target / self.file_of(later).name)
        atomic_files.sync_folder(self._folder)

    def close(self) -> None:
        """Close the open file. What waits is not written."""
        if self._writing is not None:
            wait([self._writing])
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _keep(self, file: Path, size: int) -> None:
        """Make the first `size` bytes of the file durable, and nothing else of it."""
        try:
            with file.open("r+b") as opened:
                opened.truncate(size)
                os.fsync(opened.fileno())
            atomic_files.sync_folder(self._folder)
        except OSError as error:
            raise JournalError(f"cannot write {file}: {error.strerror}") from None

    def _write(self, content: bytes) -> None:
        if self._descriptor < 0:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            self._descriptor = os.open(self.file_of(self._step), flags, 0o644)
            atomic_files.sync_folder(self._folder)
        if self._size is None:
            self._size = os.fstat(self._descriptor).st_size
        os.ftruncate(self._descriptor, self._size)  # what a failed commit left
        if os.write(self._descriptor, content) < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        failpoint("journal.written")
        os.fsync(self._descriptor)
        self._size += len(content)

    def file_of(self, step: int) -> Path:
        """Where the records of a step are."""
        return file_of(self._folder, step)


def steps_in(folder: Path) -> list[int]:
    """Steps that have a file, ascending; other names are ignored."""
    files = [each for each in folder.glob("step_*.msgpack") if STEP_NAME.fullmatch(each.stem)]
    return sorted(step for each in files if file_of(folder, step := int(each.stem[5:])) == each)


def read_records(folder: Path, step: int) -> tuple[list[JournalRecord], int]:
    """The whole records of a step, and the bytes of a torn tail; changes nothing."""
    file = file_of(folder, step)
    content = file.read_bytes() if file.exists() else b""
    records, good = _decoded(content)
    return records, len(content) - good


def file_of(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}.msgpack"


def _encoded(record: JournalRecord) -> bytes:
    kind, content = record
    return HEADER.pack(len(content), crc32(content, kind), kind) + content


def _decoded(content: bytes) -> tuple[list[JournalRecord], int]:
    records: list[JournalRecord] = []
    good = 0
    while (record := _record_at(content, good)) is not None:
        records.append(record)
        good += HEADER.size + len(record.content)
    return records, good


def _record_at(content: bytes, start: int) -> JournalRecord | None:
    """The whole record that begins there."""
    if start + HEADER.size > len(content):
        return None
    size, checksum, kind = HEADER.unpack_from(content, start)
    end = start + HEADER.size + size
    # A power cut may leave zeros behind the last record: no record is empty.
    if not size or end > len(content):
        return None
    body = content[start + HEADER.size : end]
    return JournalRecord(kind, body) if crc32(body, kind) == checksum else None


def _has_record(content: bytes, start: int) -> bool:
    """Whether a whole record begins anywhere after `start`."""
    kinds = re.compile(b"[%c%c]" % (GROUP, DROPPED)).finditer(content, start + HEADER.size)
    return any(_record_at(content, each.end() - HEADER.size) for each in kinds)
