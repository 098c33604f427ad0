"""Who may connect to the trainer (CURVE with ZAP), and why a client was turned away.

Fails closed: bound sockets enforce a domain, so that libzmq itself turns everyone away when no
gate answers. Knows keys and handshakes; knows nothing of messages.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from peralta_zmq.errors import WireError
from peralta_zmq.wire.keys import GeneratorKeys, known_generators, trainer_secret
from peralta_zmq.wire.sockets import greets

ENDPOINT = "inproc://zeromq.zap.01"  # fixed by ZAP
DOMAIN = b"peralta"
LOOK_SECONDS = 0.2  # until a closed gate ends
READ_SECONDS = 1.0  # between two looks into the folder, however many knock
RETRY_SECONDS = 5.0  # until libzmq hangs up on a client that a gate could not judge
PATIENCE_SECONDS, PATIENCE_TRIES = 3.0, 5  # of a client whose connection just ends
HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
logger = logging.getLogger(__name__)


class CurveAuthenticator:
    """Lets in the generators whose public keys lie in a folder, under their files' names.

    Open it before the sockets that it guards, and close it after them. A key that is added or
    removed counts for connections made a second later. Use with `closing`.
    """

    def __init__(self, folder: Path) -> None:
        self.refused, self._strangers = 0, 0  # clients, and those whose key is unknown
        self._secret = trainer_secret(folder)
        self._folder = folder
        self._names: dict[bytes, str] | None = known_generators(folder)  # None: we cannot tell
        self._read_at = time.monotonic()
        self._closed = threading.Event()
        # The thread's, once it runs. A REP would have to answer before it hears the next.
        self._door = zmq.Context.instance().socket(zmq.ROUTER)
        self._door.setsockopt(zmq.LINGER, 0)
        try:
            self._door.bind(ENDPOINT)
        except zmq.ZMQError as error:
            self._door.close()
            raise WireError(f"a second gate in one process ({error})") from None
        self._thread = threading.Thread(target=self._serve, name="gate", daemon=True)
        self._thread.start()

    def protect(self, server: zmq.Socket[bytes]) -> None:
        """Before `bind`: this socket talks only to clients that the gate lets in.

        libzmq passes the client's name through the queue as a message that it never counts as
        read: a queue of one would stay full for ever.
        """
        queue = server.getsockopt(zmq.RCVHWM)
        assert isinstance(queue, int)
        server.setsockopt(zmq.RCVHWM, queue + 1)
        server.setsockopt(zmq.CURVE_SERVER, 1)
        server.setsockopt(zmq.CURVE_SECRETKEY, self._secret)
        server.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        server.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        server.setsockopt(zmq.HANDSHAKE_IVL, int(RETRY_SECONDS * 1000))

    def close(self) -> None:
        """Let nobody in any more."""
        self._closed.set()
        self._thread.join(timeout=2.0)  # it may hang in a dead mount

    def _serve(self) -> None:
        with self._door as door:
            while not self._closed.is_set():
                if door.poll(int(LOOK_SECONDS * 1000)):
                    who, nothing, *request = door.recv_multipart()
                    if answer := self._answer(request):
                        door.send_multipart([who, nothing, *answer])
            door.unbind(ENDPOINT)  # closing alone frees the name later

    def _answer(self, request: list[bytes]) -> list[bytes] | None:
        """ZAP 1.0: version, request, domain, address, identity, mechanism, credentials.

        Returns: None, when we cannot tell: libzmq hangs up RETRY_SECONDS later, and the client
        tries again. (A 300 that comes quickly makes it hang up at once, as on a wrong key.)
        """
        version, number, domain, address, _, mechanism, *credentials = request
        names, name = self._known(), None
        if names and (domain, mechanism) == (DOMAIN, b"CURVE") and len(credentials) == 1:
            name = names.get(z85.encode(credentials[0]))
        if name is not None:
            return [version, number, b"200", b"welcome", name.encode(), b""]
        self.refused += 1
        if names is None:
            return None
        self._strangers += 1
        logger.log(
            logging.WARNING if self._strangers == 1 else logging.DEBUG,
            "refused: an unknown key from %s", address.decode(errors="replace"),
        )  # fmt: skip
        return [version, number, b"400", b"unknown key", b"", b""]

    def _known(self) -> dict[bytes, str] | None:
        if time.monotonic() - self._read_at > READ_SECONDS:
            self._read_at = time.monotonic()
            try:
                self._names = known_generators(self._folder, strict=False)
            except WireError as error:
                self._names = None
                logger.warning("nobody is let in: %s", error)
        return self._names


def show_keys(client: zmq.Socket[bytes], keys: GeneratorKeys | None) -> None:
    """Before it connects: without keys it talks to a trainer without a gate only."""
    if keys is not None:
        client.setsockopt(zmq.CURVE_SERVERKEY, keys.trainer)
        client.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        client.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)


_numbers = itertools.count()


class HandshakeMonitor:
    """The client's side of a handshake: shows its keys, and learns of a refusal."""

    def __init__(self, client: zmq.Socket[bytes], address: str, keys: GeneratorKeys | None) -> None:
        self._address, self._keys = address, keys
        self._failures, self._first_failure = 0, 0.0  # since the last success; monotonic seconds
        self._refusal: str | None = None
        show_keys(client, keys)
        events = f"inproc://handshakes-{next(_numbers)}"  # libzmq frees a name late
        client.monitor(events, HANDSHAKES)
        self._client, self._events = client, zmq.Context.instance().socket(zmq.PAIR)
        # Without a limit: at one, libzmq would wait for us in the thread that serves all sockets.
        self._events.setsockopt(zmq.RCVHWM, 0)
        self._events.connect(events)

    def check(self) -> None:
        """Raise WireError when the trainer turned us away; blocks for half a second at most when
        handshakes have failed without a reason.
        """
        silent = 0
        while self._refusal is None and self._events.poll(0):
            message: Any = parse_monitor_message(self._events.recv_multipart())
            if message["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._failures = silent = 0
                continue
            self._refusal = self._reason(message["event"])
            silent += self._refusal is None
        if silent:
            self._refusal = self._refusal or self._reason_of_silence(silent)
        if self._refusal:
            raise WireError(self._refusal)

    def close(self) -> None:
        """Before the client's socket is closed."""
        self._client.monitor(None, 0)
        self._events.close(linger=0)

    def _reason(self, event: int) -> str | None:
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            with_or_without = "no keys" if self._keys is None else "keys"
            return (
                f"the trainer at {self._address} turned us away: we come with {with_or_without}, "
                "and it expects the contrary; give both sides the same security.keys"
            )
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH and self._keys is not None:
            return (
                f"the trainer at {self._address} does not know the key of {self._keys.name}; "
                f"put {self._keys.name}.public into its security.keys folder"
            )
        return None

    def _reason_of_silence(self, failures: int) -> str | None:
        """One that is killed or frozen is waited for; one whose key we do not have greets us, and
        hangs up every time.
        """
        now = time.monotonic()  # those that fail while it greets us count the next time
        if self._keys is None or not greets(self._address):
            self._failures = 0
            return None
        if not self._failures:
            failures, self._first_failure = 1, now  # nobody knows when those before it were
        self._failures += failures
        elapsed = now - self._first_failure
        if self._failures < PATIENCE_TRIES or elapsed < PATIENCE_SECONDS:
            return None
        if elapsed / self._failures > RETRY_SECONDS / 2:  # so rarely: it cannot tell who we are
            return None
        return (
            f"the trainer at {self._address} hangs up on us: trainer.public is not its key, "
            "or it lets nobody in; copy trainer.public from its security.keys folder"
        )
