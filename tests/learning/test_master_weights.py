"""Master weights off the grid of the published weights: exactness, noise, means, checkpoints.

.venv/bin/python -m pytest tests/learning/test_master_weights.py
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from learners import groups_of, identical, weights
from local_ranks import join_sharded, on_ranks
from sample_data import constant, tiny_learner, tiny_model
from torch import Tensor, nn

from peralta_zmq.learning.distributed import SINGLE, full_tensor, join
from peralta_zmq.learning.master_weights import MasterWeights
from peralta_zmq.learning.optimizer import OPTIMS, make_optimizer
from peralta_zmq.models.rounding import grid_noise, off_grid

GRIDS = [torch.bfloat16, torch.float16]
# Powers of two, below which the grid is finer; both zeros; the smallest and largest numbers.
SPECIAL = [1.0, -1.0, 2.0**-14, 2.0**-24, -(2.0**-15), 0.0, -0.0, 65504.0, 0.05, -0.375]


def on_grid(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> nn.Parameter:
    """Random weights on the grid of `dtype`, in fp32."""
    random = torch.Generator().manual_seed(seed)
    return nn.Parameter((torch.randn(shape, generator=random) * 0.05).to(dtype).float())


def noisy(
    parameters: Mapping[str, nn.Parameter],
    dtype: torch.dtype = torch.bfloat16,
    *,
    seed: int | None = 0,
) -> MasterWeights:
    """Masters with noise; without it if `seed` is None."""

    def make_masters(name: str, weights: Tensor) -> Tensor:
        return off_grid(weights, grid_noise(weights, dtype, seed=f"{seed}/{name}"))

    return MasterWeights(parameters, dtype, make_masters=None if seed is None else make_masters)


def move(masters: MasterWeights, parameters: Mapping[str, nn.Parameter], by: Any) -> None:
    """Add a number or tensor to all masters."""
    masters.join()
    for parameter in parameters.values():
        parameter.data += by
    masters.split()


def masters_of(masters: MasterWeights, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    masters.join()
    joined = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    masters.split()
    return joined


def test_weights_off_the_grid_are_their_own_masters() -> None:
    base = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    parameters = {"w": nn.Parameter(base.clone())}
    masters = noisy(parameters)
    assert torch.equal(parameters["w"].detach(), base.bfloat16().float())
    assert torch.equal(masters_of(masters, parameters)["w"], base)


def test_rank_without_a_part_of_a_parameter_has_no_movement() -> None:
    masters = noisy({"w": nn.Parameter(torch.empty(0, 4))})
    assert masters.movement(SINGLE) == {}


def test_weights_that_are_not_finite_are_their_own_masters() -> None:
    """A broken model is reported by its steps, which are skipped."""
    parameters = {"w": nn.Parameter(torch.tensor([torch.inf, torch.nan, 1.0]))}
    masters = noisy(parameters)
    joined = masters_of(masters, parameters)["w"]
    assert joined[0] == torch.inf and joined[1].isnan() and joined[2] != 1.0


@pytest.mark.parametrize("dtype", GRIDS)
def test_join_restores_masters_bit_for_bit(dtype: torch.dtype) -> None:
    parameters = {"w": nn.Parameter(torch.tensor(SPECIAL * 100).to(dtype).float())}
    masters = noisy(parameters, dtype)
    random = torch.Generator().manual_seed(1)
    for scale in (1e-7, 1e-4, 1e-1, 10.0):  # across zero and across many grid points
        masters.join()
        parameters["w"].data += scale * torch.randn(1000, generator=random)
        updated = parameters["w"].detach().clone()
        masters.split()
        assert torch.equal(parameters["w"].detach(), updated.to(dtype).float())
        assert torch.equal(masters_of(masters, parameters)["w"], updated)


@pytest.mark.parametrize("shape", [(), (3,), (700, 1000), (5, 700, 1000)])
def test_masters_of_tensors_of_any_shape(shape: tuple[int, ...]) -> None:
    """Also of scalars, and of tensors that are not contiguous.

    One master in 130,000 is moved by one number of fp32, because its remainder is 2**15.
    """
    straight = on_grid(*shape)
    turned = nn.Parameter(straight.detach().permute(tuple(range(len(shape) - 1, -1, -1))))
    for parameter in (straight, turned):
        parameters = {"w": parameter}
        masters = noisy(parameters)
        masters.join()
        parameter.data += 1e-3
        updated = parameter.detach().clone()
        masters.split()
        found = masters_of(masters, parameters)["w"]
        difference = found.view(torch.int32) - updated.view(torch.int32)
        assert difference.abs().max() <= 1
        assert difference.count_nonzero() <= 1 + parameter.numel() / 30_000
        assert set(masters.movement(SINGLE)) > {"weights/moved"}


def test_master_in_the_middle_of_two_grid_points_stays_beside_it() -> None:
    """Its remainder, 2**15, does not fit into 16 bits; the one below differs by one fp32 ulp."""
    middle = 1.0 + 2.0**-8  # rounds to 1, the even neighbour
    parameters = {"w": nn.Parameter(torch.tensor([middle, -middle]))}
    masters = noisy(parameters)
    joined = masters_of(masters, parameters)["w"]
    assert parameters["w"].tolist() == [1.0, -1.0]
    assert torch.equal(joined, torch.tensor([middle, -middle]) * (1 - 2.0**-24))


@pytest.mark.parametrize("base", [0.0517578125, 1.0, -1.0])
@pytest.mark.parametrize("direction", [1, -1])
def test_published_weights_follow_the_masters_in_the_mean(base: float, direction: int) -> None:
    """Also where the grid steps above and below differ: at powers of two."""
    parameters = {"w": nn.Parameter(torch.full((1_000_000,), base))}
    masters = noisy(parameters)
    distance = direction * 0.05 * abs(base) * 2.0**-8
    move(masters, parameters, distance)
    moved = (parameters["w"].detach() - base).double()
    # The largest probability of a move is 0.05 * 2, so the mean of a million has a standard error
    # below 1 % of the move (0.05 * 2 * 0.95 / 1e6)^(1/2) = 0.0003 of a grid step of at least half
    # the larger one; 5 % are more than four of them.
    assert abs(float(moved.mean()) / distance - 1) < 0.05


@pytest.mark.parametrize("optim", OPTIMS)
@pytest.mark.parametrize(("seed", "least", "most"), [(0, 0.8, 1.2), (None, 0.0, 0.2)])
def test_small_updates_reach_published_weights(
    optim: Any, seed: int | None, least: float, most: float
) -> None:
    """20 updates at 1e-6 in one direction, on a bfloat16 base; without noise few of them do."""
    if optim == "adamw_8bit":
        pytest.importorskip("bitsandbytes", reason="the extra optim is not installed")
    parameter = on_grid(512, 1024)
    base, sign = parameter.detach().clone(), on_grid(512, 1024, seed=1).detach().sign()
    masters = noisy({"w": parameter}, seed=seed)
    optimizer: Any = make_optimizer({"w": parameter}, optim=optim, lr=1e-6)
    masters.attach(optimizer)
    for _ in range(20):
        parameter.grad = sign.clone()
        optimizer.step()
    published = parameter.detach().bfloat16().float() - base
    mean_move = float((published.double() * -sign.double()).mean())
    # AdamW moves a master by the learning rate when all its gradients are equal.
    assert least < mean_move / 20e-6 < most
    assert least < masters.movement(SINGLE)["weights/moved"] < most


def test_movement_is_whole_if_published_in_fp32() -> None:
    parameter = on_grid(100, 100)
    masters = noisy({"w": parameter}, torch.float32)
    assert masters.movement(SINGLE) == {}  # nothing has moved
    parameter.data += 1e-6
    names = ("weights/moved", "weights/moved_cosine", "weights/moved_length")
    assert masters.movement(SINGLE) == pytest.approx(dict.fromkeys(names, 1.0))


def learner_with_masters(model: Any) -> Any:
    for parameter in model.parameters():
        parameter.data = parameter.detach().bfloat16().float()
    parameters = dict(model.named_parameters())
    masters = noisy(parameters, seed=3)
    return tiny_learner(model, masters=masters, learning_rate=constant(1e-4))


def test_learner_computes_with_published_weights() -> None:
    model = tiny_model()
    learner = learner_with_masters(model)
    for step in range(3):
        learner.learn(groups_of(step))
        assert all(torch.equal(w, w.bfloat16().float()) for w in weights(model).values())


def test_restored_learner_has_the_same_masters() -> None:
    model = tiny_model()
    learner = learner_with_masters(model)
    learner.learn(groups_of(0))
    state = copy.deepcopy(learner.state())
    again_model = tiny_model()
    again = learner_with_masters(again_model)
    again.restore(1, state)
    for step in (1, 2, 3):
        learner.learn(groups_of(step))
        again.learn(groups_of(step))
    assert identical(weights(model), weights(again_model))
    assert identical(learner.state(), again.state())


def test_restore_rejects_state_without_masters() -> None:
    state = tiny_learner(tiny_model()).state()
    with pytest.raises(ValueError, match=r"train\.master_noise or weights\.dtype is another"):
        learner_with_masters(tiny_model()).restore(1, state)


def masters_on_rank(shards: bool) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Masters and movement after an update of a model on this rank."""
    model = nn.Linear(6, 5)
    model.weight.data = on_grid(5, 6).detach()
    model.bias.data = on_grid(5).detach()
    ranks = (join_sharded if shards else join)(torch.device("cpu"))
    prepared = ranks.prepare(model)
    parameters = dict(prepared.named_parameters())
    masters = noisy(parameters)
    move(masters, parameters, 1e-3)
    masters.join()
    joined = {name: full_tensor(each.detach()).clone() for name, each in parameters.items()}
    masters.split()
    return joined, masters.movement(ranks)


@pytest.mark.parametrize(("count", "shards"), [(1, False), (2, False), (2, True)])
def test_masters_are_equal_for_any_number_of_ranks(
    tmp_path: Path, count: int, shards: bool
) -> None:
    parameters = {"weight": on_grid(5, 6), "bias": on_grid(5)}
    masters = noisy(parameters)
    move(masters, parameters, 1e-3)
    expected = masters_of(masters, parameters)
    for found, movement in on_ranks(tmp_path, masters_on_rank, shards, count=count):
        assert identical(found, expected)
        # Shards sample other elements; every element of these small tensors is sampled often.
        assert movement["weights/moved"] == pytest.approx(
            masters.movement(SINGLE)["weights/moved"], rel=0.05
        )
