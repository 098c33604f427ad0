"""A complete local copy of one weight version, updated in place by deltas.

The folder has the files that `from_pretrained` needs. While the copy is valid, it also has the
manifest of the version, as `replica.json`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack
from pathlib import Path

from peralta_zmq import atomic_files
from peralta_zmq.atomic_files import failpoint
from peralta_zmq.errors import StoreError
from peralta_zmq.weights import delta, tensor_set
from peralta_zmq.weights.store import WeightStore, version_of_step
from peralta_zmq.weights.version import DELTA, WEIGHTS, Version, folder_name

STATE, INCOMING = "replica.json", "incoming"
logger = logging.getLogger(__name__)


class LocalReplica:
    """A local copy in `folder`; `version` is None while the copy is not valid."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.version: Version | None = None
        self.mapped = False  # by a model; then the weights file must be replaced, not patched

    def tensors(self) -> tensor_set.MappedTensors:
        """Views of the weights file; their values change when a delta is applied."""
        return tensor_set.MappedTensors(self.folder / WEIGHTS)

    def recover(self) -> Version | None:
        """The version that an earlier process left here; None if its weights do not verify."""
        with contextlib.suppress(OSError, *atomic_files.MALFORMED):
            text = (self.folder / STATE).read_bytes()
            stable = hashlib.sha256(text).hexdigest().encode()
            manifest = atomic_files.parse_manifest(text, stable=stable, where=STATE)
            version = Version.from_manifest(Path(folder_name(manifest.about["number"])), manifest)
            if tensor_set.digest_of(self.tensors()) == version.field("result"):
                self.version = version
        return self.version

    def advance(
        self,
        store: WeightStore,
        version: Version,
        *,
        model: str | None = None,
        before_change: Callable[[], None] = lambda: None,
    ) -> int:
        """Fetch the files needed for `version`, then update the copy; returns the bytes read.

        `model` is the required model fingerprint. `before_change` is called between the fetch and
        the update. Raises StoreError; the copy is unchanged if the fetch failed, and no longer
        valid if the update failed.
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
        try:
            with ExitStack() as read_marks:
                for link in chain:
                    read_marks.enter_context(store.backend.leases.reading(folder_name(link.number)))
                for link in chain:
                    _fetch(store, link, incoming / str(link.number))
            failpoint("load.fetched")
            before_change()
            self._change(store, chain, incoming)
        except OSError as error:  # on the local disk
            raise StoreError(f"the copy in {self.folder} cannot be written: {error}") from None
        finally:
            with contextlib.suppress(OSError):  # rmtree raises if a close fails, nevertheless
                shutil.rmtree(incoming, ignore_errors=True)
        return sum(link.size for link in chain)

    def _change(self, store: WeightStore, chain: list[Version], incoming: Path) -> None:
        self.version = None
        (self.folder / STATE).unlink(missing_ok=True)
        failpoint("load.unmarked")
        if self.mapped:
            shutil.copyfile(self.folder / WEIGHTS, self.folder / f"{INCOMING}.weights")
            os.replace(self.folder / f"{INCOMING}.weights", self.folder / WEIGHTS)
            self.mapped = False
        for link in chain:
            try:
                self._check(link, self._apply(link, incoming / str(link.number)))
            except ValueError as error:
                store.count_mismatch(link)
                if link is not chain[-1]:
                    store.count_mismatch(chain[-1])
                raise StoreError(f"version {link.number} does not verify: {error}") from None
            failpoint("load.changed")
        manifest = chain[-1].manifest
        _, text = atomic_files.describe(manifest.files, manifest.about)
        atomic_files.replace_file(self.folder / STATE, text)
        self.version = chain[-1]
        failpoint("load.marked")

    def _apply(self, link: Version, fetched: Path) -> Mapping[str, int]:
        """Apply a fetched delta or keyframe; returns the crc32 of each tensor."""
        if link.kind == "delta":
            chunks = atomic_files.read_chunks(fetched / DELTA)
            target = tensor_set.MappedTensors(self.folder / WEIGHTS, writable=True)
            return delta.apply(delta.reader_of(chunks), target)
        for file in fetched.iterdir():
            os.replace(file, self.folder / file.name)
        return tensor_set.checksums_of(self.tensors())

    def _check(self, link: Version, checksums: Mapping[str, int]) -> None:
        specs = self.tensors().specs
        if link.field("model") not in (None, tensor_set.fingerprint(specs)):
            raise ValueError("the weights are of another model than the manifest names")
        if link.field("result") not in (None, tensor_set.set_digest(checksums, specs)):
            raise ValueError("the weights do not have the digest in the manifest")


@contextlib.contextmanager
def locked_folder(folder: Path) -> Generator[Path, None, None]:
    """`folder`, locked during the block, or a temporary folder if it cannot be locked."""
    with ExitStack() as resources:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = resources.enter_context((folder / "lock").open("ab"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            temporary = tempfile.TemporaryDirectory(prefix="peralta-", ignore_cleanup_errors=True)
            logger.info(
                "copying to %s: cannot lock %s (%s)", temporary.name, folder, error.strerror
            )
            folder = Path(resources.enter_context(temporary))
        yield folder


def _fetch(store: WeightStore, version: Version, target: Path) -> None:
    """Copy all files of a version to `target`, verifying their hashes."""
    target.mkdir(parents=True)
    for name in version.manifest.files:
        with (target / name).open("wb") as copy:
            for chunk in store.read(version, name):
                copy.write(chunk)
                failpoint("load.chunk")


@contextlib.contextmanager
def load_version(store: WeightStore, version: Version) -> Generator[Path, None, None]:
    """A temporary folder with the complete, verified weights of a version.

    Raises StoreError if the version cannot be read or verified.
    """
    with tempfile.TemporaryDirectory(prefix="peralta-") as folder:
        LocalReplica(Path(folder)).advance(store, version)
        yield Path(folder)


def export_step(store: WeightStore, step: int, target: Path) -> Version:
    """Write the newest version of `step` to the new folder `target`, for `from_pretrained`.

    Raises StoreError if there is no version of the step, it cannot be read, or `target` exists.
    """
    version = version_of_step(store, step)
    if target.exists():
        raise StoreError(f"{target} exists; choose a new folder")
    try:
        with load_version(store, version) as folder:
            shutil.copytree(folder, target, ignore=shutil.ignore_patterns(STATE))
    except OSError as error:
        raise StoreError(f"{target} cannot be written ({error.strerror})") from None
    return version
