"""The write-ahead log of accepted groups, one file per optimizer step.

A group is on disk before it counts. Restart = newest checkpoint + the journal replayed.
Knows frames of bytes; knows nothing of what they say.
"""

from __future__ import annotations

import errno
import logging
import os
import struct
import zlib
from pathlib import Path

from peralta_zmq import durable
from peralta_zmq.errors import JournalError

RECORD = struct.Struct("<II")  # bytes, crc32
logger = logging.getLogger(__name__)


class Journal:
    """Appends records to `folder/step_N.msgpack`. Use with `closing`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._step = -1
        self._descriptor = -1
        folder.mkdir(parents=True, exist_ok=True)

    def append(self, step: int, frame: bytes) -> None:
        """Make one record durable. Raises JournalError when the disk refuses."""
        try:
            if step != self._step:
                self._open(step)
            record = RECORD.pack(len(frame), zlib.crc32(frame)) + frame
            if os.write(self._descriptor, record) < len(record):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._descriptor)
        except OSError as error:
            raise JournalError(f"cannot write {self._file(step)}: {error.strerror}") from None

    def read(self, step: int) -> list[bytes]:
        """The whole records of a step; a torn tail is cut off the file and reported."""
        file = self._file(step)
        if not file.exists():
            return []
        content = file.read_bytes()
        frames, good = _records(content)
        if good < len(content):
            logger.warning("journal cut: file=%s lost_bytes=%d", file.name, len(content) - good)
            os.truncate(file, good)
        return frames

    def prune(self, oldest: int) -> None:
        """Remove the files of steps before `oldest`."""
        for file in self._folder.glob("step_*.msgpack"):
            if int(file.stem[5:]) < oldest:
                file.unlink()

    def close(self) -> None:
        """Close the open file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _open(self, step: int) -> None:
        self.close()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._descriptor = os.open(self._file(step), flags, 0o644)
        self._step = step
        durable.sync_folder(self._folder)

    def _file(self, step: int) -> Path:
        return self._folder / f"step_{step:06d}.msgpack"


def _records(content: bytes) -> tuple[list[bytes], int]:
    frames: list[bytes] = []
    good = 0  # a power cut may leave zeros behind it, which have the checksum of an empty frame
    while good + RECORD.size <= len(content):
        size, checksum = RECORD.unpack_from(content, good)
        frame = content[good + RECORD.size : good + RECORD.size + size]
        if not size or len(frame) < size or zlib.crc32(frame) != checksum:
            break
        frames.append(frame)
        good += RECORD.size + size
    return frames, good
