"""Hellos between a doctor and the trainer's machine: what is answered, and what is refused."""

from __future__ import annotations

import dataclasses
import os
from contextlib import ExitStack, closing
from pathlib import Path
from time import time

import msgpack
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from sockets import ANYWHERE, DEADLINE, address_of_nobody

from peralta_zmq import wire
from peralta_zmq.errors import WireError
from peralta_zmq.wire import probe
from peralta_zmq.wire.auth import generator_keys, make_keys

SAID = wire.ProbeReply("demo", run_id="demo-1", worker_info={"python": "3.11", "device": "cpu"})


def greeter(stack: ExitStack, **options: object) -> wire.ProbeServer:
    return stack.enter_context(closing(wire.ProbeServer(ANYWHERE, SAID, **options)))  # type: ignore[arg-type]


def guest(stack: ExitStack, address: str, **options: object) -> wire.ProbeClient:
    return stack.enter_context(closing(wire.ProbeClient(address, **options)))  # type: ignore[arg-type]


def test_hello_is_answered_with_the_time(stack: ExitStack) -> None:
    asker = guest(stack, greeter(stack).address)
    before = time()
    greeting, seconds = asker.request("info", timeout=DEADLINE)
    assert dataclasses.replace(greeting, time=0.0) == SAID
    assert before <= greeting.time <= time()
    assert 0 < seconds < DEADLINE


def test_file_is_shown_on_request_only(stack: ExitStack) -> None:
    names = iter(["first", "second"])
    asker = guest(stack, greeter(stack, create_file=lambda: next(names)).address)
    asked = [
        asker.request(each, timeout=DEADLINE)[0].created_file
        for each in ("info", "create_file", "create_file")
    ]
    assert asked == ["", "first", "second"]


def test_folder_that_cannot_be_written_is_told(stack: ExitStack) -> None:
    def full() -> str:
        raise OSError(28, os.strerror(28))

    greeting, _ = guest(stack, greeter(stack, create_file=full).address).request(
        "create_file", timeout=DEADLINE
    )
    assert greeting.created_file == "" and "No space left" in greeting.error


def test_burst_counts_what_arrives(stack: ExitStack) -> None:
    asker = guest(stack, greeter(stack).address)
    assert (
        asker.measure_throughput(seconds=0.1, timeout=DEADLINE) > 1e5
    )  # bytes per second, on loopback
    asker.request("info", timeout=DEADLINE)
    assert not asker._socket.poll(100), "an answer of the burst is left over"


def test_bad_request_gets_nothing_and_the_next_one_is_answered(stack: ExitStack) -> None:
    address = greeter(stack).address
    raw = zmq.Context.instance().socket(zmq.DEALER)
    stack.callback(raw.close, linger=0)
    raw.connect(address)
    for frame in (b"\xff", msgpack.packb({"request": "money"}), msgpack.packb({})):
        raw.send_multipart([b"", frame])
        assert raw.poll(int(DEADLINE * 1000)) and raw.recv_multipart() == [b"", b""]
    assert guest(stack, address).request("info", timeout=DEADLINE)[0].run == "demo"


def test_nobody_answers(stack: ExitStack) -> None:
    with pytest.raises(WireError, match="does not answer the probe"):
        guest(stack, address_of_nobody()).request("info", timeout=0.3)


def test_only_known_keys_are_answered(stack: ExitStack, tmp_path: Path) -> None:
    for name in ("trainer", "ann"):
        make_keys(tmp_path, name)
    gate = stack.enter_context(closing(wire.CurveAuthenticator(tmp_path)))
    address = greeter(stack, authenticator=gate).address
    known = guest(stack, address, keys=generator_keys(tmp_path, "ann"))
    assert known.request("info", timeout=DEADLINE)[0].run == "demo"
    with pytest.raises(WireError, match="no keys"):
        guest(stack, address).request("info", timeout=DEADLINE)


def test_greeting_of_a_later_version_is_understood() -> None:
    frame = msgpack.packb({**dataclasses.asdict(SAID), "mood": "good"})
    assert probe.decode_probe_reply(frame) == SAID


def test_greeting_of_an_earlier_version_is_understood() -> None:
    assert probe.decode_probe_reply(msgpack.packb({"run": "demo"})) == wire.ProbeReply("demo")


@pytest.mark.parametrize(
    ("field", "value"),
    [("run", 1), ("time", 3), ("time", float("nan")), ("worker_info", {"python": "3" * 129}),
     ("worker_info", {"p" * 129: "3"}), ("worker_info", {str(n): "" for n in range(33)})],
)  # fmt: skip
def test_unsound_greeting_is_refused(field: str, value: object) -> None:
    frame = msgpack.packb({**dataclasses.asdict(SAID), field: value})
    with pytest.raises(WireError, match="malformed"):
        probe.decode_probe_reply(frame)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_refused(frame: bytes) -> None:
    for decode in (probe.decode_probe_reply, probe.decode_probe_request):
        with pytest.raises(WireError):
            decode(frame)
