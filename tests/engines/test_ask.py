from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from peralta_zmq import policy
from peralta_zmq.engines import ask
from peralta_zmq.engines.evaluate import evaluate
from peralta_zmq.rollout import Completion, Message, Problem, Request, Sampling

PROBLEMS = [
    Problem(str(number), "calculator", (Message("user", f"{number} plus 2"),), str(number + 2))
    for number in range(1, 4)
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return policy.load_tokenizer(policy.EMBEDDED)


class Parrot:
    """An engine that repeats the length of the prompt, and answers in the order it is told."""

    def __init__(self, order: Sequence[int] | None = None) -> None:
        self.order = order
        self.asked: list[int] = []  # requests per call
        self.samplings: list[Sampling] = []
        self.yielded = 0

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        self.asked.append(len(requests))
        self.samplings.append(sampling)
        for position in self.order or range(len(requests)):
            request = requests[position]
            self.yielded += 1
            yield Completion(
                index=request.index,
                prompt_ids=request.prompt_ids,
                token_ids=np.array([5, 2], np.int32),
                logprobs=np.array([-1, -1], np.float32),
                policy_steps=np.array([0, 0], np.int32),
                finish_reason="stop",
                text=f"said {len(request.prompt_ids)}",
            )


def asked(engine: Parrot, tokenizer: Any, count: int) -> Iterator[tuple[int, list[Completion]]]:
    return ask(engine, tokenizer, PROBLEMS, num_generations=count, sampling=Sampling())


def test_every_problem_comes_with_its_completions(tokenizer: Any) -> None:
    answers = list(asked(Parrot(), tokenizer, 2))
    assert [(index, len(said)) for index, said in answers] == [(0, 2), (1, 2), (2, 2)]


def test_siblings_have_equal_prompts_which_are_the_problems(tokenizer: Any) -> None:
    for index, said in asked(Parrot(), tokenizer, 2):
        expected = policy.chat_prompt(tokenizer, PROBLEMS[index].messages)
        assert [each.prompt_ids.tolist() for each in said] == [expected, expected]


def test_problem_is_given_as_soon_as_its_last_sibling_is_there(tokenizer: Any) -> None:
    engine = Parrot(order=[4, 0, 5, 2, 1, 3])  # problem 3 is complete after three
    seen = [(index, engine.yielded) for index, _ in asked(engine, tokenizer, 2)]
    assert seen == [(2, 3), (0, 5), (1, 6)]


def test_completions_in_any_order_find_their_problem(tokenizer: Any) -> None:
    for index, said in asked(Parrot(order=[4, 0, 5, 2, 1, 3]), tokenizer, 2):
        expected = policy.chat_prompt(tokenizer, PROBLEMS[index].messages)
        assert [each.prompt_ids.tolist() for each in said] == [expected, expected]


def test_all_requests_are_made_in_one_call(tokenizer: Any) -> None:
    engine = Parrot()
    list(asked(engine, tokenizer, 4))
    assert engine.asked == [12]


def test_answer_never_reaches_the_model(tokenizer: Any) -> None:
    secret = Problem("1", "calculator", (Message("user", "3 plus 2"),), "41")
    ((_, (said,)),) = ask(Parrot(), tokenizer, [secret], num_generations=1, sampling=Sampling())
    assert "41" not in tokenizer.decode(said.prompt_ids)


# Evaluation.


def paid(problem: Problem, text: str) -> float:
    return float(problem.id) / 4


def test_evaluation_answers_each_problem_in_its_order(tokenizer: Any) -> None:
    answers = evaluate(Parrot(order=[2, 0, 1]), tokenizer, PROBLEMS, paid, max_completion_length=7)
    assert [(each.problem, each.reward) for each in answers] == [
        ("1 plus 2", 0.25), ("2 plus 2", 0.5), ("3 plus 2", 0.75),
    ]  # fmt: skip


def test_evaluation_is_greedy_within_its_length(tokenizer: Any) -> None:
    engine = Parrot()
    evaluate(engine, tokenizer, PROBLEMS, paid, max_completion_length=7)
    assert engine.samplings == [Sampling(temperature=0.0, max_completion_length=7)]


def test_evaluation_adds_up_the_parts_of_a_reward(tokenizer: Any) -> None:
    parts = {"right": 1.0, "short": 0.5}
    answers = evaluate(
        Parrot(), tokenizer, PROBLEMS, lambda problem, text: parts, max_completion_length=7
    )
    assert [each.reward for each in answers] == [1.5] * 3


def test_evaluation_of_many_problems_is_done_in_parts(tokenizer: Any) -> None:
    many = [Problem(str(n), "calculator", (Message("user", "1"),), "1") for n in range(100)]
    engine = Parrot()
    answers = evaluate(engine, tokenizer, many, paid, max_completion_length=7)
    assert (engine.asked, len(answers)) == ([64, 36], 100)
