"""The way to the trainer's machine: each look passes on one way and fails on another."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import pytest

from peralta_zmq import wire
from peralta_zmq.config import Config, load_config
from peralta_zmq.errors import WireError
from peralta_zmq.operate.doctor import network
from peralta_zmq.operate.doctor.check import failed
from peralta_zmq.trainer import run_folder
from peralta_zmq.wire.auth import make_keys
from tools.link_proxy import free_ports

SAID = wire.ProbeReply("demo", time=1000.0)


@pytest.fixture
def port() -> int:
    return free_ports()


@pytest.fixture
def settings(tmp_path: Path, port: int) -> list[str]:
    return ["--run.dir", str(tmp_path), "--wire.port", str(port)]


@pytest.fixture
def config(settings: list[str]) -> Config:
    return load_config("doctor", settings)


@pytest.fixture
def answering(config: Config, stack: ExitStack, tmp_path: Path) -> Iterator[Path]:
    """A trainer's machine whose doctor answers; its weights folder."""
    assert network.check_ports(config, stack).ok
    folder = tmp_path / "weights"
    assert network.answer_others(config, stack, folder=folder, hello={"torch": "2.6.0"}).ok
    yield folder


def test_free_ports_are_ours_until_we_leave(config: Config, port: int) -> None:
    with ExitStack() as stack:
        found = network.check_ports(config, stack)
        assert found.ok and found.detail == f"{port} to {port + 3} are free on 127.0.0.1"
        assert network.check_reach(config).detail.startswith(f"127.0.0.1:{port + 3}")
    assert not network.check_reach(config).ok


@pytest.mark.parametrize("offset", range(4))
def test_port_in_use_names_who_has_it(config: Config, port: int, offset: int) -> None:
    with socket.create_server(("127.0.0.1", port + offset)), ExitStack() as stack:
        found = network.check_ports(config, stack)
    assert not found.ok
    assert found.detail.startswith(f"port {port + offset} is in use by pid {os.getpid()} (")
    assert found.remedy == "stop it, or choose another with --wire.port"


def test_port_that_our_own_trainer_has_is_in_order(config: Config, port: int) -> None:
    config.run_folder.mkdir(parents=True)
    with socket.create_server(("127.0.0.1", port)), ExitStack() as stack:
        with closing(run_folder.lock(config.run_folder)):
            assert network.check_ports(config, stack).ok
        assert not network.check_ports(config, stack).ok


def test_address_of_another_machine_cannot_be_bound(settings: list[str], stack: ExitStack) -> None:
    elsewhere = load_config("d", [*settings, "--wire.bind", "192.0.2.1", "--security.insecure"])
    found = network.check_ports(elsewhere, stack)
    assert not found.ok and found.remedy.startswith("set wire.bind to an address of this machine")


def test_this_machine_is_here_and_another_is_not() -> None:
    assert network.is_here("127.0.0.1")
    assert not network.is_here("192.0.2.1")  # of a network for documents
    assert not network.is_here("no-such-host.invalid")


@pytest.mark.usefixtures("answering")
def test_trainer_is_reached_and_says_hello(config: Config, stack: ExitStack) -> None:
    assert network.check_reach(config).ok
    guest = stack.enter_context(closing(network.open_probe_client(config, "ann")))
    answer = network.say_hello(guest)
    found = network.check_hello(answer, "demo")
    assert found.ok and found.detail.startswith("the doctor of run demo answers in ")
    assert found.detail.endswith("(torch 2.6.0)")
    assert network.check_clock(answer).ok and not network.check_clock(answer).remedy
    assert " MB/s to the trainer" in network.check_burst(guest).detail


def test_nobody_there_names_the_command_that_starts_it(config: Config, port: int) -> None:
    found = network.check_reach(config)
    assert not found.ok and found.detail == f"127.0.0.1:{port}: Connection refused"
    assert found.remedy.startswith("start the trainer (bin/trainer @ CONFIG)")


def test_firewall_that_opens_three_ports_of_four_is_named(config: Config, port: int) -> None:
    with ExitStack() as stack:
        for number in range(3):
            stack.enter_context(socket.create_server(("127.0.0.1", port + number)))
        found = network.check_reach(config)
    assert found.remedy == f"open port {port + 3} in the firewall of 127.0.0.1"


def test_name_that_nobody_knows_is_told(settings: list[str]) -> None:
    found = network.check_reach(load_config("d", [*settings, "--wire.host", "nobody.invalid"]))
    assert not found.ok and found.remedy.startswith("set wire.host to the trainer's address")


def test_something_else_on_the_port_says_no_hello(
    config: Config, port: int, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "HELLO_SECONDS", 0.3)
    stack.enter_context(socket.create_server(("127.0.0.1", port + 3)))
    guest = stack.enter_context(closing(network.open_probe_client(config, "ann")))
    with pytest.raises(WireError) as error:
        network.say_hello(guest)
    found = failed("hello", error.value)
    assert found.detail.endswith("does not answer the probe")
    assert found.remedy.startswith("use the same version on both sides")


def test_another_run_on_the_port_is_told() -> None:
    found = network.check_hello(network.Answer(SAID, 1.0, 1.5), "sudoku")
    assert not found.ok and found.detail == "run demo listens there, not sudoku"
    assert found.remedy == "give both sides the same config, or another wire.port"


@pytest.mark.parametrize(
    ("asked", "ok", "detail", "advised"),
    [
        (999.5, True, "0.000 s behind the trainer's (within 0.500 s)", False),
        (1002.0, True, "2.500 s ahead of the trainer's (within 0.500 s)", False),
        (1002.1, True, "2.600 s ahead of", True),
        (0.0, True, "999.500 s behind", True),
        (1e6, False, "999000.500 s ahead of", True),
    ],
)
def test_clock_is_compared_with_the_trainers(
    asked: float, ok: bool, detail: str, advised: bool
) -> None:
    found = network.check_clock(network.Answer(SAID, asked, asked + 1.0))
    assert found.ok is ok and found.detail.startswith(detail)
    assert ("timedatectl set-ntp true" in found.remedy) is advised


def keyed(settings: list[str], folder: Path) -> Config:
    return load_config("doctor", [*settings, "--security.keys", str(folder)])


def test_keys_of_both_sides_are_looked_at(settings: list[str], tmp_path: Path) -> None:
    for name in ("trainer", "ann"):
        make_keys(tmp_path / "keys", name)
    config = keyed(settings, tmp_path / "keys")
    assert network.check_keys(config, "trainer", "trainer").detail.endswith("lets in ann")
    assert network.check_keys(config, "generator", "ann").ok


def test_key_that_is_missing_names_how_to_make_it(settings: list[str], tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", "trainer")
    config = keyed(settings, tmp_path / "keys")
    with pytest.raises(WireError, match=r"ann\.secret: No such file.*; make it with bin"):
        network.check_keys(config, "generator", "ann")
    found = network.check_keys(config, "trainer", "trainer")
    assert not found.ok and "keygen --generator.name NAME" in found.remedy


def test_keys_are_advised_when_everyone_may_connect(settings: list[str]) -> None:
    assert not network.check_keys(load_config("d", settings), "trainer", "trainer").remedy
    open_to_all = load_config("d", [*settings, "--wire.bind", "0.0.0.0", "--security.insecure"])
    found = network.check_keys(open_to_all, "trainer", "trainer")
    assert found.ok and found.remedy.startswith("make some with bin/doctor keygen")


def test_keys_that_do_not_fit_are_told_by_the_handshake(
    settings: list[str], tmp_path: Path, stack: ExitStack
) -> None:
    for folder in ("here", "there"):
        for name in ("trainer", "ann"):
            make_keys(tmp_path / folder, name)
    here = keyed(settings, tmp_path / "here")
    assert network.answer_others(here, stack, folder=None, hello={}).ok
    fits = stack.enter_context(closing(network.open_probe_client(here, "ann")))
    assert network.check_hello(network.say_hello(fits), "demo").ok
    (tmp_path / "there" / "trainer.public").write_bytes(
        (tmp_path / "here" / "trainer.public").read_bytes()
    )
    does_not = stack.enter_context(
        closing(network.open_probe_client(keyed(settings, tmp_path / "there"), "ann"))
    )
    for _ in range(2):  # while the door is being shut, and once it is
        with pytest.raises(WireError, match=r"has no key of ann; put ann\.public into"):
            network.say_hello(does_not)


def test_file_is_shown_in_the_weights_folder(
    config: Config, stack: ExitStack, answering: Path
) -> None:
    guest = stack.enter_context(closing(network.open_probe_client(config, "ann")))
    for _ in range(2):  # one at a time
        greeting, _seconds = guest.request("create_file", timeout=5)
        assert [each.name for each in answering.iterdir()] == [greeting.created_file]
    assert replace(greeting, time=0.0).error == ""
