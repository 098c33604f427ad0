"""Who gets in (row 24), in whose name (row 25), and how soon the others are told."""

from __future__ import annotations

import dataclasses
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import zmq
from fakes import BOOT, RUN
from sockets import (
    ANYWHERE,
    DEADLINE,
    GROUP,
    eventually,
    numbered,
    received,
    receiver_at,
    sender_to,
    until,
)

from peralta_zmq import wire
from peralta_zmq.errors import WireError
from peralta_zmq.wire import auth, validation
from peralta_zmq.wire.auth import GeneratorKeys, generator_keys, known_generators, make_keys
from peralta_zmq.wire.sockets import open_socket

REPO = Path(__file__).parents[2]
IN_TIME = 10.0  # seconds until a refused client says why


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("trainer", "ann", "bob"):
        make_keys(tmp_path / "keys", name)
    return tmp_path / "keys"


@pytest.fixture
def gate(folder: Path, stack: ExitStack) -> wire.CurveAuthenticator:
    return stack.enter_context(closing(wire.CurveAuthenticator(folder)))


@pytest.fixture
def receiver(gate: wire.CurveAuthenticator, stack: ExitStack) -> wire.RolloutReceiver:
    return stack.enter_context(closing(receiver_at(authenticator=gate)))


def stranger(folder: Path) -> GeneratorKeys:
    """Knows the trainer, and is unknown to it."""
    return dataclasses.replace(generator_keys(folder, "ann"), secret=zmq.curve_keypair()[1])


def misled(folder: Path) -> GeneratorKeys:
    """Known to the trainer, and looks for another one."""
    return dataclasses.replace(generator_keys(folder, "ann"), trainer=zmq.curve_keypair()[0])


def reason_of(address: str, stack: ExitStack, keys: GeneratorKeys | None) -> str:
    """What whoever sends is told when it is turned away, in time."""
    client = stack.enter_context(open_socket(zmq.PUSH, hwm=1))
    monitor = stack.enter_context(closing(auth.HandshakeMonitor(client, address, keys)))
    client.setsockopt(zmq.SNDTIMEO, 100)
    client.connect(address)
    started = monotonic()
    with pytest.raises(WireError) as refused:
        for _ in until(IN_TIME + 1):
            with suppress(zmq.Again):
                client.send(numbered(5))
            monitor.check()
    assert monotonic() - started < IN_TIME
    return str(refused.value)


def test_known_generator_is_heard_in_its_own_name(
    folder: Path, receiver: wire.RolloutReceiver, stack: ExitStack
) -> None:
    sender = sender_to(receiver.address, stack, keys=generator_keys(folder, "ann"))
    assert sender.send(numbered(5), timeout=IN_TIME)
    assert received(receiver).generator_id == "ann"


@pytest.mark.parametrize(
    ("keys_of", "reason"),
    [
        (lambda folder: None, "no keys"),
        (stranger, r"has no key of ann; put ann\.public"),
        (misled, r"trainer\.public is not its key"),
    ],
    ids=["no key", "unknown key", "wrong server key"],
)
def test_stranger_delivers_nothing_and_is_told_why(
    folder: Path,
    receiver: wire.RolloutReceiver,
    stack: ExitStack,
    keys_of: Callable[[Path], GeneratorKeys | None],
    reason: str,
) -> None:
    said = reason_of(receiver.address, stack, keys_of(folder))
    assert receiver.receive(timeout=0.3) is None and not receiver.refused
    with pytest.raises(WireError, match=reason):
        raise WireError(said)


@pytest.mark.timeout(90)
def test_generator_that_is_started_with_a_wrong_key_ends_with_the_reason(
    folder: Path, gate: wire.CurveAuthenticator, stack: ExitStack, tmp_path: Path
) -> None:
    theirs = tmp_path / "theirs"
    for name in ("trainer", "ann"):
        make_keys(theirs, name)
    shutil.copy(folder / "trainer.public", theirs)
    announcer = stack.enter_context(open_socket(zmq.PUB, hwm=1))
    gate.protect(announcer)
    port = announcer.bind_to_random_port("tcp://127.0.0.1")
    knocks = stack.enter_context(announcer.get_monitor_socket(zmq.EVENT_ACCEPTED))
    stack.callback(announcer.disable_monitor)
    settings = ["--wire.port", str(port - 1), "--security.keys", str(theirs),
                "--generator.name", "ann", "--run.dir", str(tmp_path)]  # fmt: skip
    command = [sys.executable, str(REPO / "bin" / "generator"), *settings]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as generator:
        try:
            assert knocks.poll(60_000)
            _, said = generator.communicate(timeout=IN_TIME)
        finally:
            generator.kill()
    assert generator.returncode == 2
    assert "has no key of ann; put ann.public into" in said.splitlines()[-1]


def test_nobody_gets_in_when_the_gate_is_closed(
    folder: Path, gate: wire.CurveAuthenticator, receiver: wire.RolloutReceiver, stack: ExitStack
) -> None:
    gate.close()
    assert "accepts no client" in reason_of(receiver.address, stack, generator_keys(folder, "ann"))
    assert receiver.receive(timeout=0.3) is None


def test_trainer_that_is_down_behind_a_forwarder_is_waited_for(
    folder: Path, gate: wire.CurveAuthenticator, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "PATIENCE_SECONDS", 0.1)
    forwarder = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    forwarder.settimeout(DEADLINE)
    host, port = forwarder.getsockname()
    keys = generator_keys(folder, "ann")
    listener = stack.enter_context(
        closing(wire.AnnouncementSubscriber(f"tcp://{host}:{port}", keys=keys))
    )
    looking = threading.Event()

    def hang_up() -> None:
        for _ in range(2 * auth.PATIENCE_TRIES + 2):  # each handshake is looked into
            forwarder.accept()[0].close()
        looking.set()

    thread = threading.Thread(target=hang_up)
    thread.start()
    while not looking.is_set():
        assert listener.receive(timeout=0.05) is None
    thread.join()


def test_generator_with_keys_does_not_talk_to_a_trainer_without(
    folder: Path, stack: ExitStack
) -> None:
    receiver = stack.enter_context(closing(receiver_at()))
    assert "uses keys" in reason_of(receiver.address, stack, generator_keys(folder, "ann"))
    assert receiver.receive(timeout=0.3) is None


def test_domain_is_enforced_by_the_library_itself(receiver: wire.RolloutReceiver) -> None:
    options = (zmq.ZAP_ENFORCE_DOMAIN, zmq.CURVE_SERVER)
    assert [receiver._socket.getsockopt(each) for each in options] == [1, 1]
    assert receiver._socket.getsockopt(zmq.ZAP_DOMAIN) == auth.DOMAIN


def test_group_in_anothers_name_is_counted_and_dropped(
    folder: Path, receiver: wire.RolloutReceiver, stack: ExitStack
) -> None:
    sender = sender_to(receiver.address, stack, keys=generator_keys(folder, "bob"))
    assert sender.send(numbered(5), timeout=IN_TIME)  # ann's
    assert sender.send(numbered(6, generator_id="bob"), timeout=IN_TIME)
    assert received(receiver).sequence == 6
    ((reason, count),) = receiver.refused.items()
    assert "key of bob was used under the name 'ann'" in reason and count == 1


def test_announcements_reach_known_generators_only(
    folder: Path, gate: wire.CurveAuthenticator, stack: ExitStack
) -> None:
    announcer = stack.enter_context(
        closing(wire.AnnouncementPublisher(ANYWHERE, authenticator=gate))
    )
    announcer.publish(wire.Announcement(RUN, step=4))
    ann = generator_keys(folder, "ann")
    known = stack.enter_context(closing(wire.AnnouncementSubscriber(announcer.address, keys=ann)))
    assert eventually(lambda: known.receive(timeout=0.1)) == wire.Announcement(RUN, step=4)
    strange = stack.enter_context(
        closing(wire.AnnouncementSubscriber(announcer.address, keys=stranger(folder)))
    )
    with pytest.raises(WireError, match="has no key"):
        for _ in until(IN_TIME):
            assert strange.receive(timeout=0.1) is None


def test_counters_come_from_known_generators_in_their_own_name_only(
    folder: Path, gate: wire.CurveAuthenticator, stack: ExitStack
) -> None:
    receiver = stack.enter_context(
        closing(wire.GeneratorStatusReceiver(ANYWHERE, run_id=RUN, authenticator=gate))
    )
    strange = wire.GeneratorStatusSender(receiver.address, keys=stranger(folder))
    stack.callback(strange.close, linger_seconds=0)
    bob = stack.enter_context(
        closing(wire.GeneratorStatusSender(receiver.address, keys=generator_keys(folder, "bob")))
    )
    of_ann, of_bob = wire.GeneratorStatus(RUN, "ann", BOOT), wire.GeneratorStatus(RUN, "bob", BOOT)

    def reported() -> bool:
        for counters in (of_ann, of_bob):
            bob.send(counters)
            strange.send(counters)
        zmq.select([receiver._socket], [], [], timeout=0.1)
        return bool(receiver.receive()) and gate.refused > 0

    eventually(reported)
    assert receiver.latest == {of_bob.sender: of_bob} and receiver.refused


def test_key_that_is_added_later_is_let_in(
    folder: Path, receiver: wire.RolloutReceiver, stack: ExitStack
) -> None:
    make_keys(folder, "eve")
    eve = generator_keys(folder, "eve")
    frame = numbered(5, generator_id="eve")

    def knock() -> bool:
        with ExitStack() as once:
            sender = sender_to(receiver.address, once, keys=eve)
            sender.send(frame, timeout=0)
            return receiver.receive(timeout=0.5) is not None

    eventually(knock)


def test_key_that_is_removed_is_not_let_in_again(
    folder: Path, receiver: wire.RolloutReceiver, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    ann = generator_keys(folder, "ann")
    (folder / "ann.public").unlink()
    monkeypatch.setattr(auth, "READ_SECONDS", 0.0)
    assert "has no key" in reason_of(receiver.address, stack, ann)


def test_sender_that_is_turned_away_says_why_instead_of_waiting(
    folder: Path, receiver: wire.RolloutReceiver, stack: ExitStack
) -> None:
    sender = sender_to(receiver.address, stack, keys=stranger(folder))
    with pytest.raises(WireError, match="has no key of ann"):
        for _ in until(IN_TIME):
            sender.send(numbered(5), timeout=0.1)


def test_folder_that_cannot_be_trusted_lets_nobody_in(
    folder: Path, receiver: wire.RolloutReceiver, stack: ExitStack, monkeypatch: pytest.MonkeyPatch,
    gate: wire.CurveAuthenticator,
) -> None:  # fmt: skip
    (folder / "twin.public").write_bytes((folder / "ann.public").read_bytes())
    monkeypatch.setattr(auth, "READ_SECONDS", 0.0)
    sender = sender_to(receiver.address, stack, keys=generator_keys(folder, "ann"))
    sender.send(numbered(5), timeout=0)
    eventually(lambda: gate.refused > 0)
    assert receiver.receive(timeout=0.5) is None


def test_file_that_is_no_key_yet_keeps_nobody_else_out(
    folder: Path, receiver: wire.RolloutReceiver, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "eve.public").write_bytes(b"")  # it is being copied
    (folder / "gone.public").symlink_to("nowhere")
    (folder / "odd.public").mkdir()
    monkeypatch.setattr(auth, "READ_SECONDS", 0.0)
    sender = sender_to(receiver.address, stack, keys=generator_keys(folder, "ann"))
    assert sender.send(numbered(5), timeout=IN_TIME)
    assert received(receiver).generator_id == "ann"


def test_folder_that_is_away_for_a_while_ends_neither_the_gate_nor_who_knocks(
    folder: Path, gate: wire.CurveAuthenticator, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "READ_SECONDS", 0.0)
    monkeypatch.setattr(auth, "HANDSHAKE_SECONDS", 0.3)
    monkeypatch.setattr(auth, "PATIENCE_SECONDS", 0.1)
    receiver = stack.enter_context(closing(receiver_at(authenticator=gate)))
    ann = generator_keys(folder, "ann")
    away = folder.rename(folder.with_name("away"))
    client = stack.enter_context(open_socket(zmq.PUSH, hwm=1))
    monitor = stack.enter_context(closing(auth.HandshakeMonitor(client, receiver.address, ann)))
    client.connect(receiver.address)
    began, tries = monotonic(), auth.PATIENCE_TRIES + 2

    def knocks_again() -> bool:
        monitor.check()
        return gate.refused >= tries

    eventually(knocks_again)
    assert monotonic() - began > (tries - 1) * auth.HANDSHAKE_SECONDS  # none was sent away at once
    away.rename(folder)
    client.send(numbered(5))
    assert received(receiver).generator_id == "ann"


def test_second_gate_is_refused(folder: Path, gate: wire.CurveAuthenticator) -> None:
    with pytest.raises(WireError, match="a second CurveAuthenticator"):
        wire.CurveAuthenticator(folder)


def test_known_generator_is_heard_again_after_the_trainers_restart(
    folder: Path, gate: wire.CurveAuthenticator, stack: ExitStack
) -> None:
    first = receiver_at(authenticator=gate)
    sender = sender_to(first.address, stack, keys=generator_keys(folder, "ann"))
    assert sender.send(numbered(5), timeout=IN_TIME)
    received(first)
    first.close()
    address = first.address

    def second() -> wire.RolloutReceiver | None:
        try:
            return receiver_at(address, authenticator=gate)
        except WireError:
            return None

    again = stack.enter_context(closing(eventually(second)))

    def heard() -> Any:
        sender.send(numbered(6), timeout=0.1)
        return again.receive(timeout=0.1)

    assert eventually(heard)[0].sequence == 6


# Key files.


def test_secrets_are_ours_alone(folder: Path) -> None:
    assert (folder / "ann.secret").stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o660])
def test_secret_that_others_may_read_is_refused(folder: Path, mode: int) -> None:
    (folder / "ann.secret").chmod(mode)
    with pytest.raises(WireError, match=r"chmod 600 .*ann\.secret"):
        generator_keys(folder, "ann")
    (folder / "trainer.secret").chmod(mode)
    with pytest.raises(WireError, match=r"chmod 600 .*trainer\.secret"):
        wire.CurveAuthenticator(folder)


def test_folder_that_everyone_may_write_is_refused(folder: Path) -> None:
    folder.chmod(0o777)
    for opened in (lambda: generator_keys(folder, "ann"), lambda: wire.CurveAuthenticator(folder)):
        with pytest.raises(WireError, match=r"keys can be written by others; chmod o-w "):
            opened()


def test_half_a_pair_names_the_remedy(folder: Path) -> None:
    (folder / "ann.secret").unlink()  # it was moved to its machine
    with pytest.raises(WireError, match=r"ann\.public is here without ann\.secret; delete it"):
        make_keys(folder, "ann")


def test_keys_that_are_there_are_kept(folder: Path) -> None:
    before = (folder / "ann.secret").read_bytes()
    assert not make_keys(folder, "ann")
    assert (folder / "ann.secret").read_bytes() == before


def test_halves_that_do_not_fit_are_refused(folder: Path) -> None:
    (folder / "ann.public").write_bytes((folder / "bob.public").read_bytes())
    with pytest.raises(WireError, match="does not belong"):
        make_keys(folder, "ann")


def test_missing_key_names_the_remedy(folder: Path) -> None:
    with pytest.raises(WireError, match=r"eve\.secret.*bin/doctor keygen"):
        generator_keys(folder, "eve")


@pytest.mark.parametrize("content", [b"", b"x" * 39, b"x" * 41, b"\0" * 40, b"'" * 40])
def test_file_that_is_no_key_is_refused(folder: Path, content: bytes) -> None:
    (folder / "ann.public").write_bytes(content)
    with pytest.raises(WireError, match="is not a key"):
        known_generators(folder)


@pytest.mark.parametrize("name", ["", "../ann", "a b", ".hidden"])
def test_name_that_is_no_plain_name_is_refused(folder: Path, name: str) -> None:
    with pytest.raises(WireError, match="plain name"):
        make_keys(folder, name)
    with pytest.raises(WireError, match="plain name"):
        generator_keys(folder, name)


def test_one_key_has_one_name(folder: Path) -> None:
    (folder / "twin.public").write_bytes((folder / "ann.public").read_bytes())
    with pytest.raises(WireError, match=r"twin\.public holds the key of ann"):
        known_generators(folder)


def test_trainer_is_no_generator(folder: Path) -> None:
    assert set(known_generators(folder).values()) == {"ann", "bob"}
    assert auth.TRAINER == "trainer" and GROUP.generator_id == "ann"


def test_name_that_somebody_claims_makes_no_line_of_the_log() -> None:
    with pytest.raises(WireError) as refused:
        validation.check_owner("ann\ntrainer: all is well", "bob")
    assert "\n" not in str(refused.value)


def test_name_of_another_run_makes_no_line_of_the_log(stack: ExitStack) -> None:
    opened = stack.enter_context(closing(receiver_at()))
    sender = sender_to(opened.address, stack)
    foreign = dataclasses.replace(GROUP, run_id="other\ntrainer: all is well")
    assert sender.send(wire.encode_group(foreign), timeout=DEADLINE)
    for _ in until():
        opened.receive(timeout=0.1)
        if opened.refused:
            break
    (reason,) = opened.refused
    assert reason == r"group of another run, 'other\ntrainer: all is well'"
    report = wire.GeneratorStatus(foreign.run_id, "ann", BOOT)
    counters = stack.enter_context(closing(wire.GeneratorStatusReceiver(ANYWHERE, run_id=RUN)))
    with pytest.raises(WireError, match=r"run, 'other\\ntrainer"):
        counters._accept([zmq.Frame(wire.encode_generator_status(report))])
