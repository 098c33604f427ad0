"""The trainer's address in a shared folder, and sockets that follow the trainer."""

from __future__ import annotations

import logging
import socket
import threading
from contextlib import ExitStack, closing
from pathlib import Path

import psutil
import pytest
from sample_data import RUN
from sockets import ANYWHERE, eventually, unused_address

from peralta_zmq import wire
from peralta_zmq.errors import OutageError, WireError
from peralta_zmq.wire.auth import TRAINER, make_keys
from peralta_zmq.wire.trainer_address import AddressFile, read_address


def write_address(folder: Path, host: str, port: int) -> AddressFile:
    """Write the address of a started trainer."""
    file = AddressFile(folder, host, port, RUN)
    file.write()
    return file


def test_newest_of_several_starts_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "addresses"
    assert read_address(folder) is None
    files = [write_address(folder, "node7", port) for port in (5555, 5559, 5563)]
    assert read_address(folder) == ("tcp://node7:5563", RUN)
    (name,) = [path.name for path in folder.iterdir()]
    (folder / ".tmp-trainer_00000009-00000000.address-7").write_text("tcp://no run\n")
    assert read_address(folder) == ("tcp://node7:5563", RUN)
    files[-1].close()
    assert read_address(folder) is None
    write_address(folder, "node7", 5567)
    assert not (folder / name).exists()  # no name is used twice


def test_address_file_shows_that_another_trainer_has_started(tmp_path: Path) -> None:
    folder = tmp_path / "addresses"
    first = write_address(folder, "node7", 5555)
    first.check()
    second = write_address(folder, "node8", 5555)
    second.check()
    for is_running in (True, False):
        with pytest.raises(WireError, match=f"another trainer continues run {RUN}; this one ends"):
            first.check()
        if is_running:
            second.close()
    third = write_address(folder, "node7", 5555)
    folder.rename(tmp_path / "elsewhere")
    with pytest.raises(OutageError, match="addresses is gone; is it mounted"):
        third.check()
    folder.touch()
    with pytest.raises(OutageError, match="cannot be used: Not a directory"):
        third.check()
    AddressFile(None, "node7", 5555, RUN).check()


@pytest.mark.parametrize(
    "content",
    [b"", b"tcp://a b:1 r\n", b"ipc:///x r\n", b"\xff", b"tcp://h:999999 r\n", b"tcp://h:1 r"],
)
def test_damaged_address_is_not_used(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "trainer_00000001-0123abcd.address").write_bytes(content)
    assert read_address(tmp_path) is None


def test_generator_waits_for_the_first_address(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    often = {"poll_seconds": 0.01, "report_seconds": 0.05}
    timer = threading.Timer(0.2, write_address, (tmp_path, "node7", 5555))
    timer.start()
    assert wire.find_trainer("tcp://unused:1", tmp_path, **often).current == "tcp://node7:5555"
    timer.join()
    assert f"waiting for a trainer to write its address to {tmp_path} (0 s)" in caplog.text
    assert wire.find_trainer("tcp://given:1", None).current == "tcp://given:1"


def test_reason_why_addresses_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    reason = "it cannot be read: Not a directory; something else has that name"

    def report(text: str) -> None:
        raise RuntimeError(text)  # ends the wait

    with pytest.raises(RuntimeError, match=reason):
        wire.find_trainer("tcp://unused:1", tmp_path / "file", report=report, report_seconds=0.0)


def test_sockets_follow_a_silent_trainer_to_its_next_address(
    tmp_path: Path, stack: ExitStack
) -> None:
    """Only a silent trainer's address is read again; the first port is that of the rollouts."""
    publisher = stack.enter_context(closing(wire.AnnouncementPublisher(ANYWHERE)))
    publisher.publish(wire.Announcement(RUN, step=7))
    trainer = wire.TrainerAddress(unused_address(), RUN, tmp_path, poll_seconds=0.0)
    gone = wire.next_port(trainer.current)
    announcements = stack.enter_context(closing(wire.AnnouncementSubscriber(gone)))
    trainer.add(announcements.connection, port_offset=1)
    port = int(publisher.address.rpartition(":")[2]) - 1
    write_address(tmp_path, "127.0.0.1", port)

    trainer.poll(silent_seconds=1.5)
    assert wire.next_port(trainer.current) == gone
    trainer.poll(silent_seconds=3.0)
    assert wire.next_port(trainer.current) == publisher.address
    assert eventually(lambda: announcements.receive(timeout=0.1)) == wire.Announcement(RUN, step=7)


def test_announcements_of_another_run_count_as_silence(tmp_path: Path, stack: ExitStack) -> None:
    """The port of an old address may belong to the trainer of another run by now."""
    publisher = stack.enter_context(closing(wire.AnnouncementPublisher(ANYWHERE)))
    publisher.publish(wire.Announcement(RUN, step=7))
    port = int(publisher.address.rpartition(":")[2]) - 1
    trainer = wire.TrainerAddress(f"tcp://127.0.0.1:{port}", "earlier", tmp_path, poll_seconds=0.0)
    announcements = stack.enter_context(
        closing(wire.AnnouncementSubscriber(publisher.address, has_run=trainer.has_run))
    )
    received_at = announcements.received_at
    assert announcements.receive(timeout=0.5) is None and announcements.received_at == received_at
    write_address(tmp_path, "127.0.0.1", port)
    trainer.poll(silent_seconds=3.0)
    publisher.publish(wire.Announcement(RUN, step=8))
    newest = eventually(lambda: announcements.receive(timeout=0.1))
    assert newest == wire.Announcement(RUN, step=8)


def test_refusal_at_an_old_address_does_not_end_a_generator(
    tmp_path: Path, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    """The port may belong to a trainer with other keys by now."""
    timing = wire.ConnectionTiming(patience_seconds=0.0, retry_seconds=0.0)
    for name in (TRAINER, "generator-0"):
        make_keys(tmp_path / "keys", name)
    keys = wire.generator_keys(tmp_path / "keys", "generator-0")
    other = stack.enter_context(closing(wire.AnnouncementPublisher(ANYWHERE)))
    announcements = wire.AnnouncementSubscriber(other.address, keys=keys, timing=timing)
    stack.enter_context(closing(announcements))
    connection = announcements.connection
    wire.TrainerAddress(other.address, RUN, tmp_path).add(connection)

    def is_logged() -> bool:
        announcements.receive(timeout=0.02)
        return "connection failed name=announcements" in caplog.text

    assert eventually(is_logged)
    for _ in range(20):
        announcements.receive(timeout=0.02)
    wire.TrainerAddress(other.address).add(connection)
    with pytest.raises(WireError, match="this generator uses keys, the trainer no keys"):
        eventually(lambda: announcements.receive(timeout=0.02))


LOOPBACK = next(name for name, rows in psutil.net_if_addrs().items() if rows[0][1] == "127.0.0.1")


@pytest.mark.parametrize(("bind", "address"), [
    ("127.0.0.1", "127.0.0.1"), (LOOPBACK, "127.0.0.1"), ("::1", "::1"), ("::", "::1"),
])  # fmt: skip
def test_first_free_port_skips_blocks_in_use(bind: str, address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as used:
        port = used.getsockname()[1] - 2  # the third of four ports
        free = wire.first_free_port(bind, port)
    assert free > port and (free - port) % 4 == 0
    assert wire.first_free_port("192.0.2.1", 5555) == 5555  # no address of this machine
