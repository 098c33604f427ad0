"""Groups of completions and their evaluation, with scripted engines."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import islice
from typing import Any, cast

import numpy as np
import pytest

from peralta_zmq import models
from peralta_zmq.engines import GroupSampler, evaluate, generate_groups
from peralta_zmq.errors import TaskError
from peralta_zmq.rollout import (
    Completion,
    GroupSampling,
    Message,
    Problem,
    Request,
    Sampling,
    Score,
)

PROBLEMS = [
    Problem(str(number), "calculator", (Message("user", f"{number} plus 2"),), str(number + 2))
    for number in range(1, 4)
]


class ScriptedEngine:
    """An engine that completes all requests in a given order."""

    def __init__(self, order: Sequence[int] | None = None) -> None:
        self._order = order
        self.num_yielded = 0
        self.read: list[Request] = []

    def generate(
        self,
        requests: Iterable[Request | None],
        sampling: Sampling,
        between_steps: Callable[[], None] | None = None,
    ) -> Iterator[Completion]:
        self.read = [request for request in requests if request is not None]
        for position in self._order or range(len(self.read)):
            self.num_yielded += 1
            yield completion_of(self.read[position])


def completion_of(request: Request) -> Completion:
    return Completion(
        index=request.index,
        prompt_ids=request.prompt_ids,
        token_ids=np.array([5, 2], np.int32),
        logprobs=np.array([-1, -1], np.float32),
        policy_steps=np.array([0, 0], np.int32),
        finish_reason="stop",
        text="5",
    )


class OneSlotEngine:
    """An engine with one slot, which records the requests that it reads."""

    def __init__(self) -> None:
        self.read: list[int | None] = []

    def generate(
        self,
        requests: Iterable[Request | None],
        sampling: Sampling,
        between_steps: Callable[[], None] | None = None,
    ) -> Iterator[Completion]:
        for request in requests:
            self.read.append(request and request.index)
            if request is not None:
                yield completion_of(request)


def run_groups(
    engine: Any, tokenizer: Any, problems: Iterable[Problem | None], count: int, on_group: Any
) -> None:
    generate_groups(
        engine, tokenizer, problems, on_group, num_generations=count, sampling=Sampling()
    )


def test_problem_is_reported_with_all_siblings_after_the_last_one(tokenizer: Any) -> None:
    engine = ScriptedEngine(order=[4, 1, 5, 2, 0, 3])  # the third problem is complete first
    seen: list[tuple[str, int]] = []

    def on_group(problem: Problem, completions: list[Completion]) -> None:
        seen.append((problem.id, engine.num_yielded))
        first = 2 * PROBLEMS.index(problem)
        assert [completion.index for completion in completions] == [first, first + 1]
        expected = models.chat_prompt(tokenizer, problem.messages)
        for completion in completions:
            assert completion.prompt_ids.tolist() == expected

    run_groups(engine, tokenizer, PROBLEMS, 2, on_group)
    assert seen == [("3", 3), ("1", 5), ("2", 6)]


def test_problems_are_read_one_at_a_time_and_none_is_forwarded(tokenizer: Any) -> None:
    engine = OneSlotEngine()
    problems = iter([None, PROBLEMS[0], None, None, PROBLEMS[1], PROBLEMS[2]])
    read: list[list[int | None]] = []
    run_groups(engine, tokenizer, problems, 2, lambda *group: read.append(list(engine.read)))
    assert read[0] == [None, 0, 1]
    assert read[1] == [None, 0, 1, None, None, 2, 3]


def test_tokenized_prompt_is_used_unchanged(tokenizer: Any) -> None:
    tokens = Problem("1", "calculator", (), "5", input_token_ids=(7, 0, 9))
    groups: list[list[Completion]] = []
    run_groups(ScriptedEngine(), tokenizer, [tokens], 1, lambda _, group: groups.append(group))
    assert groups[0][0].prompt_ids.tolist() == [7, 0, 9]


def test_environment_has_its_own_group_size_and_sampling(tokenizer: Any) -> None:
    other = replace(PROBLEMS[0], id="9", task="other")
    own = GroupSampling(3, Sampling(temperature=0.5))
    engine, groups = ScriptedEngine(order=[5, 0, 2, 6, 1, 3, 4]), dict[str, list[int]]()

    def on_group(problem: Problem, completions: list[Completion]) -> None:
        groups[problem.id] = [completion.index for completion in completions]

    generate_groups(
        engine, tokenizer, [PROBLEMS[0], other, PROBLEMS[1]], on_group,
        num_generations=2, sampling=Sampling(), overrides={"other": own},
    )  # fmt: skip
    assert groups == {"1": [0, 1], "9": [2, 3, 4], "2": [5, 6]}
    samplings = [request.sampling for request in engine.read]
    assert samplings == [None, None, *[own.sampling] * 3, None, None]


# Interruptions.


class InterruptedEngine:
    """An engine that ends before most completions; records the requests that it reads."""

    def __init__(self) -> None:
        self.read: list[Request] = []
        self.max_read: int | None = None  # limit of the requests that it reads; None = all
        self.yielded: Mapping[int, tuple[int, bool]] = {}  # index -> policy step, is_partial

    def generate(self, requests: Iterable[Request], *arguments: Any) -> Iterator[Completion]:
        self.read = list(islice(requests, self.max_read))
        for request in self.read:
            if request.index in self.yielded:
                step, is_partial = self.yielded[request.index]
                steps = np.array([step, step], np.int32)
                yield replace(completion_of(request), policy_steps=steps, is_partial=is_partial)


def test_unfinished_completions_are_requested_again(tokenizer: Any) -> None:
    engine = InterruptedEngine()
    sampler = GroupSampler(cast(Any, engine), tokenizer, num_generations=2)
    groups: list[tuple[str, list[int]]] = []

    def sample(problems: Sequence[Problem]) -> None:
        sampler.sample(problems, add, sampling=Sampling())

    def add(problem: Problem, completions: list[Completion]) -> None:
        groups.append((problem.id, [each.index for each in completions]))

    engine.yielded = {0: (3, False), 2: (4, True)}
    sample(PROBLEMS[:2])
    assert (groups, sampler.num_in_flight, sampler.num_resumed) == ([], 2, 0)
    engine.yielded, engine.max_read = {}, 1
    sample([])
    assert sampler.num_resumed == 0  # the request with tokens was not read
    engine.max_read = None
    engine.yielded = dict.fromkeys(range(6), (4, False))
    sample(PROBLEMS[2:])
    assert [request.index for request in engine.read] == [1, 2, 3, 4, 5]
    partial = engine.read[1].resumes
    assert partial is not None and (partial.index, partial.token_ids.tolist()) == (2, [5, 2])
    assert [request.resumes for request in engine.read if request.index != 2] == [None] * 4
    assert groups == [("1", [0, 1]), ("2", [2, 3]), ("3", [4, 5])]
    assert (sampler.num_in_flight, sampler.num_resumed) == (0, 1)


def test_groups_with_tokens_of_older_weights_are_dropped(tokenizer: Any) -> None:
    engine = InterruptedEngine()
    sampler = GroupSampler(cast(Any, engine), tokenizer, num_generations=2)
    engine.yielded = {0: (3, False), 2: (4, True)}
    sampler.sample(PROBLEMS, lambda *group: None, sampling=Sampling())
    assert [sampler.drop(older_than=step) for step in (3, 4, 4, 5)] == [0, 1, 0, 1]
    sampler.sample([], lambda *group: None, sampling=Sampling())
    assert [request.index for request in engine.read] == [4, 5]
    assert (sampler.drop(), sampler.drop()) == (1, 0)


# Evaluation.


def answers_of(engine: Any, tokenizer: Any, reward: Any, count: int = 1) -> Any:
    def score(problem: Problem, completions: Sequence[Completion]) -> Future[list[Score]]:
        future: Future[list[Score]] = Future()
        try:
            future.set_result([Score(reward(problem, each.text)) for each in completions])
        except TaskError as error:
            future.set_exception(error)
        return future

    return evaluate(engine, tokenizer, PROBLEMS, score, sampling=Sampling(), num_generations=count)


def test_evaluate_keeps_the_order_of_the_problems(tokenizer: Any) -> None:
    engine = ScriptedEngine(order=[2, 5, 0, 3, 1, 4])
    results = answers_of(engine, tokenizer, lambda problem, text: float(problem.id) / 4, 2)
    assert [problem.id for problem, _ in results] == ["1", "2", "3"]
    assert [[(answer.problem, answer.reward) for answer in answers] for _, answers in results] == [
        [(f"{number} plus 2", number / 4)] * 2 for number in (1, 2, 3)
    ]


def test_cancelled_evaluation_does_not_wait_for_rewards(tokenizer: Any) -> None:
    scored: Future[list[Score]] = Future()
    scored.set_result([Score(1.0)])
    cancelled = threading.Event()

    def score(problem: Problem, completions: Sequence[Completion]) -> Future[list[Score]]:
        if problem.id == "3":
            cancelled.set()
        return scored if problem.id == "2" else Future()

    results = evaluate(
        ScriptedEngine(), tokenizer, PROBLEMS, score,
        sampling=Sampling(), is_cancelled=cancelled.is_set,
    )  # fmt: skip
    assert [problem.id for problem, _ in results] == ["2"]


def test_evaluate_skips_problems_whose_reward_fails(
    tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    failing_ids = {"2"}

    def reward(problem: Problem, text: str) -> float:
        if problem.id in failing_ids:
            raise TaskError("no idea")
        return 1.0

    results = answers_of(ScriptedEngine(), tokenizer, reward)
    assert [problem.id for problem, _ in results] == ["1", "3"]
    assert "not evaluated: problem=2 reason=no idea" in caplog.text
    failing_ids |= {"1", "3"}
    with pytest.raises(TaskError, match="no idea"):
        answers_of(ScriptedEngine(), tokenizer, reward)
