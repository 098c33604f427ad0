"""Who does which problem when, agreed on without a word between generators.

Knows a seed, an epoch and a place among the generators; keeps no state and knows no rewards.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import count as count_from

from peralta_zmq.errors import TaskError
from peralta_zmq.rollout import Problem


def problem_order(
    num_problems: int, *, seed: int, epoch: int, index: int = 0, count: int = 1
) -> list[int]:
    """The problems that generator `index` of `count` does in an epoch, in order.

    The shares of an epoch are disjoint and together hold every problem once. With more
    generators than problems, one whose share would be empty does the whole epoch instead.
    """
    assert 0 <= index < count
    order = list(range(num_problems))
    random.Random(f"problem order {seed} {epoch}").shuffle(order)
    return order[index::count] or order


def walk(
    problems: Sequence[Problem], *, seed: int, index: int, count: int, start: int = 0
) -> Iterator[Problem]:
    """A generator's problems without end, epoch after epoch, from its `start`-th on.

    With `start` = problems already done, the walk goes on where it stopped.
    Raises TaskError when there are no problems.
    """
    if not problems:
        raise TaskError("no problems to walk through; name a data set that is not empty")
    per_epoch = len(problem_order(len(problems), seed=seed, epoch=0, index=index, count=count))
    first_epoch, skipped = divmod(start, per_epoch)
    for epoch in count_from(first_epoch):
        order = problem_order(len(problems), seed=seed, epoch=epoch, index=index, count=count)
        yield from (problems[number] for number in order[skipped:])
        skipped = 0
