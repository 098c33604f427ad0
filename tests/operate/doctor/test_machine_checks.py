"""Checks of this machine, each with values that pass and values that fail."""

from __future__ import annotations

import errno
import importlib.metadata
from collections.abc import Sequence

import pytest

from peralta_zmq.config import load_config
from peralta_zmq.operate.doctor import machine_checks
from peralta_zmq.operate.doctor.checks import Check

REQUIREMENTS = ["msgpack>=1.1", "prime-pydantic-config[toml]<0.5,>=0.4.3", "torch>=2.6",
         "transformers<6,>=5", "pyzmq>=26", 'matplotlib>=3.9; extra == "plot"']  # fmt: skip
INSTALLED = {"msgpack": "1.1.2", "prime-pydantic-config": "0.4.3", "torch": "2.13.0+cpu",
        "transformers": "5.1.0", "pyzmq": "27.3.0"}  # fmt: skip
PMSET = """System-wide power settings:
Currently in use:
 standby              1
 sleep                {}
 displaysleep         10
"""


def versions(python: tuple[int, ...] = (3, 12, 6), **changes: str | None) -> Check:
    return machine_checks.check_versions(python, REQUIREMENTS, {**INSTALLED, **changes}.get)


@pytest.mark.parametrize("torch", ["2.13.0+cpu", "2.10.0", "2.6.0a0+ecf3bae40a.nv25.01"])
def test_installed_versions_pass(torch: str) -> None:
    detail = f"Python 3.12.6, torch {torch}, transformers 5.1.0, pyzmq 27.3.0"
    assert versions(torch=torch) == Check(True, detail)


@pytest.mark.parametrize(
    ("python", "leaks"), [((3, 11, 9), False), ((3, 12, 0), True), ((3, 12, 5), True)]
)
def test_leaky_python_is_noted(python: tuple[int, ...], leaks: bool) -> None:
    check = versions(python)
    assert check.ok and bool(check.remedy) == leaks
    assert ("leaks the memory" in check.detail) == leaks


@pytest.mark.parametrize(("check", "detail", "remedy"), [
    (versions(torch="2.5.1"), "torch 2.5.1 (needs >=2.6)", "run make setup"),
    (versions(msgpack=None), "msgpack is missing (needs >=1.1)", "run make setup"),
])  # fmt: skip
def test_wrong_versions_fail(check: Check, detail: str, remedy: str) -> None:
    assert not check.ok
    assert check.detail.startswith(detail) and check.remedy.startswith(remedy)


def test_missing_package_names_make_setup(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    check = machine_checks.check_installation()
    assert not check.ok and check.detail.startswith("peralta_zmq is not installed in ")
    assert check.remedy.startswith("run make setup")


def test_device_check_reports_dtype_and_reason() -> None:
    check = machine_checks.check_device(load_config("doctor", ["--model.device", "cpu"]))
    assert check.ok and not check.remedy
    assert check.detail.startswith("cpu, ") and "(auto: this CPU " in check.detail


def test_gpu_without_cuda_torch_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(machine_checks.shutil, "which", lambda program: program)
    check = machine_checks.check_device(load_config("doctor", []))
    assert check.remedy.startswith("install a CUDA build") or torch.cuda.is_available()


@pytest.mark.parametrize(("system", "outputs", "has_battery", "remedy"), [
    ("Linux", {}, False, ""),
    ("Linux", {}, True, "systemd-inhibit"),
    ("Linux", {"systemctl_isactive": "active\n"}, False, "systemd-inhibit"),
    ("Linux", {"systemctl_isenabled": "masked\nmasked\n"}, True, ""),
    ("Linux", {"systemdinhibit_list": "run 0 root 1 x sleep:idle generator block\n"}, True, ""),
    ("Linux", {"systemdinhibit_list": "NM 0 root 1 x sleep turns-off delay\n"}, True,
     "systemd-inhibit"),
    ("Darwin", {"pmset_g": PMSET.format(0)}, True, ""),
    ("Darwin", {"pmset_g": PMSET.format("1 (sleep prevented by caffeinate)")}, True, ""),
    ("Darwin", {"pmset_g": PMSET.format(15)}, True, "caffeinate -is"),
])  # fmt: skip
def test_machine_that_may_sleep_gets_a_remedy(
    system: str,
    outputs: dict[str, str],
    has_battery: bool,
    remedy: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def output_of(command: Sequence[str]) -> str:
        return outputs.get(f"{command[0]}_{command[1]}".replace("-", ""), "")

    monkeypatch.setattr(machine_checks, "output_of", output_of)
    check = machine_checks.check_sleep(system, has_battery=has_battery)
    assert check.ok
    assert remedy in check.remedy and bool(remedy) == bool(check.remedy)


@pytest.mark.parametrize(("number", "ok"), [(errno.EHOSTUNREACH, False), (0, True)])
def test_network_permission_is_checked_on_macs_only(
    number: int, ok: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert machine_checks.send_packet("127.0.0.1") == 0
    monkeypatch.setattr(machine_checks, "send_packet", lambda host: number)
    assert machine_checks.check_local_network("Linux", "192.0.2.1") is None
    check = machine_checks.check_local_network("Darwin", "192.0.2.1")
    assert check and check.ok == ok
    if not ok:
        assert check.detail == "macOS keeps this program from the local network"
        assert "System Settings > Privacy & Security > Local Network" in check.remedy


def test_output_of_a_missing_command_is_empty() -> None:
    assert machine_checks.output_of(["no-such-command-here"]) == ""
    assert machine_checks.output_of(["echo", "word"]) == "word\n"
