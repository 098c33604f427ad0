"""A small disk for one folder of a run that is full, read-only, empty or away on demand.

It is a tmpfs (Linux). Any user may mount one in a mount namespace: put the words of MOUNTING before
the command of a program that uses it.
"""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

MOUNTING = ("unshare", "--map-root-user", "--mount")
MEGABYTES = 256  # a soak of the embedded model needs less than 100
OUTAGES = ("away", "empty", "full", "read-only")
LOCAL_OUTAGES = ("full", "read-only")  # outages of a disk that is no network mount


class SmallDisk:
    """A file system in memory, mounted on `mount_point`. Use with `with`; its files end with it.

    A run writes its steps to `folder`: the mount point, or a folder in it, which can be away.
    """

    def __init__(self, mount_point: Path, folder: Path) -> None:
        self.folder, self._mount_point = folder, mount_point
        self.outages = LOCAL_OUTAGES if folder == mount_point else OUTAGES
        self._hidden, self._filler = mount_point / "hidden", mount_point / "filler"

    def begin(self, outage: str) -> bool:
        """Begin one of `outages`; False if it is impossible now.

        Impossible are an outage before the first step, because a new run may reject its folder, and
        a read-only disk while a file is written.
        """
        if not any(self.folder.glob("step_*")):
            return False
        if outage == "read-only":
            return not self._remount("ro")
        if outage == "full":
            with self._filler.open("wb", buffering=0) as filler, contextlib.suppress(OSError):
                while True:
                    filler.write(bytes(1 << 20))
        else:
            self.folder.rename(self._hidden)
        if outage == "empty":  # as a mount point without its mount
            self.folder.mkdir()
        return True

    def end(self, outage: str) -> None:
        """End an outage that `begin` has begun.

        Raises OSError if a program has written to the empty folder.
        """
        if outage == "empty":
            self.folder.rmdir()
        if outage == "read-only":
            self._remount("rw")
        elif outage == "full":
            self._filler.unlink()
        else:
            self._hidden.rename(self.folder)

    def __enter__(self) -> SmallDisk:
        self._mount_point.mkdir(parents=True)
        options = f"size={MEGABYTES}m,mode=755"
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self._mount_point)]
        if subprocess.run(command, check=False).returncode:
            raise SystemExit(
                f"a disk cannot be mounted on {self._mount_point}; start the command with "
                f"{' '.join(MOUNTING)}"
            )
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run(["umount", "--lazy", str(self._mount_point)], check=True)

    def _remount(self, mode: str) -> int:
        command = ["mount", "-o", f"remount,{mode}", str(self._mount_point)]
        return subprocess.run(command, check=False, capture_output=True).returncode
