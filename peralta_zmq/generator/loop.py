"""The generator loop: sample completions, score them, send them to the trainer.

A group is all rollouts (scored completions) of one problem, sent as one message; a group is in
flight while the engine samples it. A weight version is one published set of weights; its policy
step is the number of training steps that produced it. The outbox keeps groups that the trainer has
not stored yet. The trainer announces its progress to all generators about once per second. A
restarted generator continues from the weights and these announcements alone.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing

from peralta_zmq import build, registry, wire
from peralta_zmq.build import dry_run
from peralta_zmq.config import Config
from peralta_zmq.engines import GroupSampler
from peralta_zmq.environments.curriculum import is_in_bitmap
from peralta_zmq.environments.dataset import Environments
from peralta_zmq.environments.held_out import examples_for
from peralta_zmq.errors import (
    EngineError,
    EngineProcessError,
    RewardError,
    RewardUnavailableError,
    TaskError,
)
from peralta_zmq.generator.pacing import SamplingPacer
from peralta_zmq.generator.samples import sample_problems
from peralta_zmq.generator.scoring import SampledGroup, ScoringQueue, make_group
from peralta_zmq.generator.trainer_connection import TrainerConnection
from peralta_zmq.generator.weight_sync import ObsoleteGroupsError, ServedWeights
from peralta_zmq.rollout import Completion, GroupSampling, Problem, Sampling

IDLE_SECONDS = 0.002  # maximum wait for an announcement while the engine has no group
MAX_REWARD_FAILURES = 16  # consecutive groups that cannot be scored before the generator stops
MAX_ENGINE_FAILURES = 3  # of the engine's process without a group in between
logger = logging.getLogger(__name__)


def sampling_seed(run_seed: int, sender: str, purpose: str) -> int:
    """A seed that differs for each run, purpose and start of a generator (sender)."""
    return zlib.crc32(f"{run_seed}/{sender}/{purpose}".encode())


class Generator:
    """Samples, scores and sends groups for the problems of a run, until the run ends."""

    def __init__(
        self,
        config: Config,
        engine: registry.Engine,
        reader: dry_run.PromptReader,
        environments: Environments,
        weights: ServedWeights,
        connection: TrainerConnection,
    ) -> None:
        self._config, self._environments = config, environments
        self._engine, self._reader = engine, reader
        self._weights, self._connection = weights, connection
        self._pacer = SamplingPacer(
            config.groups_per_step,
            config.train.max_async_level,
            name=connection.name,
            steps_per_version=config.weights.interval,
            oversampling_factor=config.curriculum.oversampling_factor,
            follow_step_size=config.train.token_batch_size is not None
            or len({*config.group_sizes.values()}) > 1,
        )
        self._samples = self._sample_problems()
        # Samples the training groups; an evaluation or a failed engine interrupts them.
        self._training = self._sampler(environments, config.sampling.num_generations)
        # Samples the groups of an evaluation; replaced in each.
        self._evaluation = self._sampler(environments, config.eval.rollouts_per_example)
        self._scoring = ScoringQueue()  # groups whose completions have ended
        self._evaluated_step = -1  # step of the newest evaluation that this generator took part in
        self._num_failures = 0  # consecutive groups that could not be scored
        self._num_engine_failures = 0  # of the engine's process since the last finished group

    def run(self) -> None:
        """Make training groups and announced evaluations until the run is complete."""
        while not self._connection.is_run_complete:
            try:
                if self._must_evaluate():
                    self._make_evaluation_groups()
                else:
                    self._make_training_groups()
            except ObsoleteGroupsError as error:
                self._training.drop()
                logger.info("dropped groups in flight: %s", error)
            except EngineError as error:
                self._replace_weights(error)
        self._connection.send_status(last=True)
        logger.info("run complete: groups=%d", self._connection.outbox.next_sequence)

    def _make_training_groups(self) -> None:
        """Make groups until the run is complete or an evaluation must begin.

        Groups that the previous call left in flight are resumed, with the newest weights.
        """
        config, outbox = self._config, self._connection.outbox
        self._refresh_weights()
        self._drop_stale()
        purpose = f"{self._engine.step}/{outbox.next_sequence}"
        seed = sampling_seed(config.run.seed, outbox.sender, purpose)
        self._make_groups(
            self._training,
            self._training_problems(),
            self._environments,
            sampling=build.make_sampling(config, seed=seed),
            overrides=build.sampling_overrides(config, seed=seed),
            between_steps=self._between_steps,
        )

    def _sampler(self, environments: Environments, num_generations: int) -> GroupSampler:
        return GroupSampler(
            self._engine,
            self._reader.tokenizer,
            num_generations=num_generations,
            replies=environments,
            max_turns=self._config.task.max_turns,
        )

    def _make_groups(
        self,
        sampler: GroupSampler,
        problems: Iterator[Problem | None],
        environments: Environments,
        *,
        sampling: Sampling,
        overrides: Mapping[str, GroupSampling],
        between_steps: Callable[[], None],
        evaluation_step: int = -1,
    ) -> None:
        """Sample completions for each problem, score them and send them as a group.

        The engine samples on while completions are scored. `problems` yields None while no group
        may be started. The engine calls `between_steps` between two decode steps (tokens).
        `evaluation_step` is the policy step that the groups evaluate; -1 = groups for training.
        """

        def send_between_steps() -> None:
            between_steps()
            self._send_scored()
            if self._connection.is_run_complete:
                self._engine.cancel()

        def score(problem: Problem, completions: Sequence[Completion]) -> None:
            self._num_engine_failures = 0
            scores = environments.score(problem, completions)
            self._scoring.add(SampledGroup(problem, completions, scores, evaluation_step))
            self._send_scored()

        sampler.sample(
            problems,
            score,
            sampling=sampling,
            overrides=overrides,
            between_steps=send_between_steps,
        )
        while self._scoring and not self._connection.is_run_complete:
            self._connection.exchange(timeout=IDLE_SECONDS)
            self._send_scored()

    def _send_scored(self) -> None:
        """Send the scored groups, in the order in which their completions ended.

        A group is dropped if a reward failed. Raises RewardError after MAX_REWARD_FAILURES
        consecutive groups that could not be scored, except those for which the reward was
        unavailable.
        """
        while (group := self._scoring.next_scored()) is not None:
            try:
                rollouts = group.rollouts()
            except RewardError as error:
                self._num_failures += not isinstance(error, RewardUnavailableError)
                if self._num_failures == MAX_REWARD_FAILURES:
                    raise
                self._connection.num_unscored += 1
                logger.warning("dropped an unscored group: %s", error)
                continue
            self._num_failures = 0
            self._connection.send(make_group(group, rollouts, self._weights, self._connection))
            if self._connection.is_run_complete:
                return

    # Which problem is sampled next, and when.

    def _training_problems(self) -> Iterator[Problem | None]:
        """Yield a problem, or None while no group may start; ends for an evaluation."""
        while not self._connection.is_run_complete:
            if self._may_start_group() and (problem := next(self._samples)):
                self._pacer.record_start()
                yield problem
            elif self._must_evaluate():
                if self._config.eval.cancel_inflight_rollouts_on_eval:
                    self._engine.cancel()
                return
            else:
                self._wait(self._training)
                yield None

    def _sample_problems(self) -> Iterator[Problem | None]:
        """The training problems of this generator in one run; None while there is none."""
        return sample_problems(
            self._config,
            self._environments,
            self._connection.leases,
            announcement=lambda: self._connection.announcement,
        )

    def _may_start_group(self) -> bool:
        """Apply newer weights; return whether a training group may be started now."""
        self._refresh_weights()
        self._send_scored()
        announcement = self._connection.exchange()
        if self._connection.is_run_complete or self._weights.is_draining or self._must_evaluate():
            return False
        outbox, num_unsent = self._connection.outbox, self._num_unsent
        return (
            outbox.has_room(num_unsent)
            and self._environments.has_room
            and self._pacer.may_start(
                announcement,
                step=self._engine.step,
                num_pending=outbox.num_pending + num_unsent,  # not trained or dropped yet
                num_unreceived=outbox.num_unreceived + num_unsent,  # not received yet
            )
        )

    @property
    def _num_unsent(self) -> int:
        """Number of groups that are being sampled or scored, or are interrupted."""
        num_sampled = self._training.num_in_flight + self._evaluation.num_in_flight
        return num_sampled + len(self._scoring)

    def _drop_stale(self) -> None:
        """Drop the interrupted groups that the trainer would drop as stale."""
        announcement = self._connection.announcement or wire.Announcement("")
        newest_step = max(announcement.started_step, self._engine.step)
        oldest_step = newest_step - self._config.train.staleness_limit
        if num_dropped := self._training.drop(older_than=oldest_step):
            self._connection.num_aborted += num_dropped
            logger.info("dropped interrupted groups: count=%d reason=stale", num_dropped)

    def _between_steps(self) -> None:
        """Apply newer weights and send due statuses while the engine samples."""
        self._refresh_weights()
        self._connection.num_resumed = self._training.num_resumed
        self._connection.send_status_when_due()

    def _wait(self, sampler: GroupSampler) -> None:
        """Wait for IDLE_SECONDS or a new announcement, but not while a group is in flight.

        `sampler` is the one in use. Time in which groups are scored is not idle: the trainer waits
        for their rewards.
        """
        if not sampler.num_in_flight:
            started = time.monotonic()
            self._connection.exchange(timeout=IDLE_SECONDS)
            if not self._scoring:
                self._connection.throughput.idle_seconds += time.monotonic() - started

    # Changes of weights.

    def _refresh_weights(self) -> None:
        """Apply newer weights if there are any.

        Raises ObsoleteGroupsError if the groups in flight are useless, because the new weights
        belong to another run, follow a roll-back, or are older ones after a rejection.
        """
        previous = self._weights.version
        try:
            self._weights.refresh(self._engine, num_in_flight=self._training.num_in_flight)
        except ObsoleteGroupsError:
            version = self._weights.version
            if version.run_id != previous.run_id:
                self._connection.start_run()
                self._samples = self._sample_problems()
            if version.run_id != previous.run_id or version.number > previous.number:
                # A roll-back is published with a higher version number: repeat its evaluations.
                # A rejection leads to a lower version number: do not repeat them.
                self._evaluated_step = -1
                self._scoring.discard()
            raise

    def _replace_weights(self, error: EngineError) -> None:
        """Wait until the engine has weights again.

        Weights with non-finite logits are quarantined, and the groups in flight dropped. An engine
        whose process failed gets the newest weights again, and then resumes the training groups,
        except those of an earlier failure: they may be the cause. All are dropped if it fails again
        without a group in between; the MAX_ENGINE_FAILURES-th time, this raises `error`.
        """
        number = self._weights.version.number
        num_dropped = self._evaluation.drop()
        if isinstance(error, EngineProcessError):
            self._num_engine_failures += 1
            if self._num_engine_failures == MAX_ENGINE_FAILURES:
                raise error
            # The newest weights may be newer than those of the groups.
            between_groups = self._config.weights.update == "between_groups"
            if self._num_engine_failures > 1 or between_groups:
                num_dropped += self._training.drop()
            num_dropped += self._training.drop_failed()
            self._connection.num_aborted += num_dropped
            self._evaluated_step = -1  # an interrupted evaluation goes on
            self._weights.request_again()
        else:
            num_dropped += self._training.drop()
            self._weights.reject()
        logger.warning("engine failed: version=%d dropped=%d reason=%s", number, num_dropped, error)
        while not self._connection.is_run_complete and not self._weights.are_applied:
            self._connection.exchange(timeout=0.2)
            try:
                self._refresh_weights()
            except ObsoleteGroupsError:
                self._training.drop()
            except EngineProcessError as again:
                return self._replace_weights(again)

    # Evaluation: the generators answer held-out problems with the weights of one policy step.

    def _must_evaluate(self) -> bool:
        """Whether this generator has to take part in an announced evaluation now."""
        announcement = self._connection.announcement
        return (
            announcement is not None
            and self._evaluated_step < announcement.evaluation_step <= self._engine.step
        )

    def _make_evaluation_groups(self) -> None:
        """Make groups for the announced evaluation; newer weights wait for its end."""
        config, announcement = self._config, self._connection.announcement
        assert announcement is not None  # because `_must_evaluate` was true
        self._evaluated_step = step = announcement.evaluation_step
        sender = self._connection.outbox.sender
        seed = sampling_seed(config.run.seed, sender, f"evaluation {step}")
        try:
            held_out = build.open_environments(config, "eval", limit=config.eval.num_examples)
        except TaskError as error:
            logger.warning("evaluation of step %d skipped: %s", step, error)
            return
        held_out, findings = dry_run.check_prompts(config, held_out, "eval", self._reader)
        if fatal := next((finding for finding in findings if finding.is_fatal), None):
            logger.warning("evaluation of step %d skipped: %s", step, fatal.text)
            return held_out.close()
        self._evaluation = self._sampler(held_out, config.eval.rollouts_per_example)
        with closing(held_out):
            self._make_groups(
                self._evaluation,
                self._held_out_problems(step, held_out),
                held_out,
                sampling=build.make_eval_sampling(config, seed=seed),
                overrides=build.eval_sampling_overrides(config, seed=seed),
                between_steps=self._connection.send_status_when_due,
                evaluation_step=step,
            )

    def _held_out_problems(self, step: int, held_out: Environments) -> Iterator[Problem | None]:
        """Yield the unanswered held-out problems, first the share of this generator.

        Yields None while the outbox or a queue of unscored completions is full. Ends when the
        trainer ends the evaluation.
        """
        connection, problems = self._connection, held_out.problems
        index, count = self._config.generator.index, self._config.generator.count
        announcement, sender = connection.announcement, connection.outbox.sender
        # Generators number themselves by the order of the live senders, which all of them receive.
        senders = sorted(announcement.received) if announcement is not None else []
        if sender in senders:
            index, count = senders.index(sender), len(senders)

        def is_answered(position: int) -> bool:
            announcement = connection.exchange()
            return announcement is not None and is_in_bitmap(announcement.answered, position)

        def is_over() -> bool:
            announcement = connection.exchange()
            ended = announcement is None or announcement.evaluation_step != step
            return connection.is_run_complete or ended

        for position in examples_for(len(problems), index=index, count=count, answered=is_answered):
            self._send_scored()
            while not is_over() and not (
                connection.outbox.has_room(self._evaluation.num_in_flight + len(self._scoring))
                and held_out.has_room
            ):
                self._wait(self._evaluation)
                self._send_scored()
                yield None
            if is_over():
                return
            yield problems[position]
