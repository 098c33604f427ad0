"""The trainer's loop: groups in, optimizer steps, weights out.

Knows the config and every leaf; knows nothing of the generator's loop. Killed at any moment it
goes on from the newest checkpoint and the journal, with nothing trained twice.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from types import FrameType
from typing import IO, Any

import torch

from peralta_zmq import parts, policy, registry, wire
from peralta_zmq.config import RESOLVED, Config, earlier_config, write_resolved
from peralta_zmq.curriculum.evaluation import Evaluation, figures
from peralta_zmq.curriculum.pools import MAX_POSITIONS, Pools
from peralta_zmq.engines.evaluate import evaluate
from peralta_zmq.environments import Environments, check_tokens, open_environments
from peralta_zmq.errors import ConfigError, GoneError, JournalError, StoreError
from peralta_zmq.failpoints import failpoint
from peralta_zmq.learning.admission import ADMITTED, OUTCOMES, Admission, Ledger, staleness
from peralta_zmq.learning.ranks import ALONE, OneRank
from peralta_zmq.observe.books import Books
from peralta_zmq.ranks import TrainerRanks, dismiss, enlist, follow, led
from peralta_zmq.recovery import checkpoint
from peralta_zmq.recovery.journal import DROPPED, Journal
from peralta_zmq.rollout import Answer, Problem, RolloutGroup
from peralta_zmq.stores.place import open_place
from peralta_zmq.stores.publisher import Keep, Publisher, Report
from peralta_zmq.stores.serve import Server, read_token
from peralta_zmq.stores.store import WeightStore
from peralta_zmq.stores.version import Version

SILENCE_SECONDS = 30.0  # a generator unheard for so long is gone
NO_SIGNAL_STEPS, NO_SIGNAL_SECONDS = 20, 20.0  # without signal, whichever first, before we say so
MAX_LIVE = 4096  # generators spoken to
SAME_NAME_SECONDS = 2.0  # a restarted generator needs longer to come back
COMMIT_GROUPS = 16  # that wait for the disk at most, so that outboxes stay short
FIRST_PATIENCE, LONGEST_PATIENCE = 1.0, 60.0  # seconds until a full disk is tried again
LAST_VERSION_SECONDS = 60.0  # that the end of a run waits for its last version to be out
STOP_SECONDS = 2.0  # and that a stop waits
WAITING_SECONDS = 30.0  # between two lines that say that the weights folder is gone
LOCK = "lock"
logger = logging.getLogger(__name__)


def run(config: Config) -> None:
    """Train to `train.max_steps`, from wherever an earlier start was ended.

    Raises ConfigError, TaskError, WireError, StoreError or JournalError before anything is
    written when a setting, a file, the port or a folder is at fault.
    """
    config, ranks = enlist(config)
    policy.keep_memory()
    if not isinstance(ranks, OneRank) and ranks.number > 0:
        return follow(config, ranks)
    with ExitStack() as stack:
        trainer = Trainer(config, stack, ranks)
        trainer.recover()
        trainer.evaluate_base()
        while trainer.unfinished:
            trainer.advance()
        trainer.finish()
        dismiss(ranks)


class Trainer:
    """One session of a run: what it holds open, and what it does with it."""

    def __init__(self, config: Config, stack: ExitStack, ranks: TrainerRanks = ALONE) -> None:
        self._config, self._folder, self._ranks = config, config.run_folder, ranks
        self._earlier = earlier_config(config, config.run_folder)  # of the session before
        self._boot = os.urandom(8)
        self._said = wire.Announcement("")  # last; `_speaking` guards it
        self._speaking = threading.Lock()
        self._begun = 0  # optimizer steps begun
        self._published: Report | None = None
        on_policy = config.train.max_async_level == 0
        self._admission = Admission(
            0 if on_policy else config.train.max_off_policy_steps,
            online_difficulty_filtering=config.curriculum.online_difficulty_filtering,
        )
        self._pending: list[RolloutGroup] = []  # admitted, not yet trained
        self._heard: dict[str, float] = {}  # sender -> when it was heard last
        self._reports: dict[str, wire.Counters] = {}  # by sender, the latest
        self._wanted = False  # a keyframe, by a generator that cannot follow
        self._taken: dict[str, int] = {}  # sender -> what of it is in begun steps or dropped
        self._in_step = 0  # groups that the newest step took
        self._next_draw = 0  # after the highest draw of a group that came
        self._evaluation: Evaluation | None = None  # by the generators, under way
        self._durable: dict[str, int] = {}  # sender -> what of it is on disk
        self._progress: dict[str, Any] = {"ledger": None, "duplicates": 0}
        self._saved_step = -1
        self._journaling = 0.0  # seconds of this step
        self._signal_at, self._signal_step, self._signal_said = time.monotonic(), 0, False
        self._stopping = False
        self._open_model(stack)
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
        self._roll_back()
        saved = checkpoint.restore(self._folder / "checkpoints", run_id=self._run_id)
        if saved is not None:
            self._restore(saved)
        start = self._learner.step
        self._replay()
        step = self._learner.step
        self._record_what_is_out()
        self._admission.abandoned = self._books.abandoned_weights(step)
        if step >= self._config.train.max_steps:
            self._books.note(f"run complete: {step} steps; delete {self._folder} to start anew")
        elif self._books.resuming:
            self._books.note(f"resumed: step={step} checkpoint={start} replayed={step - start}")
        self._return_some_problems()
        if self.unfinished:
            event = "resume" if self._books.resuming else "start"
            self._books.event(event, step=step, checkpoint=start, replayed=step - start)
        newest = self._store.newest()
        if newest is None or newest.step != step:
            self._publish()
            self._wait_for_version(LAST_VERSION_SECONDS)
        else:
            self._tell(newest)
        if self._books.resuming and not self._config.eval.skip_eval_on_resume:
            self._begin_evaluation()

    def evaluate_base(self) -> None:
        """Greedy accuracy of the untrained model, once per run."""
        if self._config.eval.eval_base_model and self._learner.step == 0:
            self._evaluate()

    def advance(self) -> None:
        """One optimizer step: collect, learn, publish, record, save."""
        started, self._journaling = time.monotonic(), 0.0
        groups, depth = self._collect()
        if self._stopping:
            return
        collected = time.monotonic()
        failpoint("trainer.collected")
        row = self._learn(groups)
        failpoint("trainer.stepped")
        # We heard nobody while we computed: that is no silence of theirs.
        busy = time.monotonic() - collected
        self._heard = {sender: at + busy for sender, at in self._heard.items()}
        publishing = self._publish()
        row |= {
            "queue/depth": depth,
            "time/wait_for_batch": collected - started,
            "time/journal": self._journaling,
            "time/publish": publishing,
            **self._newest_publication(),
        }
        self._record(groups, row, step_time=time.monotonic() - started)
        failpoint("trainer.recorded")
        if self._learner.step % self._config.eval.interval == 0:
            self._begin_evaluation()
        if self._learner.step % self._config.checkpoint.interval == 0:
            self._save()

    def finish(self) -> None:
        """Save; then close the run, or say how to resume it."""
        self._commit()
        self._save()
        complete = self._learner.step >= self._config.train.max_steps
        self._wait_for_version(LAST_VERSION_SECONDS if complete else STOP_SECONDS)
        if not complete:
            step = self._learner.step
            self._books.note(f"stopped after step {step}, saved; the same command resumes it")
            return
        self._leave_evaluation()
        self._announce(done=True)
        self._evaluate()
        newest = self._store.newest()
        folder = newest.folder if newest else self._store.folder
        self._books.close_run(folder, self._accounting())

    # Opening: everything that can be refused is tried before anything is written.

    def _open_model(self, stack: ExitStack) -> None:
        config = self._config
        max_steps, train = config.train.max_steps, open_environments(config, "train")
        self._held_out = open_environments(config, "eval", limit=config.eval.num_examples)
        stack.enter_context(closing(self._held_out))
        self._pools, self._train_set = _pools_of(config, train), train.digest
        if len(self._held_out.problems) > MAX_POSITIONS and config.eval.interval < max_steps:
            raise ConfigError(
                f"eval.num_examples {config.eval.num_examples} means "
                f"{len(self._held_out.problems)} held-out problems; generators take "
                f"{MAX_POSITIONS} at most"
            )
        self._model_folder = policy.model_folder(config.model.name)
        device = policy.choose_device(config.model.device)
        self._tokenizer = policy.load_tokenizer(self._model_folder)
        self._model = policy.load_model(self._model_folder, device=device, dtype=torch.float32)
        self._vocab_size = int(self._model.config.vocab_size)
        check_tokens([*train.problems, *self._held_out.problems], len(self._tokenizer))
        learner = parts.learner_of(config, self._model, self._ranks)
        self._learner = led(learner, self._ranks, self._model)
        self._engine = registry.resolve("engine", config.engine.name)(
            self._model, self._tokenizer, live=True,
            slots=config.engine.slots, max_model_len=config.engine.max_model_len,
        )  # fmt: skip

    def _open_sockets(self, stack: ExitStack) -> None:
        wires = self._config.wire
        self._run_id = parts.run_id_of(self._folder, self._config.run.name)
        address, folder = f"tcp://{wires.bind}:{wires.port}", self._config.keys_folder
        self._said = wire.Announcement(self._run_id, boot=self._boot)
        gate = stack.enter_context(closing(wire.Gate(folder))) if folder else None
        self._receiver = wire.RolloutReceiver(
            address, run_id=self._run_id, vocab_size=self._vocab_size, hwm=wires.hwm, gate=gate
        )
        stack.enter_context(closing(self._receiver))
        self._announcer = wire.Announcer(wire.next_port(address), gate=gate)
        stack.enter_context(closing(self._announcer))
        self._counters = wire.CounterReceiver(
            wire.next_port(address, 2), run_id=self._run_id, gate=gate
        )
        stack.enter_context(closing(self._counters))

    def _open_folders(self, stack: ExitStack) -> None:
        weights = self._config.weights
        if self._config.weights_address.startswith("http://"):
            raise ConfigError(
                f"weights.dir {weights.dir} is for generators; the trainer needs a folder, "
                "which weights.serve_port serves"
            )
        token = read_token(weights.token_file)
        self._store = WeightStore(open_place(self._config.weights_address))
        is_new = not (self._folder / parts.IDENTITY).exists()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(closing(_locked(self._folder)))
            if is_new:
                # Our identity first: a weights folder that we claim must never be a stranger's.
                parts.write_identity(self._folder, run_id=self._run_id, weights=None)
                write_resolved(self._config, self._folder)
            self._claim_weights(is_new=is_new)
        except OSError as error:
            raise ConfigError(
                f"run folder {self._folder} cannot be written ({error.strerror}); "
                "choose another with --run.dir"
            ) from None
        if weights.serve_port:
            server = Server(
                self._config.weights_folder,
                host=self._config.wire.bind, port=weights.serve_port, token=token,
            )  # fmt: skip
            stack.enter_context(closing(server))
        self._publisher = self._open_publisher()
        stack.callback(lambda: self._publisher.close(STOP_SECONDS if self._stopping else 60.0))
        self._journal = stack.enter_context(closing(Journal(self._folder / "journal")))
        name, max_steps = self._config.run.name, self._config.train.max_steps
        self._books = stack.enter_context(Books(self._folder, run=name, max_steps=max_steps))

    def _claim_weights(self, *, is_new: bool) -> None:
        """Make the weights folder ours; one that we have published to is waited for, not remade.

        The one inside the run's folder cannot be unmounted, and may be deleted to free a disk.
        """
        where, said = self._store.where, float("-inf")
        known = bool(self._config.weights.dir) and parts.weights_of(self._folder) == where
        while True:
            try:
                self._store.claim(self._run_id, known=known)
                break
            except GoneError as error:
                if time.monotonic() - said > WAITING_SECONDS:
                    said = time.monotonic()
                    logger.warning("%s. Waiting for it", error)
                self._pause(1.0)
            except StoreError:
                if is_new:
                    _remove_new(self._folder)
                raise
        if not known:
            parts.write_identity(self._folder, run_id=self._run_id, weights=where)

    def _open_publisher(self) -> Publisher:
        weights = self._config.weights
        return Publisher(
            self._store,
            companions=policy.companion_files(self._model_folder),
            dtype=policy.DTYPES[weights.dtype],
            keep=Keep(weights.keep_last, weights.keep_interval, weights.keep_seconds),
            keyframe_interval=weights.keyframe_interval,
            max_mbit_per_s=weights.max_mbit_per_s,
            tell=self._tell,
        )

    # One step.

    def _collect(self) -> tuple[list[RolloutGroup], int]:
        """Admitted groups enough for a step, and how many were already queued.

        What came is made durable whenever nothing more is waiting, all at once.
        """
        step, depth, queued = self._learner.step + 1, 0, True
        started = said = time.monotonic()
        while not self._has_batch:
            self._take_reports()
            self._hear()
            if self._stopping:
                return [], depth
            received = self._receiver.receive(timeout=0.005)
            if received is None:
                self._commit()
                self._announce(waiting=True)
                queued = False
                received = self._receiver.receive(timeout=0.2)
            if received is None:
                if self._wanted:  # perhaps nobody can work without it
                    self._publish()
                said = self._say_silence(started, said)
                continue
            depth += queued
            started = said = time.monotonic()
            self._take_in(*received, step=step)
        self._commit()
        groups, self._pending = self._pending, []
        self._taken, self._begun, self._in_step = dict(self._durable), step, len(groups)
        self._announce()
        return groups, depth

    @property
    def _has_batch(self) -> bool:
        return parts.is_full(self._config, self._pending)

    def _take_in(self, group: RolloutGroup, frame: bytes, *, step: int) -> None:
        failpoint("trainer.received")
        self._meet(group.sender)
        verdict = self._admission.admit(group, step=step)
        if verdict in ADMITTED:
            self._journal.append(step, frame)
            self._pending.append(group)
            self._learn_of(group.problem_id, group.mean_reward, group.draw, verdict)
        elif verdict != "duplicate":
            self._drop(group, verdict, step=step)
        if self._journal.num_waiting >= COMMIT_GROUPS:
            self._commit()
        self._announce(waiting=not self._has_batch)

    def _drop(self, group: RolloutGroup, verdict: str, *, step: int) -> None:
        """Note what became of a group that is in no step."""
        note = {"sender": group.sender, "sequence": group.sequence, "outcome": verdict}
        if verdict == "evaluated":
            self._take_answers(group)
        elif verdict != "filtered":
            self._books.event("drop", **note, step=step, staleness=staleness(group, step=step))
        self._learn_of(group.problem_id, group.mean_reward, group.draw, verdict)
        told = {"problem": group.problem_id, "reward": group.mean_reward, "draw": group.draw}
        self._taken[group.sender] = self._taken.get(group.sender, -1) + 1
        written = json.dumps({**note, "floor": group.floor, **told}).encode()
        self._journal.append(step, written, DROPPED)

    def _learn_of(self, problem_id: str, mean_reward: float, draw: int, outcome: str) -> None:
        """What a group says of its problem, also when it is heard again from the journal."""
        self._next_draw = max(self._next_draw, draw + 1)
        if outcome in (*ADMITTED, "filtered"):
            returned = self._pools.judge(problem_id, mean_reward)
            if returned:
                self._books.event("pool_refilled", problems=returned)
                self._books.note(
                    f"no problem is left between curriculum.hard_threshold and easy_threshold; "
                    f"all {returned} are drawn again"
                )

    def _hear(self) -> None:
        """Take in what generators report of themselves: who reports is alive."""
        before, self._reports = self._reports, dict(self._counters.receive())
        for sender, report in self._reports.items():
            earlier = before.get(sender)
            if earlier is not report:
                self._meet(sender, hello=report.hello)
                # Once for each time of want: one that cannot read the keyframe either waits on.
                asks = report.wants_keyframe and not (earlier and earlier.wants_keyframe)
                self._wanted = self._wanted or asks

    def _meet(self, sender: str, **facts: object) -> None:
        """We have heard of a start of a generator just now, perhaps for the first time."""
        if sender not in self._heard:
            name, _, boot = sender.rpartition("/")
            step = self._learner.step + 1
            self._books.event("join", generator=name, boot=boot, step=step, **facts)
            twins = [each for each in self._live(within=SAME_NAME_SECONDS)
                     if each.startswith(f"{name}/")]  # fmt: skip
            if twins:
                self._books.note(
                    f"two generators are called {name}; if both run, give one --generator.name"
                )
        self._heard[sender] = time.monotonic()

    def _commit(self) -> None:
        """What was taken in is on disk; waits, saying so, while the disk refuses."""
        started, patience = time.monotonic(), FIRST_PATIENCE
        while True:
            try:
                if not self._journal.commit():
                    return
                break
            except JournalError as error:
                if self._stopping:
                    raise
                self._books.event("journal_failed", reason=str(error))
                self._books.note(f"{error}; free some space. Training waits, nothing is lost")
            self._pause(patience)
            patience = min(LONGEST_PATIENCE, 2 * patience)
        self._durable = self._settled()
        self._journaling += time.monotonic() - started

    def _settled(self) -> dict[str, int]:
        ledger = self._admission.ledger
        return {sender: ledger.settled(sender) for sender in ledger.senders}

    def _pause(self, seconds: float) -> None:
        ends = time.monotonic() + seconds
        while time.monotonic() < ends and not self._stopping:
            time.sleep(0.1)

    def _learn(self, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        row = self._learner.learn(groups)
        if problem := self._learner.problem:
            self._books.event("skip", step=self._learner.step, reason=problem)
            self._books.note(f"step {self._learner.step} skipped: {problem}")
        self._progress = self._progress_now()
        return row

    # Going on after an earlier session.

    def _roll_back(self) -> None:
        """Set aside, once, what came after the step that was asked for."""
        step = self._config.checkpoint.resume_step
        aside = self._folder / f"rolled_back_to_{step:06d}"
        if step < 0:
            return
        if aside.exists():
            self._books.note(f"rolled back to step {step} already; to do it again, move {aside}")
            return
        begun = aside.with_name(f".tmp-{aside.name}")
        (begun / "checkpoints").mkdir(parents=True, exist_ok=True)
        (begun / "journal").mkdir(exist_ok=True)
        checkpoint.move_after(self._folder / "checkpoints", step, begun / "checkpoints")
        self._journal.move_after(step, begun / "journal")
        self._books.event("roll_back", step=step)
        os.rename(begun, aside)
        self._books.rewind(step)
        self._books.note(f"rolled back to step {step}; what came after it is in {aside}")

    def _restore(self, saved: checkpoint.Checkpoint) -> None:
        try:
            self._learner.restore(saved.step, saved.tensors)
        except ValueError as error:
            raise JournalError(
                f"checkpoint of step {saved.step} in {self._folder} is of another model ({error}); "
                "choose another --run.name, or the model it was made with"
            ) from None
        self._progress = saved.progress
        self._admission.ledger = Ledger(saved.progress["ledger"])
        self._pools.restore(saved.progress.get("pools", {}))
        self._next_draw = saved.progress.get("next_draw", 0)
        self._taken = self._settled()
        self._admission.duplicates = saved.progress["duplicates"]
        self._saved_step = saved.step

    def _replay(self) -> None:
        """Train again what the journal holds after the checkpoint; keep an unfinished rest."""
        earlier = self._earlier.train.max_steps  # the schedule under which it was trained
        self._learner.learning_rate = parts.schedule_of(self._earlier)
        while True:
            groups = self._taken_in_before(self._learner.step + 1)
            self._pending = groups
            if not self._has_batch or self._learner.step >= earlier or self._stopping:
                break
            self._taken, self._pending = self._settled(), []
            self._record(groups, self._learn(groups), step_time=0.0)
        self._durable, self._begun = self._settled(), self._learner.step
        self._learner.learning_rate = parts.schedule_of(self._config)
        if self._earlier != self._config:
            self._save()  # with the old schedule behind us
            write_resolved(self._config, self._folder)

    def _taken_in_before(self, step: int) -> list[RolloutGroup]:
        """The groups that the journal holds for a step, settled again in the ledger."""
        groups: list[RolloutGroup] = []
        for kind, content in self._journal.read(step):
            if kind == DROPPED:
                note = json.loads(content)
                told = (note.pop("problem", ""), note.pop("reward", 0.0), note.pop("draw", -1))
                fresh = self._admission.ledger.settle(**note)
                self._learn_of(*told, note["outcome"])
            else:
                group = wire.decode_group(content, vocab_size=self._vocab_size)
                groups.append(group)
                verdict = self._admission.admit(group, step=step)
                fresh = verdict in ADMITTED
                self._learn_of(group.problem_id, group.mean_reward, group.draw, verdict)
            if not fresh:
                raise JournalError(
                    f"the checkpoint of step {self._saved_step} and the journal of step {step} in "
                    f"{self._folder} disagree: a group is in both; move the newer of the two away"
                )
        return groups

    def _publish(self) -> float:
        """Hand this step's weights over to be published; returns the seconds it took.

        The last version of a run is whole, so that transformers loads it as it is; so is one that
        a generator asked for.
        """
        step = self._learner.step
        whole = self._wanted or step >= self._config.train.max_steps
        self._wanted = False
        return self._publisher.publish(step, policy.weights_of(self._model), whole=whole)

    def _newest_publication(self) -> dict[str, float]:
        """What the newest finished publication cost; it may be of an earlier step."""
        if (report := self._published) is None or report.version is None:
            return {}
        return {
            "weights/version": report.version.number,
            "weights/bytes": report.version.size,
            "weights/stall_seconds": report.stall_seconds,
            "weights/encode_seconds": report.encode_seconds,
            "weights/write_seconds": report.write_seconds,
        }

    def _wait_for_version(self, seconds: float) -> None:
        """Let what was handed over be published; an unfinished one is left behind."""
        if not self._publisher.wait(seconds):
            self._books.note(f"the last version is not published after {seconds:.0f} s")
        self._take_reports()

    def _take_reports(self) -> None:
        """Tell what was published since, and what was not."""
        for report in self._publisher.take_reports():
            if report.version is None:  # train on: generators serve the version they have
                self._books.event("publish_failed", step=report.step, reason=report.reason)
                self._books.note(report.reason)
                continue
            self._published = report
            self._record_version(report.version)

    def _record_version(self, version: Version) -> None:
        self._books.event(
            "publish", step=version.step, number=version.number, wid=version.wid,
            kind=version.kind, bytes=version.size,
        )  # fmt: skip

    def _record_what_is_out(self) -> None:
        """Record what an earlier session published in the moment before it was killed."""
        try:
            found = self._store.versions()
        except StoreError as error:
            self._books.note(str(error))
            return
        recorded = self._books.published_weights()
        for version in found:
            if version.wid not in recorded:
                self._record_version(version)

    def _announce(self, *, waiting: bool = False, done: bool = False) -> None:
        """Say how far we are; it is repeated every second until there is something newer."""
        ledger, live = self._admission.ledger, self._live()
        with self._speaking:
            self._said = wire.Announcement(
                run_id=self._run_id,
                boot=self._boot,
                step=self._learner.step,
                begun=self._begun,
                version=self._said.version,
                wid=self._said.wid,
                min_step=max(0, self._learner.step - self._admission.max_off_policy_steps),
                recv={sender: ledger.settled(sender) for sender in live},
                durable={sender: self._durable.get(sender, -1) for sender in live},
                seen={sender: ledger.seen(sender) for sender in live},
                taken={sender: self._taken.get(sender, -1) for sender in live},
                waiting=waiting,
                done=done,
                in_step=self._in_step,
                next_draw=self._next_draw,
                train_set=self._train_set,
                resting=self._pools.resting,
                evaluate=self._evaluation.step if self._evaluation else -1,
                answered=self._evaluation.answered if self._evaluation else b"",
            )
            self._announcer.announce(self._said)

    def _tell(self, version: Version) -> None:
        """Announce a version as soon as it is out, also during a step; any thread may call."""
        with self._speaking:
            self._said = replace(self._said, version=version.number, wid=version.wid)
            self._announcer.announce(self._said)

    def _record(
        self, groups: Sequence[RolloutGroup], row: dict[str, float], *, step_time: float
    ) -> None:
        dropped = self._admission.ledger.outcomes
        full = {
            "step": self._learner.step,
            "time": time.time(),
            **row,
            "dropped/stale": dropped["stale"],
            "dropped/abandoned": dropped["abandoned"],
            "dropped/lost": dropped["lost"],
            "dropped/filtered": dropped["filtered"],
            "dropped/duplicate": self._admission.duplicates,
            "dropped/invalid": sum(self._receiver.refused.values()),
            **self._pool_sizes(),
            "generators": len(self._live()),
            **self._fares(),
            "step_time": step_time,
        }
        if self._books.step(full, self._sample_of(groups[0])):
            self._warn_without_signal(groups, row["frac_reward_zero_std"])

    def _fares(self) -> dict[str, float]:
        """How each generator that is alive fares, as it reported last."""
        return {
            f"gen/{report.generator_id}/{name}": getattr(report, name)
            for sender in self._live() if (report := self._reports.get(sender))
            for name in ("tokens_per_s", "blocked_frac", "reload_s", "step", "unjudged")
        }  # fmt: skip

    def _save(self) -> None:
        """Write a checkpoint of the newest step; a disk that refuses costs only a longer replay."""
        if self._learner.step == self._saved_step:
            return
        folder, step, rules = (
            self._folder / "checkpoints",
            self._learner.step,
            self._config.checkpoint,
        )
        snapshot = checkpoint.Checkpoint(step, self._learner.state(), self._progress)
        try:
            checkpoint.save(
                folder, snapshot, run_id=self._run_id,
                keep_last=rules.keep_last, keep_interval=rules.keep_interval,
            )  # fmt: skip
        except JournalError as error:
            self._books.event("checkpoint_failed", step=step, reason=str(error))
            self._books.note(f"{error}; the journal still holds everything")
            return
        self._saved_step = step
        if not rules.keep_journal:
            self._journal.prune(checkpoint.oldest_step(folder) + 1)

    def _progress_now(self) -> dict[str, Any]:
        """What a checkpoint says beside the tensors, as of the step just taken."""
        ledger = self._admission.ledger
        assert ledger.total == sum(ledger.outcomes.values()), "every settled group has one outcome"
        return {
            "ledger": ledger.saved(),
            "duplicates": self._admission.duplicates,
            "pools": self._pools.saved(),
            "next_draw": self._next_draw,
        }

    def _accounting(self) -> dict[str, int]:
        """What became of every group that we heard of; `made` is the sum of what follows it."""
        self._hear()
        ledger = self._admission.ledger
        told = sum(  # beyond what came
            max(0, report.made - ledger.seen(sender) - 1)
            for sender, report in self._reports.items()
        )
        made = ledger.made + told
        outcomes = {name: ledger.outcomes[name] for name in OUTCOMES}
        return {
            "made": made,
            **outcomes,
            "in_flight": made - ledger.total,
            "duplicates": self._admission.duplicates,
        }

    # What a person sees.

    def _evaluate(self) -> None:
        """Accuracy on the held-out problems, once for each step, by the trainer itself."""
        step, config = self._learner.step, self._config
        if not self._books.has_evaluation(step):
            answers = evaluate(
                self._engine, self._tokenizer, self._held_out.problems, self._held_out.reward,
                sampling=parts.eval_sampling_of(config, seed=config.run.seed),
                num_generations=config.eval.rollouts_per_example,
            )  # fmt: skip
            self._record_evaluation(step, answers, [step])

    def _begin_evaluation(self) -> None:
        """Let the generators answer the held-out problems while training goes on.

        The untrained and the final model are the trainer's own to evaluate.
        """
        step = self._learner.step
        if 0 < step < self._config.train.max_steps and not self._books.has_evaluation(step):
            self._leave_evaluation()
            size = self._config.eval.rollouts_per_example
            self._evaluation = Evaluation(step, self._held_out.problems, rollouts_per_example=size)

    def _take_answers(self, group: RolloutGroup) -> None:
        """What a generator says to one held-out problem; the last one ends the evaluation."""
        under_way = self._evaluation
        if under_way is None or group.evaluates != under_way.step:
            return
        if not under_way.expects(group.problem_id, len(group.rollouts)):
            return
        answers = [
            (policy.text_of(self._tokenizer, each.token_ids[each.loss_mask]), each.reward)
            for each in group.rollouts
        ]
        under_way.take(group.problem_id, answers, policy_step=group.policy_step)
        if under_way.complete:
            self._evaluation = None
            self._record_evaluation(under_way.step, under_way.answers(), under_way.policy_steps)

    def _leave_evaluation(self) -> None:
        """Give up an evaluation that is not complete, and say so."""
        if (left := self._evaluation) is not None:
            self._evaluation = None
            self._books.note(
                f"evaluation of step {left.step} given up: {left.num_answered} of "
                f"{len(self._held_out.problems)} examples were answered in time"
            )

    def _record_evaluation(
        self, step: int, answers: Sequence[tuple[Problem, list[Answer]]], policy_steps: list[int]
    ) -> None:
        rewards: dict[str, list[list[float]]] = {}
        for problem, said in answers:
            rewards.setdefault(problem.task, []).append([each.reward for each in said])
        self._books.evaluation(
            step, [said[0] for _, said in answers],
            accuracy=fmean(each.reward for _, said in answers for each in said),
            figures=figures(rewards), policy_steps=(min(policy_steps), max(policy_steps)),
        )  # fmt: skip

    def _return_some_problems(self) -> None:
        """At a start, shares of the easy and hard problems are drawn again."""
        chosen = self._config.curriculum
        returned = self._pools.return_some(
            easy_fraction=chosen.easy_fraction, hard_fraction=chosen.hard_fraction,
            seed=self._config.run.seed + self._learner.step,
        )  # fmt: skip
        if returned:
            self._books.event("pool_returned", problems=returned)

    def _pool_sizes(self) -> dict[str, float]:
        if not self._pools.active:
            return {}
        return {f"curriculum/{pool}": count for pool, count in self._pools.sizes().items()}

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
        """Say once when no step has had a signal for 20 steps or 20 seconds."""
        if share < 1.0:
            self._signal_at, self._signal_step = time.monotonic(), self._learner.step
            return
        steps = self._learner.step - self._signal_step
        long = steps > 1 and time.monotonic() - self._signal_at > NO_SIGNAL_SECONDS
        if self._signal_said or not (steps >= NO_SIGNAL_STEPS or long):
            return
        self._signal_said = True
        firsts = [group.rollouts[0] for group in groups[:3]]
        samples = "; ".join(
            f"{policy.text_of(self._tokenizer, r.token_ids[r.loss_mask])!r} -> {r.reward:g}"
            for r in firsts
        )
        self._books.note(
            f"no learning signal: 100% of groups have equal rewards for {steps} steps; "
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

    def _live(self, *, within: float = SILENCE_SECONDS) -> list[str]:
        now = time.monotonic()
        self._heard = {
            sender: at for sender, at in self._heard.items() if now - at < SILENCE_SECONDS
        }
        return [sender for sender, at in self._heard.items() if now - at < within][:MAX_LIVE]

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """First signal: finish the step and save. Second: leave now."""
        signal.signal(number, signal.SIG_DFL)
        self._stopping = True


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
    for name in (parts.IDENTITY, RESOLVED, LOCK):
        (folder / name).unlink(missing_ok=True)
    with suppress(OSError):  # the supervisor's logs may be there
        folder.rmdir()


def _pools_of(config: Config, train: Environments) -> Pools:
    """Raises ConfigError when there are more problems than an announcement can name."""
    chosen = config.curriculum
    pools = Pools(
        [each.id for each in train.problems],
        easy_threshold=chosen.easy_threshold, hard_threshold=chosen.hard_threshold,
    )  # fmt: skip
    if pools.active and len(train.problems) > MAX_POSITIONS:
        raise ConfigError(
            f"curriculum.easy_threshold and hard_threshold work with {MAX_POSITIONS} problems at "
            f"most, and there are {len(train.problems)}; leave them out"
        )
    return pools
