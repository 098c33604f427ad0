"""Checks of the network, each with a machine that passes and one that fails."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import psutil
import pytest

from peralta_zmq import wire
from peralta_zmq.config import Config, load_config
from peralta_zmq.errors import WireError
from peralta_zmq.operate.doctor import network_checks
from peralta_zmq.operate.doctor.checks import failed_check
from peralta_zmq.trainer import session
from peralta_zmq.wire.auth import make_keys
from tools.link_proxy import free_ports

REPLY = wire.ProbeReply("demo", time=1000.0)


@pytest.fixture
def port() -> int:
    return free_ports()


@pytest.fixture
def settings(tmp_path: Path, port: int, request: pytest.FixtureRequest) -> list[str]:
    """Options of a run; with a parameter (bind, host), at these addresses."""
    bind, host = getattr(request, "param", ("127.0.0.1", "127.0.0.1"))
    return ["--run.dir", str(tmp_path), "--wire.port", str(port), "--wire.bind", bind,
            "--wire.host", host, "--security.insecure"]  # fmt: skip


LOOPBACK = next(name for name, rows in psutil.net_if_addrs().items() if rows[0][1] == "127.0.0.1")
ADDRESSES = pytest.mark.parametrize("settings", [
    ("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("[::1]", "[::1]"), ("::", "::1"),
    ("::", "localhost"), (LOOPBACK, "127.0.0.1"), ("*", "localhost"), ("localhost", "localhost"),
], indirect=True)  # fmt: skip


@pytest.fixture
def config(settings: list[str]) -> Config:
    return load_config("doctor", settings)


@pytest.fixture
def serving(config: Config, stack: ExitStack, tmp_path: Path) -> Iterator[Path]:
    """A trainer's machine whose doctor answers probes; its weights folder."""
    assert network_checks.check_ports(config, stack).ok
    folder = tmp_path / "weights"
    assert network_checks.serve_probes(config, stack, folder).ok
    yield folder


def test_free_ports_are_held_until_the_stack_closes(config: Config, port: int) -> None:
    with ExitStack() as stack:
        check = network_checks.check_ports(config, stack)
        assert check.ok and check.detail == f"{port} to {port + 3} are free on 127.0.0.1"
        assert network_checks.check_reach(config).detail.startswith(f"127.0.0.1:{port + 3}")
    assert not network_checks.check_reach(config).ok


@pytest.mark.parametrize("offset", range(4))
def test_port_in_use_names_the_process(config: Config, port: int, offset: int) -> None:
    with socket.create_server(("127.0.0.1", port + offset)), ExitStack() as stack:
        check = network_checks.check_ports(config, stack)
    assert not check.ok
    assert check.detail.startswith(f"port {port + offset} is in use by pid {os.getpid()} (")
    assert check.remedy == "stop it, or choose another with --wire.port"


def test_ports_of_this_runs_trainer_pass(config: Config, port: int) -> None:
    config.run_folder.mkdir(parents=True)
    with socket.create_server(("127.0.0.1", port)), ExitStack() as stack:
        with closing(session.lock(config.run_folder)):
            assert network_checks.check_ports(config, stack).ok
        assert not network_checks.check_ports(config, stack).ok


def test_address_of_another_machine_cannot_be_bound(settings: list[str], stack: ExitStack) -> None:
    config = load_config("d", [*settings, "--wire.bind", "192.0.2.1", "--security.insecure"])
    check = network_checks.check_ports(config, stack)
    assert not check.ok and check.remedy.startswith("set wire.bind to an address of this machine")


def test_is_this_machine() -> None:
    assert network_checks.is_this_machine("127.0.0.1")
    assert not network_checks.is_this_machine("192.0.2.1")  # reserved for documentation
    assert not network_checks.is_this_machine("no-such-host.invalid")


@ADDRESSES
@pytest.mark.usefixtures("serving")
def test_trainer_accepts_connections_and_answers_probes(config: Config, stack: ExitStack) -> None:
    assert network_checks.is_this_machine(config.wire.host)
    assert network_checks.check_reach(config).ok
    client = stack.enter_context(closing(network_checks.open_probe_client(config)))
    result = network_checks.send_probes(client)
    check = network_checks.check_probe(result, "demo")
    assert check.ok and check.detail.startswith("the doctor of run demo answers in ")
    assert network_checks.check_clock(result).ok and not network_checks.check_clock(result).remedy
    assert " MB/s to the trainer" in network_checks.check_throughput(client).detail


@pytest.mark.parametrize(("host", "num_open", "detail", "remedy"), [
    ("127.0.0.1", 0, "127.0.0.1:{}: Connection refused",
     "start the trainer (bin/trainer @ CONFIG)"),
    ("127.0.0.1", 3, "", "open port {} in the firewall of 127.0.0.1"),
    ("no-such-host.invalid", 0, "", "set wire.host to the trainer's address"),
])  # fmt: skip
def test_unreachable_port_gets_a_remedy(
    settings: list[str], port: int, stack: ExitStack, *,
    host: str, num_open: int, detail: str, remedy: str,
) -> None:  # fmt: skip
    for number in range(num_open):
        stack.enter_context(socket.create_server(("127.0.0.1", port + number)))
    check = network_checks.check_reach(load_config("d", [*settings, "--wire.host", host]))
    closed = port + num_open
    assert not check.ok and check.detail.startswith(detail.format(closed))
    assert check.remedy.startswith(remedy.format(closed))


def test_other_program_on_the_port_fails(config: Config, port: int, stack: ExitStack) -> None:
    stack.enter_context(socket.create_server(("127.0.0.1", port + 3)))
    client = stack.enter_context(closing(network_checks.open_probe_client(config)))
    with pytest.raises(WireError) as error:
        network_checks.send_probes(client, timeout_seconds=0.3)
    check = failed_check(error.value)
    assert check.detail.endswith("does not answer the probe")
    assert check.remedy.startswith("use the same version on both sides")


def test_other_run_on_the_port_fails() -> None:
    check = network_checks.check_probe(network_checks.ProbeResult(REPLY, 1.0, 0.5), "sudoku")
    assert not check.ok and check.detail == "run demo listens at wire.host, not sudoku"
    assert check.remedy == "give both sides the same config, or another wire.port"


@pytest.mark.parametrize(("sent", "ok", "detail", "has_remedy"), [
    (999.5, True, "0.000 s behind the trainer's (within 0.500 s)", False),
    (1002.0, True, "2.500 s ahead of the trainer's (within 0.500 s)", False),
    (1002.1, True, "2.600 s ahead of", True),
    (0.0, True, "999.500 s behind", True),
    (1e6, False, "999000.500 s ahead of", True),
])  # fmt: skip
def test_clock_is_compared_with_the_trainer(
    sent: float, ok: bool, detail: str, has_remedy: bool
) -> None:
    check = network_checks.check_clock(network_checks.ProbeResult(REPLY, sent, 1.0))
    assert check.ok is ok and check.detail.startswith(detail)
    assert ("timedatectl set-ntp true" in check.remedy) is has_remedy


def keyed(settings: list[str], folder: Path) -> Config:
    words = ["--security.keys", str(folder), "--generator.name", "ann"]
    return load_config("doctor", [*settings, *words])


def test_keys_of_both_roles_are_checked(settings: list[str], tmp_path: Path) -> None:
    for name in ("trainer", "ann"):
        make_keys(tmp_path / "keys", name)
    config = keyed(settings, tmp_path / "keys")
    for role, end in [("trainer", "admits ann"), ("generator", "keys of ann and of the trainer")]:
        check = network_checks.check_keys(config, role)
        assert check and check.ok and check.detail.endswith(end)
    assert network_checks.check_keys(load_config("doctor", settings), "trainer") is None


def test_missing_key_names_the_keygen_command(settings: list[str], tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", "trainer")
    message = r"ann\.secret cannot be read \(No such file.*make it with bin"
    with pytest.raises(WireError, match=message):
        network_checks.check_keys(keyed(settings, tmp_path / "keys"), "generator")
    check = network_checks.check_keys(keyed(settings, tmp_path / "keys"), "trainer")
    assert check and not check.ok and "keygen --generator.name NAME" in check.remedy


def test_wrong_trainer_key_is_refused_with_a_remedy(
    settings: list[str], tmp_path: Path, stack: ExitStack
) -> None:
    for folder in ("here", "there"):
        for name in ("trainer", "ann"):
            make_keys(tmp_path / folder, name)
    here = keyed(settings, tmp_path / "here")
    assert network_checks.serve_probes(here, stack, None).ok
    admitted = stack.enter_context(closing(network_checks.open_probe_client(here)))
    assert network_checks.check_probe(network_checks.send_probes(admitted), "demo").ok
    (tmp_path / "there" / "trainer.public").write_bytes(
        (tmp_path / "here" / "trainer.public").read_bytes()
    )
    refused = stack.enter_context(
        closing(network_checks.open_probe_client(keyed(settings, tmp_path / "there")))
    )
    for _ in range(2):  # during the refused handshake and after it
        with pytest.raises(WireError, match=r"has no key of ann; put ann\.public into"):
            network_checks.send_probes(refused)


def test_probe_creates_a_file_in_the_weights_folder(
    config: Config, stack: ExitStack, serving: Path
) -> None:
    client = stack.enter_context(closing(network_checks.open_probe_client(config)))
    for _ in range(2):  # the second file replaces the first one
        reply, _seconds = client.request("create_file", timeout=5)
        assert [path.name for path in serving.iterdir()] == [reply.created_file]
        assert reply.error == ""
