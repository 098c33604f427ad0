"""Weight versions: names and manifest fields of a version, and their validation.

A keyframe holds all weights, a delta the changes since an earlier version, its parent. The number
of a version can be higher than its training step after the run was rolled back.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from peralta_zmq.atomic_files import MAX_COMPANION, MAX_COMPANIONS, CorruptError, Manifest

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
        if max(others.values(), default=0) > MAX_COMPANION or sum(others.values()) > MAX_COMPANIONS:
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
