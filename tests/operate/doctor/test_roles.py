"""bin/doctor as a person runs it: both roles, what is printed, and the exit code."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from peralta_zmq.config import load_config, write_resolved
from peralta_zmq.errors import ConfigError, TaskError
from peralta_zmq.operate import doctor
from peralta_zmq.operate.doctor import roles, workload
from peralta_zmq.operate.doctor.check import Report
from tools.link_proxy import free_ports


@pytest.fixture
def settings(tmp_path: Path) -> list[str]:
    return ["--run.dir", str(tmp_path), "--wire.port", str(free_ports())]


def findings(printed: str) -> dict[str, dict[str, Any]]:
    """What the last line says, by name."""
    return {each["name"]: each for each in json.loads(printed.splitlines()[-1])["checks"]}


def test_trainers_machine(settings: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code = doctor.main(["--json", "--role", "trainer", *settings])
    found = findings(capsys.readouterr().out)
    assert [name for name, each in found.items() if not each["ok"]] == [] and code == 0
    assert list(found) == ["config", "keys", "ports", "versions", "device", "sleep", "model",
                           "reward", "weights", "writing", "space", "speed"]  # fmt: skip
    assert "1.7 M parameters" in found["model"]["detail"]
    assert "earns 1 in" in found["reward"]["detail"]


def test_generators_machine_beside_a_trainers_doctor(
    settings: list[str], capsys: pytest.CaptureFixture[str], stack: ExitStack
) -> None:
    assert roles.visit_trainer(load_config("doctor", settings), Report(), stack, answers=True)
    capsys.readouterr()
    code = doctor.main([*settings, "--json", "--role", "generator"])
    found = findings(capsys.readouterr().out)
    assert [name for name, each in found.items() if not each["ok"]] == [] and code == 0
    assert list(found) == ["config", "versions", "device", "sleep", "reward", "keys", "reach",
                           "hello", "clock", "burst", "weights", "visible", "speed",
                           "space"]  # fmt: skip


def test_trainer_of_another_runs_folder_or_weights_is_told(
    settings: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, nas = tmp_path / "demo", tmp_path / "nas"
    nas.mkdir()
    write_resolved(load_config("trainer", settings), run)
    (run / "RUN.json").write_text('{"run_id": "demo-1", "weights": null}')
    (nas / "RUN.json").write_text('{"run_id": "other-1"}')
    words = ["--json", "--role", "trainer", *settings]
    assert doctor.main(words) == 0
    found = findings(capsys.readouterr().out)
    assert found["run"]["detail"] == f"goes on in {run}"
    code = doctor.main([*words, "--weights.dir", str(nas), "--loss.name", "grpo"])
    found = findings(capsys.readouterr().out)
    assert code == 1
    assert [name for name, each in found.items() if not each["ok"]] == ["run", "owner"]
    assert "was made with other settings: loss.name" in found["run"]["detail"]
    assert found["run"]["remedy"].startswith("choose another --run.name")
    assert found["owner"]["detail"] == f"{nas} belongs to run other-1, not to demo-1"


def test_weights_that_the_trainer_will_serve_are_a_note_while_its_doctor_answers(
    settings: list[str], capsys: pytest.CaptureFixture[str], stack: ExitStack
) -> None:
    assert roles.visit_trainer(load_config("doctor", settings), Report(), stack, answers=True)
    port = free_ports()
    address = f"http://127.0.0.1:{port}"
    words = [*settings, "--json", "--role", "generator", "--weights.dir", address]
    capsys.readouterr()
    assert doctor.main([*words, "--weights.serve-port", str(port)]) == 0
    noted = findings(capsys.readouterr().out)["weights"]
    assert noted["detail"] == f"{address} cannot be looked at before the trainer runs"
    assert noted["remedy"].startswith(f"it will serve them on its port {port}")
    assert doctor.main(words) == 1  # nobody ever will
    failed = findings(capsys.readouterr().out)["weights"]
    assert not failed["ok"] and failed["remedy"].startswith("start the trainer with weights.serve_")


def test_generator_alone_fails_and_goes_on(
    settings: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code = doctor.main([*settings, "--json", "--role", "generator"])
    found = findings(capsys.readouterr().out)
    assert code == 1
    assert [name for name, each in found.items() if not each["ok"]] == ["reach", "weights"]
    assert all(each["remedy"] for each in found.values() if not each["ok"])


def test_config_that_does_not_resolve_is_the_one_finding(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert doctor.main(["--json", "--train.batch-size", "12"]) == 1
    (found,) = findings(capsys.readouterr().out).values()
    assert found["name"] == "config" and found["remedy"] == "use 8 or 16"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--role", "cook"], "--role is cook; choose trainer or generator"),
        (["--role"], "--role is empty; choose trainer or generator"),
        (["--wait", "long"], "--wait has no number of seconds; write --wait 60"),
    ],
)
def test_option_of_ours_that_is_wrong_is_refused(arguments: list[str], reason: str) -> None:
    with pytest.raises(ConfigError) as error:
        doctor.main(arguments)
    assert str(error.value) == reason


def test_role_is_the_trainers_where_the_trainers_address_is() -> None:
    assert roles.role_of(load_config("doctor", [])) == "trainer"
    assert roles.role_of(load_config("doctor", ["--wire.host", "192.0.2.1"])) == "generator"


def test_help_names_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        doctor.main(["--help"])
    printed = capsys.readouterr().out
    assert "--wait SECONDS" in printed and "--wire.port" in printed


def test_keygen_is_still_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["keygen", "--security.keys", str(tmp_path / "keys")]) == 0
    assert "trainer: made" in capsys.readouterr().out


def test_model_that_is_not_here_names_how_to_fetch_it() -> None:
    with pytest.raises(ConfigError, match="fetch it once with: hf download no/such-model"):
        workload.check_model(load_config("doctor", ["--model.name", "no/such-model"]))


def test_reward_that_does_not_import_is_refused() -> None:
    config = load_config("doctor", ["--task.reward", "no_such_module:f"])
    with pytest.raises(ConfigError, match="no_such_module"):
        workload.check_reward(config)


def test_data_that_is_not_there_is_refused() -> None:
    with pytest.raises((ConfigError, TaskError), match="nowhere"):
        workload.check_reward(load_config("doctor", ["--data.train", "nowhere.csv"]))
