"""Episodes of several turns in a generator: replies in reward workers, groups on the wire."""

from __future__ import annotations

import importlib
import os
import signal
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exactness import exact_result, is_as_exact_as_torch
from generators import Scene, apply_until, generator_of
from sample_data import tiny_model, token_logprobs
from sockets import eventually
from user_modules import UserModules

from peralta_zmq import models, wire
from peralta_zmq.engines.native.native_engine import native_engine
from peralta_zmq.environments.dataset import Environments
from peralta_zmq.environments.reward_functions import RewardFunction
from peralta_zmq.environments.reward_pool import LocalFunctions, RewardPool
from peralta_zmq.environments.turns import turns_of
from peralta_zmq.errors import RewardError
from peralta_zmq.registry import EngineSettings
from peralta_zmq.rollout import Message, Problem, RolloutGroup

PROBLEM = Problem("7", "mine", (Message("user", "3 plus 4"),), "7")
TASK = """
import os, pathlib, time
from peralta_zmq.rollout import Message, Score
HERE = pathlib.Path(__file__).parent

def again(problem, messages):
    return [Message("user", "again")] if len(messages) < 4 else None

def reward(problem, text, messages):
    return Score(3.0, {}, [number + len(messages) for number in range(len(messages) - 1)])

def with_too_few(problem, text, messages):
    return Score(3.0, {}, [1.0])

HOSTILE = [
    lambda: [Message("user", "\\ud800")], lambda: [Message("user", "a " * 1_000_000)],
    lambda: [Message("tool", "1", "\\udcff")], lambda: nested(2000), lambda: int("\\ud800"),
]

def nested(depth):
    return [nested(depth - 1)] if depth else []

def hostile_at_first(problem, messages):
    number = len(list(HERE.glob("call-*")))
    (HERE / f"call-{number}").touch()
    return HOSTILE[number]() if number < len(HOSTILE) else again(problem, messages)

def hangs_once(problem, messages):
    if not (HERE / "pid").exists():
        (HERE / "new").write_text(str(os.getpid()))
        (HERE / "new").rename(HERE / "pid")
        time.sleep(60)
    return again(problem, messages)
"""


class Game:
    """A generator with a tiny model and one problem.

    `run` ends when the outbox has at least `num_groups` groups and `num_unscored` are dropped.
    """

    def __init__(self, scene: Scene, module: Any) -> None:
        self._scene, self._module = scene, module
        tokenizer = models.load_tokenizer(models.EMBEDDED)
        engine = native_engine(
            self.model(seed=2), tokenizer, EngineSettings(slots=4, max_model_len=128)
        )
        first = scene.store.publish(1, models.weights_of(self.model()), companions={})
        apply_until(engine, scene.subscriber, first, 1)
        self._start = lambda environments: generator_of(
            engine, scene.subscriber, scene.sockets, first, tokenizer=tokenizer,
            environments=environments, sampling={"num_generations": 2, "max_completion_length": 4},
        )  # fmt: skip

    @staticmethod
    def model(seed: int = 1) -> Any:
        return tiny_model(seed=seed, vocab_size=468)

    def run(
        self, reply: str, *, num_groups: int = 3, num_unscored: int = 0, own_reward: str = ""
    ) -> list[RolloutGroup]:
        self._module.reply = getattr(self._module, reply)

        def reward(prompts: Any, completions: list[Any]) -> list[float]:
            connection = self.generator.link
            if len(connection.outbox) >= num_groups and connection.num_unscored >= num_unscored:
                self._scene.announce(wire.Announcement("run", done=True))
            return [0.0 if own_reward else float(len(each)) for each in completions]

        pool = RewardPool(num_workers=1, concurrency=4, timeout_seconds=50, queue_limit=9)
        functions = [RewardFunction(reward, is_bounded=True, takes_group=True, label="count")]
        if own_reward:
            functions.append(RewardFunction(getattr(self._module, own_reward), label="task"))
        turns = turns_of(self._module)
        environments = Environments(
            {"mine": 1},
            (PROBLEM,),
            {"mine": LocalFunctions(functions, pool, turns)},
            pool,
        )
        self.generator = self._start(environments)
        with closing(environments):
            return self.generator.run()


@pytest.fixture
def game(scene: Scene, user_modules: UserModules) -> Game:
    user_modules.write("turn_task", TASK)
    return Game(scene, importlib.import_module("turn_task"))


def test_groups_have_two_turns_with_exact_logprobs_and_whole_rewards(game: Game) -> None:
    groups, tokenizer = game.run("again"), models.load_tokenizer(models.EMBEDDED)
    assert len(groups) >= 3
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    for rollout in rollouts:
        mask = rollout.loss_mask
        starts = np.flatnonzero(np.diff(mask.astype(int), prepend=0) == 1)
        ends = np.flatnonzero(np.diff(mask.astype(int), append=0) == -1)
        assert len(starts) == len(ends) == 2 and not mask[: starts[0]].any()
        inserted = tokenizer.decode(rollout.token_ids[ends[0] + 1 : starts[1]].tolist())
        assert inserted.endswith("user\nagain<|im_end|>\n<|im_start|>assistant\n")
        assert rollout.reward == 3.0  # messages: completion, reply, completion
        assert (rollout.policy_steps == np.where(mask, 1, -1)).all()

    def logprobs(model: Any) -> torch.Tensor:
        ids = (torch.tensor(rollout.token_ids.tolist())[None] for rollout in rollouts)
        return torch.cat([token_logprobs(model, each)[0] for each in ids])

    is_generated = np.concatenate([rollout.loss_mask for rollout in rollouts])
    ours = torch.from_numpy(np.concatenate([rollout.logprobs for rollout in rollouts]))
    with torch.no_grad():
        plain, exact = logprobs(game.model()), exact_result(logprobs, game.model())
    assert is_as_exact_as_torch(*(each[is_generated] for each in (ours, plain, exact)))


def test_groups_have_the_rewards_of_their_turns(game: Game) -> None:
    groups = game.run("again", own_reward="reward")
    assert len(groups) >= 3
    assert all(group.turn_rewards == ((3.0, 4.0), (3.0, 4.0)) for group in groups)
    assert groups[0].rollouts[0].turn_rewards == (3.0, 4.0)
    assert groups[0].rewards == (3.0, 3.0)


def test_wrong_number_of_rewards_of_turns_drops_the_groups(game: Game) -> None:
    message = "turn_task:with_too_few returned 1 turn_rewards for 2 completions of an episode"
    with pytest.raises(RewardError, match=message):
        game.run("again", num_groups=99, own_reward="with_too_few")
    assert len(game.generator.link.outbox) == 0
    assert game.generator.link.num_unscored == 15  # before the failure that ends it


def test_hostile_replies_drop_only_their_groups(game: Game) -> None:
    groups = game.run("hostile_at_first", num_unscored=2)
    assert 2 <= game.generator.link.num_unscored <= 4  # one is cut off at the context
    assert len(groups) >= 3


def test_killed_worker_of_a_reply_drops_only_its_group(game: Game, tmp_path: Path) -> None:
    def kill_when_it_hangs() -> None:
        eventually(lambda: time.sleep(0.01) or (tmp_path / "pid").exists())
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)

    killer = threading.Thread(target=kill_when_it_hangs)
    killer.start()
    groups = game.run("hangs_once", num_unscored=1)
    killer.join()
    assert game.generator.link.num_unscored == 1
    assert [group.group_number for group in groups] == list(range(max(3, len(groups))))
    assert all(len(group.rollouts) == 2 for group in groups)
