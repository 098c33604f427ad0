"""Tasksets of the library verifiers: problems, rewards, turns by replay, tools."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from peralta_zmq import registry
from peralta_zmq.build import open_environments
from peralta_zmq.config import load_config
from peralta_zmq.environments.dataset import load_problems
from peralta_zmq.errors import ConfigError, RewardError, TaskError
from peralta_zmq.rollout import Message, Problem, Score

pytest.importorskip("verifiers.v1")

SUMS = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str
    row: int

class Sum(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def right(self, trace) -> float:
        return float(trace.last_reply == self.data.answer)
    @vf.reward(weight=-0.5)
    async def long(self, task, trace) -> float:
        return float(len(trace.last_reply) > len(task.answer))
    @vf.metric
    async def characters(self, trace) -> float:
        return len(trace.last_reply)

class Config(vf.TasksetConfig):
    max_term: int = 20
    min_term: int = 0
    repeats: int = 1
    image_from: int = 100

class Sums(vf.Taskset[Sum, Config]):
    def load(self):
        if self.config.max_term == 13: raise OSError("no disk")
        for a in range(self.config.min_term, self.config.max_term):
            for row in range(10 * self.config.repeats):
                b, image = row % 10, "alpine" if row >= self.config.image_from else None
                data = Data(prompt=f"{a} plus {b}?", system_prompt="Add.", answer=str(a + b),
                            row=row, image=image)
                yield Sum(data, self.config.task)

__all__ = ["Sums"]
"""
GAME = """
import itertools, random
import verifiers.v1 as vf

class Data(vf.TaskData):
    number: int

class Guess(vf.Task[Data]):
    @vf.reward
    async def found(self, trace) -> float:
        return float(trace.last_reply == str(self.data.number))
    @vf.stop
    async def gave_up(self, trace: vf.Trace) -> bool:
        return trace.last_reply == "I give up"

class Game(vf.Taskset[Guess, vf.TasksetConfig]):
    INFINITE = True
    def load(self):
        for seed in itertools.count():
            yield Guess(Data(number=random.Random(seed).randrange(10)), self.config.task)

class GameConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()
    max_guesses: int = 3
    adds_noise: bool = False

class GameEnv(vf.Env[GameConfig]):
    async def run(self, task, agents):
        number, noise = task.data.number, random.random() if self.config.adds_noise else ""
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn("Guess a number below 10.")
            for _ in range(self.config.max_guesses - 1):
                if segment.terminated or segment.last_reply == str(number):
                    break
                guess = int(segment.last_reply) if segment.last_reply.isdigit() else 0
                hint = "higher" if number > guess else "lower"
                segment = await interaction.turn(f"{hint}{noise}")
        trace = interaction.trace
        trace.record_reward("fast", trace.rewards["found"].score / trace.num_turns, 0.1)
        trace.record_metric("cut_off", trace.is_truncated)
    async def finalize(self, task, episode):
        episode.traces[0].record_metric("messages", len(episode.traces[0].messages))

__all__ = ["Game", "GameEnv"]
"""
TOOLS = """
import asyncio, os
import verifiers.v1 as vf

class Calculator(vf.Toolset[vf.ToolsetConfig, vf.State]):
    TOOL_PREFIX = "calc"
    async def setup_task(self, task):
        self.unit = task.name
    @vf.tool
    async def add(self, a: int, b: int) -> str:
        "Add two numbers."
        await asyncio.sleep(0)
        return f"{a + b} {self.unit}"
    @vf.tool
    def divide(self, a: int, b: int) -> int:
        "Divide."
        return a // b

class Question(vf.Task[vf.TaskData]):
    @classmethod
    def toolsets(cls, config):
        return [Calculator(vf.ToolsetConfig())]
    @vf.reward
    async def used(self, trace) -> dict:
        return {"calls": len(trace.tool_messages), "right": trace.last_reply == "3 apples"}

class Questions(vf.Taskset[Question, vf.TasksetConfig]):
    def load(self):
        for number in range(100):
            prompt = [vf.UserMessage(content="1 plus 2?"), vf.AssistantMessage(content="apples?"),
                      {"role": "user", "content": [{"type": "text", "text": f"Yes {number}"}]}]
            yield Question(vf.TaskData(prompt=prompt, name="apples"), self.config.task)

__all__ = ["Questions"]
"""
WRONG = SUMS.replace(
    '__all__ = ["Sums"]',
    """
class WrongConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()
    error: str = ""

class Wrong(vf.Env[WrongConfig]):
    async def run(self, task, agents):
        for _ in range({"twice": 2, "never": 0}.get(self.config.error, 1)):
            async with agents.player.interaction(task) as interaction:
                await interaction.turn("Hello" if self.config.error == "hello" else None)
                if self.config.error == "over":
                    while True:
                        await interaction.turn("again")

__all__ = ["Sums", "Wrong"]
""",
)
STOPPED = TOOLS.replace(
    "    @vf.reward",
    """
    @vf.stop
    async def enough(self, trace: vf.Trace) -> bool:
        return len(trace.tool_messages) >= 2
    @vf.metric
    async def stopped(self, trace) -> float:
        return trace.stop_condition == "enough"
    @vf.reward""",
)
BROKEN = {
    "seven_numbers": GAME.replace("randrange(10)", "randrange(1, 8)"),
    "several_agents": GAME.replace(
        "    max_guesses", "    judge: vf.AgentConfig = vf.AgentConfig()\n    max_guesses"
    ),
    "in_container": SUMS.replace("    @vf.metric", "    NEEDS_CONTAINER = True\n    @vf.metric"),
    "with_setup": SUMS.replace(
        "    @vf.metric", "    async def setup(self, trace, runtime): pass\n    @vf.metric"
    ),
    "with_runtime": SUMS.replace("def right(self, trace)", "def right(self, trace, runtime)"),
    "request_stop": GAME.replace("trace: vf.Trace)", "trace: vf.Request)"),
    "old_style": "import verifiers as vf\nclass Old(vf.MultiTurnEnv): pass\n__all__ = ['Old']",
    "old_import": "from verifiers import Rubric",
    "older_style": "def load_environment(): return 1\n",
    "no_taskset": "__all__ = []\n",
    "dependency": "import no_such_library\n",
    "tool_state": TOOLS.replace("class Calculator(vf.Toolset[vf.ToolsetConfig, vf.State])",
        "class Memory(vf.State):\n    count: int = 0\n"
        "class Calculator(vf.Toolset[vf.ToolsetConfig, Memory])"),
    "images": SUMS.replace('prompt=f"{a} plus {b}?"', 'prompt=[{"role": "user", "content": '
        '[{"type": "image_url", "image_url": {"url": f"{a}/{b}"}}]}]'),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("tasksets")
    sources = {
        "wrong": WRONG,
        "my_sums": SUMS,
        "my_game": GAME,
        "my_tools": TOOLS,
        **BROKEN,
        "stopped": STOPPED,
    }
    for name, text in sources.items():
        (folder / f"{name}.py").write_text(text)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    yield
    sys.path.remove(str(folder))
    for name in sources:
        sys.modules.pop(name, None)


def task_of(name: str) -> Any:
    return registry.resolve("task", f"verifiers:{name}")


def problems_of(name: str, split: str = "train", **options: Any) -> list[Problem]:
    return load_problems(task_of(name).problems, split, seed=0, options=options)


def test_single_turn_has_prompt_weighted_rewards_and_metrics() -> None:
    task = task_of("my-sums")
    problem, *_ = load_problems(task.problems, "train", seed=0, options={"max_term": 4})
    assert task.reply is None
    assert problem.messages == (Message("system", "Add."), Message("user", "0 plus 0?"))
    assert problem.answer == "0"
    right = Score(2.0, {"right": 1.0, "long": 0.0, "characters": 1.0})
    assert task.reward(problem, "0") == task.reward(problem, "<think>0 + 0</think>\n\n0") == right
    assert task.reward(problem, "00") == Score(-0.5, {"right": 0.0, "long": 1.0, "characters": 2.0})


def test_train_and_eval_tasks_differ_whatever_their_number() -> None:
    train, held_out = problems_of("my_sums"), problems_of("my_sums", "eval", eval_size=1000)
    ids, eval_ids = {each.id for each in train}, {each.id for each in held_out}
    assert len(ids) + len(eval_ids) == 200 and not ids & eval_ids
    assert 5 < len(held_out) < 40
    small = problems_of("my_sums", size=7, max_term=50, system_prompt="No.")
    assert len(small) == 7 and small[0].messages[0].content == "No."
    for options in ({"max_term": 30}, {"repeats": 2}):  # more tasks, or equal ones in other rows
        moved = problems_of("my_sums", "eval", **options)
        assert not {each.question for each in moved} & {each.question for each in train}


def test_taskset_without_tasks_of_a_split_is_an_error() -> None:
    with pytest.raises(TaskError, match=r"none of 10 tasks of verifiers:my_sums is held out"):
        problems_of("my_sums", "eval", min_term=1, max_term=2)
    with pytest.raises(TaskError, match=r"none of 1000 tasks of verifiers:seven_numbers is held"):
        problems_of("seven_numbers", "eval")  # without end


def episode(problem: Problem, *texts: str) -> list[Message]:
    """The messages of a problem and those after it: completions and replies in turn."""
    roles = ("assistant", "user")
    after = [Message(roles[number % 2], text) for number, text in enumerate(texts)]
    return [*problem.messages, *after]


def test_environment_with_turns_is_replayed() -> None:
    task = task_of("my_game")
    options = {"size": 3, "max_guesses": 2}
    problem, *_ = load_problems(task.problems, "train", seed=0, options=options)
    number = problem.info["data"]["number"]
    assert problem.messages == (Message("user", "Guess a number below 10."),)
    wrong, hint = ("0", "higher") if number else ("1", "lower")

    def reply(*texts: str) -> Any:
        return task.reply(problem, episode(problem, *texts))

    assert reply(wrong) == [Message("user", hint)]
    assert reply(str(number)) is reply(wrong, hint, "5") is reply("I give up") is None
    for texts, reward, rewards in (
        ([str(number)], 1.1, {"found": 1, "fast": 1, "messages": 2, "cut_off": 0}),
        ([wrong, hint, str(number)], 1.05, {"found": 1, "fast": 0.5, "messages": 4, "cut_off": 0}),
        ([wrong], 0.0, {"found": 0, "fast": 0, "messages": 2, "cut_off": 1}),  # by task.max_turns
        (["I give up"], 0.0, {"found": 0, "fast": 0, "messages": 2, "cut_off": 0}),  # by @stop
    ):
        messages = episode(problem, *texts)[1:]
        score = task.reward(problem, texts[-1], messages=messages)
        assert (score.reward, score.rewards) == (pytest.approx(reward), rewards)


def test_environment_that_does_not_repeat_its_messages_is_an_error() -> None:
    task = task_of("my_game")
    options = {"size": 1, "adds_noise": True}
    (problem,) = load_problems(task.problems, "train", seed=0, options=options)
    wrong = "1" if problem.info["data"]["number"] == 0 else "0"
    (message,) = task.reply(problem, episode(problem, wrong))
    with pytest.raises(TaskError, match="did not repeat its earlier messages"):
        task.reply(problem, episode(problem, wrong, message.content, wrong))


@pytest.mark.parametrize(("error", "message"), [
    ("hello", "an exchange must begin with turn\\(\\) if the task has a prompt"),
    ("twice", "the environment lets its agent start a second episode"),
    ("over", "the environment continues an exchange that is over"),
    ("never", "the environment ended without a turn of its agent"),
])  # fmt: skip
def test_environment_that_breaks_the_rules_of_an_exchange_is_an_error(
    error: str, message: str
) -> None:
    task = task_of("wrong")
    (problem,) = load_problems(task.problems, "train", seed=0, options={"size": 1, "error": error})
    with pytest.raises(TaskError, match=message):
        task.reward(problem, "0")


CALLS = "<tool_call>{}</tool_call><tool_call>{}</tool_call>".format(
    *(json.dumps({"name": name, "arguments": {"a": 1, "b": b}})
      for name, b in (("calc_add", 2), ("calc_divide", 0)))
)  # fmt: skip


def test_tools_and_turns_run_in_reward_workers(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text('[task]\nname = "verifiers:my_tools"\nreward_workers = 1\n')
    config = load_config("bin/x", ["@", str(tmp_path / "x.toml")])
    with closing(open_environments(config, "train", limit=2)) as environments:
        problem = environments.problems[0]
        assert [message.role for message in problem.messages] == ["user", "assistant", "user"]
        assert problem.question.startswith("Yes ")
        add, divide = problem.chat_template_kwargs["tools"]
        assert (add["function"]["name"], add["function"]["description"]) == (
            "calc_add",
            "Add two numbers.",
        )
        assert set(add["function"]["parameters"]["properties"]) == {"a", "b"}
        assert divide["function"]["name"] == "calc_divide"
        called = [*problem.messages, Message("assistant", CALLS)]
        results = environments.reply(problem, called).result()
        assert results is not None
        assert results[0] == Message("tool", "3 apples", "calc_add")
        assert results[1].content.startswith("error: ") and "zero" in results[1].content
        ended = [*called, *results, Message("assistant", "3 apples")]
        assert environments.reply(problem, ended).result() is None
        score = scored(environments, problem, ended[len(problem.messages) :])
        assert score == Score(3.0, {"calls": 2.0, "right": 1.0})
        assert scored(environments, problem, [Message("assistant", CALLS)]).reward == 0.0
        with pytest.raises(RewardError, match="TaskError: the environment did not repeat"):
            environments.reply(problem, [*ended, Message("user", "?"), ended[-1]]).result()


def test_stop_function_ends_an_episode_with_tools() -> None:
    task = task_of("stopped")
    (problem,) = load_problems(task.problems, "train", seed=0, options={"size": 1})
    called = [*problem.messages, Message("assistant", CALLS)]
    results = task.reply(problem, called, tool_seconds=5.0)
    assert len(results) == 2
    ended = [*called, *results, called[-1]]
    assert task.reply(problem, ended, tool_seconds=5.0) is None
    score = task.reward(problem, CALLS, messages=ended[len(problem.messages) :])
    assert score.rewards == {"stopped": 1.0, "calls": 2.0, "right": 0.0}


def scored(environments: Any, problem: Problem, messages: Sequence[Message]) -> Score:
    source = environments.functions["verifiers:my_tools"]
    (score,) = source.score(problem, [messages[-1].content], [()], [tuple(messages)]).result()
    return score


@pytest.mark.parametrize(("name", "options", "message"), [
    ("my_sum", {}, "unknown task verifiers:my_sum; did you mean verifiers:my_sums? Else install"),
    ("my_lab.sums", {}, "unknown task verifiers:my_lab.sums; "),
    ("my_sums", {"max_tern": 2}, "has no option 'max_tern'; did you mean max_term? Its options"),
    ("my_sums", {"max_term": "x"}, "refuses its options {'max_term': 'x'}"),
    ("my_sums", {"size": 0}, "0 tasks of verifiers:my_sums; use at least 1"),
    ("my_game", {"player": {}}, "has no option 'player'"),
    ("my_game", {}, "taskset verifiers:my_game has no end; set size in data.args"),
    ("several_agents", {}, "several agents (player, judge)"),
    ("my_sums", {"sise": 1}, "did you mean size? Its options are"),
    ("my_sums", {"image_from": 9}, "its tasks need the container alpine"),
    ("in_container", {}, "its tasks need a container"),
    ("with_setup", {}, "its tasks prepare or read a runtime (setup)"),
    ("with_runtime", {}, "its function right needs a runtime"),
    ("request_stop", {"size": 1}, "its function gave_up stops requests or responses"),
    ("tool_state", {}, "the tools of Calculator share a state"),
    ("old_style", {}, "it was made for verifiers before 0.4"),
    ("old_import", {}, "it was made for verifiers before 0.4"),
    ("older_style", {}, "it was made for verifiers before 0.4"),
    ("no_taskset", {}, "exports no Taskset subclass"),
    ("dependency", {}, "its module cannot be imported (No module named 'no_such_library')"),
])  # fmt: skip
def test_taskset_that_cannot_be_used_is_refused(name: str, options: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        problems_of(name, **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_taskset_that_fails_to_load_is_an_error() -> None:
    with pytest.raises(TaskError, match=r"verifiers:my_sums raised OSError: no disk \("):
        problems_of("my_sums", max_term=13)
    with pytest.raises(TaskError, match="has an image; only text is supported"):
        problems_of("images")
