"""The protocol between generators and trainer: messages over ZeroMQ, the only use of zmq.

Generators PUSH groups (all rollouts of one problem) to the trainer's PULL socket. The trainer
PUBlishes announcements on the next port, receives the generators' status on the port after that,
and answers probes on the fourth. A receiver counts and drops invalid messages. An announcement
acknowledges groups as received and, when they are in the journal on disk, as durable; until then
the generator keeps them and resends those that were lost.

    messages          RolloutGroup <-> bytes, and the rules of a group
    message_fields    bounded msgpack maps with typed fields, shared by all messages
    sockets           socket options, addresses, RolloutSender and RolloutReceiver
    announcements     trainer -> generators: progress, acknowledgements
    generator_status  generator -> trainer: counters
    probe             doctor <-> trainer: connection test
    auth              key files, authentication, refused connections
"""

from peralta_zmq.wire.announcements import (
    Announcement,
    AnnouncementPublisher,
    AnnouncementSubscriber,
)
from peralta_zmq.wire.auth import CurveAuthenticator, accepts_connection, generator_keys
from peralta_zmq.wire.generator_status import (
    GeneratorStatus,
    GeneratorStatusReceiver,
    GeneratorStatusSender,
)
from peralta_zmq.wire.messages import decode_group, encode_group
from peralta_zmq.wire.probe import ProbeClient, ProbeReply, ProbeServer
from peralta_zmq.wire.sockets import (
    RolloutReceiver,
    RolloutSender,
    next_port,
    port_in_use_message,
)

__all__ = [
    "Announcement",
    "AnnouncementPublisher",
    "AnnouncementSubscriber",
    "CurveAuthenticator",
    "GeneratorStatus",
    "GeneratorStatusReceiver",
    "GeneratorStatusSender",
    "ProbeClient",
    "ProbeReply",
    "ProbeServer",
    "RolloutReceiver",
    "RolloutSender",
    "accepts_connection",
    "decode_group",
    "encode_group",
    "generator_keys",
    "next_port",
    "port_in_use_message",
]
