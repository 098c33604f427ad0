"""The limit of open files of this process: raising it, and the error text when it is reached.

Every connection to a port of the process is an open file, also that of a stranger. At the limit the
process can neither open a file nor accept a connection.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import stat
from collections import Counter

# Wanted limits, the first that the operating system permits is set: macOS permits 10,240.
WANTED = (65_536, 10_240)


def raise_limit() -> None:
    """Raise the soft limit of open files, often 1,024, as far as the hard limit permits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in WANTED:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if soft == resource.RLIM_INFINITY or limit <= soft:
            return
        with contextlib.suppress(OSError, ValueError):
            return resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def failure_text(error: OSError) -> str:
    """The reason why a file was not written, with the remedy for a full disk or too many files."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{error.strerror}; make room for it"
    if error.errno != errno.EMFILE:
        return error.strerror or str(error)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    connections = connections_by_port(limit)
    ports = ", ".join(f"{count} to port {port}" for port, count in connections.most_common())
    return (
        f"{error.strerror}: the limit of this process is {limit}, and {connections.total()} are "
        f"connections ({ports}); close them, or start it with a higher limit (ulimit -n)"
    )


def connections_by_port(limit: int) -> Counter[int]:
    """Number of connections to each port that this process listens on, without opening a file.

    `limit` is that of open files, whose numbers are below it.
    """
    listening, connected = set[int](), Counter[int]()
    for descriptor in range(limit):
        with contextlib.suppress(OSError):  # not open, or closed meanwhile by another thread
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            opened = socket.socket(fileno=descriptor)
            try:
                if opened.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                port = int(opened.getsockname()[1])
                if opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    listening.add(port)
                else:
                    connected[port] += 1
            finally:
                opened.detach()  # the file belongs to another part of the process
    return Counter({port: count for port, count in connected.items() if port in listening})
