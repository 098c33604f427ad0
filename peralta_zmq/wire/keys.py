"""Key files: who may speak to the trainer, and how each side knows the other.

A folder holds one CURVE key in each file: `trainer.public` and `trainer.secret`, and for each
generator `NAME.public` and `NAME.secret`. The trainer needs its own secret and everyone's public
keys; a generator needs `trainer.public` and its own secret. Knows files; knows nothing of sockets.
"""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path

import zmq

from peralta_zmq.errors import WireError

TRAINER = "trainer"
PUBLIC, SECRET = ".public", ".secret"
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
KEY = re.compile(rb"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")  # Z85
logger = logging.getLogger(__name__)


class NotAKeyError(WireError):
    """A file that is gone, is no file, is not for us to read, or holds no key."""


@dataclass(frozen=True, slots=True)
class GeneratorKeys:
    """What a generator shows, and the one trainer it talks to."""

    name: str
    secret: bytes
    trainer: bytes  # its public key

    @property
    def public(self) -> bytes:
        """The public half of `secret`."""
        return zmq.curve_public(self.secret)


def make_keys(folder: Path, name: str) -> bool:
    """Write NAME.secret (mode 0600) and NAME.public; False when they are there already.

    Raises WireError when the folder cannot be written or holds one without the other.
    """
    public, secret = folder / f"{name}{PUBLIC}", folder / f"{name}{SECRET}"
    _check_name(name)
    if secret.exists():
        if _read(public) != zmq.curve_public(read_secret(secret)):
            raise WireError(f"{public} does not belong to {secret}; delete both for a new pair")
        return False
    if public.exists():
        raise WireError(f"{public} is here without {secret.name}; delete it for a new pair")
    keys = zmq.curve_keypair()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write(public, keys[0], 0o644)
        _write(secret, keys[1], 0o600)
    except OSError as error:
        raise WireError(f"{error.filename} cannot be written ({error.strerror})") from None
    return True


def trainer_secret(folder: Path) -> bytes:
    """The trainer's secret key. Raises WireError, as `generator_keys`."""
    return read_secret(folder / f"{TRAINER}{SECRET}")


def generator_keys(folder: Path, name: str) -> GeneratorKeys:
    """The keys of one generator.

    Raises WireError when a file is missing, is no key, others may read a secret, or everyone may
    put another trainer's key there.
    """
    _check_name(name)
    secret, trainer = folder / f"{name}{SECRET}", folder / f"{TRAINER}{PUBLIC}"
    keys = GeneratorKeys(name, read_secret(secret), _read(trainer))
    _check_folder(folder)
    return keys


def known_generators(folder: Path, *, strict: bool = True) -> dict[bytes, str]:
    """The generators whose public keys lie in the folder: key -> name.

    Raises WireError when the folder or a file cannot be read, one key has two names, everyone may
    write there, or a file is no key; with `strict` off such a file is passed over, saying so.
    """
    names: dict[bytes, str] = {}
    _check_folder(folder)
    for entry in _listed(folder):
        name, kind = os.path.splitext(entry)
        if kind != PUBLIC or name == TRAINER or not NAME.fullmatch(name):
            continue
        file = folder / entry
        try:
            key = _read(file)
        except NotAKeyError as error:
            if strict:
                raise
            logger.warning("passed over: %s", error)
            continue
        if key in names:
            raise WireError(f"{file} holds the key of {names[key]}; one key has one name")
        names[key] = name
    return names


def read_secret(file: Path) -> bytes:
    """A secret key that nobody else may read. Raises WireError."""
    key = _read(file)
    if file.stat().st_mode & 0o077:
        raise WireError(f"{file} can be read by others; chmod 600 {file}")
    return key


def _check_folder(folder: Path) -> None:
    """Whoever may write there could let himself in."""
    try:
        mode = folder.stat().st_mode
    except OSError as error:
        raise _unreadable(folder, error) from None
    if mode & 0o002:
        raise WireError(f"{folder} can be written by others; chmod o-w {folder}")


def _listed(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise _unreadable(folder, error) from None


def _unreadable(folder: Path, error: OSError) -> WireError:
    return WireError(f"key folder {folder} cannot be read ({error.strerror})")


def _read(file: Path) -> bytes:
    try:
        key = file.read_bytes()[:100].strip()
    except OSError as error:
        known = isinstance(error, (FileNotFoundError, PermissionError, IsADirectoryError))
        raise (NotAKeyError if known else WireError)(
            f"key {file}: {error.strerror}; make it with bin/doctor keygen, or copy it here"
        ) from None
    if not KEY.fullmatch(key):
        raise NotAKeyError(f"{file} is not a key; make a new pair with bin/doctor keygen")
    return key


def _write(file: Path, key: bytes, mode: int) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as opened:
        opened.write(key + b"\n")


def _check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise WireError(f"{name!a} is not a plain name; use letters, digits, . _ and -")
