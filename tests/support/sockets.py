"""Sockets on random ports for tests, closed by an ExitStack, and waiting with a deadline."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from time import monotonic
from typing import Any

import zmq
from sample_data import RUN, VOCAB_SIZE, group_of

from peralta_zmq import wire
from peralta_zmq.errors import WireError
from peralta_zmq.rollout import RolloutGroup

ANYWHERE = "tcp://127.0.0.1:*"
DEADLINE = 30.0  # seconds, for operations that take milliseconds
GREETING = b"\xff" + bytes(8) + b"\x7f\3\0NULL" + bytes(48)  # of ZMTP 3.0
GROUP = group_of([1.0, 0.0, 0.25], lengths=[4, 1, 7], group_number=5, policy_step=3)


def receiver_at(address: str = ANYWHERE, **options: Any) -> wire.RolloutReceiver:
    options = {"limits": wire.GroupLimits(VOCAB_SIZE), **options}
    return wire.RolloutReceiver(address, run_id=RUN, **options)


def sender_to(address: str, stack: ExitStack, **options: Any) -> wire.RolloutSender:
    """A sender that is closed without lingering."""
    sender = wire.RolloutSender(address, **options)
    stack.callback(sender.close, linger_seconds=0)
    return sender


def pair(stack: ExitStack) -> tuple[wire.RolloutReceiver, wire.RolloutSender]:
    receiver = stack.enter_context(closing(receiver_at()))
    return receiver, sender_to(receiver.address, stack)


def raw_socket(stack: ExitStack, address: str, kind: int = zmq.PUSH) -> zmq.Socket[bytes]:
    """A bare socket that can send invalid messages."""
    opened = zmq.Context.instance().socket(kind)
    stack.callback(opened.close, linger=0)
    opened.connect(address)
    return opened


def hello(kind: str) -> bytes:
    """What a client without keys sends first, by the protocol of ZeroMQ (ZMTP 3.0).

    `kind` is the type of its socket, such as PUSH.
    """
    ready = b"\5READY" + b"\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind.encode()
    return GREETING + b"\4" + bytes([len(ready)]) + ready


def frame_of(content: bytes) -> bytes:
    """A message of one frame as a client without keys sends it."""
    if len(content) < 256:
        return b"\0" + bytes([len(content)]) + content
    return b"\2" + len(content).to_bytes(8, "big") + content


def unused_address() -> str:
    """An address on which nothing listens."""
    with zmq.Context() as context, context.socket(zmq.PULL) as probe:
        return f"tcp://127.0.0.1:{probe.bind_to_random_port('tcp://127.0.0.1')}"


def bound_again(address: str, opens: Callable[..., Any] = receiver_at, **options: Any) -> Any:
    """Bind a port that was just closed: libzmq closes sockets in the background."""
    ends = monotonic() + DEADLINE
    while True:
        try:
            return opens(address, **options)
        except WireError:
            if monotonic() > ends:
                raise


def numbered(group_number: int, **fields: Any) -> bytes:
    """The frame of a small group."""
    return wire.encode_group(dataclasses.replace(GROUP, group_number=group_number, **fields))


def received(receiver: wire.RolloutReceiver, seconds: float = DEADLINE) -> RolloutGroup:
    """The next valid group within the deadline."""
    for _ in until(seconds):
        if (message := receiver.receive(timeout=0.1)) is not None:
            return message[0]
    raise AssertionError("no group received")


def drained(receiver: wire.RolloutReceiver, quiet: float = 0.5) -> list[RolloutGroup]:
    """All groups received until none arrives for `quiet` seconds."""
    groups = []
    while (message := receiver.receive(timeout=quiet)) is not None:
        groups.append(message[0])
    return groups


def until(seconds: float = DEADLINE) -> Iterator[None]:
    """Iterations of a loop for `seconds`."""
    ends = monotonic() + seconds
    while monotonic() < ends:
        yield


def eventually(condition: Callable[[], Any], seconds: float = DEADLINE) -> Any:
    """The first true value of `condition`, which itself waits a little."""
    for _ in until(seconds):
        if value := condition():
            return value
    raise AssertionError("condition not met in time")
