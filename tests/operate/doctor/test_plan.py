"""bin/doctor plan: what it prints, its exit code, and its refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sample_data import QWEN

from peralta_zmq.errors import ConfigError
from peralta_zmq.operate import doctor

TWO = "--run.num-local-generators=2"
SMALL = "--train.max-tokens-per-microbatch=2048"


def plan(*words: str) -> int:
    return doctor.main(["plan", "--model.device=cpu", *words])


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    return f"--model.name={tmp_path}"


def test_plan_that_fits_lists_parts_of_both_roles(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = ("--sampling.max-completion-length=48", "--engine.max-model-len=512")
    assert plan(model, "--memory=64", *lengths) == 0
    out = capsys.readouterr().out
    assert "qwen3, 28 layers of hidden size 1024, 596.0 M parameters" in out
    assert "device cpu with 64.00 GiB" in out
    for part in ("weights", "gradients", "optimizer state (adamw)", "KV cache of 32 slots",
                 "packed output head"):  # fmt: skip
        assert f"  {part}\n" in out
    assert "assumes prompts of 464 tokens, which engine.max_model_len 512 permits" in out
    assert "trainer and 1 generator together (bin/lan local): fits, " in out
    assert "does not fit" not in out


def test_plan_that_does_not_fit_names_a_setting_that_does(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (model, "--memory=10", "--role=trainer")
    assert plan(*words) == 1
    lines = capsys.readouterr().out.splitlines()
    (advice,) = (line for line in lines if line.startswith("  it fits with "))
    assert plan(*words, *advice.removeprefix("  it fits with ").split()) == 0


def test_plan_that_cannot_fit_says_so(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(model, "--memory=1", "--role=trainer") == 1
    out = capsys.readouterr().out
    assert "no setting is enough; choose a smaller model.name or a machine with more memory" in out


@pytest.mark.parametrize(
    "words",
    [
        ["--memory=64", "--run.num-local-generators=9"],
        [SMALL, "--model.device=cuda", "--memory=40", "--engine.name=vllm"],  # reserves 36 GiB
    ],
)
def test_roles_that_fit_alone_may_not_fit_together(
    model: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(model, *words) == 1
    assert "  lower run.num_local_generators or engine." in capsys.readouterr().out


def test_plan_for_a_card_needs_no_card(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("plan", model, SMALL, "--model.device=cuda", "--memory=24", "--role=trainer")
    assert doctor.main(list(words)) == 0
    out = capsys.readouterr().out
    assert "device cuda with 24.00 GiB" in out


def test_small_parts_are_not_shown_as_zero(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--memory=8", "--role=generator") == 0
    out = capsys.readouterr().out
    assert "    < 0.01  weights, packed output head\n" in out and " 0.00 " not in out


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (("--model.device=cuda",), "training in bfloat16, sampling in bfloat16"),
        (("--model.device=mps",), "training in float32, sampling in float16"),
        (
            ("--model.device=cuda:1", "--train.dtype=float32", "--model.dtype=float16"),
            "training in float32, sampling in float16",
        ),
    ],
)
def test_plan_for_an_absent_gpu_follows_the_settings(
    model: str, settings: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    doctor.main(["plan", model, *settings, "--memory=24", "--engine.slots=3"])
    device = settings[0].partition("=")[2].partition(":")[0]
    assert f"device {device} with 24.00 GiB, {text} (engine native)" in capsys.readouterr().out


def test_plan_for_an_absent_gpu_counts_the_cache_of_turns(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def cache_gib(*settings: str) -> float:
        doctor.main(["plan", model, "--model.device=cuda", "--memory=24", *settings])
        lines = capsys.readouterr().out.splitlines()
        (*_, line) = (line for line in lines if "KV cache of 32 slots" in line)
        return float(line.split()[0])

    assert cache_gib("--task.name=guess_number") > cache_gib()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model.name=/no/such/model",), "model '/no/such/model' is neither a folder nor in the"),
        (("--memory=0",), "--memory 0 is not above 0; give GiB, such as 24"),
        (("--model.device=toaster",), "device 'toaster' cannot be used here"),
        (("--train.memory-fraction=1.5",), "train.memory_fraction = '1.5' is wrong"),
        (
            (TWO, "--train.memory-fraction=0.5", "--engine.gpu-memory-utilization=0.3"),
            "train.memory_fraction 0.5 and engine.gpu_memory_utilization 0.3 for each of 2 "
            "generators are 1.1 of the memory of this machine; lower them to 1 together, or start "
            "fewer generators, or plan for one of the two with --role",
        ),
        (
            (TWO, "--engine.gpu-memory-utilization=0.6"),
            "engine.gpu_memory_utilization 0.6 for each of 2 generators are 1.2 of the memory",
        ),
    ],
)
def test_plan_is_refused_for(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        doctor.main(["plan", *words])
    assert message in str(caught.value)


def test_fractions_of_two_machines_are_planned_by_role(model: str) -> None:
    words = (model, "--memory=40", "--engine.gpu-memory-utilization=0.6")
    assert plan(*words, "--role=generator") == 0


def test_fractions_of_one_machine_may_add_up_to_one(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fractions = ("--train.memory-fraction=0.6", "--engine.gpu-memory-utilization=0.4")
    assert plan(model, SMALL, "--memory=40", *fractions) == 0
    out = capsys.readouterr().out
    assert " of 24.00 GiB needed" in out and " of 16.00 GiB needed" in out


def test_engine_that_this_machine_lacks_is_only_noted_for_another_machine(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Quantized weights need the engine mlx."""
    words = ("--role=generator", "--engine.quantize=4", "--engine.name=native")
    assert plan(*words) == 1
    assert plan(*words, "--memory=64") == 0
    assert "note  engine    engine.quantize 4 is not an option of" in capsys.readouterr().out
