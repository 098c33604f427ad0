"""Steps whose groups arrive slowly: computed while they arrive, or when all of them are there.

A trainer of the embedded model takes steps of 8 groups with 8 completions of 24 to 48 random
tokens, in 4 micro-batches. A scripted generator, which needs no processor, begins a step when the
trainer does, as with train.max_async_level 0, and sends a group every RATIO times the seconds in
which the trainer computes one. Two steps of each kind are taken by turns. Takes less than a minute.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, redirect_stdout
from dataclasses import dataclass
from functools import partial

import numpy as np

from benchmarks.harness import Claim, compared, progress
from peralta_zmq import wire
from peralta_zmq.config import load_config
from peralta_zmq.observe.metrics import METRICS, number, read_rows
from peralta_zmq.rollout import Rollout, RolloutGroup
from peralta_zmq.trainer.loop import Trainer
from tools.link_proxy import free_ports

RATIO = 1.5  # seconds from group to group, per second of computing one
NUM_GROUPS, NUM_COMPLETIONS, NUM_PROMPT, LENGTHS = 8, 8, 31, (24, 48)
WARM_UP = 4  # steps before the first measured one; the second of them gives the rate
NUM_STEPS, NUM_QUICK_STEPS = 20, 8  # measured ones, a multiple of 4
SETTINGS = (
    f"--train.batch-size={NUM_GROUPS * NUM_COMPLETIONS}",
    f"--sampling.num-generations={NUM_COMPLETIONS}",
    "--train.max-tokens-per-microbatch=768",  # about two groups
    "--train.max-off-policy-steps=1000", "--train.max-mismatch-kl=1000000",
    "--checkpoint.interval=1000", "--no-eval.eval-base-model", "--eval.num-examples=1",
    "--no-dashboard.enabled",
)  # fmt: skip
REQUIRED = {"streaming_step_vs_whole": 1.1}


@dataclass(frozen=True, slots=True)
class Step:
    """Measurements of a training step, in seconds."""

    seconds: float
    delay: float  # from the last group that was sent to the end of the step
    waiting: float
    overlapped: float  # of computing before the last group was there


def run(*, quick: bool) -> Iterator[Claim]:
    """Measure and yield the claims."""
    streaming, whole = measured(NUM_QUICK_STEPS if quick else NUM_STEPS)
    for name, field, unit in (
        ("streaming_step_vs_whole", "seconds", "s per step"),
        ("streaming_delay_vs_whole", "delay", "s from the last group to the end of the step"),
    ):
        ours, peer = ([getattr(step, field) for step in side] for side in (streaming, whole))
        yield compared(name, ours, peer, unit, less_is_better=True)
    ours, peer = map(_waiting_share, (streaming, whole))
    yield Claim("streaming_waiting_share", ours, "of the time", peer=peer, n=len(streaming))


def measured(num_steps: int) -> tuple[list[Step], list[Step]]:
    """The steps that were computed while groups arrived, and those that were not."""
    sides, last_step = (list[Step](), list[Step]()), WARM_UP + num_steps
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr), ExitStack() as stack:
        port = free_ports()
        address = ("--run.dir", folder, "--wire.port", str(port))
        max_steps = f"--train.max-steps={last_step + 1}"
        trainer = Trainer(load_config("bin/trainer", [*SETTINGS, *address, max_steps]), stack)
        trainer.recover()
        generator = Generator(trainer.session.run_id)
        sending = partial(generator.send, f"tcp://127.0.0.1:{port}", last_step)
        thread = threading.Thread(target=sending, daemon=True)
        thread.start()
        compute = trainer.accumulation.compute
        for step in range(1, last_step + 1):
            is_streaming = step % 4 < 2
            trainer.accumulation.compute = compute if is_streaming else lambda: 0.0
            generator.begun.release()
            trainer.advance()
            delay = time.monotonic() - generator.last_sent
            row = read_rows(trainer.session.folder / METRICS)[-1]
            if step == WARM_UP // 2:
                generator.interval = RATIO * number(row, "time/forward_backward") / NUM_GROUPS
                progress(f"a group every {generator.interval:.3f} s")
            if step > WARM_UP:
                names = ("time/wait_for_batch", "time/overlapped")
                waiting, overlapped = (number(row, name) for name in names)
                measurements = Step(number(row, "step_time"), delay, waiting, overlapped)
                sides[not is_streaming].append(measurements)
        thread.join()
    return sides


def _waiting_share(steps: Sequence[Step]) -> float:
    """Share of the time in which the trainer waited for groups."""
    return sum(step.waiting for step in steps) / sum(step.seconds for step in steps)


class Generator:
    """Sends the groups of one step after the other; `interval` is in seconds."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self.interval = 0.0
        self.begun = threading.Semaphore(0)  # released when the trainer begins a step
        self.last_sent = 0.0  # monotonic seconds before the newest group was sent

    def send(self, address: str, num_steps: int) -> None:
        """Send the groups of `num_steps` steps."""
        random = np.random.default_rng(0)
        with closing(wire.RolloutSender(address, hwm=1000)) as sender:
            for sequence in range(num_steps * NUM_GROUPS):
                if sequence % NUM_GROUPS == 0:
                    self.begun.acquire()
                frame = wire.encode_group(group(random, sequence, run_id=self._run_id))
                time.sleep(self.interval)
                self.last_sent = time.monotonic()
                assert sender.send(frame, timeout=60)


def group(random: np.random.Generator, sequence: int, *, run_id: str) -> RolloutGroup:
    """Completions of random tokens after one prompt; half of them have reward 1."""
    prompt, rollouts = random.integers(3, 64, NUM_PROMPT), list[Rollout]()
    for index in range(NUM_COMPLETIONS):
        length = int(random.integers(*LENGTHS, endpoint=True))
        mask = np.arange(NUM_PROMPT + length) >= NUM_PROMPT
        rollouts.append(
            Rollout(
                token_ids=np.append(prompt, random.integers(3, 64, length)).astype(np.int32),
                loss_mask=mask,
                logprobs=np.where(mask, -4.0, 0.0).astype(np.float32),
                policy_steps=np.where(mask, 0, -1).astype(np.int32),
                reward=float(index % 2),
                finish_reason="stop",
            )
        )
    return RolloutGroup(run_id, "ann", bytes(8), sequence, "", "calculator", 0, "", tuple(rollouts))
