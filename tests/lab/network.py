"""Networks and network file systems of the guest: a server and two clients in one kernel.

The server is the initial network namespace; clients `a` and `b` have their own, each with a virtual
cable to the server, so their mounts share nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from lab.commands import LIBC, mount, run, until

CLIENTS = {"a": ("10.77.1.1", "10.77.1.2"), "b": ("10.77.2.1", "10.77.2.2")}  # server, client
CLONE_NEWNET = 0x40000000
SFTP_PORT = 2222
HASHES = ("hmac", "md5", "sha256_generic", "sha512_generic", "cmac")
CIFS_MODULES = (*HASHES, "aes_generic", "ccm", "gcm", "cifs")
SAMBA_FOLDERS = (
    "/run/samba/ncalrpc",
    "/var/lib/samba/private",
    "/var/log/samba",
    "/var/cache/samba",
)
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


def cables() -> None:
    """Create the two clients and their cables to the server."""
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
    """Disconnect (`down`) or connect (`up`) the clients' cables at the server."""
    for name in clients:
        run("ip", "link", "set", f"to-{name}", state)


def limit(client: str, mbit: int) -> None:
    """Limit the bandwidth of a client's cable in both directions; 0 removes the limit."""
    run("modprobe", "sch_netem")
    ends = ([], ["-n", client])
    for end, device in zip(ends, (f"to-{client}", "eth0"), strict=True):
        run("tc", *end, "qdisc", "del", "dev", device, "root", check=False)
        if mbit:
            rate = ["root", "netem", "rate", f"{mbit}mbit", "limit", "10000"]
            run("tc", *end, "qdisc", "add", "dev", device, *rate)


def serve(protocol: str, folder: Path) -> None:
    """Start the file server of a protocol for a folder."""
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
    Path("/proc/fs/nfsd/v4_end_grace").write_text("Y")  # no client has locks to reclaim


def _serve_cifs(folder: Path) -> None:
    for made in SAMBA_FOLDERS:
        os.makedirs(made, exist_ok=True)
    Path("/run/smb.conf").write_text(SMB_CONF.format(folder=folder))
    run("smbd", "-D", "-s", "/run/smb.conf")
    until(_smbd_listens, "smbd listens")


def _serve_sftp(folder: Path) -> None:
    del folder  # sftp serves the whole tree
    listening = socket.create_server(("0.0.0.0", SFTP_PORT))
    if os.fork() == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        while True:
            connection, _ = listening.accept()
            with connection:
                subprocess.Popen(
                    ["/usr/lib/openssh/sftp-server"], stdin=connection, stdout=connection
                )
    listening.close()


def _smbd_listens() -> bool:
    return ":01BD " in Path("/proc/net/tcp").read_text()  # port 445


def join(client: str, protocol: str, folder: Path, options: str = "") -> Path:
    """Mount the server's folder on a client; returns the path. `options` are for sshfs."""
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
            options = f"directport={SFTP_PORT},{options}".rstrip(",")
            run("sshfs", "-o", options, f"{server}:{folder}", where)
    return where


@contextlib.contextmanager
def namespace(client: str) -> Iterator[None]:
    """Switch this process to a client's namespace inside the block."""
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    enter(client)
    try:
        yield
    finally:
        LIBC.setns(home, CLONE_NEWNET)
        os.close(home)


def enter(client: str) -> None:
    """Switch this process to a client's namespace."""
    away = os.open(f"/run/netns/{client}", os.O_RDONLY)
    if LIBC.setns(away, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"setns {client}")
    os.close(away)
