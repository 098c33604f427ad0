"""Answers to held-out problems, with rewards that the test computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import closing
from typing import Any

import pytest
from sample_data import tiny_model

from peralta_zmq import models
from peralta_zmq.config import Config
from peralta_zmq.engines.native.native_engine import native_engine
from peralta_zmq.errors import TaskError
from peralta_zmq.registry import EngineSettings
from peralta_zmq.rollout import Answer, Completion, Message, Problem, Score
from peralta_zmq.trainer.evaluation import Answering

PROBLEMS = [
    Problem(str(number), "calculator", (Message("user", f"{number} plus 2"),), str(number + 2))
    for number in range(1, 4)
]
Reward = Callable[[Problem, Completion], float]


class HeldOut:
    """Held-out problems whose rewards are there at once, or never."""

    def __init__(self, reward: Reward, unscored: Iterable[str] = ()) -> None:
        self._reward, self._unscored = reward, unscored

    def has_turns(self, problem: Problem) -> bool:
        return problem.task == "turns"

    def has_agent(self, problem: Problem) -> bool:
        return False

    def reply(self, problem: Problem, messages: Sequence[Message]) -> Future[Any]:
        count = sum(message.role == "assistant" for message in messages)
        future: Future[Any] = Future()
        future.set_result([Message("user", f"no {count}")] if count < 3 else None)
        return future

    def score(self, problem: Problem, completions: Sequence[Completion]) -> Future[list[Score]]:
        future: Future[list[Score]] = Future()
        if problem.id in self._unscored:
            return future
        try:
            future.set_result([Score(self._reward(problem, each)) for each in completions])
        except TaskError as error:
            future.set_exception(error)
        return future


def answering(held_out: Any, **sections: Any) -> Answering:
    tokenizer = models.load_tokenizer(models.EMBEDDED)
    engine = native_engine(
        tiny_model(vocab_size=468), tokenizer, EngineSettings(slots=4, max_model_len=128)
    )
    limits = {"max_completion_length": 6}
    config = Config.model_validate({"sampling": limits, "eval": {"sampling": limits}, **sections})
    return Answering(config, engine, tokenizer, held_out)


def answers_to(problems: Sequence[Problem], opened: Answering) -> dict[str, list[Answer]]:
    results: dict[str, list[Answer]] = {}
    with closing(opened):
        for problem in problems:
            opened.start(problem)
        while opened.is_busy:
            results |= {problem.id: answers for problem, answers in opened.advance()}
        opened.check()
    return results


def test_problems_get_as_many_answers_as_the_settings_say() -> None:
    opened = answering(
        HeldOut(lambda problem, _: float(problem.id) / 4),
        eval={"rollouts_per_example": 2, "sampling": {"max_completion_length": 6}},
    )
    results = answers_to(PROBLEMS, opened)
    for number in (1, 2, 3):
        expected = [(f"{number} plus 2", number / 4)] * 2
        assert [(each.problem, each.reward) for each in results[str(number)]] == expected


def test_problems_with_turns_are_played() -> None:
    problem = Problem("1", "turns", PROBLEMS[0].messages, "3")
    opened = answering(
        HeldOut(lambda _, completion: len(completion.messages)), task={"max_turns": 8}
    )
    ((answer,),) = answers_to([problem], opened).values()
    assert answer.reward == 5 and "\nno 1\n" in answer.answer


def test_closed_one_does_not_wait_for_rewards() -> None:
    opened, answered = answering(HeldOut(lambda *_: 1.0, unscored=["1", "3"])), list[str]()
    with closing(opened):
        for problem in PROBLEMS:
            opened.start(problem)
        while not answered:
            answered += [problem.id for problem, _ in opened.advance()]
        assert opened.is_busy
    assert answered == ["2"]


def test_problems_whose_reward_fails_are_skipped(caplog: pytest.LogCaptureFixture) -> None:
    failing_ids = {"2"}

    def reward(problem: Problem, completion: Completion) -> float:
        if problem.id in failing_ids:
            raise TaskError("no idea")
        return 1.0

    assert {*answers_to(PROBLEMS, answering(HeldOut(reward)))} == {"1", "3"}
    assert "not evaluated: problem=2 reason=no idea" in caplog.text
    failing_ids |= {"1", "3"}
    with pytest.raises(TaskError, match="no idea"):
        answers_to(PROBLEMS, answering(HeldOut(reward)))
