"""The gradient of a step is the same for any number of ranks.

.venv/bin/python -m pytest tests/learning/test_distributed.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from learners import demonstrations_of
from local_ranks import on_ranks
from sample_data import packed, siblings, step_gradient, tiny_model
from torch import Tensor

from peralta_zmq.learning.distributed import SINGLE, DistributedRanks, Ranks, join
from peralta_zmq.learning.losses import preset
from peralta_zmq.learning.packing import Packing, make_micro_batches
from peralta_zmq.learning.selection import TokenSelection
from peralta_zmq.models.scorer import Scorer

CPU = torch.device("cpu")
GROUPS = [
    siblings([1, 0, 0, 1], lengths=[4, 1, 7, 2], seed=1),
    siblings([0, 0.5, 1], lengths=[3, 9, 5], seed=2, num_prompt=6),
    siblings([1, 0], lengths=[2, 2], seed=3, num_prompt=2),
    siblings([1, 0, 0], lengths=[8, 3, 4], seed=4),
    siblings([0, 1], lengths=[6, 2], seed=5, num_prompt=5),
]


def join_ranks(*, shards: bool) -> DistributedRanks:
    """Join the process group of the test, with or without sharded parameters."""
    if not shards:
        return join(CPU)
    dist.init_process_group("gloo")
    return DistributedRanks(CPU, shards=True)


def prepared_with_a_frozen_base() -> tuple[bool, bool]:
    """Whether the sharded model has the same buffer, and still the same parameter."""
    model: Any = torch.nn.Linear(4, 4)
    model.register_buffer("base", torch.ones(8))
    sharded = join_ranks(shards=True).prepare(model)
    return sharded.base.data_ptr() == model.base.data_ptr(), sharded.weight is model.weight


def test_sharded_copy_shares_the_frozen_base(tmp_path: Path) -> None:
    assert on_ranks(tmp_path, prepared_with_a_frozen_base, count=1) == [(True, False)]


LOSSES = {
    "reinforce": preset("reinforce"),
    "dapo": preset("dapo"),
    "sequence": preset("importance_sequence"),
}


def gradients(ranks: Ranks) -> dict[str, tuple[Tensor, dict[str, float]]]:
    """The full gradient and the metrics of a step, for each loss and packing."""
    model = ranks.prepare(tiny_model().double())
    found = {}
    for name, loss in LOSSES.items():
        for max_tokens, groups in ((1000, GROUPS), (1000, GROUPS[:1]), (20, GROUPS)):
            samples, _ = packed(groups, max_tokens=max_tokens)
            batches = make_micro_batches(samples, Packing(max_tokens=max_tokens), ranks=ranks)
            gradient, result = step_gradient(model, batches, loss, ranks=ranks)
            found[f"{name} {max_tokens} {len(groups)}"] = gradient, result.metrics
    selection = TokenSelection(
        compute=Scorer(model).with_entropy, top_entropy_quantile=0.3, m2_threshold=1.2
    )
    selected, metrics = selection(batches, ranks)
    gradient, result = step_gradient(model, selected, LOSSES["dapo"], ranks=ranks)
    found["selection"] = gradient, metrics | result.metrics
    for batch_size in (3, 1):  # with 1, only rank 0 has a demonstration
        demonstrations = demonstrations_of(model, max_tokens=20, batch_size=batch_size)
        sft = demonstrations.term(1, ranks=ranks)
        gradient, result = step_gradient(model, batches, LOSSES["dapo"], sft=sft, ranks=ranks)
        found[f"sft {batch_size}"] = gradient, result.metrics
    return found


def gradients_on_rank(shards: bool) -> dict[str, tuple[Tensor, dict[str, float]]]:
    ranks = join_ranks(shards=shards)
    try:
        return gradients(ranks)
    finally:
        ranks.close()


@pytest.mark.parametrize(
    ("count", "shards"),
    [
        pytest.param(2, False, marks=pytest.mark.slow),
        pytest.param(3, False, marks=pytest.mark.slow),
        pytest.param(3, True, marks=pytest.mark.slow),
        (2, True),
    ],
)
def test_gradient_is_equal_for_any_number_of_ranks(
    tmp_path: Path, count: int, shards: bool
) -> None:
    single = gradients(SINGLE)  # one rank
    for found in on_ranks(tmp_path, gradients_on_rank, shards, count=count):
        for name, (expected, metrics) in single.items():
            gradient, rank_metrics = found[name]
            assert (gradient - expected).norm() <= 1e-6 * expected.norm(), name
            assert rank_metrics == pytest.approx(metrics, rel=1e-6), name
