"""Published weights as step-numbered versions, whole or as deltas, wherever they lie.

Knows versions, chains of deltas and what may be removed; knows nothing of models, threads or the
run. A version appears whole, so a reader sees all of it or nothing.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

from peralta_zmq import atomic_files
from peralta_zmq.atomic_files import CorruptError, Manifest
from peralta_zmq.errors import ChainError, GoneError, StoreError
from peralta_zmq.failpoints import failpoint
from peralta_zmq.weights import delta
from peralta_zmq.weights import tensors as sets
from peralta_zmq.weights.backends import StorageBackend
from peralta_zmq.weights.pruning import Pruner
from peralta_zmq.weights.replica import LocalReplica
from peralta_zmq.weights.version import (  # fmt: skip
    DELTA,
    FORMAT,
    IDENTITY,
    NAME,
    WEIGHTS,
    Version,
    name_of,
    version_of,
)

MIN_FREE_VERSIONS = 2
MAX_MISMATCHES = 3  # a NAS may serve stale pages once or twice
MAX_DELTA_SHARE = 0.6  # of a keyframe; beyond it the chain is not worth its length
MAX_CHAIN = 1000
MAX_SMALL_FILE = 64 << 20  # bytes of a manifest
MAX_LOOKED_AT_AGAIN = 100  # folders that were no version of ours; a NAS may have lied about them
Base: TypeAlias = tuple[Version, Mapping[str, torch.Tensor]]
SamplingPacer: TypeAlias = Callable[[int], None]  # told the bytes about to be written; may wait


class TooLargeError(Exception):
    """A delta grows beyond what it saves."""


@dataclass(slots=True)
class Timing:
    """Where the time of a publication went."""

    encode_seconds: float = 0.0


class WeightStore:
    """One run's weights in one place."""

    def __init__(self, place: StorageBackend) -> None:
        self.place = place
        self._mismatches: Counter[str] = Counter()  # by manifest digest
        self._strange: set[int] = set()  # numbers of listed folders that are no version of ours
        self._pruner = Pruner(place)

    @property
    def where(self) -> str:
        """The place as a person would name it."""
        return self.place.where

    @property
    def folder(self) -> Path:
        """The folder, of a store that is one."""
        return self.place.path("")

    @property
    def run_id(self) -> str | None:
        """The run that owns the place, or None before a trainer has made it."""
        with contextlib.suppress(OSError, CorruptError, *atomic_files.MALFORMED):
            return str(json.loads(self._small(IDENTITY))["run_id"])
        return None

    def claim(self, run_id: str, *, known: bool = False) -> None:
        """Make the place this run's; one that is `known` to be is never made anew.

        Raises StoreError when it cannot be written, belongs to another run, or another trainer
        works there; GoneError when a known one is not there.
        """
        try:
            owner = self.run_id
            if owner is None and known:  # an empty folder where the mount was, or none
                raise self._gone()
            if owner not in (None, run_id):
                raise StoreError(
                    f"weights folder {self.where} belongs to run {owner}, not to {run_id}; "
                    "choose another with --weights.dir, or delete it"
                )
            self.place.prepare()
            if owner is None:
                text = json.dumps({"format": 1, "run_id": run_id}) + "\n"
                self.place.write_file(IDENTITY, text.encode())
            holder = self.place.lease(run_id)
        except OSError as error:
            if known and self.run_id is None:
                raise self._gone() from None
            reason = error.strerror or str(error)
            raise StoreError(
                f"weights folder {self.where} cannot be written ({reason}); "
                "mount it, free it, or choose another with --weights.dir"
            ) from None
        if holder:
            raise StoreError(
                f"another trainer ({holder}) publishes to {self.where}; stop it, wait 30 s if it "
                "is gone, or choose another with --weights.dir"
            )

    def publish(
        self,
        step: int,
        tensors: Mapping[str, torch.Tensor],
        *,
        companions: Mapping[str, bytes],
        about: Mapping[str, str | int] | None = None,
        keep_last: int = 3,
        keep_interval: int | None = None,
        keep_seconds: float = 0.0,
        base: Base | None = None,
        pace: SamplingPacer | None = None,
        timing: Timing | None = None,
    ) -> Version:
        """Write the next version, then prune: as a delta to `base` when that is worth it,
        else whole with its companion files (config, tokenizer). `about` is said in the manifest.

        Numbers follow the step and are never reused. Raises StoreError when the place is gone,
        full or read-only; nothing half-written stays.
        """
        try:
            number, said = self._next(step, tensors, companions)
            said = {**(about or {}), **said}
            failpoint("publish.identity")
            stream = functools.partial(_stream, pace=pace, timing=timing or Timing())
            version = self._write(number, said, tensors, companions, base, stream)
        except OSError as error:
            reason = error.strerror or str(error)
            raise StoreError(f"cannot publish step {step} to {self.where}: {reason}") from None
        failpoint("publish.visible")
        with contextlib.suppress(OSError):  # the version is out; the next one prunes too
            self._pruner.note(version)
            self._pruner.prune(
                self._numbers(), keep_last, keep_interval, keep_seconds, self._parent_of
            )
        failpoint("publish.pruned")
        return version

    def touch(self) -> None:
        """Show that this trainer is alive; no error when the place is gone for a while."""
        with contextlib.suppress(OSError):
            self.place.touch()

    def release(self) -> None:
        """Let another trainer claim the place at once."""
        self.place.release()

    def prune(self, keep_last: int) -> None:
        """Remove all but the newest `keep_last` versions and what they are made from."""
        self._pruner.prune(self._numbers(), keep_last, None, 0.0, self._parent_of)

    def newest(self) -> Version | None:
        """The newest version of this run whose STABLE and manifest agree, or None.

        None too while the place cannot be listed: the NAS may come back.
        """
        with contextlib.suppress(OSError):
            run_id, numbers = self.run_id, self._numbers()
            self._strange &= set(numbers)
            for number in self._worth_a_look(numbers):
                version = self.look(number)
                if version is not None and version.run_id == run_id:
                    return version
                self._strange.add(number)
        return None

    def _worth_a_look(self, numbers: list[int]) -> Iterator[int]:
        """The numbers, highest first, without most of those that were looked at in vain."""
        again = 0
        for number in reversed(numbers):
            again += number in self._strange
            if number not in self._strange or again <= MAX_LOOKED_AT_AGAIN:
                yield number

    def versions(self) -> list[Version]:
        """All that can be read, oldest first. Raises StoreError when the place cannot be listed."""
        try:
            found = [self.look(number) for number in self._numbers()]
        except OSError as error:
            raise StoreError(f"{self.where} cannot be listed ({error.strerror})") from None
        return [each for each in found if each is not None and each.run_id == self.run_id]

    def look(self, number: int) -> Version | None:
        """The version of this number, or None when it is not there, torn or in quarantine.

        Ask only for a number that was listed or announced: a miss is remembered by some NAS.
        """
        folder = self.place.path(name_of(number))
        try:
            stable = self._small(f"{folder.name}/{atomic_files.STABLE}")
            text = self._small(f"{folder.name}/{atomic_files.MANIFEST}")
            version = version_of(
                folder, atomic_files.parse_manifest(text, stable=stable, where=str(folder))
            )
        except (OSError, CorruptError):
            return None
        return None if self._is_refused(version) else version

    def chain(self, version: Version, have: Version | None = None) -> list[Version]:
        """The versions to read, oldest first: from a keyframe, or from after the one we `have`.

        Raises ChainError when a link is missing, refused, or not what the next one was made from.
        """
        links = [version]
        while links[-1].kind == "delta":
            top = links[-1]
            if have and have.number == top.parent and have.says("result") == top.says("base"):
                break
            parent = self.look(top.parent) if len(links) < MAX_CHAIN else None
            if parent is None or parent.run_id != version.run_id:
                raise ChainError(
                    f"version {version.number} is made from version {top.parent}, which is gone "
                    "or refused; a keyframe will do"
                )
            if parent.says("result") != top.says("base"):
                self.quarantine(version)
                raise ChainError(f"version {top.number} was not made from version {top.parent}")
            links.append(parent)
        return links[::-1]

    @contextlib.contextmanager
    def load(self, version: Version) -> Generator[Path, None, None]:
        """A local, verified folder with the version's weights whole, removed on leaving.

        Raises StoreError when it cannot be read (look again) or is not what the manifest
        promised; after three such mismatches the version is quarantined.
        """
        with tempfile.TemporaryDirectory(prefix="peralta-") as local:
            LocalReplica(Path(local)).advance(self, version)
            yield Path(local)

    def read(self, version: Version, name: str) -> Iterator[bytes]:
        """A verified file of a version. Raises StoreError, as `load`."""
        if version.run_id != self.run_id:
            raise StoreError(f"version {version.number} belongs to another run")
        path = f"{name_of(version.number)}/{name}"
        chunks = _resumed(self.place, path)
        try:
            yield from atomic_files.verified(chunks, path, version.manifest.files[name])
        except FileNotFoundError:
            if self.look(version.number) is None:  # pruned while we read; a newer one is there
                raise StoreError(f"version {version.number} is gone; look again") from None
            raise ChainError(f"version {version.number} has lost {name}") from None
        except OSError as error:
            raise StoreError(f"version {version.number} cannot be read: {error}") from None
        except CorruptError as error:
            self.mismatch(version)
            raise StoreError(f"version {version.number} does not verify: {error}") from None

    def mismatch(self, version: Version) -> None:
        """Count a version that was not what it promised; the third time puts it away."""
        self._mismatches[version.manifest.digest] += 1

    def quarantine(self, version: Version) -> None:
        """Do not offer this version again; a number is never reused."""
        self._mismatches[version.manifest.digest] = MAX_MISMATCHES

    def _gone(self) -> GoneError:
        return GoneError(
            f"{IDENTITY} in weights folder {self.where} is gone; is it mounted? "
            "Mount it, or choose another with --weights.dir"
        )

    def _is_refused(self, version: Version) -> bool:
        return self._mismatches[version.manifest.digest] >= MAX_MISMATCHES

    def _numbers(self) -> list[int]:
        return sorted(int(name[5:]) for name in self.place.names() if NAME.fullmatch(name))

    def _parent_of(self, number: int) -> int | None:
        """None for a keyframe, and for what cannot be read."""
        version = self.look(number)
        return version.parent if version is not None and version.kind == "delta" else None

    def _small(self, path: str) -> bytes:
        content = bytearray()
        for chunk in self.place.read(path):
            content += chunk
            if len(content) > MAX_SMALL_FILE:
                raise CorruptError(f"{path} is far too large")
        return bytes(content)

    # Publishing.

    def _next(
        self, step: int, tensors: Mapping[str, torch.Tensor], companions: Mapping[str, bytes]
    ) -> tuple[int, dict[str, Any]]:
        """The next number, and what its manifest says in any case."""
        if (run_id := self.run_id) is None:  # an empty folder where the mount was
            raise OSError(f"{IDENTITY} is gone; is it mounted?")
        specs = sets.specs_of(tensors)
        free, size = self.place.free_bytes(), sets.file_size(specs)
        if free < MIN_FREE_VERSIONS * size:
            raise OSError(f"{free >> 20} MiB free, {MIN_FREE_VERSIONS * size >> 20} MiB needed")
        number = max([step, *(taken + 1 for taken in self._numbers())])
        return number, {
            "format": FORMAT, "run_id": run_id, "number": number, "step": step,
            "model": sets.fingerprint(specs), "tokenizer": _tokenizer_hash(companions),
        }  # fmt: skip

    def _write(
        self,
        number: int,
        about: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor],
        companions: Mapping[str, bytes],
        base: Base | None,
        stream: Callable[[Iterator[Any]], Iterator[Any]],
    ) -> Version:
        checksums: dict[str, int] = {}
        specs = sets.specs_of(tensors)
        name = name_of(number)

        def finished(**fields: Any) -> Callable[[], dict[str, Any]]:
            return lambda: {**about, **fields, "result": sets.set_digest(checksums, specs)}

        if base is not None and sets.specs_of(base[1]) == specs and not delta.unsuitable(tensors):
            parent, old = base
            limit = int(MAX_DELTA_SHARE * sets.file_size(specs))
            small = _limited(delta.encode(old, tensors, checksums), limit)
            said = finished(
                kind="delta", parent=parent.number, depth=parent.depth + 1,
                base=parent.says("result"),
            )  # fmt: skip
            with contextlib.suppress(TooLargeError):
                return self._written(name, {DELTA: stream(small)}, said)
        whole = stream(sets.file_of(tensors, checksums))
        return self._written(name, {WEIGHTS: whole, **companions}, finished(kind="keyframe"))

    def _written(
        self, name: str, files: Mapping[str, atomic_files.Content], about: Callable[[], Any]
    ) -> Version:
        manifest: Manifest = self.place.write_whole(name, files, about)
        return version_of(self.place.path(name), manifest)


def _resumed(place: StorageBackend, path: str) -> Iterator[bytes]:
    """The file's bytes; a connection that breaks is taken up again as long as that helps."""
    received, before = 0, -1
    while True:
        try:
            for chunk in place.read(path, start=received):
                received += len(chunk)
                yield chunk
            return
        except (ConnectionError, TimeoutError):
            if received == before:
                raise
            before = received


def _limited(pieces: Iterator[bytes], limit: int) -> Iterator[bytes]:
    for piece in pieces:
        limit -= len(piece)
        if limit < 0:
            raise TooLargeError
        yield piece


def _stream(pieces: Iterator[Any], *, pace: SamplingPacer | None, timing: Timing) -> Iterator[Any]:
    """The same pieces, at the asked pace, with the time that they took to make."""
    while True:
        started = time.monotonic()
        piece = next(pieces, None)
        timing.encode_seconds += time.monotonic() - started
        if piece is None:
            return
        if pace:
            pace(len(piece))
        yield piece


def _tokenizer_hash(companions: Mapping[str, bytes]) -> str:
    hashed = hashlib.sha256()
    for name in sorted(name for name in companions if name.startswith("tokenizer")):
        hashed.update(companions[name])
    return hashed.hexdigest()[:16]
