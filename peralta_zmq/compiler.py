"""Compiles C files of this package and loads the libraries.

A library is compiled once per machine and kept in the user's cache folder. Where it cannot be
compiled, or where its results are wrong, torch's operators are used instead.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import logging
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

# The value of -march (default: native), or "none" to use torch's operators. For tests.
INSTRUCTION_SET = "PERALTA_KERNELS"
# The compiler may reorder sums, but must keep NaN (no -ffinite-math-only).
MATH_FLAGS = "-fno-math-errno -fno-trapping-math -fno-signed-zeros -fassociative-math"
FLAGS = f"-O3 -fPIC -fopenmp {MATH_FLAGS} -freciprocal-math".split()
# Calls `probe` of a library, argument 2, which needs the OpenMP library, argument 1.
PROBE = (
    "import ctypes, sys; ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL); "
    "sys.exit(ctypes.CDLL(sys.argv[2]).probe())"
)
HEADER = Path(__file__).with_name("compiler.h")  # the C files may include it
REMEDY = "on Debian, install the packages gcc and libc6-dev"
POINTER, INT64, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
logger = logging.getLogger(__name__)


def load(
    source: Path,
    functions: Mapping[str, Sequence[Any]],
    defines: tuple[str, ...] = (),
    *,
    check: Callable[[ctypes.CDLL], bool],
) -> ctypes.CDLL | None:
    """Load the library of the C file `source`; None, with a logged reason, if it cannot be used.

    `functions` maps the names of the C functions to their argument types. `defines` are -D options
    of the compiler. `check` returns whether the library computes correct results. Its function
    `probe` uses its instructions; a child process calls it first, because an unusable instruction
    ends the process. On other systems than Linux always None.
    """
    instruction_set = os.environ.get(INSTRUCTION_SET, "native")
    if sys.platform != "linux" or instruction_set == "none":
        return None
    flags = (f"-march={instruction_set}", *defines)
    try:
        return _open(_compiled(source, flags), functions, check, 10.0)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        # Path.home() raises RuntimeError for a user without a home directory.
        logger.info("%s is not used, which is slower: %s", source.name, error)
    except ValueError as error:
        logger.warning("%s is not used, which is slower: %s", source.name, error)
    return None


def load_again(
    name: str, functions: Mapping[str, Sequence[Any]], *, check: Callable[[ctypes.CDLL], bool]
) -> ctypes.CDLL:
    """Load the library that `load` once loaded from the file `name` of the cache folder.

    Ignores INSTRUCTION_SET. Raises OSError, RuntimeError or ValueError if it cannot be used here.
    """
    file = _cache_folder() / Path(name).name
    if file.stem.rpartition("-")[2] != _hash(file.read_bytes()):
        raise OSError(f"{file} is damaged")
    # The library has been used before: the machine is only slow now.
    return _open(file, functions, check, 60.0)


def _open(
    file: Path,
    functions: Mapping[str, Sequence[Any]],
    check: Callable[[ctypes.CDLL], bool],
    timeout: float,
) -> ctypes.CDLL:
    """Load a library file. Raises ValueError for wrong results, or as `_probe`."""
    _probe(file, timeout)
    library = ctypes.CDLL(str(file))
    try:
        for name, argument_types in functions.items():
            getattr(library, name).argtypes = argument_types
    except AttributeError as error:  # another version of this package has compiled it
        raise OSError(str(error)) from None
    if library.probe() == 0 and check(library):
        return library
    raise ValueError("its results differ from torch's")


def cpu_features() -> str:
    return cpu_line("flags", "Features")


def cpu_line(*beginnings: str) -> str:
    """The first line of /proc/cpuinfo with one of these beginnings; empty without one."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:  # a container may hide /proc
        return ""
    return next((line for line in lines if line.startswith(beginnings)), "")


def _probe(library: Path, timeout: float) -> None:
    """Call the function `probe` of a library in a child process. Raises OSError if it fails."""
    command = [sys.executable, "-I", "-S", "-c", PROBE, str(_openmp()), str(library)]
    try:
        code = subprocess.run(command, capture_output=True, timeout=timeout).returncode
    except subprocess.TimeoutExpired:
        raise OSError(f"it has not answered within {timeout:.0f} s") from None
    if code:
        reason = signal.strsignal(-code) if code < 0 else f"code {code}"
        raise OSError(f"this machine cannot execute it ({reason})")


def _compiled(source: Path, options: tuple[str, ...]) -> Path:
    """The library file of `source`; compiles it if it is not in the cache folder.

    The file name has a hash of everything that the build depends on, also the machine, because
    machines may share a home directory; and a hash of the content, because a damaged library could
    crash the process.
    """
    cc = shutil.which("cc")
    if cc is None:
        raise FileNotFoundError(f"no C compiler here (cc); {REMEDY}")
    flags = [cc, *FLAGS, *options]
    machine = platform.machine(), cpu_features(), platform.libc_ver()
    build = repr((flags, machine, _openmp())).encode()
    name = f"{source.stem}-{_hash(source.read_bytes() + HEADER.read_bytes() + build)}"
    folder = _cache_folder()
    for library in folder.glob(f"{name}-*.so"):
        if library.stem == f"{name}-{_hash(library.read_bytes())}":
            return library
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        object_file = Path(temporary) / "kernel.o"
        library = Path(temporary) / "kernel.so"
        _run([*flags, f"-I{HEADER.parent}", "-c", str(source), "-o", str(object_file)])
        # Linked without FLAGS: with some of these flags, some compilers add start-up code that
        # changes the floating-point mode of the process.
        _run([cc, "-shared", str(object_file), str(_openmp()), "-lm", "-o", str(library)])
        with library.open("rb") as content:
            os.fsync(content.fileno())
            target = folder / f"{name}-{_hash(content.read())}.so"
        os.replace(library, target)
    return target


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "peralta_zmq"


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, timeout=60.0)
    if result.returncode:
        reason = (result.stderr.strip() or "no error message").splitlines()[-1]
        raise OSError(f"{command[0]} fails ({reason}); {REMEDY}")


def _openmp() -> Path:
    """torch's OpenMP library; a second library's threads would compete with torch's."""
    torch = importlib.util.find_spec("torch")
    assert torch is not None and torch.origin is not None
    packages = Path(torch.origin).parent
    for folder in (packages / "lib", packages.with_name("torch.libs")):
        for library in sorted(folder.glob("libgomp*")):
            return library
    raise FileNotFoundError("this build of torch has no libgomp")
