"""Time to a mean reward of 0.9 on a pretrained model of 135M parameters; the sides of endtoend.py.

SmolLM2-135M-Instruct learns the task extract with the settings of `make run-real`: 64 rollouts per
step, a learning rate falling from 2e-5 to 0 over 50 steps. TRL computes its products in bfloat16
and in float32. A run ends at the first step with a mean reward of 0.9.
"""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.endtoend import Job, run_job
from benchmarks.harness import Claim
from benchmarks.peers import environment
from benchmarks.peers.task import Task
from tools.real_model import model_folder

REQUIRED = {"wall_vs_trl:bfloat16": 15.0, "wall_vs_trl:float32": 15.0}


def run(*, quick: bool) -> Iterable[Claim]:
    model = str(model_folder())
    job = Job(
        config="configs/extract.toml",
        options=("--model.name", model),
        task=Task(
            model=model, folder="", environment="extract", train="extract_500", batch_size=64,
            learning_rate=2e-5, max_steps=50, temperature=0.8,
        ),
        last=1,
        rounds=1,
        timeouts={"ours": 600.0, "trl:bfloat16": 2400.0, "trl:float32": 1500.0,
                  "ray_original": 1200.0},
        quick_timeouts={"ours": 300.0, "trl:bfloat16": 600.0, "trl:float32": 600.0,
                        "ray_original": 600.0},
        quick_steps=2,
    )  # fmt: skip
    return run_job(job, quick=quick)


def peers() -> dict[str, str]:
    return environment.versions()
