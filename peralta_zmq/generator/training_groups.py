"""Training groups: which problem is sampled next, and when."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Collection

from peralta_zmq import build, wire
from peralta_zmq.config import Config
from peralta_zmq.engines import Group, Sampler
from peralta_zmq.environments.dataset import Environments
from peralta_zmq.generator.pacing import SamplingPacer
from peralta_zmq.generator.samples import sample_problems
from peralta_zmq.generator.scoring import SampledGroup, ScoringQueue
from peralta_zmq.generator.trainer_connection import TrainerConnection
from peralta_zmq.generator.weight_sync import ServedWeights

logger = logging.getLogger(__name__)


def sampling_seed(run_seed: int, sender: str, purpose: str) -> int:
    """A seed that differs for each run, purpose and start of a generator (sender)."""
    return zlib.crc32(f"{run_seed}/{sender}/{purpose}".encode())


class TrainingGroups:
    """Starts groups for training, as far as the trainer, the outbox and the rewards have room."""

    def __init__(
        self,
        config: Config,
        environments: Environments,
        weights: ServedWeights,
        link: TrainerConnection,
        rewards: ScoringQueue,
    ) -> None:
        self._config, self._environments = config, environments
        self._weights, self._link, self._rewards = weights, link, rewards
        self._pacer = SamplingPacer(
            config.groups_per_step,
            config.train.max_async_level,
            name=link.name,
            steps_per_version=config.weights.interval,
            oversampling_factor=config.curriculum.oversampling_factor,
            follow_step_size=config.train.token_batch_size is not None
            or len({*config.group_sizes.values()}) > 1,
        )
        self.groups: list[Group] = []  # in flight, or interrupted
        self.is_paused = False  # start no further group, because an evaluation is due
        self._failed: list[Group] = []  # in flight at the last failure of the engine
        self.start_run()

    def start_run(self) -> None:
        """Begin with the problems and random numbers of a run."""
        config, link = self._config, self._link
        self._samples = sample_problems(
            config, self._environments, link.leases, announcement=lambda: link.announcement
        )
        seed = sampling_seed(config.run.seed, link.outbox.sender, "training")
        self._sampling_of = build.group_sampling(config, seed=seed)

    def submit_due(self, sampler: Sampler) -> None:
        """Resume interrupted groups, and start as many others as may be started now."""
        if self.is_paused:
            return
        if any(group.is_interrupted for group in self.groups):
            self._drop_stale(sampler)
            sampler.resume(self.groups)
        while self._may_start(sampler) and (problem := next(self._samples)) is not None:
            group = sampler.start(problem, *self._sampling_of(problem), replies=self._environments)
            self.groups.append(group)
            self._pacer.record_start()

    def take(self, ended: Collection[Group]) -> list[SampledGroup]:
        """Remove the training groups among those that have ended, and begin to score them."""
        own = [group for group in ended if group in self.groups]
        self.groups = [group for group in self.groups if group not in own]
        return [
            SampledGroup(
                group.problem,
                group.completions,
                self._environments.score(group.problem, group.completions),
                None,
            )
            for group in own
        ]

    def drop(self, sampler: Sampler) -> int:
        """Drop all groups in flight; returns their number."""
        return self._drop(self.groups, sampler)

    def drop_failed(self, sampler: Sampler) -> int:
        """Drop the groups that were in flight at the last call, too; returns their number.

        To be called after each failure of the engine; such groups may be its cause.
        """
        num_dropped = self._drop([each for each in self.groups if each in self._failed], sampler)
        self._failed = list(self.groups)
        return num_dropped

    def _may_start(self, sampler: Sampler) -> bool:
        """Whether another group may be started now."""
        outbox = self._link.outbox
        num_unsent = len(self.groups) + len(self._rewards)
        return (
            sampler.has_room
            and not self._weights.is_draining
            and outbox.has_room(num_unsent)
            and self._environments.has_room
            and self._pacer.may_start(
                self._link.announcement,
                step=self._weights.version.step,
                num_pending=outbox.num_pending + num_unsent,  # not trained or dropped yet
                num_unreceived=outbox.num_unreceived + num_unsent,  # not received yet
            )
        )

    def _drop_stale(self, sampler: Sampler) -> None:
        """Drop the interrupted groups that the trainer would drop as stale."""
        announcement = self._link.announcement or wire.Announcement("")
        newest_step = max(announcement.started_step, self._weights.version.step)
        oldest_step = newest_step - self._config.train.staleness_limit
        stale = [group for group in self.groups if group.has_older_token(oldest_step)]
        if num_dropped := self._drop(stale, sampler):
            self._link.num_aborted += num_dropped
            logger.info("dropped interrupted groups: count=%d reason=stale", num_dropped)

    def _drop(self, groups: list[Group], sampler: Sampler) -> int:
        sampler.drop(groups)
        self.groups = [group for group in self.groups if group not in groups]
        return len(groups)
