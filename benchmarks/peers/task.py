"""The embedded task as every peer gets it. Needs neither pyzmq nor our trainer."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass

from peralta_zmq.environments import calculator
from peralta_zmq.rollout import Problem


@dataclass(frozen=True, slots=True)
class Task:
    """What all sides have in common."""

    model: str  # folder
    folder: str  # for what a peer writes
    train: str = "math_1k"
    system_prompt: str = ""
    num_generations: int = 8
    batch_size: int = 128  # rollouts
    learning_rate: float = 2e-4
    max_steps: int = 80  # to which the learning rate falls linearly
    max_completion_length: int = 48
    temperature: float = 1.0
    adam_beta2: float = 0.95
    max_grad_norm: float = 1.0
    seed: int = 0


def written(task: Task) -> str:
    """As an argument of a peer."""
    return json.dumps(asdict(task))


def asked() -> Task:
    """The task in the program's argument."""
    return Task(**json.loads(sys.argv[1]))


def problems(task: Task) -> list[Problem]:
    """The training problems in file order."""
    return list(calculator.problems("train", 0, train=task.train, system_prompt=task.system_prompt))


def chat(problem: Problem) -> list[dict[str, str]]:
    """The messages as Hugging Face's chat templates take them."""
    return [{"role": each.role, "content": each.content} for each in problem.messages]


def say(**row: object) -> None:
    """One line for whoever measures."""
    sys.stdout.write(json.dumps({**row, "time": time.time()}) + "\n")
    sys.stdout.flush()
