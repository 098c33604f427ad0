"""Rollouts, announcements and counters over ZeroMQ. Knows sockets and bytes, not models.

Generators PUSH whole groups to the trainer's PULL; the trainer PUBlishes what it is doing on the
next port; generators PUBlish how they fare to the port after that; a fourth port answers doctors.
An announcement is a hint and may be lost. A message that breaks any rule is counted and dropped
by the receiver, never raised. A group is kept in the sender's outbox until an announcement says
that it is safe, and is sent again when it was lost on the way.

    strict         bytes from a stranger as plain values
    groups         a group as bytes; announcements, counters, greetings  the other messages
    sockets        options, addresses, ports
    rollouts       the pair that carries groups; announcing, counting, greeting  the other pairs
    outbox         what was sent and is not yet known to be safe
    keys, gate     who may connect
"""

from peralta_zmq.wire.announcement_sockets import AnnouncementPublisher, AnnouncementSubscriber
from peralta_zmq.wire.announcements import Announcement, decode_announcement, encode_announcement
from peralta_zmq.wire.auth import CurveAuthenticator
from peralta_zmq.wire.generator_status import (
    GeneratorStatus,
    decode_generator_status,
    encode_generator_status,
)
from peralta_zmq.wire.generator_status_sockets import GeneratorStatusReceiver, GeneratorStatusSender
from peralta_zmq.wire.keys import GeneratorKeys, generator_keys
from peralta_zmq.wire.messages import decode_group, encode_group
from peralta_zmq.wire.outbox import Outbox
from peralta_zmq.wire.probe import (
    ProbeReply,
    decode_probe_reply,
    decode_probe_request,
    encode_probe_reply,
    encode_probe_request,
)
from peralta_zmq.wire.probe_sockets import ProbeClient, ProbeServer
from peralta_zmq.wire.rollout_sockets import RolloutReceiver, RolloutSender
from peralta_zmq.wire.sockets import accepts_connection, next_port, port_in_use_message

__all__ = [
    "Announcement",
    "AnnouncementPublisher",
    "AnnouncementSubscriber",
    "CurveAuthenticator",
    "GeneratorKeys",
    "GeneratorStatus",
    "GeneratorStatusReceiver",
    "GeneratorStatusSender",
    "Outbox",
    "ProbeClient",
    "ProbeReply",
    "ProbeServer",
    "RolloutReceiver",
    "RolloutSender",
    "accepts_connection",
    "decode_announcement",
    "decode_generator_status",
    "decode_group",
    "decode_probe_reply",
    "decode_probe_request",
    "encode_announcement",
    "encode_generator_status",
    "encode_group",
    "encode_probe_reply",
    "encode_probe_request",
    "generator_keys",
    "next_port",
    "port_in_use_message",
]
