"""Attacks on a trainer and its weights folder, as a hostile client or writer could make them.

An attack sends for at most SEND_SECONDS and returns the number of messages, connections or bytes
that it has sent. What it opens stays open until the stack of its client is closed.
"""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import zmq

from peralta_zmq import wire
from peralta_zmq.atomic_files import MANIFEST, STABLE, describe, read_manifest
from peralta_zmq.weights.version import WEIGHTS_FILE, folder_name
from peralta_zmq.wire.auth import GeneratorKeys, use_keys
from peralta_zmq.wire.message_fields import encode_fields
from tools.hostile_sender import NAME, group_within_limits
from tools.link_proxy import LinkProxy

SEND_SECONDS = 30.0
STUCK_SECONDS = 3.0  # without progress of a send, until the attack ends
LOAD_SECONDS = 10.0  # in which generators find and copy a version
QUEUE = 1000  # messages in the sender's queue
LARGE = 15 << 20  # bytes
ROLLOUTS, ANNOUNCEMENTS, STATUSES = range(3)  # by position of the port
PORTS = "groups", "announcements", "statuses"


@dataclass(frozen=True, slots=True)
class Target:
    """What an attacker knows about a run on this machine."""

    run_id: str
    port: int  # the first of four
    page: int  # port of the dashboard
    step: int
    weights: Path


@dataclass(frozen=True, slots=True)
class Client:
    """An attacker with or without keys; `stack` closes its connections."""

    target: Target
    keys: GeneratorKeys | None
    stack: ExitStack

    def open(self, kind: int, port: int, *, queue: int = QUEUE) -> zmq.Socket[bytes]:
        """A ZeroMQ socket that is connected to a port of the trainer, 0 to 3."""
        opened = self.stack.enter_context(zmq.Context.instance().socket(kind))
        for option, value in (
            (zmq.LINGER, 0), (zmq.SNDHWM, queue), (zmq.IMMEDIATE, int(kind == zmq.PUSH)),
            (zmq.SNDTIMEO, int(1000 * STUCK_SECONDS)), (zmq.RCVTIMEO, int(1000 * STUCK_SECONDS)),
        ):  # fmt: skip
            opened.setsockopt(option, value)
        use_keys(opened, self.keys)
        opened.connect(f"tcp://127.0.0.1:{self.target.port + port}")
        return opened

    def open_sender(self, port: int) -> zmq.Socket[bytes]:
        """A socket from which the trainer receives messages on a port, 0 to 2.

        An XPUB sends only to peers that have subscribed, which the trainer does on the port of the
        statuses only. A proxy leads the connection there first and then to the announcements:
        libzmq keeps the subscription. Raises zmq.Again if the trainer refuses the connection.
        """
        if port == ROLLOUTS:
            return self.open(zmq.PUSH, ROLLOUTS)
        if port == STATUSES:
            return self._open_subscribed()
        proxy = self.stack.enter_context(LinkProxy(self.target.port, kernel_buffer=1 << 20))
        opened = replace(self, target=replace(self.target, port=proxy.port))._open_subscribed()
        proxy.target -= STATUSES - ANNOUNCEMENTS
        proxy.reset()
        opened.recv()  # an announcement
        return opened

    def _open_subscribed(self) -> zmq.Socket[bytes]:
        """An XPUB socket to the port of the statuses, after the trainer has subscribed."""
        opened = self.open(zmq.XPUB, STATUSES)
        opened.setsockopt(zmq.XPUB_NODROP, 1)  # wait for room in the queue instead
        opened.recv()
        return opened

    def connect(self, port: int) -> socket.socket:
        """A plain TCP connection; it may still be waiting to be accepted."""
        connection = self.stack.enter_context(socket.socket())
        connection.setblocking(False)
        connection.connect_ex(("127.0.0.1", port))
        return connection


def _send(client: Client, port: int, frames: Iterable[bytes]) -> int:
    ends, count = time.monotonic() + SEND_SECONDS, 0
    with suppress(zmq.Again):
        opened = client.open_sender(port)
        for frame in frames:
            if time.monotonic() > ends:
                break
            opened.send(frame)
            count += 1
    return count


def _send_statuses(client: Client, statuses: Iterable[wire.GeneratorStatus]) -> int:
    return _send(client, STATUSES, map(encode_fields, statuses))


def nothing(client: Client, count: int) -> int:
    """No attack: shows how much the costs vary by themselves."""
    return count


def long_statuses(client: Client, count: int) -> int:
    """Statuses of new starts of a generator with the longest worker_info: 8 KB as JSON."""
    quotes = '"' * 126  # JSON escapes each of them
    facts = {f"{n:02}{quotes}": quotes for n in range(16)}
    status = wire.GeneratorStatus(client.target.run_id, NAME, bytes(8), worker_info=facts)
    statuses = (replace(status, incarnation=os.urandom(8)) for _ in range(count))
    return _send_statuses(client, statuses)


def names_of(client: Client, count: int) -> Iterator[str]:
    """Names to send under: with keys only that of the key, else `count` invented ones."""
    return (NAME if client.keys else f"{NAME}-{n}" for n in range(count))


def new_incarnations(client: Client, count: int) -> int:
    """Statuses of new starts of generators, without keys each under another name."""
    run_id, names = client.target.run_id, names_of(client, count)
    statuses = (wire.GeneratorStatus(run_id, name, os.urandom(8)) for name in names)
    return _send_statuses(client, statuses)


def stale_groups(client: Client, count: int) -> int:
    """Groups of the run's first weights."""
    group = replace(group_within_limits(client.target.run_id), incarnation=os.urandom(8))
    frames = (wire.encode_group(replace(group, sequence=n)) for n in range(count))
    return _send(client, ROLLOUTS, frames)


def stale_groups_of_new_incarnations(client: Client, count: int) -> int:
    """Groups of the run's first weights, each of a new start, without keys under another name."""
    group = group_within_limits(client.target.run_id)
    starts = (
        replace(group, generator_id=name, incarnation=os.urandom(8))
        for name in names_of(client, count)
    )
    return _send(client, ROLLOUTS, map(wire.encode_group, starts))


def keyframe_requests(client: Client, count: int) -> int:
    """Statuses of a generator that asks for a keyframe again and again."""
    status = wire.GeneratorStatus(client.target.run_id, NAME, os.urandom(8))
    statuses = (replace(status, wants_keyframe=n % 2 == 0) for n in range(count))
    return _send_statuses(client, statuses)


def many_frames(client: Client, count: int) -> int:
    """One message of many frames of 500 bytes, which libzmq holds until the last one arrives."""
    sent = 0
    with suppress(zmq.Again):
        opened = client.open_sender(ROLLOUTS)
        while sent < count:
            sent += 1
            opened.send(bytes(500), zmq.SNDMORE if sent < count else 0)
    return sent


def huge_group(client: Client, count: int) -> int:
    """Groups of 8 MB: 60 rollouts of 17,000 tokens."""
    group = group_within_limits(
        client.target.run_id, num_rollouts=60, num_generated=16_992, policy_step=client.target.step
    )
    frames = (wire.encode_group(replace(group, incarnation=os.urandom(8))) for _ in range(count))
    return _send(client, ROLLOUTS, frames)


def closed_connections(client: Client, count: int) -> int:
    """Connections that each send a group and close."""
    frame = wire.encode_group(group_within_limits(client.target.run_id))
    ends, sent = time.monotonic() + SEND_SECONDS, 0
    while sent < count and time.monotonic() < ends:
        opened = client.open(zmq.PUSH, ROLLOUTS)
        with suppress(zmq.Again):  # the trainer has refused the connection
            opened.send(frame)
            sent += 1
        opened.close(linger=int(1000 * STUCK_SECONDS))
    return sent


def idle_connections(client: Client, count: int) -> int:
    """Connections to the four ports that send nothing."""
    for n in range(count):
        client.connect(client.target.port + n % 4)
    return count


def idle_page_connections(client: Client, count: int) -> int:
    """Connections to the dashboard that send nothing."""
    for _ in range(count):
        client.connect(client.target.page)
    return count


def refused_subscriptions(client: Client, count: int, *, size: int) -> int:
    """Subscriptions to announcements as of a SUB, which the trainer refuses in the handshake.

    At most six connections; `size` is in bytes.
    """
    opened = [client.open(zmq.SUB, ANNOUNCEMENTS, queue=0) for _ in range(min(count, 6))]
    for n in range(count):
        opened[n % len(opened)].subscribe(os.urandom(8) + bytes(size - 8))
    return count


def large_messages(client: Client, count: int) -> int:
    """Messages of 15 MiB to the three ports, each on a connection of its own."""
    sent = 0
    with suppress(zmq.Again):
        for n in range(count):
            client.open_sender(n % len(PORTS)).send(bytes(LARGE))
            sent += 1
    return sent


def small_messages(client: Client, count: int, *, port: int) -> int:
    """Messages of 200 bytes to a port, on one connection."""
    return _send(client, port, (bytes(200) for _ in range(count)))


def version_with_large_file(client: Client, count: int) -> int:
    """A newer version with an additional file of `count` bytes, sparse on the disk of the NAS."""
    weights = client.target.weights
    newest = max(file.parent for file in weights.glob(f"step_*/{WEIGHTS_FILE}"))
    manifest = read_manifest(newest)
    number = int(newest.name[5:]) + 100
    forged = weights / f".tmp-{folder_name(number)}-forged"
    forged.mkdir()
    for name in manifest.files:
        (forged / name).write_bytes((newest / name).read_bytes())
    with (forged / "large").open("wb") as file:
        file.truncate(count)
    digest, zeros = hashlib.sha256(), bytes(1 << 20)
    for _ in range(count >> 20):
        digest.update(zeros)
    files = {**manifest.files, "large": (count, digest.hexdigest())}
    described, text = describe(files, {**manifest.about, "number": number})
    (forged / MANIFEST).write_bytes(text)
    (forged / STABLE).write_text(described.digest)
    forged.rename(weights / folder_name(number))
    time.sleep(LOAD_SECONDS)
    return count


Attack: TypeAlias = Callable[[Client, int], int]  # with the number of messages, connections, bytes
ATTACKS: dict[str, tuple[Attack, int]] = {
    "none, for comparison": (nothing, 0),
    "3,000 statuses of new starts, 8 KB each": (long_statuses, 3000),
    "100,000 new incarnations": (new_incarnations, 100_000),
    "100,000 stale groups": (stale_groups, 100_000),
    "100,000 stale groups, each of a new incarnation": (
        stale_groups_of_new_incarnations, 100_000,
    ),
    "2,000 statuses, every second with a request for a keyframe": (keyframe_requests, 2000),
    "200,000 frames of 500 bytes, all of one message to groups": (many_frames, 200_000),
    "a group of 60 rollouts of 17,000 tokens": (huge_group, 1),
    "20,000 connections that each send a group and close": (closed_connections, 20_000),
    "2,000 idle connections to the four ports": (idle_connections, 2000),
    "2,000 idle connections to the dashboard": (idle_page_connections, 2000),
    "a subscription of 15 MiB, refused": (partial(refused_subscriptions, size=LARGE), 1),
    "six subscriptions of 15 MiB, refused": (partial(refused_subscriptions, size=LARGE), 6),
    "400,000 subscriptions of 200 bytes, refused": (
        partial(refused_subscriptions, size=200), 400_000,
    ),
    "18 messages of 15 MiB to groups, announcements, statuses": (large_messages, 18),
    **{
        f"400,000 messages of 200 bytes to {name}": (partial(small_messages, port=port), 400_000)
        for port, name in enumerate(PORTS)
    },
}  # fmt: skip
