"""Probe: replies, throughput, created files, refused requests and clients."""

from __future__ import annotations

import dataclasses
import os
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from threading import Event
from time import time
from typing import Any

import msgpack
import pytest
import zmq
from sockets import ANYWHERE, DEADLINE, raw_socket, unused_address

from peralta_zmq import wire
from peralta_zmq.errors import WireError
from peralta_zmq.wire import probe
from peralta_zmq.wire.auth import generator_keys, make_keys
from peralta_zmq.wire.message_fields import pack_with_checksum
from peralta_zmq.wire.rollout_sockets import open_socket

REPLY = wire.ProbeReply("demo", run_id="demo-1")


def server(stack: ExitStack, **options: Any) -> wire.ProbeServer:
    return stack.enter_context(closing(wire.ProbeServer(ANYWHERE, REPLY, **options)))


def client(stack: ExitStack, address: str, **options: Any) -> wire.ProbeClient:
    return stack.enter_context(closing(wire.ProbeClient(address, **options)))


def test_probe_reply_has_the_time(stack: ExitStack) -> None:
    before = time()
    reply, seconds = client(stack, server(stack).address).request("info", timeout=DEADLINE)
    assert dataclasses.replace(reply, time=0.0) == REPLY
    assert before <= reply.time <= time()
    assert 0 < seconds < DEADLINE


def test_probe_creates_a_file_only_on_request(stack: ExitStack) -> None:
    names = iter(["first", "second"])
    prober = client(stack, server(stack, create_file=lambda: next(names)).address)
    requests: list[probe.ProbeRequest] = ["info", "create_file", "create_file"]
    created = [prober.request(kind, timeout=DEADLINE)[0].created_file for kind in requests]
    assert created == ["", "first", "second"]


def test_probe_reports_why_a_file_was_not_created(stack: ExitStack) -> None:
    def disk_full() -> str:
        raise OSError(28, os.strerror(28))

    prober = client(stack, server(stack, create_file=disk_full).address)
    reply, _ = prober.request("create_file", timeout=DEADLINE)
    assert reply.created_file == "" and "No space left" in reply.error


def test_unread_requests_of_a_connection_are_bounded(stack: ExitStack) -> None:
    can_continue = Event()

    def hanging_mount() -> str:
        can_continue.wait(DEADLINE)
        return "name"

    address = server(stack, create_file=hanging_mount).address
    stack.callback(can_continue.set)
    hostile, sent = stack.enter_context(open_socket(zmq.DEALER, hwm=1)), 0
    hostile.setsockopt(zmq.SNDTIMEO, 500)  # ms
    hostile.connect(address)
    hostile.send_multipart([b"", probe.encode_probe_request("create_file")])
    request = probe.encode_probe_request("discard", bytes(probe.CHUNK))
    with suppress(zmq.Again):
        while sent < 50:
            hostile.send_multipart([b"", request])
            sent += 1
    assert sent < 40  # the queues of both sides and the buffers of the kernel are full


def test_measure_throughput_waits_for_every_reply(stack: ExitStack) -> None:
    prober = client(stack, server(stack).address)
    assert prober.measure_throughput(seconds=0.1, timeout=DEADLINE) > 1e5  # bytes/s, on loopback
    prober.request("info", timeout=DEADLINE)
    assert not prober.socket.poll(100), "a reply of the measurement is left over"


def test_probe_answers_after_invalid_requests(stack: ExitStack) -> None:
    address = server(stack).address
    raw = raw_socket(stack, address, zmq.DEALER)
    for frame in (b"\xff", msgpack.packb({"request": "money"}), msgpack.packb({})):
        raw.send_multipart([b"", frame])
        assert raw.poll(int(DEADLINE * 1000)) and raw.recv_multipart() == [b"", b""]
    assert client(stack, address).request("info", timeout=DEADLINE)[0].run == "demo"


def test_probe_without_a_server_times_out(stack: ExitStack) -> None:
    with pytest.raises(WireError, match="does not answer the probe"):
        client(stack, unused_address()).request("info", timeout=0.3)


def test_probe_answers_known_keys_only(stack: ExitStack, tmp_path: Path) -> None:
    timing = wire.ConnectionTiming(patience_seconds=0.5, retry_seconds=0.05)
    for name in ("trainer", "ann"):
        make_keys(tmp_path, name)
    authenticator = stack.enter_context(closing(wire.Authenticator(tmp_path)))
    address = server(stack, authenticator=authenticator).address
    known = client(stack, address, keys=generator_keys(tmp_path, "ann"))
    assert known.request("info", timeout=DEADLINE)[0].run == "demo"
    with pytest.raises(WireError, match="no keys"):
        client(stack, address, timing=timing).request("info", timeout=DEADLINE)


@pytest.mark.parametrize(
    ("message", "reply"),
    [({**dataclasses.asdict(REPLY), "added": "later"}, REPLY),
     ({"run": "demo"}, wire.ProbeReply("demo"))],
    ids=["later", "earlier"],
)  # fmt: skip
def test_probe_reply_of_another_version_is_read(
    message: dict[str, Any], reply: wire.ProbeReply
) -> None:
    assert probe.decode_probe_reply(pack_with_checksum(message)) == reply


@pytest.mark.parametrize(
    ("field", "value"),
    [("run", 1), ("time", 3), ("time", float("nan"))],
)  # fmt: skip
def test_malformed_probe_reply_is_refused(field: str, value: object) -> None:
    frame = pack_with_checksum({**dataclasses.asdict(REPLY), field: value})
    with pytest.raises(WireError, match="malformed"):
        probe.decode_probe_reply(frame)


def test_request_without_delimiter_does_not_stop_the_server(stack: ExitStack) -> None:
    address = server(stack).address
    raw_socket(stack, address, zmq.DEALER).send(probe.encode_probe_request("info"))
    reply, _ = client(stack, address).request("info", timeout=DEADLINE)
    assert reply.run_id == REPLY.run_id
