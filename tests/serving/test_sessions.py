"""Sessions: agents ask for turns over HTTP, which are recorded and become rollouts."""

from __future__ import annotations

import json
import sys
import threading
import urllib.request
from concurrent.futures import Future
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any
from urllib.error import HTTPError

import numpy as np
import pytest
import torch
from agent_scenes import PROBLEM, SAMPLING, Scene
from engine_data import assert_exact_logprobs, trainer_logprobs

from peralta_zmq import models
from peralta_zmq.engines import RequestGroup
from peralta_zmq.engines.sessions import AgentRun, Turn
from peralta_zmq.environments.agents import LocalAgents
from peralta_zmq.environments.reward_pool import RewardPool
from peralta_zmq.errors import RewardError
from peralta_zmq.registry import WeightUpdate
from peralta_zmq.rollout import Completion, Score, rollout_of

COMMAND = f"{sys.executable} -c 'import json, sys; print(len(json.load(sys.stdin)[\"answer\"]))'"


@pytest.fixture
def scene(stack: ExitStack) -> Scene:
    return Scene(stack)


def test_turns_of_an_agent_are_one_rollout_of_sampled_tokens(scene: Scene) -> None:
    rollouts = scene.sample("two_turns", count=3)
    assert [rollout.num_turns for rollout in rollouts] == [2, 2, 2]
    for rollout in rollouts:
        assert set(rollout.policy_steps[rollout.loss_mask]) == {7}
        assert scene.text(rollout).count("once more") == 1
    assert len({rollout.token_ids.tobytes() for rollout in rollouts}) > 1


def test_logprobs_over_a_change_of_weights_are_those_of_the_trainer(scene: Scene) -> None:
    """The new weights are equal, so that one model computes the logprobs of both steps."""
    model = models.load_model(models.EMBEDDED, device=torch.device("cpu"), dtype=torch.float32)

    def apply() -> None:
        if scene.engine.step == 7 and scene.engine.num_free() < 8:
            scene.engine.apply(WeightUpdate(8, models.weights_of(model)))

    environments = scene.environments("agent_functions:two_turns")
    group = scene.sampler.start(PROBLEM, 2, SAMPLING, replies=environments)
    scene.complete(group, apply)
    steps = np.concatenate([each.policy_steps for each in group.completions])
    assert set(steps.tolist()) == {-1, 7, 8}
    expected = trainer_logprobs(model, group.completions)
    assert_exact_logprobs(group.completions, expected, steps >= 0)


def test_stream_has_a_limit_and_named_rewards(scene: Scene) -> None:
    for rollout in scene.sample("streamed"):
        assert rollout.num_generated <= 5
        assert rollout.rewards == {"length": rollout.reward}


def test_another_history_is_a_branch_of_its_own(scene: Scene) -> None:
    rollouts = scene.sample("rewritten")
    assert [rollout.num_turns for rollout in rollouts] == [1, 1, 1, 1]
    assert [scene.text(rollout).count("add 5 to 7") for rollout in rollouts] == [0, 2, 0, 2]


def test_tokens_that_the_tokenizer_would_not_choose_are_kept(scene: Scene) -> None:
    """At this temperature, the text of most turns has other tokens when it is tokenized again."""
    environments = scene.environments("agent_functions:two_turns")
    sampling = replace(SAMPLING, temperature=5.0)
    group = scene.sampler.start(PROBLEM, 8, sampling, replies=environments)
    scene.complete(group)
    rollouts = [rollout_of(completion, 0.0) for completion in group.completions]
    assert [rollout.num_turns for rollout in rollouts] == [2] * 8


def test_several_choices_are_several_histories(scene: Scene) -> None:
    scene.sessions.may_branch = False
    with pytest.raises(RewardError, match="do not continue those of an earlier request"):
        scene.sample("forked")


def test_another_history_is_refused_if_the_setting_says_so(scene: Scene) -> None:
    scene.sessions.may_branch = False
    with pytest.raises(RewardError, match="do not continue those of an earlier request"):
        scene.sample("rewritten")


def test_branch_has_a_largest_number_of_turns(scene: Scene) -> None:
    scene.sessions.max_turns = 1
    with pytest.raises(RewardError, match="the session has had 1 turns"):
        scene.sample("two_turns")


def test_turn_that_two_turns_continue_is_trained_once(scene: Scene) -> None:
    first, second = scene.sample("forked", count=1)
    assert (first.num_turns, second.num_turns) == (2, 1)
    start = int(np.flatnonzero(first.loss_mask)[0])
    assert (first.token_ids[: start + 1] == second.token_ids[: start + 1]).all()


def test_token_ids_continue_the_turn_before_them(scene: Scene) -> None:
    for rollout in scene.sample("by_tokens"):
        assert rollout.num_turns == 2
        assert rollout.token_ids[:4].tolist() == [5, 9, 33, 8]


def test_impolite_agent_trains_only_what_it_has_received(scene: Scene) -> None:
    """What the client left may have ended before; it is then a branch."""
    rollouts = scene.sample("impolite")
    assert 2 <= len(rollouts) <= 4
    assert {rollout.num_turns for rollout in rollouts} == {1}
    assert scene.engine.num_free() == 8


def test_command_gets_the_problem_and_prints_the_reward(scene: Scene) -> None:
    with pytest.raises(RewardError, match="sampled no token"):
        scene.sample(COMMAND)
    with pytest.raises(RewardError, match="exit code 1"):
        scene.sample("false now")


@pytest.mark.parametrize(
    ("agent", "reason"),
    [
        ("silent", "sampled no token"),
        ("raising", "raised ValueError: no idea"),
        ("dying", "exited with code 3"),
        ("hanging", "took longer than 2 s"),
        ("not_a_number", "returned nan, which is not a number"),
    ],
)
def test_failed_agent_fails_its_group(scene: Scene, agent: str, reason: str) -> None:
    with pytest.raises(RewardError, match=reason):
        scene.sample(agent, timeout_seconds=2.0)
    assert scene.sampler.num_in_flight == 0
    assert scene.sampler.has_room


def test_interrupted_sessions_go_on_when_they_are_resumed(scene: Scene) -> None:
    environments = scene.environments("agent_functions:two_turns")
    group = scene.sampler.start(PROBLEM, 2, SAMPLING, replies=environments)
    while scene.engine.num_free() == 8:
        scene.sampler.advance()
    scene.sampler.interrupt([group])
    assert scene.engine.num_free() == 8
    assert scene.sampler.advance() == []
    scene.sampler.resume([group])
    scene.complete(group)
    assert all(completion.error is None for completion in group.completions)


def test_dropped_group_ends_its_agents_requests(scene: Scene) -> None:
    environments = scene.environments("agent_functions:two_turns")
    group = scene.sampler.start(PROBLEM, 2, SAMPLING, replies=environments)
    while scene.engine.num_free() == 8:
        scene.sampler.advance()
    scene.sampler.drop([group])
    assert scene.engine.num_free() == 8
    assert scene.sampler.num_in_flight == 0
    assert all(scene.sessions.find(run.session.key) is None for run in group.runs)


class Client:
    """A client that opens sessions by itself, while the sampler runs in a thread."""

    def __init__(self, scene: Scene, stack: ExitStack) -> None:
        self.scene = scene
        self.groups = list[RequestGroup]()
        self.ended = list[RequestGroup]()
        scene.sessions.sampling = SAMPLING
        is_over = threading.Event()

        def run() -> None:
            while not is_over.is_set():
                for each in scene.sessions.take_groups():
                    group = scene.sampler.start_agents(PROBLEM, each.runs, num_runs=each.size)
                    self.groups.append(group)
                self.ended += scene.sampler.advance()

        thread = threading.Thread(target=run)
        thread.start()
        stack.callback(thread.join)
        stack.callback(is_over.set)

    def post(self, path: str, body: Any) -> Any:
        """The reply, or the status of a refusal."""
        url = (
            path if path.startswith("http") else f"http://127.0.0.1:{self.scene.server.port}{path}"
        )
        headers = {"Content-Type": "application/json"}
        try:
            with urllib.request.urlopen(
                urllib.request.Request(url, json.dumps(body).encode(), headers)
            ) as response:
                return json.load(response)
        except HTTPError as error:
            return error.code

    def open(self, group: str = "mine", size: int = 2) -> Any:
        return self.post("/rl/sessions", {"group": group, "size": size})

    def chat(self, session: Any) -> Any:
        body = {"messages": [{"role": "user", "content": "add 1 to 2."}]}
        return self.post(f"{session['base_url']}/chat/completions", body)

    def errors(self) -> list[Any]:
        while not self.ended:
            pass
        return [each.error for group in self.ended for each in group.completions]


@pytest.fixture
def client(scene: Scene, stack: ExitStack) -> Client:
    return Client(scene, stack)


def test_sessions_of_clients_with_one_name_are_a_group(client: Client) -> None:
    sessions = [client.open() for _ in range(2)]
    for number, session in enumerate(sessions):
        assert client.chat(session)["choices"][0]["finish_reason"] in ("stop", "length")
        path = f"/rl/sessions/{session['id']}"
        assert client.post(f"{path}/reward", {"reward": number}) == {"reward": number}
        assert client.post(f"{path}/reward", {"reward": 5}) == 409
        assert client.post(f"{path}/end", {}) == {"turns": 1, "branches": 1}
    assert client.errors() == [None, None]
    assert [each.score.reward for each in client.ended[0].completions if each.score] == [0, 1]


def test_turn_after_the_reward_is_refused(client: Client) -> None:
    first, _ = client.open(), client.open()
    client.post(f"/rl/sessions/{first['id']}/reward", {"reward": 1})
    client.post(f"/rl/sessions/{first['id']}/end", {})
    assert client.chat(first) == 404
    assert not client.ended  # the other session of the group is open


def test_turn_that_ends_after_the_reward_is_not_trained(scene: Scene) -> None:
    session = scene.sessions.open(SAMPLING)
    run = AgentRun(session, Future())
    (rollout,) = scene.sample("two_turns", count=1)
    run.score.set_result(Score(1.0))
    ids = rollout.token_ids
    session.record(Turn(Completion(0, ids, ids, rollout.logprobs, ids, "stop", ""), None))
    assert session.completions() == []


def test_model_names_the_session_at_the_common_address(client: Client) -> None:
    session = client.open()
    body = {"messages": [{"role": "user", "content": "add 1 to 2."}]}
    assert client.post("/v1/chat/completions", {**body, "model": "session:nobody"}) == 404
    assert client.post("/v1/chat/completions", {**body, "model": f"session:{session['id']}"})
    path = f"/rl/sessions/{session['id']}"
    client.post(f"{path}/reward", {"reward": 1})
    assert client.post(f"{path}/end", {}) == {"turns": 1, "branches": 1}


def test_reasoning_is_apart_from_the_content_and_is_trained(stack: ExitStack) -> None:
    scene = Scene(stack, ["<think>\nhm\n</think>\n\n14", "15"])
    (rollout,) = scene.sample("two_turns", count=1)  # sends the content back, without reasoning
    assert rollout.num_turns == 2
    sampled = models.text_of(scene.tokenizer, rollout.token_ids[rollout.loss_mask])
    assert sampled == "<think>\nhm\n</think>\n\n14<|im_end|>15<|im_end|>"


def test_process_with_a_hung_function_is_replaced() -> None:
    pool = RewardPool(num_workers=0, timeout_seconds=2.0, queue_limit=4)

    def run(name: str) -> float:
        agents = LocalAgents(f"agent_functions:{name}", pool, model="demo", max_turns=1)
        return agents.run(PROBLEM, base_url="", api_key="").result().reward

    with closing(pool):
        before = run("process")
        with pytest.raises(RewardError, match="took longer than 2 s"):
            run("hanging")
        assert run("process") != before


@pytest.mark.parametrize("reward", [float("nan"), 1e9, "1", [1], None, {"a": "b"}])
def test_unusable_reward_of_a_client_is_refused(client: Client, reward: Any) -> None:
    session = client.open()
    assert client.post(f"/rl/sessions/{session['id']}/reward", {"reward": reward}) == 400


def test_session_without_a_reward_drops_its_group(client: Client) -> None:
    sessions = [client.open() for _ in range(2)]
    for session in sessions:
        client.chat(session)
        client.post(f"/rl/sessions/{session['id']}/end", {})
    first, *_ = client.errors()
    assert "without a reward" in str(first)


def test_group_that_its_client_left_ends_after_the_time_limit(client: Client, scene: Scene) -> None:
    scene.sessions.join("left", 5, seconds=0.01)
    (error,) = client.errors()
    assert "before its time limit" in str(error)
    assert scene.sampler.num_in_flight == 0


def test_client_waits_while_no_group_may_begin(client: Client) -> None:
    client.scene.sessions.sampling = None
    assert client.open() == 429
