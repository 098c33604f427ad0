"""Power cuts of one disk of a guest that goes on: under ext4 the device becomes one that fails.

What the file system had not written is then lost with its cache, as in a real cut. Knows device
mapper; runs in the guest.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from lab.commands import DISKS, mount, run, unmount, until

NAME = "cut"
DEVICE = f"/dev/mapper/{NAME}"


def prepare() -> None:
    """Put a layer that can fail over the big disk."""
    run("modprobe", "dm_mod")
    run(
        "dmsetup",
        "--noudevsync",
        "--noudevrules",
        "create",
        NAME,
        "--table",
        _table(good=True),
    )
    run("dmsetup", "mknodes")


def connect(folder: Path) -> None:
    """Power is back: mount, and replay the journal."""
    _switch(good=True)
    folder.mkdir(parents=True, exist_ok=True)
    mount(DEVICE, folder, "ext4", "commit=1")


def power() -> None:
    """From now on nothing reaches the disk."""
    _switch(good=False)


def disconnect(folder: Path) -> None:
    """Unmount, dropping what was cached."""

    def unmounted() -> bool:
        with contextlib.suppress(OSError):
            unmount(folder, at_once=False)
            return True
        return False

    until(unmounted, f"{folder} is unmounted")


def _switch(*, good: bool) -> None:
    layer = ["dmsetup", "--noudevsync", "--noudevrules"]
    run(*layer, "load", NAME, "--table", _table(good=good))
    run(*layer, "suspend", "--noflush", "--nolockfs", NAME)  # flushing would be no cut
    run(*layer, "resume", NAME)


def _table(*, good: bool) -> str:
    sectors = int(Path("/sys/block", Path(DISKS["big"]).name, "size").read_text())
    return f"0 {sectors} linear {DISKS['big']} 0" if good else f"0 {sectors} error"
