"""Step folders of the families in docs/models.md, loaded by mlx-lm and vLLM.

The results are in other_libraries.json, from which test_families.py writes docs/models.md. To
write them again: PERALTA_WRITE_DOCS=1 make test-mlx test-vllm ARGS='-k step_folders'
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import other_libraries
import pytest
from families import FAMILIES, random_model

from peralta_zmq import models
from peralta_zmq.engines.vllm.refusals import installed_version
from peralta_zmq.trainer.trained_model import write_merged

RESULTS = Path(__file__).parent / "other_libraries.json"
STUBS = Path(__file__).parents[1] / "support" / "without_torchvision"
TOLERANCE = 1e-4  # of a logprob in fp32, as in test_families.py
MODULES = {"mlx": "mlx_lm", "vllm": "vllm"}
NAMES = {"mlx": "mlx-lm", "vllm": "vLLM"}
# Families that are published in multimodal folders -> their model_type.
MULTIMODAL = {"Qwen3.5": "qwen3_5", "Gemma 3 4B-27B": "gemma3", "Gemma 4": "gemma4"}


def step_folder(family: str, folder: Path) -> Path:
    """A folder with a random model as it is published, in fp32."""
    base = folder / "base"
    weights = models.weights_of(random_model(FAMILIES[family], folder=base))
    if family in MULTIMODAL:
        text = json.loads((base / "config.json").read_text("utf-8"))
        del text["architectures"]
        whole = {"model_type": MULTIMODAL[family], "text_config": text, "vision_config": {}}
        (base / "config.json").write_text(json.dumps(whole), "utf-8")
    return write_merged(folder / "step", weights, {}, base, models.load_tokenizer(base))


def outcomes(library: str, folders: list[Path]) -> list[dict[str, Any]]:
    """What other_libraries.py prints about each folder."""
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # for its errors
    if find_spec("torchvision") is None:
        environment["PYTHONPATH"] = str(STUBS)
    command = [sys.executable, other_libraries.__file__, library, *map(str, folders)]
    process = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    return [json.loads(each) for each in process.stdout.splitlines() if each.startswith('{"folder')]


def result(found: dict[str, Any], expected: dict[str, Any]) -> str:
    """The largest difference of a logprob, and how many are right, or why there is none."""
    if "reason" in found:
        return f"no: {found['reason'].replace('|', '/').replace(found['folder'], 'FOLDER'):.110}"
    gaps = np.abs(np.subtract(found["logprobs"], expected["logprobs"]))
    text = f"{gaps.max():.0e}"
    if gaps.max() < TOLERANCE:
        return text
    return f"{text} after {1 + int((~(gaps < TOLERANCE)).argmax())} tokens"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("library", ["mlx", "vllm"])
def test_step_folders_of_all_families_in_other_libraries(library: str, tmp_path: Path) -> None:
    if not find_spec(MODULES[library]):
        pytest.skip(f"{library} is not installed; run make test-{library}")
    folders = [step_folder(name, tmp_path / str(index)) for index, name in enumerate(FAMILIES)]
    pairs = zip(outcomes(library, folders), outcomes("transformers", folders), strict=True)
    measured = dict(zip(FAMILIES, (result(*pair) for pair in pairs), strict=True))
    results = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    if os.environ.get("PERALTA_WRITE_DOCS"):
        version = installed_version() if library == "vllm" else metadata.version("mlx-lm")
        results[library] = {"version": f"{NAMES[library]} {version}", **measured}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
        return
    for family, text in measured.items():  # but for the sizes of errors
        size = r"^(nan|\de[-+]\d+)"
        assert re.sub(size, "", text) == re.sub(size, "", results[library][family]), family
