"""This machine as the doctor sees it: each look passes on one machine and fails on another."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from peralta_zmq.config import load_config
from peralta_zmq.errors import ConfigError
from peralta_zmq.operate.doctor import machine
from peralta_zmq.operate.doctor.check import Check

ASKED = ["msgpack>=1.1", "prime-pydantic-config[toml]<0.5,>=0.4.3", "torch>=2.6",
         "transformers<6,>=5", "pyzmq>=26", 'matplotlib>=3.9; extra == "plot"']  # fmt: skip
HERE = {"msgpack": "1.1.2", "prime-pydantic-config": "0.4.3", "torch": "2.13.0+cpu",
        "transformers": "5.1.0", "pyzmq": "27.3.0"}  # fmt: skip
PMSET = """System-wide power settings:
Currently in use:
 standby              1
 sleep                {}
 displaysleep         10
"""


def versions(python: tuple[int, ...] = (3, 12, 6), **here: str | None) -> Check:
    return machine.check_versions(python, ASKED, {**HERE, **here}.get)


def test_versions_are_all_right() -> None:
    assert versions() == Check(
        "versions", True, "Python 3.12.6, torch 2.13.0+cpu, transformers 5.1.0, pyzmq 27.3.0"
    )


@pytest.mark.parametrize(
    ("python", "leaks"),
    [((3, 11, 9), False), ((3, 12, 0), True), ((3, 12, 5), True), ((3, 12, 6), False)],
)
def test_python_that_never_frees_the_names_in_a_message_is_told(
    python: tuple[int, ...], leaks: bool
) -> None:
    found = versions(python)
    assert found.ok and bool(found.remedy) == leaks
    assert ("never frees" in found.detail) == leaks


def test_versions_of_this_very_python_are_all_right() -> None:
    assert machine.check_versions(*machine.this_python()).ok


@pytest.mark.parametrize(
    ("found", "detail", "remedy"),
    [
        (versions((3, 9, 19)), "Python 3.9.19 is too old", "use Python 3.10 or newer"),
        (versions(torch="2.5.1"), "torch 2.5.1 (needs 2.6)", "run make setup"),
        (versions(msgpack=None), "msgpack is missing (needs 1.1)", "run make setup"),
        (machine.check_versions((3, 12), []), "peralta_zmq is not installed", "run make setup"),
    ],
)  # fmt: skip
def test_versions_that_do_not_do(found: Check, detail: str, remedy: str) -> None:
    assert not found.ok
    assert found.detail.startswith(detail) and found.remedy.startswith(remedy)


def test_tenth_minor_version_is_newer_than_the_sixth() -> None:
    assert versions(torch="2.10.0").ok


def test_device_and_numbers_are_told_with_the_reason() -> None:
    found = machine.check_device(load_config("doctor", ["--model.device", "cpu"]), has_gpu=False)
    assert found.ok and not found.remedy
    assert found.detail.startswith("cpu, ") and "(auto: this CPU " in found.detail


def test_gpu_that_torch_does_not_see_is_told() -> None:
    import torch

    found = machine.check_device(load_config("doctor", []), has_gpu=True)
    assert found.remedy.startswith("install a CUDA build") or torch.cuda.is_available()


def test_device_that_is_not_here_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"device 'abacus' cannot be used here.*try 'auto'"):
        machine.check_device(load_config("doctor", ["--model.device", "abacus"]))


def says(**answers: str) -> Callable[[Sequence[str]], str]:
    """A system in which a command prints this."""
    return lambda command: answers.get(f"{command[0]}_{command[1]}".replace("-", ""), "")


@pytest.mark.parametrize(
    ("system", "answers", "on_battery", "remedy"),
    [
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
    ],
)  # fmt: skip
def test_machine_that_may_fall_asleep_is_told_how_not_to(
    system: str, answers: dict[str, str], on_battery: bool, remedy: str
) -> None:
    found = machine.check_sleep(system, says(**answers), on_battery=on_battery)
    assert found.ok
    assert remedy in found.remedy and bool(remedy) == bool(found.remedy)


def test_battery_makes_a_laptop(tmp_path: Path) -> None:
    (tmp_path / "AC").mkdir()
    assert not machine.has_battery(tmp_path)
    (tmp_path / "BAT0").mkdir()
    assert machine.has_battery(tmp_path)


def test_mac_that_keeps_us_from_the_network_names_the_setting() -> None:
    found = machine.check_local_network("Darwin", lambda: errno.EHOSTUNREACH)
    assert found and not found.ok
    assert found.detail == "macOS keeps this program from the local network"
    assert "System Settings > Privacy & Security > Local Network" in found.remedy


def test_mac_that_lets_us_into_the_network_is_in_order() -> None:
    found = machine.check_local_network("Darwin", machine.send_into("127.0.0.1"))
    assert found and found.ok


def test_only_a_mac_keeps_programs_from_the_network() -> None:
    assert machine.check_local_network("Linux", lambda: errno.EHOSTUNREACH) is None


def test_command_that_is_not_there_prints_nothing() -> None:
    assert machine.printed_by(["no-such-command-here"]) == ""
    assert machine.printed_by(["echo", "word"]) == "word\n"
