"""Limits of [early_stop]: which steps count, and how the trainer ends and continues."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from sample_data import group_of
from trainer_sessions import CONTINUED_SETTINGS

from peralta_zmq import atomic_files, wire
from peralta_zmq.config import load_config
from peralta_zmq.config.training_sections import EarlyStopSection
from peralta_zmq.errors import TrainingError
from peralta_zmq.observe.metrics import EVENTS, METRICS, read_rows
from peralta_zmq.trainer import trainer
from peralta_zmq.trainer.early_stop import EarlyStop
from peralta_zmq.trainer.session import known_run_id
from tools.link_proxy import free_ports


@pytest.mark.parametrize(
    ("limits", "metric", "values", "stopped_at"),
    [
        ({}, "entropy", [0.0] * 9, 0),
        ({"min_entropy": 0.5}, "entropy", [0.4, 0.5, 0.4, 0.3], 4),  # 0.5 is within the limit
        ({"min_entropy": 0.5}, "entropy", [0.4, math.nan, 0.4], 0),
        ({"max_reward": 0.9}, "reward", [0.95, 1.0, 0.5], 2),
        ({"max_reward": 0.9}, "other", [1.0, 1.0], 0),
    ],
)
def test_limit_exceeded_in_consecutive_steps_ends_the_run(
    limits: Mapping[str, float], metric: str, values: Sequence[float], stopped_at: int
) -> None:
    early_stop = EarlyStop(EarlyStopSection(**limits), patience=2)
    reached = 0
    for step, value in enumerate(values, start=1):
        early_stop.update(step, {metric: value})
        reached = reached or (step if early_stop.reason else 0)
    assert reached == stopped_at


def session(folder: Path, *more: str) -> str:
    """Run a trainer that gets groups with the rewards 1, 0, 0, 0; returns its last message."""
    port = free_ports()
    arguments = [*CONTINUED_SETTINGS, "--run.dir", str(folder), "--wire.port", str(port), *more]
    config = load_config("bin/trainer", [*arguments, "--train.max-steps=22"])
    ended = threading.Event()

    def send() -> None:
        with closing(wire.RolloutSender(f"tcp://127.0.0.1:{port}", hwm=1000)) as sender:
            while (run_id := known_run_id(config.run_folder)) is None and not ended.is_set():
                ended.wait(0.01)
            for number in range(44):
                frame = wire.encode_group(
                    group_of([1, 0, 0, 0], run_id=run_id, group_number=number, seed=number)
                )
                sender.send(frame, timeout=5)
            ended.wait(60)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        trainer.run(config)
    except TrainingError as error:
        return str(error)
    finally:
        ended.set()
        thread.join()
    return ""


@pytest.mark.slow  # starts three trainers
def test_stopped_run_is_saved_and_the_same_command_continues(tmp_path: Path) -> None:
    limit = "--early-stop.max-reward=0.2"
    run = tmp_path / "demo"
    assert session(tmp_path, limit) == (
        "stopped early after step 10: reward 0.25 is above early_stop.max_reward 0.2, in 10 steps "
        "in a row. A checkpoint is saved. The same command continues, and stops again after 10 "
        "such steps; change the limit, or go back with --run.fork and --run.from-step"
    )
    assert [*atomic_files.steps_in(run / "checkpoints")] == [10]
    assert session(tmp_path, limit).startswith("stopped early after step 20: ")
    assert session(tmp_path, limit) == ""  # the last step completes the run
    assert [row["step"] for row in read_rows(run / METRICS)] == [*range(1, 23)]
    kinds = [row["event"] for row in read_rows(run / EVENTS)]
    assert kinds.count("early_stop") == 2 and kinds[-1] == "complete"
