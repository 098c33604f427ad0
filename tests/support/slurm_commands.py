"""Commands of Slurm as shell scripts, for tests without a cluster."""

from __future__ import annotations

import os
import time
from datetime import datetime
from pathlib import Path

import pytest


class SlurmCommands:
    """Scripts on PATH: the test writes the queue, and reads the calls of sbatch and scancel.

    sbatch numbers jobs 1, 2, ... and adds none to the queue; scancel without a signal removes jobs
    from it.
    """

    def __init__(self, folder: Path, patched: pytest.MonkeyPatch) -> None:
        self._folder, self._calls = folder / "commands", folder / "calls"
        self._queue = folder / "queue"
        self._folder.mkdir()
        self.set_queue()
        self.write("sbatch", f"""\
echo sbatch "$@" >> {self._calls}
case "$*" in *--test-only*) exit ;; esac
echo >> {folder}/ids; wc -l < {folder}/ids""")  # fmt: skip
        self.write("scancel", f"""\
echo scancel "$@" >> {self._calls}
case "$1" in --batch) exit ;; esac
for job; do
  grep -v "^$(echo "$job" | tr _ '|')|" {self._queue} > {self._queue}.new
  mv {self._queue}.new {self._queue}
done""")  # fmt: skip
        self.write("squeue", f"cat {self._queue}")
        patched.setenv("PATH", f"{self._folder}:{os.environ['PATH']}")

    def write(self, name: str, body: str) -> None:
        """Replace the script of a command."""
        (self._folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (self._folder / name).chmod(0o755)

    def set_queue(self, *lines: str) -> None:
        """Set the output of squeue: lines ID|TASK|STATE|NODE|REASON, of jobs two minutes old."""
        start = datetime.fromtimestamp(time.time() - 120).isoformat(timespec="seconds")
        self._queue.write_text("".join(f"{line}|{start}\n" for line in lines))

    def take_calls(self) -> list[str]:
        """The calls since the last one of this method."""
        calls = self._calls.read_text().splitlines() if self._calls.exists() else []
        self._calls.unlink(missing_ok=True)
        return calls
