"""The trainer's loop: groups in, optimizer steps, weights out.

Knows the config and every leaf; knows nothing of the generator's loop. Killed at any moment it
goes on from the newest checkpoint and the journal, with nothing trained twice.
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import signal
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from types import FrameType
from typing import IO

import torch

from peralta_zmq import durable, policy, registry, tasks, wire
from peralta_zmq.config import RESOLVED, Config, check_same_run, write_resolved
from peralta_zmq.engines.evaluate import evaluate
from peralta_zmq.errors import ConfigError, StoreError
from peralta_zmq.learning.admission import Admission, Ledger
from peralta_zmq.learning.learner import Learner
from peralta_zmq.learning.schedules import learning_rate
from peralta_zmq.observe.books import Books
from peralta_zmq.recovery import checkpoint
from peralta_zmq.recovery.journal import Journal
from peralta_zmq.rollout import Problem, RolloutGroup
from peralta_zmq.stores.directory import DirectoryStore

ANNOUNCE_SECONDS = 1.0
SILENCE_SECONDS = 30.0  # a generator unheard for so long is gone
NO_SIGNAL_STEPS = 20  # without signal before we say so
IDENTITY, LOCK = "RUN.json", "lock"


def run(config: Config) -> None:
    """Train to `train.max_steps`, from wherever an earlier start was ended.

    Raises ConfigError, TaskError, WireError, StoreError or JournalError before anything is
    written when a setting, a file, the port or a folder is at fault.
    """
    policy.use_threads(config.train.num_workers)
    check_same_run(config, config.run_folder)
    with ExitStack() as stack:
        trainer = Trainer(config, stack)
        trainer.recover()
        trainer.evaluate_base()
        while trainer.unfinished:
            trainer.advance()
        trainer.finish()


class Trainer:
    """One session of a run: what it holds open, and what it does with it."""

    def __init__(self, config: Config, stack: ExitStack) -> None:
        self._config, self._folder = config, config.run_folder
        self._boot = os.urandom(8)
        self._version = -1  # number of the newest published weights
        on_policy = config.train.max_async_level == 0
        self._admission = Admission(0 if on_policy else config.train.max_off_policy_steps)
        self._pending: list[RolloutGroup] = []  # admitted, not yet trained
        self._heard: dict[str, tuple[str, float]] = {}  # generator -> sender, time of last group
        self._announced = 0.0
        self._saved_step = -1
        self._steps_without_signal = 0
        self._stopping = False
        self._open_model()
        self._open_sockets(stack)
        self._open_folders(stack)
        signal.signal(signal.SIGINT, self._stop)
        signal.signal(signal.SIGTERM, self._stop)

    @property
    def unfinished(self) -> bool:
        """Whether there is a step to take and nobody asked us to stop."""
        return self._learner.step < self._config.train.max_steps and not self._stopping

    def recover(self) -> None:
        """Restore the newest checkpoint, replay the journal after it, publish what is missing."""
        saved = checkpoint.restore(self._folder / "checkpoints", run_id=self._run_id)
        if saved is not None:
            self._learner.restore(saved.step, saved.tensors)
            self._admission.ledger = Ledger(saved.progress["ledger"])
            self._saved_step = saved.step
        start = self._learner.step
        self._replay()
        step = self._learner.step
        if step >= self._config.train.max_steps:
            self._books.note(f"run complete: {step} steps; delete {self._folder} to start anew")
        elif self._books.resuming:
            self._books.note(f"resumed: step={step} checkpoint={start} replayed={step - start}")
        if self.unfinished:
            event = "resume" if self._books.resuming else "start"
            self._books.event(event, step=step, checkpoint=start, replayed=step - start)
        newest = self._store.newest()
        if newest is None or newest.step != step:
            self._publish()
        else:
            self._version = newest.number

    def evaluate_base(self) -> None:
        """Greedy accuracy of the untrained model, once per run."""
        if self._config.eval.eval_base_model and self._learner.step == 0:
            self._evaluate()

    def advance(self) -> None:
        """One optimizer step: collect, learn, publish, record, save."""
        started = time.monotonic()
        groups, depth = self._collect()
        if self._stopping:
            return
        collected = time.monotonic()
        row = self._learner.learn(groups)
        # We heard nobody while we computed: that is no silence of theirs.
        busy = time.monotonic() - collected
        self._heard = {name: (sender, at + busy) for name, (sender, at) in self._heard.items()}
        publishing = self._publish()
        row |= {
            "queue/depth": depth,
            "time/wait_for_batch": collected - started,
            "time/publish": publishing,
        }
        self._record(groups, row, step_time=time.monotonic() - started)
        if self._learner.step % self._config.checkpoint.interval == 0:
            self._save()

    def finish(self) -> None:
        """Save; then close the run, or say how to resume it."""
        self._save()
        if self._learner.step < self._config.train.max_steps:
            step = self._learner.step
            self._books.note(f"stopped after step {step}, saved; the same command resumes it")
            return
        self._announce(done=True)
        self._evaluate()
        newest = self._store.newest()
        self._books.close_run(newest.folder if newest else self._store.folder)

    # Opening: everything that can be refused is tried before anything is written.

    def _open_model(self) -> None:
        config = self._config
        task = registry.resolve("task", config.task.name)
        tasks.load(task, "train", seed=config.run.seed, options=config.data_options)
        problems = tasks.load(task, "eval", seed=config.run.seed, options=config.data_options)
        limit = config.eval.num_examples
        self._problems: Sequence[Problem] = problems if limit < 0 else problems[:limit]
        self._reward = task.reward
        self._model_folder = policy.model_folder(config.model.name)
        device = policy.choose_device(config.model.device)
        self._tokenizer = policy.load_tokenizer(self._model_folder)
        self._model = policy.load_model(self._model_folder, device=device, dtype=torch.float32)
        self._vocab_size = int(self._model.config.vocab_size)
        self._learner = make_learner(config, self._model)
        self._engine = registry.resolve("engine", config.engine.name)(self._model, self._tokenizer)

    def _open_sockets(self, stack: ExitStack) -> None:
        wires = self._config.wire
        self._run_id = run_id_of(self._folder, self._config.run.name)
        address = f"tcp://{wires.bind}:{wires.port}"
        keys = self._config.keys_folder
        gate = stack.enter_context(closing(wire.Gate(keys))) if keys else None
        self._receiver = wire.RolloutReceiver(
            address, run_id=self._run_id, vocab_size=self._vocab_size, hwm=wires.hwm, gate=gate
        )
        stack.enter_context(closing(self._receiver))
        self._announcer = wire.Announcer(wire.next_port(address), gate=gate)
        stack.enter_context(closing(self._announcer))

    def _open_folders(self, stack: ExitStack) -> None:
        self._store = DirectoryStore(self._config.weights_folder)
        is_new = not (self._folder / IDENTITY).exists()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(closing(_locked(self._folder)))
            # Our identity first: a weights folder that we claim must never be a stranger's to us.
            identity = json.dumps({"run_id": self._run_id}) + "\n"
            durable.replace_file(self._folder / IDENTITY, identity.encode())
            write_resolved(self._config, self._folder)
        except OSError as error:
            raise ConfigError(
                f"run folder {self._folder} cannot be written ({error.strerror}); "
                "choose another with --run.dir"
            ) from None
        try:
            self._store.claim(self._run_id)
        except StoreError:
            if is_new:
                _remove_new(self._folder)
            raise
        self._journal = stack.enter_context(closing(Journal(self._folder / "journal")))
        name, max_steps = self._config.run.name, self._config.train.max_steps
        self._books = stack.enter_context(Books(self._folder, run=name, max_steps=max_steps))

    # One step.

    def _collect(self) -> tuple[list[RolloutGroup], int]:
        """Admitted groups of at least `batch_size` rollouts, and how many were already queued."""
        step, depth, queued = self._learner.step + 1, 0, True
        started = said = time.monotonic()
        while _num_rollouts(self._pending) < self._config.train.batch_size:
            self._announce()
            if self._stopping:
                return [], depth
            received = self._receiver.receive(timeout=0.005 if queued else 0.2)
            if received is None:
                queued = False
                said = self._say_silence(started, said)
                continue
            depth += queued
            started = said = time.monotonic()
            self._take_in(*received, step=step)
        groups, self._pending = self._pending, []
        return groups, depth

    def _take_in(self, group: RolloutGroup, frame: bytes, *, step: int) -> None:
        if group.sender != self._heard.get(group.generator_id, ("", 0.0))[0]:
            self._books.event("join", generator=group.generator_id, step=step)
        self._heard[group.generator_id] = (group.sender, time.monotonic())
        if self._admission.admit(group, step=step):
            self._journal.append(step, frame)  # on disk before it counts
            self._pending.append(group)
        self._announce(changed=True)

    def _replay(self) -> None:
        """Train again what the journal holds after the checkpoint; keep an unfinished rest."""
        while True:
            step = self._learner.step + 1
            frames = self._journal.read(step)
            groups = [wire.decode_group(each, vocab_size=self._vocab_size) for each in frames]
            for group in groups:
                self._admission.admit(group, step=step)
            if _num_rollouts(groups) < self._config.train.batch_size:
                self._pending = groups
                return
            self._record(groups, self._learner.learn(groups), step_time=0.0)

    def _publish(self) -> float:
        """Write this step's weights as bf16, or report why not; returns the seconds it took."""
        started, step = time.monotonic(), self._learner.step
        named = policy.weights_of(self._model).items()
        try:
            version = self._store.publish(
                step,
                {name: tensor.to(torch.bfloat16) for name, tensor in named},
                companions=policy.companion_files(self._model_folder),
                keep_last=self._config.weights.keep_last,
            )
        except StoreError as error:  # train on: generators serve the version they have
            self._books.event("publish_failed", step=step, reason=str(error))
            self._books.note(str(error))
        else:
            self._version = version.number
            self._books.event("publish", step=step, number=version.number, wid=version.wid)
            self._announce(changed=True)
        return time.monotonic() - started

    def _announce(self, *, changed: bool = False, done: bool = False) -> None:
        now = time.monotonic()
        if not (changed or done or now - self._announced > ANNOUNCE_SECONDS):
            return
        self._announced = now
        ledger = self._admission.ledger
        announcement = wire.Announcement(
            run_id=self._run_id,
            boot=self._boot,
            step=self._learner.step,
            version=self._version,
            recv={sender: ledger.settled(sender) for sender in self._live()},
            durable={sender: ledger.settled(sender) for sender in self._live()},
            seen={sender: ledger.seen(sender) for sender in self._live()},
            done=done,
        )
        self._announcer.announce(announcement)

    def _record(
        self, groups: Sequence[RolloutGroup], row: dict[str, float], *, step_time: float
    ) -> None:
        dropped = self._admission.dropped
        full = {
            "step": self._learner.step,
            "time": time.time(),
            **row,
            "dropped/stale": dropped["stale"],
            "dropped/duplicate": dropped["duplicate"],
            "dropped/invalid": sum(self._receiver.refused.values()),
            "generators": len(self._live()),
            "step_time": step_time,
        }
        if self._books.step(full, self._sample_of(groups[0])):
            self._warn_without_signal(groups, row["frac_reward_zero_std"])

    def _save(self) -> None:
        if self._learner.step == self._saved_step:
            return
        folder, step = self._folder / "checkpoints", self._learner.step
        progress = {"ledger": self._admission.ledger.saved()}
        snapshot = checkpoint.Checkpoint(step, self._learner.state(), progress)
        keep_last = self._config.checkpoint.keep_last
        checkpoint.save(folder, snapshot, run_id=self._run_id, keep_last=keep_last)
        self._journal.prune(checkpoint.oldest_step(folder) + 1)
        self._saved_step = step

    # What a person sees.

    def _evaluate(self) -> None:
        """Greedy accuracy on the held-out problems, once for each step."""
        step = self._learner.step
        if not self._books.has_evaluation(step):
            length = self._config.sampling.max_completion_length
            answers = evaluate(
                self._engine, self._tokenizer, self._problems, self._reward,
                max_completion_length=length,
            )  # fmt: skip
            self._books.evaluation(step, answers)

    def _sample_of(self, group: RolloutGroup) -> dict[str, object]:
        return {
            "step": self._learner.step,
            "problem": group.problem_id,
            "task": group.task,
            "generator": group.generator_id,
            "policy_step": group.policy_step,
            "rewards": group.rewards,
            "texts": [policy.text_of(self._tokenizer, r.token_ids) for r in group.rollouts],
        }

    def _warn_without_signal(self, groups: Sequence[RolloutGroup], share: float) -> None:
        self._steps_without_signal = self._steps_without_signal + 1 if share == 1.0 else 0
        if self._steps_without_signal != NO_SIGNAL_STEPS:
            return
        firsts = [group.rollouts[0] for group in groups[:3]]
        samples = "; ".join(
            f"{policy.text_of(self._tokenizer, r.token_ids[r.loss_mask])!r} -> {r.reward:g}"
            for r in firsts
        )
        self._books.note(
            f"no learning signal: 100% of groups have equal rewards for {NO_SIGNAL_STEPS} steps; "
            f"check the reward and the task's difficulty. Samples: {samples}"
        )

    def _say_silence(self, started: float, said: float) -> float:
        """Name the wait every 30 s without a group; returns when it was last named."""
        now = time.monotonic()
        if now - said < SILENCE_SECONDS:
            return said
        self._books.note(
            f"no rollouts for {now - started:.0f} s on {self._receiver.address}. "
            "Start a generator: bin/generator @ CONFIG"
        )
        return now

    def _live(self) -> list[str]:
        recently = time.monotonic() - SILENCE_SECONDS
        return [sender for sender, heard in self._heard.values() if heard > recently]

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """First signal: finish the step and save. Second: leave now."""
        signal.signal(number, signal.SIG_DFL)
        self._stopping = True


def make_learner(config: Config, model: policy.Model) -> Learner:
    """The learner that the [train], [loss] and [advantage] sections describe."""
    train = config.train
    loss_options = config.loss.model_dump(exclude={"name"}, exclude_none=True)
    advantage_options = config.advantage.model_dump(exclude={"name"}, exclude_none=True)
    return Learner(
        dict(model.named_parameters()),
        score=functools.partial(
            policy.token_logprobs, model, temperature=config.sampling.temperature
        ),
        loss=functools.partial(registry.resolve("loss", config.loss.name), **loss_options),
        advantage=functools.partial(
            registry.resolve("advantage", config.advantage.name), **advantage_options
        ),
        learning_rate=functools.partial(
            learning_rate,
            peak=train.learning_rate,
            kind=train.lr_scheduler_type,
            warmup_steps=train.warmup_steps,
            max_steps=train.max_steps,
        ),
        betas=(train.adam_beta1, train.adam_beta2),
        weight_decay=train.weight_decay,
        max_grad_norm=train.max_grad_norm,
        max_tokens_per_microbatch=train.max_tokens_per_microbatch,
    )


def run_id_of(folder: Path, name: str) -> str:
    """The id of the run in `folder`, or a new one."""
    with suppress(OSError, ValueError, KeyError):
        return str(json.loads((folder / IDENTITY).read_text("utf-8"))["run_id"])
    return f"{name}-{uuid.uuid4().hex[:8]}"


def _locked(folder: Path) -> IO[bytes]:
    """The lock of a run folder, held while the file is open. Raises ConfigError when it is held."""
    lock = (folder / LOCK).open("ab")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise ConfigError(
            f"another trainer works in {folder}; stop it, or choose another --run.name"
        ) from None
    return lock


def _remove_new(folder: Path) -> None:
    """Take back what opening a new run wrote before it was refused."""
    for name in (IDENTITY, RESOLVED, LOCK):
        (folder / name).unlink(missing_ok=True)
    with suppress(OSError):  # the supervisor's logs may be there
        folder.rmdir()


def _num_rollouts(groups: Sequence[RolloutGroup]) -> int:
    return sum(len(group.rollouts) for group in groups)
