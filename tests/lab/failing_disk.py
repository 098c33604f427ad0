"""Power cuts of one disk while the guest continues: device mapper makes the disk fail.

Data that ext4 had not written is lost with its cache, as in a real power cut. Runs in the guest.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from lab.commands import DISKS, mount, run, unmount, until

NAME = "cut"
DEVICE = f"/dev/mapper/{NAME}"


def prepare() -> None:
    """Put a device-mapper layer that can fail over the big disk."""
    run("modprobe", "dm_mod")
    run("dmsetup", "--noudevsync", "--noudevrules", "create", NAME, "--table", _table(good=True))
    run("dmsetup", "mknodes")


def connect(folder: Path) -> None:
    """Restore power: mount the disk, which replays the ext4 journal."""
    _switch(good=True)
    folder.mkdir(parents=True, exist_ok=True)
    mount(DEVICE, folder, "ext4", "commit=1")


def cut_power() -> None:
    """Cut the power: no write reaches the disk from now on."""
    _switch(good=False)


def disconnect(folder: Path) -> None:
    """Unmount the disk; cached writes are lost."""

    def unmounted() -> bool:
        with contextlib.suppress(OSError):
            unmount(folder, at_once=False)
            return True
        return False

    until(unmounted, f"{folder} is unmounted")


def _switch(*, good: bool) -> None:
    layer = ["dmsetup", "--noudevsync", "--noudevrules"]
    run(*layer, "load", NAME, "--table", _table(good=good))
    run(*layer, "suspend", "--noflush", "--nolockfs", NAME)  # a flush would write the cache
    run(*layer, "resume", NAME)


def _table(*, good: bool) -> str:
    sectors = int(Path("/sys/block", Path(DISKS["big"]).name, "size").read_text())
    return f"0 {sectors} linear {DISKS['big']} 0" if good else f"0 {sectors} error"
