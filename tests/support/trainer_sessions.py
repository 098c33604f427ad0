"""Sessions of a run: trainers in this process that one test opens one after the other."""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from sample_data import group_of

from peralta_zmq import wire
from peralta_zmq.config import load_config
from peralta_zmq.models import lora
from peralta_zmq.observe.metrics import METRICS, read_rows
from peralta_zmq.rollout import RolloutGroup
from peralta_zmq.trainer import replay
from peralta_zmq.trainer.generator_registry import RegistryLimits
from peralta_zmq.trainer.trainer import Trainer
from tools.link_proxy import free_ports

STEPS = 8
# Makes bin/replay compute with one thread, like a trainer in a test (conftest.py): the number of
# threads can change the last bits of a product.
ONE_THREAD = "--run.num-workers=1024"
SETTINGS = (
    *("--sampling.num-generations=4", "--train.batch-size=16", f"--train.max-steps={STEPS}"),
    *("--train.learning-rate=0.01", "--train.lr-scheduler-type=cosine", "--train.warmup-steps=3"),
    "--sampling.temperature=1.2",
    *("--curriculum.easy-threshold=0.75", "--curriculum.hard-threshold=0.25"),
    *("--curriculum.online-difficulty-filtering", "--no-eval.eval-base-model"),
    *("--eval.num-examples=2", "--checkpoint.interval=2", ONE_THREAD),
    "--dashboard.port=None",
)
CONTINUED_SETTINGS = (
    *("--sampling.num-generations=4", "--train.batch-size=8", "--train.learning-rate=0.01"),
    *("--no-eval.eval-base-model", "--eval.num-examples=1", ONE_THREAD),
    *("--checkpoint.keep-journal", "--dashboard.port=None"),
)  # fmt: skip


def groups_for(trainer: Trainer) -> list[RolloutGroup]:
    """More groups than all steps need; some are filtered, some exclude their problem."""
    rng = random.Random(7)
    ids = list(trainer.collector.curriculum.pools._positions)
    return [
        group_of(
            [float(rng.random() < 0.5) for _ in range(4)],
            lengths=[rng.randint(2, 9) for _ in range(4)],
            seed=number, group_number=number, sample_index=3 * number,
            problem_id=ids[rng.randrange(12)], run_id=trainer.session.run_id,
        )
        for number in range(STEPS * 6)
    ]  # fmt: skip


class Session:
    """A trainer that receives all groups again from the first one, like resends of a generator."""

    def __init__(self, stack: ExitStack, folder: Path, *more: str) -> None:
        port = free_ports()
        arguments = [*SETTINGS, "--run.dir", str(folder), "--wire.port", str(port), *more]
        self.trainer = Trainer(load_config("bin/trainer", arguments), stack)
        # No generator sends a final status.
        self.trainer.generators.limits = RegistryLimits(final_status_seconds=0.1)
        self.trainer.evaluations.head_start_seconds = 0.1
        self.trainer.recover()
        sender = wire.RolloutSender(f"tcp://127.0.0.1:{port}", hwm=1000)
        stack.enter_context(closing(sender))
        for group in groups_for(self.trainer):
            assert sender.send(wire.encode_group(group), timeout=5)

    def advance(self) -> dict[str, Any]:
        """Take one step; returns the state after it."""
        self.trainer.advance()
        learner = self.trainer.policy.learner
        return {
            "step": learner.step,
            "tensors": {name: each.clone() for name, each in learner.state().items()},
            "rate": read_rows(self.trainer.session.folder / METRICS)[-1]["learning_rate"],
            "pools": self.trainer.collector.curriculum.pools.saved(),
            "excluded": self.trainer.session.announcer.announcement.excluded,
            "next_sample_index": self.trainer.collector.state()["next_sample_index"],
            "outcomes": dict(self.trainer.collector.admission.ledger.outcomes),
        }


def weights_of(trainer: Trainer) -> str:
    """The digest of the trainer's weights as it publishes them."""
    return replay.weights_sha256(lora.published_weights(trainer.policy.model))


def states_of(folder: Path, num_steps: int, *more: str) -> list[dict[str, Any]]:
    """The state after each step of a session of `num_steps` steps."""
    with ExitStack() as stack:
        session = Session(stack, folder, *more)
        return [session.advance() for _ in range(num_steps)]


class Continued:
    """Sessions of one run with growing `train.max_steps` and a falling learning rate."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "demo"
        self._arguments = [*CONTINUED_SETTINGS, "--run.dir", str(folder)]

    def open(self, stack: ExitStack, *more: str, max_steps: int) -> Trainer:
        """Open a trainer that has not recovered yet."""
        port = free_ports()
        session_settings = ["--train.max-steps", str(max_steps), "--wire.port", str(port)]
        trainer = Trainer(
            load_config("bin/trainer", [*self._arguments, *session_settings, *more]), stack
        )
        self._sender = wire.RolloutSender(f"tcp://127.0.0.1:{port}", hwm=1000)
        stack.enter_context(closing(self._sender))
        return trainer

    @contextmanager
    def session(
        self, *more: str, max_steps: int, until: int | None = None
    ) -> Generator[Trainer, None, None]:
        """A trainer that has recovered, and taken the steps until `until`."""
        with ExitStack() as stack:
            trainer = self.open(stack, *more, max_steps=max_steps)
            trainer.recover()
            if until is not None:
                self.feed(trainer, groups_for(trainer), until=until)
            yield trainer

    def train(self, *more: str, max_steps: int, until: int) -> None:
        """Take the steps until `until` in a session without an orderly end."""
        with self.session(*more, max_steps=max_steps, until=until):
            pass

    def replay(self, capsys: pytest.CaptureFixture[str], run: str = "demo") -> list[str]:
        """The result of each step that bin/replay repeats, such as "as published"."""
        capsys.readouterr()
        assert replay.main([str(self.folder.with_name(run))]) == 0
        return [line.split("  ")[-1] for line in capsys.readouterr().out.splitlines()]

    def send(self, group: RolloutGroup) -> None:
        """Send a group to the open trainer."""
        assert self._sender.send(wire.encode_group(group), timeout=5)

    def feed(self, trainer: Trainer, groups: Sequence[RolloutGroup], *, until: int) -> None:
        """Send groups and take steps until `until`; publish each step."""
        for group in groups:
            self.send(group)
        while trainer.policy.learner.step < until:
            trainer.advance()
            trainer.publishing.wait()  # a newer version would replace a waiting one
