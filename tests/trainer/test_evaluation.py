"""Evaluations of the base model and of the last step, by generators and the trainer together."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import pytest
from sample_data import group_of
from trainer_sessions import Continued, Session

from peralta_zmq import wire
from peralta_zmq.environments.curriculum import is_in_bitmap
from peralta_zmq.observe.metrics import ANSWERS, EVALUATIONS, EVENTS, read_rows
from peralta_zmq.rollout import RolloutGroup
from peralta_zmq.trainer.trainer import Trainer

pytestmark = pytest.mark.timeout(120)
SETTINGS = ("--eval.num-examples=6", "--eval.eval-base-model", "--engine.slots=2")


def answers_for(trainer: Trainer, ids: list[str], *, first: int = 0) -> list[RolloutGroup]:
    """Groups of a generator that answer the held-out problems with these ids."""
    step = trainer.step
    return [
        group_of([0.5], lengths=[2], seed=number, group_number=first + number, problem_id=id,
                 policy_step=step, evaluation_step=step, run_id=trainer.session.run_id)
        for number, id in enumerate(ids)
    ]  # fmt: skip


def held_out_ids(trainer: Trainer) -> list[str]:
    return [problem.id for problem in trainer.evaluations.held_out.problems]


def rewards_of(trainer: Trainer) -> list[float]:
    """Rewards of all recorded answers; 0.5 is only given to those of a generator."""
    return [row["rewards"][0] for row in read_rows(trainer.session.folder / ANSWERS)]


def test_base_model_is_evaluated_by_a_generator(continued: Continued, stack: ExitStack) -> None:
    trainer = continued.open(stack, *SETTINGS, max_steps=2)
    trainer.recover()
    for group in answers_for(trainer, held_out_ids(trainer)):
        continued.send(group)
    trainer.evaluate_base()
    assert rewards_of(trainer).count(0.5) >= 4  # the trainer has sampled the last two meanwhile
    (row,) = read_rows(trainer.session.folder / EVALUATIONS)
    assert (row["step"], row["num_examples"], row["policy_steps"]) == (0, 6, [0, 0])
    assert trainer.session.announcer.announcement.evaluation_step is None


def test_generator_that_leaves_does_not_delay_the_evaluation(
    continued: Continued, stack: ExitStack
) -> None:
    trainer = continued.open(stack, *SETTINGS, max_steps=2)
    trainer.recover()
    ids = held_out_ids(trainer)
    announced: list[tuple[int | None, bool]] = []

    def answer_one() -> None:
        announcement = trainer.session.announcer.announcement
        announced.append((announcement.evaluation_step, is_in_bitmap(announcement.answered, 0)))
        trainer.evaluations.receive(answers_for(trainer, ids[:1])[0])  # and then nothing

    for _ in trainer.evaluations.evaluate(0):
        answer_one()
    rewards = rewards_of(trainer)
    assert len(rewards) == 6 and rewards[0] == 0.5 and 0.5 not in rewards[1:]
    assert announced[0] == (0, False) and announced[-1] == (0, True)


def test_training_groups_wait_while_the_base_model_is_evaluated(
    continued: Continued, stack: ExitStack
) -> None:
    trainer = continued.open(stack, *SETTINGS, max_steps=2)
    trainer.recover()
    trainer.evaluations.head_start_seconds = 0.1
    for number in range(5):  # a step has two
        group = group_of(
            [1, 0, 0, 0], group_number=number, seed=number, run_id=trainer.session.run_id
        )
        continued.send(group)
    trainer.evaluate_base()
    assert len(rewards_of(trainer)) == 6
    assert len(trainer.collector.batch) == 2
    for step in (1, 2):
        trainer.advance()
        assert trainer.step == step
    assert trainer.collector.admission.ledger.outcomes["trained"] == 4


def finish_with(folder: Path, send: Callable[[Trainer, wire.RolloutSender], None]) -> Trainer:
    """A trainer that has ended after its last step, and `send` before its last evaluation."""
    with ExitStack() as stack:
        session = Session(stack, folder, "--train.max-steps=4", *SETTINGS)
        trainer = session.trainer
        while trainer.unfinished:
            trainer.advance()
        address = f"tcp://127.0.0.1:{trainer.session.config.wire.port}"
        sender = stack.enter_context(closing(wire.RolloutSender(address, hwm=100)))
        send(trainer, sender)
        trainer.finish()
    return trainer


def test_last_step_is_evaluated_by_a_generator_before_the_run_is_done(tmp_path: Path) -> None:
    def answer(trainer: Trainer, sender: wire.RolloutSender) -> None:
        for group in answers_for(trainer, held_out_ids(trainer)):
            bob = replace(group, generator_id="bob")
            assert sender.send(wire.encode_group(bob), timeout=5)
        done.append(trainer.session.announcer.announcement.done)

    done: list[bool] = []
    trainer = finish_with(tmp_path, answer)
    assert rewards_of(trainer).count(0.5) >= 4
    assert done == [False] and trainer.session.announcer.announcement.done
    assert read_rows(trainer.session.folder / EVENTS)[-1]["event"] == "complete"


def test_groups_that_arrive_after_the_last_step_are_abandoned(tmp_path: Path) -> None:
    trainer = finish_with(tmp_path, lambda trainer, sender: None)
    counts = trainer.collector.accounting()
    assert counts["abandoned"] > 0 and counts["trained"] == 16
    with ExitStack() as stack:  # started again
        again = Session(stack, tmp_path, "--train.max-steps=4", *SETTINGS).trainer
        again.finish()
        assert again.collector.accounting()["abandoned"] == counts["abandoned"]
