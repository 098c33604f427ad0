"""bin/doctor for both roles: its output and exit code."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from peralta_zmq.config import load_config, write_resolved
from peralta_zmq.errors import ConfigError, TaskError
from peralta_zmq.operate import doctor
from peralta_zmq.operate.doctor import machine_checks, role_checks
from peralta_zmq.operate.doctor.checks import Report
from tools.link_proxy import free_ports


@pytest.fixture
def settings(tmp_path: Path) -> list[str]:
    return ["--run.dir", str(tmp_path), "--wire.port", str(free_ports())]


def checks_of(printed: str) -> dict[str, dict[str, Any]]:
    """The checks in the last line, by name."""
    return {check["name"]: check for check in json.loads(printed.splitlines()[-1])["checks"]}


def test_checks_of_a_trainer_pass(settings: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code = doctor.main(["--json", "--role", "trainer", *settings])
    checks = checks_of(capsys.readouterr().out)
    assert [name for name, check in checks.items() if not check["ok"]] == [] and code == 0
    assert list(checks) == ["config", "keys", "ports", "versions", "device", "sleep", "model",
                           "reward", "weights", "writing", "space", "speed"]  # fmt: skip
    assert "1.7 M parameters" in checks["model"]["detail"]
    assert "earns 1 in" in checks["reward"]["detail"]


def test_checks_of_a_generator_pass_with_a_trainers_doctor(
    settings: list[str], capsys: pytest.CaptureFixture[str], stack: ExitStack
) -> None:
    assert role_checks.check_trainer(load_config("doctor", settings), Report(), stack, serve=True)
    capsys.readouterr()
    code = doctor.main([*settings, "--json", "--role", "generator"])
    checks = checks_of(capsys.readouterr().out)
    assert [name for name, check in checks.items() if not check["ok"]] == [] and code == 0
    assert list(checks) == ["config", "versions", "device", "sleep", "reward", "keys", "reach",
                           "probe", "clock", "burst", "weights", "visible", "speed",
                           "space"]  # fmt: skip


def test_folder_and_weights_of_another_run_fail(
    settings: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, nas = tmp_path / "demo", tmp_path / "nas"
    nas.mkdir()
    write_resolved(load_config("trainer", settings), run)
    (run / "RUN.json").write_text('{"run_id": "demo-1", "weights": null}')
    (nas / "RUN.json").write_text('{"run_id": "other-1"}')
    words = ["--json", "--role", "trainer", *settings]
    assert doctor.main(words) == 0
    checks = checks_of(capsys.readouterr().out)
    assert checks["run"]["detail"] == f"resumes in {run}"
    code = doctor.main([*words, "--weights.dir", str(nas), "--loss.name", "grpo"])
    checks = checks_of(capsys.readouterr().out)
    assert code == 1
    assert [name for name, check in checks.items() if not check["ok"]] == ["run", "owner"]
    assert "was made with other settings: loss.name" in checks["run"]["detail"]
    assert checks["run"]["remedy"].startswith("choose another --run.name")
    assert checks["owner"]["detail"] == f"{nas} belongs to run other-1, not to demo-1"


def test_weights_url_is_a_note_before_the_trainer_runs(
    settings: list[str], capsys: pytest.CaptureFixture[str], stack: ExitStack
) -> None:
    assert role_checks.check_trainer(load_config("doctor", settings), Report(), stack, serve=True)
    port = free_ports()
    address = f"http://127.0.0.1:{port}"
    words = [*settings, "--json", "--role", "generator", "--weights.dir", address]
    capsys.readouterr()
    assert doctor.main([*words, "--weights.serve-port", str(port)]) == 0
    noted = checks_of(capsys.readouterr().out)["weights"]
    assert noted["detail"] == f"{address} cannot be checked before the trainer runs"
    assert noted["remedy"].startswith(f"it will serve them on its port {port}")
    assert doctor.main(words) == 1  # without a port, the trainer will not serve weights
    failed = checks_of(capsys.readouterr().out)["weights"]
    assert not failed["ok"] and failed["remedy"].startswith("start the trainer with weights.serve_")


def test_generator_alone_fails_and_goes_on(
    settings: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code = doctor.main([*settings, "--json", "--role", "generator"])
    checks = checks_of(capsys.readouterr().out)
    assert code == 1
    assert [name for name, check in checks.items() if not check["ok"]] == ["reach", "weights"]
    assert all(each["remedy"] for each in checks.values() if not each["ok"])


def test_invalid_config_is_the_only_check(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert doctor.main(["--json", "--train.batch-size", "12"]) == 1
    (checks,) = checks_of(capsys.readouterr().out).values()
    assert checks["name"] == "config" and checks["remedy"] == "use 8 or 16"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--role", "cook"], "argument --role: invalid choice: 'cook' (choose from"),
        (["--wait", "long"], "argument --wait: invalid float value: 'long'"),
    ],
)
def test_wrong_option_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        doctor.main(arguments)
    assert message in capsys.readouterr().err


def test_default_role_follows_wire_host() -> None:
    assert role_checks.default_role(load_config("doctor", [])) == "trainer"
    assert (
        role_checks.default_role(load_config("doctor", ["--wire.host", "192.0.2.1"])) == "generator"
    )


def test_help_names_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        doctor.main(["--help"])
    printed = capsys.readouterr().out
    assert "--wait SECONDS" in printed and "--wire.port" in printed


def test_keygen_is_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["keygen", "--security.keys", str(tmp_path / "keys")]) == 0
    assert "trainer: made" in capsys.readouterr().out


def test_missing_model_names_the_download_command() -> None:
    with pytest.raises(ConfigError, match="fetch it once with: hf download no/such-model"):
        machine_checks.check_model(load_config("doctor", ["--model.name", "no/such-model"]))


def test_missing_reward_is_refused() -> None:
    config = load_config("doctor", ["--task.reward", "no_such_module:f"])
    with pytest.raises(ConfigError, match="no_such_module"):
        machine_checks.check_reward(config)


def test_missing_data_is_refused() -> None:
    with pytest.raises((ConfigError, TaskError), match="nowhere"):
        machine_checks.check_reward(load_config("doctor", ["--data.train", "nowhere.csv"]))
