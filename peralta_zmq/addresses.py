"""Addresses of servers: host names, listening sockets, and files with their passwords (tokens)."""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from peralta_zmq.errors import NO_MODES, ConfigError

HOST_NAME = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")


def listen(host: str, port: int, *, host_setting: str) -> socket.socket:
    """A listening socket; OSError for a used port, ConfigError for another unusable address."""
    name = host.strip("[]")
    family = socket.AF_INET6 if ":" in name else socket.AF_INET
    dualstack = ":" in name and socket.has_dualstack_ipv6()
    try:
        return socket.create_server((name, port), family=family, dualstack_ipv6=dualstack)
    except (OSError, UnicodeError, OverflowError) as error:  # OverflowError: a port above 65535
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise
        raise ConfigError(
            f"{host_setting} {host}, port {port} cannot be used ({error}); choose another"
        ) from None


def is_loopback(host: str) -> bool:
    """Whether a server on `host` is reachable from this machine only."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a host name, a network interface, or *
        return False


def host_of(text: str) -> str:
    """A host name or IP address, without the brackets of IPv6. Raises ValueError if it is none."""
    host = "0.0.0.0" if text == "*" else re.sub(r"^\[(.*)\]$", r"\1", text)
    with suppress(ValueError):
        return f"{ipaddress.ip_address(host)}"
    if not HOST_NAME.fullmatch(host):
        raise ValueError("should be only the name (in ASCII) or the IP address of a machine")
    return host


def with_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_and_port(address: str, *, option: str, default_port: int | None = None) -> tuple[str, int]:
    """Host and port of http://HOST:PORT; ConfigError that names `option` for another form."""
    with suppress(ValueError):
        parts = urlsplit(address)
        host = host_of(parts.hostname or "")
        port = parts.port or default_port
        if parts.scheme == "http" and port and not (parts.path.strip("/") or parts.query):
            return host, port
    raise ConfigError(f"{option} '{address}' is not of the form http://HOST:PORT")


def read_private_token(file: str | None, *, option: str = "security.token_file") -> str | None:
    """The password in `file`; ConfigError if others may read the file or it is short."""
    if file is None:
        return None
    path = Path(file).expanduser()
    try:
        mode = path.stat().st_mode & 0o777
        token = path.read_text("utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option} {path} cannot be read ({error})") from None
    if mode & 0o077:
        raise ConfigError(f"{option} {path} may be read by others; chmod 600 {path}, {NO_MODES}")
    if len(token) < 16 or not token.isascii():
        raise ConfigError(
            f"{option} {path} holds a weak password; make one: openssl rand -hex 32 > {path}"
        )
    return token
