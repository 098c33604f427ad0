"""Rollouts and announcements over ZeroMQ. Knows sockets and bytes; knows nothing of models.

Generators PUSH whole groups to the trainer's PULL; the trainer PUBlishes what it is doing on the
next port. An announcement is a hint and may be lost. A group message that breaks any rule is
counted and dropped by the receiver, never raised. A group is kept in the sender's outbox until an
announcement says that it is safe, and is sent again when it was lost on the way.

    messages   both messages as bytes
    sockets    the four sockets
    outbox     what was sent and is not yet known to be safe
"""

from peralta_zmq.wire.messages import (
    Announcement,
    decode_announcement,
    decode_group,
    encode_announcement,
    encode_group,
)
from peralta_zmq.wire.outbox import Outbox
from peralta_zmq.wire.sockets import (
    Announcer,
    Listener,
    RolloutReceiver,
    RolloutSender,
    answers,
    next_port,
)

__all__ = [
    "Announcement",
    "Announcer",
    "Listener",
    "Outbox",
    "RolloutReceiver",
    "RolloutSender",
    "answers",
    "decode_announcement",
    "decode_group",
    "encode_announcement",
    "encode_group",
    "next_port",
]
