"""The task of the peers; needs neither pyzmq nor our trainer."""

from __future__ import annotations

import importlib
import json
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from peralta_zmq.rollout import Problem


@dataclass(frozen=True, slots=True)
class Task:
    """Settings that all sides share."""

    model: str  # folder
    folder: str  # for files of the peer
    environment: str = "calculator"  # module of peralta_zmq.environments
    train: str = "math_1k"
    system_prompt: str = ""
    dtype: str = "float32"  # of products
    num_generations: int = 8
    batch_size: int = 128  # rollouts
    learning_rate: float = 2e-4
    max_steps: int = 80  # the learning rate falls linearly to 0 over them
    max_completion_length: int = 48
    temperature: float = 1.0
    adam_beta2: float = 0.95
    max_grad_norm: float = 1.0
    seed: int = 0

    def to_json(self) -> str:
        """The argument of a peer."""
        return json.dumps(asdict(self))


def read_task() -> Task:
    """The task in the program's only argument."""
    return Task(**json.loads(sys.argv[1]))


def problems(task: Task) -> list[Problem]:
    """The training problems in file order."""
    options = {"train": task.train, "system_prompt": task.system_prompt}
    return list(environment(task).problems("train", 0, **options))


def environment(task: Task) -> Any:
    """The module with the task's problems and reward."""
    return importlib.import_module(f"peralta_zmq.environments.{task.environment}")


def chat(problem: Problem) -> list[dict[str, str]]:
    """The messages in the format of Hugging Face's chat templates."""
    return [{"role": message.role, "content": message.content} for message in problem.messages]


def report(**row: object) -> None:
    """Print a row as one JSON line, with the current time."""
    sys.stdout.write(json.dumps({**row, "time": time.time()}) + "\n")
    sys.stdout.flush()
