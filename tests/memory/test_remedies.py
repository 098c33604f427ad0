"""Settings that make a plan fit."""

from __future__ import annotations

import pytest
from config_files import load

from peralta_zmq import build
from peralta_zmq.config import with_settings
from peralta_zmq.memory import Machine, ModelShape, Role


def test_remedies_are_tried_with_the_least_harm_first(qwen: ModelShape) -> None:
    config = load(
        "--sampling.max-completion-length=256", "--engine.max-model-len=1024", "--engine.slots=8",
        "--train.max-tokens-per-microbatch=16384",
    )  # fmt: skip

    def chosen(memory_gib: float) -> list[str]:
        planner = build.MemoryPlanner(qwen, Machine("cpu", memory_gib * 2**30))
        return planner.advise(config, "trainer").options.split(" --")

    assert chosen(40) == ["--train.max-tokens-per-microbatch 8192"]
    assert chosen(1) == [""]
    needed = [len(chosen(memory)) for memory in (40, 9, 8)]
    assert needed == sorted(needed)


def test_trainer_whose_evaluation_needs_most_is_proposed_fewer_slots(qwen: ModelShape) -> None:
    training = ("--train.max-tokens-per-microbatch=512", "--train.gradient-checkpointing")
    config = load("--lora.rank=8", "--engine.max-model-len=512", *training)
    planner = build.MemoryPlanner(qwen, Machine("cpu", 6 * 2**30))
    assert planner.plan(config, "trainer").phase == "evaluation"
    assert planner.advise(config, "trainer").options == "--engine.slots 16"


@pytest.mark.parametrize("options", [(), ("--lora.rank=4",)])
def test_proposed_option_is_accepted_and_gives_the_planned_peak(
    options: tuple[str, ...], qwen: ModelShape
) -> None:
    settings = ("--engine.max-model-len=1024", *options)
    config, planner = load(*settings), build.MemoryPlanner(qwen, Machine("cpu", 2**30))
    for role in ("trainer", "generator"):
        attempts = planner.advise(config, role).attempts
        assert len({each.options for each in attempts}) >= 2
        for each in attempts:
            proposed = load(*settings, *each.options.split())
            assert proposed == with_settings(config, each.changes)
            assert planner.plan(proposed, role).peak == each.alone.peak


def test_generator_in_float32_is_proposed_bfloat16(qwen: ModelShape) -> None:
    planner = build.MemoryPlanner(qwen, Machine("cpu", 2**30, sampling_dtype="float32"))
    advice = planner.advise(load("--engine.slots=1"), "generator", limit=3 * 2**30)
    assert advice.options == "--model.dtype bfloat16"


def test_vllm_on_a_used_card_is_proposed_a_smaller_fraction(qwen: ModelShape) -> None:
    config, card = load(), Machine("cuda", 24 * 2**30, engine="vllm")
    advice = build.MemoryPlanner(qwen, card).advise(config, "generator", limit=20 * 2**30)
    assert advice.options == "--engine.gpu-memory-utilization 0.8"


@pytest.mark.parametrize(
    ("role", "settings", "option"),
    [
        ("trainer", ("--sampling.max-completion-length=400",), "--engine.max-model-len 256"),
        ("generator", ("--sampling.max-completion-length=512",), "--engine.max-model-len 512"),
    ],
)
def test_useless_or_contradictory_option_is_not_proposed(
    role: Role, settings: tuple[str, ...], option: str, qwen: ModelShape
) -> None:
    config = load("--engine.max-model-len=1024", *settings)
    machine = Machine("cpu", 2**30)
    planner = build.MemoryPlanner(qwen, machine)
    attempts = planner.advise(config, role).attempts
    assert option not in [each.options for each in attempts]
    peaks = [planner.plan(config, role).peak, *(each.combined.peak for each in attempts)]
    assert peaks == sorted(set(peaks), reverse=True)
