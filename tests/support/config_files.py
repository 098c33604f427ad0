"""Load settings from a command line or a TOML text, for the tests of config/."""

from __future__ import annotations

from pathlib import Path

import pytest

from peralta_zmq.config import Config, load_config
from peralta_zmq.errors import ConfigError

REPO = Path(__file__).resolve().parents[2]
CONFIGS = REPO / "configs"


def load(*arguments: str) -> Config:
    return load_config("bin/trainer", list(arguments))


def refusal(*arguments: str) -> str:
    """Return the error message for these arguments, which must be one line."""
    with pytest.raises(ConfigError) as caught:
        load(*arguments)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def load_toml(folder: Path, text: str, *arguments: str) -> Config:
    """Load a configuration file with this text."""
    return load(*toml_arguments(folder, text), *arguments)


def toml_refusal(folder: Path, text: str, *arguments: str) -> str:
    """Return the error message for a configuration file with this text."""
    return refusal(*toml_arguments(folder, text), *arguments)


def toml_arguments(folder: Path, text: str) -> tuple[str, str]:
    (folder / "given.toml").write_text(text, encoding="utf-8")
    return "@", str(folder / "given.toml")
