"""The task of the peers; needs neither pyzmq nor our trainer."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass

from peralta_zmq.environments import calculator
from peralta_zmq.rollout import Problem


@dataclass(frozen=True, slots=True)
class Task:
    model: str  # folder
    folder: str  # files of the peer
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
        return json.dumps(asdict(self))


def read_task() -> Task:
    return Task(**json.loads(sys.argv[1]))


def problems() -> list[Problem]:
    return list(calculator.problems("train", 0, train="math_1k"))


def chat(problem: Problem) -> list[dict[str, str]]:
    """The messages in the format of Hugging Face's chat templates."""
    return [{"role": message.role, "content": message.content} for message in problem.messages]


def report(**row: object) -> None:
    sys.stdout.write(json.dumps({**row, "time": time.time()}) + "\n")
    sys.stdout.flush()
