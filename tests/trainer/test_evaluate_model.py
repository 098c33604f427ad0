"""bin/evaluate: the held-out reward of a model, and of the weights of a run, without training."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from trainer_sessions import Continued

from peralta_zmq.errors import ConfigError, StoreError
from peralta_zmq.rollout import Answer, Message, Problem
from peralta_zmq.trainer.evaluate_model import main, report_text

NUM_EXAMPLES = 8
FAST = ("--model.device=cpu", f"--eval.num-examples={NUM_EXAMPLES}", "--engine.slots=8")


def evaluated(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Print the evaluation with a few examples; returns its output."""
    capsys.readouterr()
    main([arguments[0], *FAST, *arguments[1:]])
    return capsys.readouterr().out


def result_of(printed: str) -> str:
    """The line with the reward."""
    return next(line for line in printed.splitlines() if " standard error " in line)


@pytest.fixture
def run(tmp_path: Path) -> Continued:
    """A run of two steps, whose weights are published."""
    run = Continued(tmp_path)
    with run.session("--eval.num-examples=8", max_steps=4, until=2) as trainer:
        trainer.publishing.wait()
    return run


def test_model_is_evaluated_with_the_settings_of_a_trainer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    printed = evaluated(capsys, "embedded", "--train.learning-rate", "1", "--data.train=math_1k")
    assert re.fullmatch(
        r"reward      0\.\d{3}, standard error 0\.\d{3}, n 8 problems, 8 answers",
        result_of(printed),
    )
    assert printed.count("\nexpected    ") == 4 and "\nembedded\n" in printed
    several = evaluated(capsys, "embedded", "--eval.rollouts-per-example=2")
    assert "n 8 problems, 16 answers" in several and "calculator/pass@2 " in several


def test_run_is_evaluated_at_its_newest_step_or_another(
    run: Continued, capsys: pytest.CaptureFixture[str]
) -> None:
    base = result_of(evaluated(capsys, "embedded"))
    at_start = evaluated(capsys, str(run.folder), "--step", "0")
    assert f"\n{run.folder}, step 0\n" in at_start and result_of(at_start) == base
    newest = evaluated(capsys, str(run.folder))
    assert f"\n{run.folder}, step 2\n" in newest


def test_moved_run_is_evaluated(run: Continued, capsys: pytest.CaptureFixture[str]) -> None:
    moved = run.folder.rename(run.folder.with_name("moved"))
    assert f"\n{moved}, step 2\n" in evaluated(capsys, str(moved))


@pytest.mark.parametrize(("arguments", "message"), [
    ([], "must come first: bin/evaluate runs/demo, or bin/evaluate MODEL"),
    (["@", "configs/demo.toml"], "the run folder or the model must come first"),
    (["embedded", "--step", "3"], "--step 3 needs a run, but embedded has no config.toml"),
    (["embedded", "--model", "x"], "did you mean --model.name x"),
])  # fmt: skip
def test_wrong_arguments_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        main(arguments)


def test_step_without_weights_is_refused(run: Continued) -> None:
    with pytest.raises(StoreError, match=r"no version of step 7 in .*; available steps: 0, 1, 2"):
        main([str(run.folder), *FAST, "--step=7"])


def problem(answer: str) -> Problem:
    return Problem(answer, "sums", (Message("user", f"which is {answer}?"),), answer)


def test_report_has_the_standard_error_over_problems_and_whole_answers() -> None:
    results = [
        (problem("1"), [Answer("which is 1?", "one\n" * 60, 1.0), Answer("which is 1?", "1", 0.0)]),
        (problem("2"), [Answer("which is 2?", "2", 1.0, cut_off=True), Answer("q", "2", 1.0)]),
    ]
    printed = report_text("model", results)
    # rewards .5 and 1: the mean is .75, the standard deviation .354
    assert "\nreward      0.750, standard error 0.250, n 2 problems, 4 answers\n" in printed
    assert "\ncut off     25%\n" in printed and "sums/avg@2 0.750" in printed
    assert printed.startswith("problem     which is 1?\nexpected    1\nanswer      one one ")
    assert printed.count("one") == 60
    single = report_text("model", results[:1])
    assert "\nreward      0.500, standard error -, n 1 problems, 2 answers\n" in single
