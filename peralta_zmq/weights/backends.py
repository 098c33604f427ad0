"""Where version folders can lie: what a store needs of a shared folder, a server or a bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from peralta_zmq.atomic_files import About, Content, Manifest
from peralta_zmq.errors import ConfigError


class StorageBackend(Protocol):
    """Folders of immutable files, one level deep. Every method may raise OSError."""

    where: str  # as a person would name it

    def names(self) -> list[str]:
        """What lies here, strangers included."""
        ...

    def path(self, name: str) -> Path:
        """Where a folder lies; its name alone when that is not on this machine."""
        ...

    def read(self, path: str, *, start: int = 0) -> Iterator[bytes]:
        """The bytes of NAME or FOLDER/NAME from `start` on."""
        ...

    def write_whole(
        self, name: str, files: Mapping[str, Content], about: About | Callable[[], About]
    ) -> Manifest:
        """Make a folder appear whole, or not at all."""
        ...

    def write_file(self, name: str, content: bytes) -> None:
        """Write one small file whole."""
        ...

    def remove(self, name: str) -> None:
        """Take a folder away; no error when it is not there or cannot be."""
        ...

    def prepare(self) -> None:
        """Make the place if need be, try what publishing needs, take away what was left."""
        ...

    def lease(self, holder: str) -> str | None:
        """Mark the place as ours; the holder of a fresh lease when somebody else has it."""
        ...

    def release(self) -> None:
        """Give the lease back."""
        ...

    def touch(self) -> None:
        """Show that we are alive, so that clients look again and others keep off."""
        ...

    def free_bytes(self) -> int:
        """Room that is left."""
        ...

    def reading(self, name: str) -> AbstractContextManager[None]:
        """Tell the writer, where we can, that a folder is being read."""
        ...

    def being_read(self) -> set[str]:
        """Folders that somebody reads."""
        ...


def open_backend(address: str, *, token: str | None = None) -> StorageBackend:
    """A folder, http://HOST:PORT of a trainer that serves its own, or s3://BUCKET/PREFIX.

    Raises ConfigError for another scheme, or when the library for it is not installed.
    """
    scheme, separator, _ = address.partition("://")
    if not separator:
        from peralta_zmq.weights.local_backend import LocalBackend

        return LocalBackend(Path(address).expanduser())
    if scheme == "http":
        from peralta_zmq.weights.http_backend import HttpBackend

        return HttpBackend(address, token=token)
    if scheme == "s3":
        from peralta_zmq.weights.object_store_backend import ObjectStoreBackend

        return ObjectStoreBackend(address)
    raise ConfigError(
        f"weights.dir '{address}' is neither a folder nor http://HOST:PORT nor s3://BUCKET/PREFIX"
    )
