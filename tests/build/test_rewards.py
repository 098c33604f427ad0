"""Reward functions of environments: names, options and weights."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import cast

import pytest
from config_files import load_toml
from user_modules import UserModules

from peralta_zmq.build import open_environments
from peralta_zmq.environments.reward_functions import RewardFunction
from peralta_zmq.environments.reward_pool import LocalFunctions
from peralta_zmq.errors import ConfigError

FUNCTIONS = """
def regex(completions): return [1.0] * len(completions)
def needs_level(completions, level): return level
def on_length(completion_ids, max_completion_length):
    return [max_completion_length] * len(completion_ids)
async def judge(completions): return [1.0] * len(completions)
judge.REWARD_IS_BOUNDED = True
import functools
class Judge:
    def __call__(self, completions, **columns): return [0.5] * len(completions)
instance = Judge()
partial = functools.partial(Judge.__call__, instance)
short = lambda completions, **columns: [0.5] * len(completions)
"""


@pytest.fixture(autouse=True)
def functions(user_modules: UserModules) -> None:
    user_modules.write("my_functions", FUNCTIONS)


def functions_of(folder: Path, text: str) -> dict[str, tuple[RewardFunction, ...]]:
    with closing(open_environments(load_toml(folder, text), "eval")) as environments:
        functions = environments.functions
        return {name: cast(LocalFunctions, each).rewards for name, each in functions.items()}


MIXED = """
[task]
reward = ["task", "soft_overlong", "my_functions.judge", "regex"]
reward_weights = [1, 0.5, 2, -1]
reward_kwargs = { soft_overlong = { soft_punish_cache = 10 }, regex = { pattern = "x+" } }
[sampling]
max_completion_length = 40
"""


def test_functions_have_their_options_and_weights(tmp_path: Path) -> None:
    (functions,) = functions_of(tmp_path, MIXED).values()
    assert [(each.label, each.weight) for each in functions] == [
        ("task", 1), ("soft_overlong", 0.5), ("judge", 2), ("regex", -1),
    ]  # fmt: skip
    own, overlong, judge, regex = functions
    assert own.name == "peralta_zmq.environments.calculator:reward" and not own.takes_group
    assert overlong.options == {"soft_punish_cache": 10, "max_completion_length": 40}
    assert (own.is_bounded, overlong.is_bounded, judge.is_bounded, regex.is_bounded) == (
        True, True, False, False,
    )  # fmt: skip
    assert judge.is_async and regex.options == {"pattern": "x+"}


def test_environment_without_reward_settings_has_those_of_task(tmp_path: Path) -> None:
    text = """
    [task]
    reward = ["task", "soft_overlong"]
    reward_weights = [1, 0.5]
    [[env]]
    task = "calculator"
    [[env]]
    task = "countdown"
    reward = ["exact_match"]
    [[env]]
    task = "reverse_text"
    reward = "peralta_zmq.environments.countdown:reward"
    """
    by_environment = functions_of(tmp_path, text)
    assert {
        name: [(each.label, each.weight) for each in functions]
        for name, functions in by_environment.items()
    } == {
        "calculator": [("task", 1), ("soft_overlong", 0.5)],
        "countdown": [("", 1)],
        "reverse_text": [("", 1)],
    }
    assert by_environment["calculator"][0].name.endswith("calculator:reward")
    assert by_environment["reverse_text"][0].name.endswith("countdown:reward")


@pytest.mark.parametrize(("settings", "message"), [
    ('reward = ["regexx"]', "unknown reward 'regexx'; did you mean regex?"),
    ('reward = ["regex"]', "'regex' needs 'pattern', which is neither an option"),
    ('reward = ["my_functions.needs_level"]', "'my_functions.needs_level' needs 'level'"),
    ('reward = ["regex"]\nreward_kwargs = { pattern = "x", answer = 1 }',
     "'answer' is not an option of reward function 'regex'; its options are pattern"),
    ('reward = ["my_functions.judge"]\nreward_kwargs = { strict = true }',
     "'strict' is not an option of reward function 'my_functions.judge'; its options are none"),
    ('reward = ["task", "regex"]\nreward_kwargs = { regexx = { pattern = "x" } }',
     "reward_kwargs.regexx is not a table of options .* did you mean regex?"),
    ('reward = ["task", "regex"]\nreward_kwargs = { regex = "x" }',
     "reward_kwargs.regex is not a table of options"),
    ('reward = ["regex", "my_functions:regex"]', "two functions have the same name in metrics"),
    ('reward = ["task"]\nreward_weights = [1, 2]',
     "task.reward_weights has 2 numbers for 1 functions in task.reward"),
    ('reward_weights = [1]', "task.reward_weights has 1 numbers for 0 functions in task.reward"),
    ('reward = ["no_such.one"]', "reward 'no_such.one' cannot be imported"),
    ("reward_kwargs = { longest = 3 }", r"task\.reward_kwargs do not fit the reward function: got"),
])  # fmt: skip
def test_settings_that_do_not_fit_are_refused(tmp_path: Path, settings: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        functions_of(tmp_path, f"[task]\n{settings}\n")


def test_weights_of_an_environment_are_checked(tmp_path: Path) -> None:
    text = '[[env]]\nreward = ["task"]\nreward_weights = [1, 2]\n'
    with pytest.raises(ConfigError, match=r"env.reward_weights has 2 numbers for 1 functions"):
        load_toml(tmp_path, text)


def test_length_limit_of_the_run_is_passed_on(tmp_path: Path) -> None:
    text = '[task]\nreward = ["my_functions.on_length"]\n'
    text += "[sampling]\nmax_completion_length = 48\n"
    ((function,),) = functions_of(tmp_path, text).values()
    assert function.options == {"max_completion_length": 48}


@pytest.mark.parametrize(("max_turns", "length"), [(1, 48), (2, 300)])
def test_length_limit_of_all_turns_is_the_context(
    tmp_path: Path, max_turns: int, length: int
) -> None:
    """The token ids of a completion are those of all its turns and replies."""
    text = f'[task]\nname = "guess_number"\nmax_turns = {max_turns}\n'
    text += 'reward = ["my_functions.on_length"]\n[engine]\nmax_model_len = 300\n'
    text += "[sampling]\nmax_completion_length = 48\n"
    ((function,),) = functions_of(tmp_path, text).values()
    assert function.options == {"max_completion_length": length}


@pytest.mark.parametrize("name", ["instance", "partial", "short"])
def test_callable_without_a_name_is_scored_in_a_worker(tmp_path: Path, name: str) -> None:
    text = f'[task]\nreward = ["my_functions:{name}"]\n'
    with closing(open_environments(load_toml(tmp_path, text), "eval")) as environments:
        assert environments.reward(environments.problems[0], "1 + 2") == 0.5
