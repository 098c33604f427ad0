"""Environments of the library verifiers: problems, episodes on a real engine, refusals."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
from agent_scenes import SAMPLING, Scene

from peralta_zmq import models, registry
from peralta_zmq.environments.dataset import load_problems
from peralta_zmq.errors import ConfigError, RewardError, TaskError
from peralta_zmq.rollout import Message, Problem, Rollout, Score

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

class GameEnv(vf.Env[GameConfig]):
    async def run(self, task, agents):
        number = task.data.number
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn("Guess a number below 10.")
            for _ in range(self.config.max_guesses - 1):
                if segment.terminated or segment.last_reply == str(number):
                    break
                guess = int(segment.last_reply) if segment.last_reply.isdigit() else 0
                hint = "higher" if number > guess else "lower"
                segment = await interaction.turn(hint)
        trace = interaction.trace
        trace.record_reward("fast", trace.rewards["found"].score / trace.num_turns, 0.1)
        trace.record_metric("cut_off", trace.is_truncated)
    async def finalize(self, task, episode):
        episode.traces[0].record_metric("messages", len(episode.traces[0].messages))

__all__ = ["Game", "GameEnv"]
"""
TOOLS = """
import verifiers.v1 as vf

class Calculator(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    async def calculate(self, expression: str) -> str:
        "Return the product in an expression."
        first, second = expression.split(" * ")
        return f"it is {int(first) * int(second)}"

class Question(vf.Task[vf.TaskData]):
    @vf.reward
    async def used(self, trace) -> dict:
        return {"calls": len(trace.tool_messages), "results": sum(
            message.content.startswith("it is") for message in trace.tool_messages)}

class Questions(vf.Taskset[Question, vf.TasksetConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Calculator(vf.ToolsetConfig())]
    def load(self):
        for number in range(10, 60):
            prompt = [{"role": "user", "content": [
                {"type": "text", "text": f"add {number} to the product of 31 and 42."}]}]
            yield Question(vf.TaskData(prompt=prompt), self.config.task)

__all__ = ["Questions"]

if __name__ == "__main__":
    Calculator.run()
"""
BROKEN = {
    "seven_numbers": GAME.replace("randrange(10)", "randrange(1, 8)"),
    "several_agents": GAME.replace(
        "    max_guesses", "    judge: vf.AgentConfig = vf.AgentConfig()\n    max_guesses"
    ),
    "in_container": SUMS.replace("    @vf.metric", "    NEEDS_CONTAINER = True\n    @vf.metric"),
    "unfair": SUMS.replace("return float(trace.last_reply == self.data.answer)", "return 1 / 0"),
    "twice": GAME.replace("        trace =", """
        async with agents.player.interaction(task) as again:
            await again.turn("Again?")
        trace ="""),
    "old_style": "import verifiers as vf\nclass Old(vf.MultiTurnEnv): pass\n__all__ = ['Old']",
    "old_import": "from verifiers import Rubric",
    "older_style": "def load_environment(): return 1\n",
    "no_taskset": "__all__ = []\n",
    "dependency": "import no_such_library\n",
    "images": SUMS.replace('prompt=f"{a} plus {b}?"', 'prompt=[{"role": "user", "content": '
        '[{"type": "image_url", "image_url": {"url": f"{a}/{b}"}}]}]'),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("tasksets")
    sources = {"my_sums": SUMS, "my_game": GAME, "my_tools": TOOLS, **BROKEN}
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


def test_problems_have_prompt_and_answer() -> None:
    problem, *_ = problems_of("my-sums", max_term=4)
    assert problem.messages == (Message("system", "Add."), Message("user", "0 plus 0?"))
    assert problem.answer == "0"


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


class Episodes:
    """Episodes of one problem on an engine with the embedded model."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def run(
        self,
        name: str,
        *,
        max_turns: int = 8,
        texts: Sequence[str] = (),
        **options: Any,
    ) -> tuple[list[Rollout], list[Score], Scene]:
        self.problem, *_ = problems_of(name, **options)
        scene = Scene(self._stack, texts)
        rollouts, scores = scene.scored(
            task_of(name).agent, problem=self.problem, max_turns=max_turns,
            timeout_seconds=100.0,
        )  # fmt: skip
        return rollouts, scores, scene


@pytest.fixture
def episodes(stack: ExitStack) -> Episodes:
    return Episodes(stack)


def reply(rollout: Rollout, scene: Scene) -> str:
    text = models.text_of(scene.tokenizer, rollout.token_ids[rollout.loss_mask])
    return text.removesuffix("<|im_end|>")


def test_single_turn_has_weighted_rewards_and_metrics(episodes: Episodes) -> None:
    rollouts, scores, scene = episodes.run("my_sums", max_term=4)
    for rollout, score in zip(rollouts, scores, strict=True):
        text = reply(rollout, scene)
        right, long = float(text == episodes.problem.answer), float(len(text) > 1)
        assert score.reward == 2.0 * right - 0.5 * long
        assert score.rewards == {"right": right, "long": long, "characters": len(text)}


def test_turns_of_an_environment_are_one_rollout(episodes: Episodes) -> None:
    rollouts, scores, scene = episodes.run("my_game", size=3, max_guesses=3)
    for rollout, score in zip(rollouts, scores, strict=True):
        assert rollout.num_turns == 3
        assert score.rewards["messages"] == 6
        texts = models.text_of(scene.tokenizer, rollout.token_ids)
        assert texts.count("higher") + texts.count("lower") >= 2


def test_turns_end_at_the_limit_and_in_a_full_context(episodes: Episodes) -> None:
    (first, _), scores, _ = episodes.run("my_game", size=3, max_guesses=60, max_turns=2)
    assert first.num_turns == 2 and scores[0].rewards["cut_off"] == 1
    (first, _), scores, _ = episodes.run("my_game", size=3, max_guesses=60, max_turns=64)
    assert first.num_turns > 4 and len(first.token_ids) > 256 - 2 * SAMPLING.max_completion_length


def test_tools_of_a_taskset_are_called(episodes: Episodes) -> None:
    calls = [
        '<tool_call>{"name": "calculator_calculate", '
        '"arguments": {"expression": "31 * 42"}}</tool_call>',
        '<tool_call>{"name": "divide", "arguments": {}}</tool_call>',
    ]
    rollouts, scores, scene = episodes.run("my_tools", texts=[*calls, "it is 1302"])
    for rollout, score in zip(rollouts, scores, strict=True):
        assert score.rewards == {"calls": 2.0, "results": 1.0}
        assert rollout.num_turns == 3
        text = models.text_of(scene.tokenizer, rollout.token_ids)
        assert "it is 1302<|im_end|>\n<|im_start|>assistant\n" in text  # the result of the first
        assert "error: unknown tool 'divide'" in text


def test_training_client_of_the_library_samples_token_ids(stack: ExitStack) -> None:
    rollouts, scores = Scene(stack).scored("training_client_agent:run", timeout_seconds=100.0)
    for rollout, score in zip(rollouts, scores, strict=True):
        assert score.rewards == {"tokens": rollout.loss_mask.sum()}
        assert score.reward == pytest.approx(rollout.logprobs.sum(), rel=1e-5)  # float32


@pytest.mark.skipif(shutil.which("uv") is None, reason="needs uv")
def test_harness_that_is_a_program_of_its_own(episodes: Episodes) -> None:
    options = {"agent": {"harness": {"id": "null"}}}
    rollouts, scores, scene = episodes.run("my_sums", **options)
    texts = [reply(rollout, scene) for rollout in rollouts]
    assert [score.rewards["characters"] for score in scores] == [len(text) for text in texts]


@pytest.mark.parametrize(("name", "options", "message"), [
    ("unfair", {}, "the agent of unfair raised RuntimeError: TaskError: .*ZeroDivisionError"),
    ("twice", {"size": 1}, "ran its agent 2 times, not once"),
    ("my_sums", {"agent": {"runtime": {"type": "podman"}}}, "`podman` CLI is not installed"),
])  # fmt: skip
def test_episode_that_fails_says_why(
    episodes: Episodes, name: str, options: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")  # no podman
    with pytest.raises(RewardError, match=message):
        episodes.run(name, **options)


CONTAINER = 'set agent = { runtime = { type = "podman" } } in data.args'


@pytest.mark.parametrize(("name", "options", "message"), [
    ("my_sum", {}, "unknown task verifiers:my_sum; did you mean verifiers:my_sums? Else install"),
    ("my_lab.sums", {}, "unknown task verifiers:my_lab.sums; "),
    ("my_sums", {"max_tern": 2}, "has no option 'max_tern'; did you mean max_term? Its options"),
    ("my_sums", {"max_term": "x"}, "refuses its options {'max_term': 'x'}"),
    ("my_sums", {"agent": {"harness": {"id": "nul"}}}, "harness 'nul' not found"),
    ("my_sums", {"agent": {"harness": {"id": "codex"}}},
     f"its harness codex needs a container; {CONTAINER}"),
    ("my_sums", {"size": 0}, "0 tasks of verifiers:my_sums; use at least 1"),
    ("my_game", {}, "taskset verifiers:my_game has no end; set size in data.args"),
    ("several_agents", {}, "several agents (player, judge)"),
    ("my_sums", {"sise": 1}, "did you mean size? Its options are"),
    ("my_sums", {"image_from": 9}, "its tasks need a container alpine; " + CONTAINER),
    ("in_container", {}, "its tasks need a container; " + CONTAINER),
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
    with pytest.raises(TaskError, match="a prompt has an image; only text is supported"):
        problems_of("images")
