"""AdamW with a smaller state: accuracy, size and resuming; the learning-rate schedule.

.venv/bin/python -m pytest tests/learning/test_optimizer.py
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peak_memory import PeakMemory
from sample_data import siblings

from peralta_zmq import build, models
from peralta_zmq.config import load_config
from peralta_zmq.errors import ConfigError
from peralta_zmq.learning import optimizer as adamw
from peralta_zmq.learning.learner import Learner
from peralta_zmq.learning.optimizer import learning_rate, make_optimizer
from peralta_zmq.trainer.checkpoint import Checkpoint, newest, write_checkpoint
from peralta_zmq.trainer.ranks import check_supports_ranks

EIGHT_BIT = "adamw_8bit"


@pytest.fixture
def optim(request: pytest.FixtureRequest) -> str:
    """The optimizer under test; skips the test without its library."""
    if request.param == EIGHT_BIT:
        pytest.importorskip("bitsandbytes", reason="the extra optim is not installed")
    return str(request.param)


small = pytest.mark.parametrize("optim", ["adamw_bf16", EIGHT_BIT], indirect=True)


def embedded() -> Any:
    return models.load_model(models.EMBEDDED, device=torch.device("cpu"), dtype=torch.float32)


def learner_with(optim: str, *settings: str) -> Learner:
    arguments = [f"--train.optim={optim}", "--train.dtype=float32", "--train.weight-decay=0.1",
                 "--no-train.master-noise", *settings]  # fmt: skip
    return build.make_learner(load_config("bin/trainer", arguments), embedded())


def take_steps(learner: Learner, *, to: int) -> Learner:
    while learner.step < to:
        seed = 2 * learner.step
        learner.learn([siblings([1, 0, 0, 1], lengths=[6, 3, 7, 4], seed=seed + k) for k in (0, 1)])
    return learner


def weights(learner: Learner) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for _, each in learner.weights()]).clone()


@functools.cache
def with_fp32() -> tuple[torch.Tensor, torch.Tensor]:
    """The weights after 8 steps of AdamW in fp32, and before."""
    learner = learner_with("adamw")
    return weights(take_steps(learner, to=8)), weights(learner_with("adamw"))


@small
def test_small_state_weights_are_near_fp32(optim: str) -> None:
    after, before = with_fp32()
    ours = weights(take_steps(learner_with(optim), to=8))
    distance = float((ours - after).norm() / (after - before).norm())
    print(f"{optim}: distance {distance:.2%} of the movement of adamw")  # quoted in docs/optim.md
    assert 0 < distance < {"adamw_bf16": 0.01, EIGHT_BIT: 0.1}[optim]


@small
def test_small_state_has_documented_size(optim: str) -> None:
    state = take_steps(learner_with(optim), to=1).state()
    found = sum(each.nbytes for path, each in state.items()
                if path.startswith(f"{optim}/") and "/step/" not in path)  # fmt: skip
    sizes = [each.numel() for path, each in state.items() if path.startswith("model/")]
    expected = {
        "adamw_bf16": sum(4 * each for each in sizes),
        # two codes and, for blocks of 256, two scales; below 4096 elements fp32
        EIGHT_BIT: sum(2 * n + 8 * -(-n // 256) if n >= 4096 else 8 * n for n in sizes),
    }
    assert found == expected[optim]


@small
def test_resumed_run_equals_uninterrupted_run(optim: str, tmp_path: Path) -> None:
    whole = take_steps(learner_with(optim), to=4)
    write_checkpoint(tmp_path, Checkpoint(4, whole.state(), {}), run_id="run")
    saved, resumed = newest(tmp_path, run_id="run"), learner_with(optim)
    assert saved is not None
    resumed.restore(4, saved.tensors)
    ours, expected = take_steps(resumed, to=7).state(), take_steps(whole, to=7).state()
    assert ours.keys() == expected.keys()
    for path, each in ours.items():
        assert torch.equal(each, expected[path]) and each.dtype == expected[path].dtype, path


def test_adamw_bf16_step_matches_adamw_on_rounded_moments() -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = make_optimizer({"w": weight}, optim="adamw_bf16", lr=0.1)
    for gradient in ([1.0, 0.5], [3.0, 0.5]):
        weight.grad = torch.tensor(gradient)
        optimizer.step()
    # by hand, the first of the two: means 0.1 and 0.05, each rounded to 8 bits
    mean, square = 0.10009765625, 0.050048828125
    mean, square = 0.9 * mean + 0.1 * 3, 0.95 * square + 0.05 * 9
    step = 0.1 * (mean / (1 - 0.9**2)) / ((square / (1 - 0.95**2)) ** 0.5 + 1e-8)
    torch.testing.assert_close(weight.detach()[0], torch.tensor(1 - 0.1 - step))
    state = optimizer.state[weight]
    assert state["exp_avg"][0] == torch.tensor(mean).bfloat16()
    assert state["exp_avg_sq"][0] == torch.tensor(square).bfloat16()


def test_restore_rejects_state_of_another_optimizer() -> None:
    other = take_steps(learner_with("adamw"), to=1)
    learner = learner_with("adamw_bf16")
    before = weights(learner)
    with pytest.raises(ValueError, match=r"its train\.optim is adamw, not adamw_bf16"):
        learner.restore(1, other.state())
    assert torch.equal(weights(learner), before)


def test_missing_bitsandbytes_error_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"adamw_8bit needs bitsandbytes .*peralta_zmq\[optim\]"):
        learner_with(EIGHT_BIT)


def test_adamw_8bit_is_rejected_for_sharded_ranks() -> None:
    config = load_config("bin/trainer", [f"--train.optim={EIGHT_BIT}"])
    with pytest.raises(ConfigError, match=r"adamw_8bit does not support.*; use adamw_bf16, or"):
        check_supports_ranks(config, torch.device("cuda", 1))
    check_supports_ranks(config, torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"model\.device mps does not support"):
        check_supports_ranks(config, torch.device("mps"))


# Learning-rate schedule


@pytest.mark.parametrize(
    ("kind", "warmup_steps", "expected"),
    [
        ("constant", 0, [8, 8, 8]),
        ("constant", 4, [2, 4, 6, 8, 8, 8]),
        ("linear", 0, [8, 6, 4, 2]),  # ends above zero
        ("linear", 2, [4, 8, 8, 6, 4, 2]),
        # 4 (1 + cos 0), 4 (1 + cos 45), 4 (1 + cos 90), 4 (1 + cos 135)
        ("cosine", 0, [8, 6.828427, 4, 1.171573]),
        ("cosine", 2, [4, 8, 8, 6.828427, 4, 1.171573]),
        ("cosine", 4, [2, 4, 6, 8]),  # warm-up only
    ],
)
def test_learning_rate_schedule_by_hand(
    kind: str, warmup_steps: int, expected: list[float]
) -> None:
    schedule = {"kind": kind, "warmup_steps": warmup_steps, "max_steps": len(expected)}
    rates = [learning_rate(1 + index, peak=8.0, **schedule) for index in range(len(expected))]
    assert rates == pytest.approx(expected, abs=1e-6)


@small
@pytest.mark.parametrize("is_transposed", [False, True])
def test_step_in_parts_equals_a_whole_step(optim: Any, is_transposed: bool) -> None:
    found = dict[int, list[torch.Tensor]]()
    for part in (1 << 30, 1024):
        random = torch.Generator().manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(70, 111, generator=random))
        optimizer = make_optimizer({"w": weight}, optim=optim, lr=1e-3, weight_decay=0.1, part=part)
        for _ in range(3):
            gradient = torch.randn(111, 70, generator=random).t()
            weight.grad = gradient if is_transposed else gradient.contiguous()
            optimizer.step()
        state = adamw.state_of(optimizer, {"w": weight})["w"]
        found[part] = [weight.detach(), *state.values()]
        assert state["step"] == 3
    assert all(map(torch.equal, *found.values()))


@small
def test_step_needs_memory_for_a_part_only(optim: Any) -> None:
    weight = torch.nn.Parameter(torch.ones(1 << 20))
    optimizer = make_optimizer({"w": weight}, optim=optim, part=4096)
    for _ in range(2):  # the first step creates the state
        weight.grad = torch.ones(1 << 20)
        with PeakMemory() as memory:
            optimizer.step()
    assert memory.peak < 10 * 4 * 4096
