"""First process of the guest: assembles the root file system, then runs one scenario.

The root is the host's, read-only, under the unpacked packages and a writable layer in memory.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

from lab.commands import mount, run, send_event


def main() -> None:
    """Run the scenario named in the job; its events go to the host, then the guest powers off."""
    job = json.loads(Path(sys.argv[1], "job.json").read_text("utf-8"))
    try:
        build(Path(job["cache"]))
        send_event(event="booted", seconds=float(Path("/proc/uptime").read_text().split()[0]))
        from lab import scenarios  # not earlier: under the host's root it would find no package

        getattr(scenarios, job["scenario"])(**job["arguments"])
        send_event(event="finished")
    except BaseException:  # noqa: BLE001 - sent to the host, which fails the test
        send_event(event="failed", traceback=traceback.format_exc())
    run("poweroff", "-f")


def build(cache: Path) -> None:
    """Mount the overlay of packages and host root, then the device file systems."""
    mount("tmpfs", "/mnt", "tmpfs")
    for name in ("packages", "upper", "work", "root"):
        os.mkdir(f"/mnt/{name}")
    modules = next((cache / "usr/lib/uml/modules").iterdir())
    run(cache / "usr/bin/busybox", "insmod", modules / "kernel/fs/overlayfs/overlay.ko")
    mount("packages", "/mnt/packages", "hostfs", str(cache).lstrip("/"))
    layers = "lowerdir=/mnt/packages:/,upperdir=/mnt/upper,workdir=/mnt/work"
    mount("overlay", "/mnt/root", "overlay", layers)
    os.chroot("/mnt/root")
    os.chdir("/")
    os.environ |= {"PATH": "/usr/sbin:/usr/bin", "HOME": "/tmp", "OMP_NUM_THREADS": "1"}
    mount("proc", "/proc", "proc")
    mount("sysfs", "/sys", "sysfs")
    mount("devtmpfs", "/dev", "devtmpfs")
    for folder in ("/run", "/dev/shm"):
        os.makedirs(folder, exist_ok=True)
        mount("tmpfs", folder, "tmpfs")
    os.makedirs("/usr/lib/modules", exist_ok=True)
    os.symlink(f"/usr/lib/uml/modules/{modules.name}", f"/usr/lib/modules/{modules.name}")
    script = Path("/run/modprobe")  # called by the kernel to load modules
    script.write_text('#!/bin/sh\nexec /usr/bin/busybox modprobe "$@"\n')
    script.chmod(0o755)
    Path("/proc/sys/kernel/modprobe").write_text(str(script))


if __name__ == "__main__":
    main()
