from __future__ import annotations

import dataclasses
import os
import random
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from time import monotonic
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq
from fakes import RUN, VOCAB_SIZE, group_of, rollout_with
from hypothesis import given, settings
from hypothesis import strategies as st

from peralta_zmq import wire
from peralta_zmq.errors import WireError
from peralta_zmq.learning.admission import Ledger
from peralta_zmq.rollout import RolloutGroup
from peralta_zmq.wire import messages, sockets

ANYWHERE = "tcp://127.0.0.1:*"
DEADLINE = 10.0  # seconds
BUFFERS = ("tokens", "mask", "logprobs", "steps")
GROUP = group_of([1.0, 0.0, 0.25], lengths=[4, 1, 7], sequence=5, policy_step=3)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def receiver_at(address: str = ANYWHERE) -> wire.RolloutReceiver:
    return wire.RolloutReceiver(address, run_id=RUN, vocab_size=VOCAB_SIZE)


def pair(stack: ExitStack) -> tuple[wire.RolloutReceiver, wire.RolloutSender]:
    receiver = stack.enter_context(closing(receiver_at()))
    return receiver, sender_to(receiver.address, stack)


def sender_to(address: str, stack: ExitStack) -> wire.RolloutSender:
    """A sender that leaves nothing behind."""
    sender = wire.RolloutSender(address)
    stack.callback(sender.close, linger_seconds=0)
    return sender


def address_of_nobody() -> str:
    """A port that was free a moment ago."""
    with zmq.Context() as context, context.socket(zmq.PULL) as probe:
        return f"tcp://127.0.0.1:{probe.bind_to_random_port('tcp://127.0.0.1')}"


def raw_sender(stack: ExitStack, address: str) -> zmq.Socket[bytes]:
    """A sender that keeps no rule."""
    opened = zmq.Context.instance().socket(zmq.PUSH)
    stack.callback(opened.close, linger=0)
    opened.connect(address)
    return opened


def received(receiver: wire.RolloutReceiver) -> RolloutGroup:
    """The next valid group within the deadline."""
    ends = monotonic() + DEADLINE
    while monotonic() < ends:
        if (got := receiver.receive(timeout=0.1)) is not None:
            return got[0]
    raise AssertionError("no group came")


def decoded(frame: bytes) -> RolloutGroup:
    return wire.decode_group(frame, vocab_size=VOCAB_SIZE)


def changed(group: RolloutGroup = GROUP, **fields: Any) -> bytes:
    """The group's frame with some wire fields replaced and the checksum made to agree."""
    said = {**msgpack.unpackb(wire.encode_group(group)), **fields}
    if "crc32" not in fields and all(isinstance(said[name], bytes) for name in BUFFERS):
        said["crc32"] = zlib.crc32(b"".join(said[name] for name in BUFFERS))
    return msgpack.packb(said)


def same(ours: RolloutGroup, theirs: RolloutGroup) -> bool:
    """Equal in every field, every array bit and every dtype."""
    plain = dataclasses.replace(ours, rollouts=()) == dataclasses.replace(theirs, rollouts=())
    return plain and all(
        (a.reward, a.rewards, a.finish_reason) == (b.reward, b.rewards, b.finish_reason)
        and all(
            x.dtype == y.dtype and x.tobytes() == y.tobytes()
            for x, y in ((a.token_ids, b.token_ids), (a.loss_mask, b.loss_mask),
                         (a.logprobs, b.logprobs), (a.policy_steps, b.policy_steps))
        )
        for a, b in zip(ours.rollouts, theirs.rollouts, strict=True)
    )  # fmt: skip


# The message.


def test_round_trip_keeps_every_field() -> None:
    assert same(decoded(wire.encode_group(GROUP)), GROUP)


def test_round_trip_keeps_parts_and_finish_reasons() -> None:
    rollouts = (
        rollout_with(1.5, policy_step=3, rewards={"right": 1.0, "short": 0.5}),
        rollout_with(0.0, policy_step=4, finish_reason="length"),
    )
    group = dataclasses.replace(GROUP, rollouts=rollouts)
    assert same(decoded(wire.encode_group(group)), group)


def test_round_trip_keeps_the_largest_sequence() -> None:
    group = dataclasses.replace(GROUP, sequence=2**64 - 1)
    assert decoded(wire.encode_group(group)).sequence == 2**64 - 1


def test_round_trip_keeps_names_beyond_ascii() -> None:
    group = dataclasses.replace(GROUP, problem_id="π/7", generator_id="jürgen's mac")
    assert same(decoded(wire.encode_group(group)), group)


def test_message_holds_little_endian_buffers_on_every_machine() -> None:
    rollout = rollout_with(1.0)
    foreign = dataclasses.replace(rollout, token_ids=rollout.token_ids.astype(">i4"))
    group = dataclasses.replace(GROUP, rollouts=(foreign,))
    native = dataclasses.replace(GROUP, rollouts=(rollout,))
    assert wire.encode_group(group) == wire.encode_group(native)


@given(
    rewards=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=5),
    sequence=st.integers(0, 2**64 - 1),
    step=st.integers(0, 2**31),
    name=st.text(max_size=30),
    boot=st.binary(min_size=8, max_size=8),
)
@settings(max_examples=50, deadline=None, database=None)
def test_any_group_comes_back_exactly(
    rewards: list[float], sequence: int, step: int, name: str, boot: bytes
) -> None:
    group = group_of(
        rewards, sequence=sequence, policy_step=step, generator_id=name, boot=boot, task=name
    )
    assert same(decoded(wire.encode_group(group)), group)


def test_group_above_the_limit_is_refused_by_its_sender(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(messages, "MAX_MESSAGE", len(wire.encode_group(GROUP)) - 1)
    with pytest.raises(WireError, match="max_completion_length"):
        wire.encode_group(GROUP)


def test_group_at_the_limit_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = wire.encode_group(GROUP)
    monkeypatch.setattr(messages, "MAX_MESSAGE", len(frame))
    assert wire.encode_group(GROUP) == frame


# What is refused, and by which rule.

ZEROS = {"tokens": bytes(48), "mask": bytes(12), "logprobs": bytes(48)}  # 12 tokens in all


NEEDED = [name for name in msgpack.unpackb(wire.encode_group(GROUP)) if name != "floor"]


@pytest.mark.parametrize("name", NEEDED)
def test_missing_field_is_refused(name: str) -> None:
    said = msgpack.unpackb(wire.encode_group(GROUP))
    del said[name]
    with pytest.raises(WireError, match=name):
        decoded(msgpack.packb(said))


@pytest.mark.parametrize("value", [None, True, -1, 1.5, "x", b"x", [], {}, [None], {"x": 1}])
@pytest.mark.parametrize("name", list(msgpack.unpackb(wire.encode_group(GROUP))))
def test_field_of_another_type_is_refused(name: str, value: Any) -> None:
    fits = name in ("run", "gen", "wid", "problem", "task") and value == "x"
    if not fits:
        with pytest.raises(WireError):
            decoded(changed(**{name: value}))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"v": 2}, "version"),
        ({"crc32": 1}, "checksum"),
        ({"boot": b"seven.."}, "boot"),
        ({"boot": b"nine bytes"[:9]}, "boot"),
        ({"seq": -1}, "negative"),
        ({"floor": 99}, "floor above the sequence"),
        ({"floor": -1}, "floor above the sequence"),
        ({"step": -1}, "negative"),
        ({"n": []}, "without tokens"),
        ({"n": [7, 4, 0]}, "without tokens"),
        ({"n": [7, 4, 11]}, "unequal"),
        ({"n": [7, 4]}, "unequal"),
        ({"n": [2**64 - 1, 7, 4]}, "unequal"),
        ({"n": [True, 4, 10]}, "is not int"),
        ({"rewards": [1.0, 0.0]}, "unequal"),
        ({"rewards": [1.0, 0.0, float("nan")]}, "finite"),
        ({"rewards": [1.0, 0.0, float("inf")]}, "finite"),
        ({"rewards": [1.0, 0.0, 1e308]}, "out of bounds"),
        ({"rewards": [1.0, 0.0, "1"]}, "finite"),
        ({"rewards": [1.0, 0.0, True]}, "finite"),
        ({"parts": [{}, {}]}, "unequal"),
        ({"parts": [{}, {}, {"x": float("nan")}]}, "finite"),
        ({"parts": [{}, {}, {b"x": 1.0}]}, "is not str"),
        ({"parts": [{}, {}, 1.0]}, "is not dict"),
        ({"parts": [{}, {}, []]}, "more than 4 lists"),
        ({"finish": [0, 0, 2]}, "finish"),
        ({"finish": [0, 0, -1]}, "finish"),
        ({"finish": [0, 0]}, "unequal"),
    ],
)
def test_broken_rule_is_named(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        decoded(changed(**fields))


def with_arrays(**arrays: Any) -> bytes:
    """One rollout of 7 tokens, 3 of them prompt, with some of its buffers replaced."""
    return changed(group_of([1.0]), **{name: array.tobytes() for name, array in arrays.items()})


LOGPROBS = np.array([0, 0, 0, -1, -1, -1, -1], "<f4")
TOKENS = np.array([3, 4, 5, 6, 7, 8, 9], "<i4")


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ({"tokens": np.where(TOKENS == 6, VOCAB_SIZE, TOKENS).astype("<i4")}, "vocabulary"),
        ({"tokens": np.where(TOKENS == 6, -1, TOKENS).astype("<i4")}, "vocabulary"),
        ({"tokens": TOKENS[:6]}, "unequal"),
        ({"tokens": TOKENS.astype("<i2")}, "malformed"),
        ({"mask": np.array([0, 0, 0, 1, 1, 1], np.uint8)}, "unequal"),
        ({"mask": np.array([0, 0, 0, 1, 1, 1, 2], np.uint8)}, "boolean"),
        ({"mask": np.zeros(7, np.uint8)}, "without prompt or completion"),
        (
            {"mask": np.ones(7, np.uint8), "steps": np.zeros(7, "<i4")},
            "without prompt or completion",
        ),
        ({"logprobs": np.where(LOGPROBS < 0, np.nan, 0).astype("<f4")}, "finite"),
        ({"logprobs": np.where(LOGPROBS < 0, -np.inf, 0).astype("<f4")}, "finite"),
        ({"logprobs": -LOGPROBS}, "above zero"),
        ({"logprobs": LOGPROBS[:5]}, "unequal"),
    ],
)
def test_array_that_breaks_a_rule_is_refused(arrays: dict[str, Any], reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        decoded(with_arrays(**arrays))


def test_logprob_a_rounding_above_zero_is_accepted() -> None:
    frame = with_arrays(logprobs=np.where(LOGPROBS < 0, 5e-4, 0).astype("<f4"))
    assert decoded(frame).rollouts[0].logprobs[3] == np.float32(5e-4)


def test_damaged_buffer_is_caught_by_the_checksum() -> None:
    frame = wire.encode_group(GROUP)
    tokens = GROUP.rollouts[0].token_ids.tobytes()
    worse = bytes([tokens[0] ^ 1]) + tokens[1:]
    with pytest.raises(WireError, match="checksum"):
        decoded(frame.replace(tokens, worse, 1))


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",  # never used by msgpack
        msgpack.packb(None),
        msgpack.packb([1, 2]),
        msgpack.packb("text"),
        msgpack.packb({1: 2}),
        msgpack.packb({"v": msgpack.ExtType(5, b"payload")}),
        msgpack.packb({"v": msgpack.Timestamp(0, 1)}),
        msgpack.packb({str(n): n for n in range(65)}),
        msgpack.packb({"v": "s" * 1025}),
        msgpack.packb({"v": [0] * 4097}),
        msgpack.packb({"v": b"\xff"}).replace(b"\xc4", b"\xd9"),  # text that is not UTF-8
        b"\x91" * 2000,  # 2000 lists in each other
        wire.encode_group(GROUP) + b"\0",
        wire.encode_group(GROUP)[:-1],
    ],
    ids=lambda frame: f"{len(frame)}_bytes",
)
def test_what_is_not_a_message_is_refused(frame: bytes) -> None:
    with pytest.raises(WireError):
        decoded(frame)


def only_wire_error(frame: bytes) -> None:
    try:
        group = decoded(frame)
    except WireError:
        return
    assert same(decoded(wire.encode_group(group)), group)  # what passes is a group


def test_no_mutation_of_a_frame_raises_anything_else() -> None:
    chance, frame = random.Random(0), wire.encode_group(GROUP)
    for _ in range(10_000):
        mutant = bytearray(frame)
        for _ in range(chance.randint(1, 4)):
            position, length = chance.randrange(len(mutant)), chance.randint(0, 3)
            mutant[position : position + length] = chance.randbytes(chance.randint(0, 3))
        only_wire_error(bytes(mutant))


def test_no_random_bytes_raise_anything_else() -> None:
    chance = random.Random(1)
    for _ in range(10_000):
        only_wire_error(chance.randbytes(chance.randint(0, 60)))


STRANGE = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers(-(2**63), 2**64 - 1)
    | st.text(max_size=5) | st.binary(max_size=60),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.text(max_size=3) | st.binary(max_size=3), inner, max_size=3),
    max_leaves=10,
)  # fmt: skip


@given(
    fields=st.dictionaries(
        st.sampled_from(list(msgpack.unpackb(wire.encode_group(GROUP)))), STRANGE, min_size=1
    )
)
@settings(max_examples=500, deadline=None, database=None)
def test_no_strange_field_raises_anything_else(fields: dict[str, Any]) -> None:
    only_wire_error(changed(**fields))


BOMBS = {
    "empty maps": lambda: b"\xdd\x00\x00\x10\x00" * 2 + b"\x80" * (messages.MAX_MESSAGE - 10),
    "lists of maps": lambda: nested(b"\x80", 4000),
    "maps of maps": lambda: b"\xdc\x04\xb0" + maps_of(maps_of(b"\x80")) * 1200,
    "lists of integers": lambda: nested(b"\x01", 4000),
    "one long name": lambda: changed(run=bytes(messages.MAX_MESSAGE - 2000)),
}


def maps_of(element: bytes) -> bytes:
    """A map of 64 equal elements."""
    return b"\xde\x00\x40" + b"".join(b"\xa1%c" % (33 + n) + element for n in range(64))


def nested(element: bytes, count: int) -> bytes:
    """4000 lists of `count` equal elements, at most 16 MiB."""
    row = b"\xdc" + count.to_bytes(2, "big") + element * count
    return b"\xdc" + (4000).to_bytes(2, "big") + row * 4000


@pytest.mark.parametrize("name", list(BOMBS))
def test_bomb_is_refused_within_50_megabytes(name: str) -> None:
    frame = BOMBS[name]()
    assert len(frame) <= messages.MAX_MESSAGE
    tracemalloc.start()
    with pytest.raises(WireError):
        decoded(frame)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50e6


# Rollouts over sockets.


def test_group_arrives_with_its_frame(stack: ExitStack) -> None:
    receiver, sender = pair(stack)
    frame = wire.encode_group(GROUP)
    assert sender.send(frame, timeout=DEADLINE)
    got = receiver.receive(timeout=DEADLINE)
    assert got is not None
    assert same(got[0], GROUP) and got[1] == frame


def test_receive_gives_none_when_nothing_comes(stack: ExitStack) -> None:
    receiver, _ = pair(stack)
    assert receiver.receive(timeout=0.01) is None


def bad_version() -> list[bytes]:
    return [changed(v=2)]


def bad_run() -> list[bytes]:
    return [wire.encode_group(dataclasses.replace(GROUP, run_id="other-1"))]


def bad_frames() -> list[bytes]:
    return [wire.encode_group(GROUP), b"tail"]


def bad_bytes() -> list[bytes]:
    return [b"GET / HTTP/1.1"]


@pytest.mark.parametrize(
    ("frames", "reason"),
    [(bad_version, "version"), (bad_run, "another run"), (bad_frames, "2 frames"),
     (bad_bytes, "not a message")],
)  # fmt: skip
def test_bad_message_is_counted_and_the_next_good_one_received(
    stack: ExitStack, frames: Callable[[], list[bytes]], reason: str
) -> None:
    receiver = stack.enter_context(closing(receiver_at()))
    sender = raw_sender(stack, receiver.address)
    sender.send_multipart(frames())
    sender.send(wire.encode_group(GROUP))
    assert same(received(receiver), GROUP)
    ((said, count),) = receiver.refused.items()
    assert reason in said and count == 1


def test_reasons_remembered_are_bounded(stack: ExitStack) -> None:
    receiver = stack.enter_context(closing(receiver_at()))
    sender = raw_sender(stack, receiver.address)
    for number in range(300):
        sender.send(changed(v=number + 2))
        while not sum(receiver.refused.values()) > number:
            assert receiver.receive(timeout=DEADLINE) is None
    assert len(receiver.refused) <= sockets.MAX_REASONS + 1
    assert sum(receiver.refused.values()) == 300


def accepted(sender: wire.RolloutSender, frame: bytes, *, limit: int) -> int:
    """Groups that the sender takes while nobody reads."""
    count = 0
    while count < limit and sender.send(frame, timeout=0.3):
        count += 1
    return count


def frame_of_4_kilobytes() -> bytes:
    frame = wire.encode_group(group_of([1, 0, 0, 1], lengths=[107] * 4))
    assert 3900 < len(frame) < 6000
    return frame


def test_sender_stops_when_the_trainer_does_not_read(stack: ExitStack) -> None:
    _, sender = pair(stack)
    assert accepted(sender, frame_of_4_kilobytes(), limit=64) < 32


def test_sender_stops_when_there_is_no_trainer(stack: ExitStack) -> None:
    sender = sender_to(address_of_nobody(), stack)
    assert accepted(sender, frame_of_4_kilobytes(), limit=64) <= 2


def test_sender_goes_on_when_the_trainer_reads_again(stack: ExitStack) -> None:
    receiver, sender = pair(stack)
    accepted(sender, frame_of_4_kilobytes(), limit=64)
    ends = monotonic() + DEADLINE
    while not sender.send(frame_of_4_kilobytes(), timeout=0.05):
        received(receiver)
        assert monotonic() < ends


def test_groups_of_one_sender_arrive_in_order(stack: ExitStack) -> None:
    receiver, sender = pair(stack)
    numbers = []
    for number in range(50):
        frame = wire.encode_group(dataclasses.replace(GROUP, sequence=number))
        while not sender.send(frame, timeout=0.0):
            numbers.append(received(receiver).sequence)
    while len(numbers) < 50:
        numbers.append(received(receiver).sequence)
    assert numbers == list(range(50))


def test_trainer_bound_again_on_its_port_receives_what_is_sent_afterwards(
    stack: ExitStack,
) -> None:
    first = receiver_at()
    sender = sender_to(first.address, stack)
    assert sender.send(wire.encode_group(GROUP), timeout=DEADLINE)
    received(first)
    first.close()
    second = stack.enter_context(closing(bound_again(first.address)))
    afterwards = wire.encode_group(dataclasses.replace(GROUP, sequence=6))
    ends = monotonic() + DEADLINE
    got = None
    while got is None:  # what left before the old connection was known to be dead is lost
        assert monotonic() < ends
        sender.send(afterwards, timeout=0.05)
        got = second.receive(timeout=0.05)
    assert got[0].sequence == 6


def bound_again(address: str) -> wire.RolloutReceiver:
    """libzmq closes in the background, so the port may be ours for some milliseconds more."""
    ends = monotonic() + DEADLINE
    while True:
        try:
            return receiver_at(address)
        except WireError:
            if monotonic() > ends:
                raise


def test_sender_closes_within_its_linger_when_the_trainer_is_absent() -> None:
    zmq.Context.instance().term()  # with what other tests left lingering
    sender = wire.RolloutSender(address_of_nobody())
    assert sender.send(wire.encode_group(GROUP), timeout=DEADLINE)
    started = monotonic()
    sender.close(linger_seconds=0.2)
    zmq.Context.instance().term()  # waits for what lingers
    assert 0.15 < monotonic() - started < 3


# Ports.


def test_port_in_use_names_its_holder_and_the_remedy(stack: ExitStack) -> None:
    receiver = stack.enter_context(closing(receiver_at()))
    port = receiver.address.rpartition(":")[2]
    with pytest.raises(WireError, match=rf"port {port} .*pid {os.getpid()} .*--wire\.port"):
        receiver_at(receiver.address)


def test_address_that_is_not_ours_names_the_setting() -> None:
    with pytest.raises(WireError, match=r"192\.0\.2\.1.*wire\.bind"):
        receiver_at("tcp://192.0.2.1:5555")


def test_announcements_are_on_the_next_port() -> None:
    assert wire.next_port("tcp://10.0.0.1:5555") == "tcp://10.0.0.1:5556"


def test_bound_port_answers(stack: ExitStack) -> None:
    receiver = stack.enter_context(closing(receiver_at()))
    assert wire.answers(receiver.address)


def test_closed_port_does_not_answer() -> None:
    assert not wire.answers(address_of_nobody())


# Announcements.


def announcing(stack: ExitStack) -> tuple[wire.Announcer, wire.Listener]:
    announcer = stack.enter_context(closing(wire.Announcer(ANYWHERE)))
    listener = stack.enter_context(closing(wire.Listener(announcer.address)))
    return announcer, listener


def heard(
    announcer: wire.Announcer, listener: wire.Listener, said: wire.Announcement
) -> wire.Announcement | None:
    """What the listener heard last, once it has joined; announcements before that are lost."""
    ends = monotonic() + DEADLINE
    while monotonic() < ends:
        announcer.announce(said)
        if (latest := listener.listen(timeout=0.1)) == said:
            return latest
    return listener.latest


def test_announcement_arrives_whole(stack: ExitStack) -> None:
    said = wire.Announcement(
        run_id=RUN,
        boot=b"8 bytes.",
        step=7,
        version=9,
        recv={"ann/00": 5},
        durable={"ann/00": 5},
        seen={"ann/00": 7},
        done=True,
    )
    assert heard(*announcing(stack), said) == said


def test_listener_keeps_the_newest_of_many(stack: ExitStack) -> None:
    announcer, listener = announcing(stack)
    heard(announcer, listener, wire.Announcement(RUN, step=0))
    for step in range(1, 6):
        announcer.announce(wire.Announcement(RUN, step=step))
    ends = monotonic() + DEADLINE
    while listener.listen(timeout=0.1) != wire.Announcement(RUN, step=5):
        assert monotonic() < ends


def test_listener_that_heard_nothing_says_none(stack: ExitStack) -> None:
    _, listener = announcing(stack)
    assert listener.listen(timeout=0.01) is None


def test_announcing_to_nobody_never_blocks(stack: ExitStack) -> None:
    announcer = stack.enter_context(closing(wire.Announcer(ANYWHERE)))
    started = monotonic()
    for step in range(1000):
        announcer.announce(wire.Announcement(RUN, step=step))
    assert monotonic() - started < 2


def test_announcing_to_a_listener_that_does_not_read_never_blocks(stack: ExitStack) -> None:
    announcer, listener = announcing(stack)
    heard(announcer, listener, wire.Announcement(RUN))
    started = monotonic()
    for step in range(5000):
        announcer.announce(wire.Announcement(RUN, step=step))
    assert monotonic() - started < 5


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        msgpack.packb([1]),
        msgpack.packb(None),
        msgpack.packb({}),
        msgpack.packb({"run_id": 5}),
        msgpack.packb({"run_id": RUN, "step": "7"}),
        msgpack.packb({"run_id": RUN, "version": 1.5}),
        msgpack.packb({"run_id": RUN, "durable": None}),
        msgpack.packb({"run_id": RUN, "durable": {"ann": "5"}, "seen": {"ann": 5}}),
        msgpack.packb({"run_id": RUN, "seen": {b"ann": 5}}),
        msgpack.packb({"run_id": RUN, "boot": "text"}),
        msgpack.packb({"run_id": RUN, "done": 1}),
    ],
    ids=repr,
)
def test_malformed_announcement_is_refused(frame: bytes) -> None:
    with pytest.raises(WireError):
        wire.decode_announcement(frame)


def test_announcement_of_a_later_version_is_understood() -> None:
    frame = msgpack.packb({"run_id": RUN, "step": 4, "mood": "good"})
    assert wire.decode_announcement(frame) == wire.Announcement(RUN, step=4)


def test_announcement_holds_a_thousand_senders() -> None:
    said = wire.Announcement(RUN, durable={f"generator-{n}/0011": n for n in range(1000)})
    assert wire.decode_announcement(msgpack.packb(dataclasses.asdict(said))) == said


def test_refused_announcement_leaves_the_latest(stack: ExitStack) -> None:
    publisher = zmq.Context.instance().socket(zmq.PUB)
    stack.callback(publisher.close, linger=0)
    port = publisher.bind_to_random_port("tcp://127.0.0.1")
    listener = stack.enter_context(closing(wire.Listener(f"tcp://127.0.0.1:{port}")))
    good = wire.Announcement(RUN, step=1)
    ends = monotonic() + DEADLINE
    while listener.listen(timeout=0.1) is None and monotonic() < ends:
        publisher.send(msgpack.packb(dataclasses.asdict(good)))
        publisher.send(b"\xc1")
    assert listener.listen(timeout=0.1) == good


def test_announcer_names_a_port_in_use(stack: ExitStack) -> None:
    announcer = stack.enter_context(closing(wire.Announcer(ANYWHERE)))
    with pytest.raises(WireError, match=r"in use by pid"):
        wire.Announcer(announcer.address)


def test_what_died_with_the_trainer_comes_again_and_everything_exactly_once(
    stack: ExitStack,
) -> None:
    first = receiver_at()
    sender, outbox = sender_to(first.address, stack), wire.Outbox(GROUP.sender)
    outbox.lost_on_the_way(wire.Announcement(RUN, boot=b"first"))
    for number in range(6):
        frame = wire.encode_group(dataclasses.replace(GROUP, sequence=number))
        outbox.add(number, frame)
        assert sender.send(frame, timeout=DEADLINE)
    ledger, taken = Ledger(), []
    for _ in range(2):
        group = received(first)
        ledger.settle(group.sender, group.sequence, "trained")
        taken.append(group.sequence)
    first.close()  # with four in its queues

    second = stack.enter_context(closing(bound_again(first.address)))
    restarted = wire.Announcement(RUN, boot=b"second", durable={GROUP.sender: 1})
    for frame in outbox.lost_on_the_way(restarted):
        assert sender.send(frame, timeout=DEADLINE)
    ends = monotonic() + DEADLINE
    while not {*range(6)} <= {*taken}:
        assert monotonic() < ends
        got = second.receive(timeout=0.5)
        if got is None:  # all went into the dead connection: a later group shows the gap
            number += 1
            outbox.add(number, wire.encode_group(dataclasses.replace(GROUP, sequence=number)))
            sender.send(wire.encode_group(dataclasses.replace(GROUP, sequence=number)), timeout=0)
        elif ledger.settle(got[0].sender, got[0].sequence, "trained"):
            taken.append(got[0].sequence)
        seen = {GROUP.sender: ledger.seen(GROUP.sender)}
        settled = {GROUP.sender: ledger.settled(GROUP.sender)}
        said = wire.Announcement(RUN, boot=b"second", durable=settled, seen=seen)
        for frame in outbox.lost_on_the_way(said):
            sender.send(frame, timeout=DEADLINE)
    assert len(taken) == len({*taken})
