"""Ways to sample: each engine turns requests into completions. `ask` puts problems to any of them.

Knows problems, prompts and engines; knows nothing of rewards, sockets or the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Protocol

import numpy as np

from peralta_zmq import models
from peralta_zmq.rollout import Completion, Problem, Request, Sampling


class Generates(Protocol):
    """The part of an engine that `ask` needs."""

    def generate(
        self,
        requests: Iterable[Request | None],
        sampling: Sampling,
        between_steps: Callable[[], None] | None = None,
    ) -> Iterator[Completion]:
        """One completion per request, in any order."""
        ...


def ask(
    engine: Generates,
    tokenizer: models.Tokenizer,
    problems: Iterable[Problem | None],
    *,
    num_generations: int,
    sampling: Sampling,
    between_steps: Callable[[], None] | None = None,
) -> Iterator[tuple[Problem, list[Completion]]]:
    """A problem with its `num_generations` completions, as soon as they are all there.

    Problems are taken one at a time as the engine has room; None says that there is none now.
    """
    under_way: dict[int, tuple[Problem, list[Completion]]] = {}  # by number of the problem

    def requests() -> Iterator[Request | None]:
        numbers = count()
        for problem in problems:
            if problem is None:
                yield None
                continue
            number = next(numbers)
            under_way[number] = problem, []
            tokens = problem.input_token_ids or models.chat_prompt(tokenizer, problem.messages)
            prompt_ids = np.array(tokens, np.int32)
            for sibling in range(num_generations):
                yield Request(number * num_generations + sibling, prompt_ids)

    for completion in engine.generate(requests(), sampling, between_steps):
        number = completion.index // num_generations
        problem, siblings = under_way[number]
        siblings.append(completion)
        if len(siblings) == num_generations:
            del under_way[number]
            yield problem, sorted(siblings, key=lambda each: each.index)
