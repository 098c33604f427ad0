"""Remote environments and evaluations by generators, with real programs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_programs import RealRun, until

from peralta_zmq import wire
from peralta_zmq.observe.metrics import read_rows
from peralta_zmq.trainer import journal
from tools.link_proxy import free_ports

# No reward is 0 here, so that a 0 would reveal a failure.
NEVER_ZERO = """
from peralta_zmq.environments.calculator import problems

def reward(problem, completion_text):
    return 0.5 + 0.5 * (len(completion_text) % 2)
"""


@pytest.fixture
def port() -> int:
    return free_ports()


@pytest.fixture
def run(tmp_path: Path, port: int) -> Iterator[RealRun]:
    """Two environments, one of them remote."""
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "generous.py").write_text(NEVER_ZERO)
    (tmp_path / "two.toml").write_text(
        f"""
        [[env]]
        task = "pkg.generous"
        name = "remote"
        address = "http://127.0.0.1:{port}"
        [[env]]
        task = "calculator"
        train = "math_10k"
        sampling = {{ num_generations = 3, temperature = 0.7, max_completion_length = 7 }}
        rollouts_per_example = 1
        [curriculum]
        env_ratios = [1, 1]
        """
    )
    opened = RealRun(
        tmp_path, "--eval.rollouts-per-example", "2", "@", str(tmp_path / "two.toml"),
        "--verifier.port", str(port),
    )  # fmt: skip
    yield opened
    opened.close()


def groups_of(run: RealRun) -> Iterator[tuple[str, list[float]]]:
    """Environment and rewards of every group in the journal."""
    for step in journal.files_in(run.folder / "journal"):
        for record in journal.read_records(run.folder / "journal", step)[0]:
            if record.kind == journal.GROUP:
                group = wire.decode_group(record.content, wire.GroupLimits(1 << 20))
                yield group.task, group.rewards


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_killed_verifier_delays_rewards_and_changes_none(run: RealRun, tmp_path: Path) -> None:
    environment = {"PYTHONPATH": str(tmp_path)}
    verifier = run.start("verifier", log="verifier", environment=environment)
    trainer = run.trainer("--train.max-steps=8", environment=environment)
    generator = run.generator("ann", environment=environment)
    until(lambda: run.step >= 2, verifier, trainer, generator)
    verifier.kill()
    until(lambda: "waiting for the verifier" in generator.printed, trainer, generator)
    run.start("verifier", log="verifier", environment=environment)
    assert trainer.wait(timeout=60) == 0, trainer.printed
    assert generator.wait(timeout=20) == 0, generator.printed
    assert (
        "the verifier responds again" in generator.printed and "lost group" not in generator.printed
    )
    rewards = {name: [] for name in ("remote", "calculator")}
    for name, found in groups_of(run):
        rewards[name] += found
    assert len(rewards["remote"]) == pytest.approx(len(rewards["calculator"]), rel=0.5)
    assert set(rewards["remote"]) <= {0.5, 1.0}
    assert json.loads((run.folder / "summary.json").read_text())["accounting"]["lost"] == 0


@pytest.mark.timeout(120)
def test_generators_evaluate_while_training_goes_on(run: RealRun, tmp_path: Path) -> None:
    environment = {"PYTHONPATH": str(tmp_path)}
    run.start("verifier", log="verifier", environment=environment)
    settings = ["--train.max-steps=8", "--eval.interval=3"]
    trainer = run.trainer(*settings, environment=environment)
    generator = run.generator("ann", *settings, environment=environment)
    assert trainer.wait(timeout=90) == 0, trainer.printed
    assert generator.wait(timeout=20) == 0, generator.printed
    rows = {int(str(row["step"])): row for row in read_rows(run.folder / "eval.jsonl")}
    assert sorted(rows) in ([3, 6, 8], [3, 8])  # the run may end before the second evaluation
    assert rows[3]["policy_steps"][0] >= 3
    names = ["remote/avg@2", "remote/pass@1", "remote/pass@2",
             "calculator/avg@1", "calculator/pass@1"]  # fmt: skip
    assert list(rows[3]["figures"]) == names
    accounting = json.loads((run.folder / "summary.json").read_text())["accounting"]
    assert accounting["evaluated"] >= 8  # 4 examples of each of two environments
    assert run.broken(max_steps=8) == {}
    sizes = {(name, len(rewards)) for name, rewards in groups_of(run)}
    assert sizes == {("remote", 4), ("calculator", 3)}
    for row in read_rows(run.folder / "metrics.jsonl"):
        assert 16 <= row["num_rollouts"] < 20
        assert row["mismatch_kl"] < 1e-3  # the trainer has the temperature of each environment
