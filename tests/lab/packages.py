"""The Debian packages of the lab, unpacked into a cache folder and never installed."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

CACHE = Path(os.environ.get("PERALTA_LAB", Path.home() / ".cache" / "peralta-lab"))
PACKAGES = {
    "guest": "user-mode-linux busybox-static iproute2 libbpf1 libelf1 libmnl0 libxtables12 libcap2 "
    "dmsetup libdevmapper1.02.1 e2fsprogs",
    "nfs": "nfs-kernel-server nfs-common rpcbind libwrap0 libtirpc3 libtirpc-common "
    "libevent-core-2.1-7 libkeyutils1 libnfsidmap1 libgssapi-krb5-2",
    "cifs": "cifs-utils libcap-ng0 samba samba-libs libpopt0 libtalloc2 libtevent0 libtdb1 libldb2 "
    "libwbclient0 libavahi-client3 libavahi-common3 libbsd0 libmd0 libcups2 libicu72 libjansson4 "
    "libldap-2.5-0 libsasl2-2 libdbus-1-3 libpam0g",
    "sshfs": "sshfs openssh-sftp-server libfuse3-3 libglib2.0-0",
}
NAMES = [name for names in PACKAGES.values() for name in names.split()]
MERGED = ("bin", "sbin", "lib", "lib64")  # links into /usr on a merged-/usr system
APT_SECONDS = 300


class LabMissing(Exception):
    """The packages cannot be downloaded or unpacked; the message has the reason."""


def unpacked() -> Path:
    """A folder with all packages unpacked as a root file system, created once.

    Raises LabMissing.
    """
    CACHE.mkdir(parents=True, exist_ok=True)
    root = CACHE / hashlib.sha256(" ".join(NAMES).encode()).hexdigest()[:12]
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not root.exists():
            if not shutil.which("apt-get") or not shutil.which("dpkg"):
                raise LabMissing("the lab needs Debian's apt-get and dpkg")
            with tempfile.TemporaryDirectory(dir=CACHE) as temporary:
                debs, tree = Path(temporary, "debs"), Path(temporary, "tree")
                _download(debs)
                _unpack(debs, tree)
                tree.rename(root)
    return root


def _download(folder: Path) -> None:
    folder.mkdir()
    command = ["apt-get", "download", *NAMES]
    if _run(command, folder).returncode == 0:
        return
    updated = _run(["apt-get", "update"], folder)  # a new machine has no package lists
    downloaded = _run(command, folder)
    if downloaded.returncode:
        words = (downloaded.stderr or updated.stderr).strip().splitlines()
        raise LabMissing(f"apt-get download: {words[-1] if words else 'failed'}")


def _unpack(debs: Path, tree: Path) -> None:
    tree.mkdir()
    for package in sorted(debs.glob("*.deb")):
        result = _run(["dpkg", "-x", str(package), str(tree)], tree)
        if result.returncode:
            raise LabMissing(f"dpkg -x {package.name}: {result.stderr.strip()}")
    for name in MERGED:
        if (tree / name).is_dir():
            shutil.copytree(tree / name, tree / "usr" / name, symlinks=True, dirs_exist_ok=True)
            shutil.rmtree(tree / name)


def _run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=APT_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise LabMissing(f"{command[0]} {command[1]} took over {APT_SECONDS} s") from None
