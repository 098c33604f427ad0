"""Any published step as a folder for `from_pretrained`. Knows stores and files."""

from __future__ import annotations

import shutil
from pathlib import Path

from peralta_zmq.errors import StoreError
from peralta_zmq.weights.replica import SOUND
from peralta_zmq.weights.store import WeightStore
from peralta_zmq.weights.version import Version


def export(store: WeightStore, step: int, target: Path) -> Version:
    """Write the newest published version of `step`, delta or not, to the new folder `target`.

    Raises StoreError when there is no such step, it cannot be read, or `target` is taken.
    """
    version = version_of_step(store, step)
    if target.exists():
        raise StoreError(f"{target} is there already; name a new folder")
    try:
        with store.load(version) as folder:
            shutil.copytree(folder, target, ignore=shutil.ignore_patterns(SOUND))
    except OSError as error:
        raise StoreError(f"{target} cannot be written ({error.strerror})") from None
    return version


def version_of_step(store: WeightStore, step: int) -> Version:
    """The newest version of a step. Raises StoreError naming the steps that there are."""
    found = store.versions()
    for version in reversed(found):
        if version.step == step:
            return version
    steps = ", ".join(str(each) for each in sorted({each.step for each in found})) or "none"
    raise StoreError(f"no version of step {step} in {store.where}; there are: {steps:.300}")
