"""Modules of a user, which settings name by import path."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


class UserModules:
    """Writes modules to a folder and makes them importable (fixture `user_modules`)."""

    def __init__(self, folder: Path, patched: pytest.MonkeyPatch) -> None:
        self._folder, self._patched = folder, patched
        self._packages = set[str]()

    def write(self, name: str, code: str) -> None:
        """Write the module with a dotted name."""
        file = self._folder.joinpath(*name.split(".")).with_suffix(".py")
        file.parent.mkdir(exist_ok=True)
        file.write_text(code, "utf-8")
        self._packages.add(name.partition(".")[0])
        self._patched.syspath_prepend(str(self._folder))  # also invalidates caches

    def forget(self) -> None:
        """Undo the imports, since another test may write modules of the same names."""
        for name in [*sys.modules]:
            if name.partition(".")[0] in self._packages:
                del sys.modules[name]
