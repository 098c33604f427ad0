"""The examples of docs/custom.md."""

from __future__ import annotations

import re
import shlex
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sample_data import group_of, rollout_with, tiny_model
from user_modules import UserModules

from peralta_zmq import build, registry
from peralta_zmq.build import components
from peralta_zmq.build.environments import make_reward_functions, make_reward_pool
from peralta_zmq.config import Config, load_config
from peralta_zmq.environments.dataset import load_problems
from peralta_zmq.environments.reward_pool import LocalFunctions
from peralta_zmq.rollout import Message, Problem, Rollout, Score

TEXT = (Path(__file__).parents[1] / "docs" / "custom.md").read_text("utf-8")
MODULES = re.findall(r"```python\n# (\S+\.py)\n(.*?)```", TEXT, re.DOTALL)
SETTINGS = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)
COMMANDS = re.findall(r"```\nbin/lan local (.*?)\n```", TEXT, re.DOTALL)


@pytest.fixture(autouse=True)
def lab(user_modules: UserModules, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where user_modules writes
    for file, code in MODULES:
        user_modules.write(file.removesuffix(".py"), code)


def config_of(tmp_path: Path, about: str) -> Config:
    """The config of the one block that contains the text."""
    (block,) = [each for each in SETTINGS if about in each]
    file = tmp_path / "mine.toml"
    file.write_text(f'{block}\n[train]\nbatch_size = 8\ndtype = "float32"\n', "utf-8")
    return load_config("bin/trainer", ["@", str(file)])


def task_of(config: Config) -> Any:
    (env,) = config.environments
    return registry.resolve("task", env.task_name)


def functions_of(config: Config, task: Any, example: Problem) -> Any:
    (env,) = config.environments
    return make_reward_functions(config, env, task, example=example)


def learned(config: Config, *groups: Any) -> dict[str, float]:
    learner = build.make_learner(config, tiny_model())
    return learner.learn(groups or [group_of([1, 0, 0, 0.5])]).metrics


def test_page_has_the_tested_blocks() -> None:
    assert len(re.findall("```", TEXT)) == 2 * (len(MODULES) + len(SETTINGS) + len(COMMANDS))
    assert [name for name, _ in MODULES] == [
        "my_rewards.py", "my_style.py", "my_sums.py", "my_orders.py", "my_losses.py",
        "my_advantages.py", "my_filters.py",
    ]  # fmt: skip
    assert len(SETTINGS) == 7
    assert len(COMMANDS) == 1


def test_loss_trains_and_reports_masked_tokens(tmp_path: Path) -> None:
    # ln 64 = 4.16 against guesses of ln 15 to ln 25: 2.6 to 4.3 times apart, all above 1.5
    row = learned(config_of(tmp_path, "cautious"))
    assert (row["masked/mean"], row["grad_norm"]) == (1, 0)
    (block,) = [each for each in SETTINGS if "cautious" in each]
    (tmp_path / "wide.toml").write_text(block.replace("1.5", "9.0"), "utf-8")
    row = learned(load_config("bin/trainer", ["@", str(tmp_path / "wide.toml")]))
    assert row["masked/mean"] == 0
    assert row["grad_norm"] > 0


def test_advantage_has_configured_scale(tmp_path: Path) -> None:

    advantage = components.make_advantage(config_of(tmp_path, "best_of_the_rest"))
    assert advantage([1, 0, 0.5], [3, 3, 3]) == [0.25, -0.5, -0.25]
    assert learned(config_of(tmp_path, "best_of_the_rest"))["grad_norm"] > 0


def test_advantage_over_the_step_gets_all_groups(tmp_path: Path) -> None:
    from peralta_zmq.learning.advantages import advantages_of

    advantage = components.make_advantage(config_of(tmp_path, "centred"))
    groups = [group_of([1, 0]), group_of([4, 3])]
    assert advantages_of(groups, advantage) == [[-1, -2], [2, 1]]


def stuttering() -> Rollout:
    plain = rollout_with(0.0, num_generated=4)
    same = np.where(plain.loss_mask, 7, plain.token_ids).astype(np.int32)
    return Rollout(same, plain.loss_mask, plain.logprobs, plain.policy_steps, 0.0, "stop")


def test_filter_removes_repeated_tokens(tmp_path: Path) -> None:
    from dataclasses import replace

    group = group_of([1, 0])
    caught = replace(group, rollouts=(*group.rollouts, stuttering(), stuttering()))
    row = learned(config_of(tmp_path, "stutters"), caught)
    assert row["filter/my_filters.py:stutters"] == 0.5
    assert row["filter/taken_out"] == 0.5


def test_task_reward_has_named_parts(tmp_path: Path) -> None:
    config = config_of(tmp_path, "sums")
    task = task_of(config)
    made = load_problems(task.problems, "train", seed=0, options={"largest": 3})
    assert len(made) == 16
    problem = next(each for each in made if each.id == "2+3")
    assert isinstance(problem, Problem)
    with closing(make_reward_pool(config, is_verifier=False)) as pool:
        rewards = LocalFunctions(functions_of(config, task, problem), pool)
        assert rewards.score(problem, [" 5 ", "five"], [(), ()]).result() == [
            Score(1.1, {"right": 1.0, "short": 0.1}), Score(0.0, {"right": 0.0, "short": 0.0}),
        ]  # fmt: skip


def test_reward_functions_have_weights(tmp_path: Path) -> None:
    config = config_of(tmp_path, "polite")
    task = task_of(config)
    problem = Problem("1", "calculator", (), "2 + 3")
    with closing(make_reward_pool(config, is_verifier=False)) as pool:
        rewards = LocalFunctions(functions_of(config, task, problem), pool)
        scores = rewards.score(problem, ["5", "thanks"], [(5,), (6, 7)]).result()
    assert [score.rewards for score in scores] == [
        {"task": 1.0, "polite": 0.0, "shortest": 1.0},
        {"task": 0.0, "polite": 1.0, "shortest": 0.0},
    ]
    assert [score.reward for score in scores] == pytest.approx([1.1, 0.2])


def test_task_with_turns_calls_tools_and_replies(tmp_path: Path) -> None:
    config = config_of(tmp_path, "orders")
    with closing(build.open_environments(config, "train")) as environments:
        problem = next(each for each in environments.problems if "2 teas" in each.question)
        (schema,) = problem.chat_template_kwargs["tools"]
        assert schema["function"]["name"] == "price"
        call = '<tool_call>{"name": "price", "arguments": {"article": "tea"}}</tool_call>'
        replies = [
            environments.reply(problem, [*problem.messages, Message("assistant", text)]).result()
            for text in (call, "eleven", "11")
        ]
        assert environments.reward(problem, "11") == 1.0
        messages = [Message("assistant", text) for text in (call, "11")]
        scores = environments.functions[problem.task].score(problem, ["11"], [()], [messages])
        assert scores.result() == [Score(1.0, {}, (0.1, 0.0))]
    numbers = [Message("user", "Answer with a number.")]
    assert replies == [[Message("tool", "3", "price")], numbers, None]


def test_reward_setting_replaces_the_task_reward() -> None:
    config = load_config("bin/lan", shlex.split(COMMANDS[0]))
    task = task_of(config)
    problem = Problem("1", "calculator", (), "2 + 3")
    with closing(make_reward_pool(config, is_verifier=False)) as pool:
        rewards = LocalFunctions(functions_of(config, task, problem), pool)
        scores = rewards.score(problem, ["3 + 2", "3 + 2        "], [(), ()]).result()
        assert scores == [Score(1.0), Score(0.5)]
