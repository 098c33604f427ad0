from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from peralta_zmq import models
from peralta_zmq.engines import evaluate, generate_groups
from peralta_zmq.errors import TaskError
from peralta_zmq.rollout import Completion, Message, Problem, Request, Sampling

PROBLEMS = [
    Problem(str(number), "calculator", (Message("user", f"{number} plus 2"),), str(number + 2))
    for number in range(1, 4)
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return models.load_tokenizer(models.EMBEDDED)


class ScriptedEngine:
    """An engine that completes requests in a given order, with the prompt length as text."""

    def __init__(self, order: Sequence[int] | None = None) -> None:
        self.order = order
        self.num_requests: list[int] = []  # requests per call
        self.samplings: list[Sampling] = []
        self.yielded = 0

    def generate(
        self,
        requests: Iterable[Request | None],
        sampling: Sampling,
        between_steps: Callable[[], None] | None = None,
    ) -> Iterator[Completion]:
        read = [each for each in requests if each is not None]
        self.num_requests.append(len(read))
        self.samplings.append(sampling)
        for position in self.order or range(len(read)):
            self.yielded += 1
            yield completion_of(read[position])


def completion_of(request: Request) -> Completion:
    return Completion(
        index=request.index,
        prompt_ids=request.prompt_ids,
        token_ids=np.array([5, 2], np.int32),
        logprobs=np.array([-1, -1], np.float32),
        policy_steps=np.array([0, 0], np.int32),
        finish_reason="stop",
        text=f"said {len(request.prompt_ids)}",
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


def groups_of(engine: Any, tokenizer: Any, count: int) -> Iterator[tuple[int, list[Completion]]]:
    """The position of each completed problem, with its completions."""
    groups = generate_groups(
        engine, tokenizer, PROBLEMS, num_generations=count, sampling=Sampling()
    )
    return ((int(problem.id) - 1, completions) for problem, completions in groups)


def test_every_problem_gets_its_completions(tokenizer: Any) -> None:
    groups = list(groups_of(ScriptedEngine(), tokenizer, 2))
    assert [(index, len(completions)) for index, completions in groups] == [(0, 2), (1, 2), (2, 2)]


def test_siblings_have_the_prompt_of_their_problem(tokenizer: Any) -> None:
    for index, completions in groups_of(ScriptedEngine(), tokenizer, 2):
        expected = models.chat_prompt(tokenizer, PROBLEMS[index].messages)
        assert [each.prompt_ids.tolist() for each in completions] == [expected, expected]


def test_problem_is_yielded_with_its_last_sibling(tokenizer: Any) -> None:
    engine = ScriptedEngine(order=[4, 0, 5, 2, 1, 3])  # problem 3 is complete after three
    seen = [(index, engine.yielded) for index, _ in groups_of(engine, tokenizer, 2)]
    assert seen == [(2, 3), (0, 5), (1, 6)]


def test_completions_in_any_order_are_assigned_to_their_problem(tokenizer: Any) -> None:
    for index, completions in groups_of(ScriptedEngine(order=[4, 0, 5, 2, 1, 3]), tokenizer, 2):
        expected = models.chat_prompt(tokenizer, PROBLEMS[index].messages)
        assert [each.prompt_ids.tolist() for each in completions] == [expected, expected]


def test_siblings_are_sorted_by_index(tokenizer: Any) -> None:
    for index, completions in groups_of(ScriptedEngine(order=[4, 1, 5, 2, 0, 3]), tokenizer, 2):
        assert [each.index for each in completions] == [2 * index, 2 * index + 1]


def test_problems_are_read_one_at_a_time_and_none_is_forwarded(tokenizer: Any) -> None:
    engine = OneSlotEngine()
    problems = iter([None, PROBLEMS[0], None, None, PROBLEMS[1], PROBLEMS[2]])
    groups = generate_groups(engine, tokenizer, problems, num_generations=2, sampling=Sampling())
    assert next(groups)[0] is PROBLEMS[0]
    assert engine.read == [None, 0, 1]
    assert next(groups)[0] is PROBLEMS[1]
    assert engine.read == [None, 0, 1, None, None, 2, 3]


def test_prompt_does_not_contain_the_answer(tokenizer: Any) -> None:
    secret = Problem("1", "calculator", (Message("user", "3 plus 2"),), "41")
    ((_, (completion,)),) = generate_groups(
        ScriptedEngine(), tokenizer, [secret], num_generations=1, sampling=Sampling()
    )
    assert "41" not in tokenizer.decode(completion.prompt_ids)


def test_tokenized_prompt_is_used_unchanged(tokenizer: Any) -> None:
    tokens = Problem("1", "calculator", (), "5", input_token_ids=(7, 0, 9))
    ((_, (completion,)),) = generate_groups(
        ScriptedEngine(), tokenizer, [tokens], num_generations=1, sampling=Sampling()
    )
    assert completion.prompt_ids.tolist() == [7, 0, 9]


# Evaluation.


def fixed_reward(problem: Problem, text: str) -> float:
    return float(problem.id) / 4


def test_evaluate_keeps_the_order_of_the_problems(tokenizer: Any) -> None:
    engine = ScriptedEngine(order=[2, 5, 0, 3, 1, 4])
    results = evaluate(
        engine, tokenizer, PROBLEMS, fixed_reward, sampling=Sampling(), num_generations=2
    )
    assert [problem.id for problem, _ in results] == ["1", "2", "3"]
    assert [[(answer.problem, answer.reward) for answer in answers] for _, answers in results] == [
        [("1 plus 2", 0.25)] * 2, [("2 plus 2", 0.5)] * 2, [("3 plus 2", 0.75)] * 2,
    ]  # fmt: skip


def test_evaluate_sums_reward_parts(tokenizer: Any) -> None:
    parts = {"right": 1.0, "short": 0.5}
    results = evaluate(
        ScriptedEngine(), tokenizer, PROBLEMS, lambda problem, text: parts, sampling=Sampling()
    )
    assert [each.reward for _, answers in results for each in answers] == [1.5] * 3


def test_evaluate_skips_problems_whose_reward_fails(
    tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(problem: Problem, text: str) -> float:
        if problem.id == "2" or broken:
            raise TaskError("no idea")
        return 1.0

    broken = False
    results = evaluate(ScriptedEngine(), tokenizer, PROBLEMS, failing, sampling=Sampling())
    assert [problem.id for problem, _ in results] == ["1", "3"]
    assert "not evaluated: problem=2 reason=no idea" in caplog.text
    broken = True
    with pytest.raises(TaskError, match="no idea"):
        evaluate(ScriptedEngine(), tokenizer, PROBLEMS, failing, sampling=Sampling())
