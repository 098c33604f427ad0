"""Network protocol between generators and trainer, over ZeroMQ.

No other package imports zmq. A receiver drops an invalid message and logs or counts it. The trainer
binds four consecutive ports, beginning with the setting wire.port. The sender's socket is listed
first:

    port  sockets      direction             content and module
    + 0   PUSH, PULL   generator -> trainer  groups: rollout_sockets.py, messages.py
    + 1   XSUB, XPUB   trainer -> generator  progress and acknowledgements: announcements.py
    + 2   XPUB, SUB    generator -> trainer  counters of the generator: generator_status.py
    + 3   DEALER, REP  doctor <-> trainer    connection test by bin/doctor: probe.py

All messages are msgpack maps (message_fields.py). auth.py reads key files and authenticates
generators; connection.py reconnects a generator's sockets after a fault, and
trainer_address.py connects them to a trainer that has moved to another machine.
"""

from peralta_zmq.wire.announcements import (
    Announcement,
    AnnouncementPublisher,
    AnnouncementSubscriber,
    SenderProgress,
)
from peralta_zmq.wire.auth import Authenticator, ServerLimits, generator_keys
from peralta_zmq.wire.connection import SILENT_SECONDS, ConnectionTiming, accepts_connection
from peralta_zmq.wire.generator_status import (
    GeneratorStatus,
    GeneratorStatusReceiver,
    GeneratorStatusSender,
)
from peralta_zmq.wire.messages import GroupLimits, InvalidGroupError, decode_group, encode_group
from peralta_zmq.wire.probe import ProbeClient, ProbeReply, ProbeServer
from peralta_zmq.wire.rollout_sockets import (
    RolloutReceiver,
    RolloutSender,
    interface_address,
    next_port,
    port_in_use_message,
)
from peralta_zmq.wire.trainer_address import (
    AddressFile,
    TrainerAddress,
    find_trainer,
    first_free_port,
)

__all__ = [
    "SILENT_SECONDS",
    "AddressFile",
    "Announcement",
    "AnnouncementPublisher",
    "AnnouncementSubscriber",
    "Authenticator",
    "ConnectionTiming",
    "GeneratorStatus",
    "GeneratorStatusReceiver",
    "GeneratorStatusSender",
    "GroupLimits",
    "InvalidGroupError",
    "ProbeClient",
    "ProbeReply",
    "ProbeServer",
    "RolloutReceiver",
    "RolloutSender",
    "SenderProgress",
    "ServerLimits",
    "TrainerAddress",
    "accepts_connection",
    "decode_group",
    "encode_group",
    "find_trainer",
    "first_free_port",
    "generator_keys",
    "interface_address",
    "next_port",
    "port_in_use_message",
]
