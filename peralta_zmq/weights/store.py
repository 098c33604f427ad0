"""The weight store: the numbered weight versions that a trainer publishes and generators read.

The manifest of a version has the field `result`, the digest of its weights; that of a delta also
has `base`, the `result` of its parent. A reader of a delta needs the chain of versions from the
last keyframe on. `find` and `newest` return only versions whose STABLE has the hash of the
manifest; `read` verifies the other files.
"""

from __future__ import annotations

import contextlib
import errno
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import torch

from peralta_zmq import atomic_files, errors
from peralta_zmq.atomic_files import Content, CorruptError, Manifest, failpoint
from peralta_zmq.errors import ChainError, OutageError, StoreError, failure_text
from peralta_zmq.weights import delta, tensor_set
from peralta_zmq.weights.backends import StorageBackend, open_backend, read_small
from peralta_zmq.weights.locks import LOCK_SECONDS

WEIGHTS_FILE, DELTA_FILE = "model.safetensors", "delta.bin"
RUN_FILE = "RUN.json"  # names the run that owns a weight store
VERSION_NAME = re.compile(r"step_\d{8}")
MAX_NUMBER = 99_999_999  # eight digits
FORMAT = 2  # format of the manifest
# Integer fields of the manifest with their defaults; None: the field is required.
INTEGER_FIELDS = {"number": None, "step": None, "parent": -1, "depth": 0, "lineage": 0}
# Optional text fields. model: fingerprint of the tensor names and shapes. result: digest of this
# version's weights. base: `result` of the parent. adapts, adapts_name: digest and name of the model
# that a LoRA adapter belongs to. adapts_dtype: format of that model in the trainer; if absent,
# float32. adapts_packed: digest of its packed weights. tokenizer: properties of the
# trainer's tokenizer. settings: JSON of the settings that generators adopt.
TEXT_FIELDS = (
    *("run_id", "model", "base", "result"),
    *("adapts", "adapts_name", "adapts_dtype", "adapts_packed", "tokenizer", "settings"),
)
# Failed verifications until a version is quarantined (treated as missing for the rest of the
# process); a NAS may return stale pages once or twice.
MAX_MISMATCHES = 3
Stream: TypeAlias = Callable[[Iterator[Any]], Iterator[Any]]  # wraps the pieces of a file


@dataclass(frozen=True, slots=True)
class Version:
    """A published weight version."""

    number: int  # increases with each version in the store, also after a roll-back
    step: int  # training step
    folder: Path  # full path in a local or mounted folder; only the name for HTTP and S3
    manifest: Manifest
    run_id: str
    kind: Literal["keyframe", "delta"]  # all weights, or the change since the parent
    parent: int  # number of the version that a delta changes; -1 for a keyframe
    depth: int  # number of deltas since the keyframe, including this one
    lineage: int  # number of roll-backs of the run before this version

    @classmethod
    def from_manifest(cls, folder: Path, manifest: Manifest) -> Version:
        """The version of a manifest. Raises CorruptError if a field is invalid."""
        about = manifest.about
        values = [about.get(name, default) for name, default in INTEGER_FIELDS.items()]
        if not all(type(value) is int and abs(value) <= 2**31 - 1 for value in values):
            names = ", ".join(INTEGER_FIELDS)
            raise CorruptError(f"{folder.name}: one of {names} is not an integer, or too large")
        number, step, parent, depth, lineage = cast("list[int]", values)
        if folder_name(number) != folder.name or step < 0:
            raise CorruptError(f"{folder.name}: its manifest has number {number}, step {step}")
        kind = about.get("kind", "keyframe")
        if kind not in ("keyframe", "delta") or (kind == "delta") != (0 <= parent < number):
            raise CorruptError(f"{folder.name}: kind {kind!r:.80} with parent {parent}")
        if (WEIGHTS_FILE if kind == "keyframe" else DELTA_FILE) not in manifest.files:
            raise CorruptError(f"{folder.name}: a {kind} without its weights file")
        if not all(0 <= size <= 2**63 - 1 for size, _ in manifest.files.values()):
            raise CorruptError(f"{folder.name}: a file has an impossible size")
        weights = (WEIGHTS_FILE, DELTA_FILE)
        others = {name: size for name, (size, _) in manifest.files.items() if name not in weights}
        if (
            max(others.values(), default=0) > atomic_files.MAX_COMPANION
            or sum(others.values()) > atomic_files.MAX_COMPANIONS
        ):
            largest = max(others, key=others.__getitem__)
            raise CorruptError(f"{folder.name}: {largest} has {others[largest]} bytes, too many")
        if not all(isinstance(about.get(name), str | None) for name in TEXT_FIELDS):
            raise CorruptError(f"{folder.name}: one of {', '.join(TEXT_FIELDS)} is not a string")
        run_id = str(about.get("run_id"))  # 'None' if it is missing: not the id of any run
        return cls(number, step, folder, manifest, run_id, kind, parent, depth, lineage)

    @property
    def weights_id(self) -> str:
        """First 16 hexadecimal digits of the manifest's sha256; unique across runs."""
        return self.manifest.digest[:16]

    @property
    def size(self) -> int:
        return sum(size for size, _ in self.manifest.files.values())

    def field(self, name: str) -> str | None:
        """A text field of the manifest (one of TEXT_FIELDS), or None if absent."""
        return cast("str | None", self.manifest.about.get(name))


def folder_name(number: int) -> str:
    """Name of a version's folder: 7 -> step_00000007."""
    return f"step_{number:08d}"


Base: TypeAlias = tuple[Version, Mapping[str, torch.Tensor]]  # parent of a delta, its weights


class WeightStore:
    """The weight versions of one run in one storage backend."""

    def __init__(self, backend: StorageBackend) -> None:
        self.backend = backend
        self.min_number = 0  # of the next version: above published versions that are gone
        self._mismatches: Counter[str] = Counter()  # failed verifications, by weights_id
        self._invalid: set[int] = set()  # listed numbers without a valid version of this run
        self.max_rechecks = 100  # invalid versions that each call of `newest` checks again
        self.last_error = ""  # why `newest` could not read the store, or a newer version

    @classmethod
    def open(cls, address: Path | str, *, token: str | None = None) -> WeightStore:
        """The store in a folder or at an address. Raises ConfigError, as `open_backend`."""
        return cls(open_backend(str(address), token=token))

    @property
    def address(self) -> str:
        return self.backend.address

    @property
    def folder(self) -> Path:
        return self.backend.path("")

    @property
    def run_id(self) -> str | None:
        """The run that owns the store; None if no trainer has claimed it or it cannot be read."""
        with contextlib.suppress(OSError):
            return _read_run_id(self.backend)
        return None

    # Writing.

    def claim(self, run_id: str, *, known: bool = False, create: bool = True) -> None:
        """Claim the store for a run and acquire the lock that keeps other trainers out.

        `known`: the run has claimed the store before; `create`: create a missing store. Raises
        StoreError if the store belongs to another run or a new one cannot be written; OutageError
        if a known one cannot be written or is missing, or another trainer has the lock.
        """
        try:
            owner = _read_run_id(self.backend)
            if owner is None and not create:  # no folder, or an empty mount point
                raise _gone_error(self.address)
            if owner not in (None, run_id):
                raise StoreError(
                    f"weights folder {self.address} belongs to run {owner}, not to {run_id}; "
                    "choose another with --weights.dir, or delete it"
                )
            self.backend.prepare()
            if holder := self.backend.locks.acquire():
                raise OutageError(
                    f"another trainer ({holder}) publishes to {self.address}; stop it, or "
                    "choose another folder with --weights.dir; if it has crashed, its lock "
                    f"expires within {LOCK_SECONDS:.0f} s"
                )
            if owner is None:
                text = json.dumps({"format": 1, "run_id": run_id}) + "\n"
                self.backend.write_file(RUN_FILE, text.encode())
        except OSError as error:
            self.backend.locks.release()
            with contextlib.suppress(OSError):
                if not create and _read_run_id(self.backend) is None:  # the mount was lost
                    raise _gone_error(self.address) from None
            error_class = OutageError if known else StoreError
            reason = failure_text(error, self.address)
            if error.errno == errno.EMFILE:
                raise error_class(
                    f"weights folder {self.address} cannot be used: {reason}"
                ) from None
            if not errors.is_permanent(error):
                reason = error.strerror or str(error)
            raise error_class(
                f"weights folder {self.address} cannot be written ({reason}); "
                "mount it, free it, or choose another with --weights.dir"
            ) from error

    def publish(
        self,
        step: int,
        tensors: Mapping[str, torch.Tensor],
        *,
        companions: Mapping[str, bytes],
        about: Mapping[str, str | int] | None = None,
        base: Base | None = None,
        stream: Stream = iter,
    ) -> Version:
        """Write the next version: a delta from `base` if it is small enough, else a keyframe.

        `stream` wraps the pieces of the weights file, e.g. to limit their rate. Raises StoreError;
        no partial version remains.
        """
        specs = tensor_set.specs_of(tensors)
        try:
            if (run_id := _read_run_id(self.backend)) is None:  # e.g. an empty mount point
                raise OSError(f"{RUN_FILE} is gone; is it mounted?")
            if holder := self.backend.locks.confirm():
                raise OSError(f"another trainer ({holder}) publishes there; stop one of the two")
            needed = 2 * tensor_set.file_size(specs)
            if (free := self.backend.free_bytes()) < needed:
                raise OSError(f"{free >> 20} MiB free, {needed >> 20} MiB needed")
            number = _next_number(self, step)
            if base and (base[0].number >= number or self.find(base[0].number) != base[0]):
                base = None  # a delta needs a parent with a lower number that is still there
            identity = {"format": FORMAT, "run_id": run_id, "number": number, "step": step}
            fields = {**(about or {}), **identity, "model": tensor_set.fingerprint(specs)}
            failpoint("publish.identity")  # here a test can kill the process
            version = _write_version(self.backend, fields, tensors, companions, base, stream)
            self.min_number = number + 1
        except OSError as error:
            raise StoreError(
                f"cannot publish step {step} to {self.address}: {failure_text(error, self.address)}"
            ) from error
        failpoint("publish.visible")
        return version

    # Reading.

    def newest(self) -> Version | None:
        """The newest complete version of this run; None if there is none or listing fails."""
        self.last_error = ""
        try:
            run_id = _read_run_id(self.backend)
            numbers = self.numbers()
            rechecks = 0
            self._invalid &= set(numbers)
            for number in reversed(numbers):
                rechecks += number in self._invalid
                # A NAS may show files late, but checking thousands again would take long.
                if number in self._invalid and rechecks > self.max_rechecks:
                    continue
                version = self.find(number)
                if version is not None and version.run_id == run_id:
                    return version
                self._invalid.add(number)
        except OSError as error:
            self._keep_error(error)
        return None

    def _keep_error(self, error: OSError | CorruptError) -> None:
        if not (self.last_error or isinstance(error, FileNotFoundError)):
            reason = failure_text(error, self.address) if isinstance(error, OSError) else str(error)
            self.last_error = errors.printable(f"{self.address} cannot be read: {reason}")

    def numbers(self) -> list[int]:
        """Numbers of all folders named as a version, complete or not, ascending. Raises OSError."""
        names = self.backend.names()
        return sorted(int(name[5:]) for name in names if VERSION_NAME.fullmatch(name))

    def find(self, number: int) -> Version | None:
        """The version with this number; None if it is missing, incomplete or quarantined."""
        folder = self.backend.path(folder_name(number))
        try:
            stable = read_small(self.backend, f"{folder.name}/{atomic_files.STABLE}")
            text = read_small(self.backend, f"{folder.name}/{atomic_files.MANIFEST}")
            manifest = atomic_files.parse_manifest(text, stable=stable, where=str(folder))
            version = Version.from_manifest(folder, manifest)
        except (OSError, CorruptError) as error:
            self._keep_error(error)
            return None
        return None if self._mismatches[version.weights_id] >= MAX_MISMATCHES else version

    def versions(self) -> Iterator[Version]:
        """All valid versions of this run, oldest first, read one at a time. Raises StoreError."""
        try:
            run_id = _read_run_id(self.backend)
            found = map(self.find, self.numbers())
        except OSError as error:
            reason = failure_text(error, self.address)
            raise StoreError(f"{self.address} cannot be listed ({reason})") from None
        return (version for version in found if version and version.run_id == run_id)

    def chain(self, version: Version, local: Version | None = None) -> list[Version]:
        """The versions to read in order to load `version`, oldest first.

        They begin with a keyframe, or follow `local`. Raises ChainError if a version is missing or
        quarantined, or if a delta was computed from other weights than those of its parent.
        """
        chain = [version]
        while (first := chain[-1]).kind == "delta":
            base_digest = first.field("base")
            if local and local.number == first.parent and local.field("result") == base_digest:
                break
            parent = self.find(first.parent)
            if parent is None or parent.run_id != version.run_id:
                raise ChainError(
                    f"version {version.number} needs version {first.parent}, which is missing or "
                    "quarantined; a keyframe is needed"
                )
            if parent.field("result") != base_digest:
                self.quarantine(version)  # so that `newest` returns the version before it
                raise ChainError(
                    f"version {first.number} was computed from other weights than those of "
                    f"version {first.parent}"
                )
            chain.append(parent)
        return chain[::-1]

    def read(self, version: Version, name: str) -> Iterator[bytes]:
        """A file of a version in chunks; its hash is verified at the end.

        Raises StoreError if the version was removed, cannot be read or is corrupt; ChainError if it
        does not have this file.
        """
        path = f"{folder_name(version.number)}/{name}"
        try:
            stream = _read_resuming(self.backend, path)
            chunks = atomic_files.verified(stream, path, version.manifest.files[name])
            for number, chunk in enumerate(chunks):
                if number == 0 and name == WEIGHTS_FILE:
                    tensor_set.check_header(chunk)
                yield chunk
        except FileNotFoundError:
            if self.find(version.number) is None:  # pruned during the read; there is a newer one
                raise StoreError(f"version {version.number} was removed meanwhile") from None
            raise ChainError(f"version {version.number} has no file {name}") from None
        except OSError as error:
            raise StoreError(f"version {version.number} cannot be read: {error}") from None
        except ValueError as error:
            self.count_mismatch(version)
            raise StoreError(f"version {version.number} does not verify: {error}") from None

    def count_mismatch(self, version: Version) -> None:
        """Count a failed verification; the version is quarantined after MAX_MISMATCHES."""
        self._mismatches[version.weights_id] += 1

    def quarantine(self, version: Version) -> None:
        """Treat this version as missing for the rest of this process."""
        self._mismatches[version.weights_id] = MAX_MISMATCHES


def _next_number(store: WeightStore, step: int) -> int:
    """The number of the next version: above those of this run, and not used by any folder.

    Above a folder step_99999999 of another program there is no number.
    """
    used = set(store.numbers())
    newest = store.newest()
    number = max(step, store.min_number, newest.number + 1 if newest else 0)
    if number > MAX_NUMBER:  # the newest version is forged
        number = step
    while number in used:
        number += 1
    return number


def version_of_step(store: WeightStore, step: int | None) -> Version:
    """The newest version of a training step; of all steps if it is None.

    Raises StoreError with the available steps, or with the reason if the store cannot be read.
    """
    newest = store.newest()
    if step is None and newest is not None:
        return newest
    versions = list(store.versions())
    for version in reversed(versions):
        if version.step == step:
            return version
    why = store.last_error and f"; {store.last_error}"
    if step is None:
        raise StoreError(f"{store.address} has no weights; is weights.dir that of the run?{why}")
    steps = ", ".join(map(str, sorted({version.step for version in versions}))) or "none"
    raise StoreError(
        f"no version of step {step} in {store.address}; available steps: {steps:.300}{why}"
    )


def _write_version(
    backend: StorageBackend,
    fields: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    companions: Mapping[str, bytes],
    base: Base | None,
    stream: Stream,
) -> Version:
    checksums: dict[str, int] = {}  # crc32 of each tensor, filled while the weights are written
    specs = tensor_set.specs_of(tensors)
    name = folder_name(fields["number"])

    def write(files: Mapping[str, Content], kind_fields: Mapping[str, Any]) -> Version:
        def about() -> dict[str, Any]:  # called when all files are written
            return {**fields, **kind_fields, "result": tensor_set.set_digest(checksums, specs)}

        manifest = backend.write_folder(name, files, about)
        return Version.from_manifest(backend.path(name), manifest)

    if base is not None:
        parent, parent_tensors = base
        # A larger delta is published as a keyframe.
        limit = int(0.6 * tensor_set.file_size(specs))
        pieces = _at_most(limit, delta.encode(parent_tensors, tensors, checksums))
        kind_fields = {"kind": "delta", "parent": parent.number, "depth": parent.depth + 1}
        with contextlib.suppress(_DeltaTooLargeError):
            return write(
                {DELTA_FILE: stream(pieces)}, {**kind_fields, "base": parent.field("result")}
            )
    pieces = stream(tensor_set.file_of(tensors, checksums))
    return write({WEIGHTS_FILE: pieces, **companions}, {"kind": "keyframe"})


class _DeltaTooLargeError(Exception): ...


def _at_most(limit: int, pieces: Iterator[bytes]) -> Iterator[bytes]:
    for piece in pieces:
        limit -= len(piece)
        if limit < 0:
            raise _DeltaTooLargeError
        yield piece


def _read_resuming(backend: StorageBackend, path: str) -> Iterator[bytes]:
    """A file in chunks; resumes after a connection error if some bytes were received."""
    received = 0
    previously_received = -1
    while True:
        try:
            for chunk in backend.read(path, start=received):
                received += len(chunk)
                yield chunk
            return
        except (ConnectionError, TimeoutError):
            if received == previously_received:
                raise
            previously_received = received


def _read_run_id(backend: StorageBackend) -> str | None:
    """The run in RUN_FILE; None if it is missing or damaged. Raises OSError if it is unreadable."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, ValueError, KeyError):
        return str(atomic_files.parse_object(read_small(backend, RUN_FILE))["run_id"])
    return None


def _gone_error(address: str) -> OutageError:
    return OutageError(
        f"{RUN_FILE} in weights folder {address} is gone; is it mounted? "
        "Mount it, or choose another with --weights.dir"
    )
