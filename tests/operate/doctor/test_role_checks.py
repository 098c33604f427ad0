"""bin/doctor for both roles, and keygen: output, files and exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from peralta_zmq.config import load_config, write_resolved
from peralta_zmq.errors import ConfigError
from peralta_zmq.operate import doctor
from peralta_zmq.operate.doctor import role_checks
from peralta_zmq.operate.doctor.checks import Report
from peralta_zmq.wire import generator_keys
from tools.link_proxy import free_ports

Checks = tuple[int, dict[str, dict[str, Any]]]  # exit code, and the checks by name
Run = Callable[..., Checks]


@pytest.fixture
def settings(tmp_path: Path) -> list[str]:
    return ["--run.dir", str(tmp_path), "--wire.port", str(free_ports())]


@pytest.fixture
def run_doctor(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run bin/doctor; returns its exit code and its checks by name."""

    def run(*words: str) -> Checks:
        capsys.readouterr()
        code = doctor.main(["--json", *words])
        checks = json.loads(capsys.readouterr().out.splitlines()[-1])["checks"]
        return code, {check["name"]: check for check in checks}

    return run


def failed(checks: dict[str, dict[str, Any]]) -> list[str]:
    return [name for name, check in checks.items() if not check["ok"]]


def test_checks_of_a_trainer_pass(settings: list[str], run_doctor: Run) -> None:
    code, checks = run_doctor("--role", "trainer", *settings)
    assert failed(checks) == [] and code == 0
    assert list(checks) == ["config", "default", "ports", "versions", "device", "sleep", "reward",
                           "engine", "model", "training", "end token", "prompts", "weights",
                           "writing", "space", "speed"]  # fmt: skip
    assert "1.7 M parameters" in checks["model"]["detail"]
    assert "earns 1 in" in checks["reward"]["detail"]
    prompts = "held-out environment 'calculator': 250 prompts of at most 26 tokens"
    assert checks["prompts"]["detail"] == prompts
    assert checks["training"]["detail"].startswith("packed rows")


def test_checks_of_a_generator_pass_with_a_trainers_doctor(
    settings: list[str], run_doctor: Run, stack: ExitStack
) -> None:
    assert role_checks.check_trainer(load_config("doctor", settings), Report(), stack, serve=True)
    code, checks = run_doctor(*settings, "--role", "generator")
    assert failed(checks) == [] and code == 0
    assert list(checks) == ["config", "default", "versions", "device", "sleep", "reward", "engine",
                           "end token", "prompts", "reach", "probe", "clock", "burst", "weights",
                           "visible", "speed", "space"]  # fmt: skip


def test_folder_and_weights_of_another_run_fail(
    settings: list[str], run_doctor: Run, tmp_path: Path
) -> None:
    run, nas = tmp_path / "demo", tmp_path / "nas"
    nas.mkdir()
    write_resolved(load_config("trainer", settings), run)
    (run / "RUN.json").write_text('{"run_id": "demo-1", "weights": null, "tokenizer": null}')
    (nas / "RUN.json").write_text('{"run_id": "other-1"}')
    code, checks = run_doctor("--role", "trainer", *settings)
    assert code == 0 and checks["run"]["detail"] == f"resumes in {run}"
    other = {"run_id": "demo-1", "weights": None, "tokenizer": "vocab_size=7"}
    (run / "RUN.json").write_text(json.dumps(other))
    code, checks = run_doctor("--role", "trainer", *settings)
    assert code == 1 and "was made: vocab_size=7 -> vocab_size=468" in checks["run"]["detail"]
    (run / "RUN.json").write_text('{"run_id": "demo-1", "weights": null, "tokenizer": null}')
    (run / "config.toml").rename(run / "away")
    (run / "config.toml").mkdir()
    code, checks = run_doctor("--role", "trainer", *settings)
    assert code == 1 and failed(checks) == ["run"]
    reason = "config.toml cannot be read (Is a directory; something else has that name"
    assert reason in checks["run"]["detail"]
    (run / "config.toml").rmdir()
    (run / "away").rename(run / "config.toml")
    code, checks = run_doctor(
        "--role", "trainer", *settings, "--weights.dir", str(nas), "--loss.name", "grpo"
    )
    assert code == 1 and failed(checks) == ["run", "owner"]
    assert "was made with other settings: loss.name" in checks["run"]["detail"]
    assert checks["run"]["remedy"].startswith("to continue from its weights")
    assert checks["owner"]["detail"] == f"{nas} belongs to run other-1, not to demo-1"


def test_weights_url_is_checked_unless_the_trainer_will_serve_it(
    settings: list[str], run_doctor: Run, stack: ExitStack
) -> None:
    assert role_checks.check_trainer(load_config("doctor", settings), Report(), stack, serve=True)
    port = free_ports()
    words = [*settings, "--role", "generator", "--weights.dir", f"http://127.0.0.1:{port}"]
    code, checks = run_doctor(*words, "--weights.serve-port", str(port))
    assert code == 0 and "weights" not in checks
    code, checks = run_doctor(*words)
    assert code == 1 and failed(checks) == ["weights"]
    assert checks["weights"]["remedy"].startswith("start the trainer with weights.serve_")


def test_generator_alone_fails_and_goes_on(settings: list[str], run_doctor: Run) -> None:
    code, checks = run_doctor(*settings, "--role", "generator")
    assert code == 1 and failed(checks) == ["reach", "weights"]
    assert all(each["remedy"] for each in checks.values() if not each["ok"])


def test_invalid_config_is_the_only_check(run_doctor: Run) -> None:
    code, checks = run_doctor("--train.batch-size", "12")
    assert code == 1 and list(checks) == ["config"]
    assert checks["config"]["remedy"] == "use 8 or 16"


def test_help_names_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        doctor.main(["--help"])
    printed = capsys.readouterr().out
    assert "--wait SECONDS" in printed and "  wire " in printed


def test_default_role_follows_wire_host() -> None:
    for words, role in (([], "trainer"), (["--wire.host", "192.0.2.1"], "generator")):
        assert role_checks.default_role(load_config("doctor", words)) == role


# keygen.


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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--generator.name", "ann"], r"--security\.keys"),
        (["--security.keys", "keys", "--generator.name", "trainer"], "choose another"),
    ],
)
def test_keygen_refuses(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        keygen(*words)
