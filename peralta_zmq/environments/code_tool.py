"""The tool `python`, which runs code of the model: in a container where podman is installed.

Without podman the code has the limits of all tools; see docs/security.md for what each holds.
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
import os
import select
import shutil
import subprocess
import tempfile
import time
import traceback

IMAGE = "docker.io/library/python:3.12-slim"  # unless PERALTA_PYTHON_IMAGE names another one
LIMITS = (
    *("--network=none", "--read-only", "--tmpfs=/tmp:rw,size=64m", "--workdir=/tmp"),
    *("--memory=512m", "--memory-swap=512m", "--pids-limit=64", "--cap-drop=all"),
    *("--security-opt=no-new-privileges", "--user=65534:65534", "--log-driver=none"),
    *("--ulimit=nofile=256:256", "--ulimit=nproc=1024:1024"),
    *("--http-proxy=false", "--read-only-tmpfs=false"),
)
MAX_OUTPUT = 1 << 20  # bytes; a program that prints more is ended


def python(code: str) -> str:
    """Run a Python program, and return what it prints.

    Args:
        code: the program
    """
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})
        except Exception:  # noqa: BLE001  a program may raise anything
            traceback.print_exc(limit=-1)
    return output.getvalue()


def run_in_container(code: str, *, deadline: float) -> str | None:
    """As `python`, in a container without network; None without podman.

    `deadline` is in monotonic seconds. Raises TimeoutError after it, and OSError if podman cannot
    run the container.
    """
    if shutil.which("podman") is None:
        return None
    check_podman()
    seconds = math.ceil(deadline - time.monotonic())
    if seconds <= 0:
        raise TimeoutError
    name = f"peralta-{os.urandom(8).hex()}"
    output = b""
    with tempfile.TemporaryFile() as file:
        file.write(code.encode())
        file.seek(0)
        command = [*_command(f"--name={name}", f"--timeout={seconds + 1}", "--interactive"), "-"]
        with subprocess.Popen(
            command,
            stdin=file,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=tempfile.gettempdir(),  # podman may leave a file `oom` there
        ) as process:
            assert process.stdout is not None
            reader = process.stdout.fileno()
            has_ended = False
            try:
                while len(output) <= MAX_OUTPUT:
                    left = max(0.0, deadline - time.monotonic())
                    if not select.select([reader], [], [], left)[0]:
                        raise TimeoutError
                    part = os.read(reader, 1 << 16)
                    if has_ended := not part:
                        break
                    output += part
            finally:
                if not has_ended:
                    remove = ["podman", "rm", "--force", "--ignore", "--time=0", name]
                    subprocess.run(remove, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                    process.kill()
    return output.decode(errors="replace")


def _command(*options: str) -> list[str]:
    image = os.environ.get("PERALTA_PYTHON_IMAGE", IMAGE)
    return ["podman", "run", "--rm", *options, *LIMITS, image, "python3", "-I"]


@functools.cache
def check_podman() -> None:
    """Raise OSError if no container runs; a first call may have to fetch the image."""
    tried = subprocess.run([*_command(), "-c", "0"], capture_output=True, text=True)
    if tried.returncode:
        raise OSError(f"podman cannot run Python: {' '.join(tried.stderr.split())[-300:]}")
