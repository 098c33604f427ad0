"""Files with the password of an HTTP server."""

from __future__ import annotations

from pathlib import Path

import pytest

from peralta_zmq.addresses import read_private_token
from peralta_zmq.errors import ConfigError

TOKEN = "0123456789abcdef"


@pytest.mark.parametrize(
    "mode, text, reason",
    [
        (0o644, TOKEN, "chmod 600 .*, or .*FAT.* copy it"),
        (0o600, "short", "weak password"),
        (None, "", "cannot be read"),
    ],
)
def test_unsafe_token_file_is_refused(
    tmp_path: Path, mode: int | None, text: str, reason: str
) -> None:
    file = tmp_path / "token"
    if mode is not None:
        file.write_text(text)
        file.chmod(mode)
    with pytest.raises(ConfigError, match=rf"^security\.token_file .*{reason}"):
        read_private_token(str(file))


def test_private_token_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.touch(0o600)
    file.write_text(TOKEN + "\n")
    assert read_private_token(str(file)) == TOKEN
    assert read_private_token(None) is None
