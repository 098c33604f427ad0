"""Import of functions and modules that a user names: MODULE:NAME or FILE.py:NAME."""

from __future__ import annotations

import importlib.util
import os
import pkgutil
import sys
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

# Start of a program for `python -c`: a random.py in the current folder hides no other module.
FOLDER_LAST = "import sys; sys.path.sort(key=''.__eq__)"


def import_object(name: str) -> Any:
    """Import MODULE:NAME or FILE.py:NAME; without NAME, the module. Raises what the import raises.

    Modules of the folder in which the program was started are found as well, last.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name.endswith(".py"):
        add_folder(os.getcwd())
        # With the colon, pkgutil.resolve_name only imports the module. Without the colon, an
        # ImportError inside the module would become a misleading AttributeError.
        return pkgutil.resolve_name(f"{module_name}:{attribute}")
    module = _import_file(module_name)
    return attrgetter(attribute)(module) if attribute else module


def _import_file(file: str) -> ModuleType:
    if file in sys.modules:
        return sys.modules[file]
    path = Path(os.path.expanduser(file))
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    spec = importlib.util.spec_from_file_location(file, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    add_folder(str(path.resolve().parent))  # the file may import modules of its folder
    module = importlib.util.module_from_spec(spec)
    sys.modules[file] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[file]
        raise
    return module


def add_folder(folder: str) -> None:
    """Let modules of a folder be imported; they hide none of the libraries."""
    if folder not in sys.path:
        sys.path.append(folder)
