"""Local replica: a generator's copy of one weight version, updated by deltas.

To update it, a generator reads a chain of versions from the store: the deltas since the replica's
version, or the last keyframe and the deltas after it. The folder has the files that
`from_pretrained` needs. While they are valid, it also has `replica.json` with the manifests of its
version and of the last keyframe.

The files of a keyframe are fsynced. The changes of a delta are not, because that could write all
weights to the disk at every step: after a power cut the next start detects damage by the digest.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack
from pathlib import Path

from peralta_zmq import atomic_files
from peralta_zmq.atomic_files import failpoint
from peralta_zmq.errors import StoreError
from peralta_zmq.weights import delta, tensor_set
from peralta_zmq.weights.store import DELTA_FILE, WEIGHTS_FILE, Version, WeightStore, folder_name

STATE, INCOMING = "replica.json", "incoming"  # two manifests; folder of downloaded files
LOCK = "lock"  # file that the process which uses the folder has locked
logger = logging.getLogger(__name__)


class LocalReplica:
    """The replica in `folder`; `version` is None while it is not valid."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.version: Version | None = None
        self._keyframe: Version | None = None  # the last one: all files but the weights are from it
        self.read_seconds = 0.0  # duration of the reads from the store in the last `advance`

    def tensors(self) -> tensor_set.FileTensors:
        """The weights file; its values change when `advance` applies a delta."""
        return tensor_set.FileTensors(self.folder / WEIGHTS_FILE)

    def recover(self) -> Version | None:
        """Verify the files of an earlier process; returns their version, None if invalid."""
        try:
            state = atomic_files.parse_object((self.folder / STATE).read_bytes())
            keyframe, version = (_parse_manifest(state[name]) for name in ("keyframe", "version"))
            tensors = self.tensors()
            digest = tensor_set.set_digest(tensor_set.checksums_of(tensors), tensors.specs)
            if digest != version.field("result"):
                raise ValueError(f"{WEIGHTS_FILE} does not have the digest in the manifest")
            for name in keyframe.manifest.files.keys() - {WEIGHTS_FILE}:
                for _ in atomic_files.read_verified(self.folder, name, keyframe.manifest):
                    pass
            self.version = version
            self._keyframe = keyframe
        except FileNotFoundError:
            pass
        except (OSError, *atomic_files.MALFORMED) as error:
            logger.warning("local copy not used folder=%s reason=%s", self.folder, error)
        return self.version

    def advance(
        self,
        store: WeightStore,
        version: Version,
        *,
        model: str | None = None,
        before_change: Callable[[], None] = lambda: None,
    ) -> int:
        """Update the replica to `version`; returns the number of bytes read from the store.

        Reads and verifies all files of the chain, then calls `before_change`. `model` is the
        required fingerprint. Raises StoreError: the replica is unchanged if reading failed, else
        invalid.
        """
        if self.version is not None and self.version.weights_id == version.weights_id:
            return 0
        if version.run_id != store.run_id:
            raise StoreError(f"version {version.number} belongs to another run")
        if model not in (None, version.field("model")):
            store.quarantine(version)
            raise StoreError(f"version {version.number} is of another model")
        chain = store.chain(version, self.version)
        incoming = self.folder / INCOMING
        shutil.rmtree(incoming, ignore_errors=True)
        started = time.monotonic()
        try:
            with ExitStack() as read_marks:
                for member in chain:
                    read_marks.enter_context(
                        store.backend.locks.reading(folder_name(member.number))
                    )
                for member in chain:
                    _fetch(store, member, incoming / str(member.number))
            self.read_seconds = time.monotonic() - started
            failpoint("load.fetched")  # here a test can kill the process
            before_change()
            self._change(store, chain, incoming)
        except OSError as error:  # the local disk fails
            raise StoreError(f"the copy in {self.folder} cannot be written: {error}") from None
        finally:
            with contextlib.suppress(OSError):  # rmtree may raise in spite of ignore_errors
                shutil.rmtree(incoming, ignore_errors=True)
        return sum(member.size for member in chain)

    def _change(self, store: WeightStore, chain: list[Version], incoming: Path) -> None:
        """Apply a chain. After a crash `replica.json` is missing: the replica is invalid."""
        self.version = None
        (self.folder / STATE).unlink(missing_ok=True)
        failpoint("load.unmarked")
        for member in chain:
            if member.kind == "keyframe":
                self._keyframe = member
            try:
                self._check(member, self._apply(member, incoming / str(member.number)))
            except ValueError as error:
                store.count_mismatch(member)
                if member is not chain[-1]:  # the requested version, which needs `member`
                    store.count_mismatch(chain[-1])
                raise StoreError(f"version {member.number} does not verify: {error}") from None
            failpoint("load.changed")
        assert self._keyframe is not None, "a chain begins with a keyframe or continues a replica"
        state = {"keyframe": _manifest_text(self._keyframe), "version": _manifest_text(chain[-1])}
        atomic_files.replace_file(self.folder / STATE, json.dumps(state).encode())
        self.version = chain[-1]
        failpoint("load.marked")

    def _apply(self, member: Version, fetched: Path) -> Mapping[str, int]:
        if member.kind == "delta":
            target = self.tensors()
            with (fetched / DELTA_FILE).open("rb") as file:
                return delta.apply(file, target, target.write)
        kept = {LOCK, INCOMING}
        for path in fetched.iterdir():  # each file is replaced, because the engine may read one
            kept.add(path.name)
            if path.is_dir():
                shutil.rmtree(self.folder / path.name, ignore_errors=True)
            os.replace(path, self.folder / path.name)
        for path in self.folder.iterdir():  # an earlier keyframe may have other files
            if path.name not in kept and path.is_dir():
                shutil.rmtree(path)
            elif path.name not in kept:
                path.unlink()
        return tensor_set.checksums_of(self.tensors())

    def _check(self, member: Version, checksums: Mapping[str, int]) -> None:
        specs = self.tensors().specs
        if member.field("model") not in (None, tensor_set.fingerprint(specs)):
            raise ValueError("the weights are of another model than the manifest names")
        if member.field("result") not in (None, tensor_set.set_digest(checksums, specs)):
            raise ValueError("the weights do not have the digest in the manifest")


def _manifest_text(version: Version) -> str:
    _, text = atomic_files.describe(version.manifest.files, version.manifest.about)
    return text.decode()


def _parse_manifest(text: str) -> Version:
    content = text.encode()
    stable = hashlib.sha256(content).hexdigest().encode()
    manifest = atomic_files.parse_manifest(content, stable=stable, where=STATE)
    return Version.from_manifest(Path(folder_name(manifest.about["number"])), manifest)


@contextlib.contextmanager
def locked_folder(folder: Path) -> Generator[Path, None, None]:
    """`folder`, locked by this process, or a temporary folder if it cannot be locked."""
    with ExitStack() as resources:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = resources.enter_context((folder / LOCK).open("ab"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            temporary = tempfile.TemporaryDirectory(prefix="peralta-", ignore_cleanup_errors=True)
            logger.info(
                "replica is in %s: cannot lock %s (%s)", temporary.name, folder, error.strerror
            )
            folder = Path(resources.enter_context(temporary))
        yield folder


def _fetch(store: WeightStore, version: Version, target: Path) -> None:
    """Copy and verify all files of a version; those of a keyframe stay and are fsynced."""
    target.mkdir(parents=True)
    for name in version.manifest.files:
        (target / name).parent.mkdir(exist_ok=True)
        with (target / name).open("wb") as copy:
            for chunk in store.read(version, name):
                copy.write(chunk)
                failpoint("load.chunk")
            if version.kind == "keyframe":
                copy.flush()
                os.fsync(copy.fileno())


@contextlib.contextmanager
def load_version(store: WeightStore, version: Version) -> Generator[Path, None, None]:
    """A temporary folder with the complete, verified weights of a version. Raises StoreError."""
    with tempfile.TemporaryDirectory(prefix="peralta-") as folder:
        LocalReplica(Path(folder)).advance(store, version)
        yield Path(folder)
