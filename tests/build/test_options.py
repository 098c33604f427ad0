"""Options of environments: arguments of the task, chat template, sampling."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from config_files import load_toml
from user_modules import UserModules

from peralta_zmq import build
from peralta_zmq.config import load_config, write_resolved
from peralta_zmq.errors import ConfigError
from peralta_zmq.rollout import Message, Problem, Sampling


@pytest.fixture(autouse=True)
def sized_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """The task `own.sized` with the option `size`; the reward is the level in `info`."""
    module: Any = ModuleType("own_sized")

    def problems(split: str, seed: int, *, size: int = 2, train: str = "x") -> Iterator[Problem]:
        for number in range(size):
            message = Message("user", f"{train} {number}")
            yield Problem(f"{split} {number}", "sized", (message,), "1", info={"level": number})

    module.problems = problems
    module.reward = lambda problem, text: float(problem.info["level"])
    module.REWARD_IS_BOUNDED = True
    monkeypatch.setitem(sys.modules, "own", ModuleType("own"))
    monkeypatch.setitem(sys.modules, "own.sized", module)


TOOL_TASK = """
from peralta_zmq.rollout import Message, Problem
def problems(split, seed): yield Problem("1", "tool_task", (Message("user", "1 plus 2?"),), "3")
def reward(problem, text): return 1
def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b
tools = [add]
"""


@pytest.fixture
def tool_task(user_modules: UserModules) -> None:
    user_modules.write("own_tools", TOOL_TASK)


def error_of(folder: Path, text: str) -> str:
    with (
        pytest.raises(ConfigError) as caught,
        closing(build.open_environments(load_toml(folder, text), "train")),
    ):
        pass
    return str(caught.value)


def test_each_environment_has_its_own_arguments(tmp_path: Path) -> None:
    text = """
    [[env]]
    name = "three"
    task = "own.sized"
    args = { size = 3 }
    chat_template_kwargs = { enable_thinking = true }
    [[env]]
    name = "two"
    task = "own.sized"
    train = "other"
    """
    with closing(build.open_environments(load_toml(tmp_path, text), "train")) as environments:
        assert dict(environments.sizes) == {"three": 3, "two": 2}
        questions = [problem.question for problem in environments.problems]
        assert questions == ["x 0", "x 1", "x 2", "other 0", "other 1"]
        assert [problem.chat_template_kwargs for problem in environments.problems] == [
            {"enable_thinking": True}, {"enable_thinking": True}, {"enable_thinking": True}, {}, {},
        ]  # fmt: skip
        assert environments.reward(environments.problems[2], "") == 2.0


def test_data_args_are_those_of_the_single_environment() -> None:
    config = load_config("bin/x", ["--task.name=own.sized", "--data.args", '{"size": 5}'])
    with closing(build.open_environments(config, "eval")) as environments:
        assert dict(environments.sizes) == {"own.sized": 5}


@pytest.mark.parametrize(("args", "message"), [
    ("{ sise = 3 }", "it has no option 'sise'; did you mean size? Its options are size, train"),
    ("{ x = 3 }", "it has no option 'x'; its options are size, train (data.args or env.args)"),
    ('{ train = "other" }', "env.args.train is a setting of its own; set env.train instead"),
    ("{ args = 3 }", "env.args.args is a setting of its own"),
])  # fmt: skip
def test_unknown_argument_is_refused_with_the_nearest_name(
    tmp_path: Path, args: str, message: str
) -> None:
    assert message in error_of(tmp_path, f'[[env]]\ntask = "own.sized"\nargs = {args}\n')


# Sampling.


def sampling_of(folder: Path, text: str) -> tuple[Sampling, Sampling]:
    config = load_toml(folder, text)
    return build.make_sampling(config, seed=3), build.make_eval_sampling(config, seed=3)


@pytest.mark.parametrize(("value", "stop"), [
    ('"END"', ("END",)), ('"a, b"', ("a, b",)), ('["\\n", "END"]', ("\n", "END")), ("[]", ()),
])  # fmt: skip
def test_stop_is_a_text_or_a_list(tmp_path: Path, value: str, stop: tuple[str, ...]) -> None:
    training, evaluation = sampling_of(tmp_path, f"[sampling]\nstop = {value}\n")
    assert training.stop == evaluation.stop == stop


def test_completion_fills_the_context_without_a_limit(tmp_path: Path) -> None:
    text = '[sampling]\nmax_completion_length = "None"\n[engine]\nmax_model_len = 99\n'
    for sampling in sampling_of(tmp_path, text):
        assert (sampling.max_completion_length, sampling.fills_context) == (99, True)


def test_evaluation_has_its_own_temperature_and_length(tmp_path: Path) -> None:
    text = "[sampling]\ntop_p = 0.5\nmax_completion_length = 48\n"
    text += "[eval]\nsampling.max_completion_length = 100\n"
    training, evaluation = sampling_of(tmp_path, text)
    assert training.max_completion_length == 48
    assert evaluation == Sampling(temperature=0.0, max_completion_length=100)
    several = text + "rollouts_per_example = 4\n"
    expected = Sampling(temperature=1.0, top_p=0.5, max_completion_length=100, seed=3)
    assert sampling_of(tmp_path, several)[1] == expected
    warm = sampling_of(tmp_path, text + "sampling.temperature = 0.6\n")[1]
    assert (warm.temperature, warm.top_p) == (0.6, 0.5)
    assert sampling_of(tmp_path, several + "sampling.temperature = 0\n")[1].temperature == 0.0


def test_completion_of_an_environment_fills_the_context_without_a_limit(tmp_path: Path) -> None:
    text = '[[env]]\ntask = "own.sized"\nsampling = { max_completion_length = "None" }\n'
    text += '[[env]]\nsampling = { top_k = 5, top_p = "None" }\n'
    config = load_toml(tmp_path, text + "[sampling]\nmax_completion_length = 48\n")
    write_resolved(config, tmp_path)
    for each in (config, load_config("bin/x", ["@", str(tmp_path / "config.toml")])):
        own, other = (build.make_sampling(each, env, seed=3) for env in each.environments)
        assert (own.max_completion_length, own.fills_context) == (each.engine.max_model_len, True)
        assert (other.max_completion_length, other.fills_context) == (48, False)


TWO_GROUP_SIZES = """
[[env]]
task = "own.sized"
sampling = { num_generations = 16, temperature = 0.8, max_completion_length = 100, stop = "END" }
rollouts_per_example = 4
eval_sampling = { max_completion_length = 200, top_k = 5 }
[[env]]
name = "plain"
task = "own.sized"
[sampling]
max_completion_length = 48
[train]
batch_size = 128
"""


def problem_of(task: str) -> Problem:
    return Problem("1", task, (), "")


def test_environment_has_its_own_group_size_sampling_and_evaluation(tmp_path: Path) -> None:
    config = load_toml(tmp_path, TWO_GROUP_SIZES)
    own = Sampling(temperature=0.8, max_completion_length=100, stop=("END",), seed=3)
    train, evaluation = (
        make(config, seed=3) for make in (build.group_sampling, build.eval_group_sampling)
    )
    assert train(problem_of("own.sized")) == (16, own)
    assert train(problem_of("plain")) == (8, build.make_sampling(config, seed=3))
    longer = replace(own, max_completion_length=200, top_k=5)
    assert evaluation(problem_of("own.sized")) == (4, longer)
    assert evaluation(problem_of("plain")) == (1, build.make_eval_sampling(config, seed=3))
    assert config.group_sizes == {"own.sized": 16, "plain": 8}
    assert (config.max_completion_length, config.groups_per_step) == (100, 11)  # 128 / 12
    write_resolved(config, tmp_path)
    assert load_config("bin/x", ["@", str(tmp_path / "config.toml")]) == config


def test_environment_that_is_only_evaluated_has_its_own_evaluation(tmp_path: Path) -> None:
    text = """
    [eval]
    sampling = { temperature = 0.5 }
    [[eval.env]]
    task = "own.sized"
    rollouts_per_example = 2
    eval_sampling = { top_p = 0.9, stop = [] }
    [[eval.env]]
    name = "greedy"
    task = "own.sized"
    eval_sampling = { temperature = 0, max_completion_length = 9 }
    [sampling]
    max_completion_length = 48
    stop = "END"
    """
    sampling_of = build.eval_group_sampling(load_toml(tmp_path, text), seed=3)
    own = Sampling(temperature=0.5, top_p=0.9, max_completion_length=48, seed=3)
    assert sampling_of(problem_of("own.sized")) == (2, own)
    greedy = Sampling(temperature=0.0, max_completion_length=9, stop=("END",))
    assert sampling_of(problem_of("greedy")) == (1, greedy)


@pytest.mark.parametrize(("text", "message"), [
    ("[[env]]\nsampling = { num_generations = 6 }",
     "batch_size 64 is not a multiple of env.sampling.num_generations 6"),
    ("[[env]]\nsampling = { num_generations = 1 }",
     "env.0.sampling.num_generations = 1 is wrong: should be greater than"),
    ("[[env]]\nsampling = { temperature = 0 }", "env.0.sampling.temperature = 0 is wrong"),
    ("[[env]]\nsampling = { top_q = 1 }", "unknown setting top_q in [[env.sampling]]; did you m"),
    ("[[env]]\nnum_generations = 6", "removed: write sampling = { num_generations = 4 }"),
    ("[[env]]\nrollouts_per_example = 4\n[[eval.env]]",
     "env.rollouts_per_example has no effect with [[eval.env]]; set eval.env.rollouts_per_example"),
    ("[[env]]\neval_sampling = { top_k = 5 }\n[[eval.env]]",
     "env.eval_sampling has no effect with [[eval.env]]; set eval.env.eval_sampling instead"),
    ("[[eval.env]]\nsampling = { top_k = 5 }",
     "eval.env.sampling has no effect in evaluations; set eval.env.eval_sampling"),
])  # fmt: skip
def test_invalid_override_of_an_environment_is_refused(
    tmp_path: Path, text: str, message: str
) -> None:
    assert message in error_of(tmp_path, text)


TWO_TASKS = """
[[env]]
name = "adding"
task = "own_tools:"
chat_template_kwargs = { enable_thinking = true }
[[env]]
task = "own.sized"
"""


@pytest.mark.usefixtures("tool_task")
def test_tools_of_a_task_are_rendered_and_called_for_its_problems_only(tmp_path: Path) -> None:
    with closing(build.open_environments(load_toml(tmp_path, TWO_TASKS), "train")) as environments:
        adding, sized, _ = environments.problems
        assert environments.has_turns(adding) and not environments.has_turns(sized)
        (schema,) = adding.chat_template_kwargs["tools"]
        assert schema["function"]["description"] == "Add two numbers."
        assert adding.chat_template_kwargs["enable_thinking"] is True
        assert "tools" not in sized.chat_template_kwargs
        text = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
        messages = [*adding.messages, Message("assistant", text)]
        assert environments.reply(adding, messages).result() == [Message("tool", "3", "add")]
