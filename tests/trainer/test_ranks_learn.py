"""Two ranks learn the same as one, with a reference model, adapters and small optimizer states."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import local_ranks
import pytest
import torch
import torch.distributed as dist
from exactness import Float64
from local_ranks import results, start

from peralta_zmq import build, models
from peralta_zmq.config import load_config
from peralta_zmq.learning.distributed import SINGLE, DistributedRanks, Ranks

STEPS = 4
OBJECTIVES = {
    "reference": ("--loss.name=grpo_kl", "--loss.beta=0.5", "--train.ref-sync-steps=3"),
    "bf16 state": ("--train.optim=adamw_bf16",),
    "8-bit state": ("--train.optim=adamw_8bit",),
    "adapters": ("--lora.rank=4",),
    "adapters and base": ("--lora.rank=4", "--lora.base-dtype=nf4", "--loss.name=grpo_kl",
                          "--loss.beta=0.5"),
}  # fmt: skip
for package, word in (("peft", "adapters"), ("bitsandbytes", "8-bit")):
    if importlib.util.find_spec(package) is None:
        OBJECTIVES = {name: each for name, each in OBJECTIVES.items() if word not in name}
GROUPS = [
    replace(group, generator_id=("ann", "bob", "cleo")[group.group_number % 3])
    for group in local_ranks.GROUPS
]


Tensors: TypeAlias = Mapping[str, torch.Tensor]
ROUNDED = ("bf16 state", "8-bit state")  # rounding depends on the order of a sum


def train(ranks: Ranks, name: str) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """The checkpoint tensors after STEPS steps, and the metrics and mismatch of each step.

    The model is in float64, except for optimizers with a narrower state.
    """
    config = load_config(
        "bin/trainer",
        ["--train.batch-size=8", "--train.dtype=float32", "--train.max-tokens-per-microbatch=40",
         "--train.learning-rate=0.001", *OBJECTIVES[name]],
    )  # fmt: skip
    policy = build.load_policy(config, models.EMBEDDED)
    rows = list[Any]()
    with Float64():
        learner = build.make_learner(config, policy if name in ROUNDED else policy.double(), ranks)
        for step in range(STEPS):
            result = learner.learn(GROUPS[3 * step : 3 * step + 3])
            mismatch = {name: (each.kl, each.num_tokens) for name, each in result.mismatch.items()}
            rows.append((result.metrics, mismatch))
    return learner.state(), rows


def train_all_objectives() -> dict[tuple[str, bool], Any]:
    """The result of `train` for each objective, with whole and with sharded parameters."""
    dist.init_process_group("gloo")
    kinds = {
        shards: DistributedRanks(torch.device("cpu"), shards=shards) for shards in (False, True)
    }
    trained = {
        (name, shards): train(ranks, name)
        for shards, ranks in kinds.items()
        for name in OBJECTIVES
        if not (shards and name == "8-bit state")  # sharded ranks refuse it
    }
    kinds[False].close()
    return trained


@pytest.mark.slow
def test_two_ranks_learn_the_same_as_one(tmp_path: Path) -> None:
    ranks = start(tmp_path, train_all_objectives)
    single = {name: train(SINGLE, name) for name in OBJECTIVES}
    for (name, shards), (tensors, rows) in results(tmp_path, ranks)[0].items():
        expected, expected_rows = single[name]
        assert tensors.keys() == expected.keys(), name
        assert any(path.startswith("reference/") for path in tensors) == (name == "reference")
        if name in ROUNDED:
            assert_near(tensors, expected)
            continue
        for path in expected.keys() - {"rng/torch"}:
            torch.testing.assert_close(
                tensors[path], expected[path], rtol=0, atol=1e-9, msg=f"{name} {shards} {path}"
            )
        for (single_metrics, by_sender), (metrics, mismatch) in zip(
            expected_rows, rows, strict=True
        ):
            assert set(mismatch) == {f"{each}/626f6f74626f6f74" for each in ("ann", "bob", "cleo")}
            for sender, figures in by_sender.items():
                assert mismatch[sender] == pytest.approx(figures, rel=1e-6), (name, sender)
            for key in single_metrics.keys() - {"time/forward_backward", "time/overlapped"}:
                near = pytest.approx(single_metrics[key], rel=1e-6, abs=1e-9)
                assert metrics[key] == near, (name, key)


def assert_near(tensors: Tensors, expected: Tensors) -> None:
    """The weights differ by at most 1/1000 of their distance from the base model."""
    base = models.load_model(models.EMBEDDED, device=torch.device("cpu"), dtype=torch.float32)
    difference = distance = 0.0
    for name, parameter in base.named_parameters():
        trained = expected[f"model/{name}"]
        difference += float((tensors[f"model/{name}"] - trained).square().sum())
        distance += float((trained - parameter.detach()).square().sum())
    print(f"difference: {(difference / distance) ** 0.5:.3%} of the distance")  # in docs/optim.md
    assert difference**0.5 < 1e-3 * distance**0.5
