"""Which clients the trainer accepts: CURVE keys, and a limit of connections.

CURVE is ZeroMQ's encryption with public keys; ZAP its protocol by which libzmq asks a handler
whether to accept a connection. A key folder holds one key per file: `trainer.public` and
`trainer.secret`, and for each generator `NAME.public` and `NAME.secret`.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import threading
import time
from dataclasses import dataclass
from glob import glob
from pathlib import Path

import zmq
from zmq.utils import z85

from peralta_zmq.atomic_files import PLAIN_NAME
from peralta_zmq.errors import NO_MODES, OutageError, WireError, failure_text, program_name

TRAINER = "trainer"  # name of the trainer's key files
PUBLIC, SECRET = ".public", ".secret"
KEY = re.compile(rb"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")  # Z85, ZeroMQ's text encoding
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH  # mode bits: others than the owner can write
ZAP_ENDPOINT = "inproc://zeromq.zap.01"  # fixed by the ZAP specification
HANDSHAKE_SECONDS = 5.0  # a server disconnects a client whose handshake takes longer
logger = logging.getLogger(__name__)


# Key files.


class KeyFileError(WireError):
    """A key file is missing, not readable, not a key, or accessible to other users."""


@dataclass(frozen=True, slots=True)
class GeneratorKeys:
    name: str
    secret: bytes  # secret key of the generator
    trainer: bytes  # public key of the trainer


def make_keys(folder: Path, name: str) -> bool:
    """Write a pair NAME.secret (mode 0600) and NAME.public; False if it exists already.

    Raises WireError if the folder is unusable, has no modes, or has only one of the two files.
    """
    public = folder / f"{name}{PUBLIC}"
    secret = folder / f"{name}{SECRET}"
    _check_name(name)
    if secret.exists():
        if _read_key(public, PUBLIC) != zmq.curve_public(_read_key(secret, SECRET)):
            raise WireError(f"{public} does not belong to {secret}; delete both for a new pair")
        return False
    if public.exists():
        raise WireError(
            f"{public} exists without {secret.name}; delete {public.name} for a new pair"
        )
    public_key, secret_key = zmq.curve_keypair()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_key(public, public_key, 0o644)
        _write_key(secret, secret_key, 0o600)
    except OSError as error:
        raise WireError(f"{error.filename} cannot be written ({error.strerror})") from None
    _read_key(secret, SECRET)  # refuses a file system without modes, before the key is used
    return True


def trainer_secret(folder: Path) -> bytes:
    """Read the trainer's secret key. Raises OutageError if it is missing, KeyFileError."""
    file = folder / f"{TRAINER}{SECRET}"
    if not os.path.exists(file):
        raise OutageError(
            f"key {file} is missing; mount its disk, copy it here, or make it with "
            f"{program_name('doctor')} keygen"
        )
    return _read_key(file, SECRET)


def generator_keys(folder: Path, name: str) -> GeneratorKeys:
    """Read the keys of the generator `name`. Raises WireError and OutageError, as `_read_key`."""
    _check_name(name)
    file = folder / f"{name}{SECRET}"
    secrets = sorted(glob(f"*{SECRET}", root_dir=folder))  # empty for an unreadable folder
    others = [entry.removesuffix(SECRET) for entry in secrets if entry != f"{TRAINER}{SECRET}"]
    if others and not os.path.exists(file):
        choice = others[0] if len(others) == 1 else f"one of {', '.join(others)}"
        raise KeyFileError(
            f"key {file} does not exist; did you mean --generator.name {choice}, whose key is "
            f"there? Or make it with {program_name('doctor')} keygen"
        )
    secret = _read_key(file, SECRET)
    keys = GeneratorKeys(name, secret, _read_key(folder / f"{TRAINER}{PUBLIC}", PUBLIC))
    _check_and_list(folder)  # only the check of the folder's permissions is needed here
    return keys


def known_generators(folder: Path, *, strict: bool = True) -> dict[bytes, str]:
    """Read the public keys of all generators in a folder; returns key -> name.

    If not `strict`, logs and skips unusable files. Raises WireError if other users can write to the
    folder or two names have the same key, and OutageError.
    """
    names: dict[bytes, str] = {}
    for entry in _check_and_list(folder):
        name, kind = os.path.splitext(entry)
        if kind != PUBLIC or name == TRAINER or not PLAIN_NAME.fullmatch(name):
            continue
        try:
            key = _read_key(folder / entry, PUBLIC)
        except KeyFileError as error:
            if strict:
                raise
            logger.warning("key file skipped: %s", error)
            continue
        if key in names:
            raise WireError(f"{folder / entry} holds the key of {names[key]}; delete one of them")
        names[key] = name
    return names


def _check_writers(path: Path, status: os.stat_result) -> None:
    if status.st_uid not in (0, os.geteuid()):
        raise KeyFileError(
            f"{path} belongs to another user (uid {status.st_uid}); sudo chown {os.geteuid()} "
            f"{path}, or copy the keys to a local disk if a network mount changes the owners"
        )
    if status.st_mode & OTHERS_WRITE:
        raise KeyFileError(f"{path} can be written by others; chmod go-w {path}, {NO_MODES}")


def _check_and_list(folder: Path) -> list[str]:
    """Return the names in a key folder. Raises OutageError, KeyFileError."""
    try:
        status = folder.stat()
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise OutageError(f"key folder {folder} cannot be read ({failure_text(error)})") from error
    _check_writers(folder, status)
    return names


def _read_key(file: Path, kind: str) -> bytes:
    """Read a key file of kind SECRET or PUBLIC.

    Raises KeyFileError if it is missing, not a key, or others can read or replace it; OutageError
    for an error that may be temporary.
    """
    try:
        with file.open("rb") as opened:
            status = os.fstat(opened.fileno())
            key = opened.read(100).strip()
    except OSError as error:
        permanent = isinstance(error, (FileNotFoundError, PermissionError, IsADirectoryError))
        raise (KeyFileError if permanent else OutageError)(
            f"key {file} cannot be read ({failure_text(error)}); "
            f"if it is missing, make it with {program_name('doctor')} keygen, or copy it here"
        ) from error  # which tells whether waiting ends it
    if not KEY.fullmatch(key):
        raise KeyFileError(
            f"{file} is not a key; make a new pair with {program_name('doctor')} keygen"
        )
    if kind == SECRET and status.st_mode & 0o077:
        raise KeyFileError(f"{file} can be read by others; chmod 600 {file}, {NO_MODES}")
    _check_writers(file, status)
    return key


def _write_key(file: Path, key: bytes, mode: int) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as opened:
        opened.write(key + b"\n")


def _check_name(name: str) -> None:
    if not PLAIN_NAME.fullmatch(name):
        raise WireError(f"{name!a} is not a plain name; use letters, digits, . _ and -")


# The trainer's side.


@dataclass(frozen=True, slots=True)
class ServerLimits:
    read_seconds: float = 1.0  # minimum interval between two reads of the key folder
    handshake_seconds: float = HANDSHAKE_SECONDS
    max_unread_bytes: int = 256 << 20  # sum of the largest sizes of the unread messages
    min_connections: int = 64  # accepted also if their messages can be larger than that


class ConnectionQuota:
    """Limits the new connections of a server socket while it has unread messages.

    libzmq keeps a message until the program reads it, also after the client has closed the
    connection: a client that connects, sends and closes again and again could fill the memory
    during a long step. Therefore each accepted connection takes `queue` messages of the quota, each
    message that is read gives one back, and an empty socket gives back all. The authenticator's
    thread calls `take`, the thread that reads the socket the others.
    """

    def __init__(
        self, *, queue: int, max_bytes: int, limits: ServerLimits = ServerLimits()
    ) -> None:
        """A connection holds up to `queue` unread messages of up to `max_bytes` each."""
        self._queue = queue
        self._size = max(  # in messages
            limits.min_connections * queue, limits.max_unread_bytes // max_bytes
        )
        # Totals of messages. Only one thread changes each of them.
        self._num_taken = 0
        self._num_returned = 0

    def take(self) -> bool:
        """Take the messages of a new connection; False if the quota is used up."""
        if self._num_taken - self._num_returned + self._queue > self._size:
            return False
        self._num_taken += self._queue
        return True

    def on_message_read(self) -> None:
        self._num_returned = min(self._num_returned + 1, self._num_taken)

    def on_socket_empty(self) -> None:
        """Give back all: no connection, open or closed, has an unread message."""
        self._num_returned = self._num_taken


class Authenticator:
    """The trainer's ZAP handler: accepts or refuses each new connection of its server sockets.

    With a key folder, accepts clients whose public key is in it now; the name of a client is the
    property User-Id of its frames. Close the sockets that it protects first: libzmq refuses every
    client while no authenticator runs. Use with `closing`.
    """

    def __init__(self, folder: Path | None, limits: ServerLimits = ServerLimits()) -> None:
        """Raises KeyFileError, OutageError."""
        self.refused = 0  # number of refused connections
        self.limits = limits
        self._logged: set[str] = set()  # reasons of refusals
        self._folder = folder
        # Public key -> name; None while the folder cannot be read.
        self._names: dict[bytes, str] | None = known_generators(folder) if folder else {}
        self._secret = trainer_secret(folder) if folder else b""
        self._read_at = time.monotonic()
        self._quotas: dict[bytes, ConnectionQuota] = {}  # ZAP domain, one per socket -> quota
        self._closed = threading.Event()
        # Used only by the thread once it runs. A ROUTER, because a REP must reply to every
        # request, and `_reply` can return None.
        self._zap = zmq.Context.instance().socket(zmq.ROUTER)
        self._zap.setsockopt(zmq.LINGER, 0)
        self._zap.bind(ZAP_ENDPOINT)
        self._thread = threading.Thread(target=self._serve, name="authenticator", daemon=True)
        self._thread.start()

    @property
    def has_keys(self) -> bool:
        return self._folder is not None

    def protect(self, server: zmq.Socket[bytes], quota: ConnectionQuota) -> None:
        """Let this handler decide about each new connection; call it before `bind`."""
        domain = b"%d" % len(self._quotas)
        self._quotas[domain] = quota
        server.setsockopt(zmq.ZAP_DOMAIN, domain)
        server.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        if not self.has_keys:
            return
        # After a client is accepted, libzmq puts the client's User-Id as a message into the receive
        # queue of the connection, and never counts this message as read. It takes one place of the
        # queue for ever, so add one; otherwise a queue of length one would stay full.
        queue = server.getsockopt(zmq.RCVHWM)
        assert isinstance(queue, int)
        server.setsockopt(zmq.RCVHWM, queue + 1)
        server.setsockopt(zmq.CURVE_SERVER, 1)
        server.setsockopt(zmq.CURVE_SECRETKEY, self._secret)

    def close(self) -> None:
        self._closed.set()
        self._thread.join(timeout=2.0)  # the read of a key folder on a dead mount can block

    def _serve(self) -> None:
        with self._zap as zap:
            while not self._closed.is_set():
                if zap.poll(200):  # ms between two checks for `close`
                    identity, delimiter, *request = zap.recv_multipart()
                    if reply := self._reply(request):
                        zap.send_multipart([identity, delimiter, *reply])
            zap.unbind(ZAP_ENDPOINT)  # `close` alone releases the endpoint only some time later

    def _reply(self, request: list[bytes]) -> list[bytes] | None:
        """The reply to a ZAP 1.0 request: status 200 accepts the client, 400 refuses its key.

        None while the key folder cannot be read or the quota is used up: libzmq then disconnects
        the client after HANDSHAKE_SECONDS, and it connects again.
        """
        version, request_id, domain, address, _, mechanism, *credentials = request
        name: str | None = ""
        if self.has_keys:
            names = self._known_names()
            name = None
            if names is None:
                self.refused += 1
                return None
            if mechanism == b"CURVE" and len(credentials) == 1:
                name = names.get(z85.encode(credentials[0]))
        if name is None:
            self._log_refusal("unknown_key", address)
            return [version, request_id, b"400", b"unknown key", b"", b""]
        if not self._quotas[domain].take():
            self._log_refusal("too_many_connections", address)
            return None
        return [version, request_id, b"200", b"OK", name.encode(), b""]

    def _log_refusal(self, reason: str, address: bytes) -> None:
        self.refused += 1
        level = logging.DEBUG if reason in self._logged else logging.WARNING
        self._logged.add(reason)
        logger.log(level, "client refused: reason=%s address=%s", reason, address.decode("ascii"))

    def _known_names(self) -> dict[bytes, str] | None:
        """Public key -> name, not older than `read_seconds`; None if the read failed."""
        if self._folder and time.monotonic() - self._read_at > self.limits.read_seconds:
            self._read_at = time.monotonic()
            try:
                self._names = known_generators(self._folder, strict=False)
            except (WireError, OutageError) as error:
                self._names = None
                logger.warning("no client is accepted: %s", error)
        return self._names


# The generator's side.


def use_keys(client: zmq.Socket[bytes], keys: GeneratorKeys | None) -> None:
    """Set the keys of a client socket, before it connects; None = no encryption."""
    if keys is not None:
        client.setsockopt(zmq.CURVE_SERVERKEY, keys.trainer)
        client.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        client.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(keys.secret))
