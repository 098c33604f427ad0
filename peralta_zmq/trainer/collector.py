"""From the wire to a batch: every group is admitted or dropped, journaled, and counted once.

Knows groups, the journal and the ledger; knows nothing of models.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from peralta_zmq import build, wire
from peralta_zmq.config import Config, files_given
from peralta_zmq.environments.curriculum import DifficultyPools
from peralta_zmq.errors import JournalError, WireError
from peralta_zmq.failpoints import failpoint
from peralta_zmq.learning.admission import (
    ADMITTED,
    OUTCOMES,
    Admission,
    AdmissionDecision,
    Ledger,
    staleness,
)
from peralta_zmq.observe.run_log import RunLog
from peralta_zmq.rollout import RolloutGroup
from peralta_zmq.trainer.evaluation import EvaluationCoordinator
from peralta_zmq.trainer.generator_registry import GeneratorRegistry
from peralta_zmq.trainer.journal import DROPPED, Journal
from peralta_zmq.trainer.status import StatusPublisher
from peralta_zmq.trainer.stop_signal import StopSignal

# What waits for the disk at most, so that outboxes stay short: one write for all that came in it.
COMMIT_GROUPS, COMMIT_SECONDS = 32, 0.5
# An announcement is of every live generator and goes to every one of them: between two that only
# say what came, so many seconds times the square of their number (at 100 of them 20 ms).
NEWS_SECONDS, LONGEST_NEWS_SECONDS = 2e-6, 1.0
QUIET_SECONDS = 20.0  # without a group, between two lines that say so
MAX_AHEAD = 1 << 20  # draws; one that claims to be further tells nobody where to begin
FIRST_PATIENCE, LONGEST_PATIENCE = 1.0, 60.0  # seconds until a full disk is tried again


@dataclass(frozen=True, slots=True)
class Note:
    """What the journal holds of a group that is in no step, and says of its problem."""

    sender: str
    sequence: int
    outcome: str
    min_sequence: int = 0
    problem: str = ""
    reward: float = 0.0  # mean of its rollouts
    sample_index: int = -1


class BatchCollector:
    """`collect` makes the batch of a step from what comes, `replay` from what came.

    `pending` are the groups admitted and in no step yet; `journaling` the seconds spent on the
    journal since the step began.
    """

    def __init__(
        self,
        config: Config,
        *,
        receiver: wire.RolloutReceiver,
        run_id: str,
        vocab_size: int,
        journal: Journal,
        roster: GeneratorRegistry,
        pools: DifficultyPools,
        evaluations: EvaluationCoordinator,
        books: RunLog,
        speaker: StatusPublisher,
        stop: StopSignal,
    ) -> None:
        self.pending: list[RolloutGroup] = []
        self._size = 0  # of what is pending; not counted anew for every group that comes
        self.journaling = 0.0
        self.journal, self.pools = journal, pools
        self.admission = Admission(
            0 if config.train.max_async_level == 0 else config.train.max_off_policy_steps,
            online_difficulty_filtering=config.curriculum.online_difficulty_filtering,
        )
        self._config, self._receiver = config, receiver
        self._run_id, self._vocab_size = run_id, vocab_size
        self._roster, self._evaluations = roster, evaluations
        self._books, self._speaker, self._stop = books, speaker, stop
        self._taken: dict[str, int] = {}  # sender -> what of it is in begun steps or dropped
        self._durable: dict[str, int] = {}  # sender -> what of it is on disk
        self._in_step = 0  # groups that the newest step took
        self._next_news = 0.0  # monotonic seconds, when it is worth while to say again what came
        self._next_sample_index = 0  # after the highest sample_index of a group that came

    @property
    def has_batch(self) -> bool:
        """Whether what is pending is enough for a step."""
        return self._size >= build.step_size(self._config)

    # What comes.

    def collect(
        self, step: int, meanwhile: Callable[[bool], None]
    ) -> tuple[list[RolloutGroup], int]:
        """Admitted groups enough for this step, and how many were already queued.

        What came is made durable all at once: soon, when nothing more comes, and while the step
        computes, up to the caller's `commit`. `meanwhile` is called between two groups, with
        whether nothing came for a while. No groups when we are asked to stop.
        """
        depth, queued, idle, self.journaling = 0, True, False, 0.0
        started = said = time.monotonic()
        while not self.has_batch:
            self._roster.hear(step=step)
            meanwhile(idle)
            if self._stop.asked:
                return [], depth
            received = self._receiver.receive(timeout=0.005)
            if received is None:
                self._commit_what_waited()
                self._say_news(step)
                queued = False
                received = self._receiver.receive(timeout=0.2)
            idle = received is None
            if received is None:
                self.commit()
                said = self._say_silence(started, said)
                continue
            depth += queued
            if self._take_in(*received, step=step) != "mismatched":
                started = said = time.monotonic()
        self.journal.begin_commit()
        groups = self.take()
        self.announce(step - 1, started_step=step)
        return groups, depth

    def take(self) -> list[RolloutGroup]:
        """What is pending goes into a step that begins."""
        groups, self.pending, self._size = self.pending, [], 0
        self._taken, self._in_step = self._settled(), len(groups)
        return groups

    def _take_in(self, group: RolloutGroup, frame: bytes, *, step: int) -> AdmissionDecision:
        failpoint("trainer.received")
        self._roster.meet(group.sender, step=step)
        verdict = self.admission.admit(group, step=step)
        if verdict in ADMITTED:
            self.journal.append(step, frame)
            self.pending.append(group)
            self._size += build.size_of(self._config, group)
            self._learn_of(group.problem_id, group.mean_reward, group.sample_index, verdict)
        elif verdict != "duplicate":
            self._drop(group, verdict, step=step)
        self._commit_what_waited()
        self._say_news(step)
        return verdict

    def _drop(self, group: RolloutGroup, verdict: str, *, step: int) -> None:
        """Note what became of a group that is in no step."""
        if verdict == "evaluated":
            self._evaluations.take(group)
        elif verdict != "filtered":
            self._books.event(
                "drop", sender=group.sender, sequence=group.sequence, outcome=verdict, step=step,
                staleness=staleness(group, step=step),
            )  # fmt: skip
        self._learn_of(group.problem_id, group.mean_reward, group.sample_index, verdict)
        self._taken[group.sender] = self._taken.get(group.sender, -1) + 1
        note = Note(
            group.sender, group.sequence, verdict, min_sequence=group.min_sequence,
            problem=group.problem_id, reward=group.mean_reward, sample_index=group.sample_index,
        )  # fmt: skip
        self.journal.append(step, json.dumps(asdict(note)).encode(), DROPPED)

    def _learn_of(
        self, problem_id: str, mean_reward: float, sample_index: int, outcome: str
    ) -> None:
        """What a group says of its problem, also when it is heard again from the journal."""
        if sample_index <= self._next_sample_index + MAX_AHEAD:
            self._next_sample_index = max(self._next_sample_index, sample_index + 1)
        if outcome in (*ADMITTED, "filtered"):
            returned = self.pools.update(problem_id, mean_reward)
            if returned:
                self._books.event("pool_refilled", problems=returned)
                self._books.note(
                    f"no problem is left between curriculum.hard_threshold and easy_threshold; "
                    f"all {returned} are drawn again"
                )

    def _commit_what_waited(self) -> None:
        journal = self.journal
        if journal.num_waiting >= COMMIT_GROUPS or journal.waited >= COMMIT_SECONDS:
            self.commit()

    def commit(self) -> None:
        """What was taken in is on disk; waits, saying so, while the disk refuses."""
        started, patience = time.monotonic(), FIRST_PATIENCE
        while True:
            try:
                if not self.journal.commit():
                    return
                break
            except JournalError as error:
                if self._stop.asked:
                    raise
                self._books.event("journal_failed", reason=str(error))
                self._books.note(f"{error}; make room for it. Training waits, nothing is lost")
            self._stop.pause(patience)
            patience = min(LONGEST_PATIENCE, 2 * patience)
        self._durable = self._settled()
        self.journaling += time.monotonic() - started

    # What came in an earlier session.

    def replay(self, step: int) -> bool:
        """Let what the journal holds for this step be pending; whether it is a batch.

        Raises JournalError when a group of it is in the checkpoint too, or when it is no batch and
        there are later steps: then groups of it are gone.
        """
        self.pending = self._taken_in_before(step)
        self._size = sum(build.size_of(self._config, each) for each in self.pending)
        self._durable = self._settled()
        if not self.has_batch:
            self.journal.check_last(step, "is missing or lacks groups")
        return self.has_batch

    def _taken_in_before(self, step: int) -> list[RolloutGroup]:
        """The groups that the journal holds for a step, settled again in the ledger."""
        groups: list[RolloutGroup] = []
        for kind, content in self.journal.read(step):
            known = self._read(kind, content, step=step)
            if isinstance(known, Note):
                fresh = self.admission.ledger.settle(
                    known.sender, known.sequence, known.outcome, min_sequence=known.min_sequence
                )
                self._learn_of(known.problem, known.reward, known.sample_index, known.outcome)
            else:
                groups.append(known)
                verdict = self.admission.admit(known, step=step)
                fresh = verdict in ADMITTED
                self._learn_of(known.problem_id, known.mean_reward, known.sample_index, verdict)
            if not fresh:
                raise JournalError(
                    f"the checkpoint and the journal of step {step} in {self._config.run_folder} "
                    "disagree: a group is in both; move the newer of the two away"
                )
        return groups

    def _read(self, kind: int, content: bytes, *, step: int) -> RolloutGroup | Note:
        """What one record says. Raises JournalError when that is nothing we know, or not ours."""
        try:
            if kind == DROPPED:
                return _note_of(content)
            group = wire.decode_group(content, vocab_size=self._vocab_size)
        except (WireError, ValueError, TypeError) as error:
            raise JournalError(
                f"{self.journal.file_of(step)} has a whole record that cannot be read ({error}); "
                "go on with the version and the model that wrote it, or move it and those of "
                f"later steps away to go on from step {step - 1}"
            ) from None
        if group.run_id != self._run_id:
            raise JournalError(
                f"{self.journal.file_of(step)} holds a group of run {group.run_id}, not of "
                f"{self._run_id}; move it and those of later steps away to go on from step "
                f"{step - 1}, or choose another --run.name"
            )
        return group

    def saved(self) -> dict[str, Any]:
        """As JSON, for a checkpoint, as of the step just taken."""
        ledger = self.admission.ledger
        assert ledger.total == sum(ledger.outcomes.values()), "every settled group has one outcome"
        return {
            "ledger": ledger.saved(),
            "duplicates": self.admission.duplicates,
            "pools": self.pools.saved(),
            "next_sample_index": self._next_sample_index,
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on from what `saved` gave."""
        self.admission.ledger = Ledger(saved["ledger"])
        self.admission.duplicates = saved["duplicates"]
        self.pools.restore(saved.get("pools", {}))
        self._next_sample_index = saved.get("next_sample_index", 0)
        self._taken = self._settled()

    # What is said of it.

    def accounting(self) -> dict[str, int]:
        """What became of every group that we heard of; `made` is the sum of what follows it."""
        ledger = self.admission.ledger
        told = self._roster.told_beyond({each: ledger.highest(each) for each in ledger.senders})
        made = max(ledger.made + told, self._books.made_before)
        outcomes = {name: ledger.outcomes[name] for name in OUTCOMES}
        return {
            "made": made,
            **outcomes,
            "in_flight": made - ledger.total,
            "duplicates": self.admission.duplicates,
        }

    def figures(self) -> dict[str, float]:
        """Counts of the run so far, for the metrics."""
        dropped = self.admission.ledger.outcomes
        return {
            "dropped/stale": dropped["stale"],
            "dropped/abandoned": dropped["abandoned"],
            "dropped/lost": dropped["lost"],
            "dropped/filtered": dropped["filtered"],
            "dropped/mismatched": dropped["mismatched"],
            "dropped/duplicate": self.admission.duplicates,
            "dropped/invalid": sum(self._receiver.refused.values()),
            **{
                f"curriculum/{pool}": count
                for pool, count in self.pools.sizes().items() if self.pools.active
            },
        }  # fmt: skip

    def announce(
        self, step: int, *, started_step: int, waiting: bool = False, done: bool = False
    ) -> None:
        """Say that so many steps are taken and begun, and what came and is safe."""
        ledger, live = self.admission.ledger, self._roster.live()
        self._speaker.say(
            step=step,
            started_step=started_step,
            min_step=max(0, step - self.admission.max_off_policy_steps),
            received={sender: ledger.settled(sender) for sender in live},
            durable={sender: self._durable.get(sender, -1) for sender in live},
            highest_received={sender: ledger.highest(sender) for sender in live},
            consumed={sender: self._taken.get(sender, -1) for sender in live},
            waiting=waiting,
            done=done,
            groups_in_step=self._in_step,
            next_sample_index=self._next_sample_index,
            excluded=self.pools.excluded,
        )

        self._next_news = time.monotonic() + min(
            LONGEST_NEWS_SECONDS, NEWS_SECONDS * len(live) ** 2
        )

    def _say_news(self, step: int) -> None:
        """Announce what came for this step, unless that was done just now."""
        if time.monotonic() >= self._next_news:
            self.announce(step - 1, started_step=step - 1, waiting=not self.has_batch)

    def _settled(self) -> dict[str, int]:
        ledger = self.admission.ledger
        return {sender: ledger.settled(sender) for sender in ledger.senders}

    def _say_silence(self, started: float, said: float) -> float:
        """Name the wait now and then; returns when it was last named."""
        now = time.monotonic()
        if now - said < QUIET_SECONDS:
            return said
        aside = sorted({each.rpartition("/")[0] for each in self.admission.flagged})
        self._books.note(silence_text(now - started, self._receiver.address, aside))
        return now


def _note_of(content: bytes) -> Note:
    note = Note(**json.loads(content))
    if note.outcome not in OUTCOMES:
        raise ValueError(f"outcome: {note.outcome!a:.40} is none")
    return note


def silence_text(seconds: float, address: str, aside: Sequence[str]) -> str:
    """What is missing, and how to get it; `aside` are generators whose groups do not count."""
    but = f", but for those of {', '.join(aside)}, which are set aside" if aside else ""
    start = f"Start a generator: bin/generator{files_given()}"
    return f"no rollouts for {seconds:.0f} s on {address}{but}. {start}"
