"""Sockets of the trainer, its keys, and the address that generators find in a shared folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack, closing

from peralta_zmq import wire
from peralta_zmq.addresses import with_port
from peralta_zmq.config import Config
from peralta_zmq.trainer.session import ProgressAnnouncer, StopSignal, wait_out
from peralta_zmq.weights.backends import ProbeFile


def open_authenticator(
    config: Config, stack: ExitStack, stop: StopSignal, *, is_new: bool
) -> wire.Authenticator:
    """Read the keys, and accept their holders from now on; without keys, accept everyone.

    Waits while the keys of an existing run cannot be read. For a new run, raises OutageError
    instead. Raises WireError if a key cannot be used.
    """

    def start() -> wire.Authenticator:
        return wire.Authenticator(config.keys_folder)

    authenticator = start() if is_new else wait_out(start, folder=config.run_folder, stop=stop)
    return stack.enter_context(closing(authenticator))


def open_sockets(
    config: Config,
    stack: ExitStack,
    run_id: str,
    limits: wire.GroupLimits,
    worker_info: Mapping[str, str],
    train_set_digest: bytes,
    authenticator: wire.Authenticator,
) -> tuple[wire.RolloutReceiver, wire.GeneratorStatusReceiver, ProgressAnnouncer, wire.AddressFile]:
    """Bind four consecutive ports: rollouts, announcements, statuses, probes.

    With wire.address_dir they are the first free ones, otherwise those from wire.port on.
    Generators receive the announcements, and send rollouts and statuses. Probes are the connection
    tests of bin/doctor. `worker_info` describes this machine. `train_set_digest` lets a generator
    detect that it has other training problems. The address is not written to its file yet. Raises
    WireError if a port is in use.
    """
    bind = config.wire.bind
    port = config.wire.port
    if config.address_folder is not None:  # generators find any port
        port = wire.first_free_port(bind, port)
    address = f"tcp://{with_port(bind, port)}"
    receiver = wire.RolloutReceiver(
        address,
        run_id=run_id,
        limits=limits,
        hwm=config.wire.hwm,
        authenticator=authenticator,
    )
    stack.enter_context(closing(receiver))
    publisher = wire.AnnouncementPublisher(wire.next_port(address), authenticator=authenticator)
    stack.enter_context(closing(publisher))
    statuses = wire.GeneratorStatusReceiver(
        wire.next_port(address, 2), run_id=run_id, authenticator=authenticator
    )
    stack.enter_context(closing(statuses))
    info = wire.ProbeReply(config.run.name, run_id=run_id, worker_info=dict(worker_info))
    create = None
    if "://" not in config.weights_address:  # a folder, not a bucket
        create = stack.enter_context(closing(ProbeFile(config.weights_folder))).create
    probes = wire.ProbeServer(
        wire.next_port(address, 3), info, create_file=create, authenticator=authenticator
    )
    stack.enter_context(closing(probes))
    announcement = wire.Announcement(
        run_id,
        incarnation=os.urandom(8),
        train_set_digest=train_set_digest,
        max_group_bytes=limits.max_bytes,
        grants_leases=True,
    )
    address_file = wire.AddressFile(config.address_folder, config.wire.host, port, run_id)
    stack.enter_context(closing(address_file))
    return receiver, statuses, ProgressAnnouncer(publisher, announcement), address_file
