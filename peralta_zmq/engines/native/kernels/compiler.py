"""Compiles the C files of this folder and loads the libraries.

A library is compiled once per machine and kept in the user's cache folder. Where it cannot be
compiled, or where its results are wrong, the engine uses torch's operators instead.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

# The compiler may reorder sums, but must keep NaN (no -ffinite-math-only).
MATH_FLAGS = "-fno-math-errno -fno-trapping-math -fno-signed-zeros -fassociative-math"
FLAGS = f"-O3 -march=native -fPIC -fopenmp {MATH_FLAGS} -freciprocal-math".split()
COMPILE_TIMEOUT_SECONDS = 60.0
REMEDY = "on Debian, install the packages gcc and libc6-dev"
POINTER, INT64, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
logger = logging.getLogger(__name__)


def load(
    source: str,
    functions: Mapping[str, Sequence[Any]],
    defines: tuple[str, ...] = (),
    *,
    check: Callable[[ctypes.CDLL], bool],
) -> ctypes.CDLL | None:
    """Load the library of the C file `source`; None if the library cannot be used.

    `functions` maps the names of the C functions to their argument types. `defines` are -D options
    of the compiler. `check` returns whether the library computes correct results. On Linux, the
    reason for None is logged; on other systems, the result is always None.
    """
    if sys.platform != "linux":
        return None
    try:
        library = ctypes.CDLL(str(_compiled(Path(__file__).with_name(source), defines)))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        # Path.home() raises RuntimeError for a user without a home directory.
        logger.info("%s is not compiled, which is slower: %s", source, error)
        return None
    for name, argument_types in functions.items():
        getattr(library, name).argtypes = argument_types
    if check(library):
        return library
    logger.warning("%s is not used, which is slower: its results differ from torch's", source)
    return None


def cpu_features() -> str:
    """The line of /proc/cpuinfo with the CPU's features; empty without that line."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:  # a container may hide /proc
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _compiled(source: Path, defines: tuple[str, ...]) -> Path:
    """The library file of `source`; compiles it if it is not in the cache folder.

    The file name has two hashes. The first covers everything that the build depends on, also the
    CPU features: machines may share a home directory, and code for another CPU may crash. The
    second covers the content of the file, because a damaged library could crash the process.
    """
    cc = shutil.which("cc")
    if cc is None:
        raise FileNotFoundError(f"no C compiler here (cc); {REMEDY}")
    flags = [cc, *FLAGS, *defines]
    build = repr((flags, cpu_features(), platform.libc_ver(), _openmp())).encode()
    name = f"{source.stem}-{_hash(source.read_bytes() + build)}"
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "peralta_zmq"
    for library in folder.glob(f"{name}-*.so"):
        if library.stem == f"{name}-{_hash(library.read_bytes())}":
            return library
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        object_file, library = Path(temporary) / "kernel.o", Path(temporary) / "kernel.so"
        _run([*flags, "-c", str(source), "-o", str(object_file)])
        # Linked without FLAGS: with some of these flags, some compilers add start-up code that
        # changes the floating-point mode of the process.
        _run([cc, "-shared", str(object_file), str(_openmp()), "-lm", "-o", str(library)])
        with library.open("rb") as content:
            os.fsync(content.fileno())
            target = folder / f"{name}-{_hash(content.read())}.so"
        os.replace(library, target)
    return target


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _run(command: list[str]) -> None:
    """Run the compiler. Raises OSError with the last line of its error message."""
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_SECONDS
    )
    if result.returncode:
        reason = (result.stderr.strip() or "no error message").splitlines()[-1]
        raise OSError(f"{command[0]} fails ({reason}); {REMEDY}")


def _openmp() -> Path:
    """torch's OpenMP library; a second library's threads would compete with torch's."""
    packages = Path(torch.__file__).parent
    for folder in (packages / "lib", packages.with_name("torch.libs")):
        for library in sorted(folder.glob("libgomp*")):
            return library
    raise FileNotFoundError("this build of torch has no libgomp")
