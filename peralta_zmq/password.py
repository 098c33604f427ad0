"""A password in a file that only its owner reads. Knows files; knows nothing of who asks for it."""

from __future__ import annotations

from pathlib import Path

from peralta_zmq.errors import ConfigError


def read_token(file: str | None, *, option: str = "weights.token_file") -> str | None:
    """The password in a file. Raises ConfigError when others may read it, or it is short."""
    if file is None:
        return None
    path = Path(file).expanduser()
    try:
        mode, token = path.stat().st_mode & 0o777, path.read_text("utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option} {path} cannot be read ({error})") from None
    if mode & 0o077:
        raise ConfigError(f"{option} {path} may be read by others; chmod 600 {path}")
    if len(token) < 16 or not token.isascii():
        raise ConfigError(
            f"{option} {path} holds a weak password; make one: openssl rand -hex 32 > {path}"
        )
    return token
