"""Results of reward functions become scores, or errors with the value."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from peralta_zmq.environments.reward_functions import RewardFunction, outcome, score_of
from peralta_zmq.errors import RewardError
from peralta_zmq.rollout import Message, Problem, Score

PROBLEM = Problem("7", "mine", (Message("user", "?"),), "4")


def of_group(result: Any) -> Any:
    """What a function with TRL's signature may return for two completions, after checks."""

    def function(completions: Any) -> Any:
        return result

    (call,) = RewardFunction(function, takes_group=True).calls(PROBLEM, ["a", "b"], [(), ()])
    return outcome(call, function)


@pytest.mark.parametrize("result", [
    [1, None], (1.0, None), np.array([1.0, 0.0]), [True, np.float32(0)], iter([1, 0]),
])  # fmt: skip
def test_list_of_numbers_and_none_is_accepted(result: Any) -> None:
    rewards = of_group(result)
    assert rewards[0] == 1.0 and type(rewards[0]) is float
    assert rewards[1] in (None, 0.0)


@pytest.mark.parametrize(("result", "message"), [
    ([1.0], "returned 1 rewards for 2 completions"),
    ([1.0] * 3, "returned 3 rewards for 2 completions"),
    ([1.0, math.nan], "returned nan, which is not a number from"),
    ([1.0, "1"], "returned '1', which is not a number"),
    ([1.0, {"a": 1}], "returned {'a': 1} for a completion, which is not a number"),
    ("10", "returned '10', which is not a list of numbers"),
    (None, "returned None, which is not a list of numbers"),
    (1.0, "returned 1.0, which is not a list of numbers"),
    ({0: 1.0, 1: 1.0}, "returned {0: 1.0, 1: 1.0}, which is not a list"),
    (np.array(1.0), r"returned array(1.), which is not a list"),
    (np.zeros((2, 2)), "returned array([0., 0.]), which is not a number"),
])  # fmt: skip
def test_other_result_is_a_failure(result: Any, message: str) -> None:
    assert message in of_group(result)


def test_function_without_columns_gets_only_its_parameters() -> None:
    def function(completions: Any, answer: Any, *, bonus: float) -> Any:
        return [bonus + len(completions[0][0]["content"]) + float(answer[0])]

    (call,) = RewardFunction(function, {"bonus": 0.5}, takes_group=True).calls(
        PROBLEM, ["abc"], [()]
    )
    assert outcome(call, function) == [7.5]


def functions(*weights: float) -> list[RewardFunction]:
    return [
        RewardFunction(of_group, label=f"f{number}", weight=weight)
        for number, weight in enumerate(weights)
    ]


def test_reward_of_a_task_gets_the_messages_of_an_episode_if_it_has_the_parameter() -> None:
    def with_messages(problem: Problem, text: str, messages: Any = (), *, bonus: int = 0) -> int:
        return len(messages) + bonus

    def without(problem: Problem, text: str, **options: Any) -> int:
        return len(options)

    episode = (Message("assistant", "a"), Message("user", "b"), Message("assistant", "c"))
    for function, options, expected in (
        (with_messages, {}, [3.0, 1.0]),
        (with_messages, {"bonus": 1}, [4.0, 2.0]),
        (without, {}, [1.0, 1.0]),  # messages
    ):
        calls = RewardFunction(function, options).calls(
            PROBLEM, ["c", "c"], [(), ()], [episode, episode[:1]]
        )
        assert [reward for call in calls for reward in outcome(call, function)] == expected
    (call,) = RewardFunction(with_messages).calls(PROBLEM, ["c"], [()])  # one turn
    assert outcome(call, with_messages) == [0.0]


def test_score_is_the_weighted_sum_with_unweighted_parts() -> None:
    assert score_of(PROBLEM, functions(2, -0.5), [1.0, 3.0]) == Score(0.5, {"f0": 1.0, "f1": 3.0})
    terms = {"right": 1.0, "short": 0.5}
    assert score_of(PROBLEM, functions(2, 1), [terms, None]) == Score(3.0, {"f0": 1.5})


def test_single_function_without_label_keeps_its_terms() -> None:
    single = [RewardFunction(of_group)]
    assert score_of(PROBLEM, single, [1.0]) == Score(1.0)
    terms = {"right": 1.0, "short": 0.5}
    assert score_of(PROBLEM, single, [terms]) == Score(1.5, terms)


def test_task_may_return_a_score_whose_parts_are_not_its_sum() -> None:
    def function(problem: Problem, text: str) -> Any:
        return {
            "good": Score(1.5, {"right": np.float32(3)}),
            "bad": Score(1.0, {"right": math.nan}),
        }[text]

    good, bad = RewardFunction(function).calls(PROBLEM, ["good", "bad"], [(), ()])
    (score,) = outcome(good, function)
    assert score_of(PROBLEM, [RewardFunction(function)], [score]) == Score(1.5, {"right": 3.0})
    named = RewardFunction(function, label="task", weight=2.0)
    other = RewardFunction(of_group, label="other")
    assert score_of(PROBLEM, [named, other], [score, 1.0]) == Score(
        4.0, {"task": 1.5, "other": 1.0}
    )
    assert "returned nan, which is not a number from" in outcome(bad, function)
    assert "which is not a number" in of_group([Score(1.0), 1.0])


EPISODE = [
    Message("assistant", "a"), Message("user", "again"), Message("assistant", "b"),
]  # fmt: skip


def with_turn_rewards(result: Any, messages: Any = (EPISODE,)) -> Any:
    """What a reward with these rewards of turns becomes, after checks, for two completions."""

    def function(problem: Problem, text: str) -> Score:
        return Score(1.0, {}, result)

    (call,) = RewardFunction(function).calls(PROBLEM, ["b"], [()], messages)
    return outcome(call, function)


def test_score_has_a_reward_for_each_completion_of_an_episode() -> None:
    assert with_turn_rewards([1, np.float32(0.5)]) == [Score(1.0, {}, (1.0, 0.5))]
    assert with_turn_rewards(()) == [Score(1.0)]
    assert with_turn_rewards([0.5], ()) == [Score(1.0, {}, (0.5,))]  # a task with one turn


@pytest.mark.parametrize(("result", "message"), [
    ([1.0], "returned 1 turn_rewards for 2 completions of an episode"),
    ([1.0] * 4, "returned 4 turn_rewards for 2 completions of an episode"),
    ([1.0, math.nan], "returned nan, which is not a number from"),
    ([1.0, 1e7], "returned 10000000.0, which is not a number from"),
    ([1.0, "1"], "returned '1', which is not a number"),
    ([1.0, None], "returned None, which is not a number"),
    ([1.0, {"a": 1}], "returned {'a': 1} for a completion, which is not a number"),
    ("10", "returned '10', which is not a list of numbers"),
    (None, "returned None, which is not a list of numbers"),
    (0.5, "returned 0.5, which is not a list of numbers"),
])  # fmt: skip
def test_other_rewards_of_turns_are_a_failure(result: Any, message: str) -> None:
    assert message in with_turn_rewards(result)


def test_rewards_of_turns_have_the_weight_of_the_reward() -> None:
    functions = [
        RewardFunction(of_group, label="task", weight=2), RewardFunction(of_group, label="other")
    ]  # fmt: skip
    score = Score(1.0, {"right": 1.0}, (0.5, 0.0))
    parts = {"task": 1.0, "other": 3.0}
    assert score_of(PROBLEM, functions, [score, 3.0]) == Score(5.0, parts, (1.0, 0.0))
    assert score_of(PROBLEM, functions[:1], [score]) == Score(2.0, {"right": 1.0}, (1.0, 0.0))
    with pytest.raises(RewardError, match=r"weighted sum of rewards -2e\+06 of"):
        score_of(PROBLEM, functions, [Score(1.0, {}, (0.5, -1e6)), 0.0])


def test_completion_without_any_reward_is_an_error() -> None:
    with pytest.raises(RewardError, match=r"returned None for a completion of problem 7; let one"):
        score_of(PROBLEM, functions(1, 1), [None, None])


def test_weighted_sum_beyond_the_limit_is_an_error() -> None:
    with pytest.raises(RewardError, match=r"weighted sum of rewards 2e\+06 .*task.reward_weights"):
        score_of(PROBLEM, functions(2), [1e6])
