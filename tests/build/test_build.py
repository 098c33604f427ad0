"""Sampling, batch size and rewards from the config; logprobs of engine and learner agree."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from engine_data import completed
from sample_data import group_of, tiny_model

from peralta_zmq import build, models
from peralta_zmq.build.environments import make_reward_pool
from peralta_zmq.config import Config, load_config
from peralta_zmq.engines.native.native_engine import native_engine
from peralta_zmq.registry import EngineSettings, WeightUpdate
from peralta_zmq.rollout import Request, Rollout, Sampling, rollout_of


def config_of(*arguments: str) -> Config:
    length = f"--sampling.max-completion-length={Sampling().max_completion_length}"
    return load_config("bin/trainer", ["--train.batch-size=8", length, *arguments])


def test_sampling_has_configured_temperature() -> None:
    assert build.make_sampling(config_of(), seed=0) == Sampling(temperature=1.0)
    sampling = build.make_sampling(config_of("--sampling.temperature=0.7"), seed=3)
    assert sampling == Sampling(temperature=0.7, seed=3)


def test_eval_sampling_is_greedy_for_one_rollout_per_example() -> None:
    warm = "--sampling.temperature=0.7"
    assert build.make_eval_sampling(config_of(warm), seed=3) == Sampling(temperature=0.0)
    several = config_of(warm, "--eval.rollouts-per-example=4")
    assert build.make_eval_sampling(several, seed=3) == Sampling(temperature=0.7, seed=3)


def sharp_model() -> Any:
    """A random model to whose logprobs the temperature makes a difference."""
    model = tiny_model(seed=3, tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight.mul_(12)
    return model


def test_engine_logprobs_equal_trainer_logprobs_across_weight_changes() -> None:
    config = config_of("--weights.dtype=float32", "--sampling.temperature=0.7")
    model = sharp_model()
    tokenizer = models.load_tokenizer(models.EMBEDDED)
    engine = native_engine(sharp_model(), tokenizer, EngineSettings(slots=8, max_model_len=64))
    calls: list[int] = []

    def next_step() -> None:
        calls.append(1)
        if len(calls) in (2, 5):
            engine.apply(WeightUpdate(engine.step + 2, models.weights_of(model)))

    prompt = np.array([5, 9, 33], np.int32)
    sampling = dataclasses.replace(
        build.make_sampling(config, seed=1), min_tokens=9, max_completion_length=12
    )
    requests = [Request(index, prompt, sampling) for index in range(8)]
    completions = list(completed(engine, requests, between_steps=next_step))
    rollouts = tuple(rollout_of(each, float(each.index % 2)) for each in completions)
    assert {step for each in completions for step in each.policy_steps.tolist()} == {0, 2, 4}
    metrics = learned(config, model, rollouts)
    # half the squared differences of logprobs, which rounding makes 1e-6, and another temperature 1
    assert metrics["mismatch_kl"] == pytest.approx(0, abs=1e-8)


def learned(config: Config, model: Any, rollouts: tuple[Rollout, ...]) -> dict[str, float]:
    group = dataclasses.replace(group_of([1, 0]), rollouts=rollouts)
    return build.make_learner(config, model).learn([group]).metrics


def test_reward_workers_share_the_cores_with_other_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(models, "available_cores", lambda: 12)
    for arguments, num_workers in [
        ([], 12), (["--run.num-workers=5"], 2), (["--run.num-workers=99"], 1),
        (["--task.reward-workers=40"], 40),
    ]:  # fmt: skip
        pool = make_reward_pool(config_of(*arguments), is_verifier=False)
        assert pool.num_workers == num_workers
