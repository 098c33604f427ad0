"""Every outage of a small disk makes writing fail and ends completely (Linux only)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from real_programs import REPO, skip_without_mounting

from tools.small_disk import MOUNTING

OUTAGES = """
import errno, sys
from pathlib import Path
from tools.small_disk import LOCAL_OUTAGES, SmallDisk

disk_folder = Path(sys.argv[1])
assert SmallDisk(disk_folder, disk_folder).outages == LOCAL_OUTAGES
with SmallDisk(disk_folder, disk_folder / "weights") as disk:
    disk.folder.mkdir()
    print("before the first version", disk.begin("full"))
    version, new = disk.folder / "step_00000001", disk.folder / "new"
    version.mkdir()
    for outage in disk.outages:
        began = disk.begin(outage)
        try:
            new.write_bytes(bytes(1 << 20))
            result = "written"
        except OSError as error:
            result = errno.errorcode[error.errno]
        print(outage, began, result, version.exists())
        if outage in ("empty", "full"):
            new.unlink()
        disk.end(outage)
        new.write_bytes(bytes(1 << 20))
        new.unlink()
    with new.open("wb"):
        print("a file is written", disk.begin("read-only"))
    disk.begin("empty")
    new.write_bytes(b"")
    try:
        disk.end("empty")
    except OSError as error:
        print(errno.errorcode[error.errno])
"""


def test_outages_of_a_small_disk_begin_and_end(tmp_path: Path) -> None:
    skip_without_mounting()
    folder = tmp_path / "nas"
    command = [*MOUNTING, sys.executable, "-c", OUTAGES, str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=REPO, check=False)
    assert ended.stdout.splitlines() == [
        "before the first version False",
        "away True ENOENT False",
        "empty True written False",
        "full True ENOSPC True",
        "read-only True EROFS True",
        "a file is written False",
        "ENOTEMPTY",
    ], ended.stderr
    assert not any(folder.iterdir())
