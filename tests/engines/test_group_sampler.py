"""Groups of completions, with a scripted engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from generators import FakeEngine

from peralta_zmq import models
from peralta_zmq.engines import Sampler
from peralta_zmq.rollout import Message, Problem, Request, Sampling

PROBLEMS = [
    Problem(str(number), "calculator", (Message("user", f"{number} plus 2"),), str(number + 2))
    for number in range(1, 4)
]


def indices_of(requests: Sequence[Request]) -> list[int]:
    return [request.index for request in requests]


def test_group_ends_with_the_last_of_its_completions_in_order(tokenizer: Any) -> None:
    engine = FakeEngine(slots=99)
    sampler = Sampler(engine, tokenizer)
    groups = [sampler.start(problem, 2, Sampling()) for problem in PROBLEMS]
    engine.ending = [[4], [1], [5], [2], [0], [3]]  # the third problem is complete first
    steps = [sampler.advance() for _ in engine.ending[:]]
    assert steps == [[], [], [groups[2]], [], [groups[0]], [groups[1]]]
    for number, group in enumerate(groups):
        assert [each.index for each in group.completions] == [2 * number, 2 * number + 1]
        expected = models.chat_prompt(tokenizer, group.problem.messages)
        assert all(each.prompt_ids.tolist() == expected for each in group.completions)
    assert sampler.num_in_flight == 0


def test_group_may_be_started_while_a_slot_is_free(tokenizer: Any) -> None:
    engine = FakeEngine(slots=3)
    sampler = Sampler(engine, tokenizer)
    sampler.start(PROBLEMS[0], 2, Sampling())
    assert sampler.has_room
    sampler.start(PROBLEMS[1], 2, Sampling())
    assert not sampler.has_room
    engine.ending = [[], [0]]
    sampler.advance()
    assert not sampler.has_room and indices_of(engine.submitted) == [0, 1, 2]
    sampler.advance()
    assert not sampler.has_room  # the rest of the group needs the slot
    sampler.advance()
    assert sampler.has_room and indices_of(engine.submitted) == [0, 1, 2, 3]


def test_single_completion_takes_a_slot_before_others_that_wait(tokenizer: Any) -> None:
    engine = FakeEngine(slots=1)
    sampler = Sampler(engine, tokenizer)
    sampler.start(PROBLEMS[0], 2, Sampling())
    sampler.advance()
    sampler.start_alone(np.array([7, 9], np.int32), Sampling(), sampled=[])
    sampler.advance()
    sampler.advance()
    assert indices_of(engine.submitted) == [0, -1, 1]


# Interruptions.


def test_interrupted_groups_are_requested_again_with_their_tokens(tokenizer: Any) -> None:
    engine = FakeEngine(slots=99)
    sampler = Sampler(engine, tokenizer)
    groups = [sampler.start(problem, 2, Sampling()) for problem in PROBLEMS[:2]]
    engine.ending, engine.partial = [[0]], {2: 4}
    assert sampler.advance() == []
    sampler.interrupt(groups)
    assert (sampler.num_in_flight, sampler.num_resumed) == (0, 0)
    groups.append(sampler.start(PROBLEMS[2], 2, Sampling()))
    engine.submitted = []
    sampler.resume(groups)
    assert sampler.num_resumed == 0  # not submitted yet
    assert sampler.advance() == groups
    assert indices_of(engine.submitted) == [1, 2, 3, 4, 5]
    partial = engine.submitted[1].resumes
    assert partial is not None and (partial.index, partial.token_ids.tolist()) == (2, [5, 6])
    assert [each.resumes for each in engine.submitted if each.index != 2] == [None] * 4
    assert (sampler.num_in_flight, sampler.num_resumed) == (0, 1)


def test_dropped_groups_leave_the_engine_and_the_queue(tokenizer: Any) -> None:
    engine = FakeEngine(slots=3)
    sampler = Sampler(engine, tokenizer)
    groups = [sampler.start(problem, 2, Sampling()) for problem in PROBLEMS]
    engine.ending = [[]]
    sampler.advance()
    sampler.drop(groups[:2])
    assert (sampler.num_in_flight, engine.num_free()) == (1, 3)
    assert sampler.advance() == groups[2:]
    assert indices_of(engine.submitted) == [0, 1, 2, 4, 5]
