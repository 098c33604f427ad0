"""Ways to sample: each engine turns requests into completions. `ask` puts problems to any of them.

Knows problems, prompts and engines; knows nothing of rewards, sockets or the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from peralta_zmq import policy
from peralta_zmq.rollout import Completion, Problem, Request, Sampling


class Generates(Protocol):
    """The part of an engine that `ask` needs."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        """One completion per request, in any order."""
        ...


def ask(
    engine: Generates,
    tokenizer: policy.Tokenizer,
    problems: Sequence[Problem],
    *,
    num_generations: int,
    sampling: Sampling,
) -> Iterator[tuple[int, list[Completion]]]:
    """A problem's index with its `num_generations` completions, as soon as they are all there."""
    requests: list[Request] = []
    for problem in problems:
        prompt_ids = np.array(policy.chat_prompt(tokenizer, problem.messages), np.int32)
        for _ in range(num_generations):
            requests.append(Request(len(requests), prompt_ids))
    siblings: list[list[Completion]] = [[] for _ in problems]
    for completion in engine.generate(requests, sampling):
        group = completion.index // num_generations
        siblings[group].append(completion)
        if len(siblings[group]) == num_generations:
            yield group, siblings[group]
