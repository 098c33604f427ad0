"""A hostile client of a trainer's ports."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace

import zmq

from peralta_zmq.wire.auth import GeneratorKeys, use_keys
from tools.link_proxy import LinkProxy

STUCK_SECONDS = 3.0  # without progress of a send or receive
QUEUE = 1000  # messages in the sender's queue
ANNOUNCEMENTS, STATUSES = 1, 2  # by position of the port


@dataclass(frozen=True, slots=True)
class HostileClient:
    """A client with or without keys; `stack` closes its connections."""

    port: int  # the first of four ports of a trainer on this machine
    keys: GeneratorKeys | None
    stack: ExitStack

    def open_sender(self, port: int) -> zmq.Socket[bytes]:
        """A socket from which the trainer receives messages on a port: ANNOUNCEMENTS or STATUSES.

        An XPUB sends only to peers that have subscribed, which the trainer does on the port of the
        statuses only. A proxy leads the connection there first and then to the announcements:
        libzmq keeps the subscription. Raises zmq.Again if the trainer refuses the connection.
        """
        if port == STATUSES:
            return self._open_subscribed()
        proxy = self.stack.enter_context(LinkProxy(self.port, kernel_buffer=1 << 20))
        opened = replace(self, port=proxy.port)._open_subscribed()
        proxy.target -= STATUSES - ANNOUNCEMENTS
        proxy.reset()
        opened.recv()  # an announcement
        return opened

    def _open_subscribed(self) -> zmq.Socket[bytes]:
        """An XPUB socket to the port of the statuses, after the trainer has subscribed."""
        opened = self.stack.enter_context(zmq.Context.instance().socket(zmq.XPUB))
        for option, value in (
            (zmq.LINGER, 0), (zmq.SNDHWM, QUEUE), (zmq.IMMEDIATE, 0),
            (zmq.SNDTIMEO, int(1000 * STUCK_SECONDS)), (zmq.RCVTIMEO, int(1000 * STUCK_SECONDS)),
        ):  # fmt: skip
            opened.setsockopt(option, value)
        use_keys(opened, self.keys)
        opened.connect(f"tcp://127.0.0.1:{self.port + STATUSES}")
        opened.setsockopt(zmq.XPUB_NODROP, 1)  # wait for room in the queue instead
        opened.recv()
        return opened
