"""What all messages have in common: one bounded map, names, a checksum."""

from __future__ import annotations

import dataclasses

import pytest
from group_frames import (
    FRAME,
    allocated_below,
    changed,
    decoded,
    equal,
    msgpack,
    open_maps,
    sealed,
    wide_open_maps,
)
from sample_data import RUN
from sockets import GROUP

from peralta_zmq import wire
from peralta_zmq.errors import WireError
from peralta_zmq.wire import message_fields, probe
from peralta_zmq.wire.announcements import MAX_ANNOUNCEMENT, decode_announcement
from peralta_zmq.wire.generator_status import decode_generator_status


def test_generator_name_has_one_limit_in_all_messages() -> None:
    longest = "x" * 128
    group = decoded(wire.encode_group(dataclasses.replace(GROUP, generator_id=longest)))
    announcement = wire.Announcement(RUN, senders={group.sender: wire.SenderProgress(durable=5)})
    assert decode_announcement(message_fields.encode_fields(announcement)) == announcement
    status = wire.GeneratorStatus(RUN, longest, GROUP.incarnation)
    assert decode_generator_status(message_fields.encode_fields(status)).sender == group.sender
    longer = longest + "x"
    with pytest.raises(WireError, match="name of more than 128 characters"):
        wire.encode_group(dataclasses.replace(GROUP, generator_id=longer))
    with pytest.raises(WireError, match="name of more than 128 characters"):
        decoded(changed(generator_id=longer))
    with pytest.raises(WireError, match="name of more than 128 characters"):
        decode_generator_status(
            message_fields.encode_fields(dataclasses.replace(status, generator_id=longer))
        )


@pytest.mark.parametrize("name", ["", "a b", "ann\x1b[2J", "a\x07", "a/b", "a\nb", ".a", "jürgen"])
def test_decode_refuses_other_than_plain_names(name: str) -> None:
    with pytest.raises(WireError, match="no plain name; use letters, digits, "):
        decoded(changed(generator_id=name))
    with pytest.raises(WireError, match="no plain name") as caught:
        wire.encode_group(dataclasses.replace(GROUP, generator_id=name))
    assert str(caught.value).isprintable()


def test_checksum_must_be_at_the_end_of_the_frame() -> None:
    message = msgpack.unpackb(FRAME)
    assert equal(decoded(sealed(message)), GROUP)
    with pytest.raises(WireError, match="checksum"):
        decoded(sealed({**message, "added": bytes(4)}))


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
        msgpack.packb({"v": [0]}),
        msgpack.packb({"v": b"\xff"}).replace(b"\xc4", b"\xd9"),  # text that is not UTF-8
        b"\x91" * 2000,  # 2000 lists in each other
        FRAME + b"\0",
        FRAME[:-1],
    ],
    ids=lambda frame: f"{len(frame)}_bytes",
)
def test_decode_refuses_bytes_that_are_no_map(frame: bytes) -> None:
    with pytest.raises(WireError, match=r"^not a message: "):
        decoded(frame)


OTHER_DECODERS = (
    decode_announcement, decode_generator_status,
    probe.decode_probe_reply, probe.decode_probe_request,
)  # fmt: skip
OPEN_MAPS = {
    "many maps": lambda: open_maps("{:x}", 700, message_fields.MAX_MESSAGE),
    "long maps": lambda: open_maps("{:x}", 10_950, message_fields.MAX_MESSAGE),
    "as large as an announcement": lambda: open_maps("{:x}", 1366, MAX_ANNOUNCEMENT),
    "wide names": wide_open_maps,
    "many records": lambda: msgpack.packb(
        {"senders": {f"{n:x}": {chr(1 + key): [] for key in range(40)} for n in range(16_380)}}
    ),
    "in a small message": lambda: open_maps("{:x}", 64, 1 << 18),
    "texts": lambda: msgpack.packb(
        {"suppliers": {f"{n:04}" + "x" * 997 + "\U0001f600": 1 for n in range(2000)}}
    ),
}


@pytest.mark.parametrize("name", OPEN_MAPS)
def test_other_decoders_refuse_a_bomb_within_50_mb(name: str) -> None:
    frame = OPEN_MAPS[name]()
    # Only the texts are few enough to be unpacked as an announcement.
    reason = "checksum|not a message" if name == "texts" else r"^not a message|the limit is"
    for decode in OTHER_DECODERS:
        with allocated_below(), pytest.raises(WireError, match=reason):
            decode(frame)
