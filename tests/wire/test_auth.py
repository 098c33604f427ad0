"""Keys: accepted and refused clients, key files."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import zmq
from bad_network import BitFlip, proxy_to
from sample_data import INCARNATION, RUN
from sockets import (
    ANYWHERE,
    DEADLINE,
    GROUP,
    bound_again,
    drained,
    eventually,
    numbered,
    received,
    receiver_at,
    sender_to,
    until,
)

from peralta_zmq import wire
from peralta_zmq.errors import OutageError, WireError, is_permanent
from peralta_zmq.wire import auth, connection, message_fields
from peralta_zmq.wire.auth import (
    GeneratorKeys,
    generator_keys,
    known_generators,
    make_keys,
    use_keys,
)
from peralta_zmq.wire.rollout_sockets import open_socket
from tools.link_proxy import LinkProxy

REPO = Path(__file__).parents[2]
LIMIT = 10.0  # seconds until a refused client reports the reason, after its patience
TIMING = wire.ConnectionTiming(patience_seconds=1.0, retry_seconds=0.05)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("trainer", "ann", "bob"):
        make_keys(tmp_path / "keys", name)
    return tmp_path / "keys"


def test_missing_key_of_a_generator_names_the_keys_that_are_there(folder: Path) -> None:
    with pytest.raises(WireError, match=r"did you mean --generator\.name one of ann, bob, whose"):
        generator_keys(folder, "host-0")
    (folder / "bob.secret").unlink()
    with pytest.raises(WireError, match=r"host-0\.secret does not exist; did you mean --g\S+ ann,"):
        generator_keys(folder, "host-0")
    (folder / "ann.secret").unlink()
    with pytest.raises(WireError, match=r"host-0\.secret.*, make it with bin/doctor keygen"):
        generator_keys(folder, "host-0")


class Scene:
    """A trainer's authenticator and rollout receiver, and clients with keys of its folder.

    The authenticator reads the key folder again for every client. `timing` is that of new clients.
    """

    def __init__(self, folder: Path, stack: ExitStack, **limits: float) -> None:
        self.folder, self._stack = folder, stack
        self.timing = TIMING
        server_limits = wire.ServerLimits(**{"read_seconds": 0.0, **limits})
        self.authenticator = wire.Authenticator(folder, server_limits)
        stack.enter_context(closing(self.authenticator))
        self.receiver = stack.enter_context(closing(receiver_at(authenticator=self.authenticator)))
        self.ann = generator_keys(folder, "ann")

    def sender(self, keys: GeneratorKeys | None = None) -> wire.RolloutSender:
        """A sender of groups, by default with ann's keys."""
        options = {"keys": keys or self.ann, "timing": self.timing}
        return sender_to(self.receiver.address, self._stack, **options)

    def publisher(self) -> wire.AnnouncementPublisher:
        publisher = wire.AnnouncementPublisher(
            ANYWHERE, authenticator=self.authenticator, announce_seconds=0.2
        )
        return self._stack.enter_context(closing(publisher))

    def subscriber(
        self, address: str, keys: GeneratorKeys | None = None
    ) -> wire.AnnouncementSubscriber:
        subscriber = wire.AnnouncementSubscriber(address, keys=keys or self.ann, timing=self.timing)
        return self._stack.enter_context(closing(subscriber))

    def link(self) -> tuple[wire.AnnouncementPublisher, LinkProxy, wire.AnnouncementSubscriber]:
        """A publisher and a subscriber that has received step 1 through a proxy."""
        publisher = self.publisher()
        proxy = self._stack.enter_context(proxy_to(publisher.address))
        subscriber = self.subscriber(proxy.address)
        publisher.publish(wire.Announcement(RUN, step=1))
        eventually(lambda: subscriber.receive(timeout=0.1))
        return publisher, proxy, subscriber

    def remove_key(self) -> Callable[[], object]:
        """Remove ann's public key; returns a function that puts it back."""
        file = self.folder / "ann.public"
        content = file.read_bytes()
        file.unlink()
        return lambda: file.write_bytes(content)


@pytest.fixture
def scene(folder: Path, stack: ExitStack) -> Scene:
    return Scene(folder, stack)


def unknown_keys(folder: Path) -> GeneratorKeys:
    """A secret key that the trainer does not have, with the trainer's public key."""
    return dataclasses.replace(generator_keys(folder, "ann"), secret=zmq.curve_keypair()[1])


def wrong_trainer_keys(folder: Path) -> GeneratorKeys:
    """A known secret key with the public key of another trainer."""
    return dataclasses.replace(generator_keys(folder, "ann"), trainer=zmq.curve_keypair()[0])


def refusal_of(address: str, stack: ExitStack, keys: GeneratorKeys | None) -> str:
    """The reason that a refused client reports, in time, but not at once."""
    client = stack.enter_context(open_socket(zmq.PUSH, hwm=1))
    client.setsockopt(zmq.SNDTIMEO, 20)
    started = monotonic()
    opened = connection.ClientConnection(client, address, keys, name="rollouts", timing=TIMING)
    stack.enter_context(closing(opened))
    with pytest.raises(WireError) as refused:
        for _ in until(TIMING.patience_seconds + LIMIT + 1):
            with suppress(zmq.Again):
                client.send(numbered(5))
            opened.check()
    assert 0 < monotonic() - started - TIMING.patience_seconds < LIMIT
    return str(refused.value)


@pytest.mark.parametrize(
    ("keys_of", "reason"),
    [
        (lambda folder: None, "no keys"),
        (unknown_keys, r"has no key of ann; put ann\.public"),
        (wrong_trainer_keys, r"trainer\.public is not the trainer's key"),
    ],
    ids=["no key", "unknown key", "wrong server key"],
)
def test_refused_client_delivers_nothing_and_reports_the_reason(
    scene: Scene, stack: ExitStack, keys_of: Callable[[Path], GeneratorKeys | None], reason: str
) -> None:
    receiver = scene.receiver
    assert re.search(reason, refusal_of(receiver.address, stack, keys_of(scene.folder)))
    assert receiver.receive(timeout=0.3) is None and not receiver.refused


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_generator_with_an_unknown_key_exits_with_the_reason(
    scene: Scene, stack: ExitStack, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    for name in ("trainer", "ann"):
        make_keys(other, name)
    shutil.copy(scene.folder / "trainer.public", other)
    publisher = stack.enter_context(open_socket(zmq.XSUB, hwm=1))
    scene.authenticator.protect(publisher, auth.ConnectionQuota(queue=2, max_bytes=512))
    port = publisher.bind_to_random_port("tcp://127.0.0.1")
    connections = stack.enter_context(publisher.get_monitor_socket(zmq.EVENT_ACCEPTED))
    stack.callback(publisher.disable_monitor)
    settings = ["--wire.port", str(port - 1), "--security.keys", str(other),
                "--generator.name", "ann", "--run.dir", str(tmp_path)]  # fmt: skip
    command = [sys.executable, str(REPO / "bin" / "generator"), *settings]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as generator:
        try:
            assert connections.poll(60_000)
            _, errors = generator.communicate(timeout=20 + LIMIT)
        finally:
            generator.kill()
    assert generator.returncode == 2
    assert "has no key of ann; put ann.public into" in errors.splitlines()[-1]


def test_no_client_is_accepted_without_an_authenticator(scene: Scene, stack: ExitStack) -> None:
    scene.authenticator.close()
    assert "accepts no client" in refusal_of(scene.receiver.address, stack, scene.ann)
    assert scene.receiver.receive(timeout=0.3) is None


def test_group_under_a_foreign_name_is_dropped(scene: Scene) -> None:
    sender = scene.sender(generator_keys(scene.folder, "bob"))
    assert sender.send(numbered(5), timeout=LIMIT)  # ann's
    assert sender.send(numbered(6, generator_id="bob"), timeout=LIMIT)
    assert received(scene.receiver).group_number == 6
    ((reason, count),) = scene.receiver.refused.items()
    assert "key of bob was used under the name 'ann'" in reason and count == 1


def test_announcements_reach_known_clients_only(scene: Scene) -> None:
    publisher = scene.publisher()
    publisher.publish(wire.Announcement(RUN, step=4))
    known = scene.subscriber(publisher.address)
    assert eventually(lambda: known.receive(timeout=0.1)) == wire.Announcement(RUN, step=4)
    unknown = scene.subscriber(publisher.address, unknown_keys(scene.folder))
    with pytest.raises(WireError, match="has no key"):
        for _ in until(TIMING.patience_seconds + LIMIT):
            assert unknown.receive(timeout=0.1) is None


def test_status_is_accepted_from_known_keys_and_own_names(scene: Scene, stack: ExitStack) -> None:
    receiver = wire.GeneratorStatusReceiver(ANYWHERE, run_id=RUN, authenticator=scene.authenticator)
    stack.enter_context(closing(receiver))
    keys = unknown_keys(scene.folder), generator_keys(scene.folder, "bob")
    senders = [wire.GeneratorStatusSender(receiver.address, keys=each) for each in keys]
    for sender in senders:
        stack.callback(sender.close, linger_seconds=0)
    ann, bob = (wire.GeneratorStatus(RUN, name, INCARNATION) for name in ("ann", "bob"))
    statuses: dict[str, wire.GeneratorStatus] = {}

    def reported() -> bool:
        for status in (ann, bob):
            for sender in senders:
                sender.send(status)
        statuses.update(receiver.receive(timeout=0.1))
        return bool(statuses) and scene.authenticator.refused > 0

    eventually(reported)
    assert statuses == {bob.sender: bob} and receiver.refused


# Faults of the link.


def test_accepted_generator_takes_a_refusal_for_a_fault_of_the_link(scene: Scene) -> None:
    """Both the connection that was accepted and a new one with the same keys."""
    scene.timing = dataclasses.replace(TIMING, patience_seconds=0.0)
    publisher, proxy, accepted = scene.link()
    put_back, authenticator = scene.remove_key(), scene.authenticator
    proxy.reset()
    tries = authenticator.refused + 2 * connection.PATIENCE_TRIES
    eventually(lambda: accepted.receive(timeout=0.05) and authenticator.refused > tries)
    new, more = scene.sender(), authenticator.refused + 2 * connection.PATIENCE_TRIES
    eventually(lambda: new.send(numbered(6), timeout=0.05) and authenticator.refused > more)
    put_back()
    publisher.publish(wire.Announcement(RUN, step=2))
    eventually(lambda: accepted.receive(timeout=0.1) == wire.Announcement(RUN, step=2))
    eventually(lambda: new.send(numbered(7), timeout=0.1))
    received(scene.receiver)


def test_flipped_bit_of_an_encrypted_announcement_ends_no_generator(scene: Scene) -> None:
    publisher, proxy, subscriber = scene.link()
    for step in range(2, 5):
        proxy.damage = flip = BitFlip(b"\x07MESSAGE", 20)  # in the ciphertext

        def damaged(step: int = step, flip: BitFlip = flip) -> bool:
            publisher.publish(wire.Announcement(RUN, step=step))
            assert subscriber.receive(timeout=0.05) is not None
            return flip.done.is_set()

        eventually(damaged)
        expected = wire.Announcement(RUN, step=step)
        while subscriber.receive(timeout=0.1) != expected:  # the test has a timeout
            pass
    assert proxy.num_connections >= 4


def test_unusable_key_file_does_not_affect_other_keys(scene: Scene) -> None:
    (scene.folder / "bob.public").chmod(0o666)
    (scene.folder / "eve.public").write_bytes(b"")  # it is being copied
    (scene.folder / "gone.public").symlink_to("nowhere")
    (scene.folder / "odd.public").mkdir()
    assert scene.sender().send(numbered(5), timeout=LIMIT)
    assert received(scene.receiver).generator_id == "ann"


def test_client_waits_while_the_key_folder_is_unreadable(folder: Path, stack: ExitStack) -> None:
    handshake_seconds = 0.3
    timing = dataclasses.replace(TIMING, patience_seconds=0.1, handshake_seconds=handshake_seconds)
    scene = Scene(folder, stack, handshake_seconds=handshake_seconds)
    moved = folder.rename(folder.with_name("moved"))
    client = stack.enter_context(open_socket(zmq.PUSH, hwm=1))
    started, tries = monotonic(), connection.PATIENCE_TRIES + 2
    opened = connection.ClientConnection(
        client, scene.receiver.address, scene.ann, name="rollouts", timing=timing
    )
    stack.enter_context(closing(opened))

    def tried_again() -> bool:
        opened.check()
        return scene.authenticator.refused >= tries

    eventually(tried_again)
    # No client was disconnected at once.
    assert monotonic() - started > (tries - 1) * handshake_seconds
    moved.rename(folder)
    client.send(numbered(5))
    assert received(scene.receiver).generator_id == "ann"


# Limit of connections.


def close_after_a_group(address: str, keys: GeneratorKeys | None) -> bool:
    """Connect, send a group and close; False if the trainer does not accept the connection."""
    with open_socket(zmq.PUSH, hwm=1) as client:
        use_keys(client, keys)
        client.setsockopt(zmq.IMMEDIATE, 1)  # `send` waits for an accepted connection
        client.setsockopt(zmq.SNDTIMEO, 1000)  # milliseconds
        client.connect(address)
        with suppress(zmq.Again):
            client.send(numbered(5))
            client.close(linger=int(DEADLINE * 1000))
            return True
    return False


@pytest.mark.parametrize("has_keys", [False, True])
def test_closed_connections_fill_only_the_quota_of_a_busy_trainer(
    folder: Path, stack: ExitStack, has_keys: bool
) -> None:
    # A client connects again after the time of a handshake.
    limits = wire.ServerLimits(handshake_seconds=0.5, max_unread_bytes=1, min_connections=10)
    authenticator = wire.Authenticator(folder if has_keys else None, limits)
    stack.enter_context(closing(authenticator))
    receiver = stack.enter_context(closing(receiver_at(authenticator=authenticator)))
    keys = generator_keys(folder, "ann") if has_keys else None
    # The trainer computes, and reads nothing.
    num_sent = sum(close_after_a_group(receiver.address, keys) for _ in range(12))
    assert num_sent == 10 and authenticator.refused >= 2
    # Each message read makes room for half a connection, as a connection can hold two.
    assert receiver.receive(timeout=DEADLINE) and receiver.receive(timeout=DEADLINE)
    assert [close_after_a_group(receiver.address, keys) for _ in range(2)] == [True, False]
    sender = sender_to(receiver.address, stack, keys=keys)
    assert sender.send(numbered(6), timeout=DEADLINE)
    eventually(lambda: any(group.group_number == 6 for group in drained(receiver)))
    # The socket was empty: all of the quota is free again.
    assert all(close_after_a_group(receiver.address, keys) for _ in range(10))


def open_receiver(kind: str, authenticator: wire.Authenticator) -> Any:
    """A server of the trainer that the program reads, by the socket type of its clients."""
    if kind == "XPUB":
        return wire.AnnouncementPublisher(
            ANYWHERE, authenticator=authenticator, announce_seconds=0.05
        )
    reply = wire.ProbeReply("demo", run_id=RUN)
    return wire.ProbeServer(ANYWHERE, reply, authenticator=authenticator)


@pytest.mark.parametrize("kind", ["XPUB", "DEALER"])
def test_connections_without_messages_are_accepted_again_and_again(
    stack: ExitStack, kind: str
) -> None:
    limits = wire.ServerLimits(handshake_seconds=0.5, max_unread_bytes=1, min_connections=2)
    authenticator = stack.enter_context(closing(wire.Authenticator(None, limits)))
    server = stack.enter_context(closing(open_receiver(kind, authenticator)))
    for _ in range(10):
        with (
            open_socket(getattr(zmq, kind)) as client,
            client.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED) as events,
        ):
            client.connect(server.address)
            assert events.poll(int(DEADLINE * 1000))
            client.disable_monitor()


def test_statuses_make_room_for_connections(stack: ExitStack) -> None:
    limits = wire.ServerLimits(max_unread_bytes=1, min_connections=2)
    authenticator = stack.enter_context(closing(wire.Authenticator(None, limits)))
    receiver = wire.GeneratorStatusReceiver(ANYWHERE, run_id=RUN, authenticator=authenticator)
    stack.enter_context(closing(receiver))
    for number in range(5):
        sender = stack.enter_context(closing(wire.GeneratorStatusSender(receiver.address)))
        status = wire.GeneratorStatus(RUN, f"g{number}", INCARNATION)

        def arrives(sender: Any = sender, status: Any = status) -> bool:
            if sender.check_due():
                sender.send(status)
            return status.sender in receiver.receive(timeout=0.05)

        eventually(arrives)


def test_quota_is_in_messages_of_the_largest_size() -> None:
    limits = wire.ServerLimits(max_unread_bytes=1000, min_connections=2)
    quota = auth.ConnectionQuota(queue=3, max_bytes=100, limits=limits)  # ten messages
    assert [quota.take() for _ in range(4)] == [True, True, True, False]
    for _ in range(2):
        quota.on_message_read()
    assert [quota.take(), quota.take()] == [True, False]
    quota.on_socket_empty()
    for _ in range(5):  # more than were taken: there is no credit
        quota.on_message_read()
    assert [quota.take() for _ in range(4)] == [True, True, True, False]
    # Fewer messages than two connections hold.
    large = auth.ConnectionQuota(queue=3, max_bytes=900, limits=limits)
    assert [large.take() for _ in range(3)] == [True, True, False]


# Key files.


def test_secret_key_is_readable_by_its_owner_only(folder: Path) -> None:
    assert (folder / "ann.secret").stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700


WRITABLE = "can be written by others; chmod go-w .*"


@pytest.mark.parametrize(("name", "modes", "reason"), [
    ("ann.secret", [0o604, 0o640, 0o660], r"600 .*ann\.secret, or .*FAT.* copy it to a local"),
    ("trainer.secret", [0o604, 0o640, 0o660], r"chmod 600 .*trainer\.secret"),
    ("", [0o720, 0o702, 0o777], f"keys {WRITABLE}keys, "),
    ("bob.public", [0o620, 0o602, 0o666], rf"bob\.public {WRITABLE}bob"),
    ("trainer.public", [0o620, 0o602, 0o666], rf"trainer\.public {WRITABLE}"),
])  # fmt: skip
def test_key_or_folder_open_to_others_is_refused(
    folder: Path, name: str, modes: list[int], reason: str
) -> None:
    for mode in modes:
        (folder / name).chmod(mode)
        if name in ("", "trainer.secret", "bob.public"):
            with pytest.raises(WireError, match=reason):
                wire.Authenticator(folder)
        if name in ("", "ann.secret", "trainer.public"):
            with pytest.raises(WireError, match=reason):
                generator_keys(folder, "ann")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize("name", ["", "trainer.secret", "trainer.public", "ann.public"])
def test_key_or_key_folder_of_another_user_is_refused(folder: Path, name: str) -> None:
    os.chown(folder / name, 12345, -1)
    remedy = rf"belongs to another user \(uid 12345\); sudo chown 0 .*{name or 'keys'}, or copy"
    with pytest.raises(WireError, match=remedy):
        if name == "trainer.public":
            generator_keys(folder, "ann")
        else:
            wire.Authenticator(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_keys_of_root_are_accepted_by_another_user(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert generator_keys(folder, "ann").name == "ann"
    assert sorted(known_generators(folder).values()) == ["ann", "bob"]


def test_public_key_without_secret_names_the_remedy(folder: Path) -> None:
    (folder / "ann.secret").unlink()  # it was moved to its machine
    with pytest.raises(WireError, match=r"ann\.public exists without ann\.secret; delete ann\.pub"):
        make_keys(folder, "ann")


def test_make_keys_keeps_existing_keys(folder: Path) -> None:
    before = (folder / "ann.secret").read_bytes()
    assert not make_keys(folder, "ann")
    assert (folder / "ann.secret").read_bytes() == before


def test_make_keys_refuses_mismatched_keys(folder: Path) -> None:
    (folder / "ann.public").write_bytes((folder / "bob.public").read_bytes())
    with pytest.raises(WireError, match="does not belong"):
        make_keys(folder, "ann")


@pytest.mark.parametrize("content", [b"", b"x" * 39, b"x" * 41, b"\0" * 40, b"'" * 40])
def test_file_without_a_key_is_refused(folder: Path, content: bytes) -> None:
    (folder / "ann.public").write_bytes(content)
    with pytest.raises(WireError, match="is not a key"):
        known_generators(folder)


def test_key_behind_links_in_a_circle_is_not_waited_for(folder: Path) -> None:
    (folder / "ann.public").unlink()
    (folder / "ann.public").symlink_to("ann.public")
    with pytest.raises(OutageError) as caught:
        known_generators(folder)
    assert is_permanent(caught.value.__cause__)


@pytest.mark.parametrize("name", ["", "../ann", "a b", ".hidden"])
def test_make_keys_refuses_other_than_plain_names(folder: Path, name: str) -> None:
    with pytest.raises(WireError, match="plain name"):
        make_keys(folder, name)
    with pytest.raises(WireError, match="plain name"):
        generator_keys(folder, name)


def test_known_generators_refuses_one_key_with_two_names(folder: Path) -> None:
    shutil.copy(folder / "ann.public", folder / "twin.public")
    with pytest.raises(WireError, match=r"twin\.public holds the key of ann"):
        known_generators(folder)


def test_refusal_escapes_newlines_in_a_run_id(stack: ExitStack) -> None:
    opened = stack.enter_context(closing(receiver_at()))
    sender = sender_to(opened.address, stack)
    foreign = dataclasses.replace(GROUP, run_id="other\ntrainer: forged line")
    assert sender.send(wire.encode_group(foreign), timeout=DEADLINE)
    (reason,) = eventually(lambda: opened.receive(timeout=0.1) or opened.refused)
    assert reason == r"group of another run, 'other\ntrainer: forged line'"
    status = wire.GeneratorStatus(foreign.run_id, "ann", INCARNATION)
    statuses = stack.enter_context(closing(wire.GeneratorStatusReceiver(ANYWHERE, run_id=RUN)))
    with pytest.raises(WireError, match=r"run, 'other\\ntrainer"):
        statuses.accept([zmq.Frame(message_fields.encode_fields(status))])


def test_client_refused_at_first_is_accepted_with_a_new_key(scene: Scene) -> None:
    scene.timing = dataclasses.replace(TIMING, patience_seconds=DEADLINE)
    put_back = scene.remove_key()
    sender = scene.sender()
    eventually(lambda: sender.send(numbered(5), timeout=0.05) or scene.authenticator.refused > 1)
    put_back()
    eventually(lambda: sender.send(numbered(6), timeout=0.1))
    assert received(scene.receiver).generator_id == "ann"


def test_key_folder_with_a_duplicate_accepts_no_client(scene: Scene) -> None:
    shutil.copy(scene.folder / "ann.public", scene.folder / "twin.public")
    scene.sender().send(numbered(5), timeout=0)
    eventually(lambda: scene.authenticator.refused > 0)
    assert scene.receiver.receive(timeout=0.5) is None


def test_known_generator_reaches_a_restarted_trainer(scene: Scene, stack: ExitStack) -> None:
    sender = scene.sender()
    assert sender.send(numbered(5), timeout=LIMIT)
    received(scene.receiver)
    scene.receiver.close()
    second = bound_again(scene.receiver.address, authenticator=scene.authenticator)
    stack.enter_context(closing(second))

    def send() -> Any:
        sender.send(numbered(6), timeout=0.1)
        return second.receive(timeout=0.1)

    assert eventually(send)[0].group_number == 6


def test_running_trainer_ignores_a_key_that_became_writable(folder: Path) -> None:
    (folder / "ann.public").chmod(0o666)
    assert list(known_generators(folder, strict=False).values()) == ["bob"]
