"""What computes a training step: recorded, restored, or refused with the difference."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from peralta_zmq import build, models
from peralta_zmq.config import load_config
from peralta_zmq.errors import ConfigError
from peralta_zmq.models import layer_ops


@pytest.fixture
def here() -> Iterator[dict[str, str]]:
    """That of this process, which is restored after the test."""
    before = models.arithmetic(torch.device("cpu"), "float32", 1)
    yield before
    models.use_arithmetic(before, before)


def test_threads_and_operators_of_a_record_are_used(here: dict[str, str]) -> None:
    recorded = here | {"threads": "3", "operators": layer_ops.TORCH}
    assert models.use_arithmetic(recorded, here)
    assert torch.get_num_threads() == 3
    rows = torch.randn(4, 8)
    norm = layer_ops.rms_norm(rows.requires_grad_(), torch.ones(8), 1e-5)
    assert norm.grad_fn is not None and norm.grad_fn.library is None  # type: ignore[attr-defined]
    assert models.use_arithmetic(here, here)
    assert str(torch.get_num_threads()) == here["threads"]


@pytest.mark.parametrize(
    ("name", "recorded", "reason"),
    [
        ("torch", "1.0", "torch 1.0 (here "),
        ("dtype", "bfloat16", "dtype bfloat16 (here float32)"),
        ("device", "cuda", "device cuda (here cpu)"),
        ("operators", "layer_ops-0-1.so layer_ops-2-3.so", "layer_ops-0-1.so layer_ops-2-3.so can"),
    ],
)
def test_what_cannot_be_restored_is_refused(
    here: dict[str, str], name: str, recorded: str, reason: str
) -> None:
    with pytest.raises(ConfigError) as error:
        models.use_arithmetic(here | {name: recorded}, here)
    assert reason in str(error.value)


def test_record_of_another_layout_of_the_tokens_is_refused(here: dict[str, str]) -> None:
    recorded = {name: value for name, value in here.items() if name != "layout"}  # an older program
    with pytest.raises(ConfigError, match=r"computed with layout none \(here 2\)"):
        models.use_arithmetic(recorded, here)


def test_only_different_instructions_are_named(here: dict[str, str]) -> None:
    recorded = here | {"instructions": f"{here['instructions']} amx_of_tomorrow"}
    with pytest.raises(ConfigError) as error:
        models.use_arithmetic(recorded, here)
    assert str(error.value) == ("it was computed with instructions amx_of_tomorrow (here without)")


@pytest.mark.parametrize(
    "name", ["ATEN_CPU_CAPABILITY", "MKL_CBWR", "DNNL_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE"]
)
def test_variable_that_changes_instructions_is_refused(
    here: dict[str, str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "other")
    other = models.arithmetic(torch.device("cpu"), "float32", 1)
    with pytest.raises(ConfigError, match=rf"instructions none \(here {name}=other\)"):
        models.use_arithmetic(here, other)


def test_other_bits_are_expected_on_a_gpu_on_other_ranks_and_without_a_record(
    here: dict[str, str],
) -> None:
    on_gpu = here | {"device": "cuda"}
    assert not models.use_arithmetic(on_gpu | {"torch": "1.0"}, on_gpu)
    assert not models.use_arithmetic(here | {"ranks": "2", "threads": "7"}, here)
    assert not models.use_arithmetic({}, here)
    assert str(torch.get_num_threads()) == here["threads"]


def test_of_several_ranks_nothing_is_restored(here: dict[str, str]) -> None:
    ranks = here | {"ranks": "2"}
    with pytest.raises(ConfigError, match="threads 7"):
        models.use_arithmetic(ranks | {"threads": "7"}, ranks)


def test_indexed_gradients_have_the_same_bits_with_several_threads(here: dict[str, str]) -> None:
    build.load_policy(load_config("bin/trainer", ["--model.device=cpu"]), models.EMBEDDED)
    torch.set_num_threads(4)
    states = torch.randn(64, 4096, generator=torch.Generator().manual_seed(0)).requires_grad_()
    places = torch.arange(4096) % 8  # many threads add to few rows
    weights = torch.randn(4096, 4096, generator=torch.Generator().manual_seed(1))

    def gradient() -> torch.Tensor:
        return torch.autograd.grad((states[places] * weights).sum(), states)[0]

    expected = gradient()
    assert all(torch.equal(gradient(), expected) for _ in range(5))
