"""bin/doctor keygen: the files it writes and the lines it prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from peralta_zmq.errors import ConfigError
from peralta_zmq.operate import doctor
from peralta_zmq.wire import generator_keys


def keygen(*arguments: str) -> None:
    assert doctor.main(["keygen", *arguments]) == 0


def test_pair_for_the_trainer_and_one_for_the_generator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "keys"
    keygen("--security.keys", str(folder), "--generator.name", "ann")
    assert generator_keys(folder, "ann").name == "ann"
    assert "copy trainer.public and ann.secret" in capsys.readouterr().out
    keygen("--security.keys", str(folder), "--generator.name", "bob")
    assert "trainer: kept" in capsys.readouterr().out


def test_folder_must_be_named() -> None:
    with pytest.raises(ConfigError, match=r"--security\.keys"):
        keygen("--generator.name", "ann")


def test_generator_is_not_called_trainer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="choose another"):
        keygen("--security.keys", str(tmp_path), "--generator.name", "trainer")
