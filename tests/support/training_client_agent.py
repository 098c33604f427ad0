"""An agent that asks through the training client of the library verifiers, with token ids."""

from __future__ import annotations

import os

import verifiers.v1 as vf
from renderers import DefaultRendererConfig

from peralta_zmq import models
from peralta_zmq.environments import verifiers_chat
from peralta_zmq.rollout import Problem, Score


async def run(problem: Problem, base_url: str, api_key: str) -> Score:
    """The reward is the sum of the logprobs of the tokens that the client received."""
    os.environ["SESSION_KEY_OF_THE_TEST"] = api_key
    agent = {"harness": {"id": verifiers_chat.ID}, "runtime": {"type": "subprocess"}}
    config = vf.env_config_type("my_sums").model_validate(
        {"taskset": {"id": "my_sums"}, "agent": agent}
    )
    env = vf.environment_class("my_sums")(config)
    client = vf.TrainClientConfig(
        base_url=base_url,
        api_key_var="SESSION_KEY_OF_THE_TEST",
        renderer=DefaultRendererConfig(),
        renderer_model_name=str(models.EMBEDDED),
    )
    async with env.serving():
        task = next(iter(env.taskset))
        episode = await env.run_episode(task, vf.ModelContext(model="demo", client=client))
    (trace,) = episode.traces
    assert episode.ok, trace.errors
    sampled = [node for node in trace.nodes if node.sampled]
    logprobs = [logprob for node in sampled for logprob in node.logprobs]
    return Score(sum(logprobs), {"tokens": sum(sum(node.mask) for node in sampled)})
