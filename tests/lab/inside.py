"""The guest's first process: file systems, networks, servers, workers; then one scenario.

Three hosts share one kernel: the server (the first network namespace) with two disks, and the
clients `a` and `b`, each in a namespace of its own behind its own cable. The host's files show
through read-only; what is written goes to memory, a disk, or the folder of the machine.
Knows commands; knows nothing of the store (see worker).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)
CLONE_NEWNET = 0x40000000
CLIENTS = {"a": ("10.77.1.1", "10.77.1.2"), "b": ("10.77.2.1", "10.77.2.2")}  # server, client
DISKS = {"big": "/dev/ubda", "small": "/dev/ubdb"}
HASHES = ("hmac", "md5", "sha256_generic", "sha512_generic", "cmac")
CIFS_MODULES = (*HASHES, "aes_generic", "ccm", "gcm", "cifs")
SMB_CONF = """[global]
  server role = standalone server
  map to guest = bad user
  guest account = root
  log level = 0
  load printers = no
  disable spoolss = yes
  interfaces = 10.77.1.1/24 10.77.2.1/24
  server min protocol = SMB3
[srv]
  path = {folder}
  guest ok = yes
  guest only = yes
  read only = no
  force user = root
"""
READY_SECONDS = 30
ANSWER_SECONDS = 120
PROTOCOLS = ("nfs3", "nfs4", "cifs", "sshfs")


def main() -> None:
    """Run the scenario that the job names; the host reads what is told, then the power goes."""
    job = json.loads(Path(sys.argv[1], "job.json").read_text("utf-8"))
    try:
        build(Path(job["cache"]))
        tell(event="booted", seconds=uptime())
        sys.path[:0] = [job["repo"], str(Path(__file__).parent.parent)]
        from lab import scenarios

        getattr(scenarios, job["scenario"])(**job["arguments"])
        tell(event="finished", seconds=uptime())
    except BaseException:  # noqa: BLE001 - told to the host, which fails the test
        tell(event="failed", traceback=traceback.format_exc())
    sys.stdout.flush()
    time.sleep(0.2)  # the console is a pipe of the host
    run("busybox", "poweroff", "-f")


def tell(**fields: Any) -> None:
    """One line to the host."""
    print("@" + json.dumps(fields), flush=True)


def uptime() -> float:
    """Seconds since the kernel started."""
    return float(Path("/proc/uptime").read_text().split()[0])


def build(cache: Path) -> None:
    """The packages over the host's root, both under a root in memory; then devices."""
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
    script = Path("/run/modprobe")  # for what the kernel asks for by itself
    script.write_text('#!/bin/sh\nexec /usr/bin/busybox modprobe "$@"\n')
    script.chmod(0o755)
    Path("/proc/sys/kernel/modprobe").write_text(str(script))


def mount(what: str, where: str | Path, kind: str, options: str = "") -> None:
    """The system call: there is no /bin/mount yet. Raises OSError."""
    arguments = (what.encode(), str(where).encode(), kind.encode(), 0, options.encode())
    if LIBC.mount(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), f"mount {kind} {where} {options}")


def run(*command: str | Path, check: bool = True) -> str:
    """A command's output. Raises RuntimeError with what it said."""
    words = [str(word) for word in command]
    if words[0] in ("modprobe", "insmod", "poweroff", "nsenter"):
        words.insert(0, "busybox")
    result = subprocess.run(
        words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ANSWER_SECONDS
    )
    if check and result.returncode:
        raise RuntimeError(f"{' '.join(words)}: {result.returncode}: {result.stderr.strip()}")
    return result.stdout


def until(ready: Any, what: str, seconds: float = READY_SECONDS) -> None:
    """Return when `ready()` is true. Raises TimeoutError that says what never came."""
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            raise TimeoutError(f"after {seconds} s still not: {what}")
        time.sleep(0.05)


def cables() -> None:
    """Two clients, each with its own cable to the server."""
    run("modprobe", "veth")
    run("ip", "link", "set", "lo", "up")
    for name, (server, client) in CLIENTS.items():
        run("ip", "netns", "add", name)
        run("ip", "link", "add", f"to-{name}", "type", "veth", "peer", "eth0", "netns", name)
        run("ip", "address", "add", f"{server}/24", "dev", f"to-{name}")
        run("ip", "link", "set", f"to-{name}", "up")
        run("ip", "-n", name, "address", "add", f"{client}/24", "dev", "eth0")
        run("ip", "-n", name, "link", "set", "eth0", "up")
        run("ip", "-n", name, "link", "set", "lo", "up")


def plug(state: str, clients: str = "ab") -> None:
    """Pull (`down`) or put back (`up`) the clients' cables at the server's end."""
    for name in clients:
        run("ip", "link", "set", f"to-{name}", state)


def limit(client: str, mbit: int) -> None:
    """Make a client's cable slow, both ways; 0 makes it fast again."""
    run("modprobe", "sch_netem")
    ends = ([], ["-n", client])
    for end, device in zip(ends, (f"to-{client}", "eth0"), strict=True):
        run("tc", *end, "qdisc", "del", "dev", device, "root", check=False)
        if mbit:
            rate = ["root", "netem", "rate", f"{mbit}mbit", "limit", "10000"]
            run("tc", *end, "qdisc", "add", "dev", device, *rate)


def disk(name: str) -> Path:
    """Mount one of the machine's ext4 disks."""
    folder = Path(f"/srv/{name}")
    folder.mkdir(exist_ok=True)
    mount(DISKS[name], folder, "ext4", "commit=1")
    return folder


def serve(protocol: str, folder: Path) -> None:
    """Start the server of a folder, once for each kind."""
    kind = {"nfs3": _serve_nfs, "nfs4": _serve_nfs, "cifs": _serve_cifs, "sshfs": _serve_sftp}
    kind[protocol](folder)


def _serve_nfs(folder: Path) -> None:
    if Path("/proc/fs/nfsd/versions").exists():
        return
    with Path("/etc/passwd").open("a") as users:
        users.write("_rpc:x:5001:65534::/run/rpcbind:/usr/sbin/nologin\n")
        users.write("statd:x:5002:65534::/var/lib/nfs:/usr/sbin/nologin\n")
    for made in ("/run/rpcbind", "/var/lib/nfs/v4recovery", "/run/sendsigs.omit.d"):
        os.makedirs(made, exist_ok=True)
    for made in ("etab", "rmtab", "xtab"):
        Path("/var/lib/nfs", made).touch()
    Path("/etc/exports").write_text(f"{folder} *(rw,sync,no_root_squash,no_subtree_check,fsid=0)\n")
    run("modprobe", "nfsd")
    mount("nfsd", "/proc/fs/nfsd", "nfsd")
    run("rpcbind", "-w")
    run("exportfs", "-r")
    run("rpc.nfsd", "-G", "10", "-L", "10", "4")
    run("rpc.mountd")
    Path("/proc/fs/nfsd/v4_end_grace").write_text("Y")  # nobody was there before


def _serve_cifs(folder: Path) -> None:
    for made in (
        "/run/samba/ncalrpc",
        "/var/lib/samba/private",
        "/var/log/samba",
        "/var/cache/samba",
    ):
        os.makedirs(made, exist_ok=True)
    Path("/run/smb.conf").write_text(SMB_CONF.format(folder=folder))
    run("smbd", "-D", "-s", "/run/smb.conf")
    until(lambda: _answers(445), "smbd listens on port 445")


def _serve_sftp(folder: Path) -> None:
    del folder  # sftp shows the whole tree
    listening = socket.create_server(("0.0.0.0", 2222))
    if os.fork() == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        while True:
            connection, _ = listening.accept()
            with connection:
                subprocess.Popen(
                    ["/usr/lib/openssh/sftp-server"], stdin=connection, stdout=connection
                )
    listening.close()


def _answers(port: int) -> bool:
    return f":{port:04X} " in Path("/proc/net/tcp").read_text()  # there is no IPv6


def join(client: str, protocol: str, folder: Path, options: str = "") -> Path:
    """Mount the server's folder on a client; the path there. `options` are sshfs's own."""
    server, here = CLIENTS[client]
    where = Path(f"/mnt/{client}-{protocol}")
    where.mkdir(exist_ok=True)
    with namespace(client):
        if protocol == "nfs3":
            run("mount.nfs", f"{server}:{folder}", where, "-o", "vers=3,nolock")
        elif protocol == "nfs4":
            run("mount.nfs4", f"{server}:/", where, "-o", f"vers=4.2,clientaddr={here}")
        elif protocol == "cifs":
            for module in CIFS_MODULES:
                run("modprobe", module)
            run("mount.cifs", f"//{server}/srv", where, "-o", "guest,vers=3.1.1,uid=0,gid=0")
        else:
            run("modprobe", "fuse")
            options = f"directport=2222,{options}".rstrip(",")
            run("sshfs", "-o", options, f"{server}:{folder}", where)
    return where


def leave(where: Path) -> None:
    """Unmount at once, whatever is open: an empty local folder is left."""
    if LIBC.umount2(str(where).encode(), 2):  # MNT_DETACH
        raise OSError(ctypes.get_errno(), f"umount {where}")


def leave_now(where: Path) -> None:
    """Unmount what nobody uses any more. Raises OSError when somebody does."""
    if LIBC.umount2(str(where).encode(), 0):
        raise OSError(ctypes.get_errno(), f"umount {where}")


@contextlib.contextmanager
def namespace(client: str) -> Iterator[None]:
    """Be on a client for a while."""
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    _enter(client)
    try:
        yield
    finally:
        LIBC.setns(home, CLONE_NEWNET)
        os.close(home)


def _enter(client: str) -> None:
    away = os.open(f"/run/netns/{client}", os.O_RDONLY)
    if LIBC.setns(away, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"setns {client}")
    os.close(away)


class Worker:
    """A process on a client (or the server) that uses the store: ask, then await the answer."""

    def __init__(self, client: str | None = None) -> None:
        from lab import worker  # torch: imported once, before the first fork

        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._commands)
            os.close(self._answers)
            if client:
                _enter(client)
            with os.fdopen(commands) as read, os.fdopen(answers, "w") as write:
                with contextlib.suppress(KeyboardInterrupt):
                    worker.work(read, write)
                write.flush()
                os._exit(0)
        os.close(commands)
        os.close(answers)
        self._rest = b""

    def ask(self, do: str, **arguments: Any) -> None:
        """Begin something (a function of `worker`)."""
        os.write(self._commands, json.dumps({"do": do, **arguments}).encode() + b"\n")

    def answer(self, seconds: float = ANSWER_SECONDS) -> dict[str, Any]:
        """What came of it; {"died": signal} when the process is no more."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self._rest:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._answers], [], [], left)[0]:
                raise TimeoutError(f"worker {self.pid} said nothing for {seconds} s")
            read = os.read(self._answers, 65536)
            if not read:
                status = os.waitpid(self.pid, 0)[1]
                return {"died": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0}
            self._rest += read
        line, self._rest = self._rest.split(b"\n", 1)
        return json.loads(line)

    def call(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Ask and await."""
        self.ask(do, **arguments)
        return self.answer()

    def kill(self) -> None:
        """SIGKILL; what it announced before can still be read."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def left(self) -> list[dict[str, Any]]:
        """Await its death; the whole answers that were not yet read."""
        os.waitpid(self.pid, 0)
        while read := os.read(self._answers, 65536):
            self._rest += read
        *lines, _ = self._rest.split(b"\n")
        return [json.loads(line) for line in lines]


if __name__ == "__main__":
    main()
